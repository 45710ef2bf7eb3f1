"""Values of the states of responses, by a critic of its own or by the head on the policy's trunk."""

from __future__ import annotations

import torch
from torch import Tensor

from ppo_rlhf.ppo.batch import PackedSequences
from ppo_rlhf.ppo.logprobs import response_states
from ppo_rlhf.ppo.precision import autocast
from ppo_rlhf.ppo.state import TrainingState


def response_values(state: TrainingState, packed: PackedSequences, policy_states: Tensor | None = None) -> Tensor:
    """Return the critic's values of the states s_0 … s_T, `[B, T + 1]`, 0 in padding.

    Column t comes before response token t; the last one of a row is behind its response.

    Args:
        state: Its critic is asked.
        packed: B sequences with T response columns.
        policy_states: The policy's states of these sequences, for a critic on the same trunk; without them there is a
            forward pass.
    """
    with autocast(state.config, state.device, keeps_copies=not torch.is_grad_enabled()):
        if not state.shares_trunk or policy_states is None:
            policy_states = response_states(state.critic.backbone, packed)
        values = state.critic.values(policy_states)
    return packed.of_states(values)
