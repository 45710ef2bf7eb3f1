"""Nodes of the pipeline `collect_feedback`."""

import json
import logging
from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import mlflow
import pandas as pd
from datasets import Dataset

from ppo_rlhf.config import PPOConfig
from ppo_rlhf.data.prompts import PromptReader, PromptsConfig
from ppo_rlhf.datasets.pretrained_model import newest_version
from ppo_rlhf.datasets.review_queues import Comparison, ReviewQueues, queues_of_run
from ppo_rlhf.evaluation.policy import check_vocabularies
from ppo_rlhf.models.loading import PretrainedHandle
from ppo_rlhf.ppo.build import sampling_settings
from ppo_rlhf.ppo.precision import device_of, frozen_dtype
from ppo_rlhf.runtime.names import env_option
from ppo_rlhf.runtime.paths import shown
from ppo_rlhf.runtime.processes import on_main
from ppo_rlhf.supervised import comparisons
from ppo_rlhf.supervised.comparisons import FeedbackConfig, pair_key

log = logging.getLogger(__name__)


def find_queued_pairs(feedback: FeedbackConfig) -> dict[str, Any]:
    """Return the pairs in the MLflow review queue, and a stopped run's pairs that are not queued yet."""
    return on_main(lambda: _find(queues_of_run(), feedback.queue_name))


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
        One row for each pair (`comparisons.COLUMNS`). The columns `policy` and `against` hold the paths or hub ids of
        the two models; `policy_name` and `against_name` hold the models' names in the settings. `against` is None if
        one policy wrote both responses.
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
    sources = {"policy": policy.source, "against": None if against is None else against.source}
    return table.assign(**sources, policy_name=feedback.policy, against_name=feedback.against)


def queue_pairs(feedback_pairs: pd.DataFrame, queued_pairs: dict[str, Any], feedback: FeedbackConfig) -> dict[str, Any]:
    """Add the new pairs, and a stopped run's unqueued pairs, to the MLflow review queue; log where people answer them.

    The node adds either all pairs to the review queue or none.
    """
    new_pairs = [_comparison(row) for row in feedback_pairs.to_dict("records")]

    def put() -> dict[str, Any]:
        queues, queue = queues_of_run(), feedback.queue_name
        queues.prepare(queue, feedback.instruction)
        added = [*queued_pairs["waiting"], *queues.write(queue, new_pairs)]
        queues.attach(queue, added)
        queued = queues.read(queue) if added or queued_pairs["known"] else []
        answered = sum(bool(each.answers) for each in queued)
        return {"queue": queue, "address": queues.address(queue), "added": len(added), "pairs": len(queued)} | {
            "answered": answered
        }

    done = on_main(put)
    run = mlflow.active_run()
    environment = env_option(run.data.tags.get("environment")) if run else ""
    served = "" if queues_of_run().has_server else f"`kedro mlflow ui{environment}`, then "
    log.info(
        "%d pairs were added to the queue %s, which now has %d, %d of them answered.",
        *(done[key] for key in _COUNTS),
    )
    log.info("People answer the pairs here: %s%s", served, done["address"])
    then = "reward_modelling,align", "preferences_path=mlflow:"
    if feedback.against is not None:
        then = "human_evaluation", "feedback.queue="
    log.info('Then: kedro run%s --pipelines %s --params "%s%s"', environment, *then, done["queue"])
    return done


_COUNTS = ("added", "queue", "pairs", "answered")


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


def _find(queues: ReviewQueues, queue: str) -> dict[str, Any]:
    waiting = queues.waiting(queue)
    held = [*waiting, *(queues.read(queue) if queues.has_pairs(queue) else [])]
    if waiting:
        log.info("%d waiting pairs of a stopped run are taken over.", len(waiting))
    return {
        "next": max((each.number for each in held), default=-1) + 1,
        "known": [pair_key(each.prompt, each.response_a, each.response_b) for each in held],
        "waiting": [each.trace_id for each in waiting],
    }


def _comparison(row: Mapping[str, Any]) -> Comparison:
    is_chat = isinstance(row["prompt_chat"], str)
    return Comparison(
        int(row["number"]),
        json.loads(row["prompt_chat"]) if is_chat else row["prompt"],
        row["response_a"],
        row["response_b"],
        json.loads(row["tools"]) if is_chat else None,
    )


def _sources(*policies: PretrainedHandle | None) -> list[str]:
    return [each.source for each in policies if each is not None]
