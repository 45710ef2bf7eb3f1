"""ms-swift's PPO: every argument is accounted for, scripts are read, and a run does what theirs would."""

from __future__ import annotations

import json
from fnmatch import fnmatchcase
from pathlib import Path
from typing import Any

import pytest
import yaml

from ppo_rlhf.compat import from_swift, swift
from ppo_rlhf.compat.files import convert_files
from ppo_rlhf.core.errors import ConfigError
from tests.compat.bookkeeping import check_claims
from tests.compat.swift_source import SWIFT
from tests.compat.test_converting_tables import PAGE, rows_of

SCRIPT = r"""
# A script such as those that people have: variables, sums, several processes.
set -euo pipefail
processes=4
base=org/base
batch=${BATCH:-2}
PYTORCH_CUDA_ALLOC_CONF='expandable_segments:True' \
CUDA_VISIBLE_DEVICES=0,1,2,3 NPROC_PER_NODE=$processes \
~/env/bin/swift rlhf \
    --rlhf_type ppo \
    --model $base --reward_model 'org/reward' \
    --tuner_type lora \
    --dataset 'org/set#2000' 'org/other' \
    --lora_rank 16 --target_modules q_proj v_proj \
    --torch_dtype bfloat16 \
    --num_train_epochs 1 \
    --per_device_train_batch_size ${batch} \
    --learning_rate 1e-5 \
    --gradient_accumulation_steps $(expr 16 / $processes) \
    --warmup_ratio 0.05 --save_steps 100 --save_total_limit 2 \
    --response_length 128 --temperature 0.7 --max-length 512 \
    --deepspeed zero2 --save_only_model true > log.txt 2>&1
"""


def ppo(**settings: Any) -> dict[str, Any]:
    return from_swift({"rlhf_type": "ppo", **settings}).parameters["ppo"]


def reasons(**settings: Any) -> dict[str, str]:
    return dict(from_swift({"rlhf_type": "ppo", **settings}).not_carried)


def test_every_field_of_their_arguments_is_known():
    conversion = from_swift({**SWIFT, "rlhf_type": "ppo"})
    assert [name for name, reason in conversion.not_carried if "no such setting" in reason] == []


def test_what_is_called_carried_has_an_effect_and_nothing_else_has_one():
    others = {"lr_scheduler_type": "linear", "warmup_ratio": 0.5, "adam_beta1": 0.5, "adam_beta2": 0.5, "gamma": 0.9}
    others |= {"optim": "adamw_bnb_8bit", "model": "org/other", "reward_model": "org/other", "lam": 0.9}
    others |= {"tuner_type": "full", "adapters": ["saves/sft"], "reward_adapters": ["saves/rm"], "report_to": ["wandb"]}
    others |= {"quant_bits": 4, "target_modules": ["q_proj"], "torch_dtype": "bfloat16", "learning_rate": 3e-3}
    others |= {
        "response_length": 8,
        "max_new_tokens": 9,
        "truncation_strategy": "left",
        "gradient_accumulation_steps": 5,
    }
    others |= {
        "model_revision": "v2",
        "reward_model_revision": ["v2"],
        "missing_eos_penalty": 1.0,
        "save_total_limit": 3,
    }
    others |= {"dataset": ["a"], "system": "S", "columns": "{}", "num_mini_batches": 4, "quant_method": "hqq"}
    settings = {**SWIFT, "model": "org/base", "reward_model": "org/reward", "quant_method": "bnb"}
    del settings["rlhf_type"]

    def convert(changed: Any) -> Any:
        return from_swift({**changed, "rlhf_type": "ppo"}, num_prompts=100)

    check_claims(convert, settings, others)


