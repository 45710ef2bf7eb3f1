"""Fixtures with tiny models. They stand here because importing them takes seconds."""

from tests.ppo_runs import make_model

__all__ = ["make_model"]
