"""How many operations an update needs: matrix products and attention of real tokens, and nothing else.

A product of m x k with k x n has 2mkn operations. A token goes through a matrix once in the forward pass, and once each
for the gradients of its input and, if the matrix trains, of the matrix. A sequence of S tokens has S (S + 1) / 2 pairs
of positions, with 4 x width operations each in a layer (scores and weighted sum) and 8 in the backward pass. What
follows the last attention is computed for the states that are read alone, s_0 to s_T: see
`models.passes.behind_attention`.

Not counted: embeddings, norms, activations, soft-maxima, losses, the value head with its one output, optimiser steps,
padding, and what is computed a second time (checkpointed gradients, attention's scores in its backward pass). With an
adapter it is as if gradients went down to the first layer's input, which they need not.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import chain

from torch import nn
from transformers.pytorch_utils import Conv1D

from ppo_rlhf.models.annotations import PreTrainedModel
from ppo_rlhf.models.critic import Critic, SharedCritic
from ppo_rlhf.models.forward import backbone_of, computed_of_read_tokens


@dataclass(frozen=True)
class Matrices:
    """Elements of the matrices that a token goes through."""

    trained: int
    frozen: int

    @classmethod
    def of(cls, *modules: nn.Module) -> Matrices | None:
        """Count those of modules; None if one has others than linear layers and embeddings (experts, convolutions)."""
        counts = {True: 0, False: 0}
        for part in chain.from_iterable(module.modules() for module in modules):
            large = [parameter for parameter in part.parameters(recurse=False) if parameter.dim() > 1]
            if isinstance(part, nn.Linear | Conv1D):
                counts[part.weight.requires_grad] += part.weight.numel()
            elif large and not isinstance(part, nn.Embedding):
                return None
        return cls(counts[True], counts[False])

    def __sub__(self, some: Matrices) -> Matrices:
        """Return those without some of them."""
        return Matrices(self.trained - some.trained, self.frozen - some.frozen)

    def operations(self, *, backward: bool) -> int:
        """Return those of a token's forward pass, or of its backward pass."""
        return 4 * self.trained + 2 * self.frozen if backward else 2 * (self.trained + self.frozen)


@dataclass(frozen=True)
class Trunk:
    """A transformer below its heads, as far as its operations go."""

    matrices: Matrices  # that all tokens go through
    behind: Matrices  # that only tokens go through whose last hidden states are read
    attention: int  # width of all heads, summed over the layers

    @classmethod
    def of(cls, backbone: PreTrainedModel) -> Trunk | None:
        """Measure a backbone; None if it has matrices of other kinds (see `Matrices.of`)."""
        matrices, behind = Matrices.of(backbone), Matrices.of(*computed_of_read_tokens(backbone))
        if matrices is None or behind is None:
            return None
        config = backbone.config.get_text_config()
        heads = config.num_attention_heads
        width = heads * (getattr(config, "head_dim", None) or config.hidden_size // heads)
        return cls(matrices - behind, behind, config.num_hidden_layers * width)

    def operations(self, lengths: Sequence[int], responses: Sequence[int], *, backward: bool) -> int:
        """Return those of sequences and responses of these lengths, forward or backward."""
        pairs = sum(length * (length + 1) // 2 for length in lengths)
        attention = (8 if backward else 4) * self.attention * pairs
        read = sum(responses) + len(responses)
        of_read = self.behind.operations(backward=backward) * read
        return self.matrices.operations(backward=backward) * sum(lengths) + of_read + attention


@dataclass(frozen=True)
class UpdateOperations:
    """What policy and critic need for sequences that are trained on once.

    Attributes:
        policy: The policy's trunk.
        head: Its output layer, which sees response positions alone.
        critic: The critic's trunk; None if it is the policy's.
    """

    policy: Trunk
    head: Matrices
    critic: Trunk | None

    @classmethod
    def of(cls, policy: PreTrainedModel, critic: Critic | SharedCritic) -> UpdateOperations | None:
        """Measure both; None if one has matrices of other kinds (see `Matrices.of`)."""
        trunk, head = Trunk.of(backbone_of(policy)), Matrices.of(policy.get_output_embeddings())
        own = None if isinstance(critic, SharedCritic) else Trunk.of(critic.backbone)
        if trunk is None or head is None or (own is None and isinstance(critic, Critic)):
            return None
        return cls(trunk, head, own)

    def count(self, lengths: Sequence[int], responses: Sequence[int], *, policy_learns: bool = True) -> int:
        """Return the operations of forward and backward passes.

        Args:
            lengths: Tokens of each sequence, prompt and response.
            responses: Tokens of each response.
            policy_learns: False while the critic is warmed up: the policy's passes then are forward passes.
        """
        total = 0
        for backward in (False, True) if policy_learns else (False,):
            total += self.policy.operations(lengths, responses, backward=backward)
            total += self.head.operations(backward=backward) * sum(responses)
        if self.critic is not None:
            total += sum(self.critic.operations(lengths, responses, backward=backward) for backward in (False, True))
        return total
