"""The models of a training state in a checkpoint.

    policy/                       the policy's model directory with its tokenizer; with LoRA only peft's adapter;
                                  generation_config.json and ppo_rlhf.json record how the policy was trained;
                                  made_from.json, which `store` writes, lists what it was made from
    critic.safetensors            the critic; with LoRA only the trained weights, with a shared trunk only the head
    policy_average.safetensors    only with ema_decay
    frozen_weights.json           only with LoRA: fingerprints of the frozen weights below the adapters

A checkpoint holds no frozen weights. A resumed run loads the frozen weights from `sft_policy` and `reward_model` again.
"""

from __future__ import annotations

import copy
import json
import logging
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, load_model, save_file, save_model
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from ppo_rlhf.checkpoints.files import Checkpoint
from ppo_rlhf.checkpoints.training_record import generation_config_of, record_of
from ppo_rlhf.core.errors import CheckpointError
from ppo_rlhf.models.adapters import frozen_fingerprint, has_adapter, load_adapter
from ppo_rlhf.models.averages import copy_tensors, trained_parameters
from ppo_rlhf.models.directories import RECORD
from ppo_rlhf.models.older_readers import add_older_names
from ppo_rlhf.models.preparation import not_finite
from ppo_rlhf.passes.sharding import whole
from ppo_rlhf.passes.transfers import refilled
from ppo_rlhf.ppo.batch_sampling import Sampler
from ppo_rlhf.ppo.learner import Learner
from ppo_rlhf.ppo.training_state import TrainingState
from ppo_rlhf.runtime.log_lines import quiet_transformers
from ppo_rlhf.runtime.processes import is_main_process, shards_models

log = logging.getLogger(__name__)

POLICY, CRITIC, AVERAGE = "policy", "critic.safetensors", "policy_average.safetensors"
FROZEN = "frozen_weights.json"


def optimizers(learner: Learner) -> dict[str, torch.optim.Optimizer]:
    """Return the optimisers of `Learner.optimizers` by the names of their files."""
    return dict(zip(("policy_optimizer", "critic_optimizer"), learner.optimizers, strict=False))


def write_models(directory: Path, learner: Learner, sampler: Sampler) -> None:
    """Write the policy, the critic and the average of the policy's weights to a directory.

    Raises:
        OSError, SafetensorError: A file cannot be written.
        RuntimeError, ValueError: A file cannot hold the weights, for example because the weights overlap in memory.
    """
    with quiet_transformers():
        # For a policy with LoRA, `adapters.save_adapter` replaces this method and saves only the adapter.
        learner.policy.save_pretrained(directory / POLICY)
    sampler.tokenizer.save_pretrained(directory / POLICY)
    add_older_names(directory / POLICY)
    generation_config_of(learner.policy, sampler.settings).save_pretrained(directory / POLICY)
    (directory / POLICY / RECORD).write_text(record_of(sampler), encoding="utf-8")
    if has_adapter(learner.critic):
        save_tensors({**trained_parameters(learner.critic)}, directory / CRITIC)
    else:  # safetensors' `save_model` writes a weight that several modules share (Zamba2's layers) only once
        save_model(learner.critic, str(directory / CRITIC))
    if learner.policy_average is not None:
        save_tensors(learner.policy_average.weights, directory / AVERAGE)
    if fingerprints := _fingerprints(learner):
        (directory / FROZEN).write_text(json.dumps(fingerprints, indent=1), encoding="utf-8")


