"""The memory plan of `kedro doctor`; `kedro doctor` imports the module only for a plan, because the module imports
torch.
"""

from __future__ import annotations

import copy
import json
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import mean

import torch
from transformers import AutoConfig, PretrainedConfig

from ppo_rlhf.config import PPOConfig
from ppo_rlhf.core.errors import ModelError
from ppo_rlhf.data.prompts import PromptReader, PromptsConfig
from ppo_rlhf.evaluation.policy import EvaluationConfig
from ppo_rlhf.models.directories import is_adapter, why_unreadable
from ppo_rlhf.models.loading import PretrainedHandle
from ppo_rlhf.models.reward_model import CausalLMRewardConfig
from ppo_rlhf.passes.free_memory import available_memory, process_share, whole_memory
from ppo_rlhf.passes.prefixes import common_to_all
from ppo_rlhf.ppo.precision import resolve_device, with_dtype
from ppo_rlhf.ppo.run_setup import check_device
from ppo_rlhf.preflight import memory
from ppo_rlhf.preflight.request import RunRequest
from ppo_rlhf.rewards.config import RewardConfig
from ppo_rlhf.runtime.paths import below_project
from ppo_rlhf.runtime.processes import process_count

MOST_COMPARED = 1000
"""The most prompts whose common beginning is sought, evenly spaced, because each is read from the cached table."""


@dataclass(frozen=True)
class Planned:
    """The memory plan of a PPO run. `free` and `on_host` are the free bytes of the run's device and of the host."""

    model: str
    config: PPOConfig
    shape: memory.RunShape
    plan: memory.MemoryPlan
    device: torch.device
    free: int
    on_host: int
    mean_prompt_length: int = 1  # tokens
    is_here: bool = True  # True if the plan is for this machine's device and its free memory

    @property
    def process(self) -> int:
        """Bytes of the Python process, if the process and the models share the host's memory; else 0."""
        return memory.PROCESS_BYTES if self.shape.on_cpu else 0

    @property
    def needed(self) -> int:
        """Bytes that one process of the run needs at its peak."""
        return self.plan.needed + self.process

    @property
    def share(self) -> int:
        """Free bytes for one process."""
        return process_share(self.free, on_cpu=self.shape.on_cpu, processes=self.shape.processes)

    @property
    def waiting(self) -> int:
        """Bytes that the processes and the offloaded models of a GPU run need in the host's memory; 0 on a CPU."""
        return 0 if self.shape.on_cpu else self.shape.processes * (self.plan.on_host + memory.PROCESS_BYTES)


def plan(
    run: RunRequest, model: str | None, prompt_length: int | None, processes: int | None, memory_gib: float | None
) -> Planned | None:
    """Plan the memory of a run that trains by PPO. The plan is None if there is no model yet whose memory could be
    planned.

    If an argument is None, its value is taken from the run or from this machine.

    Args:
        run: The run.
        model: The directory, hub id or config.json of a policy to plan for instead of the run's own.
        prompt_length: Tokens of the longest prompt.
        processes: The world size. None: the launcher's, or 1.
        memory_gib: Memory in GiB of the device to plan for. None: the free memory of this machine's device.

    Raises:
        ConfigError: A setting does not fit the device.
        ModelError: The model cannot be read, or has no tokenizer to count the prompts' tokens with.
    """
    policy = _policy(run, model)
    if policy is None:
        return None
    config, evaluation = run.group("ppo", PPOConfig), run.group("evaluation", EvaluationConfig)
    assert config is not None
    device = torch.device("cuda") if memory_gib and "cuda" in config.device else resolve_device(config.device)
    is_elsewhere = device.type == "cuda" and not torch.cuda.is_available()
    config = with_dtype(config, "bfloat16" if is_elsewhere else None)
    check_device(config, device)
    free, on_host = available_memory(torch.device("cpu") if memory_gib else device)
    free = round(memory_gib * 2**30) if memory_gib else free
    lengths, shared = ([prompt_length], 0) if prompt_length else _prompt_tokens(run, policy, config)
    policy_config, on_cpu, count = _model_config(policy), device.type == "cpu", processes or process_count()
    share = process_share(free, on_cpu=on_cpu, processes=count)
    shape = memory.RunShape(
        policy=policy_config,
        prompt_length=max(lengths),
        shared_length=shared,
        reward_models=_reward_models(run, policy, policy_config),
        on_cpu=on_cpu,
        evaluation_rows=min(evaluation.batch_size, evaluation.iteration_prompts) if evaluation else 0,
        processes=count,
        trust_remote_code=policy.trust_remote_code,
        free=share - memory.PROCESS_BYTES if on_cpu else share,
        memory=share if memory_gib else whole_memory(device, count),
    )
    return Planned(
        model=policy.source,
        config=config,
        shape=shape,
        plan=memory.plan_memory(config, shape),
        device=device,
        free=free,
        on_host=on_host,
        mean_prompt_length=round(mean(lengths)),
        is_here=not is_elsewhere and not memory_gib,
    )


