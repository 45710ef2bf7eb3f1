"""Supervised fine-tuning through TRL: what is learnt, what comes back, and what is left as it was."""

import copy
import math
import random
from pathlib import Path

import numpy as np
import pandas as pd
import pytest
import torch
from accelerate import Accelerator
from accelerate.state import AcceleratorState
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves
from transformers import GraniteConfig, GraniteForCausalLM

from ppo_rlhf.core.errors import ConfigError, DataError, TrainingError
from ppo_rlhf.models.loading import PretrainedHandle
from ppo_rlhf.ppo import logprobs as scoring
from ppo_rlhf.training.supervised import sft
from ppo_rlhf.training.supervised.demonstrations import IGNORED, TokenisedDemonstrations
from ppo_rlhf.training.supervised.optimisation import advice
from ppo_rlhf.training.supervised.sft import SupervisedFinetuningConfig, mean_token_loss, train_sft_policy
from tests.tiny_models import END, KINDS, VOCABULARY, save, tiny_model, word_tokenizer

SHAPE = {
    "hidden_size": 16,
    "intermediate_size": 24,
    "num_hidden_layers": 1,
    "num_attention_heads": 2,
    "max_position_embeddings": 16,
}
TEXTS = pd.DataFrame({"text": ["a b c d", "b c d a", "c d", "d a b", "a b", "c d a b c"] * 4})
HELD_OUT = pd.DataFrame({"text": ["d a b c", "b c"]})


def config(**settings) -> SupervisedFinetuningConfig:
    defaults = {"num_train_epochs": 2, "learning_rate": 0.01, "per_device_train_batch_size": 4, "logging_steps": 1}
    return SupervisedFinetuningConfig(**{**defaults, **SHAPE, "device": "cpu", **settings})


def weights(model) -> dict[str, torch.Tensor]:
    return {name: tensor.clone() for name, tensor in model.state_dict().items()}


@pytest.fixture(scope="module")
def from_scratch():
    return train_sft_policy(None, TEXTS, HELD_OUT, config(num_train_epochs=8))


@pytest.mark.parametrize(("hidden_size", "heads"), [(18, 4), (20, 4)], ids=["no whole head", "an odd head"])
def test_a_width_that_does_not_fit_the_heads_is_refused(hidden_size, heads):
    with pytest.raises(ConfigError) as caught:
        config(hidden_size=hidden_size, num_attention_heads=heads)
    assert str(caught.value) == (
        f"supervised_finetuning.hidden_size={hidden_size} is not an even multiple of num_attention_heads={heads}"
    )


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
    assert {key for entry in history for key in entry} == {"step", "sft/loss", "sft/eval_loss"}


def test_a_model_from_scratch_is_saved_as_a_plain_directory(from_scratch, tmp_path):
    trained, _ = from_scratch
    save(tmp_path / "policy", trained.model, trained.tokenizer)
    handle = PretrainedHandle(str(tmp_path / "policy"))
    ids = torch.tensor([[3, 4, 5]])
    assert torch.equal(handle.causal_lm()(ids).logits, trained.model(ids).logits)
    assert handle.generation_config().eos_token_id == handle.tokenizer().eos_token_id == END - 1
    assert handle.config().use_cache is True
    assert handle.config().tie_word_embeddings is True


def test_a_copy_of_the_trained_model_runs_its_own_weights(from_scratch):
    """TRL patches `forward` on the object: left there, a copy would run the original's weights."""
    trained, _ = from_scratch
    duplicate = copy.deepcopy(trained.model)
    with torch.no_grad():
        for parameter in duplicate.parameters():
            parameter.zero_()
    ids = torch.tensor([[3, 4, 5]])
    assert not duplicate(ids).logits.any()
    assert trained.model(ids).logits.any()
    assert not trained.model.training


def test_training_again_with_the_same_seed_gives_the_same_bits_and_another_seed_does_not():
    runs = [train_sft_policy(None, TEXTS, HELD_OUT, config(seed=seed)) for seed in (1, 1, 2)]
    first, again, other = (weights(trained.model) for trained, _ in runs)
    assert all(torch.equal(first[name], again[name]) for name in first)
    assert not all(torch.equal(first[name], other[name]) for name in first)
    assert runs[0][1] == runs[1][1]


