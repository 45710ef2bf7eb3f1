"""`kedro doctor --probe`: trains tiny models with a run's settings on problems with known solutions (docs/memory.md).

Each probe trains a tiny model of the run's architecture with the run's training loop (`ppo.loop`). In a probe, a
response scores 0 or 1. A probe fails if code is broken, or if the settings do not let the policy learn a reward.
"""

from __future__ import annotations

import contextlib
import copy
import dataclasses
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any, assert_never

import torch
from torch import Tensor
from transformers import AutoModelForCausalLM, LlamaConfig, PretrainedConfig, PreTrainedModel

from ppo_rlhf.config import PPOConfig
from ppo_rlhf.config.setting_roles import names_of
from ppo_rlhf.core.errors import PPORLHFError, in_one_line
from ppo_rlhf.data.prompt_dataset import PromptDataset
from ppo_rlhf.models.preparation import prepare
from ppo_rlhf.models.tokenizers import train_word_tokenizer
from ppo_rlhf.passes.capabilities import check_causal
from ppo_rlhf.ppo import loop
from ppo_rlhf.ppo.experience import Experience
from ppo_rlhf.ppo.run_setup import build_critic, build_state
from ppo_rlhf.rewards.scoring import ResponseBatch, RewardScorer

TAKEN = names_of(PPOConfig, lambda roles: roles.probe == "taken")
"""Settings of PPOConfig that the probes take from the run, unless `probe_config` replaces their values."""
NOT_PROBED = names_of(PPOConfig, lambda roles: roles.probe == "left out")
"""Settings of PPOConfig that change training and that no probe exercises."""
SIZES: dict[str, Any] = {
    "per_device_train_batch_size": 256,
    "gradient_accumulation_steps": 1,
    "local_rollout_forward_batch_size": 256,
    "num_mini_batches": 1,
    "num_ppo_epochs": 4,
    "num_critic_epochs": None,
    "learning_rate": 1e-2,
}
VALUE_LEARNING_RATE = 3e-2
CONSTANT_SETTINGS: dict[str, Any] = {
    "learning_rate": 3e-3,
    "whiten_advantages": True,
    "entropy_coef": 0.0,
    "positive_coef": 0.0,
    "positive_threshold": None,
}
"""Settings of the probes in which every response scores 1. Whitening turns equal advantages into 0, so only a KL
penalty may move the policy."""
MOST_OF_A_UNIT = 0.05
"""Probes cap kl_coef and entropy_coef at this share of the reward for a score of 1, so that the optimal policy still
picks the rewarded token. The optimal policy's odds of the rewarded token are then at least exp(20) times the
reference's; with the k3 estimator in the loss, 95 of 100 responses of the optimal policy have the token."""
PROMPTS, WANTED, VOCABULARY, DELAYED_LENGTH = range(3, 7), range(8, 12), 16, 3
ITERATIONS, CONSTANT_ITERATIONS = 50, 30
SHARE, ENTROPY, CONTRAST, DRIFT, NEAR = 0.9, 0.7, 0.5, 0.3, 0.1
"""Thresholds that the probes' measurements must meet, in this order:

- the least share of rewarded responses,
- the greatest entropy in nats,
- the share of the reward that the critic's values must show,
- the greatest KL in nats under a constant reward (with a shared trunk of policy and critic 0.11, see docs/memory.md),
- the greatest KL in nats after a penalty has brought the policy back (from between 0.4 and 4).
"""
SPREAD, AWAY = 0.08, 0.24
"""Standard deviations of the random weights: of a tiny model, and of a reference that differs from the policy."""
SHAPE: dict[str, Any] = {
    "hidden_size": 32,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "intermediate_size": 64,
    "max_position_embeddings": 64,
    "vocab_size": VOCABULARY,
    "pad_token_id": 0,
    "bos_token_id": None,
    "eos_token_id": 2,
}
OTHER_SHAPES = {
    "ffn_dim": 64,
    "ffn_hidden_size": 64,
    "word_embed_proj_dim": 32,
    "rotary_dim": 8,
    "num_kv_heads": 2,
    "num_experts": 4,
    "num_local_experts": 4,
    "n_routed_experts": 4,
    "n_group": 1,
    "topk_group": 1,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 32,
    "shared_expert_intermediate_size": 32,
    "q_lora_rank": 16,
    "kv_lora_rank": 16,
    "qk_nope_head_dim": 16,
    "qk_rope_head_dim": 16,
    "v_head_dim": 16,
}
"""Sizes of a tiny model that only some architectures define."""

