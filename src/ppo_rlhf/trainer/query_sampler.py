"""Responses to a user's own queries, with the noise that the next iteration's rollouts would have."""

from __future__ import annotations

import logging
import time
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from ppo_rlhf.core.errors import ConfigError, DataError
from ppo_rlhf.core.randomness import episode_uniforms
from ppo_rlhf.data.prompt_dataset import PromptDataset
from ppo_rlhf.ppo.rollout import sample_responses
from ppo_rlhf.ppo.state import TrainingState
from ppo_rlhf.processes import is_main_process
from ppo_rlhf.trainer.generation_arguments import sampling_from_arguments
from ppo_rlhf.trainer.inputs import check_one_turn, check_room, token_lists, without_padding

log = logging.getLogger(__name__)


class QuerySampler:
    """Samples from the policy of a training state, and counts the responses since the iteration began.

    Attributes:
        started: `time.perf_counter()` of the iteration's first call, None before it.
        seconds: Time spent on decoding.
        rows: Number of responses sampled.
        answers: Those responses, without their queries.
        vocabulary: Number of token ids of the policy.
        limit: Most tokens of a query and its response, and the reason for that (`trainer_models.context_of_all`).
    """

    def __init__(self, state: TrainingState, limit: tuple[int | None, str]) -> None:
        self._state = state
        self._warned = False
        self.vocabulary = int(state.policy.config.get_text_config().vocab_size)
        self.limit = limit
        self.start_iteration()

    def start_iteration(self) -> None:
        """Count from 0 again."""
        self.started: float | None = None
        self.seconds = 0.0
        self.rows = 0
        self.answers: set[tuple[int, ...]] = set()

    def generate(
        self,
        queries: Tensor | Sequence[Tensor],
        attention_mask: Tensor | None,
        return_prompt: bool,
        batch_size: int | None,
        arguments: Mapping[str, Any],
    ) -> list[Tensor] | Tensor:
        """Sample a response to each query, as `PPOTrainer.generate` documents it."""
        state, config = self._state, self._state.config
        check_one_turn(config)
        is_one = isinstance(queries, Tensor) and queries.dim() == 1
        rows: Any = [queries] if is_one else queries
        if attention_mask is None:
            prompt_ids = without_padding(rows, "query", state.policy, state.tokenizer, config)
        elif getattr(queries, "shape", None) != getattr(attention_mask, "shape", ()):
            raise DataError("generate: attention_mask is for queries in one tensor, and has the shape of that")
        else:
            masks = attention_mask.bool().reshape(len(rows), -1)
            real = [row[mask] for row, mask in zip(rows, masks, strict=True)]
            prompt_ids = token_lists(real, "query", self.vocabulary)
        at_a_time = config.local_rollout_forward_batch_size if batch_size is None else batch_size
        if at_a_time < 1:
            raise ConfigError(
                f"generate: batch_size={batch_size} is below 1; None takes ppo.local_rollout_forward_batch_size="
                f"{config.local_rollout_forward_batch_size}"
            )
        settings = sampling_from_arguments(state.sampling, arguments, self.vocabulary)
        check_room(prompt_ids, [settings.response_length] * len(prompt_ids), *self.limit)
        if settings.temperature != config.temperature and settings.top_k != 1:
            self._warn_of_temperature(settings.temperature)
        started = time.perf_counter()
        generated = sample_responses(
            state.policy,
            PromptDataset(prompt_ids, [""] * len(prompt_ids), {}),
            self._noise(len(prompt_ids))[:, : settings.response_length],
            settings,
            config,
            batch_size=at_a_time,
        )
        self.started = self.started or started
        self.seconds += time.perf_counter() - started
        self.rows += len(prompt_ids)
        responses = generated.token_lists()
        self.answers.update(map(tuple, responses))
        answers = [
            torch.tensor([*prompt, *response] if return_prompt else response, device=getattr(row, "device", None))
            for row, prompt, response in zip(rows, prompt_ids, responses, strict=True)
        ]
        return answers[0][None] if is_one else answers

    def _noise(self, rows: int) -> Tensor:
        """Return uniforms `[rows, response_length]` for the next rows of this iteration.

        The first `batch_size` rows have the noise of the rollout. Later rows, which no step trains on, have their own.
        """
        config = self._state.config
        size, first, iteration = config.batch_size, self.rows, self._state.iteration + 1
        blocks = [
            episode_uniforms(
                config.seed,
                "rollout" if block == 0 else f"rollout beyond {block}",
                iteration,
                size,
                config.response_length,
            )
            for block in range(first // size, (first + rows - 1) // size + 1)
        ]
        return torch.cat(blocks)[first % size :][:rows]

    def _warn_of_temperature(self, temperature: float) -> None:
        if not self._warned and is_main_process():
            log.warning(
                "generate(temperature=%g): step() computes log-probabilities at ppo.temperature=%g; train at the "
                "temperature that you sample at",
                temperature,
                self._state.config.temperature,
            )
        self._warned = True