def test_a_base_model_is_fine_tuned_and_its_directory_left_alone(tmp_path):
    base = save(tmp_path / "base", tiny_model("gpt2"), word_tokenizer(pad_token=None))
    before = {p.name: p.read_bytes() for p in Path(base).iterdir()}
    trained, history = train_sft_policy(PretrainedHandle(base), TEXTS, HELD_OUT, config(num_train_epochs=4))
    assert history[-1]["sft/eval_loss"] < 0.8 * history[0]["sft/loss"]
    assert {p.name: p.read_bytes() for p in Path(base).iterdir()} == before
    assert trained.tokenizer.get_vocab() == word_tokenizer().get_vocab()
    assert trained.tokenizer.pad_token == "<unk>"


def test_the_base_models_configurations_come_back_as_they_were(tmp_path):
    """Trainers align them with the tokenizer, which would drop this model's second end of text."""
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
    assert not trained.model.is_activation_checkpointing
    assert trained.tokenizer.eos_token == "<s>"


def test_only_completions_are_learnt_where_there_are_prompts(tmp_path):
    """The prompts' next words are drawn at random: learnt too, they would hold the loss up."""
    source = save(tmp_path / "base", tiny_model())
    generator = random.Random(0)
    rows = [{"prompt": " ".join(generator.choices("abcdefgh", k=5)), "completion": " k l"} for _ in range(64)]
    frame = pd.DataFrame(rows)
    _, history = train_sft_policy(PretrainedHandle(source), frame, frame.head(8), config(num_train_epochs=3))
    assert history[-1]["sft/eval_loss"] < 0.1


def test_the_process_is_left_as_it_was(tmp_path, capfd):
    random.seed(5), np.random.seed(5), torch.manual_seed(5)
    expected = random.random(), np.random.rand(), torch.rand(1).item()
    random.seed(5), np.random.seed(5), torch.manual_seed(5)
    train_sft_policy(None, TEXTS, HELD_OUT, config(max_steps=1))
    assert (random.random(), np.random.rand(), torch.rand(1).item()) == expected
    assert capfd.readouterr() == ("", "")


def test_an_accelerator_of_another_precision_neither_stops_training_nor_is_lost():
    """accelerate keeps one state a process and refuses a second precision."""
    AcceleratorState._reset_state(True)
    mine = Accelerator(cpu=True, mixed_precision="bf16")
    train_sft_policy(None, TEXTS, HELD_OUT, config(max_steps=1))
    assert mine.mixed_precision == "bf16"
    assert AcceleratorState().mixed_precision == "bf16"
    AcceleratorState._reset_state(True)


def test_nothing_is_told_to_the_hub(monkeypatch):
    def told(*args, **kwargs):
        raise AssertionError("telemetry was sent")

    monkeypatch.delenv("CI", raising=False)
    monkeypatch.setattr("trl.trainer.base_trainer.send_telemetry", told)
    train_sft_policy(None, TEXTS, HELD_OUT, config(max_steps=1))


def test_a_loss_that_is_not_finite_stops_the_training():
    base = tiny_model()
    with torch.no_grad():
        base.lm_head.weight.fill_(math.nan)

    class Broken(PretrainedHandle):
        def causal_lm(self, dtype=torch.float32):
            return base

        def tokenizer(self):
            return word_tokenizer()

    with pytest.raises(TrainingError, match=r"sft: the loss is nan at step 1\. Lower learning_rate"):
        train_sft_policy(Broken("x"), TEXTS, HELD_OUT, config())
    with pytest.raises(TrainingError, match=r"sft: the eval loss is nan at step \d+\. Lower learning_rate"):
        train_sft_policy(Broken("x"), TEXTS, HELD_OUT, config(logging_steps=1000))


def test_the_loss_is_the_mean_over_all_learnt_tokens():
    """A model of zeros is uniform: log V a token, whatever the lengths; batches weigh by their tokens."""
    model = tiny_model()
    with torch.no_grad():
        model.lm_head.weight.zero_()
    rows = TokenisedDemonstrations([[4, 5, 6, 7, END], [8, END]], [[IGNORED] * 3 + [7, END], [8, END]])
    for batch_size in (1, 2):
        assert mean_token_loss(model, rows, batch_size) == pytest.approx(math.log(len(VOCABULARY)), rel=1e-6)


def test_the_loss_does_not_depend_on_the_batches():
    model = tiny_model("gpt2").double()
    ids = [[4, 5, 6, 7, END], [8, END], [9, 10, 11, END]]
    rows = TokenisedDemonstrations(ids, ids)
    total, count = 0.0, 0
    for row in ids:
        logprobs = model(torch.tensor([row])).logits[0].log_softmax(-1)
        total -= sum(float(logprobs[i, token].detach()) for i, token in enumerate(row[1:]))
        count += len(row) - 1
    for batch_size in (1, 2, 3):
        assert mean_token_loss(model, rows, batch_size) == pytest.approx(total / count, rel=1e-6)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("held", [2**24, 5 * len(VOCABULARY), len(VOCABULARY)])
