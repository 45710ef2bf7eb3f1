"""LLaMA-Factory's stages ppo, sft and rm: every setting is accounted for, and a run does what theirs would."""

from __future__ import annotations

import json
from fnmatch import fnmatchcase
from pathlib import Path
from typing import Any

import pytest
import yaml
from datasets import Dataset

from ppo_rlhf.compat import from_llamafactory, llamafactory
from ppo_rlhf.compat.conversion import texts_of
from ppo_rlhf.core.errors import ConfigError
from ppo_rlhf.data.chats import read_chat, read_tools
from tests.compat.bookkeeping import check_claims
from tests.compat.llamafactory_source import LLAMAFACTORY
from tests.compat.test_converting_tables import PAGE, rows_of

LORA = {
    **{"stage": "ppo", "do_train": True, "finetuning_type": "lora", "lora_rank": 16, "lora_target": "q_proj, v_proj"},
    **{"model_name_or_path": "org/base", "reward_model": "saves/reward", "template": "qwen", "cutoff_len": 512},
    **{"dataset": "questions", "per_device_train_batch_size": 4, "gradient_accumulation_steps": 2},
    **{"ppo_buffer_size": 3, "ppo_epochs": 2, "ppo_target": 3.0, "learning_rate": 2e-5, "num_train_epochs": 2.0},
    **{
        "lr_scheduler_type": "cosine",
        "warmup_ratio": 0.1,
        "bf16": True,
        "max_new_tokens": 256,
        "top_k": 0,
        "top_p": 0.9,
    },
    "output_dir": "saves/ppo",
}
"""A file for PPO with LoRA, with the settings that such files have."""


def ppo(**settings: Any) -> dict[str, Any]:
    return from_llamafactory({"stage": "ppo", **settings}).parameters["ppo"]


def reasons(**settings: Any) -> dict[str, str]:
    return dict(from_llamafactory({"stage": "ppo", **settings}).not_carried)


@pytest.mark.parametrize("stage", ["ppo", "sft", "rm"])
def test_every_field_of_their_arguments_is_known(stage: str):
    conversion = from_llamafactory({**LLAMAFACTORY, "stage": stage})
    assert [name for name, reason in conversion.not_carried if "no such setting" in reason] == []


@pytest.mark.parametrize("stage", ["ppo", "sft", "rm"])
def test_what_is_called_carried_has_an_effect_and_nothing_else_has_one(stage: str):
    others = {"lr_scheduler_type": "cosine", "warmup_ratio": 0.5, "top_p": 0.5, "adam_beta1": 0.5, "adam_beta2": 0.5}
    others |= {"optim": "adamw_bnb_8bit", "model_name_or_path": "org/base", "reward_model": "org/reward"}
    others |= {"max_steps": 7, "warmup_steps": 5, "reward_model_type": "api", "finetuning_type": "full"}
    others |= {"adapter_name_or_path": "saves/sft", "reward_model_adapters": "saves/reward", "model_revision": "v2"}
    others |= {"quantization_bit": 4, "lora_alpha": 5, "ppo_whiten_rewards": True, "gradient_accumulation_steps": 2}
    others |= {"dataset": "questions", "default_system": "Be brief.", "max_samples": 5, "max_new_tokens": 7}
    settings = {**LLAMAFACTORY, "model_name_or_path": "org/other"}

    def convert(changed: Any) -> Any:
        return from_llamafactory({**changed, "stage": stage})

    del settings["stage"]
    check_claims(convert, settings, others)
    check_claims(convert, settings | {"reward_model": "org/rm", "max_steps": 50, "finetuning_type": "lora"}, others)


