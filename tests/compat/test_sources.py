"""Files of other libraries' settings: what is read, what is refused, and two recorded runs."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from dataclasses import fields
from pathlib import Path
from typing import Any

import pytest

from ppo_rlhf.compat import (
    Conversion,
    from_llamafactory,
    from_swift,
    from_trl,
    from_verl,
    llamafactory,
    swift,
    trl,
    verl,
)
from ppo_rlhf.compat.sources import convert_files
from ppo_rlhf.config import PPOConfig
from ppo_rlhf.core.errors import ConfigError

RECORDED = Path(__file__).parent / "recorded"
SOURCES: dict[str, tuple[Callable[..., Conversion], dict[str, Any], Mapping[str, Any], Mapping[str, Any]]] = {
    "trl, legacy": (from_trl, {"steps": 64}, trl.LEGACY, trl.LEGACY_ALWAYS),
    "trl, last": (from_trl, {"total_episodes": 64}, trl.LAST, trl.LAST_ALWAYS),
    "llamafactory": (from_llamafactory, {"stage": "ppo"}, llamafactory.RENAMED, llamafactory.ALWAYS),
    "ms-swift": (from_swift, {"rlhf_type": "ppo"}, swift.RENAMED, swift.ALWAYS),
    "verl": (from_verl, {"algorithm.adv_estimator": "gae"}, verl.RENAMED, verl.ALWAYS),
}
VALUES = {
    "trl, legacy": trl.LEGACY_VALUES,
    "trl, last": trl.arguments.VALUES,
    "llamafactory": llamafactory.VALUES,
    "ms-swift": swift.VALUES,
    "verl": verl.VALUES,
}


@pytest.mark.parametrize("name", SOURCES)
def test_a_sources_table_names_fields_and_its_values_and_defaults_are_accepted(name: str):
    convert, least, renamed, always = SOURCES[name]
    known = {f"ppo.{field.name}" for field in fields(PPOConfig)} | {"seed"}
    assert {target for target, _ in renamed.values()} | {f"ppo.{name}" for name in always} <= known
    conversion = convert(least)
    assert conversion.not_carried == []
    config = conversion.ppo_config()
    assert {name: getattr(config, name) for name in always} == dict(always)
    for setting, names in VALUES[name].items():
        for theirs in names:
            if setting in renamed and theirs is not None:
                changed = convert(least | {setting: theirs})
                assert setting not in dict(changed.not_carried), (setting, theirs)


def test_a_recorded_run_of_ms_swift_is_converted_as_it_was_started():
    """args.json of `NPROC_PER_NODE=2 swift rlhf --rlhf_type ppo --tuner_type lora --lora_rank 16 …`, 4.6.0.dev0.

    Its two longest texts are cut. ms-swift logged that it sets gradient_accumulation_steps to 2, which args.json lacks.
    """
    [conversion] = convert_files("ms-swift", [RECORDED / "args.json"], num_prompts=1000)
    expected = {
        "per_device_train_batch_size": 4,
        "gradient_accumulation_steps": 2,
        "num_mini_batches": 1,
        "num_ppo_epochs": 4,
        "kl_coef": 0.05,
        "total_episodes": 1000,
        "response_length": 256,
        "temperature": 0.9,
        "learning_rate": 1e-5,
        "lr_scheduler_type": "cosine",
        "warmup_ratio": 0.05,
        "weight_decay": 0.1,
        "adam_beta2": 0.95,
        "optim": "adamw_torch_fused",
        "use_peft": True,
        "lora_r": 16,
        "lora_alpha": 32,
        "lora_target_modules": "q_proj,v_proj",
        "load_in_4bit": False,
        "dtype": "bfloat16",
        "device": "auto",
        "overlong_prompts": "drop",
        "report_to": "tensorboard",
        "save_interval": 500,
        "save_total_limit": 2,
        "value_model": "reward_init",
        "stop_token": "eos",
    }
    values = conversion.parameters["ppo"]
    assert {name: values[name] for name in expected} == expected
    assert conversion.globals == {"seed": 42, "sft_model_path": "models/sft", "reward_model_path": "models/reward"}
    assert conversion.processes == 2
    assert conversion.missing == ["prompts_path"]
    reasons = dict(conversion.not_carried)
    assert "set prompts_path" in reasons["dataset"]
    assert not {"learning_rate", "max_completion_length", "tuner_type", "bf16"} & reasons.keys()
    assert conversion.ppo_config().batch_size == 4 * 2  # of each process


def test_a_recorded_run_of_verl_is_converted_as_it_was_started():
    """.hydra/config.yaml of main_ppo at commit 1dda039b, whose references Hydra writes unresolved.

    The command set batches 1024, 256 and 16 on 8 GPUs, lr 2e-6, a warm-up of 0.1, 15 epochs, a KL of 0.01 in the
    reward, critic_warmup 11, `+trainer.own=1`, a reward model, and evaluation and checkpoints every 5 and 20 steps.
    """
    [conversion] = convert_files("verl", [RECORDED / "verl.yaml"], num_prompts=7473)
    expected = {
        "per_device_train_batch_size": 16,
        "gradient_accumulation_steps": 8,  # 1024 / 8 processes / 16
        "num_mini_batches": 4,
        "total_episodes": 15 * 7 * 1024,  # 7,473 prompts fill 7 iterations
        "num_ppo_epochs": 1,
        "num_critic_epochs": 1,  # a reference to the policy's
        "learning_rate": 2e-6,
        "value_learning_rate": 1e-5,
        "lr_scheduler_type": "constant_with_warmup",
        "warmup_ratio": 0.1,
        "critic_warmup_iterations": 10,
        "weight_decay": 0.01,
        "cliprange": 0.2,
        "dual_clip": 3.0,
        "kl_in": "reward",
        "kl_coef": 0.01,
        "kl_estimator": "k1",
        "response_length": 256,
        "overlong_prompts": "drop",
        "top_k": 0,
        "dtype": "bfloat16",
        "value_model": "separate",
        "save_interval": 20,
        "eval_interval": 5,
    }
    values = conversion.parameters["ppo"]
    assert {name: values[name] for name in expected} == expected
    assert conversion.globals == {
        **{"sft_model_path": "org/base", "reward_model_path": "org/reward", "trust_remote_code": False},
        **{"prompts_path": "/data/gsm8k/train.parquet", "evaluation_prompts_path": "/data/gsm8k/test.parquet"},
    }
    assert (conversion.processes, conversion.missing) == (8, [])
    reasons = dict(conversion.not_carried)
    assert {"trainer.own", "trainer.logger", "critic.optim.lr_warmup_steps_ratio"} <= reasons.keys()
    assert "critic.optim.weight_decay" not in reasons  # it is the policy's
    assert len(conversion.remarks) == 2  # no option that changes the algorithm is on
    assert conversion.ppo_config().local_mini_batch_size == 32  # 256 / 8


@pytest.mark.parametrize(
    ("library", "fix"),
    [
        ("verl", "python -m verl.trainer.main_ppo … --cfg job --resolve"),
        ("ms-swift", "args.json"),
        ("llamafactory", "llamafactory-cli train"),
        ("trl", "PPOConfig"),
    ],
)
def test_a_script_is_not_read_and_one_line_says_what_to_give_instead(tmp_path: Path, library: str, fix: str):
    (tmp_path / "ppo.sh").write_text("set -x\npython3 -m verl.trainer.main_ppo data.seed=1\n")
    with pytest.raises(ConfigError, match=r"ppo\.sh is not read") as refused:
        convert_files(library, [tmp_path / "ppo.sh"])
    assert fix in str(refused.value)
    assert "\n" not in str(refused.value)


@pytest.mark.parametrize(
    ("name", "text", "message"),
    [
        ("ppo.yaml", "kl_coef: 1\nlam: 0.9\nkl_coef: 2\n", "kl_coef is given twice"),
        ("ppo.json", '{"kl_coef": 1, "lam": 0.9, "kl_coef": 1}', "kl_coef is given twice"),
        ("ppo.json", '{"data": {"seed": 1, "seed": 2}}', "seed is given twice"),
        ("ppo.yml", "data:\n  seed: 1\n  seed: 2\n", "seed is given twice"),
        ("ppo.yaml", "a: &a [x, x]\nb: &b [*a, *a]\n", r"line 2: write the value instead of the alias \*a"),
        ("ppo.yaml", "a: " + "[" * 5000, "too many brackets"),
        ("ppo.json", "[" * 200_000, "too many brackets"),
        ("ppo.yaml", "- kl_coef", "must be a mapping.* the fields of its PPOConfig"),
        ("ppo.yaml", "kl_coef: [", "cannot be read"),
        ("ppo.yaml", "? [a, b]\n: 1\n", "unhashable key"),
        ("ppo.json", "kl_coef: 1", "cannot be read"),
        ("ppo.yaml", None, "cannot be read"),
    ],
)
def test_a_file_that_is_no_plain_mapping_is_refused_in_one_line(
    tmp_path: Path, name: str, text: str | None, message: str
):
    if text is not None:
        (tmp_path / name).write_text(text)
    with pytest.raises(ConfigError, match=message) as refused:
        convert_files("trl", [tmp_path / name])
    assert "\n" not in str(refused.value)


def test_json_and_yaml_with_the_same_settings_are_the_same(tmp_path: Path):
    settings = {"learning_rate": 1e-5, "kl_coef": 0.1, "stop_token": "\U0001f600", "total_episodes": 64}
    (tmp_path / "ppo.json").write_text(json.dumps(settings, indent="\t"))
    (tmp_path / "ppo.yaml").write_text(
        "learning_rate: 1e-5\nkl_coef: 1e-1\nstop_token: \U0001f600\ntotal_episodes: 64\n"
    )
    [first], [second] = (convert_files("trl", [tmp_path / f"ppo.{ending}"]) for ending in ("json", "yaml"))
    assert first.parameters == second.parameters
    assert first.given == second.given == settings


def test_paths_that_are_there_become_absolute_and_hub_names_stay(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    (tmp_path / "here").mkdir()
    (tmp_path / "checkout" / "saves" / "reward").mkdir(parents=True)
    (tmp_path / "checkout" / "examples").mkdir()
    monkeypatch.chdir(tmp_path / "here")
    file = tmp_path / "checkout" / "examples" / "ppo.yaml"
    file.write_text("{stage: ppo, model_name_or_path: org/base, reward_model: saves/reward}")
    [conversion] = convert_files("llamafactory", [file])
    assert conversion.globals["reward_model_path"] == str(tmp_path / "checkout" / "saves" / "reward")
    assert conversion.globals["sft_model_path"] == "org/base"
    assert conversion.origins["reward_model_path"] == "reward_model"