def test_a_script_is_converted_as_worked_by_hand(tmp_path: Path):
    (tmp_path / "ppo.sh").write_text(SCRIPT)
    [conversion] = convert_files("ms-swift", [tmp_path / "ppo.sh"], num_prompts=160)
    assert conversion.parameters == {
        "seed": 42,
        "sft_model_path": "org/base",
        "reward_model_path": "org/reward",
        "ppo": {
            "num_ppo_epochs": 4,
            "cliprange": 0.2,
            "cliprange_value": 0.2,
            "vf_coef": 0.1,
            "gamma": 1.0,
            "lam": 0.95,
            "whiten_rewards": False,
            "whiten_advantages": True,
            "kl_coef": 0.05,
            "kl_estimator": "k1",
            "kl_in": "reward",
            "kl_controller": "fixed",
            "missing_eos_penalty": None,
            "learning_rate": 1e-5,
            "value_learning_rate": None,
            "lr_scheduler_type": "cosine",
            "warmup_ratio": 0.05,
            "adam_beta1": 0.9,
            "adam_beta2": 0.95,
            "adam_epsilon": 1e-8,
            "weight_decay": 0.1,
            "max_grad_norm": 1.0,
            "total_episodes": 160,
            "per_device_train_batch_size": 2,
            "gradient_accumulation_steps": 4,  # 16 / 4 processes
            "num_mini_batches": 1,
            "local_rollout_forward_batch_size": 64,
            "response_length": 128,
            "temperature": 0.7,
            "stop_token": "eos",
            "overlong_prompts": "drop",
            "value_model": "reward_init",
            "use_peft": True,
            "lora_r": 16,
            "lora_alpha": 32,
            "lora_target_modules": "q_proj,v_proj",
            "load_in_4bit": False,
            "gradient_checkpointing": True,
            "dtype": "bfloat16",
            "device": "auto",
            "save_interval": 100,
            "save_total_limit": 2,
        },
    }
    assert set(dict(conversion.not_carried)) == {"dataset", "max_length", "deepspeed", "save_only_model"}
    assert any("org/base is a name on ModelScope's hub" in remark for remark in conversion.remarks)
    assert conversion.missing == ["prompts_path"]


@pytest.mark.parametrize(("processes", "micro", "expected"), [(1, 1, 16), (8, 1, 2), (3, 2, 3), (8, 4, 1)])
def test_the_accumulation_that_is_not_given_makes_sixteen_responses(processes: int, micro: int, expected: int):
    """ms-swift: max(1, ceil(16 / per_device_train_batch_size / world_size))."""
    given = {"rlhf_type": "ppo", "per_device_train_batch_size": micro}
    assert from_swift(given, processes=processes).parameters["ppo"]["gradient_accumulation_steps"] == expected


@pytest.mark.parametrize(
    ("settings", "expected"),
    [
        ({}, 1e-4),
        ({"tuner_type": "full"}, 1e-5),
        ({"train_type": "full"}, 1e-5),  # ms-swift 3
        ({"learning_rate": "3e-6"}, 3e-6),
    ],
)
def test_the_learning_rate_that_is_not_given_depends_on_lora(settings: dict[str, Any], expected: float):
    assert ppo(**settings)["learning_rate"] == expected


@pytest.mark.parametrize(
    ("settings", "expected"),
    [
        ({}, 512),
        ({"max_completion_length": 30}, 30),
        ({"max_completion_length": 30, "max_new_tokens": 20}, 20),
        ({"max_completion_length": 30, "max_new_tokens": 20, "response_length": 10}, 10),
    ],
)
def test_the_first_of_three_names_is_the_length_of_responses(settings: dict[str, Any], expected: int):
    assert ppo(**settings)["response_length"] == expected
    assert len(reasons(**settings)) == max(0, len(settings) - 1)


@pytest.mark.parametrize(
    ("settings", "dtype"),
    [
        ({}, "auto"),
        ({"torch_dtype": "bfloat16"}, "bfloat16"),
        ({"torch_dtype": "float32"}, "float16"),  # fp16 is then true in ms-swift
        ({"torch_dtype": "float32", "fp16": False, "bf16": False}, "float32"),
        ({"torch_dtype": "float16", "bf16": "true"}, "bfloat16"),
    ],
)
def test_precision(settings: dict[str, Any], dtype: str):
    assert ppo(**settings)["dtype"] == dtype


