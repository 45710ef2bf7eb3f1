"""The model card: what it says, how it can be used, and where it is never written."""

from __future__ import annotations

import json
import re
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import yaml

from ppo_rlhf.checkpoints.exports import exported_policy
from ppo_rlhf.checkpoints.model_card import BEGIN, END, NOT_EVALUATED, may_write_card, render_card, with_result
from ppo_rlhf.datasets import ModelCardDataset
from ppo_rlhf.models.loading import PretrainedHandle
from ppo_rlhf.models.origins import Origin
from ppo_rlhf.ppo.training_state import TrainingState
from ppo_rlhf.runtime.paths import place
from tests.tiny_models import CHAT_TEMPLATE, save, tiny_model, vision_model, word_tokenizer, write_gguf

CARD = "README.md"


def card_of(state: TrainingState, *given: Any) -> str:
    return render_card(state.learner, state.sampler, state.progress, *given)


def parts(card: str) -> tuple[dict[str, Any], str]:
    """Return the card's metadata and its text."""
    _, metadata, text = card.split("---\n", 2)
    return yaml.safe_load(metadata), text


def test_a_card_names_its_model_data_reward_training_and_settings(make_run) -> None:
    state = make_run(kl_coef=0.11).state
    state.learner.policy.config._name_or_path = "org/sft"
    state.progress.iteration, state.progress.episode = 3, 1536
    metadata, text = parts(
        render_card(
            state.learner,
            state.sampler,
            state.progress,
            ["`my:score` with weight 0.5"],
            "hf://datasets/org/maths@v1/a/b",
            "run7",
        )
    )
    assert metadata["base_model"] == "org/sft"
    assert metadata["datasets"] == ["org/maths"]
    assert metadata["library_name"] == "transformers"
    for words in ("`org/sft`", "`my:score` with weight 0.5", "org/maths", "1,536 responses in 3 iterations", "run7"):
        assert words in text
    assert "- `kl_coef`: 0.11\n" in text
    assert f"{BEGIN}\n\n{NOT_EVALUATED}\n\n{END}" in text
    assert "## Limits" in text


def test_the_metadata_names_the_hubs_models_and_tables_of_earlier_stages(make_run) -> None:
    base = Origin("model", "start model", "org/base@v2", "b45e", on_hub=True)
    texts = Origin("table", "demonstrations", "hf://datasets/org/texts@v1/a.parquet", "c0ffee", on_hub=True)
    local = Origin("table", "prompts", "prompts.jsonl", "ab")
    sft = Origin("model", "start model", "sft_policy/1", "5f7", made_from=(base, texts))
    state = make_run().state
    state.learner.policy.config._name_or_path = ""
    card = render_card(state.learner, state.sampler, state.progress, [], "org/prompts:train", None, (sft, local))
    metadata, text = parts(card)
    assert metadata["base_model"] == "org/base"
    assert metadata["datasets"] == ["org/prompts", "org/texts"]
    assert "## Made from\n\n- start model `sft_policy/1` (digest `5f7`)\n  - start model `org/base@v2`" in text


