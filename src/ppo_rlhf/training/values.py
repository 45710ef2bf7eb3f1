"""Values of the states of responses, by a critic of its own or by the head on the policy's trunk."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import AbstractContextManager, nullcontext

from torch import Tensor

from ppo_rlhf.models.critic import SharedCritic
from ppo_rlhf.training.packing import PackedSequences
from ppo_rlhf.training.precision import autocast
from ppo_rlhf.training.state import TrainingState


def trunk_states(state: TrainingState) -> AbstractContextManager[Sequence[Tensor]]:
    """Within the block, collect the hidden states that the policy's forward passes leave for the value head.

    Nothing is collected where the critic has a backbone of its own.
    """
    return state.critic.listen() if isinstance(state.critic, SharedCritic) else nullcontext(())


def response_values(state: TrainingState, packed: PackedSequences, states: Sequence[Tensor] = ()) -> Tensor:
    """Return the critic's values of the states s_0 … s_T, `[B, T + 1]`; column t comes before response token t.

    Args:
        state: Its critic is asked.
        packed: B sequences with T response columns.
        states: What `trunk_states` collected in a forward pass over the same sequences; without it there is a new one.
    """
    with autocast(state.config, state.device):
        if isinstance(state.critic, SharedCritic) and states:
            values = state.critic.values(states[-1])
        else:
            values = state.critic(packed.input_ids, packed.attention_mask, packed.position_ids)
    return values[:, -packed.response_ids.shape[1] - 1 :]
