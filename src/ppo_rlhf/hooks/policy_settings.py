"""A run that reads a policy, and does not train it, uses the settings that the policy was trained with."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from kedro.io import CatalogProtocol
from kedro.pipeline import Pipeline

from ppo_rlhf.hooks.run_description import PREFIX, parameter
from ppo_rlhf.names import POLICY

if TYPE_CHECKING:
    from ppo_rlhf.hooks.own_settings import OwnSettings

TEMPLATE = "chat_template_kwargs"


def use_policy_settings(pipeline: Pipeline, catalog: CatalogProtocol, own: OwnSettings) -> list[str]:
    """Put the settings of the policy that a run reads into its catalog; return what differs, in a line each.

    What was typed stays. A run that trains the policy itself has its settings anyway.

    Raises:
        ModelError, ConfigError: As `training_record.settings_of`.
    """
    if not {POLICY, f"{PREFIX}ppo"} <= pipeline.inputs():
        return []
    from ppo_rlhf.checkpoints.training_record import settings_of  # heavy: only a run pays for it
    from ppo_rlhf.config import PPOConfig
    from ppo_rlhf.datasets import PretrainedModelDataset
    from ppo_rlhf.models.directories import is_local

    entry, conf = catalog.get(POLICY), parameter(catalog, "ppo")
    if not isinstance(entry, PretrainedModelDataset) or not isinstance(conf, PPOConfig):
        return []
    policy = entry.load()
    if policy is None or (is_local(policy.source) and not entry.exists()):
        return []  # the preflight says so
    template = None if own.is_typed(TEMPLATE) else policy.chat_template_kwargs
    found = settings_of(policy, conf, own.typed("ppo"), template)
    settings: Any = catalog.get(f"{PREFIX}ppo")
    settings.save(found.config)  # unlike `catalog.save`, it logs nothing
    if template is not None and found.chat_template_kwargs is not None:
        for name in (POLICY, "sft_policy"):  # both are given the same prompts
            if isinstance(model := catalog.get(name), PretrainedModelDataset):
                model.chat_template_kwargs = dict(found.chat_template_kwargs)
    return found.lines()
