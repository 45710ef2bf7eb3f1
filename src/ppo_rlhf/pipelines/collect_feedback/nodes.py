"""Nodes of the pipeline `collect_feedback`."""

import getpass
import logging
import os
import tempfile
import time
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import IO, Any

import mlflow
import pandas as pd
from datasets import Dataset

from ppo_rlhf.config import PPOConfig
from ppo_rlhf.core.errors import ConfigError
from ppo_rlhf.core.fingerprints import fingerprint
from ppo_rlhf.data.prompts import PromptReader, PromptsConfig
from ppo_rlhf.datasets.pair_tables import comparison_of
from ppo_rlhf.datasets.pretrained_model import newest_version
from ppo_rlhf.datasets.review_queues import ReviewQueues, place, queues_of_run
from ppo_rlhf.evaluation.policy import check_vocabularies
from ppo_rlhf.models.loading import PretrainedHandle
from ppo_rlhf.ppo.build import sampling_settings
from ppo_rlhf.ppo.precision import device_of, frozen_dtype
from ppo_rlhf.runtime.locks import lock_run
from ppo_rlhf.runtime.names import env_option
from ppo_rlhf.runtime.paths import shown
from ppo_rlhf.runtime.processes import is_main_process, on_main
from ppo_rlhf.supervised import comparisons
from ppo_rlhf.supervised.comparisons import PLACES, FeedbackConfig, pair_key
from ppo_rlhf.supervised.people_answers import ANSWERS

log = logging.getLogger(__name__)


def find_queued_pairs(collected_pairs: pd.DataFrame, feedback: FeedbackConfig) -> dict[str, Any]:
    """Return the pairs in the MLflow review queue, a stopped run's pairs that are not queued yet, and the number of the
    next pair. With `feedback.export` MLflow is not asked.
    """
    queues, queue = None if feedback.export else queues_of_run(), feedback.queue_name
    lock = lock_queue(queue)
    return {**on_main(lambda: _find(queues, queue, collected_pairs)), "lock": lock}


def sample_pairs(
    queued_pairs: dict[str, Any],
    sft_policy: PretrainedHandle | None,
    ppo_policy: PretrainedHandle | None,
    raw_prompts: Dataset,
    raw_evaluation_prompts: Dataset | None,
    ppo: PPOConfig,
    prompts: PromptsConfig,
    feedback: FeedbackConfig,
) -> pd.DataFrame:
    """Sample two responses to each prompt, from one policy or from two, and draw at random which response is A.

    Returns:
        One row for each pair (`comparisons.COLUMNS`), and the name of its `queue`. The columns `policy` and `against`
        hold the paths or hub ids of the two models, `policy_fingerprint` and `against_fingerprint` tell their weights,
        and `policy_name` and `against_name` hold the models' names in the settings. `against` is None if one policy
        wrote both responses.
    """
    given = {"sft_policy": sft_policy, "ppo_policy": ppo_policy}
    policy = policy_named(feedback.policy, given)
    against = None if feedback.against is None else policy_named(feedback.against, given)
    if against is not None:
        check_vocabularies(policy, against)
    tokenizer, device = policy.tokenizer(), device_of(ppo)
    first: Any = policy.causal_lm(frozen_dtype(ppo)).to(device)  # type: ignore[arg-type]
    second: Any = first if against is None else against.causal_lm(frozen_dtype(ppo)).to(device)  # type: ignore[arg-type]
    parts = PromptReader.of(policy, ppo).read_split(raw_prompts, raw_evaluation_prompts, prompts)
    wanted = max(0, feedback.pairs - len(queued_pairs["waiting"]))
    log.info("Sampling %d pairs of responses from %s …", wanted, " and ".join(map(shown, _sources(policy, against))))
    table, equal = comparisons.sample_comparisons(
        (first, second),
        tokenizer,
        parts[feedback.held_out],
        sampling_settings(ppo, tokenizer, first),
        ppo,
        feedback,
        start=queued_pairs["next"],
        pairs=wanted,
        known=set(queued_pairs["known"]),
    )
    if equal:
        log.info("%d of %d pairs have equal responses and are left out.", equal, wanted)
    sources: dict[str, Any] = {"queue": feedback.queue_name}
    for name, setting, handle in (("policy", feedback.policy, policy), ("against", feedback.against, against)):
        source, weights = (None, None) if handle is None else (handle.source, handle.fingerprint())
        sources |= {name: source, f"{name}_name": setting, f"{name}_fingerprint": weights}
    return table.assign(**sources)


