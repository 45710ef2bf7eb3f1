"""Help for scripts written for TRL: a ModelConfig to use beside PPOConfig, and errors that translate TRL's names."""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable
from dataclasses import fields
from typing import Any, NoReturn, TypeVar

from ppo_rlhf.config import PPOConfig
from ppo_rlhf.config.parameter_groups import parameter_group
from ppo_rlhf.config.trl_names import ARGUMENTS
from ppo_rlhf.core.errors import ConfigError

T = TypeVar("T")


@parameter_group("ModelConfig", lives_elsewhere={field.name: "it is PPOConfig's here" for field in fields(PPOConfig)})
class ModelConfig:
    """TRL's ModelConfig without the settings that PPOConfig has, so that HfArgumentParser can parse both together."""

    model_name_or_path: str | None = None
    """Directory or hub id of a model."""
    model_revision: str = "main"
    """Branch, tag or commit of a hub id."""
    attn_implementation: str | None = None
    """Attention implementation of the models, such as sdpa."""
    trust_remote_code: bool = False
    """Whether to run the Python code in a model's repository."""


def answers_trl(cls: type[T]) -> type[T]:
    """Make a class refuse arguments and attributes of TRL's trainers with an error that gives this project's name."""

    def absent(_: object, name: str) -> NoReturn:
        raise AttributeError(
            f"{cls.__name__} has no {name}{f' (here: {ARGUMENTS[name]})' if name in ARGUMENTS else ''}"
        )

    for name in ("__init__", "generate", "step", "log_stats"):
        setattr(cls, name, _checked(getattr(cls, name), name.replace("__init__", cls.__name__)))
    cls.__getattr__ = absent  # type: ignore[attr-defined]  # a type checker still knows only the declared attributes
    return cls


def _checked(method: Callable[..., Any], where: str) -> Callable[..., Any]:
    parameters = inspect.signature(method).parameters

    @functools.wraps(method)
    def call(*args: Any, **named: Any) -> Any:
        if renamed := [f"{name}: {ARGUMENTS[name]}" for name in named if name in ARGUMENTS and name not in parameters]:
            raise ConfigError(
                f"{where}: these arguments of TRL have other names here: {'; '.join(renamed)} (docs/converting.md)"
            )
        return method(*args, **named)

    return call
