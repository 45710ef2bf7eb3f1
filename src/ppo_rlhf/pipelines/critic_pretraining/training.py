"""Pretraining of the critic on the SFT policy's responses. Later runs start from the stored critic.

The method is the value pretraining of VC-PPO (Yuan et al. 2025, arXiv:2503.01491): the policy does not change, and the
targets are Monte Carlo returns (lambda = 1), which do not depend on the critic.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import Annotated, Literal

import torch
from pydantic import Field

from ppo_rlhf.checkpoints.exports import exported_critic
from ppo_rlhf.config import PPOConfig
from ppo_rlhf.config.parameter_groups import parameter_group
from ppo_rlhf.core.errors import ConfigError
from ppo_rlhf.core.randomness import generator
from ppo_rlhf.core.statistics import explained_variance
from ppo_rlhf.data.prompt_dataset import PromptDataset
from ppo_rlhf.models.critic import Critic
from ppo_rlhf.models.loading import PretrainedHandle
from ppo_rlhf.models.trained_model import TrainedModel
from ppo_rlhf.ppo.experience import Shaping
from ppo_rlhf.ppo.loop import estimate_advantages, generate_rollouts, iterate, score_responses, shape_rewards
from ppo_rlhf.ppo.precision import device_of
from ppo_rlhf.ppo.progress import Progress
from ppo_rlhf.ppo.rollouts import Rollouts, critic_values
from ppo_rlhf.ppo.run_setup import build_critic, build_state, load_policies
from ppo_rlhf.rewards.scorers import check_scorable
from ppo_rlhf.rewards.scoring import RewardScorer, Scores
from ppo_rlhf.runtime.log_lines import say_once

STEP, EXPLAINED_VARIANCE, HELD_OUT = "step", "critic/explained_variance", "critic/eval_explained_variance"
LOGGED = {
    "critic/loss": "loss/value_avg",
    EXPLAINED_VARIANCE: "val/explained_variance",
    "critic/learning_rate": "lr/value",
}
"""Metrics that the critic's pretraining logs, each with the metric of a PPO iteration that gives its value."""


@parameter_group("critic_pretraining")
class CriticPretrainingConfig:
    """How the critic is trained on the SFT policy's responses. The settings group `ppo` has all other settings of the
    pretraining.
    """

    iterations: Annotated[int, Field(ge=1)] = 50
    """Number of iterations. Each iteration samples a batch of responses and trains the critic on the batch, with PPO's
    number of epochs and `ppo.value_learning_rate`."""
    value_model: Literal["separate", "reward_init"] = "separate"
    """Where the critic starts, as in `ppo.value_model`. `ppo.value_model` itself may be `pretrained`."""


def pretraining_config(pretraining: CriticPretrainingConfig, ppo: PPOConfig) -> PPOConfig:
    """Return PPO's settings, changed for the pretraining: a policy that does not change, and Monte Carlo returns.

    The seed is derived from PPO's seed, because with the same seed PPO would start with the responses that the critic
    was trained on.

    Raises:
        ConfigError: A setting of PPO does not work with a separate critic.
    """
    if ppo.load_in_4bit:
        raise ConfigError(
            "ppo.load_in_4bit=true: a stored critic has full-precision weights; pretrain the critic with "
            "ppo.load_in_4bit=false"
        )
    if ppo.truncated_responses == "bootstrap":
        raise ConfigError(
            "ppo.truncated_responses=bootstrap: the targets of truncated responses would contain the critic's own "
            "value instead of a score; pretrain the critic with ppo.truncated_responses=keep or mask"
        )
    return replace(
        ppo,
        value_model=pretraining.value_model,
        lam_critic=1.0,
        lam_alpha=None,
        critic_warmup_iterations=pretraining.iterations,
        # The pretraining is PPO's critic warm-up: the one PPO iteration after the warm-up is planned but never runs
        total_episodes=(pretraining.iterations + 1) * ppo.batch_size,
        seed=int(torch.randint(2**32, (), generator=generator(ppo.seed, "critic pretraining"))),
    )


def pretrain_critic(
    sft_policy: PretrainedHandle,
    prompts: PromptDataset,
    held_out_prompts: PromptDataset,
    scorer: RewardScorer,
    pretraining: CriticPretrainingConfig,
    ppo: PPOConfig,
    report: Callable[[int, Mapping[str, float]], None],
) -> tuple[TrainedModel, list[dict[str, float]]]:
    """Train a critic on the SFT policy's responses. `report` gets the number and the metrics of each iteration.

    Returns:
        The critic as `exported_critic` returns it, and a list of metrics with one row for each `step`. The rows have
        the metrics of `LOGGED`, measured before the update of the row's iteration. Only the rows of step 0 and of the
        last step have `critic/eval_explained_variance`, measured on one batch of responses to held-out prompts.

    Raises:
        ConfigError, DataError, ModelError: The same errors as in a PPO run with the same settings.
    """
    config = pretraining_config(pretraining, ppo)
    policy, reference = load_policies(sft_policy, config, device_of(config))
    critic = build_critic(config, policy.model, scorer.model, policy.value_head)
    # pretraining's settings refuse `value_model=shared`, so the critic is a model of its own
    assert isinstance(critic, Critic)
    state = build_state(policy.model, critic, policy.tokenizer, config)
    for dataset in (prompts, held_out_prompts):
        check_scorable(scorer, dataset.lengths, config.response_length, state.sampler.settings.stop_token_ids)
    whole = replace(  # one batch holds each held-out prompt once; prompts that do not fill a micro-batch are left out
        config,
        gradient_accumulation_steps=max(1, len(held_out_prompts) // config.micro_batch_size),
        num_mini_batches=1,
        responses_per_prompt=1,
        drop_uniform_prompts=0,
        critic_warmup_iterations=0,
    )
    evaluating = replace(
        state,
        config=whole,
        learner=replace(state.learner, config=whole),
        sampler=replace(state.sampler, config=whole),
        progress=Progress(whole),
    )
    if (left_out := len(held_out_prompts) - whole.batch_size) > 0:
        say_once(
            f"The critic is evaluated without {left_out} of {len(held_out_prompts)} held-out prompts, which do not "
            f"fill a micro-batch of {config.micro_batch_size}.",
            logging.INFO,
        )
    held_out = generate_rollouts(evaluating, reference, held_out_prompts, scorer)
    scores = score_responses(held_out, scorer, state.sampler, state.progress)
    history: list[dict[str, float]] = []
    for iteration in range(1, pretraining.iterations + 1):
        metrics = iterate(state, reference, prompts, scorer)
        logged = {name: metrics[source] for name, source in LOGGED.items()}
        history.append({STEP: iteration, **logged})
        report(iteration, logged)
    history.insert(0, {STEP: 0, HELD_OUT: _explained(state.shaping, held_out, scores)})
    _, values = critic_values(evaluating.learner, replace(held_out.cut, halvings=state.learner.halving.count))
    history[-1][HELD_OUT] = _explained(state.shaping, replace(held_out, values=values), scores)
    made_from = (*policy.made_from, *scorer.made_from, *prompts.made_from)
    return replace(exported_critic(state.learner, state.sampler.tokenizer), made_from=made_from), history


def _explained(shaping: Shaping, rollouts: Rollouts, scores: Scores) -> float:
    """Return the share of the Monte Carlo returns' variance that the critic's values explain."""
    rewards = shape_rewards(rollouts, scores, shaping)
    returns = estimate_advantages(rollouts, scores, rewards, shaping).returns
    return float(explained_variance(rollouts.values[:, :-1], returns, rollouts.mask))
