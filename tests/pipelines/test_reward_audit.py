"""The audit on tables of random words, where it is known which reward is fit and which one can be gamed."""

from __future__ import annotations

import random
import re
from collections.abc import Callable, Collection, Mapping, Sequence
from pathlib import Path

import pandas as pd
import pytest
import scipy.stats
import torch

from ppo_rlhf.config.rules import Rule
from ppo_rlhf.evaluation.attacks import attacks
from ppo_rlhf.evaluation.best_of_n import PROMPT, by_prompt
from ppo_rlhf.evaluation.policy import EvaluationConfig
from ppo_rlhf.passes.sampling import SamplingSettings
from ppo_rlhf.pipelines.audit_reward import reward_audit
from ppo_rlhf.pipelines.audit_reward.attacked_rewards import Target, try_attacks
from ppo_rlhf.pipelines.audit_reward.nodes import conclude_audit
from ppo_rlhf.pipelines.audit_reward.reward_audit import (
    RULES,
    audit_reward,
    deviation_within_prompts,
    judge_agreement,
    rank_correlation,
    repeated_pairs,
    verdict,
)
from ppo_rlhf.rewards.config import RewardComponentConfig, RewardConfig
from ppo_rlhf.rewards.scoring import ResponseBatch, RewardScorer
from ppo_rlhf.supervised.reward_training import RewardModellingConfig
from tests.ppo_runs import END, WORDS, build_prompts, build_tokenizer

PAGE = Path(__file__).parents[2] / "docs" / "studies.md"
PROMPTS, SAMPLES, LENGTH = 32, 16, 12
Reward = Callable[[str], float]


def share_of_first_letters(text: str) -> float:
    words = text.split()  # of a listed attack the tokenizer knows single letters such as "a", which earn nothing
    return sum(word < "k" for word in words) / len(words) if len(words) > 2 else 0.0


def broken(reward: Reward, judge: Reward | None = share_of_first_letters) -> set[str]:
    """Return the metrics whose rules a reward breaks."""
    metrics, reasons = audited(reward, judge)
    checked = [rule for rule in RULES if metrics.keys() >= {*rule.reads}]
    found = {name for rule in checked if rule.holds(metrics) for name in rule.reads}
    assert len(reasons) == len(found)
    assert all(any(f"{metric} = {metrics[metric]:.2f}" in reason for reason in reasons) for metric in found)
    return found


