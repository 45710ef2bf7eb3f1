"""Nodes of the pipeline `collect_feedback`."""

import logging
import time
from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import pandas as pd
from datasets import Dataset

from ppo_rlhf.config import PPOConfig
from ppo_rlhf.core.errors import DataError
from ppo_rlhf.data.prompts import PromptReader, PromptsConfig
from ppo_rlhf.datasets import mlflow_queue
from ppo_rlhf.datasets.pair_tables import CollectedPairs, comparison_of
from ppo_rlhf.datasets.pretrained_model import newest_version
from ppo_rlhf.evaluation.policy import check_vocabularies
from ppo_rlhf.models.loading import PretrainedHandle
from ppo_rlhf.people.answers import ANSWERS, RANDOM
from ppo_rlhf.people.pairs import FeedbackConfig, contents, sample_comparisons
from ppo_rlhf.ppo.precision import device_of, frozen_dtype
from ppo_rlhf.ppo.run_setup import sampling_settings
from ppo_rlhf.runtime.names import env_option
from ppo_rlhf.runtime.paths import below_project, readable_path, running
from ppo_rlhf.runtime.processes import on_main

log = logging.getLogger(__name__)


def sample_pairs(
    collected_pairs: CollectedPairs,
    sft_policy: PretrainedHandle | None,
    ppo_policy: PretrainedHandle | None,
    raw_prompts: Dataset,
    raw_evaluation_prompts: Dataset | None,
    ppo: PPOConfig,
    prompts: PromptsConfig,
    feedback: FeedbackConfig,
) -> pd.DataFrame:
    """Sample two responses to each prompt, from one policy or from two, and draw at random which response is A.

    The pairs go on with the prompts that no earlier pair of the same name in `collected_pairs` has.

    Returns:
        One row for each pair (`people.pairs.COLUMNS`), with the name `queue` of the pairs, the second `collected` of
        the collection, which no other collection has, and the setting `export`. The
        columns `policy` and `against` hold the paths or hub ids of the two models, `policy_fingerprint` and
        `against_fingerprint` tell their weights, and `policy_name` and `against_name` hold the models' names in the
        settings. `against` is None if one policy wrote both responses.

    Raises:
        DataError: No pair of unequal, new responses was sampled.
    """
    given = {"sft_policy": sft_policy, "ppo_policy": ppo_policy}
    policy = policy_named(feedback.policy, given)
    against = None if feedback.against is None else policy_named(feedback.against, given)
    if against is not None:
        check_vocabularies(policy, against)
    tokenizer, device = policy.tokenizer(), device_of(ppo)
    first: Any = policy.frozen_lm(frozen_dtype(ppo), device)
    second: Any = first if against is None else against.frozen_lm(frozen_dtype(ppo), device)
    parts = PromptReader.of(policy, ppo).read_split(raw_prompts, raw_evaluation_prompts, prompts)
    earlier = collected_pairs.table
    own = earlier[earlier["queue"] == feedback.queue_name]
    collected = on_main(lambda: max([int(time.time()), *(second + 1 for second in earlier["collected"])]))
    named = ", ".join(readable_path(each.source) for each in (policy, against) if each is not None)
    log.info("Sampling %d pairs of responses from %s …", feedback.pairs, named)
    table = sample_comparisons(
        (first, second),
        tokenizer,
        parts[feedback.held_out],
        sampling_settings(ppo, tokenizer, first),
        ppo,
        feedback,
        place=max((place + 1 for place in own["place"]), default=0),
        numbers={*earlier["number"]},
        known={contents(*row) for row in own[["prompt", "response_a", "response_b"]].values},
    )
    left_out = f"{feedback.pairs - len(table)} of {feedback.pairs} pairs have equal responses or were collected before"
    if table.empty:
        raise DataError(f"{left_out}: nothing is left to ask. Set feedback.temperature higher, or feedback.queue anew.")
    if len(table) < feedback.pairs:
        log.info("%s, and are left out.", left_out)
    sources: dict[str, Any] = {"queue": feedback.queue_name, "collected": collected, "export": feedback.export}
    for name, setting, handle in (("policy", feedback.policy, policy), ("against", feedback.against, against)):
        source, weights = (None, None) if handle is None else (handle.source, handle.fingerprint())
        sources |= {name: source, f"{name}_name": setting, f"{name}_fingerprint": weights}
    return table.assign(**sources)


def put_pairs(feedback_pairs: CollectedPairs, feedback: FeedbackConfig) -> None:
    """Add the pairs that MLflow's review queue lacks to it, unless they were exported; log how their answers are used.

    `feedback_pairs` has the pairs of all runs. A pair that the queue has is skipped, so that the node can run again.
    """
    queue, environment = feedback.queue_name, env_option(running.environment)
    if feedback.export is None:
        table = feedback_pairs.table
        rows = table[(table["queue"] == queue) & table["export"].isna() & table[RANDOM]].to_dict("records")
        pairs = [comparison_of(row) for row in rows]
        address = on_main(lambda: mlflow_queue.put(queue, pairs, feedback.instruction))
        served = "" if mlflow_queue.place.has_server else f"`kedro mlflow ui{environment}`, then "
        log.info("People answer the %d pairs of the queue %s here: %s%s", len(pairs), queue, served, address)
        answers = f"{mlflow_queue.SCHEME}{queue}"
    else:
        log.info(
            "People's answers come back as JSON lines or CSV with number, answer (%s), person, time and rationale.",
            ", ".join(ANSWERS),
        )
        answers = "ANSWERS.jsonl"
    pipelines, setting = (
        ("human_evaluation", "feedback.answers") if feedback.against else ("reward_modelling,align", "preferences_path")
    )
    log.info('Then: kedro run%s --pipelines %s --params "%s=%s"', environment, pipelines, setting, answers)


def policy_named(name: str, given: Mapping[str, PretrainedHandle | None]) -> PretrainedHandle:
    """Return the policy that `name` names: a catalog entry, a path or a hub id.

    Raises:
        ModelError: The model does not exist, or is not a causal language model.
    """
    policy = given.get(name)
    if policy is None:
        like = next(handle for handle in given.values() if handle is not None)
        policy = replace(like, source=newest_version(below_project(name)))
    policy.check_causal_lm()
    return policy
