"""Reward modelling with TRL: the model learns a rule, the returned model and metrics, and when the run stops."""

import logging
import random
import re

import numpy as np
import pandas as pd
import pytest
import torch
from scipy.stats import binom
from transformers import pipeline

from ppo_rlhf.core.errors import TrainingError
from ppo_rlhf.models.loading import PretrainedHandle
from ppo_rlhf.models.reward_model import CausalLMRewardModel
from ppo_rlhf.rewards.rendering import conversation_ids
from ppo_rlhf.supervised import reward_training
from ppo_rlhf.supervised.preferences import tokenise_preferences
from ppo_rlhf.supervised.reward_training import (
    RELIABLE_ACCURACY,
    RewardModellingConfig,
    _check_accuracy,
    accuracy_interval,
    normalise_scores,
    pair_accuracy,
    split_pairs,
    train_reward_model,
)
from tests.tiny_models import CHAT_TEMPLATE, KINDS, save, tiny_model, word_tokenizer

CLASSES = {
    "llama": "LlamaForSequenceClassification",
    "gpt2": "GPT2ForSequenceClassification",
    "bitnet": "CausalLMRewardModel",
}


def config(**settings) -> RewardModellingConfig:
    defaults = {
        "num_train_epochs": 6,
        "learning_rate": 0.01,
        "per_device_train_batch_size": 16,
        "logging_steps": 1,
        "held_out_share": 0.25,
        "device": "cpu",
    }
    return RewardModellingConfig(**{**defaults, **settings})


def pairs(count: int = 128, seed: int = 0, prompts: bool = True) -> pd.DataFrame:
    """Pairs whose chosen text has more of the words a, b, c than the rejected text."""
    generator = random.Random(seed)
    rows = []
    for row in range(count):
        good = generator.choices("abc", k=4) + generator.choices("defgh", k=1)
        bad = generator.choices("abc", k=1) + generator.choices("defgh", k=4)
        generator.shuffle(good), generator.shuffle(bad)
        prompt = f"{'ijkl'[row % 4]} {'mnop'[row // 4 % 4]} " if prompts else ""
        rows.append({"prompt": prompt, "chosen": " ".join(good), "rejected": " ".join(bad)})
    return tokenise_preferences(pd.DataFrame(rows), word_tokenizer())


@pytest.fixture(scope="module")
def policies(tmp_path_factory) -> dict[str, PretrainedHandle]:
    folder = tmp_path_factory.mktemp("policies")
    return {
        kind: PretrainedHandle(save(folder / kind, tiny_model(kind), word_tokenizer(pad_token=None))) for kind in KINDS
    }


@pytest.fixture(scope="module")
def two_epochs(policies):
    return train_reward_model(policies["llama"], pairs(), config(num_train_epochs=2))


@pytest.mark.parametrize("kind", [*KINDS[:1], *(pytest.param(case, marks=pytest.mark.slow) for case in KINDS[1:])])
def test_a_simple_rule_is_learnt_by_every_architecture(policies, kind):
    trained, history = train_reward_model(policies[kind], pairs(), config())
    assert type(trained.model).__name__ == CLASSES[kind]
    assert history[0]["reward_model/loss"] == pytest.approx(0.69, abs=0.35)  # log 2 before anything is learnt
    assert history[-1]["reward_model/eval_accuracy"] >= 0.9


def test_metrics_come_by_optimiser_step_and_once_an_epoch(two_epochs):
    _, history = two_epochs
    steps = [entry["step"] for entry in history]
    assert steps == list(range(1, 13))  # 96 pairs of 12 prompts, 16 a step
    assert [e["step"] for e in history if "reward_model/eval_accuracy" in e] == [6, 12]
    assert {key for e in history for key in e} == {
        *("step", "reward_model/loss", "reward_model/learning_rate", "reward_model/eval_accuracy")
    }


def test_the_last_accuracy_is_that_of_the_saved_model_over_all_held_out_pairs(two_epochs, policies, tmp_path):
    trained, history = two_epochs
    handle = PretrainedHandle(save(tmp_path / "reward", trained.model, trained.tokenizer))
    model = handle.reward_model()
    _, held_out = split_pairs(pairs(), config())
    right = [
        float(model(torch.tensor([chosen])).logits > model(torch.tensor([rejected])).logits)
        for chosen, rejected in zip(held_out["chosen_ids"], held_out["rejected_ids"], strict=True)
    ]
    assert history[-1]["reward_model/eval_accuracy"] == pytest.approx(sum(right) / len(right))
    assert handle.config().held_out_accuracy == history[-1]["reward_model/eval_accuracy"]
    assert handle.config().trained_from == policies["llama"].fingerprint()


