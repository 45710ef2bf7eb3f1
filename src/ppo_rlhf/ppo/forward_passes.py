"""The forward passes of policy and critic.

Passes that train are modules, which accelerate can wrap for several processes. Training must call accelerate's wrapper,
which sums the gradients over the processes.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import NamedTuple

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from ppo_rlhf.config import PPOConfig
from ppo_rlhf.core.checks import compute_dtype
from ppo_rlhf.models.critic import Critic, SharedCritic, ValueModel
from ppo_rlhf.passes.forward import backbone_of, hidden_states_at, packs
from ppo_rlhf.passes.halvings import Halving
from ppo_rlhf.passes.response_logprobs import Reference, response_statistics
from ppo_rlhf.passes.rows import table_by_rows
from ppo_rlhf.passes.sampling import Responses
from ppo_rlhf.passes.sequences import SequenceBatch, sequence_batches
from ppo_rlhf.passes.transfers import to_device
from ppo_rlhf.ppo.precision import autocast, fills_rows


class PolicyOutput(NamedTuple):
    """Output of the policy's forward pass for B sequences with T response columns; all tensors are 0 in padding."""

    # [B, T], log-probabilities of the response tokens at the sampling temperature, in nats, float32 or float64
    logprobs: Tensor
    entropy: Tensor | None  # [B, T], entropy in nats per token; None if the caller did not ask for it
    kl: Tensor | None  # [B, T], KL over the whole vocabulary in nats; None if the caller did not ask for it
    values: Tensor | None  # [B, T + 1], the critic's values; None unless policy and critic share a trunk


class PolicyForward(nn.Module):
    """The policy's forward pass, which returns log-probabilities, entropies, KL and, with a shared trunk, values."""

    def __init__(self, policy: PreTrainedModel, critic: Critic | SharedCritic, temperature: float) -> None:
        super().__init__()
        self.policy = policy
        self.shared_critic = critic if isinstance(critic, SharedCritic) else None
        self.temperature = temperature

    def forward(
        self, batch: SequenceBatch, *, with_entropy: bool = False, learns: bool = True, reference: Reference = None
    ) -> PolicyOutput:
        """Compute the policy's output for B sequences with T response columns.

        With `learns=False` the policy gets no gradients; a value head on the policy's trunk still gets gradients.
        """
        with torch.set_grad_enabled(learns and torch.is_grad_enabled()):
            states = hidden_states_at(backbone_of(self.policy), batch.rows, batch.state_positions)
            statistics = response_statistics(
                self.policy, batch, states, self.temperature, with_entropy=with_entropy, reference=reference
            )
        values = None if self.shared_critic is None else batch.scatter_states(self.shared_critic.values(states))
        return PolicyOutput(*statistics, values)


class CriticForward(nn.Module):
    """The forward pass of a critic with its own backbone: from tokens to values."""

    def __init__(self, critic: ValueModel) -> None:
        super().__init__()
        self.critic = critic

    def forward(self, batch: SequenceBatch) -> Tensor:
        """Return the values of the states s_0 … s_T, `[B, T + 1]`, 0 in padding.

        Column t is the value before response token t; the last value of a row is the value after the last token.
        """
        states = hidden_states_at(self.critic.backbone, batch.rows, batch.state_positions)
        return batch.scatter_states(self.critic.values(states))


def compute_logprobs(
    model: PreTrainedModel,
    prompt_ids: list[list[int]],
    responses: Responses,
    config: PPOConfig,
    *,
    temperature: float,
    device: torch.device,
    batch_size: int | None,
    pad_token_id: int,
    halving: Halving | None = None,
) -> Tensor:
    """Return the log-probabilities `[N, T]` of the policy's tokens under a model, in nats, and 0 on all other tokens.

    Each process computes its shard of the responses, without gradients (`table_by_rows`).

    Args:
        model: A causal language model with dropout off; an offloaded model is on the device only during the call.
        prompt_ids: N prompts.
        responses: N responses.
        config: Hyperparameters.
        temperature: Divides the logits.
        device: The device to compute on.
        batch_size: Responses per forward pass; None: as many as fit into memory.
        pad_token_id: Any token id, used for padding; no result depends on padding.
        halving: Halves `batch_size` when memory runs out; None: this call's own.
    """
    tokens = [len(ids) + length for ids, length in zip(prompt_ids, responses.lengths.tolist(), strict=True)]

    def logprobs(groups: list[list[int]]) -> Iterator[Tensor]:
        batches = sequence_batches(
            prompt_ids, responses.response_ids, responses.lengths, groups, pad_token_id, fill=fills_rows(config, device)
        )
        for batch in to_device(batches, device):
            yield batch_logprobs(model, batch, temperature)

    with autocast(config, device):
        table = table_by_rows(
            model,
            tokens,
            responses.response_ids.shape[1],
            compute_dtype(model),
            logprobs,
            shared=lambda: prompt_ids if packs(backbone_of(model)) else None,
            device=device,
            batch_size=batch_size,
            halving=halving,
        )
    return torch.where(responses.mask, table, 0.0)


def batch_logprobs(model: PreTrainedModel, batch: SequenceBatch, temperature: float) -> Tensor:
    """Return the log-probabilities `[b, t]` of one pass's response tokens under a model, in nats."""
    states = hidden_states_at(backbone_of(model), batch.rows, batch.state_positions)
    return response_statistics(model, batch, states, temperature)[0]
