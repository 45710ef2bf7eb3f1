"""Sampling for `PPOTrainer.generate`: responses to a user's queries, with the noise of the next iteration."""

from __future__ import annotations

import dataclasses
import logging
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from ppo_rlhf.config.parameter_groups import closest
from ppo_rlhf.core.errors import ConfigError, DataError
from ppo_rlhf.core.randomness import episode_uniforms
from ppo_rlhf.data.prompt_dataset import PromptDataset
from ppo_rlhf.models.stop_tokens import ids_within
from ppo_rlhf.passes.sampling import SamplingSettings
from ppo_rlhf.ppo.batch_sampling import Sampler, sample_responses
from ppo_rlhf.ppo.progress import SAMPLING, Progress
from ppo_rlhf.runtime.processes import is_main_process
from ppo_rlhf.trainer.inputs import check_one_turn, check_query_length, token_lists, without_padding

log = logging.getLogger(__name__)


class QuerySampler:
    """Samples responses from the policy, and counts the rows sampled since the iteration began.

    Attributes:
        rows: Responses sampled since the iteration began.
        answers: Token ids of the responses, without their queries.
        vocabulary: The number of the policy's token ids.
        limit: The shortest context of the run's models and the reason for this limit, from `context_of_all`.
    """

    def __init__(self, sampler: Sampler, progress: Progress, limit: tuple[int | None, str]) -> None:
        self._sampler, self._progress = sampler, progress
        self._warned = not is_main_process()
        self.vocabulary = int(sampler.policy.config.get_text_config().vocab_size)
        self.limit = limit
        self.start_iteration()

    def start_iteration(self) -> None:
        """Forget the responses that were sampled in the previous iteration."""
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
        sampler, progress, config = self._sampler, self._progress, self._sampler.config
        check_one_turn(config)
        is_one = isinstance(queries, Tensor) and queries.dim() == 1
        rows: Any = [queries] if is_one else queries
        if attention_mask is None:
            prompt_ids = without_padding(rows, "query", sampler.policy, sampler.tokenizer, config)
        elif getattr(queries, "shape", None) != getattr(attention_mask, "shape", ()):
            raise DataError("generate: attention_mask needs queries in one tensor of the same shape")
        else:
            masks = attention_mask.bool().reshape(len(rows), -1)
            unpadded = [row[mask] for row, mask in zip(rows, masks, strict=True)]
            prompt_ids = token_lists(unpadded, "query", self.vocabulary)
        arguments = dict(arguments)
        copies = arguments.pop("num_return_sequences", 1)
        counts = {"batch_size": 1 if batch_size is None else batch_size, "num_return_sequences": copies}
        for name, count in counts.items():
            if not isinstance(count, int) or count < 1:
                raise ConfigError(f"generate: {name}={count!r} must be an integer of at least 1")
        settings = _sampling(sampler.settings, arguments, self.vocabulary)
        if copies > 1 and settings.top_k == 1:
            raise ConfigError(
                f"generate: num_return_sequences={copies} would repeat the greedy response; give do_sample=True"
            )
        check_query_length(prompt_ids, [settings.response_length] * len(prompt_ids), *self.limit)
        if settings.temperature != config.temperature and settings.top_k != 1 and not self._warned:
            self._warned = True
            log.warning(
                "generate(temperature=%g): step() computes log-probabilities at ppo.temperature=%g; use the same "
                "temperature for both",
                settings.temperature,
                config.temperature,
            )
        prompt_ids, rows = ([row for row in table for _ in range(copies)] for table in (prompt_ids, rows))
        if not self.rows:
            progress.clock.restart()
        with progress.clock.timed(SAMPLING):
            generated = sample_responses(
                sampler.policy,
                PromptDataset(prompt_ids, [""] * len(prompt_ids), {}),
                self._noise(len(prompt_ids))[:, : settings.response_length],
                settings,
                config,
                batch_size=config.local_rollout_forward_batch_size if batch_size is None else batch_size,
                halving=sampler.halving,
            )
        self.rows += len(prompt_ids)
        responses = generated.token_lists()
        self.answers.update(map(tuple, responses))
        answers = [
            torch.tensor([*prompt, *response] if return_prompt else response, device=getattr(row, "device", None))
            for row, prompt, response in zip(rows, prompt_ids, responses, strict=True)
        ]
        return answers[0][None] if is_one and copies == 1 else answers

    def _noise(self, rows: int) -> Tensor:
        """Return uniform random numbers `[rows, response_length]` for the next rows of the current iteration.

        In each iteration the first `batch_size` rows get the same noise as the pipeline's rollouts. Rows after the
        first `batch_size` rows are never trained on, and get noise from separate random streams.
        """
        config = self._sampler.config
        size, first, iteration = config.batch_size, self.rows, self._progress.iteration + 1
        batches = range(first // size, (first + rows - 1) // size + 1)
        streams = ["rollout" if number == 0 else f"rollout beyond {number}" for number in batches]
        blocks = [episode_uniforms(config.seed, name, iteration, size, config.response_length) for name in streams]
        return torch.cat(blocks)[first % size :][:rows]


def _stop_ids(value: Any) -> dict[str, Any]:
    if value is None:
        return {"stop_token_ids": ()}
    ids = value if isinstance(value, list | tuple) else [value]
    return {"stop_token_ids": tuple(map(int, ids))}


_ARGUMENTS: dict[str, Callable[[Any], dict[str, Any]]] = {
    "max_new_tokens": lambda value: {"response_length": int(value)},
    # `min_length` stands before `min_new_tokens`, which takes precedence if the script gives both.
    "min_length": lambda value: {"min_response_length": 0, "min_length": int(value or 0)},
    "min_new_tokens": lambda value: {"min_response_length": int(value or 0)},
    "temperature": lambda value: {"temperature": float(value)},
    "top_k": lambda value: {"top_k": int(value or 0)},
    "top_p": lambda value: {"top_p": 1.0 if value is None else float(value)},
    "pad_token_id": lambda _: {},  # pad_token_id has no effect, because responses are returned without padding
    "eos_token_id": _stop_ids,
    # do_sample is the last entry, because False overrides top_k and top_p
    "do_sample": lambda value: {} if value else {"top_k": 1, "top_p": 1.0},
}
"""For each argument of transformers' `generate`, the fields of SamplingSettings that the argument changes, in the order
in which the arguments are applied."""


def _sampling(run: SamplingSettings, arguments: Mapping[str, Any], vocabulary: int) -> SamplingSettings:
    """Return the run's sampling settings, changed by the arguments of `generate`.

    Stop token ids that are not in the policy's vocabulary are dropped.
    """
    for name, value in arguments.items():
        if name not in _ARGUMENTS:
            known = [*_ARGUMENTS, "num_return_sequences"]
            raise ConfigError(
                f"generate: {name}={value!r} is not supported.{closest(name, known)} "
                f"The arguments are {', '.join(known)}"
            )
    changes: dict[str, Any] = {}
    for name, read in _ARGUMENTS.items():
        if name in arguments:
            try:
                changes |= read(arguments[name])
            except (TypeError, ValueError, OverflowError):
                raise ConfigError(f"generate: {name}={arguments[name]!r} is not a number") from None
    min_length = changes.pop("min_length", 0)
    settings = dataclasses.replace(run, **changes)
    longest, length = run.response_length, settings.response_length
    rules = {
        f"max_new_tokens={length} is not between 1 and ppo.response_length={longest}, the most tokens of a response in "
        "training; lower max_new_tokens, or raise ppo.response_length": 1 <= length <= longest,
        f"min_length={min_length} counts the query's tokens, too; give min_new_tokens, or -1 for no minimum": (
            min_length <= 0
        ),
        f"temperature={settings.temperature:g} is not above 0; do_sample=False takes the most probable token": (
            settings.temperature > 0.0
        ),
        f"top_k={settings.top_k} is below 0": settings.top_k >= 0,
        f"top_p={settings.top_p:g} is not above 0 and at most 1": 0.0 < settings.top_p <= 1.0,
        f"min_new_tokens={settings.min_response_length} is above max_new_tokens={length}": (
            settings.min_response_length <= length
        ),
    }
    if broken := [text for text, holds in rules.items() if not holds]:
        raise ConfigError("\n".join(f"generate: {text}" for text in broken))
    return dataclasses.replace(settings, stop_token_ids=ids_within(settings.stop_token_ids, vocabulary))
