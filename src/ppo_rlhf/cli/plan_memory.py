"""`kedro plan-memory`: what a run of PPO needs in each phase, and what to change first if there is less."""

from __future__ import annotations

import copy
import json
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click
from kedro.framework.session import KedroSession
from kedro.pipeline import Pipeline

from ppo_rlhf.cli.advise import show
from ppo_rlhf.cli.errors import project_here
from ppo_rlhf.cli.params import split_params
from ppo_rlhf.core.errors import ConfigError
from ppo_rlhf.hooks.checks import refuse_unread
from ppo_rlhf.processes import process_count

if TYPE_CHECKING:  # imported where they are used: they import torch, which other commands do without
    import torch
    from kedro.framework.context import KedroContext
    from transformers import PretrainedConfig

    from ppo_rlhf.config import PPOConfig
    from ppo_rlhf.memory import MemoryPlan, RunShape
    from ppo_rlhf.models.loading import PretrainedHandle

READ = {"sft_policy", "base_model", "reward_model", "raw_prompts"}
READ |= {f"params:{group}" for group in ("ppo", "evaluation", "reward", "prompts")}
DTYPES = ("float32", "bfloat16", "float16", "float64")


@click.command("plan-memory")
@click.option("--model", metavar="PATH", help="Directory, hub id or config.json of the SFT model; else the project's.")
@click.option("--batch", type=click.IntRange(min=1), help="ppo.per_device_train_batch_size.")
@click.option("--prompt-length", type=click.IntRange(min=1), help="Tokens of the longest prompt; else the project's.")
@click.option("--response-length", type=click.IntRange(min=1), help="ppo.response_length.")
@click.option("--dtype", type=click.Choice(DTYPES), help="ppo.dtype.")
@click.option("--processes", type=click.IntRange(min=1), help="Processes of the run; else 1, or the launcher's.")
@click.option("--memory", type=click.FloatRange(0, min_open=True), help="GiB to fit into; else what is free here.")
@click.option("--params", callback=split_params, default="", help="Other settings, as `kedro run` takes them.")
@click.option("--env", "-e", help="Kedro's environment.")
def plan_memory(**options: Any) -> None:
    """Say how much memory PPO needs with the project's settings, phase by phase, and what to change first if there is
    less. No weights are read. docs/memory.md says what is counted, and how far off the numbers are.
    """
    show(lambda: _lines(project_here(), options))


@dataclass(frozen=True)
class Planned:
    """The memory of the project's run of PPO; `free` and `on_host` are bytes free on its device and on the host."""

    model: str
    config: PPOConfig
    shape: RunShape
    plan: MemoryPlan
    device: torch.device
    free: int
    on_host: int

    @property
    def process(self) -> int:
        """Bytes of the process itself, where it lies in the same memory as the models."""
        from ppo_rlhf.memory import PROCESS_BYTES

        return PROCESS_BYTES if self.shape.on_cpu else 0

    @property
    def share(self) -> int:
        """Free bytes of one process: processes share the host's memory, and each GPU has one process."""
        return self.free // self.shape.processes if self.shape.on_cpu else self.free

    @property
    def needed(self) -> int:
        """Bytes that one process needs."""
        return self.plan.needed + self.process


def _lines(project_path: Path, options: dict[str, Any]) -> Iterator[str]:
    session: Any = KedroSession.create(project_path, env=options["env"], runtime_params=options["params"])
    with session:
        context = session.load_context()
        refuse_unread(context.config_loader, READ)
        planned = plan(context, **options)
    yield f"{planned.model}: {type(planned.shape.policy).__name__}, {planned.config.dtype}, on {planned.device}"
    yield from _report(planned)


def plan(context: KedroContext, **options: Any) -> Planned:
    """Plan the memory of a project's run; `options` of the command take the place of its settings.

    Raises:
        ConfigError: There is no model to plan for.
    """
    import torch

    from ppo_rlhf import memory
    from ppo_rlhf.config import PPOConfig
    from ppo_rlhf.evaluation.policy import EvaluationConfig
    from ppo_rlhf.ppo.models import check_device
    from ppo_rlhf.ppo.precision import resolve_device

    names = {"per_device_train_batch_size": "batch", "response_length": "response_length", "dtype": "dtype"}
    given = {name: options[option] for name, option in names.items() if options.get(option) is not None}
    parameters = context.config_loader["parameters"]
    config = PPOConfig(**{**parameters.get("ppo", {}), **given})
    gibibytes = options.get("memory")  # of a device that need not be here
    device = torch.device("cuda") if gibibytes and "cuda" in config.device else resolve_device(config.device)
    check_device(config, device)
    evaluation = EvaluationConfig(**parameters.get("evaluation", {}))
    model = _sft_model(context, options.get("model"))
    policy = _model_config(model)
    shape = memory.RunShape(
        policy=policy,
        prompt_length=options.get("prompt_length") or _longest_prompt(context, model, config),
        reward_model=_reward_model(context, model, policy),
        on_cpu=device.type == "cpu",
        evaluation_rows=min(evaluation.batch_size, evaluation.iteration_prompts),
        processes=options.get("processes") or process_count(),
        trust_remote_code=model.trust_remote_code,
    )
    found = memory.plan_memory(config, shape)
    free, on_host = memory.available_memory(torch.device("cpu") if gibibytes else device)
    free = round(gibibytes * 2**30) if gibibytes else free
    return Planned(model.source, config, shape, found, device, free, on_host)