@pytest.mark.parametrize(
    ("settings", "globals_", "left"),
    [
        ({"model": "m", "adapters": ["a"]}, {"sft_model_path": "a"}, {"model"}),
        ({"model": "m", "adapters": ["a", "b"]}, {}, {"model", "adapters"}),
        ({"model": "m/n", "model_revision": "v2", "use_hf": True}, {"sft_model_path": "m/n@v2"}, {"use_hf"}),
        ({"reward_model": ["r"], "reward_adapters": ["a"]}, {"reward_model_path": "a"}, {"reward_model"}),
        ({"reward_model": ["r", "s"]}, {}, {"reward_model"}),
        ({"model": ".", "model_revision": "v2"}, {"sft_model_path": "."}, {"model_revision"}),  # a directory
    ],
)
def test_models_become_globals(settings: dict[str, Any], globals_: dict[str, Any], left: set[str]):
    conversion = from_swift({"rlhf_type": "ppo", **settings})
    assert {name: value for name, value in conversion.globals.items() if name != "seed"} == globals_
    assert set(dict(conversion.not_carried)) == left


def test_quantised_weights_have_four_bits_by_bitsandbytes():
    assert ppo(quant_bits="4", quant_method="bnb")["load_in_4bit"] is True
    assert ppo(quant_bits=4, quant_method="hqq")["load_in_4bit"] is False
    assert set(reasons(quant_bits=4, quant_method="hqq")) == {"quant_bits", "quant_method"}


def test_long_prompts_are_left_out_or_cut_as_there():
    assert (ppo()["overlong_prompts"], ppo(truncation_strategy="left")["overlong_prompts"]) == ("drop", "truncate_left")
    assert ppo(truncation_strategy="right")["overlong_prompts"] == "drop"
    assert "truncation_strategy" in reasons(truncation_strategy="right")


@pytest.mark.parametrize("kind", ["grpo", "dpo", "rm", None])
def test_other_algorithms_are_refused(kind: str | None):
    with pytest.raises(ConfigError, match=r"rlhf_type=.*'ppo'"):
        from_swift({} if kind is None else {"rlhf_type": kind})


def test_a_misspelt_argument_is_left_with_the_closest_name():
    assert reasons(num_ppo_epoch=3)["num_ppo_epoch"].endswith(" num_ppo_epochs")


def test_each_argument_that_is_carried_stands_on_the_page():
    rows = rows_of("ms-swift")
    names = {*swift.PPO, *swift.DERIVED} - {"rlhf_type", "use_hf"}
    assert [name for name in names if not any(fnmatchcase(name, row) for row in rows)] == []
    section = PAGE.partition("## ms-swift\n")[2].partition("\n## ")[0]
    shown = {name: yaml.safe_dump(value).splitlines()[0] for name, value in swift.ALWAYS.items()}
    assert [name for name, value in shown.items() if f"`ppo.{name}: {value}`" not in section] == []


def prompts(folder: Path, *dataset: str, **settings: Any) -> list[dict[str, Any]]:
    given = {"rlhf_type": "ppo", "dataset": list(dataset), **settings}
    return from_swift(given, folders=[folder]).tables["prompts_path"]


@pytest.mark.parametrize(
    ("row", "expected"),
    [
        ({"query": "q", "response": "a"}, {"prompt": [{"role": "user", "content": "q"}], "response": "a"}),
        ({"question": "q", "answer": "a"}, {"prompt": [{"role": "user", "content": "q"}], "response": "a"}),
        ({"instruction": "i", "input": "x"}, {"prompt": [{"role": "user", "content": "i\nx"}]}),
        (
            {"messages": [{"role": "user", "content": "q"}, {"role": "assistant", "content": "a"}]},
            {"prompt": [{"role": "user", "content": "q"}], "response": "a"},
        ),
        (
            {"conversations": [{"from": "human", "value": "q"}], "system": "S"},
            {"prompt": [{"role": "system", "content": "S"}, {"role": "user", "content": "q"}]},
        ),
    ],
)
def test_tables_become_chats_as_their_preprocessor_makes_them(tmp_path: Path, row: Any, expected: Any):
    (tmp_path / "rows.jsonl").write_text(f"{json.dumps(row)}\n{json.dumps(row)}\n")
    assert prompts(tmp_path, "rows.jsonl") == [expected, expected]
    assert prompts(tmp_path, "rows.jsonl#1", "rows.jsonl#1") == [expected, expected]
    if expected["prompt"][0]["role"] == "user":
        assert prompts(tmp_path, "rows.jsonl", system="T")[0]["prompt"][0] == {"role": "system", "content": "T"}