Judgement = tuple[str, dict[str, bool]]
"""A probe's measurements in words, and for each possible complaint whether its measurement is good enough (True)."""


@dataclass(frozen=True)
class Probe:
    """A tiny training problem with a known solution."""

    name: str
    prompts: range  # range of token ids, each of which is a prompt of one token
    length: int  # number of tokens of each response
    # Takes the first tokens of prompts and of responses, each [B]; returns bool [B], True where the score is 1
    pays: Callable[[Tensor, Tensor], Tensor]
    judge: Callable[[Experience, PPOConfig], Judgement]
    settings: dict[str, Any] = field(default_factory=dict)  # PPO settings that this probe replaces
    to_the_end: bool = False  # train for CONSTANT_ITERATIONS, even if the probe has no complaint earlier
    starts_away: bool = False  # True if the reference policy differs from the policy at the start


@dataclass(frozen=True)
class Outcome:
    """The result of a probe."""

    name: str
    iterations: int
    measured: str  # the probe's measurements in words
    broken: str  # the probe's complaints in words; empty if the probe passed

    @property
    def line(self) -> str:
        end = f"BROKEN, {self.broken}" if self.broken else "passed"
        return f"{self.name}: {end}; after {self.iterations} iterations {self.measured}"


def unit(config: PPOConfig) -> float:
    """Return the least reward difference between a score of 1 and a score of 0.

    Normalised scores of 0 and 1 differ by 1 / sqrt(p (1 - p)) >= 2, where p is the mean score. `reward_clip` to [-c, c]
    leaves a difference of at least c.
    """
    difference = config.reward_scale * (1.0 if config.reward_normalisation == "none" else 2.0)
    return difference if config.reward_clip is None else min(difference, config.reward_clip)


