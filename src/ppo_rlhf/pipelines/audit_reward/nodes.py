"""Nodes of the audit of the reward."""

import logging
from typing import Any

import pandas as pd
from datasets import Dataset
from plotly import graph_objects as go
from plotly.subplots import make_subplots

from ppo_rlhf.config import PPOConfig
from ppo_rlhf.data.prompt_dataset import PromptDataset
from ppo_rlhf.data.tables import frame_of
from ppo_rlhf.evaluation.attacks import attacks
from ppo_rlhf.evaluation.best_of_n import PROMPT, BestOfNConfig, best_of_n_curve, by_prompt
from ppo_rlhf.evaluation.policy import EvaluationConfig, Evaluator, resolve_judge
from ppo_rlhf.evaluation.reward_holes import reward_digest, say_hole
from ppo_rlhf.models.context_length import context_length
from ppo_rlhf.models.loading import PretrainedHandle
from ppo_rlhf.pipelines.audit_reward import reward_audit
from ppo_rlhf.pipelines.audit_reward.attack_search import attack_with_search
from ppo_rlhf.pipelines.audit_reward.attacked_rewards import Target, part_column
from ppo_rlhf.pipelines.audit_reward.reward_audit import AuditConfig
from ppo_rlhf.ppo.precision import device_of, frozen_dtype
from ppo_rlhf.ppo.run_setup import sampling_settings
from ppo_rlhf.reporting.charts import COLOURS, GREY, style
from ppo_rlhf.rewards.config import RewardConfig
from ppo_rlhf.rewards.scorers import models_of, reward_model_accuracy
from ppo_rlhf.rewards.scoring import RewardScorer
from ppo_rlhf.supervised.reward_training import RewardModellingConfig

log = logging.getLogger(__name__)

_LABELS = {"reward": "by the reward itself", "judge_score": "by the judge"}
_TITLES = ("Best-of-n, picked by the reward: gain over n = 1", "Margin of attacks (orange: a hole)")


def sample_responses(
    sft_policy: PretrainedHandle,
    evaluation_prompt_dataset: PromptDataset,
    reward_scorer: RewardScorer,
    ppo_config: PPOConfig,
    evaluation: EvaluationConfig,
    best_of_n: BestOfNConfig,
) -> pd.DataFrame:
    """Sample many responses of the SFT policy to some held-out prompts, and score them by the reward and the judge."""
    policy = sft_policy.frozen_lm(frozen_dtype(ppo_config), device_of(ppo_config))
    tokenizer = sft_policy.tokenizer()
    prompts = min(best_of_n.prompts, len(evaluation_prompt_dataset))
    log.info("Sampling %d responses to each of %d prompts from the SFT policy …", best_of_n.samples, prompts)
    numbers = [number for number in range(prompts) for _ in range(best_of_n.samples)]
    evaluator = Evaluator(
        tokenizer,
        evaluation_prompt_dataset.select(numbers),
        reward_scorer,
        resolve_judge(evaluation),
        ppo_config,
        sampling=sampling_settings(ppo_config, tokenizer, policy),
        seed=best_of_n.seed,
        batch_size=evaluation.batch_size,
    )
    evaluated = evaluator.evaluate(policy, None)
    samples = evaluated.to_frame()
    samples.insert(0, PROMPT, numbers)
    if evaluated.scores is not None and len(parts := evaluated.scores.components) > 1:
        samples = samples.assign(**{part_column(name): scores.double().numpy() for name, scores in parts.items()})
    return samples


def attack_reward(
    best_of_n_samples: pd.DataFrame,
    sft_policy: PretrainedHandle,
    evaluation_prompt_dataset: PromptDataset,
    reward_scorer: RewardScorer,
    ppo_config: PPOConfig,
    audit: AuditConfig,
) -> pd.DataFrame:
    """Score responses without worth (`evaluation.attacks`), and compare them with the SFT policy's answers."""
    tokenizer = sft_policy.tokenizer()
    prompts = evaluation_prompt_dataset.select(range(best_of_n_samples[PROMPT].nunique()))
    target = Target(
        reward_scorer,
        prompts,
        best_of_n_samples.groupby(PROMPT)["response"].first().tolist(),
        tokenizer,
        sampling_settings(ppo_config, tokenizer, sft_policy.empty_causal_lm()),
        [] if audit.reference_column is None else prompts.columns[audit.reference_column],
    )
    tried = attacks(audit.suffixes, has_reference=audit.reference_column is not None)
    log.info("Scoring %d attacks on each of %d prompts …", len(tried), len(prompts))
    parts = [name for name in reward_scorer.names if part_column(name) in best_of_n_samples]
    of_parts = {name: by_prompt(best_of_n_samples, part_column(name)).numpy() for name in parts}
    sft = by_prompt(best_of_n_samples, "reward").numpy()
    return attack_with_search(target, tried, best_of_n_samples, sft, of_parts, audit.search_rewards)


