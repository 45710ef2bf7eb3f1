"""`kedro plan-memory`: what a run of PPO will need, phase by phase, and what to change first if that is not there."""

from __future__ import annotations

import copy
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click
from kedro.framework.cli.utils import _split_params
from kedro.framework.session import KedroSession

from ppo_rlhf.cli.errors import one_line_each, project_here
from ppo_rlhf.core.errors import ConfigError, ModelError

if TYPE_CHECKING:  # at run time imported where they are used: with them comes torch, which other commands do without
    from kedro.framework.context import KedroContext
    from transformers import PretrainedConfig

    from ppo_rlhf.config import PPOConfig
    from ppo_rlhf.models.loading import PretrainedHandle
    from ppo_rlhf.training.memory import Machine, MemoryPlan, RunShape

GIBIBYTE = 2**30
DTYPES = ("float32", "bfloat16", "float16", "float64")


@click.command("plan-memory")
@click.option("--model", metavar="PATH", help="Directory, hub id or config.json of the SFT model; else the project's.")
@click.option("--batch", type=click.IntRange(min=1), help="ppo.per_device_train_batch_size.")
@click.option("--prompt-length", type=click.IntRange(min=1), help="Tokens of the longest prompt; else the project's.")
@click.option("--response-length", type=click.IntRange(min=1), help="ppo.response_length.")
@click.option("--dtype", type=click.Choice(DTYPES), help="ppo.dtype.")
@click.option("--params", callback=_split_params, default="", help="Other settings, as `kedro run` takes them.")
@click.option("--env", "-e", help="Kedro's environment.")
def plan_memory(**options: Any) -> None:
    """Say how much memory PPO will need with the project's settings, phase by phase, and what to change first if there
    is less. No weights are read. docs/memory.md says what is counted and how well it was met.
    """
    project_path = project_here()
    try:
        for line in _lines(project_path, _Options(**options)):
            click.echo(line)
    except Exception as error:
        lines = one_line_each(error)
        if lines is None:
            raise
        raise click.ClickException("\nError: ".join(lines)) from None


@dataclass(frozen=True)
class _Options:
    model: str | None
    batch: int | None
    prompt_length: int | None
    response_length: int | None
    dtype: str | None
    params: dict[str, Any]
    env: str | None

    def settings(self) -> dict[str, Any]:
        named = {
            "per_device_train_batch_size": self.batch,
            "response_length": self.response_length,
            "dtype": self.dtype,
        }
        return {name: value for name, value in named.items() if value is not None}


def _lines(project_path: Path, options: _Options) -> Iterator[str]:
    from ppo_rlhf.config import PPOConfig
    from ppo_rlhf.ppo.accelerator import resolve_device
    from ppo_rlhf.ppo.build import check_device
    from ppo_rlhf.training.memory import RunShape, available_memory
    from ppo_rlhf.training.memory import plan_memory as plan

    session: Any = KedroSession.create(project_path, env=options.env, runtime_params=options.params)
    with session:
        context = session.load_context()
        parameters = context.config_loader["parameters"]
        config = PPOConfig(**{**parameters.get("ppo", {}), **options.settings()})
        device = resolve_device(config.device)
        check_device(config, device)
        model = _sft_model(context, options.model)
        policy = _model_config(model)
        shape = RunShape(
            policy=policy,
            prompt_length=options.prompt_length or _longest_prompt(context, model, config),
            reward_model=_reward_model(context, policy),
            on_cpu=device.type == "cpu",
            evaluation_rows=_evaluation_rows(parameters.get("evaluation", {})),
        )
    planned, machine = plan(config, shape), available_memory(device)
    yield f"{model.source}: {type(policy).__name__}, {config.dtype}, on {device}"
    yield from _report(planned, config, shape)
    yield from _verdict(planned, config, shape, machine)


def _report(plan: MemoryPlan, config: PPOConfig, shape: RunShape) -> Iterator[str]:
    from ppo_rlhf.training.memory.plan import micro_batch_rows

    rollout = min(config.local_rollout_forward_batch_size, config.local_batch_size)
    yield (
        f"Prompts of {shape.prompt_length} and responses of {config.response_length} tokens; {rollout} at a time in "
        f"the rollout, {micro_batch_rows(config, shape.prompt_length)} in the update"
    )
    yield ""
    yield _row("Held all the time", sum(plan.held.values()))
    for name, size in plan.held.items():
        yield _row(f"  {name}", size)
    yield ""
    yield "At the peak of each phase, with what is held"
    for phase in plan.phases:
        yield _row(f"  {phase.name}", phase.total) + ("  <- the most" if phase is plan.peak else "")
    if plan.on_host:
        yield _row("Waiting in the host's memory", plan.on_host)
    for more in plan.not_counted:
        yield f"Not counted: {more}"
    yield ""


