"""Supervised fine-tuning with TRL: the model learns, the returned model and metrics, and restored global state."""

import copy
import logging
import math
import random
from contextlib import contextmanager
from pathlib import Path

import numpy as np
import pandas as pd
import pytest
import torch
from transformers import GraniteConfig, GraniteForCausalLM, GraniteMoeConfig, GraniteMoeForCausalLM
from trl.trainer.utils import add_fused_lm_head

from ppo_rlhf.config import PPOConfig
from ppo_rlhf.core.errors import ConfigError, DataError, TrainingError
from ppo_rlhf.models.loading import PretrainedHandle
from ppo_rlhf.models.origins import Origin
from ppo_rlhf.passes.gradient_checkpointing import NAME
from ppo_rlhf.ppo.precision import make_accelerator
from ppo_rlhf.runtime import progress_display
from ppo_rlhf.supervised.demonstrations import IGNORED, TokenisedDemonstrations
from ppo_rlhf.supervised.optimisation import advice
from ppo_rlhf.supervised.sft import SupervisedFinetuningConfig, mean_token_loss, train_sft_policy
from ppo_rlhf.supervised.trl_support import run_sft_trainer
from tests.tiny_models import CHAT_TEMPLATE, END, save, tiny_model, word_tokenizer

SHAPE = {
    "hidden_size": 16,
    "intermediate_size": 24,
    "num_hidden_layers": 1,
    "num_attention_heads": 2,
    "max_position_embeddings": 16,
}
ROWS = TokenisedDemonstrations([[4, 5, END]], [[4, 5, END]])
TEXTS = pd.DataFrame({"text": ["a b c d", "b c d a", "c d", "d a b", "a b", "c d a b c"] * 4})
HELD_OUT = pd.DataFrame({"text": ["d a b c", "b c"]})


def config(**settings) -> SupervisedFinetuningConfig:
    defaults = {"num_train_epochs": 2, "learning_rate": 0.01, "per_device_train_batch_size": 4, "logging_steps": 1}
    return SupervisedFinetuningConfig(**{**defaults, "device": "cpu", **settings})


def scratch(**settings) -> SupervisedFinetuningConfig:
    return config(from_scratch=SHAPE, **settings)


def weights(model) -> dict[str, torch.Tensor]:
    return {name: tensor.clone() for name, tensor in model.state_dict().items()}


@pytest.fixture(scope="module")
def from_scratch():
    return train_sft_policy(None, TEXTS, HELD_OUT, scratch(num_train_epochs=8))


@pytest.mark.parametrize(("hidden_size", "heads"), [(18, 4), (20, 4)], ids=["no whole head", "an odd head"])
def test_a_width_that_does_not_fit_the_heads_is_refused(hidden_size, heads):
    shape = SHAPE | {"hidden_size": hidden_size, "num_attention_heads": heads}
    with pytest.raises(ConfigError, match="hidden_size"):
        config(from_scratch=shape)


@pytest.mark.parametrize("size", SHAPE)
def test_a_model_from_scratch_needs_each_of_its_sizes(size):
    with pytest.raises(ConfigError, match=rf"^supervised_finetuning.from_scratch.{size} is missing$"):
        config(from_scratch={name: value for name, value in SHAPE.items() if name != size})


@pytest.mark.parametrize("size", SHAPE)
def test_a_size_in_its_place_of_before_is_answered_with_its_place(size):
    with pytest.raises(ConfigError, match=rf"it is supervised_finetuning.from_scratch.{size}$"):
        config(**{size: 16})


def test_without_a_base_model_nothing_is_trained_unless_it_is_asked_for(tmp_path):
    with pytest.raises(ConfigError, match="base_model_path"):
        train_sft_policy(None, TEXTS, HELD_OUT, config())
    with pytest.raises(ConfigError, match="there is a base model"):
        train_sft_policy(PretrainedHandle(str(tmp_path)), TEXTS, HELD_OUT, scratch())


def test_a_model_from_scratch_learns_the_order_of_the_words(from_scratch):
    trained, history = from_scratch
    losses = [entry["sft/loss"] for entry in history]
    evaluated = [entry["sft/eval_loss"] for entry in history if "sft/eval_loss" in entry]
    assert losses[0] == pytest.approx(math.log(len(trained.tokenizer)), abs=0.3)  # uniform over the vocabulary
    assert evaluated[-1] < 0.7 * losses[0]
    logits = trained.model(torch.tensor([trained.tokenizer("a b c")["input_ids"]])).logits
    assert trained.tokenizer.decode(logits[0, -1].argmax()) == "d"


