"""Nodes of the PPO pipeline. Each node unpacks its inputs and calls one function; `ppo/loop.py` is the plain loop."""

import logging
from dataclasses import replace
from pathlib import Path
from typing import Any

import mlflow
import pandas as pd
import torch
from datasets import Dataset
from torch import Tensor
from transformers import PreTrainedModel

from ppo_rlhf.checkpoints.exports import exported_critic, exported_policy
from ppo_rlhf.checkpoints.model_card import NOT_EVALUATED, render_card, render_critic_card
from ppo_rlhf.checkpoints.restore import printed_date, restore
from ppo_rlhf.config import PPOConfig
from ppo_rlhf.data.prompt_dataset import PromptDataset
from ppo_rlhf.data.prompts import PromptReader, PromptsConfig, find_evaluated, name_unevaluated
from ppo_rlhf.data.tables import origins_of
from ppo_rlhf.evaluation import during_training
from ppo_rlhf.evaluation.comparison import check_right_or_wrong
from ppo_rlhf.evaluation.during_training import evaluator_of
from ppo_rlhf.evaluation.exploitation import check_evaluated_prompts
from ppo_rlhf.evaluation.policy import EvaluationConfig, PolicyEvaluation, resolve_judge
from ppo_rlhf.evaluation.reward_holes import holes_of
from ppo_rlhf.models.loading import PretrainedHandle
from ppo_rlhf.models.origins import CRITIC
from ppo_rlhf.models.trained_model import TrainedModel
from ppo_rlhf.passes.sharding import shard_in_place
from ppo_rlhf.ppo import loop
from ppo_rlhf.ppo.experience import Experience, completion_rows
from ppo_rlhf.ppo.precision import device_of, frozen_dtype
from ppo_rlhf.ppo.rollouts import Rollouts
from ppo_rlhf.ppo.run_setup import (
    as_adapter,
    build_critic,
    build_state,
    load_policies,
    load_stored_critic,
    sampling_settings,
)
from ppo_rlhf.ppo.training_state import TrainingState
from ppo_rlhf.reporting.token_view import TokenSamples, sample_tokens
from ppo_rlhf.rewards.config import RewardConfig
from ppo_rlhf.rewards.scorers import build_reward_scorer, check_scorable, handles_of, models_of
from ppo_rlhf.rewards.scoring import RewardScorer, Scores
from ppo_rlhf.rewards.shaping import check_normalisation
from ppo_rlhf.runtime.names import env_option
from ppo_rlhf.runtime.paths import place, readable_path, running
from ppo_rlhf.runtime.processes import shards_models

log = logging.getLogger(__name__)


def configure_ppo(ppo: PPOConfig) -> PPOConfig:
    """Log the settings that differ from the defaults, and the sizes of a batch. Kedro has validated the settings."""
    changed = ", ".join(f"{name}={value}" for name, value in ppo.not_default().items())
    log.info("PPO settings that differ from the defaults: %s", changed or "none")
    sizes = (ppo.world_size, ppo.batch_size, ppo.local_batch_size)
    log.info("Processes: %d. Batch: %d responses per iteration, %d in each process.", *sizes)
    return ppo


def prepare_prompts(
    raw_prompts: Dataset,
    raw_evaluation_prompts: Dataset | None,
    sft_policy: PretrainedHandle,
    ppo_config: PPOConfig,
    prompts: PromptsConfig,
) -> dict[str, object]:
    """Check and tokenise the prompts, and hold out a share of the prompts for evaluation."""
    training, held_out = PromptReader.of(sft_policy, ppo_config).read_split(
        raw_prompts, raw_evaluation_prompts, prompts
    )
    if raw_evaluation_prompts is not None:
        name_unevaluated(raw_evaluation_prompts, prompts)
        if shared := sum(find_evaluated(raw_prompts, raw_evaluation_prompts, prompts.column)):
            use = "trained on anyway" if prompts.train_on_evaluation_prompts else "left out of training"
            log.warning(
                "%d of %d prompts are also evaluation prompts, and are %s (prompts.train_on_evaluation_prompts).",
                shared,
                len(raw_prompts),
                use,
            )
    log.info("%d prompts to train on, %d held out.", len(training), len(held_out))
    stored = {"training_prompts": training.texts_frame(), "evaluation_prompts": held_out.to_frame()}
    training = replace(training, made_from=origins_of(raw_prompts, "prompts"))
    return {"prompt_dataset": training, "evaluation_prompt_dataset": held_out, **stored}


