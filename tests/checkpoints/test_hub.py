"""Pushing to the Hugging Face hub, of which a stand-in runs: what is there afterwards, and what is refused."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import yaml
from huggingface_hub import constants
from torch.testing import assert_close
from transformers import AutoModelForCausalLM, AutoTokenizer

from ppo_rlhf.checkpoints.exports import exported_policy
from ppo_rlhf.checkpoints.files import write_directory
from ppo_rlhf.checkpoints.hub import check_push, files_to_push, push
from ppo_rlhf.checkpoints.model_card import render_card, with_index
from ppo_rlhf.config import PPOConfig
from ppo_rlhf.core.errors import CheckpointError, ConfigError, ModelError
from ppo_rlhf.models import trained_model
from ppo_rlhf.models.adapters import LoraSettings, save_adapter, with_adapter
from ppo_rlhf.models.directories import RECORD
from ppo_rlhf.models.loading import PretrainedHandle
from ppo_rlhf.models.trained_model import TrainedModel
from ppo_rlhf.trainer.trainer import PPOTrainer
from tests.hub_stand_in import TOKEN, Hub, running_hub
from tests.tiny_models import CHAT_TEMPLATE, save, tiny_model, word_tokenizer

IDS = torch.tensor([[4, 5, 6]])


@pytest.fixture
def hub(monkeypatch: pytest.MonkeyPatch) -> Iterator[Hub]:
    with running_hub(monkeypatch) as hub:
        yield hub


@pytest.fixture
def exported(make_run: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A chat policy that an evaluation has seen, in shards."""
    monkeypatch.setattr(trained_model, "SHARD", "10KB")
    state = make_run(tokenizer=word_tokenizer(chat_template=CHAT_TEMPLATE)).state
    state.learner.policy.config._name_or_path = "org/base"
    card = with_index(
        render_card(state.learner, state.sampler, state.progress, [], "org/prompts@v1:train"),
        {"prompts": 64, "eval/win_rate": 0.75},
    )
    model = exported_policy(state.learner, state.sampler)
    TrainedModel(model.model, model.tokenizer, card=card, generation_config=model.generation_config).save(
        tmp_path / "policy"
    )
    return tmp_path / "policy"


def metadata_of(card: bytes) -> dict[str, Any]:
    found: dict[str, Any] = yaml.safe_load(card.decode().split("---\n")[1])
    return found


def test_a_pushed_policy_is_private_whole_and_described(hub: Hub, exported: Path, tmp_path: Path):
    hub.licences["org/base"] = "apache-2.0"
    (exported / ".hidden").write_text("not for others")
    address = push(exported, "me/policy", "first")
    repository = hub.repositories["me/policy"]
    assert address.startswith(f"{hub.address}/me/policy/commit/")
    assert (repository.is_private, repository.messages) == (True, ["first"])
    assert sum(name.startswith("model-0") for name in repository.files) > 2
    assert ".hidden" not in repository.files
    folder = repository.save(tmp_path / "downloaded")
    expected = AutoModelForCausalLM.from_pretrained(exported)(IDS).logits
    assert_close(AutoModelForCausalLM.from_pretrained(folder)(IDS).logits, expected, rtol=0.0, atol=0.0)
    assert AutoTokenizer.from_pretrained(folder).chat_template == CHAT_TEMPLATE
    metadata = metadata_of(repository.files["README.md"])
    assert metadata.pop("model-index") == [
        {
            "name": "policy",
            "results": [
                {
                    "task": {"type": "text-generation"},
                    "dataset": {"type": "prompts", "name": "64 held-out prompts"},
                    "metrics": [{"type": "win_rate", "value": 0.75, "name": "Win rate over SFT"}],
                }
            ],
        }
    ]
    assert metadata == {
        "library_name": "transformers",
        "pipeline_tag": "text-generation",
        "base_model": "org/base",
        "datasets": ["org/prompts"],
        "license": "apache-2.0",
        "tags": ["ppo", "rlhf"],
    }


def test_a_second_push_is_a_new_commit_without_weights_of_the_first(hub: Hub, exported: Path, tmp_path: Path):
    (exported / RECORD).write_text("{}")
    push(exported, "me/policy", "first", license="mit")
    assert hub.repositories["me/policy"].files[RECORD] == b"{}"
    hub.repositories["me/policy"].files["notes.md"] = b"of the owner"
    one_file = tmp_path / "smaller"
    TrainedModel(tiny_model(), word_tokenizer(), card=(exported / "README.md").read_text()).save(one_file)
    push(one_file, "me/policy", "second", license="mit", private=False)
    repository = hub.repositories["me/policy"]
    assert "chat_template.jinja" in repository.commits[0]
    assert "chat_template.jinja" not in repository.files
    assert RECORD not in repository.files, "it says how the first was trained"
    assert repository.messages == ["first", "second"]
    assert repository.is_private
    assert [name for name in repository.files if name.endswith(".safetensors")] != []
    folder = repository.save(tmp_path / "downloaded")
    assert repository.files["notes.md"] == b"of the owner"
    assert metadata_of(repository.files["README.md"])["license"] == "mit"
    assert_close(AutoModelForCausalLM.from_pretrained(folder)(IDS).logits, tiny_model()(IDS).logits)


