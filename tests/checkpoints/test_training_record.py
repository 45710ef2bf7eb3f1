"""A policy carries the settings that it was trained with, and they are used unless others are typed."""

import json
from dataclasses import replace
from pathlib import Path

import pytest
from transformers import GenerationConfig

from ppo_rlhf.checkpoints.exports import exported_policy
from ppo_rlhf.checkpoints.model_files import write_models
from ppo_rlhf.checkpoints.training_record import settings_of, settings_of_training
from ppo_rlhf.config import PPOConfig
from ppo_rlhf.core.errors import ConfigError, ModelError
from ppo_rlhf.models.directories import AVERAGE, RECORD
from ppo_rlhf.models.loading import PretrainedHandle
from ppo_rlhf.models.tokenizers import set_template_defaults
from ppo_rlhf.trainer.trainer import PPOTrainer
from tests.ppo_runs import build_tokenizer
from tests.tiny_models import save

DRAWN = {
    **{"response_length": 6, "min_response_length": 2, "temperature": 0.9, "top_k": 5, "top_p": 0.8},
    **{"stop_token_id": 7, "dtype": "float64"},
}
TRAINED = {**DRAWN, "kl_coef": 0.2, "learning_rate": 1e-4, "missing_eos_penalty": None}


def reply(prompts, completions, turns, **columns):
    return [None] * len(prompts)


@pytest.fixture
def export(make_run, tmp_path):
    """Return a function that trains nothing and exports a policy with the given settings."""

    def export(**settings) -> PretrainedHandle:
        state = make_run(**settings).state
        exported_policy(state.learner, state.sampler).save(tmp_path / "policy")
        export.config = state.config
        return PretrainedHandle(str(tmp_path / "policy"))

    return export


def edit(policy: PretrainedHandle, name: str, **changed: object) -> None:
    path = Path(policy.source, name)
    path.write_text(json.dumps({**json.loads(path.read_text()), **changed}))


def test_what_is_exported_is_used_with_the_settings_that_it_was_trained_with(export):
    found = settings_of(export(**TRAINED), PPOConfig(response_length=53, temperature=0.7))
    assert {name: getattr(found.config, name) for name in DRAWN} == DRAWN


def test_report_and_advice_are_told_all_settings_of_the_training_and_no_other(export):
    policy = export(**TRAINED)
    found = settings_of_training(policy, PPOConfig(response_length=53, kl_coef=0.9, gamma=0.5))
    assert {name: getattr(found, name) for name in TRAINED} == TRAINED
    assert found.gamma == 1.0
    assert settings_of_training(policy, export.config) is export.config


def test_the_batch_of_a_training_counts_its_processes_and_no_rule_of_it_refuses_an_evaluation(export):
    policy = export(**TRAINED)
    record = json.loads(policy.record())
    own = {"per_device_train_batch_size": 1, "gradient_accumulation_steps": 1, "num_mini_batches": 1}
    edit(policy, RECORD, ppo={**record["ppo"], **own, "responses_per_prompt": 8}, processes=8)
    assert settings_of(policy, PPOConfig()).config.response_length == 6
    assert settings_of_training(policy, PPOConfig()).batch_size == 8


def test_a_training_of_one_process_is_recorded_as_that(export):
    assert json.loads(export().record())["processes"] == 1


def test_a_typed_setting_of_training_changes_no_training_and_one_line_says_so(export):
    policy = export(**TRAINED)
    found = settings_of(policy, PPOConfig(kl_coef=0.7), {"kl_coef", "seed", "device"})
    assert [line.startswith(f"{policy.source}: ") for line in found.lines() if "ppo.kl_coef=0.2" in line] == [True]


def test_a_rule_of_confs_training_refuses_no_policy(export):
    found = settings_of(export(**TRAINED), PPOConfig(overlong_buffer=40))
    assert (found.config.response_length, found.config.overlong_buffer) == (6, 40)


def test_the_precision_of_a_gpu_is_left_out_on_a_cpu_and_one_line_says_so(export):
    policy = export(**{**TRAINED, "dtype": "float32"})
    record = json.loads(policy.record())
    edit(policy, RECORD, ppo={**record["ppo"], "dtype": "float16"})
    found = settings_of(policy, PPOConfig(device="cpu", dtype="float32"))
    assert found.config.dtype == "float32"
    assert f"{policy.source}: it was trained with ppo.dtype=float16, which needs a GPU: ppo.dtype=float32 is used" in (
        found.lines()
    )


