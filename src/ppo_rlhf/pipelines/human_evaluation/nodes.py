"""Nodes of the pipeline `human_evaluation`."""

import json
import logging
from collections import defaultdict
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import mlflow
import pandas as pd

from ppo_rlhf.checkpoints.model_card import with_people
from ppo_rlhf.core.errors import DataError
from ppo_rlhf.datasets.pair_tables import answered_pairs
from ppo_rlhf.datasets.review_queues import queues_here
from ppo_rlhf.evaluation import people_win_rate
from ppo_rlhf.evaluation.people_win_rate import is_policy_of
from ppo_rlhf.evaluation.policy import EvaluationConfig, resolve_judge
from ppo_rlhf.models.loading import PretrainedHandle
from ppo_rlhf.reporting.wording import say_result_by_people
from ppo_rlhf.rewards.functions import call_reward_function
from ppo_rlhf.rewards.scoring import AGAINST
from ppo_rlhf.runtime.paths import last_name, shown
from ppo_rlhf.supervised.comparisons import PLACES, FeedbackConfig, pair_key
from ppo_rlhf.supervised.people_answers import Comparison, agreement

log = logging.getLogger(__name__)

_WORTH_OF_A = {"A": 1.0, "B": 0.0, "tie": 0.5, "both bad": 0.5}


def unblind_answers(collected_pairs: pd.DataFrame, feedback: FeedbackConfig) -> pd.DataFrame:
    """Read people's answers, in an MLflow review queue or in the file `feedback.answers`, and unblind them.

    Which policy wrote each response is recorded in `collected_pairs`, the tables of the `collect_feedback` runs that
    made the pairs. An earlier version kept the table of a run as its artifact in MLflow.

    Returns:
        One row for each pair of the two policies that the newest answered pair compares. Columns: `number`, `prompt`
        and `columns` (JSON) as reward functions get them, the responses `ours` and `theirs` (ours is PPO's response if
        there is one), `answers` (JSON, by person), `worths` (JSON, our outcome by person), and `our_name`,
        `their_name`, `our_source`, `their_source`, `our_weights` and `their_weights` (fingerprints) of the policies.
        Pairs of other policies, such as an earlier version of a policy, are left out with a warning.

    Raises:
        DataError: The review queue does not exist, or no pair in the review queue is known to compare two policies.
    """
    found: Sequence[tuple[Comparison, dict[str, Any] | None]]
    if feedback.answers is None:
        source, found = f"mlflow:{feedback.queue_name}", _in_queue(collected_pairs, feedback.queue_name)
    else:
        source, found = feedback.answers, answered_pairs(feedback.answers, collected_pairs, "feedback_pairs")
    rows = [_unblinded(each, row) for each, row in found if row is not None and isinstance(row["against"], str)]
    if unknown := len(found) - len(rows):
        log.warning(
            "%s: %d pairs are left out, because no table of pairs names two policies for them (the table or the "
            "run was deleted, or both responses are from one policy).",
            source,
            unknown,
        )
    if not rows:
        raise DataError(
            f"{source}: no pair here compares two policies. Collect some: kedro run --pipelines "
            "collect_feedback --params feedback.against=ppo_policy, and set feedback.queue to the queue that it names."
        )
    table = pd.DataFrame(rows).sort_values("number", ignore_index=True)
    sources, weights = ["our_source", "their_source"], ["our_weights", "their_weights"]
    answered = table[table["answers"] != "{}"]
    newest = (table if answered.empty else answered).iloc[-1]  # the pair that was queued last has the highest number
    is_newest = (table[weights] == newest[weights]).all(axis=1)
    if not is_newest.all():
        log.warning(
            "%s: %d of %d pairs are left out, because the newest answered pair compares others: %s and %s.",
            source,
            int((~is_newest).sum()),
            len(table),
            *map(shown, newest[sources]),
        )
    return table[is_newest].reset_index(drop=True)


def _in_queue(collected_pairs: pd.DataFrame, queue: str) -> list[tuple[Comparison, dict[str, Any] | None]]:
    """Return the pairs of an MLflow review queue, each with its row of the tables of pairs; None without a row."""
    queues = queues_here()
    known = {(row["number"], row["pair"]): row for row in collected_pairs.to_dict("records")}
    by_run: dict[str, list[Comparison]] = defaultdict(list)
    found: list[tuple[Comparison, dict[str, Any] | None]] = []
    for each in queues.read(queue):
        if each.number < PLACES:
            by_run[each.run_id].append(each)
        else:
            found.append((each, known.get((each.number, _key(each)))))
    for run_id, compared in by_run.items():
        table = queues.table_of_run(run_id) if run_id else None
        earlier = {} if table is None else {row["pair"]: row for row in table.to_dict("records")}
        found += [(each, earlier.get(_key(each))) for each in compared]
    return found


