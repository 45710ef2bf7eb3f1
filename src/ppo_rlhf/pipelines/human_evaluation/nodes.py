"""Nodes of the pipeline `human_evaluation`."""

import json
import logging
import re
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

import mlflow
import pandas as pd
from mlflow.utils.mlflow_tags import MLFLOW_RUN_NOTE

from ppo_rlhf.checkpoints.model_card import with_people
from ppo_rlhf.core.errors import DataError
from ppo_rlhf.data.chats import Chat, answered
from ppo_rlhf.datasets.mlflow_queue import SCHEME
from ppo_rlhf.datasets.pair_tables import CollectedPairs, comparison_of
from ppo_rlhf.evaluation.policy import EvaluationConfig, resolve_judge
from ppo_rlhf.models.loading import PretrainedHandle
from ppo_rlhf.people import win_rate as people_win_rate
from ppo_rlhf.people.answers import RANDOM, Comparison, agreement
from ppo_rlhf.people.pairs import FeedbackConfig
from ppo_rlhf.people.win_rate import JUDGED_POLICY, is_policy_of
from ppo_rlhf.reporting.wording import say_result_by_people
from ppo_rlhf.rewards.functions import call_reward_function
from ppo_rlhf.rewards.scoring import AGAINST, MESSAGES, TURNS
from ppo_rlhf.runtime.paths import last_name, readable_path

log = logging.getLogger(__name__)

_FORMAT = re.compile(r"^ *(#+ |[-*+] |[0-9]+[.)] |```|\|)|\*\*", re.MULTILINE)
"""Headings, items of lists, code fences, tables and bold text in Markdown."""
_WORTH_OF_A = {"A": 1.0, "B": 0.0, "tie": 0.5, "both bad": 0.5}


def unblind_answers(collected_pairs: CollectedPairs, feedback: FeedbackConfig) -> pd.DataFrame:
    """Read people's answers from `feedback.answers`, a file or MLflow's review queue, and unblind them.

    Which policy wrote each response is recorded in `collected_pairs`.

    Returns:
        One row for each pair of the two policies that the newest answered pair compares: first the answered pairs, then
        those of the same queues that nobody answered. Columns: `number`, `prompt` and `columns` (JSON) as reward
        functions get them, `prompt_chat` (the messages as JSON, None for plain text), the responses `ours` and `theirs`
        (ours is PPO's response if there is one), `answers` (JSON, by person), `worths` (JSON, our outcome by person),
        and `our_name`, `their_name`, `our_source`, `their_source`, `our_weights` and `their_weights` (fingerprints) of
        the policies.
        Answered pairs of other policies, such as an earlier version of a policy, are left out with a warning.

    Raises:
        DataError: There are no answers, no answered pair compares two policies, or an answered pair was not drawn for
            people, so that the answered pairs are no random sample.
    """
    source = feedback.answers or f"{SCHEME}{feedback.queue_name}"
    answered = collected_pairs.answered(source)
    rows = [_unblinded(each, row) for each, row in answered if isinstance(row["against"], str)]
    if of_one := len(answered) - len(rows):
        log.warning("%s: %d pairs are left out, because both responses are from one policy.", source, of_one)
    if not rows:
        raise DataError(
            f"{source}: no answered pair compares two policies. Collect some: kedro run --pipelines collect_feedback "
            "--params feedback.against=ppo_policy, and set feedback.answers to their answers."
        )
    if chosen := [each.number for each, row in answered if not row[RANDOM]]:
        raise DataError(
            f"{source}: {len(chosen)} answered pairs, for example {chosen[0]}, were not drawn for people, so that the "
            "answers are no random_sample and cannot correct the judge. Remove these answers."
        )
    table = pd.DataFrame(rows)  # in the order of collection: the newest pair is the last
    sources, weights = ["our_source", "their_source"], ["our_weights", "their_weights"]
    newest = table.iloc[-1]
    is_newest = (table[weights] == newest[weights]).all(axis=1)
    if not is_newest.all():
        log.warning(
            "%s: %d of %d pairs are left out, because the newest answered pair compares others: %s and %s.",
            source,
            int((~is_newest).sum()),
            len(table),
            *map(readable_path, newest[sources]),
        )
    collected = collected_pairs.table
    is_unanswered = collected["queue"].isin({row["queue"] for _, row in answered}) & collected["against"].notna()
    is_unanswered &= ~collected["number"].isin({each.number for each, _ in answered})
    others = [_unblinded(comparison_of(row), row) for row in collected[is_unanswered].to_dict("records")]
    unanswered = [row for row in others if [row[name] for name in weights] == newest[weights].tolist()]
    return pd.concat([table[is_newest], pd.DataFrame(unanswered, columns=table.columns)], ignore_index=True)