def test_what_vllm_cannot_draw_is_drawn_without_it_and_one_line_says_so(export):
    conf = PPOConfig(rollout_engine="vllm", vllm_gpu_memory_utilization=0.4)
    found = settings_of(export(**{**TRAINED, "dtype": "float32"}), conf)
    assert (found.config.rollout_engine, found.config.top_k) == ("static", 5)
    assert any("ppo.rollout_engine=static is used" in line for line in found.lines())


def test_the_file_beside_the_generation_configuration_repeats_none_of_it_and_names_no_place(export):
    policy = export(**TRAINED)
    saved = GenerationConfig.from_pretrained(policy.source)
    assert (saved.max_new_tokens, saved.temperature, saved.top_k, saved.top_p) == (6, 0.9, 5, 0.8)
    record = json.loads(Path(policy.source, RECORD).read_text())
    assert record["ppo"]["kl_coef"] == 0.2
    own = {"device", "sft_model_path", "callbacks", "vllm_server_base_url"}
    assert not record["ppo"].keys() & {"response_length", "temperature", "top_k", "top_p", *own}
    edit(policy, "generation_config.json", temperature=0.5)
    assert settings_of(policy, PPOConfig()).config.temperature == 0.5


def test_with_an_environment_one_generation_is_a_turn(export):
    turns = {"environment": f"{__name__}:reply", "turn_length": 3, "response_length": 9}
    policy = export(**turns)
    assert policy.generation_config().max_new_tokens == 3
    found = settings_of(policy, PPOConfig()).config
    assert {name: getattr(found, name) for name in turns} == turns


def test_the_code_that_a_policy_from_elsewhere_names_is_imported_only_if_conf_names_it_or_it_is_typed(export):
    turns = {"environment": f"{__name__}:reply", "turn_length": 3, "response_length": 9}
    policy, own = export(**turns), f"ppo.environment={__name__}:reply"
    with pytest.raises(ConfigError) as refused:
        settings_of(policy, PPOConfig(), may_import=False)
    for fragment in (policy.source, f"--params {own}", "ppo.environment=null"):
        assert fragment in str(refused.value)
    named = PPOConfig(**turns)
    assert settings_of(policy, named, may_import=False).config.environment == turns["environment"]
    typed = settings_of(policy, named, {"environment"}, may_import=False).config
    assert (typed.environment, typed.turn_length) == (turns["environment"], 3)
    without = settings_of(policy, PPOConfig(), {"environment"}, may_import=False).config
    assert (without.environment, without.turn_length, without.response_length) == (None, None, 9)


def test_what_is_typed_wins(export):
    conf = PPOConfig(response_length=4, temperature=0.3, min_response_length=1)
    found = settings_of(export(**TRAINED), conf, {"response_length", "min_response_length"})
    assert (found.config.response_length, found.config.min_response_length) == (4, 1)
    assert found.config.temperature == 0.9
    assert "ppo.response_length" not in "".join(found.lines())


def test_one_line_names_what_differs_from_conf_and_nothing_is_said_of_equal_settings(export):
    policy = export(**TRAINED)
    assert settings_of(policy, export.config, template={}).lines() == []
    other = settings_of(policy, replace(export.config, response_length=8, stop_token_id=None, kl_coef=0.1))
    both = "ppo.response_length=6 (conf: 8), ppo.stop_token_id=7 (conf: None)"
    [line] = other.lines()
    assert line.startswith(f"{policy.source}: ")
    assert both in line
    assert line.endswith(": --params ppo.response_length=8")
    another = settings_of(policy, replace(export.config, stop_token_id=None))
    assert another.lines()[0].endswith(": --params ppo.stop_token_id=null")


def test_auto_is_the_precision_that_it_stands_for(export):
    policy = export(dtype="auto")
    assert settings_of(policy, replace(export.config, dtype="auto"), template={}).lines() == []
    assert settings_of(policy, PPOConfig()).config.dtype == export.config.dtype != "auto"


@pytest.mark.parametrize("name", ["device", "rollout_engine", "overlong_prompts", "seed", "max_time"])
def test_what_belongs_to_a_machine_a_run_or_its_prompts_is_the_users(export, name):
    mine = {"device": "cpu", "rollout_engine": "hf", "overlong_prompts": "drop", "seed": 7, "max_time": 1.0}
    found = settings_of(export(**TRAINED), PPOConfig(**mine))
    assert getattr(found.config, name) == mine[name]


