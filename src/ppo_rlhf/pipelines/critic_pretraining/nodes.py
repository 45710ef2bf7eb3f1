"""Node of the critic's pretraining."""

import logging

from ppo_rlhf.config import PPOConfig
from ppo_rlhf.data.prompt_dataset import PromptDataset
from ppo_rlhf.models.loading import PretrainedHandle
from ppo_rlhf.models.trained_model import TrainedModel
from ppo_rlhf.pipelines.critic_pretraining import training
from ppo_rlhf.pipelines.critic_pretraining.training import HELD_OUT, CriticPretrainingConfig
from ppo_rlhf.rewards.scoring import RewardScorer
from ppo_rlhf.runtime.progress_display import watching

log = logging.getLogger(__name__)


def pretrain_critic(
    sft_policy: PretrainedHandle,
    prompt_dataset: PromptDataset,
    evaluation_prompt_dataset: PromptDataset,
    reward_scorer: RewardScorer,
    ppo_config: PPOConfig,
    critic_pretraining: CriticPretrainingConfig,
) -> tuple[TrainedModel, list[dict[str, float]]]:
    """Train only the critic, on responses of the SFT policy, and log the explained variance of the returns."""
    with watching("Critic", critic_pretraining.iterations) as report:
        critic, history = training.pretrain_critic(
            sft_policy,
            prompts=prompt_dataset,
            held_out_prompts=evaluation_prompt_dataset,
            scorer=reward_scorer,
            pretraining=critic_pretraining,
            ppo=ppo_config,
            report=report,
        )
    log.info(
        "The critic explains %.2f of the variance of the returns on held-out prompts (%.2f before). "
        "ppo.value_model=pretrained starts PPO from this critic.",
        history[-1][HELD_OUT],
        history[0][HELD_OUT],
    )
    return critic, history