def test_metrics_come_by_optimiser_step_and_once_an_epoch(from_scratch):
    _, history = from_scratch
    assert [entry["step"] for entry in history] == list(range(1, 49))
    assert [entry["step"] for entry in history if "sft/eval_loss" in entry] == list(range(6, 49, 6))
    assert {key for entry in history for key in entry} == {"step", "sft/loss", "sft/learning_rate", "sft/eval_loss"}


def test_a_training_is_shown_while_it_runs(caplog):
    told = []

    @contextmanager
    def watch(total):
        with progress_display.watching("SFT", total) as report:
            yield lambda step, metrics: (told.append((step, total, *metrics)), report(step, metrics))

    with caplog.at_level(logging.INFO, logger="ppo_rlhf"):
        train_sft_policy(None, TEXTS, HELD_OUT, scratch(num_train_epochs=1, logging_steps=3), watch)
    logged = ("sft/loss", "sft/learning_rate")
    alone = [(step, 6) for step in (1, 2)], [(step, 6) for step in (4, 5)]
    assert told == [*alone[0], (3, 6, *logged), *alone[1], (6, 6, *logged), (6, 6, "sft/eval_loss")]
    assert caplog.messages[0].startswith("SFT step 3/6, loss ")
    assert "learning rate 0.00" in caplog.messages[0]
    assert caplog.messages[-1].startswith("SFT step 6/6, held-out loss ")


def test_a_model_from_scratch_is_saved_as_a_plain_directory(from_scratch, tmp_path):
    trained, _ = from_scratch
    save(tmp_path / "policy", trained.model, trained.tokenizer)
    handle = PretrainedHandle(str(tmp_path / "policy"))
    ids = torch.tensor([[3, 4, 5]])
    assert torch.equal(handle.causal_lm()(ids).logits, trained.model(ids).logits)
    assert handle.generation_config().eos_token_id == handle.tokenizer().eos_token_id == END - 1
    assert handle.config().use_cache is True
    assert handle.config().tie_word_embeddings is True


@pytest.mark.slow
def test_a_copy_of_the_trained_model_runs_its_own_weights(from_scratch):
    """TRL patches `forward` on the instance: a copy of the model would otherwise use the original's weights."""
    trained, _ = from_scratch
    duplicate = copy.deepcopy(trained.model)
    with torch.no_grad():
        for parameter in duplicate.parameters():
            parameter.zero_()
    ids = torch.tensor([[3, 4, 5]])
    assert not duplicate(ids).logits.any()
    assert trained.model(ids).logits.any()
    assert not trained.model.training


@pytest.mark.slow
def test_training_again_with_the_same_seed_gives_the_same_bits_and_another_seed_does_not():
    runs = [train_sft_policy(None, TEXTS, HELD_OUT, scratch(seed=seed, max_steps=3)) for seed in (1, 1, 2)]
    first, again, other = (weights(trained.model) for trained, _ in runs)
    assert all(torch.equal(first[name], again[name]) for name in first)
    assert not all(torch.equal(first[name], other[name]) for name in first)
    assert runs[0][1] == runs[1][1]


def test_a_base_model_is_fine_tuned_and_its_directory_is_only_read(tmp_path):
    base = save(tmp_path / "base", tiny_model("gpt2"), word_tokenizer(pad_token=None))
    before = {p.name: p.read_bytes() for p in Path(base).iterdir()}
    trained, history = train_sft_policy(PretrainedHandle(base), TEXTS, HELD_OUT, config(num_train_epochs=4))
    assert history[-1]["sft/eval_loss"] < 0.8 * history[0]["sft/loss"]
    assert {p.name: p.read_bytes() for p in Path(base).iterdir()} == before
    assert trained.tokenizer.get_vocab() == word_tokenizer().get_vocab()
    assert trained.tokenizer.pad_token == "<unk>"