def test_without_a_token_a_network_or_a_name_nothing_is_pushed(monkeypatch: pytest.MonkeyPatch):
    with running_hub(monkeypatch, token=None):
        with pytest.raises(ConfigError, match=r"`hf auth login`.*HF_TOKEN"):
            check_push("me/policy")
        check_push("me/policy", token="given")
    for name in ("policy", "a/b/c", "me/policy@v1"):
        with pytest.raises(ConfigError, match=f"push: {name} .*organisation/name"):
            check_push(name)
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", True)
    with pytest.raises(ConfigError, match="HF_HUB_OFFLINE"):
        check_push("me/policy")


def test_what_the_hub_refuses_is_said_in_one_line(hub: Hub, exported: Path):
    with pytest.raises(ConfigError, match=r"^push: .*me/policy: .*401") as refused:
        push(exported, "me/policy", "first", token="wrong")
    assert "\n" not in str(refused.value)


def test_a_folder_whose_weights_are_gone_is_not_pushed(exported: Path):
    next(exported.glob("model-0*.safetensors")).unlink()
    with pytest.raises(ModelError, match="damaged"):
        files_to_push(exported)


@pytest.mark.parametrize("name", ["model.safetensors", "config.json"])
def test_a_checkpoints_damaged_policy_is_neither_loaded_nor_pushed(tmp_path: Path, monkeypatch: Any, name: str):
    """A flipped bit of a weight is a model that loads."""

    def write(draft: Path) -> None:
        save(draft / "policy", tiny_model(), word_tokenizer())
        (draft / "state.json").write_text("{}")

    write_directory(tmp_path / "iteration_000010", 10, write)
    policy = tmp_path / "iteration_000010" / "policy"
    assert set(files_to_push(policy)) == {path.name for path in policy.iterdir()}
    PretrainedHandle(str(policy)).causal_lm()
    content = bytearray((policy / name).read_bytes())
    content[-1] ^= 64 if name == "model.safetensors" else ord(" ") ^ ord("\n")
    (policy / name).write_bytes(content)
    (tmp_path / "link").symlink_to(policy)
    monkeypatch.chdir(policy.parent)
    for place in (policy, Path("policy"), tmp_path / "link"):
        for read in (lambda folder: PretrainedHandle(str(folder)).causal_lm(), files_to_push):
            with pytest.raises(CheckpointError, match=rf"/iteration_000010/policy/{name}: damaged"):
                read(place)


def test_a_manifest_of_another_program_beside_a_model_says_nothing(tmp_path: Path):
    save(tmp_path / "policy", tiny_model(), word_tokenizer())
    (tmp_path / "manifest.json").write_text('{"name": "a page"}')
    PretrainedHandle(str(tmp_path / "policy")).causal_lm()
    assert files_to_push(tmp_path / "policy")


def test_a_card_that_names_several_base_models_keeps_the_licence_it_has(hub: Hub, exported: Path):
    card = exported / "README.md"
    card.write_text(card.read_text().replace("base_model: org/base", "base_model: [org/base, org/other]"))
    push(exported, "me/policy", "first")
    assert metadata_of(hub.repositories["me/policy"].files["README.md"])["base_model"] == ["org/base", "org/other"]


def test_an_adapter_on_a_folder_of_this_machine_is_not_pushed(tmp_path: Path):
    model, settings = tiny_model(name_or_path=save(tmp_path / "base", tiny_model())), LoraSettings(2, 4, "all-linear")
    save_adapter(with_adapter(model, settings, torch.Generator()), tmp_path / "adapter", settings)
    with pytest.raises(ConfigError, match=r"base, .*\(ppo\.export=merged\)"):
        files_to_push(tmp_path / "adapter")


def test_a_trainer_pushes_its_policy(hub: Hub, tmp_path: Path):
    settings = {"total_episodes": 8, "per_device_train_batch_size": 8, "response_length": 4}
    sft = save(tmp_path / "sft", tiny_model())
    trainer = PPOTrainer(PPOConfig(**settings, device="cpu"), sft)
    trainer.push_to_hub("me/policy", license="mit", token=TOKEN, commit_message="by hand")
    repository = hub.repositories["me/policy"]
    assert (repository.is_private, repository.messages) == (True, ["by hand"])
    pushed = AutoModelForCausalLM.from_pretrained(repository.save(tmp_path / "downloaded"))
    assert_close(pushed(IDS).logits, trainer.policy(IDS).logits, rtol=0.0, atol=0.0)