def read_models(checkpoint: Checkpoint, learner: Learner) -> None:
    """Copy the models that `write_models` wrote into the models of a new learner.

    Raises:
        CheckpointError: The adapters were trained on other frozen weights than those of `learner`, or a weight is
            missing, NaN or infinite.
        OSError, RuntimeError, ValueError: The checkpoint was made for other models.
    """
    directory = checkpoint.directory
    with refilled(learner.policy, learner.critic):
        _check_frozen_weights(checkpoint, learner)
        if has_adapter(learner.policy):
            load_adapter(learner.policy, directory / POLICY)
        else:
            # Loading by the policy's own class needs no trust_remote_code for a model with custom code
            load: Any = type(learner.policy).from_pretrained
            with quiet_transformers():
                policy, report = load(
                    directory / POLICY,
                    dtype=learner.policy.dtype,
                    use_safetensors=True,
                    local_files_only=True,
                    output_loading_info=True,
                )
            if missing := sorted(report["missing_keys"]):
                raise CheckpointError(f"{directory / POLICY}: the weight {missing[0]} is missing")
            learner.policy.load_state_dict(policy.state_dict())
        if has_adapter(learner.critic):
            copy_tensors(load_file(directory / CRITIC), {**trained_parameters(learner.critic)})
        else:
            load_model(learner.critic, directory / CRITIC)
        average = {} if learner.policy_average is None else load_file(directory / AVERAGE)
        saved: dict[str, Mapping[str, Tensor]] = {
            POLICY: _saved_weights(learner.policy),
            CRITIC: _saved_weights(learner.critic),
            AVERAGE: average,
        }
        for file, weights in saved.items():
            if (name := not_finite(weights.items())) is not None:
                raise CheckpointError(f"{directory / file}: the weight {name} holds NaN or infinity")
    if learner.policy_average is not None:
        copy_tensors(average, learner.policy_average.weights)


def _saved_weights(model: nn.Module) -> dict[str, nn.Parameter]:
    """Return the weights of a model that a checkpoint holds."""
    return trained_parameters(model) if has_adapter(model) else dict(model.named_parameters())


def save_tensors(tensors: dict[str, Tensor], path: Path) -> None:
    """Write tensors to a safetensors file, made contiguous as the format requires."""
    save_file({name: tensor.detach().contiguous() for name, tensor in tensors.items()}, path)


def gathered(state: TrainingState) -> TrainingState:
    """Return a state whose learner is `whole_learner`; a state that is not sharded is returned unchanged."""
    learner = whole_learner(state.learner)
    return state if learner is state.learner else replace(state, learner=learner)


def whole_learner(learner: Learner) -> Learner:
    """Return a learner with gathered weights and optimiser moments; one that is not sharded is returned unchanged.

    Every process must call this function. The sharded tensors are gathered one after the other into the main process's
    host memory. All processes except the main process get tensors without values (device `meta`).
    """
    if not shards_models():
        return learner
    names = ("policy", "critic", "policy_optimizer", "critic_optimizer", "policy_average")
    parts = {name: getattr(learner, name) for name in names}
    tensors: list[Tensor] = [*learner.policy.parameters(), *learner.critic.parameters()]
    for optimizer in (learner.policy_optimizer, learner.critic_optimizer):
        tensors += [moment for row in optimizer.state.values() for moment in row.values()]
    tensors += [] if learner.policy_average is None else learner.policy_average.weights.values()
    copies: dict[int, Tensor] = {}
    for tensor in tensors:
        if isinstance(tensor, DTensor) and id(tensor) not in copies:
            values = whole(tensor.detach()).to("cpu" if is_main_process() else "meta")
            is_weight = isinstance(tensor, nn.Parameter)
            copies[id(tensor)] = nn.Parameter(values, tensor.requires_grad) if is_weight else values
    return replace(learner, **copy.deepcopy(parts, copies))


def _fingerprints(learner: Learner) -> dict[str, str]:
    models = (
        {"policy": learner.policy} if learner.shares_trunk else {"policy": learner.policy, "critic": learner.critic}
    )
    return {name: frozen_fingerprint(model) for name, model in models.items() if has_adapter(model)}


def _check_frozen_weights(checkpoint: Checkpoint, learner: Learner) -> None:
    directory = checkpoint.directory
    saved = checkpoint.json(FROZEN) if (directory / FROZEN).is_file() else {}
    for name, now in _fingerprints(learner).items():
        if saved.get(name) != now:
            raise CheckpointError(
                f"{directory}: the adapter of the {name} was trained on frozen weights that differ from this run's; "
                "set sft_model_path, reward_model_path and critic_path to the models of the checkpoint's run"
            )