def test_granites_experts_are_trained_without_a_loss_that_trl_cannot_compute_and_a_line_says_so(tmp_path, caplog):
    shape = {**SHAPE, "num_key_value_heads": 1, "num_local_experts": 4, "num_experts_per_tok": 2, "vocab_size": 25}
    ids = {"bos_token_id": None, "eos_token_id": END, "pad_token_id": None}
    base = save(tmp_path / "base", GraniteMoeForCausalLM(GraniteMoeConfig(**shape, **ids)))
    trained, history = train_sft_policy(PretrainedHandle(base), TEXTS, HELD_OUT, config())
    assert history[-1]["sft/eval_loss"] < history[0]["sft/loss"]
    assert trained.model.config.router_aux_loss_coef == GraniteMoeConfig(**shape).router_aux_loss_coef
    assert any("supervised_finetuning: GraniteMoeForCausalLM" in line for line in caplog.messages)


@pytest.mark.slow
def test_the_base_models_configurations_come_back_as_they_were(tmp_path):
    """Trainers align configurations with the tokenizer, which would drop this model's second end-of-text token."""
    base = tiny_model(eos_token_id=[END, 2])
    base.generation_config.eos_token_id = [END, 2]
    base.generation_config.top_p = 0.9
    base.generation_config.do_sample = True
    source = save(tmp_path / "base", base, word_tokenizer(eos_token="<s>"))
    settings = config(max_steps=2, gradient_checkpointing=True)
    trained, _ = train_sft_policy(PretrainedHandle(source), TEXTS, HELD_OUT, settings)
    assert trained.model.generation_config.eos_token_id == [END, 2]
    assert trained.model.generation_config.top_p == 0.9
    assert trained.model.config.eos_token_id == [END, 2]
    assert trained.model.config.pad_token_id is None
    assert trained.model.config.use_cache is True
    assert not getattr(trained.model, f"is_{NAME}")
    assert trained.tokenizer.eos_token == "<s>"


def test_only_completions_are_learnt_where_there_are_prompts(tmp_path, caplog):
    """The words of the prompts are random: if SFT learnt the prompts, the loss could not fall."""
    source = save(tmp_path / "base", tiny_model(), word_tokenizer(chat_template=CHAT_TEMPLATE))
    generator = random.Random(0)
    rows = [{"prompt": " ".join(generator.choices("abcdefgh", k=5)), "completion": " k l"} for _ in range(64)]
    frame = pd.DataFrame(rows)
    _, history = train_sft_policy(PretrainedHandle(source), frame, frame.head(8), config(num_train_epochs=3))
    assert history[-1]["sft/eval_loss"] < 0.1
    assert any(line.startswith("The demonstrations are plain texts") for line in caplog.messages)


@pytest.mark.slow
def test_the_process_is_left_as_it_was_and_nothing_is_told_to_the_hub(capfd, monkeypatch):
    monkeypatch.delenv("CI", raising=False)
    monkeypatch.setattr("trl.trainer.base_trainer.send_telemetry", lambda **_: pytest.fail("telemetry was sent"))
    random.seed(5), np.random.seed(5), torch.manual_seed(5)
    expected = random.random(), np.random.rand(), torch.rand(1).item()
    random.seed(5), np.random.seed(5), torch.manual_seed(5)
    train_sft_policy(None, TEXTS, HELD_OUT, scratch(max_steps=1))
    assert (random.random(), np.random.rand(), torch.rand(1).item()) == expected
    assert capfd.readouterr() == ("", "")


@pytest.mark.slow
def test_stages_of_different_precisions_follow_each_other():
    """accelerate has one state per process and refuses a second precision, but PPO creates another Accelerator."""
    ppo, cpu = PPOConfig(dtype="bfloat16"), torch.device("cpu")
    assert make_accelerator(ppo, cpu).mixed_precision == "bf16"
    train_sft_policy(None, TEXTS, HELD_OUT, scratch(max_steps=1, gradient_accumulation_steps=2))
    assert make_accelerator(ppo, cpu).mixed_precision == "bf16"
    train_sft_policy(None, TEXTS, HELD_OUT, scratch(max_steps=1, bf16=True))
    after = make_accelerator(PPOConfig(), cpu)
    assert (after.mixed_precision, after.sync_gradients, after.gradient_accumulation_steps) == ("no", True, 1)


def test_several_gpus_need_several_processes(monkeypatch):
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    with pytest.raises(ConfigError, match="CUDA_VISIBLE_DEVICES"):
        run_sft_trainer(tiny_model(), word_tokenizer(), ROWS, config(device="auto"), lambda model: {})


