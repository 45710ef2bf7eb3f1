"""A script written for TRL: its argument groups parse together, and errors translate TRL's names to ours."""

from __future__ import annotations

import inspect
import operator
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import trl
from transformers import HfArgumentParser

from ppo_rlhf.config.trl_names import ARGUMENTS
from ppo_rlhf.core.errors import ConfigError
from ppo_rlhf.training import ModelConfig, PPOConfig, PPOTrainer
from tests.tiny_models import save, tiny_model, word_tokenizer
from tests.trainer.test_trainer import QUERIES, config

PAGE = (Path(__file__).parents[2] / "docs" / "converting.md").read_text()
COMMAND = "--dataset_name tldr --learning_rate 3e-6 --model_name_or_path pythia --dtype bfloat16 --use_peft --lora_r 4"


@pytest.fixture
def trainer(tmp_path: Path) -> PPOTrainer:
    return PPOTrainer(config(), save(tmp_path / "sft", tiny_model()))


def test_the_three_groups_of_every_trl_script_parse_together():
    groups = (trl.ScriptArguments, PPOConfig, ModelConfig)
    script, training, model = HfArgumentParser(groups).parse_args_into_dataclasses(COMMAND.split())
    assert script.dataset_name == "tldr"
    assert (training.learning_rate, training.dtype, training.use_peft, training.lora_r) == (3e-6, "bfloat16", True, 4)
    assert (model.model_name_or_path, model.model_revision) == ("pythia", "main")
    assert (model.attn_implementation, model.trust_remote_code) == (None, False)


@pytest.mark.parametrize("word", ["--use_dora", "--load_in_8bit", "--lora_modules_to_save"])
def test_what_trls_model_config_has_and_nothing_here_does_is_refused_not_swallowed(word: str):
    parser = HfArgumentParser((trl.ScriptArguments, PPOConfig, ModelConfig))
    with pytest.raises(ValueError, match=f"not used.*{word}"):
        parser.parse_args_into_dataclasses([word])


def test_a_setting_that_a_script_reads_elsewhere_is_named():
    with pytest.raises(AttributeError, match=r"ModelConfig\.lora_r .*PPOConfig"):
        _ = ModelConfig().lora_r
    with pytest.raises(AttributeError, match=r"ppo\.output_dir .*: .*PPOTrainer\.train"):
        _ = PPOConfig().output_dir
    assert not hasattr(ModelConfig(), "colour")
    assert not hasattr(PPOConfig(), "colour")


LAST = {
    "args": "config",
    "processing_class": "tokenizer",
    "model": "policy",
    "ref_model": "reference_policy",
    "reward_model": "reward",
    "train_dataset": "prompts",
    "eval_dataset": "evaluation_prompts",
    "peft_config": "use_peft",
}


def line_of(call: Callable[..., Any], *positional: Any, **arguments: Any) -> str:
    with pytest.raises(ConfigError) as caught:
        call(*positional, **arguments)
    (line,) = str(caught.value).splitlines()
    return line


def test_trls_own_call_is_answered_by_one_line_with_our_name_for_each():
    model = tiny_model()
    line = line_of(PPOTrainer, value_model=model, **{**dict.fromkeys(LAST, model), "args": config()})
    assert line.startswith("PPOTrainer: ")
    for theirs, ours in LAST.items():
        assert re.search(rf"\b{theirs}: [^;]*{ours}", line), theirs
    assert "value_model:" not in line  # it is ours, too


def test_the_first_trainers_call_is_answered_likewise():
    line = line_of(PPOTrainer, config(), tiny_model(), None, word_tokenizer(), dataset=[], data_collator=list)
    assert "dataset: prompts" in line
    assert "data_collator: leave it out" in line


def test_an_unknown_argument_is_pythons_own_error():
    with pytest.raises(TypeError, match="colour"):
        PPOTrainer(config(), colour="red")


def test_arguments_of_the_step_api_are_answered_likewise(trainer: PPOTrainer):
    assert line_of(trainer.generate, query_tensor=QUERIES).startswith("generate: ")
    assert "generate_ref_response: " in line_of(trainer.generate, QUERIES, generate_ref_response=True)
    assert "response_masks: " in line_of(trainer.step, QUERIES, QUERIES, [0.0] * 4, response_masks=None)
    assert "columns_to_log: " in line_of(trainer.log_stats, {}, {}, [], columns_to_log=["query"])


def test_attributes_of_trls_trainers_are_answered_with_ours_which_are_there(trainer: PPOTrainer):
    arguments = {name for call in (PPOTrainer, trainer.generate) for name in inspect.signature(call).parameters}
    for theirs, ours in ARGUMENTS.items():
        with pytest.raises(AttributeError, match=rf"^PPOTrainer has no {theirs} \(here: {re.escape(ours)}\)$"):
            getattr(trainer, theirs)
        if re.fullmatch(r"[a-z_.]+", ours) and ours not in arguments:
            assert operator.attrgetter(ours)(trainer) is not None, theirs
    assert trainer.policy.device == trainer.state.learner.accelerator.device


def test_the_names_on_the_page_are_those_of_the_errors():
    names = re.findall(r"`(\w+)` is `(\w+)`", PAGE.partition("## The names of TRL's trainers")[2])
    assert len(names) > 5
    assert dict(names).items() <= ARGUMENTS.items()
