"""The time that `kedro doctor` gives: arithmetic by hand, what is not timed, and when bfloat16 is recommended."""

import math

import pytest
import torch
from transformers import LlamaConfig, Qwen3Config

from ppo_rlhf.config import PPOConfig
from ppo_rlhf.preflight import run_time
from ppo_rlhf.preflight.run_time import PassTimes, Work

CPU = torch.device("cpu")
SETTINGS = {"total_episodes": 64, "per_device_train_batch_size": 4, "num_mini_batches": 2, "num_ppo_epochs": 3}
SETTINGS |= {"gradient_accumulation_steps": 2, "response_length": 20, "dtype": "float32"}


def architecture(layers=30):
    return LlamaConfig(
        hidden_size=8,
        intermediate_size=8,
        num_hidden_layers=layers,
        num_attention_heads=2,
        num_key_value_heads=2,
        vocab_size=16,
    )


def work(layers=30, **changes):
    return Work(**{"policy": architecture(layers), "prompt_length": 10, "decoded_rows": 4, **changes})


@pytest.fixture
def times(monkeypatch):
    """Each pass takes 1 s, and each layer adds a share of it; bfloat16 halves everything."""

    def fake(config, work, layers, device, deadline):
        half = 0.5 if config.dtype == "bfloat16" else 1.0
        return PassTimes(*(half * (1.0 + layers * share) for share in (0.1, 0.2, 0.3, 0.4)))

    monkeypatch.setattr(run_time, "_times", fake)


def test_the_time_of_all_layers_lies_on_the_line_through_a_few(times):
    found = run_time.time_passes(PPOConfig(**SETTINGS), work(), CPU, math.inf)
    assert found == pytest.approx((1 + 3.0, 1 + 6.0, 1 + 9.0, 1 + 12.0))


def test_a_model_of_few_layers_is_timed_whole(times):
    found = run_time.time_passes(PPOConfig(**SETTINGS), work(layers=4), CPU, math.inf)
    assert found == pytest.approx((1.4, 1.8, 2.2, 2.6))


@pytest.mark.parametrize("critic", ["shared", "separate"])
def test_an_iteration_is_the_sum_of_its_passes(critic):
    """Eight responses of 20 tokens after 10: two groups of decoding; by hand."""
    config = PPOConfig(**SETTINGS, value_model=critic)
    found = run_time.iteration_seconds(config, work(), PassTimes(1.0, 10.0, 100.0, 1000.0), 20)
    models = 1 if critic == "shared" else 2
    decoding = 8 * 10.0 / 3 + 2 * 20 * 1.0  # the prompts are a third of the tokens
    measuring = 8 * 10.0 * (1 + models)
    assert found == pytest.approx(decoding + measuring + models * (3 * 8 * 100.0 + 3 * 2 * 1000.0))


def test_a_beginning_of_all_prompts_is_counted_once_a_pass():
    """Nine of ten prompt tokens are common: two groups of decoding, and two micro-batches of four rows; by hand."""
    config = PPOConfig(**SETTINGS, value_model="shared")
    found = run_time.iteration_seconds(config, work(shared_length=9), PassTimes(1.0, 10.0, 100.0, 1000.0), 20)
    decoding = (8 * 1 + 2 * 9) / 30 * 10.0 + 2 * 20 * 1.0
    rows = (8 * 21 + 2 * 9) / 30
    assert found == pytest.approx(decoding + rows * 10.0 * 2 + 3 * rows * 100.0 + 3 * 2 * 1000.0)


def test_shorter_responses_take_less_of_everything_but_the_optimiser():
    config = PPOConfig(**SETTINGS, value_model="shared")
    found = run_time.iteration_seconds(config, work(), PassTimes(1.0, 10.0, 100.0, 1000.0), 5)
    assert found == pytest.approx(8 * 10.0 / 3 + 2 * 5 + 0.5 * (8 * 10.0 * 2 + 3 * 8 * 100.0) + 3 * 2 * 1000.0)


def test_bfloat16_is_recommended_where_it_is_faster(times):
    lines = list(run_time.describe(PPOConfig(**SETTINGS), work(), CPU))
    assert [level for level, _ in lines] == ["ok", "advice"]
    assert "for all 8, with responses of 10 to 20 tokens" in lines[0][1]
    assert lines[1][1] == "this CPU is 2.0 times faster in 16 bits: ppo.dtype=bfloat16 (other numbers)"


def test_bfloat16_is_not_recommended_to_those_who_have_it_or_where_it_is_slower(times, monkeypatch):
    assert len(list(run_time.describe(PPOConfig(**SETTINGS | {"dtype": "bfloat16"}), work(), CPU))) == 1
    monkeypatch.setattr(run_time, "_times", lambda *_: PassTimes(1.0, 1.0, 1.0, 1.0))
    assert len(list(run_time.describe(PPOConfig(**SETTINGS), work(), CPU))) == 1


@pytest.mark.parametrize(
    ("least", "most", "words"),
    [(3, 60, "3 to 60 s"), (60, 600, "1 to 10 min"), (3600, 9e3, "1 to 2.5 h"), (5e5, 9e5, "140 to 250 h")],
)
def test_times_are_given_in_one_unit(least, most, words):
    assert run_time._range(least, most) == words


def test_what_cannot_be_timed_says_why(monkeypatch):
    """A model of one layer in a billion, timing that takes longer than it may, and settings that need real weights."""

    def line(config, of):
        ((level, text),) = run_time.describe(config, of, CPU)
        assert level == "ok"
        return text

    config = PPOConfig(**SETTINGS)
    assert "4-bit weights cannot" in line(PPOConfig(**SETTINGS, load_in_4bit=True, use_peft=True), work())
    assert line(config, work(prompt_length=-30)).startswith("not timed: ")
    monkeypatch.setattr(run_time, "MOST_SECONDS", 0.0)
    assert line(config, work()) == "not timed: a few layers alone take longer than 0 s here"


def test_timing_ends_at_one_deadline_for_both_precisions(monkeypatch):
    now, calls = [0.0], list[float]()
    monkeypatch.setattr(run_time.time, "monotonic", lambda: now[0])

    def seconds(call, device):
        calls.append(now[0])
        now[0] += taken
        return 1.0

    monkeypatch.setattr(run_time, "_seconds", seconds)
    for taken, timed in ((3.0, 8 + 3), (2.0, 8 + 4), (1.0, 8 + 8), (5.0, 4), (20.0, 2)):
        now[0] = 0.0
        calls.clear()
        list(run_time.describe(PPOConfig(**SETTINGS), work(), CPU))
        assert (len(calls), max(calls) <= 30.0) == (timed, True), taken


@pytest.mark.parametrize("changes", [{}, {"use_peft": True}, {"gradient_checkpointing": True}, {"dtype": "bfloat16"}])
def test_passes_are_timed_and_change_neither_the_random_state_nor_the_configuration(changes):
    state, wanted = torch.random.get_rng_state(), work()
    found = run_time.time_passes(PPOConfig(**SETTINGS | changes), wanted, CPU, math.inf)
    assert min(found) > 0
    assert torch.equal(state, torch.random.get_rng_state())
    assert wanted.policy.num_hidden_layers == 30


def test_layer_types_are_cut_with_the_layers():
    config = Qwen3Config(num_hidden_layers=8, layer_types=["full_attention"] * 8)
    small = run_time.with_layers(config, 2)
    assert (small.num_hidden_layers, len(small.layer_types), len(config.layer_types)) == (2, 2, 8)