def test_a_loss_that_is_not_finite_stops_the_training():
    base = tiny_model()
    with torch.no_grad():
        base.lm_head.weight.fill_(math.nan)

    class Broken(PretrainedHandle):
        def causal_lm(self, dtype=torch.float32):
            return base

        def tokenizer(self):
            return word_tokenizer()

        def origin(self, role):
            return Origin("model", role, self.source)

    with pytest.raises(TrainingError, match=r"sft: .*loss .*nan .*step 1\..*learning_rate"):
        train_sft_policy(Broken("x"), TEXTS, HELD_OUT, config())
    with pytest.raises(TrainingError, match=r"sft: .*eval loss .*nan .*step \d+\..*learning_rate"):
        train_sft_policy(Broken("x"), TEXTS, HELD_OUT, config(logging_steps=1000))


@pytest.mark.parametrize("kind", ["llama", "gpt2"])
@pytest.mark.parametrize(
    "batch_size", [pytest.param(1, marks=pytest.mark.slow), pytest.param(2, marks=pytest.mark.slow), 3]
)
def test_the_held_out_loss_is_the_mean_over_all_learnt_tokens_whatever_the_batches(kind, batch_size):
    model = tiny_model(kind)
    rows = [[4, 5, 6, 7, 8, END], [8, END], [9, 10, 11, END]]
    learnt = [[IGNORED, IGNORED, 6, 7, IGNORED, END], [8, END], [9, 10, 11, END]]
    total, count = 0.0, 0
    for ids, labels in zip(rows, learnt, strict=True):
        logprobs = model(torch.tensor([ids])).logits[0].double().log_softmax(-1)
        total -= sum(logprobs[i, token].item() for i, token in enumerate(labels[1:]) if token != IGNORED)
        count += sum(token != IGNORED for token in labels[1:])
    add_fused_lm_head(model)
    found = mean_token_loss(model, TokenisedDemonstrations(rows, learnt), batch_size)
    assert found == pytest.approx(total / count, rel=1e-5)


@pytest.mark.parametrize("bf16", [False, pytest.param(True, marks=pytest.mark.slow)])
def test_the_held_out_loss_is_that_of_the_trained_model_with_scaled_logits_as_well(tmp_path, bf16):
    """Granite divides its logits; the trainer patches the model's `forward`, in bfloat16 if the settings say so."""
    model = GraniteForCausalLM(GraniteConfig(**tiny_model().config.to_diff_dict(), logits_scaling=4.0))
    with torch.no_grad():
        model.lm_head.weight.normal_(0.0, 3.0, generator=torch.Generator().manual_seed(0))
    source = save(tmp_path / "base", model)
    trained, history = train_sft_policy(PretrainedHandle(source), TEXTS, HELD_OUT, config(max_steps=1, bf16=bf16))
    losses = []
    for text in HELD_OUT["text"]:
        ids = torch.tensor([*word_tokenizer()(text)["input_ids"], END])
        with torch.no_grad():
            logits = trained.model(ids[None]).logits[0]
        losses.append(torch.nn.functional.cross_entropy(logits[:-1], ids[1:], reduction="none"))
    expected = float(torch.cat(losses).mean())
    assert history[-1]["sft/eval_loss"] == pytest.approx(expected, rel=1e-2 if bf16 else 1e-5)


def test_the_part_in_which_nothing_fits_is_named_before_anything_is_trained(monkeypatch, tmp_path):
    monkeypatch.setattr("ppo_rlhf.supervised.trl_support.run_sft_trainer", None)
    source = save(tmp_path / "base", tiny_model())
    short, long = (pd.DataFrame({"prompt": [text], "completion": [" d"]}) for text in ("a", "a b c"))
    for trained, held_out, name in ((short, long, "held-out"), (long, short, "training")):
        with pytest.raises(DataError, match=f"^{name} demonstrations: none of 1 .* within 3 tokens.*max_length"):
            train_sft_policy(PretrainedHandle(source), trained, held_out, config(max_length=3))


def test_a_learning_rate_for_tiny_models_meeting_a_large_one_is_remarked():
    assert advice("supervised_finetuning", config(learning_rate=6e-3), 170_000) == []
    assert advice("supervised_finetuning", config(learning_rate=1e-4), 3_000_000) == []
    (line,) = advice("supervised_finetuning", config(learning_rate=6e-3), 3_285_248)
    assert line.startswith("supervised_finetuning.learning_rate=0.006")