def table(planned: Planned) -> Iterator[str]:
    """Yield the lines of a plan: the bytes held all the time, and the peak of each phase."""
    plan, config, shape = planned.plan, planned.config, planned.shape
    yield ""
    yield f"{planned.model}: {type(shape.policy).__name__}, {config.dtype}, on {planned.device}"
    yield (
        f"Prompts of {shape.prompt_length} and responses of {config.response_length} tokens; {plan.rollout_rows} at a "
        f"time in the rollout, {plan.update_rows} in the update"
    )
    if plan.shared_length:
        yield f"All prompts begin with the same {plan.shared_length} tokens, which each pass computes once"
    if plan.update_tokens is not None:
        why = "as set" if config.max_tokens_per_micro_batch else "chosen from the free memory when training starts"
        yield f"At most {plan.update_tokens} tokens in a micro-batch (ppo.max_tokens_per_micro_batch: {why})"
    if shape.processes > 1:
        yield f"Each of the {shape.processes} processes needs:"
    yield ""
    held = {**plan.held, **({"the process: Python and its libraries": planned.process} if planned.process else {})}
    yield _row("Held all the time", sum(held.values()))
    yield from (_row(f"  {name}", size) for name, size in held.items())
    yield ""
    yield "At the peak of each phase, including what is held all the time"
    for name, size in plan.phases.items():
        yield _row(f"  {name}", size + planned.process) + ("  <- the most" if name == plan.peak else "")
    if plan.on_host:
        yield _row("Offloaded models in the host's memory", plan.on_host)
    yield ""


def changes(planned: Planned) -> Iterator[str]:
    """Yield the changes of settings that lower the peak of a run that does not fit, the cheapest first."""
    suggestions = list(memory.suggestions(planned.config, planned.shape))
    if not suggestions:
        yield "No setting lowers the peak: use a smaller model, shorter texts or more memory."
        return
    yield "Every change below lowers the peak, the cheapest first; several together lower the peak further:"
    for number, each in enumerate(suggestions, start=1):
        settings = ", ".join(f"ppo.{name}={_word(value)}" for name, value in each.changes.items())
        yield f"{number}. {settings} ({each.price}): {gib(each.needed + planned.process)}"


def gib(size: int) -> str:
    """Return a number of bytes in GiB."""
    return f"{size / 2**30:.2f} GiB"


def _row(name: str, size: int) -> str:
    return f"{name:<58} {gib(size):>12}"


def _word(value: object) -> str:
    return json.dumps(value).strip('"')


def policy_config(run: RunRequest, model: str | None) -> PretrainedConfig | None:
    """Return the configuration of the policy that `plan` plans for; None if there is no model yet."""
    policy = _policy(run, model)
    return None if policy is None else _model_config(policy)


def _policy(run: RunRequest, given: str | None) -> PretrainedHandle | None:
    """Return the model to plan for: `given`, else the policy's start model, else an earlier run's SFT policy.

    The function returns None if none of the three models exists.
    """
    if given:
        path = Path(given).expanduser()
        source = str(path.parent) if path.name == "config.json" else given
        start = run.catalog["sft_policy"]
        return PretrainedHandle(source, start._describe()["trust_remote_code"], gguf_cache=start.gguf_cache)
    for entry in (run.start, "sft_policy"):
        if run.source(entry) is not None and run.catalog[entry].exists():
            handle: PretrainedHandle = run.catalog[entry].load()
            return handle
    return None


def _model_config(model: PretrainedHandle) -> PretrainedConfig:
    """Return a model's configuration. A directory may lack weights."""
    folder = Path(model.source)
    if model.gguf or not folder.is_dir() or is_adapter(folder):
        return model.config()
    trusted = {"local_files_only": True, "trust_remote_code": model.trust_remote_code}
    try:
        config: PretrainedConfig = AutoConfig.from_pretrained(model.source, **trusted)
    # ImportError: the model's remote code needs a package that is not installed
    except (OSError, ValueError, KeyError, ImportError) as error:
        raise ModelError(f"{model.source}: its configuration cannot be loaded: {why_unreadable(error)}") from None
    return config


def _reward_models(run: RunRequest, model: PretrainedHandle, policy: PretrainedConfig) -> tuple[PretrainedConfig, ...]:
    """Return the configurations of the run's reward models, the one from which a critic starts first."""
    paths = [None] if (reward := run.group("reward", RewardConfig)) is None else reward.model_paths
    return tuple(
        _catalogued(run, model, policy)
        if path is None
        else _model_config(PretrainedHandle(below_project(path, run.project_path)))
        for path in paths
    )


def _catalogued(run: RunRequest, model: PretrainedHandle, policy: PretrainedConfig) -> PretrainedConfig:
    """Return the configuration of the catalog's reward model.

    If the reward model is not trained yet, assume one on the policy's backbone, as the stage reward_modelling makes.
    Also assume a reward model on the policy's backbone if the stored reward model was trained for the project's own
    policy and `model` is another policy.
    """
    is_for_another = run.is_made_here("reward_model") and not run.is_ours(model.source)
    if run.source("reward_model") is not None and run.catalog["reward_model"].exists() and not is_for_another:
        return _model_config(run.catalog["reward_model"].load())
    return CausalLMRewardConfig(text_config=copy.deepcopy(policy))


def _prompt_tokens(run: RunRequest, model: PretrainedHandle, config: PPOConfig) -> tuple[Sequence[int], int]:
    """Return the tokens of each prompt, and the tokens with which `MOST_COMPARED` of the prompts all begin."""
    prompts = run.group("prompts", PromptsConfig) or PromptsConfig()
    try:
        reader = PromptReader.of(model, config)
    except ModelError as error:
        raise ModelError(f"{error} Or give --prompt-length; then no tokenizer is needed.") from error
    table = run.catalog["raw_prompts"].load()
    read = reader.read(table, prompts.column, "prompts")
    some = read.select(list(range(0, len(read), -(-len(read) // MOST_COMPARED))))
    return read.lengths, common_to_all(some.prompt_ids)