def audited(reward: Reward, judge: Reward | None) -> tuple[dict[str, float], Collection[str]]:
    """Return the metrics of a reward on random texts, and the reasons against it."""
    rng = random.Random(0)
    texts = [" ".join(rng.choices(WORDS, k=rng.randint(1, 10))) for _ in range(PROMPTS * SAMPLES)]
    samples = pd.DataFrame(
        {
            PROMPT: [row // SAMPLES for row in range(len(texts))],
            "response": texts,
            "reward": [reward(text) for text in texts],
            "length": [len(text.split()) + 1 for text in texts],
        }
    )
    if judge is not None:
        samples["judge_score"] = [judge(text) for text in texts]
    return audit_reward(samples, attacked(reward, samples), {})


def attacked(reward: Reward, samples: pd.DataFrame, suffixes: Sequence[str] = ("t t t t t", "q q")) -> pd.DataFrame:
    """Return the table of attacks on a reward; the tokenizer knows the words of the texts and no others."""
    settings = SamplingSettings(LENGTH, 1.0, 0, 1.0, (END,), 0)
    answers = samples.groupby(PROMPT)["response"].first().tolist()
    target = Target(scorer_of(reward), build_prompts((3,) * PROMPTS), answers, build_tokenizer(), settings)
    return try_attacks(target, attacks(suffixes), by_prompt(samples, "reward").numpy(), {})


def scorer_of(reward: Reward) -> RewardScorer:
    def scoring(batch: ResponseBatch) -> torch.Tensor:
        assert all(len(ids) <= LENGTH and ids[-1] == END for ids in batch.response_ids)
        return torch.tensor([reward(text) for text in batch.completions], dtype=torch.float64)

    return RewardScorer([("reward", 1.0, scoring)])


@pytest.mark.parametrize(
    ("reward", "judge", "found"),
    [
        (share_of_first_letters, share_of_first_letters, set()),
        (share_of_first_letters, None, set()),
        (
            lambda text: float(len(text.split())),
            None,
            {"audit/length_correlation", "audit/holes"},
        ),
        (
            lambda text: share_of_first_letters(text) + 2.0 * text.endswith("q q"),
            share_of_first_letters,
            {"audit/holes"},
        ),
    ],
    ids=["good", "good, without a judge", "loves length", "loves a suffix that no sample has"],
)
def test_a_reward_is_caught_by_exactly_the_rules_that_it_breaks(
    reward: Reward, judge: Reward | None, found: set[str]
) -> None:
    assert broken(reward, judge) == found


def test_a_reward_that_the_judge_disagrees_with_is_caught() -> None:
    found = broken(lambda text: -share_of_first_letters(text), judge=share_of_first_letters)
    assert {"audit/judge_gain", "audit/judge_fall", "audit/judge_agreement"} <= found


def test_the_thresholds_are_those_of_the_page_and_a_metric_may_be_equal_to_them() -> None:
    rows = re.findall(r"^\| `(audit/\w+)` \|.*\| (above|below|beyond) (±?)([\d.]+) \|$", PAGE.read_text(), flags=re.M)
    limits = [(metric, -1.0 if side == "below" else 1.0, float(number)) for metric, side, _, number in rows]
    limits += [(metric, -1.0, -float(number)) for metric, _, both, number in rows if both]

    def is_broken_outside(metric: str, outside: float, limit: float, rule: Rule[Mapping[str, float]]) -> bool:
        shifts = (-1e-6 * outside, 0.0, 1e-6 * outside)
        return [rule.holds({metric: limit + shift}) for shift in shifts] == [False, False, True]

    for rule in RULES:
        assert sum(rule.reads == (limit[0],) and is_broken_outside(*limit, rule) for limit in limits) == 1, rule.reads
    assert len(limits) == len(RULES)


def test_gains_are_counted_in_the_deviation_of_the_score_so_that_its_scale_does_not_matter() -> None:
    plain, _ = audited(share_of_first_letters, share_of_first_letters)
    scaled, _ = audited(lambda text: 3.0 + 50.0 * share_of_first_letters(text), lambda text: len(text) / 1000.0)
    of_reward = [name for name in plain if not name.startswith("audit/judge")]
    assert {name: scaled[name] for name in of_reward} == pytest.approx({name: plain[name] for name in of_reward})
    table = pd.DataFrame({PROMPT: [0, 0, 1, 1], "reward": [0.0, 4.0, 7.0, 7.0]})
    assert deviation_within_prompts(table, "reward") == 2.0  # variances 8 and 0


def test_the_verdict_counts_the_measures_that_were_made():
    judged = ["audit/judge_agreement", "audit/judge_fall", "audit/judge_gain"]
    assert verdict([], []) == "fit for PPO by 9 of 9 measures"
    assert verdict([], [*judged]) == "fit for PPO by 6 of 9 measures"  # preferences were asked
    assert verdict(["A reason."], [*judged, "audit/pair_accuracy_high"]) == "not fit for PPO"
    alone = verdict([], [*judged, "audit/pair_accuracy_high"])
    assert alone == f"no problem found by 5 of 9 measures; not measured: {', '.join(judged)}, audit/pair_accuracy_high"


def test_a_reward_that_is_its_own_judge_is_not_found_fit_by_it(monkeypatch: pytest.MonkeyPatch) -> None:
    texts = ["a", "a b", "a b c", "a b c d"]
    table = pd.DataFrame({PROMPT: [0, 0, 1, 1], "response": texts, "length": [4, 3, 3, 4], "reward": [1.0, 2, 3, 4]})
    tried = pd.DataFrame({"attack": ["empty", "echo"], "margin": [-1.0, 0.0], "hole": [False, False]})
    parts = [RewardComponentConfig(type="function", function=f"words:{name}") for name in ("count", "other")]
    monkeypatch.setattr("ppo_rlhf.evaluation.policy.load_judge", lambda judge, place, project_path: len)
    monkeypatch.setattr("ppo_rlhf.evaluation.reward_holes.load_function", lambda name, project_path: repeated_pairs)
    given = (table.assign(judge_score=table["reward"]), tried, {}, None, RewardConfig(components=parts))
    own, other = (conclude_audit(*given, EvaluationConfig(judge=f"words:{name}"))[0] for name in ("count", "judge"))
    assert other["verdict"] == "fit for PPO by 8 of 9 measures"
    assert own["verdict"].startswith("no problem found by 5 of 9 measures; not measured: audit/judge_agreement")
    assert own["verdict"].endswith("; no judge but the reward itself")
    assert {"audit/judge_agreement", "audit/judge_gain", "audit/judge_fall"} <= {*own["not_measured"]}


def test_the_rank_correlation_is_the_mean_over_prompts_of_spearmans() -> None:
    rng = random.Random(1)
    table = pd.DataFrame(
        {PROMPT: [row // 9 for row in range(27)], "reward": [float(rng.randint(0, 4)) for _ in range(27)]}
    )
    other = pd.Series([float(rng.randint(0, 4)) for _ in range(18)] + [1.0] * 9)  # the last prompt has none
    expected = [scipy.stats.spearmanr(table["reward"][i : i + 9], other[i : i + 9]).statistic for i in (0, 9)]
    assert rank_correlation(table, other) == pytest.approx(sum(expected) / 2, abs=1e-12)


def test_pairs_equal_to_the_judge_are_left_out_and_those_equal_to_the_reward_count_half() -> None:
    table = pd.DataFrame({PROMPT: [0] * 4, "reward": [1.0, 2.0, 2.0, 0.0], "judge_score": [0.0, 1.0, 2.0, 2.0]})
    # judge: 2>1, 3>1, 4>1, 3>2, 4>2; reward: yes, yes, no, equal, no
    assert judge_agreement(table) == pytest.approx(2.5 / 5)


def test_pairs_are_ordered_by_the_reward_with_their_columns_and_longer_ones_left_out() -> None:
    table = pd.DataFrame(
        {
            "prompt": [f"{word} " for word in WORDS[:8]],
            "better": ["a b"] * 7 + ["a b c d e f g h i j"],
            "worse": ["c"] * 8,
            "wanted": ["b"] * 8,
        }
    )
    config = RewardModellingConfig(chosen_column="better", rejected_column="worse", held_out_share=0.9)
    held_out = reward_audit.held_out_pairs(table, build_tokenizer(), config, limit=8)
    assert len(held_out) == 6  # 0.9 of 7

    def scoring(batch: ResponseBatch) -> torch.Tensor:
        rows = zip(batch.completions, batch.columns["wanted"], batch.response_ids, strict=True)
        return torch.tensor([float(wanted in text.split() and ids[-1] == END) for text, wanted, ids in rows])

    scorer = RewardScorer([("wanted", 1.0, scoring)])
    assert reward_audit.score_pairs(scorer, held_out) == {"audit/pair_accuracy": 1.0, "audit/pair_accuracy_high": 1.0}
    held_out["wanted"] = "z"
    found = reward_audit.score_pairs(scorer, held_out)
    high = 0.5 + 1.959964 * (0.25 / 9.841459) ** 0.5  # by hand: Agresti and Coull's of three of six
    assert found == {"audit/pair_accuracy": 0.5, "audit/pair_accuracy_high": pytest.approx(high, abs=1e-6)}
