"""Whether PPO's critic ranks answers, and what choosing by it gains at equal generated tokens. See docs/results.md.

kedro run --env obedience --pipelines align --params sft_model_path=…,seed=1,ppo.export_critic=true
python benchmarks/critic_ranks.py sample --policy POLICY --critic CRITIC --out SAMPLES
python benchmarks/critic_ranks.py report SAMPLES,SAMPLES

POLICY and CRITIC are the folders `data/obedience/06_models/ppo_policy/VERSION` and `…/ppo_critic` of one run. `sample`
keeps k answers to each held-out prompt with their strict rewards and the values of all their prefixes; `report` reads
one such file a seed. A value is the critic's estimate of what is still to come of the shaped reward: the strict reward,
less 0.5 for an answer that is cut off, less the KL of the tokens that follow.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any, cast

import numpy as np
import torch
from datasets import Dataset
from numpy.typing import NDArray
from torch import Tensor, nn

from inputs import raw_rows, recipe
from ppo_rlhf.config import PPOConfig
from ppo_rlhf.core.best_of_n import best_of_n_mean
from ppo_rlhf.core.randomness import episode_uniforms, permutation
from ppo_rlhf.data.prompt_dataset import PromptDataset
from ppo_rlhf.data.prompts import PromptReader
from ppo_rlhf.models.critic import Critic
from ppo_rlhf.models.loading import PretrainedHandle
from ppo_rlhf.passes.forward import backbone_of
from ppo_rlhf.passes.sampling import Responses
from ppo_rlhf.passes.sequences import sequence_batches
from ppo_rlhf.ppo.batch_sampling import response_batch, sample_responses
from ppo_rlhf.ppo.forward_passes import CriticForward
from ppo_rlhf.ppo.run_setup import sampling_settings
from ppo_rlhf.recipes.obedience import strict
from tables import markdown

Array = NDArray[Any]
Samples = dict[str, Array]
"""Of M prompts with N answers of at most T tokens: `rewards`, `lengths` (the stop token included), `terminated` and
`logprobs` (of the whole answer) [M, N]; `values` [M, N, T + 1], column t that after t tokens of the answer; `greedy`
and `greedy_lengths` [M]."""
PREFIXES = (0, 4, 8, 16, 24)
KS = (2, 4, 8)
HALVINGS: dict[str, tuple[int, dict[int, int]]] = {
    "4, halved after 4 and 8 tokens": (4, {4: 2, 8: 1}),
    "8, halved after 4 and 8 tokens": (8, {4: 4, 8: 2}),
    "8, halved after 4, 8 and 12 tokens": (8, {4: 4, 8: 2, 12: 1}),
    "8, two kept after 4 tokens": (8, {4: 2}),
}
"""Answers that are begun, and how many are kept after so many tokens; V at the end chooses among those that finish."""
ROUNDS, DRAWS = 32, 2000


def sample(policy: str, critic: str, prompts: int, answers: int, seed: int, at_a_time: int = 8) -> Iterator[Samples]:
    """Sample answers to held-out prompts, score them strictly, and compute the critic's values of their prefixes.

    Yields the samples of `at_a_time` prompts after the other.
    """
    config = PPOConfig(**recipe("obedience", seed)["ppo"])
    handle = PretrainedHandle(policy)
    model, stored = handle.frozen_lm(torch.float32, "cpu"), PretrainedHandle(critic).critic()
    forward = CriticForward(Critic(backbone_of(stored), cast(nn.Linear, stored.score)))
    rows = raw_rows("obedience_held_out")
    chosen = permutation(len(rows), 0, "critic_ranks")[:prompts].tolist()
    held_out = PromptReader.of(handle, config).read(Dataset.from_list([rows[row] for row in chosen]), "prompt", "rows")
    settings = sampling_settings(config, handle.tokenizer(), model)

    def answered(given: PromptDataset, noise: Tensor, top_k: int = 0) -> tuple[Array, Responses]:
        responses = sample_responses(model, given, noise, replace(settings, top_k=top_k), config, batch_size=64)
        batch = response_batch(given, responses, handle.tokenizer())
        return np.array(strict(given.texts, batch.completions, **batch.all_columns)), responses

    noise = episode_uniforms(seed, "critic_ranks", 0, prompts * answers, config.response_length)
    for start in range(0, prompts, at_a_time):
        some = range(start, min(prompts, start + at_a_time))
        greedy, shortest = answered(held_out.select(some), noise[: len(some)], top_k=1)
        given = held_out.select([row for row in some for _ in range(answers)])
        rewards, responses = answered(given, noise[start * answers :][: len(given)])
        values = torch.zeros(len(given), config.response_length + 1)
        groups = [list(range(row, row + answers)) for row in range(0, len(given), answers)]
        for group in groups:
            (batch,) = sequence_batches(
                given.prompt_ids, responses.response_ids, responses.lengths, [group], settings.pad_token_id, fill=False
            )
            with torch.no_grad():
                found = forward(batch)
            values[group, : found.shape[1]] = found
        logprobs = cast(Tensor, responses.sampler_logprobs).sum(1)
        shaped = (len(some), answers)
        yield {
            "rewards": rewards.reshape(shaped),
            "lengths": responses.lengths.numpy().reshape(shaped),
            "terminated": responses.terminated.numpy().reshape(shaped),
            "logprobs": logprobs.numpy().reshape(shaped),
            "values": values.numpy().reshape(*shaped, -1),
            "greedy": greedy,
            "greedy_lengths": shortest.lengths.numpy(),
        }


def known(samples: Samples, tokens: int | None = None) -> Array:
    """Return the value [M, N] that is known after so many tokens of an answer (None: all).

    After an answer's last token it is the value before this token, the last one that training fits.
    """
    last = samples["lengths"] - 1
    at = last if tokens is None else np.minimum(tokens, last)
    return np.take_along_axis(samples["values"], at[..., None], axis=2)[..., 0].astype(np.float64)


def moments(scores: Array, rewards: Array) -> Array:
    """Return of each prompt the sums [M, 3] of which `correlation` is made: xy, xx, yy about the prompt's means."""
    x, y = (each - each.mean(1, keepdims=True) for each in (scores, rewards))
    return np.stack([(x * y).sum(1), (x * x).sum(1), (y * y).sum(1)], axis=1)


