"""The whole weights and moments of a run whose models are sharded, as its files hold them."""

from __future__ import annotations

import copy
from dataclasses import replace

from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from ppo_rlhf.models.sharding import whole
from ppo_rlhf.ppo.state import TrainingState
from ppo_rlhf.processes import is_main_process, shards_models


def gathered(state: TrainingState) -> TrainingState:
    """Return a state of plain models and optimisers; one that is not sharded is returned itself.

    Every process calls it. The whole tensors are in the host's memory of the main process, one after the other; in the
    other processes they have no values (device `meta`).
    """
    if not shards_models():
        return state
    models = (state.policy, state.critic)
    optimizers = (state.policy_optimizer, state.critic_optimizer)
    found: list[Tensor] = [weight for model in models for weight in model.parameters()]
    found += [moment for each in optimizers for row in each.state.values() for moment in row.values()]
    found += [] if state.policy_average is None else state.policy_average.weights.values()
    copies: dict[int, Tensor] = {}
    for tensor in found:
        if isinstance(tensor, DTensor) and id(tensor) not in copies:
            values = whole(tensor.detach()).to("cpu" if is_main_process() else "meta")
            is_weight = isinstance(tensor, nn.Parameter)
            copies[id(tensor)] = nn.Parameter(values, tensor.requires_grad) if is_weight else values
    plain = copy.deepcopy((*models, *optimizers, state.policy_average), copies)
    policy, critic, policy_optimizer, critic_optimizer, average = plain
    return replace(
        state,
        policy=policy,
        critic=critic,
        policy_optimizer=policy_optimizer,
        critic_optimizer=critic_optimizer,
        policy_average=average,
    )