def test_the_loss_is_the_cross_entropy_of_padded_rows_however_few_logits_are_held(kind, held, monkeypatch):
    monkeypatch.setattr(scoring, "LOGITS_HELD", held)
    model = tiny_model(kind).double()
    rows = [[4, 5, 6, 7, 8, END], [8, END], [9, 10, 11, END]]
    learnt = [[IGNORED, IGNORED, 6, 7, IGNORED, END], [8, END], [9, 10, 11, END]]
    ids, labels, mask = (
        torch.tensor([row + [filler] * (6 - len(row)) for row in table])
        for table, filler in ((rows, 0), (learnt, IGNORED), ([[1] * len(row) for row in rows], 0))
    )
    with torch.no_grad():
        logits = model(input_ids=ids, attention_mask=mask).logits[:, :-1]
        expected = torch.nn.functional.cross_entropy(logits.flatten(0, 1), labels[:, 1:].flatten())  # -100 is left out
    found = mean_token_loss(model, TokenisedDemonstrations(rows, learnt), 3)
    assert found == pytest.approx(float(expected), rel=1e-9)


class Largest(TorchDispatchMode):
    """Notes the most numbers that a tensor had which an operation gave."""

    numbers = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        result = func(*args, **(kwargs or {}))
        tensors = [leaf for leaf in tree_leaves(result) if isinstance(leaf, torch.Tensor)]
        self.numbers = max([self.numbers, *(tensor.numel() for tensor in tensors)])
        return result


def test_the_logits_of_a_batch_are_never_held_together(monkeypatch):
    rows, width, vocabulary, together = 4, 16, 4096, 8
    monkeypatch.setattr(scoring, "LOGITS_HELD", together * vocabulary)
    model = tiny_model(vocab_size=vocabulary)
    ids = [[(7 * row + token) % vocabulary for token in range(width)] for row in range(rows)]
    demonstrations = TokenisedDemonstrations(ids, ids)
    mean_token_loss(model, demonstrations, rows)  # the first time it asks the model what it can
    with Largest() as largest:
        mean_token_loss(model, demonstrations, rows)
    assert largest.numbers == model.lm_head.weight.numel() == 2 * together * vocabulary < rows * width * vocabulary / 3


@pytest.mark.parametrize("bf16", [False, True])
def test_logits_that_the_model_scales_are_evaluated_so_under_the_trainers_forward(tmp_path, bf16):
    """Granite divides its logits; the trainer puts a forward of its own on the model, in bfloat16 if that is asked."""
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


@pytest.mark.parametrize("bf16", [False, True])
def test_the_evaluation_computes_in_the_precision_of_the_training(monkeypatch, bf16):
    seen = []

    def watched(*_):
        seen.append(torch.is_autocast_enabled("cpu") and torch.get_autocast_dtype("cpu") == torch.bfloat16)
        return 1.0

    monkeypatch.setattr(sft, "mean_token_loss", watched)
    train_sft_policy(None, TEXTS, HELD_OUT, config(max_steps=1, bf16=bf16))
    assert seen == [bf16]


def test_the_part_in_which_nothing_fits_is_named_before_anything_is_trained(monkeypatch, tmp_path):
    monkeypatch.setattr("ppo_rlhf.training.supervised.trl_support.run_sft_trainer", None)
    source = save(tmp_path / "base", tiny_model())
    short, long = (pd.DataFrame({"prompt": [text], "completion": [" d"]}) for text in ("a", "a b c"))
    for trained, held_out, name in ((short, long, "held-out"), (long, short, "training")):
        with pytest.raises(DataError, match=f"^{name} demonstrations: none of 1 has a token to learn within 3 tokens"):
            train_sft_policy(PretrainedHandle(source), trained, held_out, config(max_length=3))


def test_a_learning_rate_for_tiny_models_meeting_a_large_one_is_remarked():
    assert advice("supervised_finetuning", config(learning_rate=6e-3), 170_000) == []
    assert advice("supervised_finetuning", config(learning_rate=1e-4), 3_000_000) == []
    (line,) = advice("supervised_finetuning", config(learning_rate=6e-3), 3_285_248)
    assert line.startswith("supervised_finetuning.learning_rate=0.006 suits models of less than 1 M parameters")


def test_an_unknown_setting_is_named_with_the_nearest():
    with pytest.raises(ConfigError, match=r"supervised_finetuning.learning_rat .* Did you mean `learning_rate`\?"):
        config(learning_rat=1.0)
