"""Origins of a model: what is written beside it, what is read, and what the hub's metadata gets from them."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from ppo_rlhf.core.errors import ModelError
from ppo_rlhf.models.loading import PretrainedHandle
from ppo_rlhf.models.origins import (
    MADE_FROM,
    Origin,
    as_json,
    from_json,
    in_words,
    start_on_hub,
    tables_on_hub,
    write_origins,
)
from ppo_rlhf.models.trained_model import TrainedModel
from tests.tiny_models import save, tiny_model, word_tokenizer

TABLE = Origin("table", "demonstrations", "org/texts@v1:train", "c0ffee", on_hub=True)
BASE = Origin("model", "start model", "org/base@v2", "b45e", on_hub=True)
SFT = Origin("model", "start model", "data/sft", "5f7", made_from=(BASE, TABLE))
REWARD = Origin("model", "reward model", "org/reward", "4e", on_hub=True, made_from=(SFT,))


def test_a_strangers_model_is_named_by_its_source_alone(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    handle = PretrainedHandle(save(tmp_path / "own" / "sft", tiny_model()))
    assert handle.origin("start model") == Origin("model", "start model", "own/sft", handle.fingerprint())
    monkeypatch.chdir("/")
    assert handle.origin("start model").source == "sft", "no folder of this machine"


def test_a_saved_model_hands_its_origins_on_and_the_next_model_in_its_folder_does_not_inherit_them(tmp_path: Path):
    model = TrainedModel(tiny_model(), word_tokenizer(), average=tiny_model(), made_from=(SFT, REWARD))
    model.save(tmp_path)
    for folder in (tmp_path, tmp_path / "ema"):
        assert PretrainedHandle(str(folder)).origin("start model").made_from == (SFT, REWARD)
    replace(model, average=None, made_from=()).save(tmp_path)
    assert PretrainedHandle(str(tmp_path)).origin("start model").made_from == ()


@pytest.mark.parametrize(
    "text",
    ["", "{}x", "[1]", '{"a": 1}', as_json([SFT]).replace('"source"', '"place"'), as_json([SFT]).replace('"5f7"', "7")],
)
def test_damaged_origins_are_refused_in_one_line_that_names_the_model(tmp_path: Path, text: str) -> None:
    source = save(tmp_path, tiny_model())
    (tmp_path / MADE_FROM).write_text(text)
    with pytest.raises(ModelError, match=r"its made_from\.json is damaged .*; copy it again .* or delete it") as caught:
        PretrainedHandle(source).origin("start model")
    assert str(caught.value).startswith(f"{source}: ")
    assert "\n" not in str(caught.value)


def test_the_hub_gets_the_nearest_start_model_and_all_tables_of_the_chain() -> None:
    assert start_on_hub((REWARD, SFT)) == "org/base@v2", "not the reward model, whose weights do not start the policy"
    assert start_on_hub((replace(SFT, on_hub=True), REWARD)) == "data/sft"
    assert start_on_hub((replace(SFT, made_from=()), REWARD)) is None
    assert list(tables_on_hub((SFT, REWARD))) == [TABLE.source] * 2


def test_origins_survive_their_file(tmp_path: Path) -> None:
    write_origins(tmp_path, (SFT, REWARD))
    assert from_json((tmp_path / MADE_FROM).read_text()) == (SFT, REWARD)


def test_a_model_that_occurs_twice_is_listed_with_its_origins_once() -> None:
    assert in_words((SFT, REWARD)).splitlines() == [
        "- start model `data/sft` (digest `5f7`)",
        "  - start model `org/base@v2` (digest `b45e`)",
        "  - demonstrations `org/texts@v1:train` (digest `c0ffee`)",
        "- reward model `org/reward` (digest `4e`)",
        "  - start model `data/sft` (digest `5f7`; made from what is listed above)",
    ]
