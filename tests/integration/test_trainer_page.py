"""The scripts on docs/trainer.md run as they stand there, one after the other, and learn what they are to."""

from __future__ import annotations

import logging
import re
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from tests.tiny_models import save, tiny_model

PAGE = (Path(__file__).parents[2] / "docs" / "trainer.md").read_text()
BLOCKS = re.findall(r"```python\n(.*?)```", PAGE, re.DOTALL)


def test_the_whole_loop_trains_saves_and_resumes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    save(tmp_path / "sentiment-policy", tiny_model(max_position_embeddings=96))
    names: dict[str, Any] = {}
    exec(compile(BLOCKS[1], "docs/trainer.md, the second script", "exec"), names)
    assert len(names["history"]) == 4
    assert (tmp_path / "brief-policy" / "model.safetensors").is_file()


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
    assert len(names["history"]) == 4
    for name, tensor in names["trainer"].policy.state_dict().items():
        assert torch.equal(tensor, names["again"].policy.state_dict()[name]), name
    kept = ["completions", "iteration_000002", "iteration_000004", "run.lock"]
    assert sorted(path.name for path in Path("brevity-run").iterdir()) == kept
    assert AutoModelForCausalLM.from_pretrained("brief-policy").config.vocab_size == 14

    exec(compile(evaluation, "docs/trainer.md, the third script", "exec"), names)
    assert [row["iteration"] for row in names["evaluating"].held_out.rows] == [4.0]
    assert names["completions"]["reward"].mean() == pytest.approx(names["metrics"]["eval/reward"])

    with_callback = names | {"reward": names["brevity"], "prompts": ["the film was", "the plot"]}
    exec(compile(callback, "docs/trainer.md, the callback", "exec"), with_callback)
    assert len(with_callback["trainer"].train()) == 4