def test_a_column_is_renamed_and_an_unknown_one_refused(tmp_path: Path):
    (tmp_path / "rows.jsonl").write_text('{"frage": "q"}\n')
    assert prompts(tmp_path, "rows.jsonl", columns='{"frage": "query"}')[0]["prompt"][0]["content"] == "q"
    with pytest.raises(ConfigError, match="frage"):
        prompts(tmp_path, "rows.jsonl")
    with pytest.raises(ConfigError, match="is not JSON"):
        prompts(tmp_path, "rows.jsonl", columns="{frage")


def test_a_file_of_settings_is_read_alone_and_under_the_options_of_a_command(tmp_path: Path):
    settings = {"rlhf_type": "ppo", "model": "org/base", "kl_coef": 0.2, "ENV": {"NPROC_PER_NODE": 8}}
    (tmp_path / "ppo.yaml").write_text(yaml.safe_dump(settings))
    (tmp_path / "ppo.sh").write_text("swift rlhf ppo.yaml --kl_coef 0.3\n")
    for name, coefficient in (("ppo.yaml", 0.2), ("ppo.sh", 0.3)):
        values = convert_files("ms-swift", [tmp_path / name])[0].parameters["ppo"]
        assert (values["kl_coef"], values["gradient_accumulation_steps"]) == (coefficient, 2)


@pytest.mark.parametrize(
    ("script", "message"),
    [
        ("echo hello", "has 0 commands `swift rlhf`"),
        ("swift rlhf --rlhf_type ppo\nswift rlhf --rlhf_type ppo\n", "has 2 commands"),
        ("swift rlhf --rlhf_type ppo --model $MODEL", r"line 1: .*\$MODEL, which the script does not set"),
        ("swift rlhf --rlhf_type ppo --seed $(date +%s)", r"line 1: `\$\(date \+%s\)` needs a shell"),
        ("swift rlhf --model 'org", "line 1: .* is not closed"),
    ],
)
def test_a_script_that_cannot_be_read_is_refused_in_one_line(tmp_path: Path, script: str, message: str):
    (tmp_path / "ppo.sh").write_text(script)
    with pytest.raises(ConfigError, match=message):
        convert_files("ms-swift", [tmp_path / "ppo.sh"])


@pytest.mark.parametrize(
    ("launch", "processes"),
    [
        ("swift rlhf", 1),
        ("CUDA_VISIBLE_DEVICES=0,1 swift rlhf", 1),  # ms-swift then shares one model out among the GPUs
        ("NPROC_PER_NODE=8 swift rlhf", 8),
        ("NPROC_PER_NODE=4 NNODES=2 swift rlhf", 8),
        ("torchrun --nproc_per_node 8 swift/cli/rlhf.py", 8),
        ("python3 -m torch.distributed.run --nproc-per-node=4 --nnodes 2 -m swift.cli.rlhf", 8),
        ("accelerate launch --multi_gpu --num_processes 8 --num_machines 2 swift/cli/rlhf.py", 8),
        ("CUDA_VISIBLE_DEVICES=4,5 accelerate launch swift/cli/rlhf.py", 2),
        ("CUDA_VISIBLE_DEVICES=0,1,2 torchrun --nproc_per_node gpu swift/cli/rlhf.py", 3),
        ("nohup python swift/cli/rlhf.py", 1),
    ],
)
def test_the_processes_of_a_launch_are_counted(tmp_path: Path, launch: str, processes: int):
    (tmp_path / "ppo.sh").write_text(f"{launch} --rlhf_type ppo --per_device_train_batch_size 1\n")
    [conversion] = convert_files("ms-swift", [tmp_path / "ppo.sh"])
    assert conversion.processes == processes
    expected = {1: 16, 2: 8, 3: 6, 8: 2}[processes]  # max(1, ceil(16 / processes))
    assert conversion.parameters["ppo"]["gradient_accumulation_steps"] == expected


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ("--learning_rate --dataset a", "--learning_rate has no value"),
        ("--model $EMPTY", "--model has no value"),
        ('--model "$EMPTY"', "--model has no value, or an empty one"),
        ("--reward_model=", "--reward_model has no value"),
        ("--kl_coef 1 --kl_coef 2", "--kl_coef is given twice"),
        ("ppo.sh", "`ppo.sh` is no option and no file of settings"),
    ],
)
def test_an_option_without_a_value_is_refused(tmp_path: Path, options: str, message: str):
    (tmp_path / "ppo.sh").write_text(f"EMPTY=\nswift rlhf {options} --rlhf_type ppo\n")
    with pytest.raises(ConfigError, match=message):
        convert_files("ms-swift", [tmp_path / "ppo.sh"])


