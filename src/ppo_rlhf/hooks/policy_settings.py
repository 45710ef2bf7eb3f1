"""Gives a run that only reads a trained policy the settings that the policy was trained with."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from kedro.io import CatalogProtocol
from kedro.pipeline import Pipeline

from ppo_rlhf.hooks.run_description import PREFIX, parameter
from ppo_rlhf.runtime.names import POLICY, TEMPLATE

if TYPE_CHECKING:
    from ppo_rlhf.checkpoints.training_record import TrainedSettings
    from ppo_rlhf.config import PPOConfig
    from ppo_rlhf.hooks.own_settings import OwnSettings
    from ppo_rlhf.models.loading import PretrainedHandle


def use_policy_settings(
    pipeline: Pipeline, catalog: CatalogProtocol, own: OwnSettings, is_ours: Callable[[str], bool]
) -> list[str]:
    """Put the settings that the run's policy was trained with into the catalog; return one line per difference.

    Settings given by `--params` stay. The settings of a run that trains the policy itself stay unchanged. `is_ours`
    takes a policy's source and returns whether this project made the policy: only such a policy may name Python code to
    import.

    Raises:
        ModelError, ConfigError: As `training_record.settings_of`.
    """
    feedback = parameter(catalog, "feedback") if f"{PREFIX}feedback" in pipeline.inputs() else None
    is_unused = feedback is not None and not feedback.names(POLICY)
    if not {POLICY, f"{PREFIX}ppo"} <= pipeline.inputs() or is_unused:
        return []
    from ppo_rlhf.config import PPOConfig
    from ppo_rlhf.datasets import PretrainedModelDataset
    from ppo_rlhf.models.directories import is_local

    entry, conf = catalog.get(POLICY), parameter(catalog, "ppo")
    if not isinstance(entry, PretrainedModelDataset) or not isinstance(conf, PPOConfig):
        return []
    policy = entry.load()
    if policy is None or (is_local(policy.source) and not entry.exists()):
        return []  # do nothing for a policy that does not exist: the preflight checks report the missing policy
    trained = settings_to_answer(catalog, policy, conf, own, is_ours)
    ppo_entry: Any = catalog.get(f"{PREFIX}ppo")
    ppo_entry.save(trained.config)  # the dataset's own `save` writes no log line, unlike `catalog.save`
    return trained.lines()


def settings_to_answer(
    catalog: CatalogProtocol,
    policy: PretrainedHandle,
    conf: PPOConfig,
    own: OwnSettings,
    is_ours: Callable[[str], bool],
) -> TrainedSettings:
    """Return the settings that a policy answers with; give the catalog's policies the same chat template values.

    Raises:
        ModelError, ConfigError: As `training_record.settings_of`.
    """
    from ppo_rlhf.checkpoints.training_record import settings_of
    from ppo_rlhf.datasets import PretrainedModelDataset

    template = None if own.is_typed(TEMPLATE) else policy.chat_template_kwargs
    trained = settings_of(policy, conf, own.typed("ppo"), template, may_import=is_ours(policy.source))
    if template is not None and trained.chat_template_kwargs is not None:
        # Policy and SFT policy answer the same prompts, so both use the same arguments of the chat template
        for name in (POLICY, "sft_policy"):
            if isinstance(model := catalog.get(name), PretrainedModelDataset):
                model.chat_template_kwargs = dict(trained.chat_template_kwargs)
    return trained
