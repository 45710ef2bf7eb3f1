"""Samples responses with vLLM through TRL's `VLLMGeneration`: on the GPU of each process, or on a vLLM server.

vLLM gets the policy's weights before each batch of responses, and samples with noise of its own. TRL imports vLLM, so
`ppo.vllm` imports TRL only when vLLM starts.
"""

from __future__ import annotations

import contextlib
import importlib.util
import logging
import time
from collections.abc import Callable, Iterator
from functools import partial
from itertools import chain
from typing import Any, assert_never

import torch
from torch import nn
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from ppo_rlhf.config import PPOConfig
from ppo_rlhf.config.ppo import VLLM_FIELDS
from ppo_rlhf.core.errors import ConfigError, PPORLHFError, TrainingError, in_one_line
from ppo_rlhf.models.adapters import merged_parameters
from ppo_rlhf.models.loading import PretrainedHandle
from ppo_rlhf.passes.sampling import Responses, SamplingSettings, responses_of
from ppo_rlhf.ppo.precision import frozen_dtype, make_accelerator
from ppo_rlhf.runtime.processes import from_all, is_main_process, on_main, own_rank, process_count

log = logging.getLogger(__name__)

PAUSE_S = 2.0  # seconds between two attempts to reach a vLLM server that does not answer
Row = tuple[list[int], list[list[float | None]]]
"""A response's tokens, and for each token a list whose first entry is its log-probability; None stands for NaN."""


def check_vllm(device: torch.device) -> None:
    """Raise `ConfigError` if vLLM is not installed, or if the policy's `device` is not a GPU."""
    if importlib.util.find_spec("vllm") is None:
        raise ConfigError('ppo.rollout_engine=vllm: vllm is not installed; pip install "ppo_rlhf[vllm]"')
    if device.type != "cuda":
        raise ConfigError(
            f"ppo.rollout_engine=vllm needs a GPU, but the device is {device.type}; set ppo.rollout_engine=static"
        )


class _Weights(nn.Module):
    """Presents a policy's weights to TRL one parameter at a time, with adapters merged, and all of one dtype.

    All weights have one dtype because TRL tells a vLLM server the dtype only once.
    """

    def __init__(self, policy: PreTrainedModel, dtype: torch.dtype) -> None:
        super().__init__()
        # The policy is in a tuple, so that nn.Module does not register it as a submodule
        self._policy, self._dtype = (policy,), dtype
        self.name_or_path: Any = ""

    def named_parameters(self, *_: Any, **__: Any) -> Iterator[tuple[str, Any]]:
        device = self._policy[0].device
        return ((name, value.detach().to(device, self._dtype)) for name, value in merged_parameters(*self._policy))


