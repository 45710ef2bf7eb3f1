"""Responses sampled by vLLM through TRL's `VLLMGeneration`: on the GPU of each process, or by a server.

Before it samples it gets the policy's weights. Its noise is its own. TRL, which imports vLLM, is imported only then.
"""

from __future__ import annotations

import contextlib
import importlib.util
import logging
import time
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import torch
from torch import nn
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from ppo_rlhf.config import PPOConfig
from ppo_rlhf.config.ppo_rules import VLLM_FIELDS
from ppo_rlhf.core.errors import ConfigError, PPORLHFError, TrainingError, in_one_line
from ppo_rlhf.models.adapters import merged_parameters
from ppo_rlhf.models.directories import is_local
from ppo_rlhf.models.loading import PretrainedHandle
from ppo_rlhf.ppo.engines import Responses, SamplingSettings, responses_of
from ppo_rlhf.ppo.precision import frozen_dtype, make_accelerator
from ppo_rlhf.runtime.processes import from_all, is_main_process, on_main, own_rank, process_count

log = logging.getLogger(__name__)

PAUSE_S = 2.0  # between two tries with a server that does not answer
Row = tuple[list[int], list[list[float | None]]]  # a response's tokens; each one's log-probability alone, None is NaN


def check_vllm(device: torch.device) -> None:
    """Raise `ConfigError` if vLLM is not installed, or the device is none that weights reach it from."""
    if importlib.util.find_spec("vllm") is None:
        raise ConfigError('ppo.rollout_engine=vllm: vllm is not installed; pip install "ppo_rlhf[vllm]"')
    if device.type != "cuda":
        raise ConfigError(f"ppo.rollout_engine=vllm needs a GPU, and the device is {device.type}; set static")


class _Weights(nn.Module):
    """A policy as TRL reads a model: weights one at a time, merged, of one type, which a server is told only once."""

    def __init__(self, policy: PreTrainedModel, dtype: torch.dtype) -> None:
        super().__init__()
        self._policy, self._dtype = (policy,), dtype  # in a tuple: TRL should not look into it
        self.name_or_path: Any = ""

    def named_parameters(self, *_: Any, **__: Any) -> Iterator[tuple[str, Any]]:
        device = self._policy[0].device
        return ((name, value.detach().to(device, self._dtype)) for name, value in merged_parameters(*self._policy))


