"""Models: that they can be read, that they fit each other, and that a person's own are never written."""

from __future__ import annotations

from pathlib import Path

from ppo_rlhf.config import PPOConfig
from ppo_rlhf.models.loading import PretrainedHandle
from ppo_rlhf.models.tokenizers import same_vocabulary
from ppo_rlhf.ppo.accelerator import resolve_device
from ppo_rlhf.ppo.build import check_device
from ppo_rlhf.preflight.request import RunRequest
from ppo_rlhf.rewards.scorers import NOTHING_TO_OFFLOAD, RewardConfig

LAYER = "06_models"
SHIPPED_DATA_ROOT = "data"  # where conf/base has the models, also for who moves the layers and says nothing of these
DYNAMIC_MODULES = "transformers_modules."  # where transformers puts the code that lies with a model
WRITTEN_BY = {  # dataset: the stage that writes it, the global that says where it is
    "sft_policy": ("supervised_finetuning", "sft_model_path"),
    "reward_model": ("reward_modelling", "reward_model_path"),
}


def check_protection(run: RunRequest) -> None:
    """Note a stage that would write where a person's own model lies, instead of below the project's models."""
    for name, (stage, setting) in WRITTEN_BY.items():
        source = run.source(name) if run.writes(name) else None
        if source is None or _is_ours(run, source):
            continue
        shipped = run.project_path / SHIPPED_DATA_ROOT / LAYER / name
        if run.data_root != SHIPPED_DATA_ROOT and run.project_path / source == shipped:
            run.problems.append(
                f"data_root={run.data_root} moves what the project writes, and {setting} still is {source}: set "
                f"{setting}={Path(run.data_root, LAYER, name)}, too."
            )
        else:
            run.problems.append(
                f"{setting}={source} is outside {Path(run.data_root, LAYER)}, and {stage}, a part of this run, would "
                "write it; models of your own are never written. Run `--pipelines align` to use it as it is"
                f", or leave {setting} out {_to_train(name)}."
            )


def check_models(run: RunRequest) -> dict[str, PretrainedHandle]:
    """Note models that are missing, incomplete or do not fit their tokenizer; return the others by dataset name."""
    usable = {}
    for name in ("base_model", "sft_policy", "ppo_policy", "reward_model"):
        if not run.reads(name) or (name == "reward_model" and not reward_model_is_needed(run)):
            continue
        source = run.source(name)
        if name in WRITTEN_BY and source is not None and _is_ours(run, source) and not run.catalog[name].exists():
            stage, setting = WRITTEN_BY[name]
            run.problems.append(f"{source}: nothing is there yet. Run {stage} first, or set {setting}.")
            continue
        if name == "ppo_policy" and not run.catalog[name].exists():
            run.problems.append(f"{source}: nothing is there yet. Run ppo first.")
            continue
        handle = run.load(name)
        if handle is None:
            continue
        before = len(run.problems)
        with run.noting():
            handle.tokenizer()
            if name == "reward_model":
                handle.check_reward_model()
            else:
                handle.check_causal_lm()
        if len(run.problems) == before:
            usable[name] = handle
    return usable


def check_devices(run: RunRequest) -> None:
    """Note devices that this machine does not have, and what the configuration asks of one that it cannot do."""
    for name in ("supervised_finetuning", "reward_modelling", "ppo"):
        group = run.group(name)
        device = getattr(group, "device", None)
        if device is not None:
            with run.noting():
                resolved = resolve_device(device)
                if isinstance(group, PPOConfig):
                    check_device(group, resolved)
    ppo, reward = run.group("ppo"), run.group("reward")
    is_offloaded = isinstance(ppo, PPOConfig) and ppo.offload_reward_model
    if is_offloaded and isinstance(reward, RewardConfig) and not reward.needs_model:
        run.problems.append(NOTHING_TO_OFFLOAD)


def check_critic(run: RunRequest, models: dict[str, PretrainedHandle]) -> None:
    """Note a critic that is to start as a reward model which the run does not have, or which reads other tokens."""
    ppo, reward = run.group("ppo"), run.group("reward")
    if not (isinstance(ppo, PPOConfig) and isinstance(reward, RewardConfig)) or ppo.value_model != "reward_init":
        return
    if not reward.needs_model:
        run.problems.append(
            "ppo.value_model=reward_init starts the critic as the reward model, but no entry of reward.components is "
            "of type model. Set ppo.value_model=separate."
        )
    elif "sft_policy" in models and "reward_model" in models:
        policy, reward_model = models["sft_policy"].tokenizer(), models["reward_model"].tokenizer()
        if not same_vocabulary(policy, reward_model):
            run.problems.append(
                f"ppo.value_model=reward_init: {models['reward_model'].source} reads another vocabulary than "
                f"{models['sft_policy'].source}. Set ppo.value_model=separate."
            )


def check_backbone(run: RunRequest, models: dict[str, PretrainedHandle]) -> None:
    """Note a reward model that is to be trained on a backbone whose Python code would not be saved with it."""
    if not run.writes("reward_model"):
        return
    for name in ("base_model", "sft_policy"):
        if name in models and type(models[name].config()).__module__.startswith(DYNAMIC_MODULES):
            run.problems.append(
                f"{models[name].source} has Python code of its own, which a reward model trained on it would be saved "
                "without, and so could not be read. Give a reward_model_path of another architecture, or functions as "
                "reward, and run `--pipelines align`."
            )


def reward_model_is_needed(run: RunRequest) -> bool:
    """Whether a component of the reward is the reward model; True where the run has no group `reward` to say so."""
    reward = run.group("reward")
    return reward.needs_model if isinstance(reward, RewardConfig) else True


def _is_ours(run: RunRequest, source: str) -> bool:
    """Whether a path lies below the project's own models, links followed."""
    models = (run.project_path / run.data_root / LAYER).resolve()
    return models in (run.project_path / source).resolve().parents


def _to_train(name: str) -> str:
    return "and set base_model_path to fine-tune from it" if name == "sft_policy" else "to train one"