def test_a_flag_needs_no_value_and_true_is_no_number(tmp_path: Path):
    (tmp_path / "ppo.sh").write_text("swift rlhf --rlhf_type ppo --bf16 --whiten_rewards --use_hf\n")
    values = convert_files("ms-swift", [tmp_path / "ppo.sh"])[0].parameters["ppo"]
    assert (values["dtype"], values["whiten_rewards"]) == ("bfloat16", True)
    assert "true or false" in reasons(learning_rate=True)["learning_rate"]


def test_paths_are_seen_from_where_cd_leads(tmp_path: Path):
    for folder, query in (("here", "no"), ("there", "yes")):
        (tmp_path / folder).mkdir()
        (tmp_path / folder / "rows.jsonl").write_text(f'{{"query": "{query}"}}\n')
    script = tmp_path / "here" / "ppo.sh"
    script.write_text(f"cd {tmp_path}\ncd there\nswift rlhf --rlhf_type ppo --dataset rows.jsonl\n")
    [conversion] = convert_files("ms-swift", [script])
    assert conversion.tables["prompts_path"][0]["prompt"][0]["content"] == "yes"


def test_a_table_that_only_another_folder_has_is_not_read(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "rows.jsonl").write_text('{"query": "no"}\n')
    (tmp_path / "ppo.sh").write_text("cd empty\nswift rlhf --rlhf_type ppo --dataset rows.jsonl\n")
    [conversion] = convert_files("ms-swift", [tmp_path / "ppo.sh"])
    assert "rows.jsonl is not a file here" in dict(conversion.not_carried)["dataset"]
    assert not conversion.tables


def test_an_old_name_beside_the_current_one_is_refused():
    with pytest.raises(ConfigError, match=r"train_type is the old name of tuner_type, and both are given\. Keep one"):
        from_swift({"rlhf_type": "ppo", "train_type": "full", "tuner_type": "lora"})


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("rlhf_type: ppo\nENV: [1]\n", "ENV=\\[1\\] must be a mapping"),
        ("rlhf_type: ppo\nENV: {NPROC_PER_NODE: ²}\n", "NPROC_PER_NODE='²' is no number of processes"),
        ("rlhf_type: ppo\nENV: {NPROC_PER_NODE: 0}\n", "NPROC_PER_NODE='0' is no number of processes"),
        ("kl_coef: 1\nlam: 0.9\nkl_coef: 2\n", "line 3: kl_coef is given twice"),
        ("a: &a [x, x]\nb: &b [*a, *a]\n", "line 2: write the value instead of the alias"),
        ("a: " + "[" * 5000, "too many brackets"),
        ("a: '" + "x" * 300_000 + "'", "at most 200000"),
    ],
)
def test_a_file_of_settings_that_would_be_misread_is_refused_in_one_line(tmp_path: Path, text: str, message: str):
    (tmp_path / "ppo.yaml").write_text(text)
    with pytest.raises(ConfigError, match=message) as refused:
        convert_files("ms-swift", [tmp_path / "ppo.yaml"])
    assert "\n" not in str(refused.value)


def test_a_command_by_the_name_of_its_file_is_read_too(tmp_path: Path):
    (tmp_path / "ppo.sh").write_text(
        "accelerate launch --num_processes 2 ./swift/cli/rlhf.py --rlhf_type=ppo --lam 0.9\n"
    )
    assert convert_files("ms-swift", [tmp_path / "ppo.sh"])[0].parameters["ppo"]["lam"] == 0.9


def test_a_path_that_is_not_there_is_no_name_on_modelscopes_hub():
    conversion = from_swift({"rlhf_type": "ppo", "model": "org/base", "reward_model": "./gone/reward"})
    assert any("./gone/reward" in remark and "reward_model_path" in remark for remark in conversion.remarks)
    assert not any("./gone/reward is a name" in remark for remark in conversion.remarks)