def load_sft_policy(sft_policy: PretrainedHandle, ppo_config: PPOConfig) -> tuple[TrainedModel, PreTrainedModel]:
    """Load the SFT model as the trainable policy and as the frozen reference policy; with LoRA both policies share the
    base weights.
    """
    device = device_of(ppo_config)
    policy, reference = load_policies(sft_policy, ppo_config, torch.device("cpu") if shards_models() else device)
    total, trained = (policy.model.num_parameters(only_trainable=only) / 1e6 for only in (False, True))
    named = f"{sft_policy.source}{as_adapter(sft_policy)}"
    log.info("Policy: %s, %.3g M parameters, %.3g M trainable, on %s.", named, total, trained, device)
    if policy.value_head is not None and ppo_config.value_model in ("separate", "shared"):
        log.info("The value head starts as the value head stored with %s (v_head).", sft_policy.source)
    return policy, reference


def load_reward_model(
    reward_model: PretrainedHandle | None, sft_policy: PretrainedHandle, reward: RewardConfig, ppo_config: PPOConfig
) -> RewardScorer:
    """Load the reward: reward models, Python functions, or their combination."""
    check_normalisation(reward.normalise, ppo_config)
    if len(handles := list(handles_of(reward, reward_model).values())) > 1:
        start = " The critic starts as the first." if ppo_config.value_model == "reward_init" else ""
        log.info("Reward models: %s.%s", ", ".join(readable_path(handle.source) for handle in handles), start)
    return build_reward_scorer(
        reward,
        reward_model,
        sft_policy.tokenizer(),
        batch_size=ppo_config.local_rollout_forward_batch_size,
        device=device_of(ppo_config),
        dtype=frozen_dtype(ppo_config),
        offload=ppo_config.offload_reward_model or (reward.needs_model and shards_models()),
    )


def initialise_training_state(
    policy: TrainedModel,
    reference_policy: PreTrainedModel,
    reward_scorer: RewardScorer,
    prompt_dataset: PromptDataset,
    ppo_config: PPOConfig,
    pretrained_critic: PretrainedHandle | None,
    resume_checkpoint: Path | None,
) -> TrainingState:
    """Build the critic, optimisers, KL controller and counters of a new run, or restore the state from a checkpoint.

    With FSDP2 this node shards the weights of all models, after it has initialised the critic from one of the models.

    Raises:
        ModelError: A response to one of the prompts could be longer than the reward model reads.
    """
    stored = load_stored_critic(pretrained_critic, ppo_config)
    critic = build_critic(ppo_config, policy.model, reward_scorer.model, policy.value_head, stored)
    if pretrained_critic is not None and stored is not None:
        log.info("The critic starts as %s.", pretrained_critic.source)
    state = build_state(policy.model, critic, policy.tokenizer, ppo_config)
    check_scorable(
        reward_scorer, prompt_dataset.lengths, ppo_config.response_length, state.sampler.settings.stop_token_ids
    )
    if shards_models():
        for frozen in (reference_policy, *models_of(reward_scorer)):
            shard_in_place(frozen, state.learner.device)
    state.origin |= printed_date(prompt_dataset, policy.tokenizer)
    critics = (pretrained_critic.origin(CRITIC),) if pretrained_critic is not None and stored is not None else ()
    state.made_from = (*policy.made_from, *reward_scorer.made_from, *critics, *prompt_dataset.made_from)
    if resume_checkpoint is not None:
        restore(state, resume_checkpoint)
    return state


