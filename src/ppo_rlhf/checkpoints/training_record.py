"""How a policy was trained, beside its weights: who evaluates it, or lets it answer, does it with the same settings.

generation_config.json    what transformers knows, too: most tokens, temperature, top-k, top-p, stop tokens
ppo_rlhf.json             every other setting of PPO but those of `HERE`, the number of processes, and what the chat
                          template was given

Evaluation and `kedro generate` take from them how responses are drawn, and the precision; report and advice name all.
"""

from __future__ import annotations

import copy
import importlib.metadata
import json
from collections.abc import Collection, Mapping
from dataclasses import asdict, dataclass, field, fields
from typing import Any

from transformers import GenerationConfig

from ppo_rlhf.config import MODEL_PATHS, PPOConfig
from ppo_rlhf.config.ppo import on_processes
from ppo_rlhf.config.ppo_rules import OFFLOADING_FIELDS, VLLM_FIELDS
from ppo_rlhf.core.errors import ConfigError, ModelError, in_one_line
from ppo_rlhf.models.loading import RECORD, PretrainedHandle
from ppo_rlhf.models.quiet import say_once
from ppo_rlhf.models.tokenizers import template_defaults
from ppo_rlhf.ppo.precision import resolve_device, with_dtype
from ppo_rlhf.ppo.state import TrainingState
from ppo_rlhf.runtime.names import TEMPLATE

DRAWN_BY = (
    "response_length",
    "min_response_length",
    "temperature",
    "top_k",
    "top_p",
    "stop_token",
    "stop_token_id",
    "environment",
    "turn_length",
)
"""Fields of PPOConfig that say how responses are drawn."""
HERE = (
    "device",
    "compile",
    "cuda_graphs",
    *VLLM_FIELDS,
    *OFFLOADING_FIELDS,
    "local_rollout_forward_batch_size",
    "max_tokens_per_micro_batch",
    "max_time",
    "shutdown_grace_s",
    "report_to",
    "callbacks",
    *MODEL_PATHS,
    "overlong_prompts",
    "seed",
)
"""Fields that belong to a machine, a run or its prompts, not to the policy: the settings of whoever uses it count."""
USED = (*HERE, *DRAWN_BY, "rollout_engine", "dtype")
"""Fields that count where a policy only answers."""
OPTION = "--params"  # PPOTrainer does not read these settings
IN_GENERATION_CONFIG = ("temperature", "top_k", "top_p")


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
        "processes": state.config.world_size,
        "ppo": {name: value for name, value in settings.items() if name not in elsewhere},
        TEMPLATE: template_defaults(state.tokenizer),
    }
    return json.dumps(record, indent=2) + "\n"


@dataclass(frozen=True)
class TrainedSettings:
    """The settings to use a policy with: its own where it says them, else the user's; what was typed comes first."""

    config: PPOConfig
    chat_template_kwargs: Mapping[str, Any] | None  # what its chat template was given; None: it does not say
    origin: str  # the policy
    differing: dict[str, tuple[Any, Any]] = field(default_factory=dict)  # its own value and conf's, by setting
    notes: tuple[str, ...] = ()  # of its settings that are not used

    def lines(self) -> list[str]:
        """Return what a user must know, in a line each."""
        if self.chat_template_kwargs is None:
            used = ", ".join(f"{name}={getattr(self.config, name)}" for name in ("response_length", "temperature"))
            return [
                f"{self.origin} has no {RECORD}, which says how it was trained: the project's settings count ({used})"
            ]
        said = [f"{self.origin}: {note}" for note in self.notes]
        if self.differing:
            shown = ", ".join(f"{name}={own} (conf: {conf})" for name, (own, conf) in self.differing.items())
            name, (_, conf) = next(iter(self.differing.items()))
            typed = f"{name}.<name>=<value>" if name == TEMPLATE else f"{name}={'null' if conf is None else conf}"
            said.insert(
                0, f"{self.origin}: its own settings are used: {shown}. To use another value, type it: {OPTION} {typed}"
            )
        return said