class VLLMEngine:
    """vLLM as an `Engine` of `passes.engines`; vLLM starts at the engine's first call."""

    def __init__(self, config: PPOConfig, tokenizer: PreTrainedTokenizerBase) -> None:
        self._config, self._tokenizer = config, tokenizer
        self._generation: Any = None  # TRL's VLLMGeneration; with a vLLM server, only the main process makes one

    def __call__(self, policy: PreTrainedModel, prompt_ids: list[list[int]], settings: SamplingSettings) -> Responses:
        """Send the policy's weights to vLLM, and return a response to each of N prompts; every process returns all N.

        Raises:
            ConfigError: The vLLM server runs with another `--logprobs-mode` than processed_logprobs.
            TrainingError: The vLLM server did not answer for `vllm_server_timeout` seconds, or vLLM ended a response
                before its stop token.
        """
        sample = partial(self._sample, policy, settings=settings)
        match self._config.vllm_mode:
            case "server":
                rows = on_main(partial(self._with_retries, partial(sample, prompt_ids)))
            case "colocate":
                # Processes that share one vLLM instance must send equally many prompts
                share = -(-len(prompt_ids) // process_count())
                local_prompts = prompt_ids[own_rank() * share :][:share]
                fillers = prompt_ids[:1] * (share - len(local_prompts))
                local_rows = sample(local_prompts + fillers)[: len(local_prompts)]
                rows = [row for rank_rows in from_all(local_rows) for row in rank_rows]
            case unknown:
                assert_never(unknown)
        tokens = torch.full((len(rows), settings.response_length), settings.pad_token_id)
        logprobs = torch.zeros(tokens.shape)
        for row, (ids, token_logprobs) in enumerate(rows):
            if len(ids) < settings.response_length and ids[-1:] not in [[stop] for stop in settings.stop_token_ids]:
                raise TrainingError(
                    f"vLLM ended a response after {len(ids)} tokens, without a stop token: its context is too short; "
                    "raise ppo.vllm_max_model_length, or the server's --max-model-len"
                )
            tokens[row, : len(ids)] = torch.tensor(ids)
            values = [torch.nan if value is None else value for (value, *_) in token_logprobs]
            logprobs[row, : len(ids)] = torch.tensor(values)
        return responses_of(tokens, logprobs, settings)

    def _sample(self, policy: PreTrainedModel, prompt_ids: list[list[int]], settings: SamplingSettings) -> list[Row]:
        weights = _Weights(policy, frozen_dtype(self._config))
        if self._generation is None:
            self._generation = self._start(policy, weights)
        generation = self._generation
        generation.model = weights
        generation.sync_weights()
        # ignore_eos, because stop_token_ids already contains the end-of-text token if that token ends a response
        stops: dict[str, Any] = {"stop_token_ids": list(settings.stop_token_ids), "ignore_eos": True}
        if unused := list(chain(*settings.unused_ids)):
            # The lowest bias that vLLM's server takes
            stops["logit_bias"] = dict.fromkeys(unused, -100.0)
        how: dict[str, Any] = {
            "temperature": settings.temperature,
            "top_k": settings.top_k,
            "top_p": settings.top_p,
            "generation_kwargs": {**stops, "min_tokens": max(0, settings.min_response_length - 1)},
        }
        # Call the server without TRL's `generate`, in which all other processes would wait if the main process failed
        if self._config.vllm_mode == "server":
            answer = generation.vllm_client.generate(prompt_ids, max_tokens=settings.response_length, **how)
            return list(zip(answer["completion_ids"], answer["logprobs"], strict=True))
        for name, value in {**how, "max_completion_length": settings.response_length}.items():
            setattr(generation, name, value)
        _, completion_ids, logprobs, _ = generation.generate(prompt_ids, None, num_generations=1)
        return list(zip(completion_ids, logprobs, strict=True))

    def _with_retries(self, request: Callable[[], list[Row]]) -> list[Row]:
        """Send a request to the vLLM server; after an error, retry for `vllm_server_timeout` seconds.

        Each retry sends the policy's weights and the prompts again.
        """
        limit, until = self._config.vllm_server_timeout, None
        while True:
            try:
                return request()
            except PPORLHFError:
                raise
            except Exception as error:  # TRL raises a plain Exception if the vLLM server returns an error
                line = f"vLLM's server {self._config.vllm_server_base_url}: {in_one_line(error)}"
                if until is None:
                    until = time.monotonic() + limit
                    log.warning("%s; trying again for %g s (ppo.vllm_server_timeout).", line, limit)
                elif time.monotonic() > until:
                    raise TrainingError(
                        f"{line}; retried for {limit:g} s (ppo.vllm_server_timeout). Resume from the last checkpoint"
                    ) from error
            with contextlib.suppress(Exception):
                self._generation.vllm_client.close_communicator()
            self._generation = None
            time.sleep(PAUSE_S)

    def _start(self, policy: PreTrainedModel, weights: _Weights) -> Any:
        from trl.generation.vllm_generation import VLLMGeneration

        config, accelerator = self._config, make_accelerator(self._config, policy.device)
        # A policy whose remote code already runs in this process is trusted
        trusted = type(policy).__module__.startswith("transformers_modules")
        if config.vllm_mode == "server":
            # Only the main process calls this function, so TRL's barrier for all processes would wait for ever
            accelerator.wait_for_everyone = lambda: None
        else:
            # vLLM reads the model's architecture from `name_or_path`, which for an adapter must name the base model
            source = policy.name_or_path or ""
            handle = PretrainedHandle(source, trusted) if source else None
            weights.name_or_path = "" if handle is None else (handle.base or handle).place
        # TRL's names of the options have no prefix vllm_
        options = {name.removeprefix("vllm_"): getattr(config, name) for name in VLLM_FIELDS}
        options["server_timeout"] = 0.0  # TRL does not wait for a server, because `_with_retries` waits
        generation = VLLMGeneration(weights, accelerator, self._tokenizer, trust_remote_code=trusted, **options)  # type: ignore[arg-type]
        if config.vllm_mode == "server":
            mode = generation.vllm_client.get_server_info()["model_config"]["logprobs_mode"]
            if mode != "processed_logprobs":
                raise ConfigError(f"vLLM's server has --logprobs-mode {mode}; start it with processed_logprobs")
        return generation


_ENGINES: dict[tuple[object, ...], VLLMEngine] = {}


def vllm_engine(config: PPOConfig, tokenizer: PreTrainedTokenizerBase) -> VLLMEngine:
    """Return this process's vLLM engine for the given settings; one vLLM engine samples from any policy of a run."""
    key = tuple(getattr(config, name) for name in (*VLLM_FIELDS, "dtype"))
    if key not in _ENGINES:
        _ENGINES[key] = VLLMEngine(config, tokenizer)
        if is_main_process():
            weights = f"at most {config.importance_cap:g} (ppo.importance_cap)"
            if config.masks_tokens:
                weights = f"between {config.importance_low:g} and {config.importance_high:g} (ppo.importance_low)"
            log.info(
                "vLLM samples (ppo.vllm_mode=%s); importance weights of tokens are %s. vLLM has its own noise, so a "
                "resumed run is not bit for bit the uninterrupted run.",
                config.vllm_mode,
                weights,
            )
    return _ENGINES[key]