def read_audit(audited_holes: dict[str, Any], reward_model: PretrainedHandle | None, reward: RewardConfig) -> list[str]:
    """Return the attacks that the audit found to be holes of this reward; empty if no audit ran."""
    return holes_of(audited_holes, reward, reward_model)


def evaluate_reference_policy(
    policy: TrainedModel,
    reference_policy: PreTrainedModel,
    evaluation_prompt_dataset: PromptDataset,
    reward_scorer: RewardScorer,
    ppo_config: PPOConfig,
    evaluation: EvaluationConfig,
) -> PolicyEvaluation:
    """Evaluate the SFT policy on the held-out prompts once, as the baseline for evaluations during training.

    Raises:
        ConfigError: `evaluation.on_exploitation` is set, and there are too few held-out prompts to find a fall.
        DataError: `evaluation.pass_at` is set, and a deciding score is neither 0 nor 1. This node checks the scores so
            that the run fails before training.
    """
    held_out = len(evaluation_prompt_dataset)
    check_evaluated_prompts(held_out, evaluation.iteration_prompts, ppo_config, evaluation.on_exploitation)
    evaluator = evaluator_of(
        policy.tokenizer,
        evaluation_prompt_dataset,
        reward_scorer,
        ppo_config,
        trained=sampling_settings(ppo_config, policy.tokenizer, reference_policy),
        evaluation=evaluation,
        judge=resolve_judge(evaluation),
    )
    evaluated = evaluator.evaluate(reference_policy, None, device=device_of(ppo_config))
    if evaluation.pass_at:
        check_right_or_wrong(evaluated)
    return evaluated


def generate_rollouts(
    training_state: TrainingState,
    reference_policy: PreTrainedModel,
    prompt_dataset: PromptDataset,
    reward_scorer: RewardScorer,
) -> Rollouts:
    """Sample responses, and compute log-probabilities under policy and reference policy, and the critic's values."""
    return loop.generate_rollouts(training_state, reference_policy, prompt_dataset, reward_scorer)


def score_responses(rollouts: Rollouts, reward_scorer: RewardScorer, training_state: TrainingState) -> Scores:
    """Score each response by the reward."""
    return loop.score_responses(rollouts, reward_scorer, training_state.sampler, training_state.progress)


def shape_rewards(rollouts: Rollouts, scores: Scores, training_state: TrainingState) -> Tensor:
    """Turn scores into token rewards: clip, missing-EOS penalty, per-token KL penalty, optional whitening."""
    return loop.shape_rewards(rollouts, scores, training_state.shaping)


def estimate_advantages(
    rollouts: Rollouts, scores: Scores, shaped_rewards: Tensor, training_state: TrainingState
) -> Experience:
    """Estimate advantages and returns by GAE, and whiten the advantages."""
    return loop.estimate_advantages(rollouts, scores, shaped_rewards, training_state.shaping)


def show_tokens(training_state: TrainingState, experience: Experience) -> TokenSamples | dict[str, object]:
    """Return sample responses token by token if this iteration logs samples, else nothing."""
    if not training_state.config.samples(experience.rollouts.iteration):
        return {}
    return sample_tokens(experience, training_state.sampler.tokenizer)


def list_completions(training_state: TrainingState, experience: Experience) -> list[dict[str, object]]:
    """Return the completions with their scores if this iteration logs samples, else nothing."""
    if not training_state.config.samples(experience.rollouts.iteration):
        return []
    return completion_rows(experience, training_state.sampler.tokenizer)


def optimise_policy(
    training_state: TrainingState, experience: Experience, reference_policy: PreTrainedModel
) -> dict[str, object]:
    """Run PPO's epochs of clipped updates, advance to the next iteration, and pass on the state for a checkpoint."""
    metrics = loop.update(training_state, experience, reference_policy)
    training_state.advance(experience.scores, metrics)
    return {
        "next_training_state": training_state,
        "ppo_metrics": metrics,
        "checkpoint": training_state,
    }