def _verdict(plan: MemoryPlan, config: PPOConfig, shape: RunShape, machine: Machine) -> Iterator[str]:
    from ppo_rlhf.training.memory import remedies
    from ppo_rlhf.training.memory.plan import PROCESS_BYTES

    process = PROCESS_BYTES if shape.on_cpu else 0
    needed, limit = plan.needed + process, machine.device
    with_process = f", {_gib(process)} of it the process itself" if shape.on_cpu else ""
    yield f"Needed: {_gib(needed)} (phase: {plan.peak.name}{with_process}). Free: {_gib(limit)}."
    if plan.on_host + PROCESS_BYTES > machine.host and not shape.on_cpu:
        yield (
            f"The host needs {_gib(plan.on_host + PROCESS_BYTES)} for the process and the models that wait, and has "
            f"{_gib(machine.host)} free."
        )
    if needed <= limit:
        yield "It fits."
        return
    found = remedies(config, shape, plan, limit - process)
    if not found:
        yield "It does not fit, and no setting changes that: take a smaller model, shorter texts or more memory."
        return
    yield "It does not fit. Change first, each on top of those before it:"
    for place, remedy in enumerate(found, start=1):
        yield f"{place}. {remedy.changes} ({remedy.price}): {_gib(remedy.needed + process)}"
    least = found[-1].needed + process
    if least > limit:
        yield f"That is all, and {_gib(least)} are still too much: take a smaller model, shorter texts or more memory."


def _row(name: str, size: int) -> str:
    return f"{name:<58} {_gib(size):>12}"


def _gib(size: int) -> str:
    return f"{size / GIBIBYTE:.2f} GiB"


def _sft_model(context: KedroContext, given: str | None) -> PretrainedHandle:
    """Return the SFT model, or, before it is trained, the model that it will start from.

    One that is given is read as in a run that has it as sft_model_path: its own code runs only if that is trusted.
    """
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
        "There is no SFT model yet whose memory could be planned (sft_model_path, base_model_path): give one with "
        "--model, or set either in conf/local/globals.yml."
    )


def _model_config(model: PretrainedHandle) -> PretrainedConfig:
    """Return a model's configuration, of a directory without weights and of a file too."""
    path = Path(model.source).expanduser()
    file = path / "config.json" if path.is_dir() else path
    config = _config_in_file(file, model) if file.is_file() else model.config()
    if model.trust_remote_code:
        _run_own_code(config, model)
    return config


def _config_in_file(file: Path, model: PretrainedHandle) -> PretrainedConfig:
    from transformers import AutoConfig

    from ppo_rlhf.models.loading import why_unreadable

    place = file.parent if file.name == "config.json" else file  # only in a folder is a model's own code looked for
    try:
        config: PretrainedConfig = AutoConfig.from_pretrained(
            place, local_files_only=True, trust_remote_code=model.trust_remote_code
        )
    except (OSError, ValueError, KeyError, ImportError) as error:  # the last: packages that its own code needs
        raise ConfigError(f"{file} cannot be read as a model's configuration: {why_unreadable(error)[:200]}") from None
    return config


def _run_own_code(config: PretrainedConfig, model: PretrainedHandle) -> None:
    """Run the code that lies with a trusted model: from then on transformers makes such models from configurations."""
    import torch
    from transformers import AutoModelForCausalLM, AutoModelForSequenceClassification

    from ppo_rlhf.models.loading import why_unreadable

    for auto in (AutoModelForCausalLM, AutoModelForSequenceClassification):
        if auto.__name__ in getattr(config, "auto_map", {}):
            try:
                with torch.device("meta"):
                    auto.from_config(config, trust_remote_code=True)
            except Exception as error:  # whatever a person's code may raise
                raise ModelError(f"{model.source}: its own code cannot be run: {why_unreadable(error)}") from error


def _reward_model(context: KedroContext, policy: PretrainedConfig) -> PretrainedConfig | None:
    """Return the reward model's configuration, None if the reward has none.

    Before it is trained it is one on the policy's backbone, as reward_modelling makes it.
    """
    from ppo_rlhf.models.reward_model import CausalLMRewardConfig
    from ppo_rlhf.rewards.scorers import RewardConfig

    if not RewardConfig(**context.config_loader["parameters"].get("reward", {})).needs_model:
        return None
    dataset: Any = context.catalog.get("reward_model")
    if dataset is not None and dataset.exists():
        return _model_config(dataset.load())
    return CausalLMRewardConfig(text_config=copy.deepcopy(policy))


def _longest_prompt(context: KedroContext, model: PretrainedHandle, config: PPOConfig) -> int:
    from ppo_rlhf.data.prompts import PromptsConfig, tokenise_prompts
    from ppo_rlhf.models.loading import steady_context

    if Path(model.source).is_file():
        raise ConfigError(
            f"{model.source} has no tokenizer that could count the prompts' tokens: give --prompt-length."
        )
    longest, why = steady_context(model.config())
    dataset = tokenise_prompts(
        context.catalog["raw_prompts"].load(),
        model.tokenizer(),
        column=PromptsConfig(**context.config_loader["parameters"].get("prompts", {})).column,
        response_length=config.response_length,
        context=longest,
        overlong=config.overlong_prompts,
        name="prompts",
        why=why,
    )
    return max(map(len, dataset.prompt_ids))


def _evaluation_rows(parameters: dict[str, Any]) -> int:
    from ppo_rlhf.ppo.evaluation import EvaluationConfig

    evaluation = EvaluationConfig(**parameters)
    return min(evaluation.batch_size, evaluation.iteration_prompts)
