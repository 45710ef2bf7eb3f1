"""The scripts on docs/trainer.md run as they stand there, one after the other, and learn what they are to."""

from __future__ import annotations

import logging
import re
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

PAGE = (Path(__file__).parents[2] / "docs" / "trainer.md").read_text()
BLOCKS = re.findall(r"```python\n(.*?)```", PAGE, re.DOTALL)


def has_learnt(history: list[dict[str, float]]) -> bool:
    """Whether the mean score of the last three iterations is twice that of the first."""
    scores = [row["objective/scores"] for row in history]
    return sum(scores[-3:]) / 3 > 2.0 * scores[0] > 0.0


def test_the_whole_loop_trains_learns_saves_and_resumes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    names: dict[str, Any] = {}
    untrained = BLOCKS[0].partition("config = PPOConfig(")[0]
    exec(compile(untrained, "docs/trainer.md, the first script's model", "exec"), names)
    for part in (names["model"], names["tokenizer"]):
        part.save_pretrained("sentiment-policy")
    exec(compile(BLOCKS[1], "docs/trainer.md, the second script", "exec"), names)
    assert len(names["history"]) == 10
    assert has_learnt(names["history"])
    assert (tmp_path / "great-policy" / "model.safetensors").is_file()


@pytest.mark.slow
def test_the_scripts_run_and_learn(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture):
    monkeypatch.chdir(tmp_path)
    names: dict[str, Any] = {}
    own_loop, whole_loop, evaluation, callback = BLOCKS
    with caplog.at_level(logging.INFO, "ppo_rlhf"):
        exec(compile(own_loop, "docs/trainer.md, the first script", "exec"), names)
    scores = [row["objective/scores"] for row in names["ppo_trainer"].history]
    assert len(scores) == 30
    assert sum(scores[-5:]) / 5 > sum(scores[:5]) / 5 + 1.0
    lines = [record.message for record in caplog.records if record.message.startswith("Iteration ")]
    assert len(lines) == 30
    assert "'the film was' -> " in lines[0]
    saved = AutoModelForCausalLM.from_pretrained("sentiment-policy")
    ids = torch.tensor([[3, 4, 5]])
    assert torch.equal(saved(ids).logits, names["ppo_trainer"].policy(ids).logits)
    assert AutoTokenizer.from_pretrained("sentiment-policy")("good")["input_ids"] == [8]

    exec(compile(whole_loop, "docs/trainer.md, the second script", "exec"), names)
    assert has_learnt(names["history"])
    for name, tensor in names["trainer"].policy.state_dict().items():
        assert torch.equal(tensor, names["again"].policy.state_dict()[name]), name
    kept = ["completions", "iteration_000005", "iteration_000010", "metrics.jsonl", "run.lock"]
    assert sorted(path.name for path in Path("great-run").iterdir()) == kept
    assert AutoModelForCausalLM.from_pretrained("great-policy").config.vocab_size == 14

    exec(compile(evaluation, "docs/trainer.md, the third script", "exec"), names)
    assert [row["iteration"] for row in names["evaluating"].held_out.rows] == [10.0]
    assert names["metrics"]["eval/reward"] > 2.0 * names["metrics"]["eval/reward_sft"] > 0.0
    assert names["metrics"]["eval/win_rate_low"] > 0.5
    assert names["completions"]["reward"].mean() == pytest.approx(names["metrics"]["eval/reward"])

    with_callback = names | {"reward": names["greatness"], "prompts": ["the film was", "the plot"]}
    exec(compile(callback, "docs/trainer.md, the callback", "exec"), with_callback)
    assert len(with_callback["trainer"].train()) == 10