def test_a_policy_without_the_file_is_used_with_the_users_settings_and_one_line_says_so(make_model, tmp_path):
    policy = PretrainedHandle(save(tmp_path / "policy", make_model(), build_tokenizer()))
    found = settings_of(policy, PPOConfig(response_length=7, temperature=0.4))
    assert found.config == PPOConfig(response_length=7, temperature=0.4)
    [line] = found.lines()
    assert line.startswith(f"{policy.source} has no ppo_rlhf.json")
    assert "response_length=7, temperature=0.4" in line


def test_an_adapter_and_an_average_carry_the_settings_too(make_run, make_model, tmp_path):
    base = save(tmp_path / "base", make_model("llama"), build_tokenizer())
    options = {"use_peft": True, "lora_r": 2, "export": "adapter", "ema_decay": 0.5, "response_length": 5}
    state = make_run(**options, model={"name_or_path": base}).state
    exported_policy(state.learner, state.sampler).save(tmp_path / "policy")
    for folder in (tmp_path / "policy", tmp_path / "policy" / AVERAGE):
        assert settings_of(PretrainedHandle(str(folder)), PPOConfig()).config.response_length == 5


def test_the_trainer_of_scripts_writes_them_too(make_model, tmp_path):
    sft = save(tmp_path / "sft", make_model(), build_tokenizer())
    PPOTrainer(PPOConfig(**TRAINED), sft).save_pretrained(tmp_path / "policy")
    found = settings_of_training(PretrainedHandle(str(tmp_path / "policy")), PPOConfig())
    assert {name: getattr(found, name) for name in TRAINED} == TRAINED


def test_the_policy_of_a_checkpoint_carries_them_too(make_run, tmp_path):
    state = make_run(**TRAINED).state
    write_models(tmp_path, state.learner, state.sampler)
    found = settings_of_training(PretrainedHandle(str(tmp_path / "policy")), PPOConfig())
    assert {name: getattr(found, name) for name in TRAINED} == TRAINED


def test_the_values_that_the_chat_template_was_given_come_back(make_run, tmp_path):
    state = make_run().state
    state.sampler.tokenizer.chat_template = (
        "{{ thinking }}{{ tone }}{% for m in messages %}{{ m['content'] }}{% endfor %}"
    )
    given = {"thinking": False, "tone": 'a "b" %}'}
    set_template_defaults(state.sampler.tokenizer, given, "policy")
    exported_policy(state.learner, state.sampler).save(tmp_path)
    found = settings_of(PretrainedHandle(str(tmp_path)), PPOConfig(), template={})
    assert found.chat_template_kwargs == given
    assert any(f"chat_template_kwargs={given} (conf: {{}})" in line for line in found.lines())


def test_recorded_settings_that_are_refused_are_named_and_the_policy_is_used_all_the_same(export, caplog):
    policy = export(**TRAINED)
    record = json.loads(policy.record())
    conf = PPOConfig()
    for unfit, said in (({"foreign": 3}, "ppo.foreign is not a parameter"), ({"kl_coef": -1}, "ppo.kl_coef=-1: ")):
        edit(policy, RECORD, ppo={**record["ppo"], **unfit})
        assert settings_of(policy, export.config, template={}).lines() == []
        assert settings_of_training(policy, conf) is conf
        assert caplog.messages[-1].startswith(f"{policy.source}: ")
        assert said in caplog.messages[-1]
    assert settings_of(policy, conf).config.response_length == 6
    edit(policy, RECORD, ppo={**record["ppo"], "min_response_length": -1})
    with pytest.raises(ConfigError, match=r"ppo\.min_response_length=-1: "):
        settings_of(policy, conf)


@pytest.mark.parametrize("text", [b"{", b"[]", b"{}", b'{"ppo": 3, "chat_template_kwargs": {}}', b"\xff"])
def test_a_damaged_file_is_refused_in_one_line(export, text):
    policy = export()
    Path(policy.source, RECORD).write_bytes(text)
    with pytest.raises(ModelError, match=r"^.*policy: its ppo_rlhf\.json .*\(.*\).*$"):
        settings_of(policy, PPOConfig())
