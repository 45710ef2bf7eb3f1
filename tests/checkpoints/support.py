"""The tensors that training depends on, for comparing two states."""

import torch

from ppo_rlhf.checkpoints.model_files import optimizers
from ppo_rlhf.ppo.training_state import TrainingState


def everything(state: TrainingState) -> dict[str, torch.Tensor]:
    """Return copies of the weights of policy, critic and average, and of the moments of the optimisers."""
    found = {f"policy.{name}": tensor for name, tensor in state.learner.policy.state_dict().items()}
    found |= {f"critic.{name}": tensor for name, tensor in state.learner.critic.state_dict().items()}
    if state.learner.policy_average is not None:
        found |= {f"average.{name}": tensor for name, tensor in state.learner.policy_average.weights.items()}
    for name, optimizer in optimizers(state.learner).items():
        for index, moments in optimizer.state_dict()["state"].items():
            found |= {f"{name}.{index}.{key}": value for key, value in moments.items()}
    return {name: tensor.detach().clone() for name, tensor in found.items()}


def assert_same(found: dict[str, torch.Tensor], expected: dict[str, torch.Tensor]) -> None:
    """Compare tensors bit for bit, and name those that differ."""
    assert found.keys() == expected.keys()
    assert [name for name in expected if not torch.equal(found[name], expected[name])] == []
