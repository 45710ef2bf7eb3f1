"""Runs of PPO on tiny models, made on the fly. Every model is random, small, and far from uniform."""

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any, cast

import pytest
import torch
from torch import Tensor
from transformers import PreTrainedModel, PreTrainedTokenizerFast

from ppo_rlhf.config import PPOConfig
from ppo_rlhf.data.prompt_dataset import PromptDataset
from ppo_rlhf.models.reward_model import CausalLMRewardModel
from ppo_rlhf.passes.sampling import Responses
from ppo_rlhf.ppo import loop
from ppo_rlhf.ppo.batch_sampling import response_batch
from ppo_rlhf.ppo.experience import Experience
from ppo_rlhf.ppo.micro_batches import BatchCut
from ppo_rlhf.ppo.precision import trained_dtype
from ppo_rlhf.ppo.rollouts import Rollouts, batch_cut
from ppo_rlhf.ppo.run_setup import build_critic, build_state, policy_to_train, prepare_reference, start_dtype
from ppo_rlhf.ppo.training_state import TrainingState
from ppo_rlhf.rewards.scorers import ModelScorer
from ppo_rlhf.rewards.scoring import ResponseBatch, RewardScorer, Scores
from tests.tiny_models import tiny_model, word_tokenizer

MEASURED = ("time/", "throughput/", "memory/")
"""Prefixes of metrics that differ between equal runs."""

PAD, UNKNOWN, END = 0, 1, 2
WORDS = [chr(ord("a") + i) for i in range(20)]
VOCABULARY = ["<pad>", "<unk>", "</s>", *WORDS]
PROMPT_LENGTHS = (1, 4, 2, 7, 3, 5)


def build_model(
    kind: str = "llama", *, dtype: torch.dtype = torch.float64, spread: float = 0.4, **overrides: Any
) -> PreTrainedModel:
    ids = {"vocab_size": len(VOCABULARY), "pad_token_id": PAD, "bos_token_id": None, "eos_token_id": END}
    sizes = {"max_position_embeddings": 64}
    if kind == "gpt2":
        sizes = {"n_positions": 64, "resid_pdrop": 0.0, "embd_pdrop": 0.0, "attn_pdrop": 0.0}
    return tiny_model(kind, spread=spread, **{**ids, **sizes, **overrides}).to(dtype)


def build_tokenizer(**options: Any) -> PreTrainedTokenizerFast:
    return word_tokenizer(vocabulary=VOCABULARY, **{"padding_side": "left", **options})


def build_prompts(lengths: tuple[int, ...] = PROMPT_LENGTHS) -> PromptDataset:
    """Prompts of the given lengths in tokens; the column `wanted` holds a word for rewards to look for."""
    ids = [[3 + (5 * row + 3 * i) % len(WORDS) for i in range(length)] for row, length in enumerate(lengths)]
    texts = [" ".join(VOCABULARY[i] for i in row) for row in ids]
    return PromptDataset(ids, texts, {"wanted": [WORDS[row % len(WORDS)] for row in range(len(ids))]})