def queue_pairs(
    feedback_pairs: pd.DataFrame, queued_pairs: dict[str, Any], feedback: FeedbackConfig
) -> tuple[dict[str, Any], dict[str, Any]]:
    """Add the new pairs, and a stopped run's unqueued pairs, to the MLflow review queue; log where people answer them.

    `feedback_pairs` has the pairs of all runs; the new ones have the highest numbers of the queue. With
    `feedback.export`, or if MLflow's page would not show the pairs whole, the new pairs go into a file instead. If the
    project's reward does not read the reward model, the logged command for training sets one that does.

    Returns:
        What was queued, and the pairs for the file (`datasets.PairSheetDataset`).
    """
    new = (feedback_pairs["queue"] == feedback.queue_name) & (feedback_pairs["number"] >= queued_pairs["next"])
    rows = feedback_pairs[new].to_dict("records")
    queue, run = feedback.queue_name, mlflow.active_run()
    environment = env_option(run.data.tags.get("environment")) if run else ""
    done = on_main(lambda: None if feedback.export else _put(rows, queued_pairs["waiting"], feedback))
    sheet: dict[str, Any] = {"rows": [], "queue": queue, "path": feedback.export}
    if done is None:
        sheet["rows"], done = rows, {"queue": queue, "address": None, "added": len(rows), "pairs": len(rows)}
        log.info(
            "People's answers come back as JSON lines with number, answer (%s), person, time and rationale.",
            ", ".join(ANSWERS),
        )
        then = ("human_evaluation", "feedback.answers=") if feedback.against else (_TRAINING, "preferences_path=")
        answers = "ANSWERS.jsonl"
    else:
        log.info(
            "%d pairs were added to the queue %s, which now has %d, %d of them answered.",
            *(done[key] for key in ("added", "queue", "pairs", "answered")),
        )
        served = "" if queues_of_run().has_server else f"`kedro mlflow ui{environment}`, then "
        log.info("People answer the pairs here: %s%s", served, done["address"])
        then = ("human_evaluation", "feedback.queue=") if feedback.against else (_TRAINING, "preferences_path=mlflow:")
        answers = queue
    more = "" if feedback.against or feedback.trains_by_model else ",reward_components=[{type: model}]"
    log.info('Then: kedro run%s --pipelines %s --params "%s%s%s"', environment, *then, answers, more)
    return done, sheet


_TRAINING = "reward_modelling,align"


def _put(rows: list[dict[Any, Any]], waiting: list[str], feedback: FeedbackConfig) -> dict[str, Any] | None:
    """Put pairs into the review queue; return None, and write nothing, if MLflow's page would not show them whole."""
    queues, queue, pairs = queues_of_run(), feedback.queue_name, [comparison_of(row) for row in rows]
    if not queues.shows_whole(pairs):
        log.warning(
            "MLflow's store keeps only the first characters of what its page shows, and some pairs are longer: none of "
            "the new pairs goes into the queue %s.",
            queue,
        )
        return None
    queues.prepare(queue, feedback.instruction)
    added = [*waiting, *queues.write(queue, pairs)]
    queues.attach(queue, added)
    queued = queues.read(queue) if queues.has_pairs(queue) else []
    counts = {"added": len(added), "pairs": len(queued), "answered": sum(bool(each.answers) for each in queued)}
    return {"queue": queue, "address": queues.address(queue), **counts}


def lock_queue(queue: str) -> IO[bytes] | None:
    """Return a lock on a queue, which is held on this machine as long as the returned file is open.

    Return None in processes other than the main process.

    Raises:
        ConfigError: Another run collects pairs for the queue.
    """
    if not is_main_process():
        return None
    name = fingerprint([place.uri or str(Path.cwd()), place.experiment, queue])[:16]
    user = getattr(os, "getuid", getpass.getuser)()  # Windows has no user ids
    lock = lock_run(Path(tempfile.gettempdir()) / f"ppo_rlhf-{user}" / name)
    if lock is None:
        raise ConfigError(f"feedback.queue={queue}: another run is collecting pairs for this queue. Wait for its end.")
    return lock


def policy_named(name: str, given: Mapping[str, PretrainedHandle | None]) -> PretrainedHandle:
    """Return the policy that `name` names: a catalog entry, a path or a hub id.

    Raises:
        ModelError: The model does not exist, or is not a causal language model.
    """
    policy = given.get(name)
    if policy is None:
        like = next(handle for handle in given.values() if handle is not None)
        policy = replace(like, source=newest_version(name))
    policy.check_causal_lm()
    return policy


def _find(queues: ReviewQueues | None, queue: str, collected: pd.DataFrame) -> dict[str, Any]:
    waiting = [] if queues is None else queues.waiting(queue)
    held = [*waiting, *(queues.read(queue) if queues is not None and queues.has_pairs(queue) else [])]
    if waiting:
        log.info(
            "%d pairs were written for the queue %s but are not in it, because a run was stopped or somebody removed "
            "them; they are put into it.",
            len(waiting),
            queue,
        )
    own = collected[collected["queue"] == queue]
    numbers = [*(each.number for each in held), *own["number"].tolist()]
    taken = [*numbers, *collected["number"].tolist(), 0]  # pairs of other queues may be of the same second
    begin = max(int(time.time()), *(number // PLACES + 1 for number in taken))
    drawn = max((number % PLACES for number in numbers), default=-1) + 1
    return {
        "next": begin * PLACES + drawn,
        "known": [*(pair_key(each.prompt, each.response_a, each.response_b) for each in held), *own["pair"].tolist()],
        "waiting": [each.trace_id for each in waiting],
    }


def _sources(*policies: PretrainedHandle | None) -> list[str]:
    return [each.source for each in policies if each is not None]
