"""Nodes of the KL study, besides those of a sweep."""

import logging
from typing import Any

import pandas as pd
from plotly import graph_objects as go

from ppo_rlhf.config import PPOConfig
from ppo_rlhf.evaluation.best_of_n import best_of_n_curve
from ppo_rlhf.pipelines.kl_study.charts import frontier_figure, kl_figure
from ppo_rlhf.rewards.config import RewardConfig
from ppo_rlhf.studies.kl_study import KLStudyConfig, findings, settings_of
from ppo_rlhf.studies.sweep import Setting

log = logging.getLogger(__name__)


def plan_study(ppo_config: PPOConfig, reward: RewardConfig, kl_study: KLStudyConfig) -> list[Setting]:
    """List the trainings: one for each beta, and one by the adaptive controller."""
    return settings_of(kl_study, ppo_config, reward)


def plot_kl(kl_study_history: pd.DataFrame, kl_study_results: pd.DataFrame) -> go.Figure:
    """Plot the KL over iterations, a line for each training, with the adaptive controller's target."""
    return kl_figure(kl_study_history, kl_study_results)


def plot_frontier(kl_study_results: pd.DataFrame, best_of_n_samples: pd.DataFrame) -> go.Figure:
    """Plot reward and judge score over the KL from SFT that they cost, for each training and for best-of-n."""
    return frontier_figure(kl_study_results, best_of_n_curve(best_of_n_samples))


def conclude_study(kl_study_results: pd.DataFrame, best_of_n_samples: pd.DataFrame) -> dict[str, Any]:
    """Say what was found: the KL by beta, whether the adaptive controller met its target, PPO against best-of-n."""
    metrics, lines = findings(kl_study_results, best_of_n_curve(best_of_n_samples))
    log.info("The KL study found:")
    for line in lines:
        log.info("  %s", line)
    return {"findings": lines, "metrics": metrics}
