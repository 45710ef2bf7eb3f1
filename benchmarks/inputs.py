"""Models with random weights, their tokenizer and prompts, and the prompts of a real model: what both sides read."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import torch
from tokenizers import Tokenizer
from tokenizers.models import WordLevel
from tokenizers.pre_tokenizers import Whitespace
from transformers import (
    AutoTokenizer,
    GPT2Config,
    GPT2ForSequenceClassification,
    GPT2LMHeadModel,
    PreTrainedTokenizerFast,
)

from workload import STOP_TOKEN, Preset

PROJECT = Path(__file__).resolve().parents[1]


def recipe(environment: str, seed: int = 42) -> dict[str, Any]:
    """Return the parameters of a recipe of conf, by group."""
    # here, since TRL's environment has no Kedro, and since the settings set variables that the peer must not inherit
    from kedro.config import OmegaConfigLoader

    from ppo_rlhf.settings import CONFIG_LOADER_ARGS

    conf, given = str(PROJECT / "conf"), {"seed": seed}
    loader = OmegaConfigLoader(conf, env=environment, runtime_params=given, **CONFIG_LOADER_ARGS)
    return dict(loader["parameters"])


def raw_rows(name: str = "obedience_prompts") -> list[dict[str, Any]]:
    """Return the rows of a file of data/01_raw, by default the prompts of the recipe obedience."""
    lines = (PROJECT / f"data/01_raw/{name}.jsonl").read_text(encoding="utf-8").splitlines()
    return [json.loads(line) for line in lines]


def with_system_turn(rows: list[dict[str, Any]], words: int) -> list[dict[str, Any]]:
    """Return the prompts with a system turn of so many words; without any they keep their template's own turn."""
    if not words:
        return rows
    turn = {"role": "system", "content": " ".join(["You are a helpful agent."] * (words // 5 + 1))}
    return [{**row, "prompt": [turn, *row["prompt"]]} for row in rows]


def chat_ids(model: str, rows: list[dict[str, Any]]) -> list[list[int]]:
    """Return the token ids of each row's chat, up to where the model answers."""
    tokenizer = AutoTokenizer.from_pretrained(model)
    chats = [row["prompt"] for row in rows]
    ids: list[list[int]] = tokenizer.apply_chat_template(chats, add_generation_prompt=True, return_dict=False)
    return ids


def make_models(preset: Preset, lengths: str, folder: Path, seed: int = 0) -> tuple[str, str]:
    """Write the policy and the reward model with their tokenizer and return their directories.

    The reward model has the policy's backbone and a random head. With mixed lengths the policy stops with the same
    probability at each token, so that responses have half of the maximum length on average.
    """
    torch.manual_seed(seed)
    config = GPT2Config(
        vocab_size=preset.vocabulary,
        n_embd=preset.width,
        n_layer=preset.layers,
        n_head=preset.heads,
        resid_pdrop=0.0,
        embd_pdrop=0.0,
        attn_pdrop=0.0,
        bos_token_id=None,
        eos_token_id=None,
        pad_token_id=None,
    )
    policy = GPT2LMHeadModel(config).eval()
    if lengths == "mixed":
        plant_stop_token(policy, stop_probability(preset.response_length))
    config.num_labels = 1
    reward = GPT2ForSequenceClassification(config)
    reward.transformer.load_state_dict(policy.transformer.state_dict())
    words = {"<stop>": STOP_TOKEN, **{word(i): i for i in range(1, preset.vocabulary - 1)}}
    backend = Tokenizer(WordLevel({**words, "<pad>": preset.vocabulary - 1}, unk_token="t1"))
    backend.pre_tokenizer = Whitespace()
    tokenizer = PreTrainedTokenizerFast(
        tokenizer_object=backend, eos_token="<stop>", pad_token="<pad>", padding_side="left"
    )
    places = str(folder / "policy"), str(folder / "reward")
    for model, place in zip((policy, reward), places, strict=True):
        model.save_pretrained(place)
        tokenizer.save_pretrained(place)
    return places


def word(token_id: int) -> str:
    """Return the text of a token that is neither stop nor pad."""
    return f"t{token_id}"


def make_prompts(preset: Preset, lengths: str, rows: int, seed: int = 0) -> list[list[int]]:
    """Return prompts of random tokens: of the full length, or uniformly from a quarter of it to the whole."""
    generator = torch.Generator().manual_seed(seed)
    longest = preset.prompt_length
    shortest = longest if lengths == "full" else max(1, longest // 4)
    sizes = torch.randint(shortest, longest + 1, (rows,), generator=generator).tolist()
    return [torch.randint(1, preset.vocabulary - 1, (size,), generator=generator).tolist() for size in sizes]


def stop_probability(response_length: int) -> float:
    """Return the probability of a stop at each token for a mean length of half the maximum.

    The mean of min(geometric, R) is (1 - (1 - p)^R) / p, which falls with p.
    """
    low, high = 0.0, 1.0
    for _ in range(60):
        middle = (low + high) / 2
        mean = (1 - (1 - middle) ** response_length) / middle
        low, high = (middle, high) if mean > response_length / 2 else (low, middle)
    return (low + high) / 2


@torch.no_grad()
def plant_stop_token(model: GPT2LMHeadModel, probability: float) -> None:
    """Change a few weights so that the stop token has the given probability after any text.

    The last layer norm's output has mean 0 before its bias. With the bias b in every component and the stop token's
    embedding c in every component, its logit is width x b x c after any text. Training moves each weight by less than
    1e-3 in a comparison, little beside b and c.
    """
    head, norm, embedding_value = model.lm_head, model.transformer.ln_f, 0.125
    vocabulary, width = head.weight.shape
    head.weight[STOP_TOKEN] = embedding_value
    seen: list[torch.Tensor] = []
    handle = norm.register_forward_pre_hook(lambda _, arguments: seen.append(arguments[0]))
    model(input_ids=torch.randint(1, vocabulary, (8, 32)))
    handle.remove()
    low, high = -40.0, 40.0
    for _ in range(40):
        logit = (low + high) / 2
        norm.bias.fill_(logit / (embedding_value * width))
        found = float(head(norm(seen[0])).softmax(-1)[..., STOP_TOKEN].mean())
        low, high = (logit, high) if found < probability else (low, logit)


def find_noise_seed(preset: Preset, warmup: int, iterations: int) -> int:
    """Return a seed whose mixed responses after the warm-up have half of the maximum length on average, to 1 %.

    Our sampler's noise is a function of the seed, and the stop token is the first of the vocabulary: a response ends
    where the noise first falls below the probability of a stop. The mean length of a few hundred responses scatters by
    3 to 10 % between seeds, and so do our times; TRL's do not depend on where responses end.
    """
    from ppo_rlhf.core.randomness import (
        episode_uniforms,
    )  # here, since it sets variables that the peer must not inherit

    longest, probability = preset.response_length, stop_probability(preset.response_length)
    for seed in range(1000):
        total = 0
        for iteration in range(warmup + 1, iterations + 1):
            stops = episode_uniforms(seed, "rollout", iteration, preset.batch, longest) < probability
            total += int(torch.where(stops.any(1), stops.int().argmax(1) + 1, longest).sum())
        if abs(total / (preset.batch * (iterations - warmup)) / (longest / 2) - 1) < 0.01:
            return seed
    raise SystemExit(f"no seed below 1000 gives responses of {longest / 2:g} tokens on average")
