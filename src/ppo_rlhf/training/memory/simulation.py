"""The models and the passes of one PPO iteration on fake tensors: what each allocates beyond what is held anyway.

`SimulatedModels` are made by the functions that a run makes its own with. The passes below call the engine's functions
as one iteration does; where the engine changes, these few lines follow it.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, cast

import torch
from torch import Tensor, nn
from transformers import (
    AutoModelForCausalLM,
    AutoModelForSequenceClassification,
    PretrainedConfig,
    PreTrainedModel,
)

from ppo_rlhf.config import PPOConfig
from ppo_rlhf.core.sampling import sample_tokens
from ppo_rlhf.models.adapters import trained_parameters
from ppo_rlhf.models.critic import SharedCritic
from ppo_rlhf.models.decoding import Decoder
from ppo_rlhf.models.forward import backbone_of, has_plain_attention
from ppo_rlhf.models.loading import prepare
from ppo_rlhf.models.packed_attention import PackedLayout, packed_attention, packed_states
from ppo_rlhf.models.probe import vocabulary_size
from ppo_rlhf.models.products.compiled_shapes import fills_rows
from ppo_rlhf.models.quiet import quiet_transformers
from ppo_rlhf.ppo.build import (
    AnyCritic,
    build_critic,
    checkpointing_gradients,
    policy_to_train,
    prepare_to_train,
)
from ppo_rlhf.ppo.logprobs import token_statistics
from ppo_rlhf.ppo.precision import autocast, frozen_dtype, torch_dtype
from ppo_rlhf.ppo.sixteen_bit_gradients import SixteenBitGradients, kept_in_sixteen_bits
from ppo_rlhf.training.memory.live_bytes import LiveBytes, Peak, in_blocks, storage_sizes

DEVICE = torch.device("cpu")
"""Of the fake tensors, wherever the run will be: it chooses attention kernels, and torch without CUDA has the CPU's."""


@dataclass
class SimulatedModels:
    """A run's models without data: policy, critic, reference policy, and reward model if there is one."""

    policy: PreTrainedModel
    critic: AnyCritic
    reference: PreTrainedModel
    reward_model: PreTrainedModel | None

    @classmethod
    def build(
        cls, config: PPOConfig, policy: PretrainedConfig, reward_model: PretrainedConfig | None
    ) -> SimulatedModels:
        """Make the models as a run does, in its precision, on the device `meta`, where nothing is allocated.

        Raises:
            ConfigError: The critic is to start as a reward model, and there is none.
            ModelError: An option does not fit the architecture.
        """
        reference = _empty(AutoModelForCausalLM, policy, frozen_dtype(config)).requires_grad_(False)
        base = reference if config.use_peft else _empty(AutoModelForCausalLM, policy, torch_dtype(config))
        actor = policy_to_train(base, config)
        scorer = None
        if reward_model is not None:
            scorer = _empty(AutoModelForSequenceClassification, reward_model, frozen_dtype(config))
        critic = build_critic(config, actor, scorer)
        prepare_to_train(actor, critic, replace(config, compile=False))  # planned as they are
        return cls(actor, critic, reference, scorer)

    def to_fake(self) -> SimulatedModels:
        """Put fake tensors of `DEVICE` in the place of all weights; to be called where tensors are fake."""
        made: dict[int, Tensor] = {}
        for model in (self.policy, self.critic, self.reference, self.reward_model):
            for module in () if model is None else model.modules():
                tables: list[dict[str, Any]] = [module._parameters, module._buffers]
                for table in tables:
                    for name, tensor in table.items():
                        if tensor is not None:
                            table[name] = made.setdefault(id(tensor), _fake_like(tensor))
        return self

    def weight_bytes(self) -> dict[str, int]:
        """Return the bytes of weights and buffers, by name; what models share counts once, for the first of them."""
        known: set[int] = set()
        models = {
            "policy": self.policy,
            "reference policy": self.reference,
            "reward model": self.reward_model,
            "critic": self.critic,
        }
        return {name: sum(storage_sizes(_tensors(m), known)) for name, m in models.items() if m is not None}

    def trained(self) -> tuple[Peak, Peak]:
        """Return all weights of the policy that train, and those of the critic."""
        known: set[int] = set()
        policy, critic = (
            in_blocks(storage_sizes(trained_parameters(model).values(), known)) for model in (self.policy, self.critic)
        )
        return policy, critic