def test_scores_of_the_training_responses_have_mean_zero_and_deviation_one(two_epochs, policies, tmp_path):
    trained, _ = two_epochs
    plain, _ = train_reward_model(policies["llama"], pairs(), config(num_train_epochs=2, normalise=False))
    rows, _ = split_pairs(pairs(), config())
    sequences = [*rows["chosen_ids"], *rows["rejected_ids"]]
    with torch.no_grad():
        scores, raw = (
            torch.cat([model(torch.tensor([ids])).logits[:, 0] for ids in sequences])
            for model in (
                PretrainedHandle(save(tmp_path / name, each.model, each.tokenizer)).reward_model()
                for name, each in {"normalised": trained, "plain": plain}.items()
            )
        )
    assert float(scores.mean()) == pytest.approx(0.0, abs=1e-4)
    assert float(scores.std()) == pytest.approx(1.0, abs=1e-4)
    torch.testing.assert_close(scores, (raw - raw.mean()) / raw.std(), rtol=1e-3, atol=1e-4)


def test_the_card_says_data_accuracy_with_its_interval_and_training(two_epochs):
    """With 32 held-out pairs and the share p right, the interval is Agresti and Coull's (statsmodels' formula)."""
    trained, history = two_epochs
    _, held_out = split_pairs(pairs(), config())
    share, z2, number = history[-1]["reward_model/eval_accuracy"], 1.959964**2, len(held_out)
    centre = (share * number + z2 / 2) / (number + z2)
    half = (z2 * centre * (1 - centre) / (number + z2)) ** 0.5
    low, high = max(0.0, centre - half), min(1.0, centre + half)
    interval = f"{share:.1%} of {number} held-out pairs are in the right order (95 % interval {low:.1%} to {high:.1%})"
    assert trained.model.config.held_out_interval == pytest.approx([low, high])
    for words in (
        "- Data: 96 pairs of `preferences`",
        interval,
        "2 epochs, 16 pairs per step, AdamW, peak learning rate 0.01",
    ):
        assert words in trained.card


@pytest.mark.parametrize("kind", ["llama", pytest.param("bitnet", marks=pytest.mark.slow)])
def test_the_code_on_the_card_prints_the_score_that_ppo_uses(policies, kind, tmp_path, caplog):
    with caplog.at_level(logging.INFO, logger="ppo_rlhf"):
        trained, _ = train_reward_model(policies[kind], pairs(), config(max_steps=1, minimum_accuracy=0.0))
    own = kind == "bitnet"
    assert own == ("`import ppo_rlhf.models.reward_model`" in caplog.text)
    trained.save(tmp_path)
    (code,) = re.findall(r"```python\n(.*?)```", (tmp_path / "README.md").read_text(), re.DOTALL)
    assert own == ("import ppo_rlhf.models.reward_model  # transformers has no sequence classifier" in code)
    printed: list[float] = []
    code = code.replace("path or hub id of this model", str(tmp_path)).replace("A prompt and its response", "a b c ")
    exec(code, {"print": printed.append})
    ids = torch.tensor([[4, 5, 6, 3]])
    assert printed == [pytest.approx(PretrainedHandle(str(tmp_path)).reward_model()(ids).logits.item(), abs=1e-6)]


def test_the_card_shows_the_score_of_a_chat_where_there_is_a_template(tmp_path):
    tokenizer = word_tokenizer(pad_token=None)
    tokenizer.chat_template = CHAT_TEMPLATE
    policy = PretrainedHandle(save(tmp_path / "policy", tiny_model("llama"), tokenizer))
    trained, _ = train_reward_model(policy, pairs(), config(max_steps=1, minimum_accuracy=0.0))
    trained.save(tmp_path / "reward")
    (code,) = re.findall(r"```python\n(.*?)```", (tmp_path / "reward" / "README.md").read_text(), re.DOTALL)
    printed: list[float] = []
    code = code.replace("path or hub id of this model", str(tmp_path / "reward")).replace("# inputs =", "inputs =")
    chat = [{"role": "user", "content": "a b"}, {"role": "assistant", "content": "c"}]
    exec(code, {"print": printed.append, "chat": chat})
    ids = torch.tensor([conversation_ids(chat, tokenizer, "a test")])
    model = PretrainedHandle(str(tmp_path / "reward")).reward_model()
    assert printed == [pytest.approx(model(ids).logits.item(), abs=1e-6)]


def test_others_pad_the_saved_model_on_the_right_where_gpt2s_positions_are_those_of_its_classifier(policies, tmp_path):
    trained, _ = train_reward_model(policies["gpt2"], pairs(), config(max_steps=1, minimum_accuracy=0.0))
    trained.save(tmp_path)
    scorer = pipeline("text-classification", model=str(tmp_path))
    texts = ["a b c d e </s>", "f </s>"]
    together, alone = scorer(texts, batch_size=2), [scorer(text)[0] for text in texts]
    assert [row["score"] for row in together] == pytest.approx([row["score"] for row in alone], abs=1e-5)


