"""The PPO loop. The pipeline's nodes and `PPOTrainer.train` make the same calls in each iteration:

    rollouts -> scores -> shaped rewards -> advantages -> update -> metrics -> advance -> (checkpoint, evaluation)

docs/architecture.md says where code for a new feature belongs.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from dataclasses import replace

from transformers import PreTrainedModel

from ppo_rlhf.data.prompt_dataset import PromptDataset
from ppo_rlhf.ppo.batch_sampling import sample_batch
from ppo_rlhf.ppo.experience import Experience, estimate_advantages, score_responses, shape_rewards
from ppo_rlhf.ppo.metrics import iteration_metrics
from ppo_rlhf.ppo.rollouts import Rollouts, check_weights, measure
from ppo_rlhf.ppo.training_state import TrainingState
from ppo_rlhf.ppo.update import optimise_policy
from ppo_rlhf.rewards.scoring import RewardScorer


def train(
    state: TrainingState,
    reference_policy: PreTrainedModel,
    prompts: PromptDataset,
    scorer: RewardScorer,
    after_iteration: Callable[[dict[str, float]], None],
    before_update: Callable[[Experience], None] | None = None,
    around: Callable[[], AbstractContextManager[None]] = nullcontext,
) -> None:
    """Run all remaining iterations of a run.

    `before_update` is called before each iteration's update, with the iteration's experience. `after_iteration`, such
    as `RunControl.after_iteration`, is called after each iteration, with the iteration's metrics. `around` returns the
    context of an iteration, such as `RunControl.iteration`.
    """
    while not state.progress.finished:
        with around():
            metrics = iterate(state, reference_policy, prompts, scorer, before_update)
        after_iteration(metrics)


def iterate(
    state: TrainingState,
    reference_policy: PreTrainedModel,
    prompts: PromptDataset,
    scorer: RewardScorer,
    before_update: Callable[[Experience], None] | None = None,
) -> dict[str, float]:
    """Run one iteration of PPO and return its metrics."""
    rollouts = generate_rollouts(state, reference_policy, prompts, scorer)
    return learn(state, reference_policy, rollouts, scorer, before_update)


def generate_rollouts(
    state: TrainingState, reference_policy: PreTrainedModel, prompts: PromptDataset, scorer: RewardScorer
) -> Rollouts:
    """Sample a response to each prompt of the next iteration, and compute log-probabilities, entropies and values.

    Every process returns the rollouts of all processes. `drop_uniform_prompts` drops prompts by the scores of `scorer`.

    Raises:
        TrainingError: A rollout engine does not answer, or holds other weights than the policy's.
    """
    progress, sampler = state.progress, state.sampler
    progress.requests.meet()
    progress.clock.restart()
    number = progress.iteration + 1
    chosen, responses, scores, redraws = sample_batch(sampler, number, prompts, scorer, progress.clock)
    progress.requests.meet()
    rollouts = measure(state.learner, sampler, progress, reference_policy, chosen, responses)
    if sampler.settings.engine is not None:
        check_weights(rollouts, progress.history)
    return replace(rollouts, scores=scores, redraws=redraws)


def learn(
    state: TrainingState,
    reference_policy: PreTrainedModel,
    rollouts: Rollouts,
    scorer: RewardScorer,
    before_update: Callable[[Experience], None] | None = None,
) -> dict[str, float]:
    """Learn from one iteration's rollouts and return the iteration's metrics."""
    scores = score_responses(rollouts, scorer, state.sampler, state.progress)
    rewards = shape_rewards(rollouts, scores, state.shaping)
    experience = estimate_advantages(rollouts, scores, rewards, state.shaping)
    if before_update is not None:
        before_update(experience)
    metrics = update(state, experience, reference_policy)
    state.advance(scores, metrics)
    return metrics


def update(state: TrainingState, experience: Experience, reference_policy: PreTrainedModel) -> dict[str, float]:
    """Take the optimiser steps of an iteration and return the iteration's metrics."""
    kl_coef = state.shaping.kl_controller.kl_coef
    steps = optimise_policy(state.learner, state.progress, experience, kl_coef, reference_policy)
    return iteration_metrics(state.learner, state.sampler, state.shaping, state.progress, experience, steps)