def build_prompts_alike(common: int = 9, lengths: tuple[int, ...] = (0, 3, 1, 5, 2)) -> PromptDataset:
    """Prompts of `common` equal tokens that the given numbers of tokens follow, and one that begins otherwise."""
    shared = [3 + (7 * i + i // 5) % len(WORDS) for i in range(common)]
    ids = [[*shared, *following] for following in build_prompts(lengths).prompt_ids]
    ids.insert(2, [4, 9, 11])
    return PromptDataset(ids, [" ".join(VOCABULARY[i] for i in row) for row in ids], {})


def first_letters(batch: ResponseBatch) -> Tensor:
    """Score a response by the share of its tokens that are among the first half of the words."""
    shares = [sum(3 <= i < 13 for i in ids) / len(ids) for ids in batch.response_ids]
    return torch.tensor(shares, dtype=torch.float64)


def model_scorer(kind: str, batch_size: int) -> ModelScorer:
    """Return a reward model with a random head, the same in each process and call."""
    torch.manual_seed(0)
    model = CausalLMRewardModel.from_causal_lm(build_model(kind))
    return ModelScorer(model, build_tokenizer(), build_tokenizer(), batch_size)


def batch_of(rollouts: Rollouts, run: "Run") -> ResponseBatch:
    """Return the rollouts as the batch that rewards score."""
    return response_batch(rollouts.prompts, rollouts.responses, run.state.sampler.tokenizer)


def with_responses(rollouts: Rollouts, **columns: Tensor) -> Rollouts:
    """Return the rollouts with some fields of their responses replaced."""
    return replace(rollouts, responses=replace(rollouts.responses, **columns))


def learn_from(
    state: TrainingState, experience: Experience, reference: PreTrainedModel | None = None
) -> dict[str, float]:
    """Complete an iteration from its experience on, as `loop.learn` does, and return its metrics.

    `reference` is needed only if the loss has the KL over the vocabulary. The rollouts may be those of another run.
    """
    rollouts = experience.rollouts
    cut = rollouts.cut
    if cut is None or cut.config is not state.config or cut.responses is not rollouts.responses:
        given = state.progress.iteration + 1, rollouts.prompts, rollouts.responses, PAD
        rollouts = replace(rollouts, cut=batch_cut(state.learner, *given))
        experience = replace(experience, rollouts=rollouts)
    metrics = loop.update(state, experience, cast(PreTrainedModel, reference))
    state.advance(experience.scores, metrics)
    return metrics


@dataclass
class Run:
    """A run of PPO: its state and the inputs of its nodes."""

    state: TrainingState
    reference: PreTrainedModel
    prompts: PromptDataset
    scorer: RewardScorer
    config: PPOConfig

    def rollouts(self) -> Rollouts:
        return loop.generate_rollouts(self.state, self.reference, self.prompts, self.scorer)

    def before_update(self) -> tuple[Rollouts, Scores, Tensor, Experience]:
        rollouts = self.rollouts()
        scores = loop.score_responses(rollouts, self.scorer, self.state.sampler, self.state.progress)
        rewards = loop.shape_rewards(rollouts, scores, self.state.shaping)
        return rollouts, scores, rewards, loop.estimate_advantages(rollouts, scores, rewards, self.state.shaping)

    def iteration(self) -> dict[str, float]:
        return learn_from(self.state, self.before_update()[-1], self.reference)


def build_run(
    kind: str = "llama",
    *,
    prompts: PromptDataset | None = None,
    scorer: RewardScorer | None = None,
    tokenizer: PreTrainedTokenizerFast | None = None,
    model: dict[str, Any] | None = None,
    reward_model: PreTrainedModel | None = None,
    **settings: Any,
) -> Run:
    """A run of 12 episodes an iteration, 3 iterations, unless `settings` say otherwise; the critic's head is not 0."""
    defaults = {
        "total_episodes": 36,
        "per_device_train_batch_size": 6,
        "gradient_accumulation_steps": 2,
        "num_mini_batches": 2,
        "num_ppo_epochs": 2,
        "local_rollout_forward_batch_size": 5,
        "response_length": 8,
        "temperature": 0.8,
        "learning_rate": 1e-3,
        "missing_eos_penalty": 0.5,
        "dtype": "float64",
        "device": "cpu",
    }
    config = PPOConfig(**{**defaults, **settings})
    build = {"dtype": trained_dtype(config), **(model or {})}
    reference = build_model(kind, **{**build, "dtype": start_dtype(config)})
    prepare_reference(reference, config)
    policy = policy_to_train(reference if config.use_peft else build_model(kind, **build), config)
    critic = build_critic(config, policy, reward_model)
    with torch.no_grad():
        head = critic.value_head.weight
        head.copy_(head.to("cpu", copy=True).normal_(0.0, 0.3, generator=torch.Generator().manual_seed(1)))
    state = build_state(policy, critic, tokenizer or build_tokenizer(), config)
    scorer = scorer or RewardScorer([("first_letters", 2.0, first_letters)])
    return Run(state, reference, prompts or build_prompts(), scorer, config)


def weights_of(module: torch.nn.Module) -> dict[str, Tensor]:
    return {name: tensor.clone() for name, tensor in module.state_dict().items()}


def weight_sums(run: Run) -> dict[str, float]:
    """Return a number for each weight of policy and critic."""
    models = {"policy": run.state.learner.policy, "critic": run.state.learner.critic}
    return {
        f"{name}.{key}": float((tensor.double() * torch.arange(1, 1 + tensor.numel()).view(tensor.shape)).sum())
        for name, model in models.items()
        for key, tensor in weights_of(model).items()
    }


def tensors_equal(first: dict[str, Tensor], second: dict[str, Tensor]) -> bool:
    return first.keys() == second.keys() and all(torch.equal(first[name], second[name]) for name in first)


def build_rollouts(
    lengths: list[int], terminated: list[bool], width: int, values: Tensor | None = None, **tensors: Tensor
) -> Rollouts:
    """Hand-made rollouts; every [B, T] tensor is 0 on real tokens and NaN in padding unless given, and values are 0."""
    lengths_B = torch.tensor(lengths)
    is_response_BT = torch.arange(width) < lengths_B[:, None]
    blank = torch.where(is_response_BT, 0.0, torch.nan).double()
    names = ("sampler_logprobs", "old_logprobs", "reference_logprobs", "entropy")
    given = {name: torch.where(is_response_BT, tensors.get(name, blank), torch.nan) for name in names}
    prompts = build_prompts(tuple(1 + row % 3 for row in range(len(lengths))))
    responses = Responses(
        torch.full((len(lengths), width), 3),
        lengths_B,
        torch.tensor(terminated),
        sampler_logprobs=given.pop("sampler_logprobs"),
    )
    return Rollouts(
        iteration=1,
        prompts=prompts,
        responses=responses,
        **given,
        values=torch.zeros(len(lengths), width + 1).double() if values is None else values,
        cut=cast(BatchCut, None),
    )


@pytest.fixture
def make_rollouts() -> Callable[..., Rollouts]:
    return build_rollouts


@pytest.fixture
def make_model() -> Callable[..., PreTrainedModel]:
    return build_model


@pytest.fixture
def make_tokenizer() -> Callable[..., PreTrainedTokenizerFast]:
    return build_tokenizer


@pytest.fixture
def make_prompts() -> Callable[..., PromptDataset]:
    return build_prompts


@pytest.fixture
def make_run() -> Callable[..., Run]:
    return build_run


@pytest.fixture
def snapshot() -> Callable[[torch.nn.Module], dict[str, Tensor]]:
    return weights_of


@pytest.fixture
def same_tensors() -> Callable[[dict[str, Tensor], dict[str, Tensor]], bool]:
    return tensors_equal