def compare_by_people(answered_comparisons: pd.DataFrame, evaluation: EvaluationConfig) -> dict[str, Any]:
    """Compare two policies by people's answers, and people's answers with the judge of the evaluation.

    Returns:
        The result of `compare_by_people`, and `result` (the result in words), `policy` and `against` (the policies'
        sources), and `judge` (the judge's description; None if the reward decides evaluations).
    """
    table, judge = answered_comparisons, resolve_judge(evaluation)
    judged: list[float | None] = []
    if judge.judge is not None:
        columns: dict[str, list[Any]] = defaultdict(list)
        for row in table["columns"]:
            for name, value in json.loads(row).items():
                columns[name].append(value)
        scores = [
            call_reward_function(
                *(judge.judge, "evaluation.judge", table["prompt"].tolist(), table[side].tolist()),
                columns | {AGAINST: table["theirs"].tolist()},
            )
            for side in ("ours", "theirs")
        ]
        judged = [_worth(a, b) for a, b in zip(*map(_numbers, scores), strict=True)]
    first = table.iloc[0]
    summary = people_win_rate.compare_by_people(
        [json.loads(row) for row in table["worths"]],
        judged,
        prompts=table["prompt"].tolist(),
        ours=first["our_name"],
        theirs=first["their_name"],
        agreement=agreement([json.loads(row) for row in table["answers"]]),
    )
    summary |= {
        "judge": judge.description if judge.judge is not None else None,
        "policy": first["our_source"],
        "against": first["their_source"],
        "fingerprint": first["our_weights"],
    }
    summary["result"] = say_result_by_people(summary)
    log.info("%s", summary["result"])
    if mlflow.active_run() is not None:
        mlflow.log_metrics(summary["metrics"])
        mlflow.set_tag("mlflow.note.content", summary["result"])
    return summary


def write_people_card(human_evaluation: dict[str, Any], ppo_policy: PretrainedHandle) -> tuple[str | None, str]:
    """Write the result of the human evaluation into the model card of the policy that people judged.

    Returns:
        The policy's directory and the policy's model card. If this project did not write the model card, return None
        and the text of the result.
    """
    # In a project that was moved, the policy has its weights but not its former path
    is_here = is_policy_of(human_evaluation, ppo_policy)
    policy = ppo_policy if is_here else replace(ppo_policy, source=human_evaluation["policy"])
    text = human_evaluation["result"]
    card = with_people(policy.card() or "", text)
    return (None, text) if card is None else (policy.source, card)


def _key(pair: Comparison) -> str:
    return pair_key(pair.prompt, pair.response_a, pair.response_b)


def _numbers(scores: Any) -> list[float]:
    return [float(score) for score in scores]


def _unblinded(each: Comparison, row: dict[str, Any]) -> dict[str, Any]:
    """Return a row of `unblind_answers`. `row` is the pair's row in the table of the run that collected the pair."""
    if row["policy_name"] == "ppo_policy":
        ours, theirs, is_ours_a = "policy", "against", row["policy_is_a"]
    else:
        ours, theirs, is_ours_a = "against", "policy", not row["policy_is_a"]
    answers = {answer.person: answer.value for answer in each.answers}
    worths = {
        person: _WORTH_OF_A[value] if is_ours_a else 1.0 - _WORTH_OF_A[value] for person, value in answers.items()
    }
    return {
        "number": each.number,
        "prompt": row["prompt"],
        "columns": row["columns"],
        "ours": row["response_a"] if is_ours_a else row["response_b"],
        "theirs": row["response_b"] if is_ours_a else row["response_a"],
        "answers": json.dumps(answers),
        "worths": json.dumps(worths),
        "our_name": _name_of(row[f"{ours}_name"]),
        "their_name": _name_of(row[f"{theirs}_name"]),
        "our_source": row[ours],
        "their_source": row[theirs],
        "our_weights": row.get(f"{ours}_fingerprint") or row[ours],  # earlier versions know the path only
        "their_weights": row.get(f"{theirs}_fingerprint") or row[theirs],
    }


def _name_of(policy: str) -> str:
    """Return the name of a policy for use in sentences. `policy` is the name of a catalog entry, a path or a hub id."""
    return people_win_rate.KINDS.get(policy, last_name(policy))


def _worth(ours: float, theirs: float) -> float:
    """Return the outcome of a pair for our policy: 1 if `ours` is above `theirs`, 0 if it is below, ½ if both are
    equal.
    """
    if ours == theirs:
        return 0.5
    return 1.0 if ours > theirs else 0.0
