"""Records how a policy was trained, in files beside its weights, so that later uses of the policy have the same
settings.

generation_config.json    settings that transformers also knows: maximum tokens, temperature, top-k, top-p, stop tokens
ppo_rlhf.json             every other PPO setting except those in `HERE`, the number of processes, and the arguments of
                          the chat template

The evaluation and `kedro generate` use the policy's recorded sampling settings and precision. The report and the tuning
advice use all recorded settings.
"""

from __future__ import annotations

import copy
import importlib.metadata
import json
from collections.abc import Collection, Mapping
from dataclasses import asdict, dataclass, field, fields
from typing import Any

from transformers import GenerationConfig, PreTrainedModel

from ppo_rlhf.config import PPOConfig
from ppo_rlhf.config.ppo import VLLM_FIELDS
from ppo_rlhf.config.setting_roles import names_of
from ppo_rlhf.core.errors import ConfigError, ModelError, in_one_line
from ppo_rlhf.models.directories import RECORD
from ppo_rlhf.models.loading import PretrainedHandle
from ppo_rlhf.models.tokenizers import template_defaults
from ppo_rlhf.passes.sampling import SamplingSettings
from ppo_rlhf.ppo.batch_sampling import Sampler
from ppo_rlhf.ppo.precision import resolve_device, with_dtype
from ppo_rlhf.runtime.log_lines import say_once
from ppo_rlhf.runtime.names import TEMPLATE

DRAWN_BY = names_of(PPOConfig, lambda roles: roles.record == "sampling")
"""Fields of PPOConfig that control how responses are sampled."""
HERE = names_of(PPOConfig, lambda roles: roles.record == "here")
"""Fields of PPOConfig that belong to a machine, a run or its prompts, not to the policy; their values come from the
current user's settings, not from the record."""
USED = (*HERE, *DRAWN_BY, "rollout_engine", "dtype")
"""Fields of PPOConfig that matter when a policy only generates responses."""
OPTION = "--params"  # `--params` sets parameters of `kedro run`; PPOTrainer does not read them
IN_GENERATION_CONFIG = ("temperature", "top_k", "top_p")


def generation_config_of(policy: PreTrainedModel, sampling: SamplingSettings) -> GenerationConfig:
    """Return the sampling settings of PPO. With an environment, `max_new_tokens` is the limit of one turn."""
    stops = list(sampling.stop_token_ids)
    return GenerationConfig(
        do_sample=True,
        **{name: getattr(sampling, name) for name in IN_GENERATION_CONFIG},
        bos_token_id=getattr(policy.generation_config, "bos_token_id", None),
        eos_token_id=stops[0] if len(stops) == 1 else stops or None,
        pad_token_id=sampling.pad_token_id,
        max_new_tokens=sampling.turn_length or sampling.response_length,
    )


def record_of(sampler: Sampler) -> str:
    """Return the text of `ppo_rlhf.json`."""
    settings = asdict(sampler.config)
    elsewhere = {*HERE, *IN_GENERATION_CONFIG, _most_tokens(settings)}
    record = {
        "version": importlib.metadata.version("ppo_rlhf"),
        "processes": sampler.config.world_size,
        "ppo": {name: value for name, value in settings.items() if name not in elsewhere},
        TEMPLATE: template_defaults(sampler.tokenizer),
    }
    return json.dumps(record, indent=2) + "\n"


@dataclass(frozen=True)
class TrainedSettings:
    """The settings to use a policy with.

    Settings on the command line come first, then the policy's recorded settings, then the user's configuration.
    `differing` maps each setting whose recorded value is not the configured one to both values.
    """

    config: PPOConfig
    # Arguments of the chat template recorded with the policy; None: there is no record
    chat_template_kwargs: Mapping[str, Any] | None
    origin: str  # path or hub id of the policy whose record was read
    # (recorded value, configured value) of each setting that differs
    differing: dict[str, tuple[Any, Any]] = field(default_factory=dict)
    notes: tuple[str, ...] = ()  # one sentence about each recorded setting that this run does not use

    def lines(self) -> list[str]:
        """Return one line for each fact about the used settings that a user must know."""
        if self.chat_template_kwargs is None:
            used = ", ".join(f"{name}={getattr(self.config, name)}" for name in ("response_length", "temperature"))
            return [
                f"{self.origin} has no {RECORD}, the record of its training; the project's settings are used: {used}"
            ]
        lines = [f"{self.origin}: {note}" for note in self.notes]
        if self.differing:
            values = ", ".join(f"{name}={recorded} (conf: {conf})" for name, (recorded, conf) in self.differing.items())
            name, (_, conf) = next(iter(self.differing.items()))
            option = f"{name}.<name>=<value>" if name == TEMPLATE else f"{name}={'null' if conf is None else conf}"
            lines.insert(
                0,
                f"{self.origin}: its recorded settings are used: {values}. To use another value: {OPTION} {option}",
            )
        return lines


