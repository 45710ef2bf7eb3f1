"""Checks what a user gives and holds a part of the demonstrations out."""

from ppo_rlhf.pipelines.data_preparation.pipeline import create_pipeline

__all__ = ["create_pipeline"]