def test_a_card_names_no_folder_of_the_machine(make_run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    project, elsewhere = tmp_path / "project", tmp_path / "secret" / "sft"
    for folder in (project / "models" / "sft", elsewhere):
        folder.mkdir(parents=True)
    monkeypatch.chdir(project)
    assert place(str(project / "models" / "sft")) == "models/sft"
    state = make_run().state
    state.learner.policy.config._name_or_path = str(elsewhere)
    metadata, text = parts(card_of(state, [], str(tmp_path / "secret" / "prompts.jsonl")))
    assert "base_model" not in metadata
    assert "`sft`" in text
    assert "`prompts.jsonl`" in text
    assert str(tmp_path) not in text


def test_a_card_says_the_type_of_the_exported_weights(make_run, tmp_path: Path) -> None:
    state = make_run(dtype="float32").state
    assert "- Exported as: float32 weights\n" in card_of(state, [])
    state.learner.policy.config._name_or_path = save(tmp_path, tiny_model())
    quantised = json.loads((tmp_path / "config.json").read_text()) | {"quantization_config": {"quant_method": "mxfp4"}}
    (tmp_path / "config.json").write_text(json.dumps(quantised))
    assert "- Exported as: float32 weights, not in the mxfp4 of the start model\n" in card_of(state, [])
    state.learner.config = replace(state.config, use_peft=True, load_in_4bit=True)
    assert "rounded to 4 bits (NF4) and dequantised, and the merged adapter\n" in card_of(state, [])


def test_a_card_says_which_part_of_a_model_for_images_is_left_out(make_run, tmp_path: Path) -> None:
    state = make_run().state
    assert "Left out" not in card_of(state, [])
    state.learner.policy = PretrainedHandle(save(tmp_path, vision_model())).causal_lm()
    assert "- Left out: vision of the source model: only the text part" in card_of(state, [])


def test_a_card_says_from_which_types_a_gguf_file_was_dequantised(make_run, tmp_path: Path) -> None:
    write_gguf(tmp_path / "tiny.gguf", keys={"general.license": "mit"})
    state = make_run().state
    state.learner.policy.config._name_or_path = str(tmp_path / "tiny.gguf")
    types = "Q4_1 (14 tensors), F32 (5), Q8_0 (1)"
    assert "- Exported as: float64 weights, not in the GGUF types of the start model\n" in card_of(state, [])
    line = (
        f"- Started from: `tiny.gguf`, a GGUF file, whose weights of the types {types} were dequantised; its license, "
        "as the file names it: 'mit'\n"
    )
    metadata, text = parts(card_of(state, []))
    assert line in text
    assert "base_model" not in metadata
    (tmp_path / "tiny.gguf").unlink()
    assert "- Started from: `tiny.gguf`\n" in card_of(state, [])


@pytest.mark.parametrize("chat", [False, True])
@pytest.mark.parametrize("export", ["merged", "adapter"])
def test_the_code_on_a_card_runs(make_run, make_model, tmp_path: Path, chat: bool, export: str) -> None:
    tokenizer = word_tokenizer(chat_template=CHAT_TEMPLATE) if chat else None
    base = {"model": {"name_or_path": save(tmp_path / "base", make_model())}}
    settings = {"use_peft": True, "export": "adapter", **base} if export == "adapter" else {}
    state = make_run(tokenizer=tokenizer, **settings).state
    replace(
        exported_policy(state.learner, state.sampler),
        card=card_of(state, []),
    ).save(tmp_path)
    metadata, _ = parts((tmp_path / CARD).read_text())
    assert metadata["library_name"] == {"merged": "transformers", "adapter": "peft"}[export]
    (code,) = re.findall(r"```python\n(.*?)```", (tmp_path / CARD).read_text(), re.DOTALL)
    printed: list[str] = []
    code = code.replace("path or hub id of this model", str(tmp_path)).replace("Your prompt", "a b c")
    exec(code, {"print": printed.append})
    assert len(printed) == 1
    assert isinstance(printed[0], str)
    assert chat or f"{printed[0]} ".startswith("a b c ")  # not "a b cd", though the decoder drops the first space
    assert "max_new_tokens=8, temperature=0.8" in code
    # transformers itself would put an adapter on the main revision of its base, whatever revision it was trained on
    assert ("model=AutoPeftModelForCausalLM.from_pretrained(name)" in code) == (export == "adapter")


def test_a_result_replaces_the_one_before_and_leaves_what_a_person_wrote() -> None:
    card = f"mine\n{BEGIN}\n\n{NOT_EVALUATED}\n\n{END}\nalso mine"
    assert with_result(with_result(card, "first") or "", "second") == f"mine\n{BEGIN}\n\nsecond\n\n{END}\nalso mine"
    assert with_result("# A model of another hand", "second") is None


def test_a_readme_of_another_hand_may_not_be_written_over(tmp_path: Path) -> None:
    assert may_write_card(tmp_path)
    (tmp_path / CARD).write_text("# A model of another hand")
    assert not may_write_card(tmp_path)
    (tmp_path / CARD).write_text(BEGIN)
    assert may_write_card(tmp_path)


def test_a_card_is_written_into_the_projects_policy_and_not_into_a_persons(tmp_path: Path) -> None:
    own, theirs = tmp_path / "policies" / "v1", tmp_path / "theirs"
    for folder in (own, theirs):
        folder.mkdir(parents=True)
    dataset = ModelCardDataset(str(tmp_path / "report" / "model_card.md"), str(tmp_path / "policies"))
    for directory, text in ((own, "first"), (theirs, "second"), (None, "third")):
        dataset.save((None if directory is None else str(directory), text))
        assert dataset.load() == text
    assert (own / CARD).read_text() == "first"
    assert not list(theirs.iterdir())
    alone = ModelCardDataset(str(tmp_path / "report" / "model_card.md"), str(own))  # policy_path names one model
    alone.save((str(own), "fourth"))
    assert (own / CARD).read_text() == "first"
