"""Reporting: plots, a self-contained HTML page, and the result in the terminal."""

from ppo_rlhf.pipelines.reporting.pipeline import create_pipeline

__all__ = ["create_pipeline"]
