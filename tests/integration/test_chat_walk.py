"""A chat model, a published reward model of another family and LoRA, from the first check to transformers' pipeline.

The stand-ins have the shapes of real ones: the reward model has other token ids, its own chat template without a system
role, and an end of turn that the policy does not know.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pandas as pd
import pytest
import torch
import yaml
from click.testing import Result
from transformers import GenerationConfig, pipeline

from ppo_rlhf.models.loading import PretrainedHandle
from tests.rewards.test_rendering import LLAMA, QWEN, chat_tokenizer, plainly, saved
from tests.tiny_models import save, tiny_model

PAGE = (Path(__file__).parents[2] / "docs/your_model.md").read_text()
SECTION = re.search(r"\n## A chat model with a published reward model\n(.*?)\n## ", PAGE, re.DOTALL)
SIZES = {"lora_r": 4, "learning_rate": 1e-2, "response_length": 8, "temperature": 0.9, "top_k": 12}
SIZES |= {"total_episodes": 16, "gradient_accumulation_steps": 1, "num_mini_batches": 1}
ANSWER = {"role": "assistant", "content": "a"}  # ends each conversation of the table, and is left out
CHATS = [
    *([{"role": "user", "content": text}] for text in ("a b", "c", "d e f", "b a", "f")),
    *(
        [{"role": "user", "content": "a"}, {"role": "assistant", "content": "b c"}, {"role": "user", "content": text}]
        for text in ("d", "e", "c d")
    ),
]


@pytest.mark.slow
def test_a_chat_model_walks_from_the_doctor_to_a_pipeline_of_transformers(
    project: Path, tmp_path: Path, kedro: Callable[..., Result]
) -> None:
    policy = chat_tokenizer(QWEN)
    reward_model = saved(tmp_path, chat_tokenizer(LLAMA, other=True, eos="<|eot|>"))
    sft = save(tmp_path / "sft", tiny_model(vocab_size=len(policy), max_position_embeddings=64), policy)
    table = tmp_path / "prompts.jsonl"
    table.write_text("".join(f"{json.dumps({'messages': [*chat, ANSWER]})}\n" for chat in CHATS))
    assert SECTION is not None
    settings = [yaml.safe_load(block) for block in re.findall(r"```yaml\n(.*?)```", SECTION[1], re.DOTALL)]
    settings[0].update(sft_model_path=sft, reward_model_path=reward_model.source, prompts_path=str(table))
    settings[1]["ppo"] |= SIZES
    settings[1] |= {"prompts": {"held_out_share": 0.5}, "best_of_n": {"prompts": 3, "samples": 4}}
    for name, values in zip(("globals", "parameters"), settings, strict=True):
        (project / f"conf/local/{name}.yml").write_text(yaml.safe_dump(values))

    def run(*arguments: str) -> str:
        result = kedro(project, *arguments)
        assert result.exit_code == 0, result.output
        return result.output

    commands = re.findall(r"^kedro (.*)$", SECTION[1], re.MULTILINE)
    assert [line.split()[-1] for line in commands] == ["doctor", "audit_reward", "align"]
    outputs = [run(*line.split()) for line in commands]
    assert outputs[0].endswith("No problem found.\n")
    audit = json.loads((project / "data/08_reporting/reward_audit.json").read_text())
    assert "audit/holes" in audit["metrics"]
    stored = pd.read_parquet(project / "data/07_model_output/evaluation_prompts/evaluation_prompts.parquet")
    held_out = [json.loads(chat) for chat in stored["prompt_chat"]]
    assert len(held_out) == len(CHATS) // 2
    for name in ("sft", "ppo"):
        rows = pd.read_parquet(project / f"data/07_model_output/{name}_evaluation.parquet").to_dict("records")
        expected = [_on_its_card(reward_model, chat, row) for chat, row in zip(held_out, rows, strict=True)]
        assert [row["reward"] for row in rows] == pytest.approx(expected, abs=1e-5), name
    [exported] = (path.parent for path in (project / "data/06_models/ppo_policy").glob("*/config.json"))
    _check_export(exported, sft)


def _on_its_card(reward_model: PretrainedHandle, chat: list[dict[str, str]], row: dict[str, Any]) -> float:
    """As a plain script scores the reply: a cut-off one leaves its turn open, of which nothing may be said yet."""
    reply, is_open = row["response"].strip(), not row["terminated"]
    if is_open and not reply:
        return plainly(reward_model, chat, add_generation_prompt=True)
    return plainly(reward_model, [*chat, {"role": "assistant", "content": reply}], continue_final_message=is_open)


def _check_export(exported: Path, sft: str) -> None:
    """It is a whole model, samples as PPO did, and answers messages until its turn ends."""
    assert not (exported / "adapter_config.json").exists()
    settings = GenerationConfig.from_pretrained(exported)
    assert (settings.do_sample, settings.temperature, settings.top_k) == (True, 0.9, 12)
    assert settings.max_new_tokens == SIZES["response_length"]
    answer = pipeline("text-generation", model=str(exported), device="cpu")
    torch.manual_seed(0)
    [found] = answer(CHATS[:1])
    *before, reply = found[0]["generated_text"]
    assert before == CHATS[0]
    assert reply["role"] == "assistant"
    assert set(reply["content"].split()) <= answer.tokenizer.get_vocab().keys()
    tokenizer, start = answer.tokenizer, PretrainedHandle(sft).causal_lm()
    ids = tokenizer.apply_chat_template(CHATS[0], add_generation_prompt=True, return_tensors="pt")["input_ids"]
    assert tokenizer.get_vocab() == PretrainedHandle(sft).tokenizer().get_vocab()
    with torch.no_grad():
        assert not torch.allclose(answer.model(ids).logits, start(ids).logits, atol=1e-3)