def test_a_file_for_ppo_with_lora_is_converted_as_worked_by_hand():
    conversion = from_llamafactory(LORA, num_prompts=100)
    assert conversion.parameters == {
        "seed": 42,
        "sft_model_path": "org/base",
        "reward_model_path": "saves/reward",
        "ppo": {
            "num_ppo_epochs": 2,
            "cliprange": 0.2,
            "cliprange_value": 0.2,
            "vf_coef": 0.1,
            "gamma": 1.0,
            "lam": 0.95,
            "whiten_rewards": False,
            "whiten_advantages": True,
            "target_kl": None,
            "kl_coef": 0.2,
            "kl_estimator": "k1",
            "kl_in": "reward",
            "kl_controller": "adaptive",
            "kl_target": 3.0,
            "kl_horizon": 10_000.0,
            "reward_clip": None,
            "reward_normalisation": "none",
            "missing_eos_penalty": None,
            "learning_rate": 2e-5,
            "value_learning_rate": None,
            "lr_scheduler_type": "cosine",
            "warmup_ratio": 0.1,
            "adam_beta1": 0.9,
            "adam_beta2": 0.999,
            "adam_epsilon": 1e-8,
            "weight_decay": 0.0,
            "max_grad_norm": 1.0,
            "total_episodes": 192,  # 100 prompts fill 4 iterations of 24; two passes
            "per_device_train_batch_size": 4,
            "gradient_accumulation_steps": 6,  # 6 x 4 = 24 responses an iteration
            "num_mini_batches": 3,  # steps on 4 x 2 responses
            "response_length": 256,
            "temperature": 0.95,
            "top_k": 0,
            "top_p": 0.9,
            "stop_token": "eos",
            "value_model": "shared",
            "use_peft": True,
            "lora_r": 16,
            "lora_alpha": 32,  # twice the rank
            "lora_target_modules": "q_proj,v_proj",
            "load_in_4bit": False,
            "gradient_checkpointing": True,
            "dtype": "bfloat16",
            "device": "auto",
        },
    }
    left = {"do_train", "template", "cutoff_len", "dataset", "output_dir", "reward_model_type"} & set(LORA)
    assert {setting for setting, _ in conversion.not_carried} == left
    assert conversion.missing == ["prompts_path"]
    config = conversion.ppo_config()
    assert (config.batch_size, config.batch_size // config.num_mini_batches) == (24, 8)


@pytest.mark.parametrize(("rows", "epochs", "episodes"), [(100, 1.0, 96), (100, 2.5, 240), (24, 1, 24), (47, 0.5, 24)])
def test_a_pass_leaves_out_the_prompts_that_do_not_fill_an_iteration(rows: int, epochs: float, episodes: int):
    """TRL's data loader drops the last batch; max_steps = ceil(epochs x batches)."""
    conversion = from_llamafactory({**LORA, "num_train_epochs": epochs}, num_prompts=rows)
    assert conversion.parameters["ppo"]["total_episodes"] == episodes
    with pytest.raises(ConfigError, match=r"23 prompts.* 24"):
        from_llamafactory(LORA, num_prompts=23)


def test_steps_are_iterations_and_replace_the_passes():
    values = ppo(
        max_steps=10, num_train_epochs=3, warmup_steps=2, gradient_accumulation_steps=2, lr_scheduler_type="cosine"
    )
    assert values["total_episodes"] == 10 * 16
    assert values["warmup_ratio"] * 10 == pytest.approx(1.5)  # rounded up: 2 iterations
    assert set(reasons(max_steps=10, num_train_epochs=3)) == {"num_train_epochs"}
    assert "num_train_epochs" in reasons(num_train_epochs=3, max_steps=-1)
    assert ppo(warmup_steps=0.25)["warmup_ratio"] == 0.25
    assert "warmup_steps" in reasons(warmup_steps=20)


def test_scores_are_normalised_by_a_running_mean_and_deviation():
    assert ppo(ppo_score_norm=True)["reward_normalisation"] == "running"


@pytest.mark.parametrize(
    ("settings", "globals_", "left"),
    [
        ({"reward_model": "r"}, {"reward_model_path": "r"}, set()),
        ({"reward_model": "r", "reward_model_type": "full"}, {"reward_model_path": "r"}, {"reward_model_type"}),
        (
            {"reward_model": "r", "reward_model_type": "full", "reward_model_adapters": "a"},
            {"reward_model_path": "a"},
            {"reward_model"},
        ),
        (
            {"reward_model": "r", "reward_model_type": "full", "reward_model_adapters": "a,b"},
            {},
            {"reward_model", "reward_model_adapters"},
        ),
        (
            {"reward_model": "http://localhost:8000/v1/score", "reward_model_type": "api"},
            {"reward_components": [{"type": "function", "function": "reward_server:score"}]},
            set(),
        ),
        ({"reward_model": "r", "reward_model_type": "oft"}, {}, {"reward_model", "reward_model_type"}),
        ({"adapter_name_or_path": "a", "model_name_or_path": "m"}, {"sft_model_path": "a"}, {"model_name_or_path"}),
        (
            {"adapter_name_or_path": "a, b", "model_name_or_path": "m"},
            {},
            {"model_name_or_path", "adapter_name_or_path"},
        ),
        (
            {"adapter_name_or_path": "a", "create_new_adapter": True, "reward_model": "r", "reward_model_type": "lora"},
            {"sft_model_path": "a"},
            {"create_new_adapter", "reward_model", "reward_model_type"},
        ),
        ({"adapter_name_or_path": "a", "reward_model": "r"}, {"sft_model_path": "a", "reward_model_path": "r"}, set()),
        ({"model_name_or_path": "m/n", "model_revision": "v2"}, {"sft_model_path": "m/n@v2"}, set()),
        ({"trust_remote_code": True}, {"trust_remote_code": True}, set()),
        ({"enable_thinking": False}, {"chat_template_kwargs": {"enable_thinking": False}}, set()),
    ],
)
def test_models_become_globals(settings: dict[str, Any], globals_: dict[str, Any], left: set[str]):
    conversion = from_llamafactory({"stage": "ppo", **settings})
    assert {name: value for name, value in conversion.globals.items() if name != "seed"} == globals_
    assert set(dict(conversion.not_carried)) == left
    assert any("given adapter" in each for each in conversion.remarks) == (
        "adapter_name_or_path" in settings and "create_new_adapter" not in settings
    )


def test_a_reward_server_needs_no_reward_model():
    conversion = from_llamafactory({"stage": "ppo", "reward_model": "http://host/score", "reward_model_type": "api"})
    assert "reward_model_path" not in conversion.missing
    assert any("http://host/score" in remark and "reward_server.py" in remark for remark in conversion.remarks)


@pytest.mark.parametrize(
    ("settings", "loads", "left"),
    [
        ({"quantization_bit": 4}, True, set()),
        ({"quantization_bit": 8}, False, {"quantization_bit"}),
        ({"quantization_bit": 4, "adapter_name_or_path": "a"}, False, {"quantization_bit"}),
        ({"quantization_bit": 4, "quantization_type": "fp4"}, True, {"quantization_type"}),
    ],
)
def test_quantised_weights_have_four_bits_and_no_adapter_of_their_own(
    settings: dict[str, Any], loads: bool, left: set[str]
):
    assert ppo(**settings)["load_in_4bit"] is loads
    assert set(reasons(**settings)) == left


def test_all_weights_train_with_full_and_other_kinds_are_left():
    assert {"use_peft", "lora_r", "load_in_4bit"} & ppo(finetuning_type="full").keys() == {"use_peft"}
    assert ppo(finetuning_type="full")["use_peft"] is False
    assert ppo(finetuning_type="freeze")["use_peft"] is True
    assert "finetuning_type" in reasons(finetuning_type="freeze")


@pytest.mark.parametrize(
    ("settings", "dtype"),
    [({}, "float32"), ({"bf16": True}, "bfloat16"), ({"fp16": True}, "float16"), ({"pure_bf16": True}, "bfloat16")],
)
def test_precision(settings: dict[str, bool], dtype: str):
    assert ppo(**settings)["dtype"] == dtype


def test_a_response_length_is_that_of_the_response_alone():
    assert ppo(max_new_tokens=7)["response_length"] == 7
    assert ppo(max_new_tokens=0, max_length=50)["response_length"] == 1024
    assert set(reasons(max_new_tokens=0, max_length=50)) == {"max_new_tokens", "max_length"}


@pytest.mark.parametrize("stage", ["dpo", "kto", "pt", "grpo"])
def test_other_stages_are_refused(stage: str):
    with pytest.raises(ConfigError, match=f"stage='{stage}'.*ppo, sft, rm "):
        from_llamafactory({"stage": stage})


def test_a_misspelt_setting_is_left_with_the_closest_name():
    assert reasons(ppo_epoch=3)["ppo_epoch"].endswith(" ppo_epochs")


@pytest.fixture
def checkout(tmp_path: Path) -> Path:
    """A folder with data as LLaMA-Factory has it, and a file of settings in a folder below."""
    data = tmp_path / "data"
    data.mkdir()
    alpaca = [
        {"instruction": "Add", "input": "1 2", "output": "3"},
        {"instruction": "Go", "input": "", "output": "ok", "system": "S", "history": [["a", "b"]]},
    ]
    chats = [
        {"talk": [{"who": "q", "says": "hi"}, {"who": "a", "says": "ho"}]},
        {"talk": [{"who": "s", "says": "Sys"}, {"who": "q", "says": "x"}, {"who": "a", "says": "y"}]},
        {"talk": [{"who": "a", "says": "roles do not alternate"}, {"who": "q", "says": "no"}]},
    ]
    pairs = [{"instruction": "Q", "input": "", "chosen": "good", "rejected": "bad"}]
    for name, rows in {"alpaca": alpaca, "chats": chats, "pairs": pairs}.items():
        (data / f"{name}.json").write_text(json.dumps(rows))
    tags = {"role_tag": "who", "content_tag": "says", "user_tag": "q", "assistant_tag": "a", "system_tag": "s"}
    info = {
        "questions": {"file_name": "alpaca.json"},
        "with_history": {
            "file_name": "alpaca.json",
            "columns": {"prompt": "instruction", "query": "input", "history": "history", "system": "system"},
        },
        "chats": {"file_name": "chats.json", "formatting": "sharegpt", "columns": {"messages": "talk"}, "tags": tags},
        "pairs": {
            "file_name": "pairs.json",
            "ranking": True,
            "columns": {"prompt": "instruction", "query": "input", "chosen": "chosen", "rejected": "rejected"},
        },
        "hub": {"hf_hub_url": "org/set", "subset": "en", "split": "train"},
        "elsewhere": {"ms_hub_url": "org/set"},
        "pictures": {
            "file_name": "chats.json",
            "formatting": "sharegpt",
            "columns": {"messages": "talk", "images": "i"},
        },
        "typing": {"file_name": "alpaca.json", "formating": "alpaca"},
        "other_column": {"file_name": "alpaca.json", "columns": {"prompt": "question"}},
    }
    (data / "dataset_info.json").write_text(json.dumps(info))
    (tmp_path / "examples").mkdir()
    return tmp_path


def tables(checkout: Path, stage: str, dataset: str, **settings: Any) -> list[dict[str, Any]]:
    given = {"stage": stage, "dataset": dataset, "per_device_train_batch_size": 1, **settings}
    conversion = from_llamafactory(given, folders=[checkout / "examples", checkout])
    (rows,) = conversion.tables.values()
    return rows


def test_tables_become_chats_as_their_converters_make_them(checkout: Path):
    """Alpaca: instruction and input joined by a line break. ShareGPT: the last turn is the response."""
    user, assistant, system = ({"role": role, "content": ""} for role in ("user", "assistant", "system"))
    assert tables(checkout, "ppo", "questions") == [
        {"prompt": [{**user, "content": "Add\n1 2"}], "response": "3"},
        {"prompt": [{**user, "content": "Go"}], "response": "ok"},
    ]
    assert tables(checkout, "ppo", "with_history, chats", default_system="D") == [
        {"prompt": [{**system, "content": "D"}, {**user, "content": "Add\n1 2"}]},
        {
            "prompt": [
                {**system, "content": "S"},
                {**user, "content": "a"},
                {**assistant, "content": "b"},
                {**user, "content": "Go"},
            ]
        },
        {"prompt": [{**system, "content": "D"}, {**user, "content": "hi"}], "response": "ho"},
        {"prompt": [{**system, "content": "Sys"}, {**user, "content": "x"}], "response": "y"},
    ]
    assert tables(checkout, "sft", "chats", max_samples=1) == [
        {"messages": [{**user, "content": "hi"}, {**assistant, "content": "ho"}]}
    ]
    assert tables(checkout, "rm", "pairs") == [
        {
            "prompt": [{**user, "content": "Q"}],
            "chosen": [{**assistant, "content": "good"}],
            "rejected": [{**assistant, "content": "bad"}],
        }
    ]


def test_a_table_on_the_hub_is_asked_for_with_its_subset_and_split(checkout: Path, monkeypatch: pytest.MonkeyPatch):
    asked = []

    def load(source: str) -> Dataset:
        asked.append(source)
        return Dataset.from_list([{"instruction": "q", "input": "", "output": "a"}] * 2)

    monkeypatch.setattr("ppo_rlhf.compat.rows.load_table", load)
    assert len(tables(checkout, "ppo", "hub")) == 2
    assert asked == ["org/set#en:train"]


def test_turns_of_tools_and_pairs_of_chats_are_read_by_this_project(checkout: Path):
    turns = [
        {"from": "human", "value": "q"},
        {"from": "function_call", "value": '{"name": "f", "arguments": {"x": 1}}'},
        {"from": "observation", "value": "7"},
    ]
    answer = {"from": "gpt", "value": "a"}
    rows = {
        "calls": [{"conversations": [*turns, answer], "tools": '[{"name": "f"}]'}],
        "duels": [{"conversations": turns, "chosen": answer, "rejected": {"from": "gpt", "value": "b"}}],
    }
    columns = {"calls": {"tools": "tools"}, "duels": {"chosen": "chosen", "rejected": "rejected"}}
    info = {
        name: {
            "file_name": f"{name}.json",
            "formatting": "sharegpt",
            "ranking": name == "duels",
            "columns": {"messages": "conversations", **columns[name]},
        }
        for name in rows
    }
    (checkout / "data" / "dataset_info.json").write_text(json.dumps(info))
    for name, table in rows.items():
        (checkout / "data" / f"{name}.json").write_text(json.dumps(table))
    [prompt] = tables(checkout, "ppo", "calls")
    [pair] = tables(checkout, "rm", "duels")
    call = {"name": "f", "arguments": {"x": 1}}
    for row in (prompt, pair):
        chat = read_chat(row["prompt"], "here")
        assert [message["role"] for message in chat] == ["user", "assistant", "tool"]
        assert chat[1]["tool_calls"][0]["function"] == call
    assert (prompt["response"], read_tools(prompt["tools"], "here")) == (
        "a",
        [{"type": "function", "function": {"name": "f"}}],
    )
    assert (pair["chosen"][0]["content"], pair["rejected"][0]["content"]) == ("a", "b")


def test_prompts_are_counted_where_their_tables_are_read(checkout: Path):
    given = {"stage": "ppo", "dataset": "questions,chats", "per_device_train_batch_size": 2, "num_train_epochs": 3}
    conversion = from_llamafactory(given, num_prompts=1000, folders=[checkout])
    assert conversion.parameters["ppo"]["total_episodes"] == 3 * 2  # of 4 prompts one is held out; a pass has one batch
    assert "dataset" not in dict(conversion.not_carried)
    assert conversion.counts == [
        "questions: 2 of 2 rows.",
        "chats: 2 of 3 rows; left out: 1 whose roles do not alternate.",
    ]


def test_the_prompts_that_are_held_out_are_no_part_of_a_pass(checkout: Path):
    """prompts.held_out_share: of 100 distinct prompts 10 are held out, so three passes are 270 responses."""
    rows = [{"instruction": f"q{number}", "input": "", "output": "a"} for number in range(100)]
    (checkout / "data" / "alpaca.json").write_text(json.dumps(rows))
    given = {"stage": "ppo", "dataset": "questions", "per_device_train_batch_size": 1, "num_train_epochs": 3}
    conversion = from_llamafactory(given, folders=[checkout])
    assert conversion.parameters["ppo"]["total_episodes"] == 270
    assert any("Of 100 prompts 90 train" in remark for remark in conversion.remarks)


def test_prompts_without_an_answer_are_ppos_normal_case(checkout: Path):
    """Of 120 chats 100 end with the user's turn; one more starts with the assistant's."""
    asked, answered = {"who": "q", "says": "hi"}, {"who": "a", "says": "ho"}
    talks = [[asked]] * 80 + [[asked, answered, asked]] * 20 + [[asked, answered]] * 19 + [[answered, asked]]
    (checkout / "data" / "chats.json").write_text(json.dumps([{"talk": talk} for talk in talks]))
    conversion = from_llamafactory(
        {"stage": "ppo", "dataset": "chats", "per_device_train_batch_size": 1}, folders=[checkout]
    )
    assert conversion.counts == ["chats: 119 of 120 rows; left out: 1 whose roles do not alternate."]
    rows = conversion.tables["prompts_path"]
    assert [len(row["prompt"]) for row in (rows[0], rows[80], rows[100])] == [1, 3, 1]
    assert ["response" in row for row in (rows[0], rows[80], rows[100])] == [False, False, True]
    sft = from_llamafactory({"stage": "sft", "dataset": "chats"}, folders=[checkout])
    assert sft.counts == [
        "chats: 19 of 120 rows; left out: 100 without an answer, 1 whose roles do not alternate.",
    ]


@pytest.mark.parametrize("talk", [[{"says": "no role"}], [{"who": "q"}], "no list", [{"who": "q", "says": None}]])
def test_a_row_that_is_no_chat_is_counted_as_left_out(checkout: Path, talk: Any):
    rows = [{"talk": json.dumps(each)} for each in (talk, [{"who": "q", "says": "hi"}])]
    (checkout / "data" / "chats.json").write_text(json.dumps(rows))
    conversion = from_llamafactory(
        {"stage": "ppo", "dataset": "chats", "max_steps": 1, "max_samples": 2}, folders=[checkout]
    )
    assert conversion.counts[0].startswith("chats: 1 of 2 rows; left out: 1 ")


def test_rows_beyond_the_first_ones_are_counted(checkout: Path):
    given = {"stage": "ppo", "dataset": "questions", "max_samples": 1, "max_steps": 1}
    [count] = from_llamafactory(given, folders=[checkout]).counts
    assert count.startswith("questions: 1 of 2 rows; left out: 1 after the first ones")


@pytest.mark.parametrize(
    ("dataset", "stage", "message"),
    [
        ("pictures", "ppo", "pictures has images"),
        ("typing", "ppo", "does not know the key 'formating'"),
        ("other_column", "ppo", "has no column question"),
        ("pairs", "ppo", "pairs: stage ppo .*ranking=True"),
        ("questions", "rm", "questions: stage rm .*ranking=False"),
        ("absent", "ppo", "has no table absent"),
    ],
)
def test_a_table_that_cannot_be_used_is_refused_by_name(checkout: Path, dataset: str, stage: str, message: str):
    with pytest.raises(ConfigError, match=message):
        tables(checkout, stage, dataset)


def test_a_table_that_is_not_there_is_left_to_be_filled_in(checkout: Path, tmp_path: Path):
    for dataset, folders in (("elsewhere", [checkout]), ("questions", [tmp_path / "nowhere"])):
        conversion = from_llamafactory({"stage": "ppo", "dataset": dataset, "dataset_dir": "data"}, folders=folders)
        assert "set prompts_path" in dict(conversion.not_carried)["dataset"]
        assert conversion.tables == {}
        assert "prompts_path" in conversion.missing


def test_paths_of_models_are_found_where_their_commands_ran(checkout: Path):
    (checkout / "saves" / "reward").mkdir(parents=True)
    given = {"stage": "ppo", "reward_model": "saves/reward", "model_name_or_path": "org/base"}
    found = from_llamafactory(given, folders=[checkout / "examples", checkout]).globals
    assert found["reward_model_path"] == str(checkout / "saves" / "reward")
    assert found["sft_model_path"] == "org/base"


def test_each_setting_that_is_carried_stands_on_the_page():
    rows = rows_of("LLaMA-Factory")
    names = {*llamafactory.PPO, *llamafactory.PPO_DERIVED, *llamafactory.COMMON} - {"stage", "max_length"}
    in_text = {"dataset", "dataset_dir", "max_samples", "default_system", "create_new_adapter"}
    assert [name for name in names - in_text if not any(fnmatchcase(name, row) for row in rows)] == []
    section = PAGE.partition("## LLaMA-Factory\n")[2].partition("\n## ")[0]
    assert [
        name for name, value in llamafactory.PPO_ALWAYS.items() if f"`ppo.{name}: {_shown(value)}`" not in section
    ] == []


def _shown(value: Any) -> str:
    return yaml.safe_dump(value).splitlines()[0]


SFT = {
    **{"stage": "sft", "model_name_or_path": "org/base", "finetuning_type": "lora", "lora_rank": 8, "bf16": True},
    **{"learning_rate": 1e-4, "num_train_epochs": 2, "cutoff_len": 64, "warmup_ratio": 0.1, "logging_steps": 5},
    **{"lr_scheduler_type": "cosine", "per_device_train_batch_size": 2, "gradient_accumulation_steps": 8},
}


def test_stages_sft_and_rm_become_the_trainings_that_ppo_starts_from():
    sft, rm = from_llamafactory(SFT), from_llamafactory({**SFT, "stage": "rm", "max_steps": 40})
    common = {
        **{"learning_rate": 2e-5, "num_train_epochs": 2.0, "max_length": 64, "warmup_ratio": 0.1, "logging_steps": 5},
        **{"lr_scheduler_type": "cosine", "per_device_train_batch_size": 2, "gradient_accumulation_steps": 8},
        **{"weight_decay": 0.0, "max_grad_norm": 1.0, "bf16": True, "gradient_checkpointing": True, "device": "auto"},
        "group_by_length": False,
    }
    assert sft.parameters == {"supervised_finetuning": common, "base_model_path": "org/base"}
    assert rm.parameters == {"reward_modelling": {**common, "max_steps": 40}}
    assert set(dict(sft.not_carried)) == {"finetuning_type", "lora_rank", "learning_rate"}
    full = from_llamafactory({**SFT, "finetuning_type": "full"})
    assert full.parameters["supervised_finetuning"] == {**common, "learning_rate": 1e-4}
    assert set(dict(full.not_carried)) == {"lora_rank"}
    beside = from_llamafactory({**LORA, "max_steps": 5}, beside=("sft", "rm"))
    assert beside.globals == {"seed": 42}
    assert beside.missing == ["prompts_path"]
    assert {"model_name_or_path", "reward_model"} <= set(dict(beside.not_carried))
    parameters, globals_ = (yaml.safe_load(text) for text in texts_of([beside, sft, rm]))
    assert set(parameters) == {"ppo", "supervised_finetuning", "reward_modelling"}
    assert globals_ == {"seed": 42, "base_model_path": "org/base", "prompts_path": None}


def test_what_stage_rm_has_of_its_own_does_not_reach_the_policy():
    given = {**SFT, "stage": "rm", "model_name_or_path": "org/other", "trust_remote_code": True}
    rm = from_llamafactory(given)
    assert rm.globals == {}
    left = dict(rm.not_carried)
    assert "org/other" in left["model_name_or_path"]
    assert "the policy's, too" in left["trust_remote_code"]
    assert any("longer pairs are left out" in remark for remark in rm.remarks)


def test_a_global_that_two_stages_set_to_two_values_is_refused():
    stages = [
        from_llamafactory({"stage": "ppo", "trust_remote_code": True}),
        from_llamafactory({"stage": "sft", "trust_remote_code": False}),
    ]
    with pytest.raises(ConfigError, match="trust_remote_code "):
        texts_of(stages)