def correlation(sums_M3: Array) -> float:
    """Return the correlation within prompts, pooled over prompts; 0 if the scores do not differ within any prompt."""
    xy, xx, yy = sums_M3.sum(0)
    return float(xy / np.sqrt(xx * yy)) if xx * yy > 1e-12 else 0.0


def auc(scores: Array, rewards: Array) -> Array:
    """Return of each prompt that has right and wrong answers how often a right one has the higher score; ties half."""
    found = []
    for x, y in zip(scores, rewards, strict=True):
        right, wrong = x[y > 0.5], x[y <= 0.5]
        if len(right) and len(wrong):
            found.append(np.mean((np.sign(right[:, None] - wrong) + 1) / 2))
    return np.array(found)


def interval(values: Array, statistic: Callable[[Array], float] = lambda rows: float(rows.mean())) -> tuple[float, ...]:
    """Return a statistic of rows of prompts with its 95 % interval, by a bootstrap over prompts."""
    draws = np.random.default_rng(0).integers(0, len(values), (DRAWS, len(values)))
    low, high = np.quantile([statistic(values[rows]) for rows in draws], [0.025, 0.975])
    return statistic(values), float(low), float(high)


def best_of(samples: Samples, scores: Array, k: int) -> tuple[Array, Array]:
    """Return of each prompt the expected reward of the best of k answers by `scores` [M, N], and its tokens."""
    expected = best_of_n_mean(torch.tensor(scores), torch.tensor(samples["rewards"]), k)
    return expected.numpy(), k * samples["lengths"].mean(1)


def halved(samples: Samples, begun: int, kept: dict[int, int], rounds: int = ROUNDS) -> tuple[Array, Array]:
    """Return of each prompt the mean reward [M] of the answer that successive halving by V chooses, and its tokens.

    `kept` says how many answers are kept after so many tokens; a dropped answer costs its tokens up to there. An answer
    that ended before competes with its last value. The means are over `rounds` random groups of `begun` answers.
    """
    prompts, answers = samples["lengths"].shape
    rows, generator = np.arange(prompts)[:, None], np.random.default_rng(0)
    reward, cost = np.zeros(prompts), np.zeros(prompts)
    for _ in range(rounds):
        live = np.stack([generator.permutation(answers)[:begun] for _ in range(prompts)])
        for tokens, count in (*kept.items(), (None, 1)):
            order = live[rows, np.argsort(-known(samples, tokens)[rows, live], axis=1, kind="stable")]
            live, dropped = order[:, :count], order[:, count:]
            spent = samples["lengths"][rows, dropped]
            cost += (spent if tokens is None else np.minimum(spent, tokens)).sum(1)
        reward, cost = reward + samples["rewards"][rows, live][:, 0], cost + samples["lengths"][rows, live][:, 0]
    return reward / rounds, cost / rounds


def ranks(samples: Samples) -> dict[str, tuple[str, str]]:
    """Return of each score its correlation and AUC with the reward within a prompt, with their intervals."""
    columns: dict[str, Array] = {f"V after {tokens} tokens": known(samples, tokens) for tokens in PREFIXES}
    after = np.take_along_axis(samples["values"], samples["lengths"][..., None], axis=2)[..., 0]
    columns |= {"V before the last token": known(samples), "V after the last token": after.astype(np.float64)}
    columns |= logprobs(samples)
    found = {}
    for name, scores in columns.items():
        within = interval(moments(scores, samples["rewards"]), correlation)
        area = interval(auc(scores, samples["rewards"]))
        found[name] = words(within), words(area)
    return found


