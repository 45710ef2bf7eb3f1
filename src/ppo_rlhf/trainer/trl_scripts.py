"""What a script written for TRL needs: a ModelConfig that goes with PPOConfig, and our names for TRL's."""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable
from dataclasses import fields
from typing import Any, NoReturn, TypeVar

from ppo_rlhf.config import PPOConfig
from ppo_rlhf.config.settings_group import settings_group
from ppo_rlhf.core.errors import ConfigError

T = TypeVar("T")

_RENAMED = (
    "args=config model=policy ref_model=reference_policy ref_policy=reference_policy processing_class=tokenizer "
    "reward_model=reward train_dataset=prompts eval_dataset=evaluation_prompts query_tensor=queries "
    "save_model=save_pretrained generate_completions=generate accelerator=state.accelerator "
    "current_device=policy.device"
)
_LEFT_OUT = "data_collator training_data_collator num_shared_layers generate_ref_response response_masks columns_to_log"
NAMES = {
    **dict(pair.split("=") for pair in _RENAMED.split()),
    **dict.fromkeys(_LEFT_OUT.split(), "leave it out"),
    **dict.fromkeys(
        ("optimizer", "optimizers", "lr_scheduler"), "optim, learning_rate, lr_scheduler_type in PPOConfig"
    ),
    "peft_config": "use_peft, lora_r, lora_alpha, lora_target_modules in PPOConfig",
    "dataset": "prompts for train(), a DataLoader of torch for a loop of your own",
    "dataloader": "a DataLoader of torch over your dataset, with batch_size=config.batch_size",
}
"""Arguments and attributes of TRL's first and last PPOTrainer, with ours; docs/converting.md has the same table."""


@settings_group("ModelConfig", lives_elsewhere={each.name: "it is PPOConfig's here" for each in fields(PPOConfig)})
class ModelConfig:
    """TRL's ModelConfig without the settings that PPOConfig has, so that HfArgumentParser takes both."""

    model_name_or_path: str | None = None
    """Directory or hub id of a model."""
    model_revision: str = "main"
    """Branch, tag or commit of a hub id."""
    attn_implementation: str | None = None
    """Attention of the models, such as sdpa."""
    trust_remote_code: bool = False
    """Run Python code in a model's repository."""


def answers_trl(cls: type[T]) -> type[T]:
    """Make a class answer the arguments and attributes of TRL's trainers with an error of one line that names ours."""

    def absent(_: object, name: str) -> NoReturn:
        raise AttributeError(f"{cls.__name__} has no {name}{f' (here: {NAMES[name]})' if name in NAMES else ''}")

    for name in ("__init__", "generate", "step", "log_stats"):
        setattr(cls, name, _checked(getattr(cls, name), name.replace("__init__", cls.__name__)))
    cls.__getattr__ = absent  # type: ignore[attr-defined]  # a type checker goes by the attributes that are there
    return cls


def _checked(method: Callable[..., Any], where: str) -> Callable[..., Any]:
    own = inspect.signature(method).parameters

    @functools.wraps(method)
    def call(*args: Any, **named: Any) -> Any:
        if theirs := [f"{name}: {NAMES[name]}" for name in named if name in NAMES and name not in own]:
            raise ConfigError(
                f"{where}: TRL's names of arguments differ here: {'; '.join(theirs)} (docs/converting.md)"
            )
        return method(*args, **named)

    return call
