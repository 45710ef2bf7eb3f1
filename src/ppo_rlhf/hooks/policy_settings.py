"""A run that reads a policy, and does not train it, lets it answer with the settings that it was trained with."""

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
    """Put the settings of the policy that a run reads into its catalog; return what differs, in a line each.

    What was typed stays. A run that trains the policy itself has its settings anyway. `is_ours` says of a source
    whether this project made it: another policy may not name Python code to import.

    Raises:
        ModelError, ConfigError: As `training_record.settings_of`.
    """
    feedback = parameter(catalog, "feedback") if f"{PREFIX}feedback" in pipeline.inputs() else None
    is_unused = feedback is not None and not feedback.names(POLICY)
    if not {POLICY, f"{PREFIX}ppo"} <= pipeline.inputs() or is_unused:
        return []
    from ppo_rlhf.config import PPOConfig  # heavy: only a run pays for them
    from ppo_rlhf.datasets import PretrainedModelDataset
    from ppo_rlhf.models.directories import is_local

    entry, conf = catalog.get(POLICY), parameter(catalog, "ppo")
    if not isinstance(entry, PretrainedModelDataset) or not isinstance(conf, PPOConfig):
        return []
    policy = entry.load()
    if policy is None or (is_local(policy.source) and not entry.exists()):
        return []  # the preflight says so
    found = settings_to_answer(catalog, policy, conf, own, is_ours)
    settings: Any = catalog.get(f"{PREFIX}ppo")
    settings.save(found.config)  # unlike `catalog.save`, it logs nothing
    return found.lines()


def settings_to_answer(
    catalog: CatalogProtocol,
    policy: PretrainedHandle,
    conf: PPOConfig,
    own: OwnSettings,
    is_ours: Callable[[str], bool],
) -> TrainedSettings:
    """Return the settings that a policy answers with; give the catalog's policies the values of its chat template.

    Raises:
        ModelError, ConfigError: As `training_record.settings_of`.
    """
    from ppo_rlhf.checkpoints.training_record import settings_of
    from ppo_rlhf.datasets import PretrainedModelDataset

    template = None if own.is_typed(TEMPLATE) else policy.chat_template_kwargs
    found = settings_of(policy, conf, own.typed("ppo"), template, may_import=is_ours(policy.source))
    if template is not None and found.chat_template_kwargs is not None:
        for name in (POLICY, "sft_policy"):  # both are given the same prompts
            if isinstance(model := catalog.get(name), PretrainedModelDataset):
                model.chat_template_kwargs = dict(found.chat_template_kwargs)
    return found