@dataclass(frozen=True)
class Passes:
    """The passes of one iteration over `rows` prompts of P tokens with responses of T.

    Attributes:
        models: On fake tensors.
        config: Hyperparameters.
        live: Counts.
        prompt_length: P.
    """

    models: SimulatedModels
    config: PPOConfig
    live: LiveBytes
    prompt_length: int

    def rollout(self, rows: int) -> Peak:
        """Return the peak of sampling: of the prefill, or of the last step with its whole cache."""
        return larger(self.live.peak_of(partial(self._prefill, rows)), self._last_step(rows))

    def are_without_padding(self) -> bool:
        """Whether the policy computes packed sequences, as is planned here; whether it does so exactly is not known."""
        with torch.no_grad(), self._autocast():
            decoder = self._decoder(1, 1)
            decoder.prefill()
        return has_plain_attention(backbone_of(self.models.policy)) and decoder.turns > 0

    def _prefill(self, rows: int) -> None:
        with torch.no_grad(), self._autocast():
            self._sample(self._decoder(rows, self.prompt_length).prefill())

    def _last_step(self, rows: int) -> Peak:
        before = self.live.now
        with torch.no_grad(), self._autocast():
            decoder = self._decoder(rows, self.prompt_length + self.config.response_length - 1)
            decoder.prefill()
            return self.live.peak_since(before, lambda: self._sample(decoder.step(_ids(1, rows)[0])))

    def _decoder(self, rows: int, width: int) -> Decoder:
        prompts = [[row % 2] * width for row in range(rows)]  # no two neighbours alike: those are computed once
        longest = self.prompt_length + self.config.response_length
        return Decoder(self.models.policy, prompts, longest, head=_head(self.models.policy))

    def _sample(self, logits: Tensor) -> None:
        wide = logits if logits.dtype == torch.float64 else logits.float()
        noise = torch.zeros(len(wide), dtype=torch.float64, device=DEVICE)
        sample_tokens(
            wide, noise, temperature=self.config.temperature, top_k=self.config.top_k, top_p=self.config.top_p
        )

    def reference_scoring(self, rows: int) -> Peak:
        """Return the peak of the reference policy's log-probabilities."""

        def score() -> None:
            with torch.no_grad(), self._autocast():
                self._statistics(self.models.reference, self._states(backbone_of(self.models.reference), rows), rows)

        return self.live.peak_of(score)

    def policy_scoring(self, rows: int) -> Peak:
        """Return the peak of the old log-probabilities and entropies."""

        def score() -> None:
            policy = self.models.policy
            with torch.no_grad(), self._autocast():
                self._statistics(policy, self._states(backbone_of(policy), rows), rows, with_entropy=True)

        return self.live.peak_of(score)

    def reward_scoring(self, rows: int) -> Peak:
        """Return the peak of the reward model's scores; 0 without one."""
        model = self.models.reward_model
        if model is None:
            return Peak()

        def score() -> None:
            with torch.no_grad():
                self._states(backbone_of(model), rows)

        return self.live.peak_of(score)

    def critic_scoring(self, rows: int) -> Peak:
        """Return the peak of the values; 0 on a shared trunk, whose values come with the log-probabilities."""
        if isinstance(self.models.critic, SharedCritic):
            return Peak()

        def score() -> None:
            with torch.no_grad():
                self._values(rows)

        return self.live.peak_of(score)

    def update(self, rows: int, micro_batches: int, *, side_by_side: bool) -> Peak:
        """Return the peak of one optimiser step's forward and backward passes, gradients included.

        With `side_by_side` policy and critic compute at the same time.
        Two micro-batches stand for any number above one: from the second on, gradients are there to be added to.
        """
        policy, critic = self.models.policy, self.models.critic
        passes = min(2, micro_batches)
        of_policy, of_critic = (self._sixteen_bits(model) for model in (backbone_of(policy), critic.backbone))

        def policy_passes() -> None:
            with of_policy.of_passes(passes) if of_policy else nullcontext():
                for _ in range(passes):
                    self._policy_pass(rows)

        def critic_passes() -> None:
            with of_critic.of_passes(passes) if of_critic else nullcontext():
                for _ in range(passes):
                    self._values(rows).sum().backward()

        def drop_gradients() -> None:
            for model, gradients in ((policy, of_policy), (critic, of_critic)):
                model.zero_grad(set_to_none=True)
                if gradients:
                    gradients.drop()

        def one_after_the_other() -> None:
            policy_passes()
            if not self.config.align_overflow:
                drop_gradients()  # the policy's step is taken by now
            critic_passes()

        def at_once() -> Peak:
            """Both may be at their own peaks."""
            alone = self.live.peak_of(policy_passes)
            drop_gradients()
            other = self.live.peak_of(critic_passes)
            return alone + other

        recomputing = checkpointing_gradients(policy, critic, self.config)
        with recomputing, packed_attention(backbone_of(policy), critic.backbone):
            if self._is_shared:
                peak = self.live.peak_of(policy_passes)
            elif side_by_side:
                peak = at_once()
            else:
                peak = self.live.peak_of(one_after_the_other)
        drop_gradients()
        return peak

    def _sixteen_bits(self, backbone: PreTrainedModel) -> SixteenBitGradients | None:
        kept = kept_in_sixteen_bits(self.config, backbone)
        return SixteenBitGradients(backbone, torch.bfloat16) if kept else None

    def _policy_pass(self, rows: int) -> None:
        policy, with_entropy = self.models.policy, bool(self.config.entropy_coef)
        with self._autocast():
            states = self._states(backbone_of(policy), rows)
            logprobs, entropies = self._statistics(policy, states, rows, with_entropy=with_entropy)
        loss = logprobs.sum() + entropies.sum()
        if self._is_shared:
            with self._autocast():
                loss = loss + self.models.critic.values(states).sum()
        del states  # the graph alone holds them now, as in the update
        loss.backward()

    def _states(self, backbone: PreTrainedModel, rows: int) -> Tensor:
        """Return the states `[N, H]` of rows of full length, packed; of all tokens, also those that nobody reads."""
        width = self.prompt_length + self.config.response_length
        ids = _ids(1, rows * width)
        return packed_states(backbone, ids, ids, PackedLayout.of([width] * rows, DEVICE))

    def _statistics(
        self, model: PreTrainedModel, states: Tensor, rows: int, *, with_entropy: bool = False
    ) -> tuple[Tensor, Tensor]:
        targets = _ids(1, rows * self.config.response_length)[0]
        predicting = states.index_select(0, targets)
        return token_statistics(
            _head(model),
            predicting,
            targets,
            self.config.temperature,
            vocabulary_size(model),
            with_entropy=with_entropy,
            fill=fills_rows(model),
        )

    def _values(self, rows: int) -> Tensor:
        with self._autocast():
            return self.models.critic.values(self._states(self.models.critic.backbone, rows))

    @property
    def _is_shared(self) -> bool:
        return isinstance(self.models.critic, SharedCritic)

    def _autocast(self) -> AbstractContextManager[object]:
        return autocast(self.config, DEVICE, keeps_copies=not torch.is_grad_enabled())


def larger(*peaks: Peak) -> Peak:
    """Return the peak with the most bytes."""
    return max(peaks, key=lambda peak: peak.total)


def _head(model: PreTrainedModel) -> nn.Module:
    """Return the output layer: fake tensors cannot be asked whether the model does more behind its trunk."""
    return cast(nn.Module, model.get_output_embeddings())


def _empty(
    auto: type[AutoModelForCausalLM | AutoModelForSequenceClassification], config: PretrainedConfig, dtype: torch.dtype
) -> PreTrainedModel:
    with torch.device("meta"), quiet_transformers():
        model: PreTrainedModel = auto.from_config(config, dtype=dtype)
    return prepare(model)


def _fake_like(tensor: Tensor) -> Tensor:
    fake = torch.empty_strided(tensor.shape, tensor.stride(), dtype=tensor.dtype, device=DEVICE)
    return nn.Parameter(fake, requires_grad=tensor.requires_grad) if isinstance(tensor, nn.Parameter) else fake


def _ids(rows: int, width: int) -> Tensor:
    return torch.zeros(rows, width, dtype=torch.long, device=DEVICE)


def _tensors(model: nn.Module) -> Iterator[Tensor]:
    yield from model.parameters()
    yield from model.buffers()
