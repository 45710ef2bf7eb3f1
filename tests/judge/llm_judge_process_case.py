"""Scores of a language model: every process must get them, and only the main process may send requests."""

import json
import sys
from pathlib import Path

from ppo_rlhf.judge.llm_judge import judge_counts
from ppo_rlhf.rewards.config import RewardConfig
from ppo_rlhf.rewards.scorers import build_reward_scorer
from ppo_rlhf.runtime import processes
from tests.rewards.test_scorers import batch
from tests.tiny_models import END, word_tokenizer

RESPONSES = [[6, END], [6, 7, END], [6, 7, 8, END]]


def main(url: str, folder: str) -> None:
    component = {"type": "llm", "llm": {"model": "m", "base_url": url, "cache": None}}
    scorer = build_reward_scorer(RewardConfig(components=[component]), None, word_tokenizer())
    scored = scorer.score(batch(RESPONSES, [True] * 3))
    result = [scored.total.tolist(), judge_counts()["judge/reward.llm/requests"]]
    (Path(folder) / f"{processes.own_rank()}.json").write_text(json.dumps(result))


if __name__ == "__main__":
    processes.check_launch()
    main(*sys.argv[1:])