def _report(planned: Planned) -> Iterator[str]:
    from ppo_rlhf.memory import PROCESS_BYTES, micro_batch_rows, suggestions

    plan, config, shape, free = planned.plan, planned.config, planned.shape, planned.share
    rollout = min(config.local_rollout_forward_batch_size, config.local_batch_size)
    yield (
        f"Prompts of {shape.prompt_length} and responses of {config.response_length} tokens; {rollout} at a time in "
        f"the rollout, {micro_batch_rows(config, shape.prompt_length)} in the update"
    )
    if shape.processes > 1:
        yield f"Of {shape.processes} processes each needs:"
    yield ""
    yield _row("Held all the time", sum(plan.held.values()))
    yield from (_row(f"  {name}", size) for name, size in plan.held.items())
    yield ""
    yield "At the peak of each phase, with what is held"
    for name, size in plan.phases.items():
        yield _row(f"  {name}", size) + ("  <- the most" if name == plan.peak else "")
    if plan.on_host:
        yield _row("Offloaded models in the host's memory", plan.on_host)
    yield ""
    with_process = f", {gib(planned.process)} of it the process itself" if shape.on_cpu else ""
    yield f"Needed: {gib(planned.needed)} (phase: {plan.peak}{with_process}). Free: {gib(free)}."
    waiting = shape.processes * (plan.on_host + PROCESS_BYTES)
    if waiting > planned.on_host and not shape.on_cpu:
        yield f"The host needs {gib(waiting)} for processes and offloaded models, and has {gib(planned.on_host)} free."
    helpful = list(suggestions(config, shape)) if planned.needed > free else []
    if planned.needed <= free:
        yield "It fits."
    elif not helpful:
        yield "It does not fit, and no setting changes that: take a smaller model, shorter texts or more memory."
    else:
        yield "It does not fit. Each of these lowers the peak, the cheapest first; together they lower it further:"
    for place, each in enumerate(helpful, start=1):
        settings = ", ".join(f"ppo.{name}={_word(value)}" for name, value in each.changes.items())
        yield f"{place}. {settings} ({each.price}): {gib(each.needed + planned.process)}"


def _row(name: str, size: int) -> str:
    return f"{name:<58} {gib(size):>12}"


def _word(value: Any) -> str:
    return json.dumps(value).strip('"')


def gib(size: int) -> str:
    """Return a number of bytes in GiB."""
    return f"{size / 2**30:.2f} GiB"


def _sft_model(context: KedroContext, given: str | None) -> PretrainedHandle:
    """Return the model given, the SFT model, or, before that is trained, the model that it will start from."""
    from ppo_rlhf.models.loading import PretrainedHandle

    if given:
        trust = context.catalog["sft_policy"]._describe().get("trust_remote_code", False)
        return PretrainedHandle(given, trust_remote_code=trust)
    for entry in ("sft_policy", "base_model"):
        dataset: Any = context.catalog.get(entry)
        if dataset is not None and dataset._describe().get("filepath") is not None and dataset.exists():
            handle: PretrainedHandle = dataset.load()
            return handle
    raise ConfigError(
        "There is no SFT model yet to plan memory for (sft_model_path, base_model_path): give one with --model, or set "
        "either in conf/local/globals.yml."
    )


def _model_config(model: PretrainedHandle) -> PretrainedConfig:
    """Return a model's configuration, also from a directory without weights and from a file."""
    from transformers import AutoConfig

    from ppo_rlhf.models.loading import why_unreadable

    place = Path(model.source).expanduser()
    if place.name == "config.json":
        place = place.parent  # in a directory transformers finds the model's own code
    if not place.exists():
        return model.config()
    try:
        config: PretrainedConfig = AutoConfig.from_pretrained(
            place, local_files_only=True, trust_remote_code=model.trust_remote_code
        )
    except (OSError, ValueError, KeyError, ImportError) as error:  # the last: packages that its own code needs
        why = why_unreadable(error)[:200]
        raise ConfigError(f"{model.source} cannot be read as a model's configuration: {why}") from None
    return config


def _reward_model(context: KedroContext, model: PretrainedHandle, policy: PretrainedConfig) -> PretrainedConfig | None:
    """Return the reward model's configuration, None if the reward has none.

    Before it is trained it is one on the policy's backbone, as reward_modelling makes it; also if the one that is there
    was trained for the project's own policy, and this is another.
    """
    from ppo_rlhf.models.reward_model import CausalLMRewardConfig
    from ppo_rlhf.preflight.request import RunRequest
    from ppo_rlhf.rewards.config import RewardConfig

    if not RewardConfig(**context.config_loader["parameters"].get("reward", {})).needs_model:
        return None
    dataset: Any = context.catalog.get("reward_model")
    data_root = context.config_loader["globals"].get("data_root", "data")
    run = RunRequest(Pipeline([]), context.catalog, context.project_path, data_root)
    is_of_another = run.is_made_here("reward_model") and not run.is_ours(model.source)
    if dataset is not None and dataset.exists() and not is_of_another:
        return _model_config(dataset.load())
    return CausalLMRewardConfig(text_config=copy.deepcopy(policy))


def _longest_prompt(context: KedroContext, model: PretrainedHandle, config: PPOConfig) -> int:
    from ppo_rlhf.data.prompts import PromptsConfig, read_prompts, reader_of

    if Path(model.source).is_file():
        raise ConfigError(f"{model.source} has no tokenizer that counts the prompts' tokens: give --prompt-length.")
    column = PromptsConfig(**context.config_loader["parameters"].get("prompts", {})).column
    prompts = read_prompts(reader_of(model), context.catalog["raw_prompts"].load(), config, column, "prompts")
    return max(map(len, prompts.prompt_ids))
