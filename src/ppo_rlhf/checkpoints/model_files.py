"""The models of a training state on disk: in its checkpoints, and as what a run exports.

    policy/                       a model directory with its tokenizer; with LoRA, peft's adapter in place of a model
    critic.safetensors            all of it; with LoRA what trains, with a shared trunk the head
    policy_average.safetensors    with ema_decay
    frozen_weights.json           with LoRA: fingerprints of the weights that the adapters belong to

Frozen weights are in no checkpoint: they come from where the run got them, `sft_policy` and `reward_model`.
"""

from __future__ import annotations

import json
from pathlib import Path

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor, nn
from transformers import PreTrainedModel

from ppo_rlhf.core.errors import CheckpointError
from ppo_rlhf.models.adapters import (
    copy_tensors,
    frozen_fingerprint,
    has_adapter,
    load_adapter,
    merged,
    save_adapter,
    trained_parameters,
)
from ppo_rlhf.models.critic import SharedCritic
from ppo_rlhf.models.loading import TrainedModel
from ppo_rlhf.models.quiet import quiet_transformers
from ppo_rlhf.ppo.build import lora_settings
from ppo_rlhf.ppo.state import TrainingState

POLICY, CRITIC, AVERAGE = "policy", "critic.safetensors", "policy_average.safetensors"
FROZEN = "frozen_weights.json"


def optimizers(state: TrainingState) -> dict[str, torch.optim.Optimizer]:
    """Return the optimisers by the names of their files: one for policy and critic on a shared trunk, else two."""
    found = {"policy_optimizer": state.policy_optimizer}
    return found if state.shares_trunk else {**found, "critic_optimizer": state.critic_optimizer}


def write_models(directory: Path, state: TrainingState) -> None:
    """Write policy, critic and the policy's average below a directory.

    Raises:
        OSError, SafetensorError: A file cannot be written.
        RuntimeError, ValueError: Weights are not what a file can hold, as those that overlap in memory.
    """
    with quiet_transformers():
        if has_adapter(state.policy):
            save_adapter(state.policy, directory / POLICY, lora_settings(state.config))
        else:
            state.policy.save_pretrained(directory / POLICY)
    state.tokenizer.save_pretrained(directory / POLICY)
    save_file(_contiguous(_saved_weights(state.critic)), directory / CRITIC)
    if state.policy_average is not None:
        save_file(_contiguous(state.policy_average.weights), directory / AVERAGE)
    if fingerprints := _fingerprints(state):
        (directory / FROZEN).write_text(json.dumps(fingerprints, indent=1))


def read_models(directory: Path, state: TrainingState) -> None:
    """Copy what `write_models` wrote into the models of a freshly made state.

    Raises:
        CheckpointError: It belongs to other frozen weights.
        OSError, RuntimeError, ValueError: It was made for other models.
    """
    _check_frozen_weights(directory, state)
    if has_adapter(state.policy):
        load_adapter(state.policy, directory / POLICY)
    else:
        with quiet_transformers():  # the class of the model at hand, so that code of its own need not be trusted again
            policy = type(state.policy).from_pretrained(
                directory / POLICY, dtype=state.policy.dtype, use_safetensors=True, local_files_only=True
            )
        state.policy.load_state_dict(policy.state_dict())
    copy_tensors(load_file(directory / CRITIC), _saved_weights(state.critic))
    if state.policy_average is not None:
        state.policy_average.load(load_file(directory / AVERAGE))


def exported_policy(state: TrainingState) -> TrainedModel:
    """Return what a run leaves behind: a plain model, its adapter merged, with the average beside it if there is one.

    Merging rounds: in float32 logits move by some 1e-6 of their size. Weights that were frozen in a 16-bit type are
    exported in float32.
    """
    head = state.critic.value_head if state.config.export_value_head and state.shares_trunk else None
    average = None if state.policy_average is None else state.policy_average.applied_to(state.policy)
    return TrainedModel(
        _plain(state.policy),
        state.tokenizer,
        value_head=head,
        average=None if average is None else _plain(average),
    )


def _plain(model: PreTrainedModel) -> PreTrainedModel:
    return merged(model) if has_adapter(model) else model


def _saved_weights(critic: nn.Module) -> dict[str, Tensor]:
    """Return the tensors of a critic that a checkpoint holds; writing into them changes the critic.

    Each under the first of its names: layers may be one module in several places (Zamba2), and safetensors refuses a
    tensor that comes twice.
    """
    if has_adapter(critic):
        return {**trained_parameters(critic)}
    held = critic.state_dict(keep_vars=True)  # detached, one tensor under two names would be two
    first_names = {id(tensor): name for name, tensor in reversed(held.items())}
    return {name: tensor for name, tensor in held.items() if first_names[id(tensor)] == name}


def _fingerprints(state: TrainingState) -> dict[str, str]:
    adapted = {"policy": state.policy, "critic": state.critic}
    if isinstance(state.critic, SharedCritic):
        del adapted["critic"]
    return {name: frozen_fingerprint(model) for name, model in adapted.items() if has_adapter(model)}


def _check_frozen_weights(directory: Path, state: TrainingState) -> None:
    path = directory / FROZEN
    saved = json.loads(path.read_text()) if path.is_file() else {}
    for name, now in _fingerprints(state).items():
        if saved.get(name) != now:
            raise CheckpointError(
                f"{directory}: the adapter of the {name} was trained on other frozen weights than this run has; give "
                "the models that the checkpoint's run had (sft_model_path, reward_model_path)"
            )


def _contiguous(tensors: dict[str, Tensor]) -> dict[str, Tensor]:
    return {name: tensor.detach().contiguous() for name, tensor in tensors.items()}
