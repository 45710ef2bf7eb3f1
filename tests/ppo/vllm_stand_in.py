"""A stand-in for vLLM below TRL: TRL's VLLMGeneration sends it weights and prompts; the project's engine samples.

It starts with other weights, so it samples from the policy only after a push. It uses the noise of the project's
rollouts, so that the outcome of a run is known.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable, Iterator
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor
from transformers import PreTrainedModel
from trl.generation import vllm_generation

from ppo_rlhf.core.randomness import episode_uniforms
from ppo_rlhf.passes.engines import generate_responses
from ppo_rlhf.passes.sampling import SamplingSettings
from ppo_rlhf.ppo import vllm

SERVER = {"vllm_mode": "server", "vllm_server_base_url": "http://nowhere:8000"}
SEED, AT_A_TIME = 42, 5


class StandIn:
    """A pretended vLLM, in this process or on a server; tests set its failures.

    Attributes:
        model: What it samples from.
        loses: Whether it loses a weight that is pushed, by the number of the push, from 1, and the weight's name.
        fails: Called before each answer; raises where the server is to be gone.
        room: Most tokens of a response.
        logprobs_mode: Of the server.
        options: Of the colocated vLLM.
        starts, pushes, answers: How often it was started, and got weights and prompts.
        asked: The sampling parameters of the last answer.
        sleeping: Whether it gave its memory back.
    """

    def __init__(self, model: PreTrainedModel) -> None:
        self.model = model.requires_grad_(False)
        self.loses: Callable[[int, str], bool] = lambda push, name: False
        self.fails: Callable[[], None] = lambda: None
        self.room = 10_000
        self.logprobs_mode = "processed_logprobs"
        self.options: dict[str, Any] = {}
        self.starts = self.pushes = self.answers = 0
        self.asked: dict[str, Any] = {}
        self.sleeping = False

    def load(self, weights: Iterable[tuple[str, Tensor]]) -> None:
        """Take weights under the names that transformers gives them."""
        own = dict(self.model.named_parameters())
        for name, value in weights:
            assert own[name].shape == value.shape
            if not self.loses(self.pushes, name):
                own[name].copy_(value)

    def sample(
        self, prompts: list[list[int]], first: int, of: int, **asked: Any
    ) -> list[tuple[list[int], list[float]]]:
        """Return tokens and log-probabilities of rows `first` on, of `of` rows of all processes."""
        assert not self.sleeping
        self.fails()
        self.answers += 1
        self.asked = asked
        assert asked["ignore_eos"]
        how = SamplingSettings(
            min(self.room, asked["max_tokens"]),
            asked["temperature"],
            asked["top_k"],
            asked["top_p"],
            tuple(asked["stop_token_ids"]),
            0,
            asked["min_tokens"] + 1,
            unused_ids=tuple(range(index, index + 1) for index in asked.get("logit_bias", {})),
        )
        noise = episode_uniforms(SEED, "rollout", self.answers, of, asked["max_tokens"])[first : first + len(prompts)]
        actual = generate_responses(self.model, prompts, noise, how, batch_size=AT_A_TIME)
        assert actual.sampler_logprobs is not None
        return [
            (ids, actual.sampler_logprobs[row, : len(ids)].tolist()) for row, ids in enumerate(actual.token_lists())
        ]

    def install(self, patch: pytest.MonkeyPatch) -> StandIn:
        """Let TRL find this vLLM."""
        for name in ("RANK", "LOCAL_RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT"):
            patch.setenv(name, os.environ.get(name, ""))  # TRL sets them
            if not os.environ[name]:
                patch.delenv(name)
        patch.setattr(vllm, "_ENGINES", {})
        patch.setattr(vllm, "PAUSE_S", 0.0)
        patch.setattr(vllm_generation, "is_vllm_available", lambda: True)
        patch.setattr(vllm_generation, "SamplingParams", SimpleNamespace, raising=False)
        patch.setattr(vllm_generation, "LLM", lambda **options: LLM(self, **options), raising=False)
        patch.setattr(vllm_generation, "VLLMClient", lambda **options: Client(self, **options))
        return self


class LLM:
    """What TRL uses of `vllm.LLM`."""

    def __init__(self, engine: StandIn, **options: Any) -> None:
        self._engine = engine
        engine.options = options
        engine.starts += 1
        runner = SimpleNamespace(model=SimpleNamespace(load_weights=engine.load))
        worker = SimpleNamespace(model_runner=runner)
        self.llm_engine = SimpleNamespace(model_executor=SimpleNamespace(driver_worker=worker))

    def sleep(self, level: int) -> None:
        self._engine.sleeping = True
        with torch.no_grad():  # a level that discards the weights
            for parameter in self._engine.model.parameters():
                parameter.fill_(torch.nan)

    def wake_up(self, tags: list[str]) -> None:
        self._engine.sleeping = False

    def reset_prefix_cache(self) -> None:
        self._engine.pushes += 1

    def generate(self, prompts: list[dict[str, list[int]]], sampling_params: Any, use_tqdm: bool) -> list[Any]:
        rank, processes = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
        asked = vars(sampling_params)
        assert asked.pop("n") == 1
        ids = [prompt["prompt_token_ids"] for prompt in prompts]
        rows = self._engine.sample(ids, rank * len(ids), processes * len(ids), **asked)
        return [
            SimpleNamespace(prompt_token_ids=p, outputs=[self._output(*row)]) for p, row in zip(ids, rows, strict=True)
        ]

    @staticmethod
    def _output(ids: list[int], logprobs: list[float]) -> Any:
        actual = [{i: SimpleNamespace(rank=1, logprob=value)} for i, value in zip(ids, logprobs, strict=True)]
        return SimpleNamespace(token_ids=ids, logprobs=actual)


class Client:
    """What TRL and the project use of TRL's `VLLMClient`, with its signatures."""

    def __init__(
        self,
        engine: StandIn,
        base_url: str | None = None,
        host: str = "0.0.0.0",
        server_port: int = 8000,
        group_port: int = 51216,
        connection_timeout: float = 0.0,
    ) -> None:
        self._engine = engine
        engine.fails()
        engine.starts += 1
        self._is_open = True

    def init_communicator(self, device: torch.device | str | int = 0) -> None:
        pass

    def get_server_info(self) -> dict:
        return {"model_config": {"logprobs_mode": self._engine.logprobs_mode}}

    def update_named_params(
        self, metadata: list[tuple[str, str, list[int]]], named_params: Iterator[tuple[str, torch.Tensor]]
    ) -> None:
        self._engine.fails()
        weights = list(named_params)
        assert metadata == [(name, str(w.dtype).removeprefix("torch."), list(w.shape)) for name, w in weights]
        self._engine.load(weights)

    def reset_prefix_cache(self) -> None:
        self._engine.pushes += 1

    def close_communicator(self) -> None:
        self._is_open = False

    def generate(
        self,
        prompts: list[str] | list[list[int]],
        features: list[dict | None] | None = None,
        n: int = 1,
        repetition_penalty: float = 1.0,
        temperature: float = 1.0,
        top_p: float = 1.0,
        top_k: int = 0,
        min_p: float = 0.0,
        max_tokens: int = 16,
        logprobs: int | None = 0,
        structured_outputs_regex: str | None = None,
        generation_kwargs: dict | None = None,
    ) -> dict[str, list[list[int]]]:
        assert self._is_open
        how = {"temperature": temperature, "top_p": top_p, "top_k": top_k, "max_tokens": max_tokens}
        rows = self._engine.sample(prompts, 0, len(prompts), **how, **(generation_kwargs or {}))
        return {
            "prompt_ids": prompts,
            "completion_ids": [ids for ids, _ in rows],
            "logprobs": [[[value] for value in values] for _, values in rows],
        }