def evaluate_iteration(
    next_training_state: TrainingState,
    reference_policy: PreTrainedModel,
    reference_evaluation: PolicyEvaluation,
    earlier_evaluations: list[dict[str, Any]],
    reward_holes: list[str],
    evaluation_prompt_dataset: PromptDataset,
    reward_scorer: RewardScorer,
    reward: RewardConfig,
    evaluation: EvaluationConfig,
) -> dict[str, Any]:
    """Compare the policy with SFT and with its best evaluation so far on held-out prompts, if an evaluation is due."""
    state = next_training_state
    if not during_training.is_due(state.progress):
        return {}
    judge = resolve_judge(evaluation)
    evaluator = evaluator_of(
        state.sampler.tokenizer,
        evaluation_prompt_dataset,
        reward_scorer,
        state.config,
        trained=state.sampler.settings,
        evaluation=evaluation,
        judge=judge,
        halving=state.sampler.evaluation_halving,
    )
    row, _ = during_training.evaluate_iteration(
        state.learner,
        state.shaping,
        state.progress,
        reference_policy,
        evaluator,
        reference_evaluation,
        earlier_evaluations,
        by_trained_reward=reward.is_judge(judge.reference),
        is_greedy=evaluation.temperature == 0.0,
        on_exploitation=evaluation.on_exploitation,
        holes=reward_holes,
    )
    return row


def export_policy(
    next_training_state: TrainingState,
    reward_model: PretrainedHandle | None,
    reward: RewardConfig,
    evaluation: EvaluationConfig,
) -> TrainedModel:
    """Export the trained policy as a plain Hugging Face model directory with a model card.

    A LoRA adapter is merged, unless `ppo.export` is `adapter`.
    """
    state, rewards = next_training_state, _name_rewards(reward, reward_model)
    run = mlflow.active_run()
    run_id = None if run is None else run.info.run_id
    parts = state.learner, state.sampler, state.progress
    card = render_card(*parts, rewards, evaluation.prompts_path, run_id, state.made_from)
    command = f"`kedro run{env_option(running.environment)} --pipelines evaluation`"
    card = card.replace(NOT_EVALUATED, f"{NOT_EVALUATED} {command} writes the result here.")
    return replace(exported_policy(state.learner, state.sampler), card=card, made_from=state.made_from)


def export_critic(
    next_training_state: TrainingState,
    reward_model: PretrainedHandle | None,
    reward: RewardConfig,
    evaluation: EvaluationConfig,
) -> TrainedModel | dict[str, object]:
    """Export the trained critic with a model card if `ppo.export_critic` is true; else return nothing."""
    state = next_training_state
    if not state.config.export_critic:
        return {}
    critic, run = exported_critic(state.learner, state.sampler.tokenizer), mlflow.active_run()
    rewards, run_id = _name_rewards(reward, reward_model), None if run is None else run.info.run_id
    prompts = evaluation.prompts_path
    parts = state.learner, state.progress
    card = render_critic_card(*parts, rewards, critic.model, state.made_from, prompts=prompts, run_id=run_id)
    return replace(critic, card=card, made_from=state.made_from)


def summarise_training(next_training_state: TrainingState, evaluation_metrics: list[dict[str, Any]]) -> pd.DataFrame:
    """Return a table with the metrics of every PPO iteration, including the evaluation's metrics if the run evaluated
    then.
    """
    history = pd.DataFrame(next_training_state.progress.history)
    evaluations = pd.DataFrame(evaluation_metrics, columns=None if evaluation_metrics else ["iteration"])
    evaluations = evaluations.filter(regex="^(iteration$|eval/)")
    return history.merge(evaluations, on="iteration", how="left").astype({"iteration": int})


def _name_rewards(reward: RewardConfig, reward_model: PretrainedHandle | None) -> list[str]:
    model = None if reward_model is None else reward_model.source
    names = [t.llm.model if t.llm else place(str(t.function or t.path or model)) for t in reward.components]
    how = ", weight {:g}" if reward.combine == "sum" else f", in the {reward.combine}"
    return [f"{t.type} `{name}`{how.format(t.weight)}" for t, name in zip(reward.components, names, strict=True)]
