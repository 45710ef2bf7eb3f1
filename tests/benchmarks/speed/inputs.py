"""Models with random weights, tokenizer and prompts, made once and read by both sides."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import torch
from tokenizers import Tokenizer
from tokenizers.models import WordLevel
from tokenizers.pre_tokenizers import Whitespace
from torch import Tensor, nn
from transformers import (
    AutoModelForCausalLM,
    AutoModelForSequenceClassification,
    GPT2Config,
    LlamaConfig,
    PretrainedConfig,
    PreTrainedModel,
    PreTrainedTokenizerFast,
)
from transformers.utils.logging import disable_progress_bar

from ppo_rlhf.core.randomness import episode_uniforms
from speed.workload import STOP_TOKEN, Preset, Shape, stop_probability

SAMPLE = (8, 32)  # sequences, tokens: what the stop token's logit is set on


@dataclass(frozen=True)
class Models:
    """Directories of policy and reward model, and the probability of a stop at each token."""

    policy: str
    reward: str
    stop_probability: float


def make_models(preset: Preset, form: str, folder: Path, seed: int = 0) -> Models:
    """Write policy and reward model with their tokenizer.

    The reward model has the policy's backbone and a random head. In the form `mixed` the policy stops with the same
    probability at each token, such that responses have half of the maximum length on average.
    """
    disable_progress_bar()
    torch.manual_seed(seed)
    policy = AutoModelForCausalLM.from_config(_config(preset.shape), dtype=torch.float32).eval()
    stops = 0.0
    if form == "mixed":
        stops = plant_stop_token(policy, stop_probability(preset.response_length))
    reward = AutoModelForSequenceClassification.from_config(_config(preset.shape, num_labels=1), dtype=torch.float32)
    reward.base_model.load_state_dict(policy.base_model.state_dict())
    tokenizer = _tokenizer(preset.shape.vocabulary)
    models = Models(str(folder / "policy"), str(folder / "reward"), stops)
    for model, place in ((policy, models.policy), (reward, models.reward)):
        model.save_pretrained(place)
        tokenizer.save_pretrained(place)
    return models


def make_prompts(preset: Preset, form: str, rows: int, seed: int = 0) -> list[list[int]]:
    """Return prompts of random tokens: all of the full length, or uniformly from a quarter of it to the whole."""
    draw = torch.Generator().manual_seed(seed)
    longest = preset.prompt_length
    shortest = longest if form == "full" else max(1, longest // 4)
    lengths = torch.randint(shortest, longest + 1, (rows,), generator=draw).tolist()
    # neither the stop token nor the pad token of our side
    return [torch.randint(1, preset.shape.vocabulary - 1, (n,), generator=draw).tolist() for n in lengths]


def find_noise_seed(preset: Preset, probability: float, warmup: int, iterations: int, first: int = 0) -> int:
    """Return the first seed whose `mixed` responses after the warm-up are half of the maximum long on average, to 1 %.

    Our side samples by inverse CDF with noise that is a function of the seed, and the stop token is the first of the
    vocabulary: a response ends where the noise first falls below the stop's probability. A few hundred responses of
    any seed would scatter by 3 to 10 %, and so would our times; the peer's do not depend on where responses end.

    Args:
        preset: Sizes of an iteration.
        probability: Of a stop at each token.
        warmup: Iterations that are not looked at.
        iterations: Those and the ones behind them.
        first: Where the search starts.
    """
    longest = preset.response_length
    for seed in range(first, first + 1000):
        lengths = []
        for iteration in range(warmup + 1, iterations + 1):
            stops = episode_uniforms(seed, "rollout", iteration, preset.batch, longest) < probability
            lengths.append(torch.where(stops.any(1), stops.int().argmax(1) + 1, longest))
        mean = float(torch.cat(lengths).float().mean())
        if abs(mean / (longest / 2) - 1) < 0.01:
            return seed
    raise SystemExit(f"no seed from {first} to {first + 999} gives responses of {longest / 2:g} tokens on average")


def _config(shape: Shape, **options: object) -> PretrainedConfig:
    special = {"bos_token_id": None, "eos_token_id": None, "pad_token_id": None}
    if shape.architecture == "gpt2":
        return GPT2Config(
            vocab_size=shape.vocabulary,
            n_positions=1024,
            n_embd=shape.width,
            n_layer=shape.layers,
            n_head=shape.heads,
            n_inner=shape.feed_forward,
            resid_pdrop=0.0,
            embd_pdrop=0.0,
            attn_pdrop=0.0,
            **special,
            **options,
        )
    return LlamaConfig(
        vocab_size=shape.vocabulary,
        hidden_size=shape.width,
        intermediate_size=shape.feed_forward or 4 * shape.width,
        num_hidden_layers=shape.layers,
        num_attention_heads=shape.heads,
        num_key_value_heads=shape.kv_heads or shape.heads,
        max_position_embeddings=2048,
        tie_word_embeddings=True,
        **special,
        **options,
    )


def _tokenizer(vocabulary: int) -> PreTrainedTokenizerFast:
    words = {"<stop>": STOP_TOKEN, **{f"t{i}": i for i in range(1, vocabulary - 1)}, "<pad>": vocabulary - 1}
    backend = Tokenizer(WordLevel(words, unk_token="t1"))
    backend.pre_tokenizer = Whitespace()
    return PreTrainedTokenizerFast(tokenizer_object=backend, eos_token="<stop>", pad_token="<pad>", padding_side="left")


@torch.no_grad()
def plant_stop_token(model: PreTrainedModel, probability: float) -> float:
    """Change a few weights so that the stop token has this probability after any text; return the mean it then has.

    A direction of the states that the head reads is made constant, and the stop token's embedding lies along it:

    - GPT-2: the states behind the last layer norm have mean 0 before its bias. With a bias of b everywhere and an
      embedding of c everywhere the stop token's logit is width x b x c whatever the states.
    - Llama has no bias, and no mean is subtracted: every embedding holds one number in its first two components, no
      block writes there, and the last norm weighs them by w and -w, so that they add nothing to other tokens' logits.
      The stop token's embedding is s and -s there, 0 elsewhere.

    The logit is a bfloat16 number, so that it is the same in both precisions. Training moves each weight by less than
    1e-3 in a comparison: b, c, w and s are large enough for that to change little.
    """
    head, norm = model.get_output_embeddings(), _last_norm(model)
    embedding: Tensor = head.weight
    vocabulary, width = embedding.shape
    if hasattr(model, "transformer"):
        embedding[STOP_TOKEN] = 0.125

        def set_logit(logit: float) -> None:
            norm.bias.fill_(logit / (0.125 * width))
    else:
        for block in model.model.layers:
            block.self_attn.o_proj.weight[:2] = 0.0
            block.mlp.down_proj.weight[:2] = 0.0
        embedding[:, :2] = width**0.5
        embedding[STOP_TOKEN] = 0.0
        norm.weight[:2] = torch.tensor([0.25, -0.25])

        def set_logit(logit: float) -> None:  # up to a factor: the states' size
            embedding[STOP_TOKEN, :2] = torch.tensor([2.0, -2.0]) * logit / width**0.5

    states = _states_before(norm, model, torch.randint(1, vocabulary, SAMPLE))

    def mean_probability(logit: float) -> float:
        set_logit(logit)
        return float(head(norm(states)).softmax(-1)[..., STOP_TOKEN].mean())

    low, high = -40.0, 40.0
    for _ in range(40):
        middle = (low + high) / 2
        low, high = (middle, high) if mean_probability(middle) < probability else (low, middle)
    return mean_probability(float(torch.tensor(high).bfloat16()))


def _last_norm(model: PreTrainedModel) -> nn.Module:
    return model.transformer.ln_f if hasattr(model, "transformer") else model.model.norm


def _states_before(norm: nn.Module, model: PreTrainedModel, input_ids: Tensor) -> Tensor:
    seen: list[Tensor] = []
    handle = norm.register_forward_pre_hook(lambda _, arguments: seen.append(arguments[0]))
    model.base_model(input_ids=input_ids)
    handle.remove()
    return seen[0]