def settings_of(
    policy: PretrainedHandle,
    conf: PPOConfig,
    typed: Collection[str] = (),
    template: Mapping[str, Any] | None = None,
    *,
    may_import: bool = True,
) -> TrainedSettings:
    """Return the settings with which a policy generates responses: its recorded sampling settings, else the user's.

    PPOConfig's rules that concern only training are not checked.

    Args:
        policy: The policy, whose record is read.
        conf: The user's settings.
        typed: Names of the settings that were typed for this command; the typed settings come before the record.
        template: The user's arguments for the chat template, or None if the arguments were typed.
        may_import: False refuses a recorded environment, which is Python code, that `conf` does not name.

    Raises:
        ModelError: The policy's record is damaged.
        ConfigError: The settings exclude each other, or the policy's record names an environment that is refused.
    """
    record = _read(policy)
    if record is None:
        return TrainedSettings(conf, None, policy.source)
    own = {name: record.ppo[name] for name in (*DRAWN_BY, "dtype") if name in record.ppo and name not in typed}
    if "environment" in typed and conf.environment != record.ppo.get("environment"):
        # The recorded turn_length belongs to the recorded environment, not to the environment that the user typed
        own.pop("turn_length", None)
    notes, before = [], with_dtype(conf)
    if own.get("dtype") == "float16" and resolve_device(conf.device).type == "cpu":
        notes.append(f"it was trained with ppo.dtype=float16, which needs a GPU: ppo.dtype={before.dtype} is used")
        del own["dtype"]
    for name in sorted({each.name for each in fields(PPOConfig)} & record.ppo.keys() & {*typed} - {*USED}):
        if getattr(conf, name) != record.ppo[name]:
            notes.append(f"the policy was trained with ppo.{name}={record.ppo[name]}; the typed value has no effect")
    environment = own.get("environment")
    if environment not in (None, conf.environment) and not may_import:
        raise ConfigError(
            f"{policy.source} was trained with ppo.environment={environment}. Give {OPTION} "
            f"ppo.environment={environment} to import this code, or {OPTION} ppo.environment=null"
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
            notes.append("ppo.rollout_engine=static is used, because vLLM does not work with the policy's own settings")
    except ConfigError as error:
        where = f"{policy.source}, with its recorded settings"
        raise ConfigError("\n".join(f"{where}: {line}" for line in str(error).splitlines())) from error
    # Not `dataclasses.replace`, which would run PPOConfig's checks of settings that only training uses
    config = copy.copy(conf)
    for name in own:
        object.__setattr__(config, name, getattr(checked, name))
    differing: dict[str, tuple[Any, Any]] = {
        f"ppo.{name}": (getattr(config, name), getattr(before, name))
        for name in own
        if name in (*DRAWN_BY, "dtype") and getattr(config, name) != getattr(before, name)
    }
    if template is not None and dict(template) != record.template:
        differing[TEMPLATE] = (record.template, dict(template))
    return TrainedSettings(config, record.template, policy.source, differing, tuple(notes))


def settings_of_training(policy: PretrainedHandle, here: PPOConfig) -> PPOConfig:
    """Return the settings that a policy was trained with, for report and advice, or `here` if they were not recorded.

    If all settings of `here` except the settings of a machine or a run (`HERE`) equal the record, the function returns
    `here`; if not, the settings in `HERE` get their defaults. A log line names recorded settings that are refused.
    """
    if (record := _read(policy)) is None:
        return here
    try:
        own = PPOConfig.of_run(record.processes, {name: x for name, x in record.ppo.items() if name not in HERE})
    except ConfigError as error:
        say_once(
            f"{policy.source}: its recorded settings are refused, so the report shows those of conf: "
            f"{in_one_line(error)}"
        )
        return here
    known = {each.name for each in fields(PPOConfig)} - {*HERE}
    is_alike = own.world_size == here.world_size and all(getattr(own, n) == getattr(here, n) for n in known)
    return here if is_alike else own


@dataclass(frozen=True)
class _Record:
    """Content of the two files that record how a policy was trained."""

    ppo: dict[str, Any]
    template: dict[str, Any]
    processes: int


def _read(policy: PretrainedHandle) -> _Record | None:
    """Return the record of how a policy was trained, or None if the policy has no record."""
    try:
        if (text := policy.record()) is None:
            return None
        record = json.loads(text)
        settings, given = dict(record["ppo"]), dict(record[TEMPLATE])
        processes = max(1, int(record["processes"]))
    except (ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
        fix = "copy it again from the policy that was trained, or delete it: the settings of conf then apply"
        raise ModelError(f"{policy.source}: its {RECORD} is damaged ({in_one_line(error)}); {fix}") from error
    generation = policy.generation_config()
    sampling = {name: getattr(generation, name, None) for name in IN_GENERATION_CONFIG}
    sampling[_most_tokens(settings)] = generation.max_new_tokens
    ppo = {**settings, **{name: value for name, value in sampling.items() if value is not None}}
    return _Record(ppo, given, processes)


def _most_tokens(settings: Mapping[str, Any]) -> str:
    """Return the name of the setting for `max_new_tokens`: with an environment the maximum length of one turn."""
    return "response_length" if settings.get("environment") is None else "turn_length"