def order_held_out_pairs(
    raw_preferences: Dataset | None,
    reward_model: PretrainedHandle | None,
    sft_policy: PretrainedHandle,
    reward_scorer: RewardScorer,
    reward: RewardConfig,
    reward_modelling: RewardModellingConfig,
) -> dict[str, float]:
    """Measure the share of held-out preferences that the reward orders correctly.

    If the user gives no preferences and the reward is a single reward model, return the accuracy that reward training
    stored in the reward model. Return nothing if the reward has other components and the user gives no preferences.
    """
    if raw_preferences is None:
        accuracy = reward_model_accuracy(reward_model, reward)
        if accuracy is None or len(reward.components) > 1:
            return {}
        return {"audit/pair_accuracy": accuracy[0], "audit/pair_accuracy_high": accuracy[2]}
    contexts = [context_length(model.config) for model in models_of(reward_scorer)]
    limit = min((context for context in contexts if context is not None), default=None)
    table = reward_audit.held_out_pairs(frame_of(raw_preferences), sft_policy.tokenizer(), reward_modelling, limit)
    return reward_audit.score_pairs(reward_scorer, table)


def conclude_audit(
    best_of_n_samples: pd.DataFrame,
    reward_attacks: pd.DataFrame,
    pair_agreement: dict[str, float],
    reward_model: PretrainedHandle | None,
    reward: RewardConfig,
    evaluation: EvaluationConfig,
) -> tuple[dict[str, Any], dict[str, Any]]:
    """Return whether the reward is fit for PPO, and if not, the reasons with their numbers; and the reward's holes with
    a digest of the reward, which later runs read.
    """
    # Drop the judge's scores if the reward is also the judge, because a reward always agrees with itself
    is_judge = reward.is_judge(resolve_judge(evaluation).reference)
    samples = best_of_n_samples.drop(columns=["judge_score"] if is_judge else [], errors="ignore")
    metrics, reasons = reward_audit.audit_reward(samples, reward_attacks, pair_agreement)
    missing = sorted({name for rule in reward_audit.RULES for name in rule.reads} - metrics.keys())
    verdict = reward_audit.verdict(reasons, missing) + ("; no judge but the reward itself" if is_judge else "")
    holes = reward_attacks[reward_attacks["hole"]].drop(columns="hole").to_dict("records")
    log.info("Reward audit: %s%s", verdict, ", because:" if reasons else ".")
    for line in [*reasons, *map(say_hole, holes)]:
        log.warning("  %s", line)
    if missing:
        log.info(
            "Metrics that the reward audit could not measure without a separate judge or preferences: %s.",
            ", ".join(missing),
        )
    found = {"verdict": verdict, "reasons": reasons, "not_measured": missing, "metrics": metrics, "holes": holes}
    return found, {"reward": reward_digest(reward, reward_model), "holes": holes}


def plot_audit(best_of_n_samples: pd.DataFrame, reward_attacks: pd.DataFrame) -> go.Figure:
    """Plot best-of-n by the reward and by the judge, and the margin of each attack over the SFT policy's answers.

    The unit of both plots is the standard deviation of a score among the responses to one prompt.
    """
    figure = make_subplots(1, 2, subplot_titles=_TITLES, horizontal_spacing=0.2)
    curve = best_of_n_curve(best_of_n_samples)
    ns = curve["n"].tolist()
    for name, colour in zip((name for name in _LABELS if name in curve), COLOURS, strict=False):
        gains = reward_audit.gains(curve, best_of_n_samples, name)
        line = {"color": colour, "width": 2}
        figure.add_scatter(x=ns, y=gains.tolist(), name=_LABELS[name], mode="lines+markers", line=line, row=1, col=1)
    shown = reward_attacks.iloc[::-1]  # plotly draws the first bar at the bottom
    colours = [COLOURS[1] if is_hole else COLOURS[0] for is_hole in shown["hole"]]
    figure.add_bar(
        x=shown["margin"].tolist(),
        y=shown["attack"].tolist(),
        orientation="h",
        marker_color=colours,
        showlegend=False,
        row=1,
        col=2,
    )
    style(figure, height=200 + 16 * len(shown), showlegend=True)
    figure.update_layout(margin={"t": 60, "b": 40}, legend_y=1.08)
    figure.update_annotations(font_size=12)
    figure.add_vline(0, line={"color": GREY, "width": 1}, row=1, col=2)
    figure.update_xaxes(title_text="n", type="log", tickvals=ns, row=1, col=1)
    figure.update_xaxes(title_text="standard deviations", row=1, col=2)
    figure.update_yaxes(title_text="standard deviations", row=1, col=1)
    return figure