@pytest.mark.gpu
def test_on_a_gpu_all_scores_are_computed_there_and_the_model_comes_back(policies, monkeypatch):
    score, devices = reward_training.score_sequences, set()

    def watched(model, *rest):
        devices.add(model.device.type)
        return score(model, *rest)

    monkeypatch.setattr(reward_training, "score_sequences", watched)
    trained, _ = train_reward_model(policies["llama"], pairs(), config(device="cuda"))
    assert devices == {"cuda"}
    assert trained.model.device.type == "cpu"


@pytest.mark.slow
def test_an_accuracy_below_the_minimum_stops_the_run(policies):
    mislabelled = pairs().rename(columns={"chosen_ids": "rejected_ids", "rejected_ids": "chosen_ids"})
    frame = pd.concat([pairs(64), mislabelled.tail(64)], ignore_index=True)  # half of the labels are wrong
    with pytest.raises(TrainingError, match=r"minimum_accuracy=0\.99"):
        train_reward_model(policies["llama"], frame, config(num_train_epochs=1, minimum_accuracy=0.99))


def test_an_accuracy_by_few_pairs_is_no_warning_and_pairs_longer_than_the_context_are_left_out(policies, caplog):
    coin = pairs(128)
    swap = coin.index % 2 == 0
    columns = ["chosen_ids", "rejected_ids"]
    coin.loc[swap, columns] = coin.loc[swap, columns[::-1]].to_numpy()
    coin.at[0, "chosen_ids"] = list(range(4, 20)) * 3
    with caplog.at_level(logging.INFO, logger="ppo_rlhf"):
        train_reward_model(policies["llama"], coin, config(num_train_epochs=1, minimum_accuracy=0.0))
    assert "1 of 128 pairs are longer than 32 tokens" in caplog.text
    assert "of 32 held-out pairs in the right order: too few pairs to tell whether that is above 65 %." in caplog.text


@pytest.mark.parametrize(
    ("accuracy", "number", "level", "said"),
    [
        (
            0.5,
            8,
            logging.INFO,
            "puts 50.0% (95 % interval 21.5% to 78.5%) of 8 held-out pairs in the right order: too few",
        ),
        (0.875, 8, logging.INFO, "too few pairs to tell whether that is above 65 %"),
        (
            0.6,
            1000,
            logging.WARNING,
            "60.0% (95 % interval 56.9% to 63.0%) of 1000 held-out pairs in the right order. Below 65 %",
        ),
        (0.75, 1000, None, ""),
    ],
)
def test_a_reward_model_is_called_unreliable_only_for_certain(accuracy, number, level, said, caplog):
    with caplog.at_level(logging.INFO, logger="ppo_rlhf"):
        _check_accuracy(accuracy_interval(accuracy, number), number, 0.5)
    assert [record.levelno for record in caplog.records] == ([] if level is None else [level])
    assert said in caplog.text


def test_few_held_out_pairs_rarely_warn_of_a_reliable_reward_model(caplog):
    """Of models that are right on 65 % of all pairs, half were warned of; of 8 pairs 3 decide between 50 and 87.5 %."""
    rng, warned = np.random.default_rng(0), 0
    for number in (8, 24, 100, 400):
        for right in rng.binomial(number, 0.65, 500):
            warned += accuracy_interval(right / number, number).high < RELIABLE_ACCURACY
    assert warned <= binom.ppf(0.999, 2000, 0.05)


def test_all_pairs_of_a_prompt_go_to_one_side():
    trained, held_out = split_pairs(pairs(128), config())
    assert set(trained["prompt"]).isdisjoint(held_out["prompt"])
    assert (trained["prompt"].nunique(), held_out["prompt"].nunique()) == (12, 4)
    assert len(trained) + len(held_out) == 128


@pytest.mark.parametrize("chats", [False, True], ids=["texts", "chats that are not written out yet"])
def test_copies_of_a_pair_without_a_prompt_go_to_one_side_and_are_held_out_once(chats):
    sides = {"chosen": [f"good {row % 20}" for row in range(60)], "rejected": [f"bad {row % 10}" for row in range(60)]}
    if chats:
        sides = {side: [[{"role": "user", "content": text}] for text in texts] for side, texts in sides.items()}
    trained, held_out = split_pairs(pd.DataFrame({"prompt": "", **sides}), config())
    trained, held_out = (part["chosen"].map(str).tolist() for part in (trained, held_out))
    assert set(trained).isdisjoint(held_out)
    assert (len(trained), len(held_out), len(set(held_out))) == (45, 5, 5)


def test_the_accuracy_counts_ties_half():
    assert pair_accuracy(torch.tensor([1.0, 2.0, 3.0, 0.0]), torch.tensor([0.0, 2.0, 4.0, 5.0])) == 0.375


def test_equal_scores_cannot_be_normalised():
    model = CausalLMRewardModel.from_causal_lm(tiny_model())
    with pytest.raises(TrainingError, match=r"deviation 0\.0"):
        normalise_scores(model, torch.ones(4))
    with pytest.raises(TrainingError, match="deviation nan"):
        normalise_scores(model, torch.tensor([1.0, float("nan")]))
