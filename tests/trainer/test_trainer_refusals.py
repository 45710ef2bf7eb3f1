"""Mistakes in a script that would give wrong results or fail late are refused in one line at the start."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import (
    AutoModelForCausalLM,
    BartConfig,
    BartForCausalLM,
    BertConfig,
    BertForSequenceClassification,
    CTRLConfig,
    CTRLForSequenceClassification,
    GPT2Config,
    GPT2ForSequenceClassification,
    GPT2ForTokenClassification,
    GPT2Model,
    Llama4ForCausalLM,
    Llama4TextConfig,
    RemBertConfig,
    RemBertForCausalLM,
)

from ppo_rlhf.core.errors import LaunchError, ModelError, TrainingError
from ppo_rlhf.models.loading import PretrainedHandle
from ppo_rlhf.models.trained_model import TrainedModel
from ppo_rlhf.training import PPOTrainer
from tests.tiny_models import tiny_model, word_tokenizer
from tests.trainer.test_trainer import (
    GOOD_STEP,
    PROMPTS,
    assert_same_bits,
    config,
    early_letters,
    repeatable,
    weights,
)


def trainer_of(policy: Any = None, **given: Any) -> PPOTrainer:
    settings = {name: given.pop(name) for name in list(given) if name not in ("reward", "prompts", "value_model")}
    given = {"reward": early_letters, "prompts": PROMPTS, **given}
    return PPOTrainer(config(**settings), tiny_model() if policy is None else policy, None, word_tokenizer(), **given)


@pytest.mark.parametrize("lost", ["./nowhere", "~/nowhere", "/no/where", "a/b/c", Path("org/name")])
@pytest.mark.parametrize("argument", ["policy", "reward", "value_model"])
def test_a_path_without_a_model_is_refused_before_another_model_is_looked_for(lost: str | Path, argument: str):
    """A missing path is refused before any request to the hub for the other models."""
    given = {"policy": "org/policy", "reward": "org/reward", "value_model": "org/critic", argument: lost}
    with pytest.raises(ModelError, match=f"^{lost}: "):
        trainer_of(**given)


@pytest.mark.parametrize(
    "environment",
    [{"OMPI_COMM_WORLD_SIZE": "2"}, {"ACCELERATE_MIXED_PRECISION": "no", "MASTER_ADDR": "127.0.0.1"}],
    ids=["Open MPI", "accelerate launch --cpu"],
)
def test_a_launch_that_would_train_each_process_alone_is_refused_with_the_command_for_scripts(environment, monkeypatch):
    for name in ("RANK", "LOCAL_RANK", "WORLD_SIZE"):
        monkeypatch.delenv(name, raising=False)
    for name, value in environment.items():
        monkeypatch.setenv(name, value)
    with pytest.raises(LaunchError, match=r"torchrun --nproc_per_node N script\.py"):
        trainer_of()


def compiled(model: Any) -> Any:
    model.compile(backend="eager")
    return model


def with_a_compiled_layer(model: Any) -> Any:
    compiled(model.model.layers[0])
    return model


@pytest.mark.parametrize("spoil", [compiled, with_a_compiled_layer])
def test_a_model_that_is_compiled_already_is_refused(spoil):
    for what, given in {
        "policy": {"policy": spoil(tiny_model())},
        "value model": {"value_model": spoil(tiny_model())},
    }.items():
        with pytest.raises(ModelError, match=rf"^PPOTrainer: the {what} is compiled; .*ppo\.compile=true"):
            trainer_of(**given)
    with pytest.raises(ModelError, match=r"policy .*OptimizedModule.*transformers"):
        trainer_of(torch.compile(tiny_model(), backend="eager"))


@pytest.mark.parametrize("switched_off", [torch.no_grad, torch.inference_mode])
def test_training_without_gradients_is_refused_at_the_start(switched_off):
    asked: list[int] = []
    trainer = trainer_of(reward=lambda completions: asked.append(1) or [0.0] * len(completions))
    asked.clear()
    with switched_off():
        with pytest.raises(TrainingError, match=r"^train: .*no_grad"):
            trainer.train()
        with pytest.raises(TrainingError, match=r"^step: .*no_grad"):
            trainer.step(**GOOD_STEP)
    assert (asked, trainer.state.progress.iteration) == ([], 0)


def test_a_model_that_was_made_without_gradients_is_refused():
    with torch.inference_mode():
        model = tiny_model()
    with pytest.raises(ModelError, match=r"policy .*torch\.inference_mode"):
        trainer_of(model)


class Interruption:
    """Stands in for `Learner.take_step`, and raises at one of its calls as Ctrl-C would."""

    def __init__(self, at: int) -> None:
        from ppo_rlhf.ppo.learner import Learner

        self._take_step, self._left = Learner.take_step, at

    def __call__(self, *arguments: Any) -> None:
        self._left -= 1
        if self._left == 0:
            raise KeyboardInterrupt
        self._take_step(*arguments)


def test_after_an_interrupted_update_nothing_trains_until_a_checkpoint_is_loaded(tmp_path: Path, monkeypatch):
    """The interruption comes before the third of the second iteration's four optimiser steps."""
    settings = {"save_interval": 1, "ema_decay": 0.9, "kl_controller": "adaptive", "kl_target": 1.0, "kl_horizon": 8.0}
    whole, trainer = trainer_of(**settings), trainer_of(**settings)
    whole.train()
    with monkeypatch.context() as patched:
        interruption = Interruption(at=7)
        patched.setattr("ppo_rlhf.ppo.learner.Learner.take_step", lambda *given: interruption(*given))
        with pytest.raises(KeyboardInterrupt):
            trainer.train(output_dir=tmp_path)
    for call in (trainer.train, lambda: trainer.step(**GOOD_STEP), lambda: trainer.save_checkpoint(tmp_path)):
        with pytest.raises(TrainingError, match="iteration 1"):
            call()
    trainer.train(resume_from_checkpoint=True, output_dir=tmp_path)
    assert repeatable(trainer.history) == repeatable(whole.history)
    assert_same_bits(weights(trainer.policy), weights(whole.policy))
    assert_same_bits(weights(trainer.state.learner.critic), weights(whole.state.learner.critic))


