"""The policy and the critic that a run exports."""

from __future__ import annotations

import copy
import logging
from dataclasses import replace
from typing import assert_never

from transformers import PreTrainedTokenizerBase

from ppo_rlhf.checkpoints.model_files import whole_learner
from ppo_rlhf.checkpoints.training_record import generation_config_of, record_of
from ppo_rlhf.core.errors import ModelError
from ppo_rlhf.models.adapters import has_adapter, merged
from ppo_rlhf.models.reward_model import CausalLMRewardModel
from ppo_rlhf.models.stored_critic import to_token_classifier
from ppo_rlhf.models.trained_model import TrainedModel
from ppo_rlhf.ppo.batch_sampling import Sampler
from ppo_rlhf.ppo.learner import Learner
from ppo_rlhf.runtime.processes import is_main_process

log = logging.getLogger(__name__)


def exported_policy(learner: Learner, sampler: Sampler) -> TrainedModel:
    """Return the policy that a run exports, with the average of its weights if there is one.

    An adapter is merged into the weights, unless `export=adapter` saves only the adapter. Merging an adapter rounds the
    weights: in float32 the logits change by about 1e-6 of their size. Weights that were frozen in a 16-bit type are
    exported in float32. The exported policy also has the sampling settings (`training_record`). Every process must call
    this function.
    """
    learner = whole_learner(learner)
    head = learner.critic.value_head if learner.config.export_value_head and learner.shares_trunk else None
    policy = learner.policy
    average = None if learner.policy_average is None else learner.policy_average.applied_to(policy)
    match learner.config.export:
        case "merged":
            if has_adapter(policy):
                policy, average = merged(policy), None if average is None else merged(average)
        case "adapter":
            pass
        case unknown:
            assert_never(unknown)
    trained = TrainedModel(policy, sampler.tokenizer, head, average)
    return replace(
        trained, generation_config=generation_config_of(learner.policy, sampler.settings), record=record_of(sampler)
    )


def exported_critic(learner: Learner, tokenizer: PreTrainedTokenizerBase) -> TrainedModel:
    """Return the critic as it is stored, for later runs and other programs, with the policy's tokenizer.

    The stored critic always has its own backbone, whatever `ppo.value_model` says: an adapter is merged, and a shared
    trunk is copied from the policy. The stored critic is a token classifier of transformers, whose weights also contain
    the head under TRL's names (`v_head.*`). If no token classifier computes the critic's values, the stored critic is a
    `CausalLMRewardModel`, which is logged. Every process must call this function.
    """
    critic = whole_learner(learner).critic
    backbone = merged(critic.backbone) if has_adapter(critic.backbone) else critic.backbone
    head = copy.deepcopy(critic.value_head).to(backbone.device)
    own_form = CausalLMRewardModel.from_parts(backbone, head)
    # Only the main process saves the critic, and with FSDP2 the other processes have no full weights
    if not is_main_process():
        return TrainedModel(own_form, tokenizer)
    try:
        classifier = to_token_classifier(backbone, head)
    except ModelError as error:
        log.warning("The critic is stored in a form that other programs read by importing ppo_rlhf: %s.", error)
        return TrainedModel(own_form, tokenizer)
    # A copy of the value head, because safetensors refuses two names for one tensor
    return TrainedModel(classifier, tokenizer, value_head=copy.deepcopy(head))
