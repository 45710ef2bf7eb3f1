"""How a policy was trained, beside its weights: who evaluates it, or lets it answer, does it with the same settings.

generation_config.json    what transformers knows, too: most tokens, temperature, top-k, top-p, stop tokens
ppo_rlhf.json             every other setting of PPO but those of `HERE`, and what the chat template was given
"""

from __future__ import annotations

import importlib.metadata
import json
from collections.abc import Collection, Mapping
from dataclasses import asdict, dataclass, field, fields
from typing import Any

from transformers import GenerationConfig

from ppo_rlhf.config import MODEL_PATHS, PPOConfig
from ppo_rlhf.config.rules import OFFLOADING_FIELDS, VLLM_FIELDS
from ppo_rlhf.core.errors import ConfigError, ModelError, in_one_line
from ppo_rlhf.models.loading import RECORD, PretrainedHandle
from ppo_rlhf.models.tokenizers import template_defaults
from ppo_rlhf.ppo.precision import with_dtype
from ppo_rlhf.ppo.state import TrainingState

DRAWN_BY = (
    *("response_length", "min_response_length", "temperature", "top_k", "top_p", "stop_token", "stop_token_id"),
    *("environment", "turn_length"),
)
"""Fields of PPOConfig that say how responses are drawn."""
HERE = (
    *("device", "compile", "rollout_engine", *VLLM_FIELDS, *OFFLOADING_FIELDS, "local_rollout_forward_batch_size"),
    *("max_tokens_per_micro_batch", "max_time", "shutdown_grace_s", "report_to", "callbacks", *MODEL_PATHS),
    *("overlong_prompts", "seed"),
)
"""Fields that belong to a machine, a run or its prompts, not to the policy: the settings of whoever uses it count."""
IN_GENERATION_CONFIG = ("temperature", "top_k", "top_p")
TEMPLATE = "chat_template_kwargs"


def generation_config_of(state: TrainingState) -> GenerationConfig:
    """Return how PPO sampled; with an environment `max_new_tokens` are those of a turn."""
    sampling = state.sampling
    stops = list(sampling.stop_token_ids)
    return GenerationConfig(
        do_sample=True,
        **{name: getattr(sampling, name) for name in IN_GENERATION_CONFIG},
        bos_token_id=getattr(state.policy.generation_config, "bos_token_id", None),
        eos_token_id=stops[0] if len(stops) == 1 else stops or None,
        pad_token_id=sampling.pad_token_id,
        max_new_tokens=sampling.turn_length or sampling.response_length,
    )


def record_of(state: TrainingState) -> str:
    """Return the text of `ppo_rlhf.json`."""
    settings = asdict(state.config)
    elsewhere = {*HERE, *IN_GENERATION_CONFIG, _most_tokens(settings)}
    record = {
        "version": importlib.metadata.version("ppo_rlhf"),
        "ppo": {name: value for name, value in settings.items() if name not in elsewhere},
        TEMPLATE: template_defaults(state.tokenizer),
    }
    return json.dumps(record, indent=2) + "\n"


@dataclass(frozen=True)
class TrainedSettings:
    """The settings to use a policy with: its own where it says them, else the user's; what was typed comes first."""

    config: PPOConfig
    chat_template_kwargs: Mapping[str, Any] | None  # what its chat template was given; None: it does not say
    differing: dict[str, str] = field(default_factory=dict)  # `ppo.name=value (conf: value)`, by the setting's name
    origin: str = ""  # the beginning of the line that says so
    unknown: tuple[str, ...] = ()  # settings that this version does not know

    def lines(self, names: Collection[str] | None = None) -> list[str]:
        """Return what a user must know, in a line each; of the settings that differ those of `names` if given."""
        if self.chat_template_kwargs is None:
            used = ", ".join(f"{name}={getattr(self.config, name)}" for name in ("response_length", "temperature"))
            return [
                f"{self.origin} has no {RECORD}, which says how it was trained: the project's settings count ({used})"
            ]
        shown = [text for name, text in self.differing.items() if names is None or name in names]
        said = (
            [f"{self.origin} is used as it was trained: {', '.join(shown)}; what is typed comes first"] if shown else []
        )
        if self.unknown:
            names = ", ".join(f"ppo.{name}" for name in self.unknown)
            said.append(f"{self.origin}: settings that this version does not know are left out: {names}")
        return said


def settings_of(
    policy: PretrainedHandle, conf: PPOConfig, typed: Collection[str] = (), template: Mapping[str, Any] | None = None
) -> TrainedSettings:
    """Return the settings to use a policy with.

    `conf` are the user's settings, of which those `typed` for this command come before the policy's; `template` are
    their values for the chat template, None if they were typed.

    Raises:
        ModelError: The policy's file is damaged.
        ConfigError: The settings do not go together, or this version refuses one.
    """
    text = policy.record()
    if text is None:
        return TrainedSettings(conf, None, origin=policy.source)
    trained, given = _read(text, policy)
    known = [each.name for each in fields(PPOConfig)]
    own = {name: trained[name] for name in known if name in trained and name not in (*HERE, *typed)}
    try:
        config = PPOConfig(**{**asdict(conf), **own})
    except ConfigError as error:
        where = f"{policy.source}, with the settings that it was trained with"
        raise ConfigError("\n".join(f"{where}: {line}" for line in str(error).splitlines())) from error
    before = with_dtype(conf)
    differing = {
        name: f"ppo.{name}={getattr(config, name)} (conf: {getattr(before, name)})"
        for name in own
        if getattr(config, name) != getattr(before, name)
    }
    if template is not None and dict(template) != given:
        differing[TEMPLATE] = f"{TEMPLATE}={given} (conf: {dict(template)})"
    unknown = tuple(sorted(trained.keys() - {*known}))
    return TrainedSettings(config, given, differing, policy.source, unknown)


def _read(text: str, policy: PretrainedHandle) -> tuple[dict[str, Any], dict[str, Any]]:
    """Return a policy's settings of PPO and its chat template's values, from both of its files."""
    try:
        record = json.loads(text)
        settings, given = dict(record["ppo"]), dict(record[TEMPLATE])
    except (ValueError, KeyError, TypeError) as error:
        raise ModelError(f"{policy.source}: its {RECORD} is damaged ({in_one_line(error)}); copy it again") from error
    generation = policy.generation_config()
    found = {name: getattr(generation, name, None) for name in IN_GENERATION_CONFIG}
    found[_most_tokens(settings)] = generation.max_new_tokens
    return {**settings, **{name: value for name, value in found.items() if value is not None}}, given


def _most_tokens(settings: Mapping[str, Any]) -> str:
    """Return the setting that `max_new_tokens` is: with an environment one generation is a turn."""
    return "response_length" if settings.get("environment") is None else "turn_length"