def test_an_interruption_outside_the_update_takes_nothing_away():
    def reward(completions: list[str]) -> list[float]:
        calls.append(1)
        if len(calls) == 2:
            raise KeyboardInterrupt
        return early_letters([], completions)

    calls: list[int] = []
    trainer, whole = trainer_of(reward=reward), trainer_of()
    with pytest.raises(KeyboardInterrupt):
        trainer.train()
    trainer.train()
    whole.train()
    assert_same_bits(weights(trainer.policy), weights(whole.policy))


SHAPE = {"vocab_size": 25, "hidden_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2, "num_labels": 1}


def gpt2(kind: Any, **given: Any) -> Any:
    return kind(GPT2Config(**SHAPE | given, n_inner=32))


def rembert(**given: Any) -> Any:
    widths = {"input_embedding_size": 16, "output_embedding_size": 16, "intermediate_size": 16}
    return RemBertForCausalLM(RemBertConfig(**SHAPE, **widths, bos_token_id=2, eos_token_id=3, **given))


def bart() -> Any:
    sides = {f"{side}_{name}": n for side in ("encoder", "decoder") for name, n in HALF_OF_BART.items()}
    return BartForCausalLM(BartConfig(vocab_size=25, d_model=16, bos_token_id=2, eos_token_id=3, **sides))


HALF_OF_BART = {"layers": 1, "attention_heads": 2, "ffn_dim": 16}
LLAMA4 = {"intermediate_size": 16, "intermediate_size_mlp": 16, "num_key_value_heads": 1, "head_dim": 8}


@pytest.mark.parametrize(
    ("make", "why"),
    [
        (bart, "is an encoder-decoder, or its base model gives no hidden states"),
        (lambda: Llama4ForCausalLM(Llama4TextConfig(**SHAPE, **LLAMA4)), "its base model gives no hidden states"),
        (rembert, "reads tokens that come later"),
        (lambda: gpt2(GPT2ForSequenceClassification), "has no language-modelling head"),
        (lambda: gpt2(GPT2ForTokenClassification), "has no language-modelling head"),
        (lambda: gpt2(GPT2Model), "has no language-modelling head"),
    ],
)
def test_a_policy_of_another_kind_is_refused_in_one_line(make, why):
    with pytest.raises(ModelError, match=f"^PPOTrainer: the policy.*{why}") as refused:
        trainer_of(make())
    assert "\n" not in str(refused.value)


def test_a_decoder_with_the_cache_of_an_encoder_decoder_trains():
    assert len(trainer_of(rembert(is_decoder=True)).train()) > 0


@pytest.mark.parametrize("kind", [type(tiny_model("gpt2")), GPT2ForTokenClassification, GPT2Model])
def test_a_reward_model_that_gives_no_text_one_score_is_refused_by_its_kind(kind):
    for labels in (1, 2):
        with pytest.raises(ModelError, match=f"num_labels=1; .*{kind.__name__}$"):
            trainer_of(reward=gpt2(kind, num_labels=labels))
    with pytest.raises(ModelError, match=r"num_labels=1; .* 2$"):
        trainer_of(reward=gpt2(GPT2ForSequenceClassification, num_labels=2))


@pytest.mark.parametrize(
    "kind", [(CTRLConfig, CTRLForSequenceClassification), (BertConfig, BertForSequenceClassification)]
)
def test_a_classifier_whose_head_the_critic_would_lose_is_refused(kind):
    """Both classes name their head `classifier`."""
    model = kind[1](kind[0](**SHAPE))
    with pytest.raises(ModelError, match=r"value model .*`score`.*num_labels=1"):
        trainer_of(value_model=model)


def test_a_backbone_alone_starts_the_critic():
    model = GPT2ForTokenClassification(GPT2Config(**SHAPE, intermediate_size=32))
    critic = trainer_of(value_model=model.base_model).state.learner.critic
    assert_same_bits(weights(critic.backbone), weights(model.base_model))
    assert not critic.value_head.weight.any()


@pytest.fixture
def folder_with_value_head(tmp_path: Path) -> tuple[str, torch.nn.Linear]:
    """A policy with the value head of TRL's AutoModelForCausalLMWithValueHead, which transformers does not load."""
    head = torch.nn.Linear(16, 1)
    TrainedModel(tiny_model(seed=3), word_tokenizer(), value_head=head).save(tmp_path / "policy")
    return str(tmp_path / "policy"), head


@pytest.mark.parametrize("what", ["policy", "value model"])
def test_an_object_starts_with_the_value_head_of_its_folder_as_the_path_does(folder_with_value_head, what, caplog):
    folder, head = folder_with_value_head
    model = AutoModelForCausalLM.from_pretrained(folder)
    trainer = trainer_of(model) if what == "policy" else trainer_of(value_model=model)
    assert_same_bits(weights(trainer.state.learner.critic.value_head), weights(head))
    assert_same_bits(weights(PPOTrainer(config(), folder).state.learner.critic.value_head), weights(head))
    own = [record.getMessage() for record in caplog.records if record.name.startswith("ppo_rlhf")]
    (line,) = [text for text in own if "v_head" in text]
    assert line.startswith(f"The value head (v_head) of the {what} is read from {folder}")


def test_the_value_head_is_read_after_loading_has_downloaded_it(folder_with_value_head, monkeypatch):
    """Before loading, the cache of a hub's model has no weights in which to find the head."""
    did: list[str] = []
    for name in ("causal_lm", "value_head"):
        method = getattr(PretrainedHandle, name)
        monkeypatch.setattr(
            PretrainedHandle, name, lambda *given, m=method, n=name, **more: did.append(n) or m(*given, **more)
        )
    PPOTrainer(config(), folder_with_value_head[0])
    assert did[:2] == ["causal_lm", "value_head"]


def test_an_object_whose_folder_is_gone_or_holds_no_weights_starts_with_a_new_value_head(
    folder_with_value_head, tmp_path
):
    model = AutoModelForCausalLM.from_pretrained(folder_with_value_head[0])
    for place in (tmp_path, tmp_path / "gone", "hub-id/never-loaded"):
        model.name_or_path = str(place)
        assert not trainer_of(model).state.learner.critic.value_head.weight.any()