def logprobs(samples: Samples) -> dict[str, Array]:
    """Return the scores [M, N] by which the policy alone would choose."""
    whole = samples["logprobs"].astype(np.float64)
    return {"log-probability": whole, "log-probability a token": whole / samples["lengths"]}


def words(found: tuple[float, ...], form: str = ".2f") -> str:
    """Return a number with its interval as text."""
    middle, low, high = (f"{each:{form}}" for each in found)
    return f"{middle} [{low}, {high}]"


def facts(samples: Samples) -> str:
    """Return one line of what the samples are, and how V ranks prompts."""
    rewards, first = samples["rewards"], samples["values"][:, 0, 0]
    inside = rewards.var(axis=1).mean() / rewards.var()
    going_on = ", ".join(f"{(samples['lengths'] > tokens).mean():.2f} after {tokens}" for tokens in PREFIXES)
    between = np.corrcoef(first, rewards.mean(1))[0, 1]
    return (
        f"{rewards.shape[0]} prompts, {rewards.shape[1]} answers of {samples['lengths'].mean():.1f} tokens, cut off "
        f"{1 - samples['terminated'].mean():.3f}; going on: {going_on}. Within prompts lies {inside:.2f} of the "
        f"rewards' variance; V before an answer correlates by {between:.2f} with the prompt's mean reward."
    )


def choices(samples: Samples) -> dict[str, tuple[Array, Array]]:
    """Return of each way of choosing an answer the reward and the generated tokens of each prompt."""
    found = {"plain sampling": (samples["rewards"].mean(1), samples["lengths"].mean(1))}
    found["greedy"] = samples["greedy"], samples["greedy_lengths"]
    for name, scores in {"the reward": samples["rewards"], "V": known(samples), **logprobs(samples)}.items():
        found |= {f"best of {k} by {name}": best_of(samples, scores, k) for k in KS if k <= scores.shape[1]}
    halvings = {name: of for name, of in HALVINGS.items() if of[0] <= samples["lengths"].shape[1]}
    return found | {name: halved(samples, *of) for name, of in halvings.items()}


def report(runs: list[Samples]) -> str:
    """Return the tables: how V ranks in each run, and what each way of choosing reaches and costs.

    Gains are means over the prompts of all runs, and their intervals those of a bootstrap over them.
    """
    head = [f"{what}, run {number + 1}" for number in range(len(runs)) for what in ("correlation", "AUC")]
    ranked = [ranks(samples) for samples in runs]
    lines = [["score", *head], ["---"] * (1 + len(head))]
    lines += [[name, *(cell for of in ranked for cell in of[name])] for name in ranked[0]]
    found = [choices(samples) for samples in runs]
    rows = [["answer", "tokens, of plain sampling", "strict reward by run", "gain over plain sampling"], ["---"] * 4]
    for name in found[0]:
        share = [of[name][1].mean() / of["plain sampling"][1].mean() for of in found]
        gain = interval(np.concatenate([of[name][0] - of["plain sampling"][0] for of in found]))
        rewards = ", ".join(f"{of[name][0].mean():.3f}" for of in found)
        rows.append([name, f"{np.mean(share):.2f}", rewards, words(gain, "+.3f")])
    return "\n\n".join([markdown(lines), *map(facts, runs), markdown(rows)])


def existing(path: str) -> str:
    """Return a path that exists, as an argument of the command line."""
    if not Path(path).exists():
        raise argparse.ArgumentTypeError(f"{path} does not exist")
    return path


def main() -> None:
    """Sample answers, or print the tables."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    commands = parser.add_subparsers(dest="command", required=True)
    sampling = commands.add_parser("sample")
    for name in ("--policy", "--critic"):
        sampling.add_argument(name, type=existing, required=True)
    for name, default in {"--prompts": 256, "--answers": 8, "--seed": 0}.items():
        sampling.add_argument(name, type=int, default=default)
    sampling.add_argument("--out", type=Path, required=True)
    commands.add_parser("report").add_argument("files", type=lambda text: [*map(existing, text.split(","))])
    given = parser.parse_args()
    if given.command == "report":
        print(report([dict(np.load(file)) for file in given.files]))
        return
    parts: list[Samples] = []
    for part in sample(given.policy, given.critic, given.prompts, given.answers, given.seed):
        parts.append(part)  # all so far are written, for a report before the end
        joined = {name: np.concatenate([each[name] for each in parts]) for name in part}
        np.savez_compressed(given.out, allow_pickle=False, **joined)
        print(f"{len(joined['greedy'])} of {given.prompts} prompts", file=sys.stderr, flush=True)


if __name__ == "__main__":
    main()