def probe_config(config: PPOConfig) -> PPOConfig:
    """Return the probes' settings for training: the run's values for the names in `TAKEN`, else fixed values."""
    settings = {name: getattr(config, name) for name in TAKEN}
    most = MOST_OF_A_UNIT * unit(config)
    settings |= {name: min(settings[name], most) for name in ("kl_coef", "entropy_coef")}
    if config.value_model != "shared":
        settings |= {"value_model": "separate", "value_learning_rate": VALUE_LEARNING_RATE}
    if config.positive_coef > 0:
        settings["positive_threshold"] = 1.0
    rows = max(1, SIZES["per_device_train_batch_size"] // config.responses_per_prompt) * config.responses_per_prompt
    sizes = SIZES | {"per_device_train_batch_size": rows, "total_episodes": ITERATIONS * rows}
    fixed: dict[str, Any] = {"lr_scheduler_type": "constant", "stop_token": "none", "dtype": "float32", "device": "cpu"}
    return PPOConfig(**settings, **sizes, **fixed, kl_warning=1e6, kl_alarm=1e6)


def describe(config: PPOConfig) -> Iterator[str]:
    """Yield lines that name the run's settings that the probes replace, and the settings that no probe exercises."""
    used = probe_config(config)
    yield (
        f"this run's losses, advantages and shaping; sizes of the probes: batch {used.batch_size}, "
        f"{used.num_ppo_epochs} epochs of one minibatch, learning_rate {used.learning_rate:g}, value_learning_rate "
        f"{used.value_learning_rate or used.learning_rate:g}, responses of 1 or {DELAYED_LENGTH} tokens, float32"
    )
    changed = [name for name in (*TAKEN, "positive_threshold") if getattr(used, name) != getattr(config, name)]
    if changed:
        yield f"replaced for the probes: {', '.join(f'ppo.{name}={getattr(used, name)}' for name in changed)}"
    missing = [name for name in config.not_default() if name in NOT_PROBED]
    if not brings_back(used):
        missing.append(f"kl_coef={used.kl_coef:g} with kl_estimator={used.kl_estimator}")
    if config.value_model != used.value_model:
        missing.append(f"value_model={config.value_model}")
    if missing:
        yield f"not probed: {', '.join(f'ppo.{name}' for name in missing)}"


def brings_back(config: PPOConfig) -> bool:
    """Return whether the KL penalty must pull the policy to the reference.

    With the KL estimator k2, k3 or full in the reward, the penalty need not pull the policy back (docs/algorithm.md).
    """
    if config.kl_coef == 0 or config.kl_in == "loss":
        return config.kl_coef > 0  # an estimator whose mean gradient is 0 in the loss is refused (`config.ppo_rules`)
    match config.kl_estimator:
        case "k1":
            return True
        case "k2" | "k3" | "k3+" | "full":
            return False
        case unknown:
            assert_never(unknown)


def tiny_model(architecture: PretrainedConfig | None) -> tuple[PreTrainedModel, str]:
    """Return a random model of an architecture (two layers of width 32), and the architecture's name.

    A Llama model replaces an architecture that is None, cannot be built so small, or attends to later tokens. The
    returned name then gives the reason.
    """
    reason = "there is no model yet"
    if architecture is not None:
        text = architecture.get_text_config()
        try:
            return _drawn(shrunk(text), seed=0), type(text).__name__
        except Exception as error:  # architectures refuse the sizes of a tiny model by many types of errors
            reason = f"{type(text).__name__} cannot be built so small ({in_one_line(error)})"
    return _drawn(LlamaConfig(**SHAPE), seed=0), f"LlamaConfig, because {reason}"


def shrunk(config: PretrainedConfig) -> PretrainedConfig:
    """Return the configuration of a tiny model of the same architecture."""
    small = copy.deepcopy(config)
    layers = {"layer_types": small.layer_types[:2]} if getattr(small, "layer_types", None) else {}
    for name, value in (SHAPE | OTHER_SHAPES | layers).items():
        if hasattr(small, name):
            # A size that the configuration computes from other sizes has no setter
            with contextlib.suppress(AttributeError):
                setattr(small, name, value)
    return small


def _drawn(config: PretrainedConfig, seed: int, spread: float = SPREAD) -> PreTrainedModel:
    config = copy.deepcopy(config)
    config.initializer_range = spread
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        model = AutoModelForCausalLM.from_config(config, dtype=torch.float32)
    check_causal(model, "probe")
    return prepare(model)


def run_probes(config: PPOConfig, model: PreTrainedModel) -> Iterator[Outcome]:
    """Yield the outcome of each probe with a run's settings. Training starts from copies of `model`, a `tiny_model`."""
    used = probe_config(config)
    for probe in PROBES if brings_back(used) else PROBES[:-1]:
        try:
            yield train_probe(probe, used, model)
        except PPORLHFError as error:
            yield Outcome(probe.name, 0, "nothing was measured", f"training stopped ({in_one_line(error)})")


def train_probe(probe: Probe, config: PPOConfig, model: PreTrainedModel) -> Outcome:
    """Train until the probe has no complaint, or to the last iteration. `config` is the result of `probe_config`.

    Raises:
        PPORLHFError: Training stopped, for example because gradients are not finite.
    """
    config = dataclasses.replace(config, response_length=probe.length, **probe.settings)
    words = [f"t{number:02}" for number in range(VOCABULARY)]
    policy = copy.deepcopy(model)
    reference = _drawn(model.config, seed=1, spread=AWAY) if probe.starts_away else copy.deepcopy(model)
    reference.requires_grad_(False)
    tokenizer = train_word_tokenizer([" ".join(words[3:])], SHAPE["max_position_embeddings"])
    state = build_state(policy, build_critic(config, policy, None), tokenizer, config)
    prompts = PromptDataset([[token] for token in probe.prompts], [words[token] for token in probe.prompts], {})

    def score(batch: ResponseBatch) -> Tensor:
        prompts, tokens = (torch.tensor([ids[0] for ids in rows]) for rows in (batch.prompt_ids, batch.response_ids))
        return probe.pays(prompts, tokens).double()

    kept: list[Experience] = []
    while True:
        loop.iterate(state, reference, prompts, RewardScorer([("probe", 1.0, score)]), kept.append)
        measured, enough = probe.judge(kept.pop(), config)
        broken = " and ".join(complaint for complaint, is_enough in enough.items() if not is_enough)
        is_done = state.progress.iteration == CONSTANT_ITERATIONS if probe.to_the_end else not broken
        if is_done or state.progress.finished:
            return Outcome(probe.name, state.progress.iteration, measured, broken)


def _judge_token(experience: Experience, config: PPOConfig) -> Judgement:
    share = float(experience.scores.total.mean())
    entropy = float(experience.rollouts.entropy[:, 0].mean())
    measured = f"{share:.0%} of the responses have the token, entropy {entropy:z.2f} nats"
    complaint = f"the policy does not follow a reward (needed: {SHARE:.0%}, {ENTROPY} nats)"
    return measured, {complaint: share >= SHARE and entropy <= ENTROPY}


def _judge_prompt(experience: Experience, config: PPOConfig) -> Judgement:
    share = float(experience.scores.total.mean())
    measured = f"{share:.0%} of the responses have their prompt's token"
    return measured, {f"the policy does not learn to read the prompt (needed: {SHARE:.0%})": share >= SHARE}


def _judge_delay(experience: Experience, config: PPOConfig) -> Judgement:
    pays = torch.tensor([ids[0] == PROMPTS[0] for ids in experience.rollouts.prompts.prompt_ids])
    values, scores = experience.rollouts.values, experience.scores.total
    share = float(scores[pays].mean())
    if not share:
        return "no response has the token", {"the policy does not learn from a reward two tokens later": False}
    contrast = values[scores > 0].mean(0) - values[~pays].mean(0)
    first, last = float(contrast[0]), float(contrast[DELAYED_LENGTH - 1])
    at_last = CONTRAST * unit(config)
    at_first = at_last * config.gamma ** (DELAYED_LENGTH - 1)
    measured = f"{share:.0%} have the token, values tell the prompts apart by {first:.3g} at first, {last:.3g} at last"
    return measured, {
        f"the policy does not learn from a reward two tokens later (needed: {SHARE:.0%})": share >= SHARE,
        f"the critic does not carry a reward to the first token (needed: {at_first:.3g})": first >= at_first,
        f"the critic does not see the reward of the last token (needed: {at_last:.3g})": last >= at_last,
    }


def _judge_constant(experience: Experience, config: PPOConfig) -> Judgement:
    kl, value = float(experience.rollouts.kl.sum(-1).mean()), float(experience.rollouts.values[:, 0].mean())
    expected = unit(config) if config.reward_normalisation == "none" else 0.0  # normalisation turns equal scores into 0
    return f"KL {kl:z.3f} nats, value {value:.3g} of {expected:.3g} paid", {
        f"the policy moves without a reason (noise: {DRIFT} nats at most)": kl <= DRIFT,
        "the critic does not learn what is paid": abs(value - expected) <= (1 - CONTRAST / 2) * unit(config),
    }


def _judge_penalty(experience: Experience, config: PPOConfig) -> Judgement:
    kl = float(experience.rollouts.kl.sum(-1).mean())
    complaint = f"the KL penalty does not bring the policy back to the reference (needed: {NEAR} nats)"
    return f"KL {kl:z.3f} nats", {complaint: kl <= NEAR}


# Functions that return which responses are rewarded, given the first tokens of prompts and of responses, each [B].


def _pays_one_token(prompts: Tensor, tokens: Tensor) -> Tensor:
    return tokens == WANTED[0]


def _pays_the_prompts_token(prompts: Tensor, tokens: Tensor) -> Tensor:
    return tokens - prompts == WANTED[0] - PROMPTS[0]


def _pays_one_token_after_the_first_prompt(prompts: Tensor, tokens: Tensor) -> Tensor:
    return (tokens == WANTED[0]) & (prompts == PROMPTS[0])


def _pays_every_token(prompts: Tensor, tokens: Tensor) -> Tensor:
    return tokens >= 0


PROBES = (
    Probe("one token", prompts=PROMPTS[:1], length=1, pays=_pays_one_token, judge=_judge_token),
    Probe("prompt", prompts=PROMPTS, length=1, pays=_pays_the_prompts_token, judge=_judge_prompt),
    Probe(
        "delayed reward",
        prompts=PROMPTS[:2],
        length=DELAYED_LENGTH,
        pays=_pays_one_token_after_the_first_prompt,
        judge=_judge_delay,
    ),
    Probe(
        "constant reward",
        prompts=PROMPTS[:1],
        length=1,
        pays=_pays_every_token,
        judge=_judge_constant,
        settings=CONSTANT_SETTINGS,
        to_the_end=True,
    ),
    Probe(
        "KL penalty",
        prompts=PROMPTS[:1],
        length=1,
        pays=_pays_every_token,
        judge=_judge_penalty,
        settings=CONSTANT_SETTINGS,
        starts_away=True,
    ),
)