def settings_of(
    policy: PretrainedHandle,
    conf: PPOConfig,
    typed: Collection[str] = (),
    template: Mapping[str, Any] | None = None,
    *,
    may_import: bool = True,
) -> TrainedSettings:
    """Return the settings to let a policy answer with: of its own those that say how responses are drawn.

    `conf` are the user's settings, of which those `typed` for this command come before the policy's; `template` are
    their values for the chat template, None if they were typed. The rules between settings of training do not count.
    Unless `may_import`, the policy may not name an environment, which is Python code, that `conf` does not.

    Raises:
        ModelError: The policy's file is damaged.
        ConfigError: The settings do not go together, or the policy names an environment that it may not.
    """
    found = _read(policy)
    if found is None:
        return TrainedSettings(conf, None, policy.source)
    own = {name: found.ppo[name] for name in (*DRAWN_BY, "dtype") if name in found.ppo and name not in typed}
    if "environment" in typed and conf.environment != found.ppo.get("environment"):
        own.pop("turn_length", None)  # which belongs to the environment
    notes, before = [], with_dtype(conf)
    if own.get("dtype") == "float16" and resolve_device(conf.device).type == "cpu":
        notes.append(f"it was trained with ppo.dtype=float16, which needs a GPU: ppo.dtype={before.dtype} is used")
        del own["dtype"]
    for name in sorted({each.name for each in fields(PPOConfig)} & found.ppo.keys() & {*typed} - {*USED}):
        if getattr(conf, name) != found.ppo[name]:
            notes.append(f"it was trained with ppo.{name}={found.ppo[name]}, and what is typed does not change that")
    environment = own.get("environment")
    if environment not in (None, conf.environment) and not may_import:
        raise ConfigError(
            f"{policy.source} was trained with ppo.environment={environment}. Type it ({OPTION} "
            f"ppo.environment={environment}) to import it, or ppo.environment=null"
        )
    here = {name: getattr(conf, name) for name in USED} | own
    try:
        try:
            checked = PPOConfig(**here)
        except ConfigError:
            if conf.rollout_engine != "vllm":
                raise
            without = {e.name: e.default for e in fields(conf) if e.name in ("rollout_engine", *VLLM_FIELDS)}
            checked = PPOConfig(**{**here, **without})
            own |= without
            notes.append("ppo.rollout_engine=static is used, since vLLM does not go with its own settings")
    except ConfigError as error:
        where = f"{policy.source}, with the settings that it was trained with"
        raise ConfigError("\n".join(f"{where}: {line}" for line in str(error).splitlines())) from error
    config = copy.copy(conf)  # not `replace`, which asks the rules of training
    for name in own:
        object.__setattr__(config, name, getattr(checked, name))
    differing: dict[str, tuple[Any, Any]] = {
        f"ppo.{name}": (getattr(config, name), getattr(before, name))
        for name in own
        if name in (*DRAWN_BY, "dtype") and getattr(config, name) != getattr(before, name)
    }
    if template is not None and dict(template) != found.template:
        differing[TEMPLATE] = (found.template, dict(template))
    return TrainedSettings(config, found.template, policy.source, differing, tuple(notes))


def settings_of_training(policy: PretrainedHandle, here: PPOConfig) -> PPOConfig:
    """Return the settings that a policy was trained with, for report and advice; `here` if it does not say them.

    Those of a machine or a run (`HERE`) have their defaults, unless `here` has all others as the policy has them. What
    this version does not know, or refuses, is named in a line.
    """
    if (found := _read(policy)) is None:
        return here
    known = {each.name for each in fields(PPOConfig)} - {*HERE}
    if unknown := sorted(found.ppo.keys() - known - {*HERE}):
        names = ", ".join(f"ppo.{name}" for name in unknown)
        say_once(f"{policy.source}: settings that this version does not know are left out: {names}")
    try:
        own = on_processes(found.processes)(**{name: found.ppo[name] for name in known & found.ppo.keys()})
    except ConfigError as error:
        say_once(
            f"{policy.source}: this version refuses the settings that it was trained with, so report names conf's: "
            f"{in_one_line(error)}"
        )
        return here
    is_alike = own.world_size == here.world_size and all(getattr(own, n) == getattr(here, n) for n in known)
    return here if is_alike else own


@dataclass(frozen=True)
class _Record:
    """What a policy's two files say."""

    ppo: dict[str, Any]
    template: dict[str, Any]
    processes: int


def _read(policy: PretrainedHandle) -> _Record | None:
    """Return how a policy was trained; None if it does not say it."""
    try:
        if (text := policy.record()) is None:
            return None
        record = json.loads(text)
        settings, given = dict(record["ppo"]), dict(record[TEMPLATE])
        processes = max(1, int(record.get("processes", 1)))
    except (ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
        raise ModelError(f"{policy.source}: its {RECORD} is damaged ({in_one_line(error)}); copy it again") from error
    generation = policy.generation_config()
    found = {name: getattr(generation, name, None) for name in IN_GENERATION_CONFIG}
    found[_most_tokens(settings)] = generation.max_new_tokens
    ppo = {**settings, **{name: value for name, value in found.items() if value is not None}}
    return _Record(ppo, given, processes)


def _most_tokens(settings: Mapping[str, Any]) -> str:
    """Return the setting that `max_new_tokens` is: with an environment one generation is a turn."""
    return "response_length" if settings.get("environment") is None else "turn_length"