class VLLMEngine:
    """vLLM, started when the first responses are asked for; an `Engine` of `ppo.engines`."""

    def __init__(self, config: PPOConfig, tokenizer: PreTrainedTokenizerBase) -> None:
        self._config, self._tokenizer = config, tokenizer
        self._generation: Any = None  # TRL's VLLMGeneration; with a server only in the main process

    def __call__(self, policy: PreTrainedModel, prompt_ids: list[list[int]], settings: SamplingSettings) -> Responses:
        """Push a policy's weights, and sample a response to each of N prompts; every process gets all of them.

        Raises:
            ConfigError: The server's log-probabilities are of another kind.
            TrainingError: The server was gone for `vllm_server_timeout`, or a response is not whole.
        """
        sample = partial(self._sample, policy, settings=settings)
        if self._config.vllm_mode == "server":
            rows = on_main(partial(self._patiently, partial(sample, prompt_ids)))
        else:
            share = -(-len(prompt_ids) // process_count())  # processes with one vLLM want equal shares
            own = prompt_ids[own_rank() * share :][:share]
            missing = prompt_ids[:1] * (share - len(own))
            rows = [row for found in from_all(sample(own + missing)[: len(own)]) for row in found]
        tokens = torch.full((len(rows), settings.response_length), settings.pad_token_id)
        logprobs = torch.zeros(tokens.shape)
        for row, (ids, found) in enumerate(rows):
            if len(ids) < settings.response_length and ids[-1:] not in [[stop] for stop in settings.stop_token_ids]:
                raise TrainingError(
                    f"vLLM ended a response after {len(ids)} tokens, without a stop token: there was no room; raise "
                    "ppo.vllm_max_model_length, or the server's --max-model-len"
                )
            tokens[row, : len(ids)] = torch.tensor(ids)
            logprobs[row, : len(ids)] = torch.tensor([torch.nan if one is None else one for (one, *_) in found])
        return responses_of(tokens, logprobs, settings)

    def _sample(self, policy: PreTrainedModel, prompt_ids: list[list[int]], settings: SamplingSettings) -> list[Row]:
        weights = _Weights(policy, frozen_dtype(self._config))
        if self._generation is None:
            self._generation = self._start(policy, weights)
        generation = self._generation
        generation.model = weights
        generation.sync_weights()
        ends = {"stop_token_ids": list(settings.stop_token_ids), "ignore_eos": True}  # they have the eos, if it ends
        how: dict[str, Any] = {
            "temperature": settings.temperature,
            "top_k": settings.top_k,
            "top_p": settings.top_p,
            "generation_kwargs": {**ends, "min_tokens": max(0, settings.min_response_length - 1)},
        }
        if self._config.vllm_mode == "server":  # TRL's own call would let all processes wait for an error of this one
            found = generation.vllm_client.generate(prompt_ids, max_tokens=settings.response_length, **how)
            return list(zip(found["completion_ids"], found["logprobs"], strict=True))
        for name, value in {**how, "max_completion_length": settings.response_length}.items():
            setattr(generation, name, value)
        _, completion_ids, logprobs, _ = generation.generate(prompt_ids, None, num_generations=1)
        return list(zip(completion_ids, logprobs, strict=True))

    def _patiently(self, ask: Callable[[], list[Row]]) -> list[Row]:
        """Ask the server; if it is gone, wait until it is there again, which then gets weights and prompts anew."""
        limit, until = self._config.vllm_server_timeout, None
        while True:
            try:
                return ask()
            except PPORLHFError:
                raise
            except Exception as error:  # TRL raises Exception itself if the answer is an error
                line = f"vLLM's server {self._config.vllm_server_base_url}: {in_one_line(error)}"
                if until is None:
                    until = time.monotonic() + limit
                    log.warning("%s; trying again for %g s (ppo.vllm_server_timeout).", line, limit)
                elif time.monotonic() > until:
                    raise TrainingError(
                        f"{line}; it was so for {limit:g} s (ppo.vllm_server_timeout). The last checkpoint stands"
                    ) from error
            with contextlib.suppress(Exception):
                self._generation.vllm_client.close_communicator()
            self._generation = None
            time.sleep(PAUSE_S)

    def _start(self, policy: PreTrainedModel, weights: _Weights) -> Any:
        from trl.generation.vllm_generation import VLLMGeneration  # takes seconds

        config, accelerator = self._config, make_accelerator(self._config, policy.device)
        trusted = type(policy).__module__.startswith("transformers_modules")  # code of its own runs here already
        if config.vllm_mode == "server":
            accelerator.wait_for_everyone = lambda: None  # only the main process is here
        else:
            place = policy.name_or_path or ""  # where vLLM reads the architecture: with an adapter that of its base
            base = PretrainedHandle(place, trusted).base if place else None
            place = place if base is None else base.source
            weights.name_or_path = place if is_local(place) else place.partition("@")[0]
        own = {name.removeprefix("vllm_"): getattr(config, name) for name in VLLM_FIELDS}  # which are TRL's names
        own["server_timeout"] = 0.0  # it waits here
        generation = VLLMGeneration(weights, accelerator, self._tokenizer, trust_remote_code=trusted, **own)  # type: ignore[arg-type]
        if config.vllm_mode == "server":
            mode = generation.vllm_client.get_server_info()["model_config"]["logprobs_mode"]
            if mode != "processed_logprobs":
                raise ConfigError(f"vLLM's server has --logprobs-mode {mode}; start it with processed_logprobs")
        return generation


_ENGINES: dict[tuple[object, ...], VLLMEngine] = {}


def vllm_engine(config: PPOConfig, tokenizer: PreTrainedTokenizerBase) -> VLLMEngine:
    """Return this process's engine of these settings; it samples from any policy of the run."""
    key = tuple(getattr(config, name) for name in (*VLLM_FIELDS, "dtype"))
    if key not in _ENGINES:
        _ENGINES[key] = VLLMEngine(config, tokenizer)
        if is_main_process():
            weighed = f"by at most {config.importance_cap:g} (ppo.importance_cap)"
            if config.masks_tokens:
                weighed = f"between {config.importance_low:g} and {config.importance_high:g} (ppo.importance_low)"
            log.info(
                "vLLM samples (ppo.vllm_mode=%s), and tokens are weighed %s. Its noise is its own: a run that is "
                "resumed is not the same to the last bit.",
                config.vllm_mode,
                weighed,
            )
    return _ENGINES[key]