def compare_by_people(answered_comparisons: pd.DataFrame, evaluation: EvaluationConfig) -> dict[str, Any]:
    """Compare two policies by the judge of the evaluation, corrected by people's answers to some of the pairs.

    Returns:
        The result of `compare_by_people`, and `result` (the result in words), `policy` and `against` (the policies'
        sources), `judge` (the judge's description; None if the reward decides evaluations, and people decide alone),
        and what the judge `favours`.
    """
    table, judge = answered_comparisons, resolve_judge(evaluation)
    judged: list[float] = []
    if judge.judge is not None:
        columns = _columns(table) | {AGAINST: table["theirs"].tolist()}
        scores = [
            call_reward_function(
                *(judge.judge, "evaluation.judge", table["prompt"].tolist(), table[side].tolist()),
                columns
                | {TURNS: [[text] for text in table[side]], MESSAGES: _messages(table["prompt_chat"], table[side])},
            )
            for side in ("ours", "theirs")
        ]
        judged = [_worth(a, b) for a, b in zip(*map(_numbers, scores), strict=True)]
    first, worths = table.iloc[0], [json.loads(row) for row in table["worths"]]
    summary = people_win_rate.compare_by_people(
        worths,
        judged,
        prompts=table["prompt"].tolist(),
        ours=first["our_name"],
        theirs=first["their_name"],
        agreement=agreement([json.loads(row) for row in table["answers"]]),
    )
    summary |= {
        "judge": judge.description if judge.judge is not None else None,
        "favours": _favours(table, worths, judged) if judged else [],
        "policy": first["our_source"],
        "against": first["their_source"],
        "fingerprint": first["our_weights"],
    }
    summary["result"] = say_result_by_people(summary)
    log.info("%s", summary["result"])
    if mlflow.active_run() is not None:
        mlflow.log_metrics(summary["metrics"])
        mlflow.set_tags({MLFLOW_RUN_NOTE: summary["result"], JUDGED_POLICY: readable_path(summary["policy"])})
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


def _columns(table: pd.DataFrame) -> dict[str, list[Any]]:
    """Return the prompts' columns. A pair collected from a table without a column has None there."""
    rows = [json.loads(row) for row in table["columns"]]
    return {name: [row.get(name) for row in rows] for name in dict.fromkeys(name for row in rows for name in row)}


def _messages(chats: Sequence[str | None], responses: Sequence[str]) -> list[Chat | None]:
    """Return each chat prompt with its response, as reward functions get `messages`; None for plain text."""
    pairs = zip(chats, responses, strict=True)
    return [answered(json.loads(chat), text) if isinstance(chat, str) else None for chat, text in pairs]


def _numbers(scores: Any) -> list[float]:
    return [float(score) for score in scores]


def _favours(table: pd.DataFrame, worths: Sequence[Mapping[str, float]], judged: Sequence[float]) -> list[str]:
    """Return which responses the judge favours more than people do, from the first answered pair of each prompt."""
    rows = [row for row in table["prompt"].drop_duplicates().index if worths[row]]
    pairs = [(table["ours"][row], table["theirs"][row]) for row in rows]
    longer = [len(ours) - len(theirs) for ours, theirs in pairs]
    formatted = [len(_FORMAT.findall(ours)) - len(_FORMAT.findall(theirs)) for ours, theirs in pairs]
    traits = {
        ("longer answers", "shorter answers"): longer,
        ("formatted answers", "plainer answers"): formatted,
        (f"{table['our_name'][0]}'s answers", f"{table['their_name'][0]}'s answers"): [1] * len(rows),
    }
    by_people = [sum(worths[row].values()) / len(worths[row]) for row in rows]
    return people_win_rate.favours(by_people, [judged[row] for row in rows], traits)


def _unblinded(each: Comparison, row: dict[str, Any]) -> dict[str, Any]:
    """Return a row of `unblind_answers`. `row` is the pair's row in the tables of the sides."""
    if row["policy_name"] == "ppo_policy":
        ours, theirs, is_ours_a = "policy", "against", row["policy_is_a"]
    else:
        ours, theirs, is_ours_a = "against", "policy", not row["policy_is_a"]
    worths = {
        person: _WORTH_OF_A[value] if is_ours_a else 1.0 - _WORTH_OF_A[value] for person, value in each.answers.items()
    }
    return {
        "number": each.number,
        "prompt": row["prompt"],
        "prompt_chat": row["prompt_chat"],
        "columns": row["columns"],
        "ours": row["response_a"] if is_ours_a else row["response_b"],
        "theirs": row["response_b"] if is_ours_a else row["response_a"],
        "answers": json.dumps(each.answers),
        "worths": json.dumps(worths),
        "our_name": _name_of(row[f"{ours}_name"]),
        "their_name": _name_of(row[f"{theirs}_name"]),
        "our_source": row[ours],
        "their_source": row[theirs],
        "our_weights": row[f"{ours}_fingerprint"],
        "their_weights": row[f"{theirs}_fingerprint"],
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
