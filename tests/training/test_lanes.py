"""Two passes at the same time: what is called where, on how many threads, and that a run's numbers stay."""

import math
import threading
import time
from concurrent.futures import wait
from functools import partial

import pytest
import torch
from torch.testing import assert_close

from ppo_rlhf.core.errors import ConfigError
from ppo_rlhf.models.own_configurations import keep_apart
from ppo_rlhf.training import lanes, scoring
from ppo_rlhf.training.config import PPOConfig
from ppo_rlhf.training.config.model_rules import device_problems
from ppo_rlhf.training.experience import estimate_advantages, score_responses, shape_rewards
from ppo_rlhf.training.lanes import (
    FEW_TOKENS,
    MIDDLING,
    SMALL,
    most_tokens_side_by_side,
    side_by_side,
)
from ppo_rlhf.training.optimisation.update import optimise
from ppo_rlhf.training.state import TrainingState

TIMED = ("time/", "throughput/", "memory/")


@pytest.fixture
def threads():
    """Set torch's number of threads; it is as before when the test is over."""
    before = torch.get_num_threads()
    yield torch.set_num_threads
    torch.set_num_threads(before)


def test_both_are_called_each_on_half_of_the_threads(threads):
    threads(4)
    meeting = threading.Barrier(2, timeout=20)  # passed only if both are running

    def call() -> tuple[int, int]:
        meeting.wait()
        return threading.get_ident(), torch.get_num_threads()

    (first_thread, first_threads), (second_thread, second_threads) = side_by_side(call, call)
    assert first_thread == threading.get_ident() != second_thread
    assert (first_threads, second_threads) == (2, 2)
    assert torch.get_num_threads() == 4


@pytest.mark.parametrize(("all_of_them", "each"), [(5, 2), (3, 1), (1, 1)])
def test_what_cannot_be_halved_is_computed_all_the_same_on_as_many_threads_in_both(threads, all_of_them, each):
    threads(all_of_them)
    assert side_by_side(torch.get_num_threads, torch.get_num_threads) == (each, each)
    assert torch.get_num_threads() == all_of_them


def test_without_two_lanes_one_is_called_after_the_other_in_this_thread():
    called = []
    found = side_by_side(
        lambda: called.append(("first", threading.get_ident(), torch.get_num_threads())),
        lambda: called.append(("second", threading.get_ident(), torch.get_num_threads())),
        at_once=False,
    )
    here = threading.get_ident(), torch.get_num_threads()
    assert called == [("first", *here), ("second", *here)]
    assert found == (None, None)


@pytest.mark.parametrize("enabled", [True, False])
def test_gradients_are_computed_in_both_or_in_none(enabled):
    with torch.set_grad_enabled(enabled):
        assert side_by_side(torch.is_grad_enabled, torch.is_grad_enabled) == (enabled, enabled)


@pytest.mark.parametrize("error", [ValueError("first"), KeyboardInterrupt()])
def test_what_the_first_raises_is_raised_when_the_second_has_ended(error):
    threads_before, ended = torch.get_num_threads(), []

    def second() -> None:
        time.sleep(0.2)
        ended.append(True)

    def first() -> None:
        raise error

    with pytest.raises(type(error)):
        side_by_side(first, second)
    assert ended == [True]
    assert torch.get_num_threads() == threads_before
    assert side_by_side(lambda: 1, lambda: 2) == (1, 2)  # and the next ones run as ever


@pytest.fixture
def interrupt(monkeypatch):
    """Have the first so many waits for the second lane interrupted, as Ctrl-C does."""

    def set_up(waits: int) -> None:
        left = [KeyboardInterrupt() for _ in range(waits)]

        def interrupted(futures):
            if left:
                raise left.pop()
            return wait(futures)

        monkeypatch.setattr("ppo_rlhf.training.lanes.wait", interrupted)

    return set_up


def test_an_interrupt_while_the_second_is_waited_for_is_raised_when_that_has_ended(threads, interrupt):
    threads(4)
    interrupt(1)
    ended = []

    def second() -> None:
        time.sleep(0.2)
        ended.append(True)

    with pytest.raises(KeyboardInterrupt):
        side_by_side(lambda: None, second)
    assert ended == [True]
    assert torch.get_num_threads() == 4


@pytest.mark.parametrize("first_is_interrupted", [False, True])
def test_a_second_interrupt_is_raised_at_once_and_leaves_all_threads_too(threads, interrupt, first_is_interrupted):
    """A run's second signal stops at once (`runner.signals`), whatever hangs."""
    threads(4)
    interrupt(1 if first_is_interrupted else 2)
    go_on, running = threading.Event(), []

    def second() -> None:
        running.append(True)
        go_on.wait(20)
        running.clear()

    def first() -> None:
        while not running:
            time.sleep(0.01)
        if first_is_interrupted:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        side_by_side(first, second)
    assert running == [True]
    assert torch.get_num_threads() == 4
    go_on.set()
    assert side_by_side(lambda: 1, lambda: 2) == (1, 2)
    assert torch.get_num_threads() == 4


def test_what_the_second_raises_is_raised():
    def second() -> None:
        raise ValueError("of the second")

    with pytest.raises(ValueError, match="of the second"):
        side_by_side(lambda: 1, second)


@pytest.mark.parametrize("dtype", ["float64", "float32", "bfloat16"])
@pytest.mark.parametrize(
    "options", [{}, {"use_peft": True}, {"critic_warmup_iterations": 1}, {"align_overflow": True}], ids=str
)
@pytest.mark.parametrize("kind", ["gpt2", "llama", "bitnet"])
def test_a_run_is_the_one_in_one_lane_but_for_rounding(make_run, snapshot, kind, options, dtype):
    settings = {"dtype": dtype, "total_episodes": 24, "local_rollout_forward_batch_size": 2, **options}
    runs = [make_run(kind, side_by_side=lanes_taken, **settings) for lanes_taken in (True, False)]
    assert [run.state.most_tokens_side_by_side for run in runs] == [math.inf, 0.0]
    two, one = ([run.iteration() for _ in range(2)] for run in runs)
    tolerance = {"float64": 1e-9, "float32": 1e-3, "bfloat16": 0.1}[dtype]
    for found, expected in zip(two, one, strict=True):
        compared = [name for name in expected if not name.startswith(TIMED)]
        assert compared == [name for name in found if not name.startswith(TIMED)]
        for name in compared:
            assert found[name] == pytest.approx(expected[name], rel=tolerance, abs=tolerance), name
    if dtype == "float64":
        for name in ("policy", "critic"):
            found, expected = (snapshot(getattr(run.state, name)) for run in runs)
            assert_close(found, expected, rtol=0.0, atol=1e-10)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "float16"])
@pytest.mark.parametrize("kind", ["gpt2", "llama"])
def test_the_first_ratio_is_exactly_1(make_run, kind, dtype):
    run = make_run(kind, dtype=dtype, side_by_side=True, num_ppo_epochs=1, num_mini_batches=1)
    assert run.iteration()["val/ratio"] == 1.0


@pytest.mark.parametrize("all_of_them", [2, 3])
def test_what_the_first_ratio_compares_is_computed_on_as_many_threads(make_run, threads, monkeypatch, all_of_them):
    """In the second lane of the rollout and the first of the update; a product's last bits depend on the number."""
    threads(all_of_them)
    run = make_run("gpt2", side_by_side=True)
    found: dict[str, set[int]] = {"rollout": set(), "optimisation.update": set()}

    def noting(name: str, *given, **named):
        found[name].add(torch.get_num_threads())
        return scoring.response_statistics(*given, **named)

    for name in found:
        monkeypatch.setattr(f"ppo_rlhf.training.{name}.response_statistics", partial(noting, name))
    run.iteration()
    assert found == {"rollout": {1}, "optimisation.update": {1}}


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_two_lanes_twice_are_the_same_bit_for_bit(make_run, snapshot, same_tensors, monkeypatch, dtype):
    """In 16 bits, too, and with the head in chunks: one lane must not empty the other's copies of weights."""
    monkeypatch.setattr(scoring, "LOGITS_HELD", 50)
    runs = [make_run("gpt2", dtype=dtype, side_by_side=True, total_episodes=24) for _ in range(4)]
    for run in runs:
        run.iteration()
        run.iteration()
    for name in ("policy", "critic"):
        first, *others = (snapshot(getattr(run.state, name)) for run in runs)
        assert all(same_tensors(first, other) for other in others)


def test_rewards_are_asked_for_in_the_main_thread(make_run, monkeypatch):
    run = make_run("gpt2", side_by_side=True)
    asked, score = [], run.scorer.score
    monkeypatch.setattr(run.scorer, "score", lambda batch: asked.append(threading.current_thread()) or score(batch))
    rollouts, *_ = run.before_update()
    score_responses(rollouts, run.scorer, run.state)
    assert set(asked) == {threading.main_thread()}


class Sized:
    def __init__(self, weights: int) -> None:
        self.weights = weights

    def num_parameters(self) -> int:
        return self.weights


NUMBERS = ["float64", "float32", "bfloat16", "float16"]


@pytest.mark.parametrize("on_amd", [True, False])
@pytest.mark.parametrize("dtype", NUMBERS)
def test_unasked_small_models_take_two_lanes_on_a_cpu_with_an_even_number_of_threads(
    threads, monkeypatch, dtype, on_amd
):
    threads(2)
    monkeypatch.setattr(lanes, "is_amd_with", lambda *capabilities: on_amd and "AVX2" in capabilities)
    config, few = PPOConfig(dtype=dtype), FEW_TOKENS if on_amd or dtype in ("bfloat16", "float16") else 0
    assert most_tokens_side_by_side(config, Sized(SMALL), on_cpu=True) == math.inf
    assert most_tokens_side_by_side(config, Sized(SMALL + 1), on_cpu=True) == few
    assert most_tokens_side_by_side(config, Sized(MIDDLING), on_cpu=True) == few
    assert most_tokens_side_by_side(config, Sized(MIDDLING + 1), on_cpu=True) == 0
    assert most_tokens_side_by_side(config, Sized(1), on_cpu=False) == 0
    for odd in (1, 3):
        threads(odd)
        assert most_tokens_side_by_side(config, Sized(1), on_cpu=True) == 0


@pytest.mark.parametrize(("most_tokens", "expected"), [(0.0, False), (1.0, False), (1e6, True), (math.inf, True)])
def test_an_iteration_takes_two_lanes_if_its_steps_have_few_tokens(make_run, threads, most_tokens, expected):
    threads(2)
    run = make_run("gpt2")
    run.state.most_tokens_side_by_side = most_tokens
    rollouts, *_ = run.before_update()
    assert rollouts.side_by_side == expected


def test_the_tokens_of_an_optimiser_step_are_those_of_prompts_and_responses_on_average(make_run, threads):
    threads(2)
    run = make_run("gpt2")
    rollouts, *_ = run.before_update()
    tokens = sum(map(len, rollouts.prompts.prompt_ids)) + int(rollouts.lengths.sum())
    found = []
    for most_tokens in (tokens / run.config.num_mini_batches, tokens / run.config.num_mini_batches - 0.01):
        run.state.most_tokens_side_by_side = most_tokens
        again, *_ = run.before_update()  # of the same iteration: the same responses
        found.append(again.side_by_side)
    assert found == [True, False]


def test_all_passes_of_an_iteration_are_in_as_many_lanes(make_run, threads, monkeypatch):
    """The first ratio is 1 only if the old log-probabilities are computed on as many threads as the update's."""
    threads(2)
    run, asked = make_run("gpt2"), []
    run.state.most_tokens_side_by_side = math.inf

    def watch(first, second, *, at_once):
        asked.append(at_once)
        return side_by_side(first, second, at_once=at_once)

    for module in ("rollout", "experience", "optimisation.update"):
        monkeypatch.setattr(f"ppo_rlhf.training.{module}.side_by_side", watch)
    experience = run.before_update()[-1]
    run.state.most_tokens_side_by_side = 0.0  # of the next iteration
    optimise(run.state, experience, run.config)
    assert len(asked) > 2
    assert set(asked) == {True}


@pytest.mark.parametrize(
    ("in_two_lanes", "small", "expected"), [(True, 0, True), (True, SMALL, False), (False, 0, False)]
)
def test_large_blocks_go_back_at_once_where_two_large_models_compute_at_the_same_time(
    make_run, threads, monkeypatch, in_two_lanes, small, expected
):
    """Small models would pay more for it than they save: 15 % of an iteration with 128 tokens a response."""
    threads(2)
    run, asked = make_run("gpt2"), []
    run.state.most_tokens_side_by_side = math.inf if in_two_lanes else 0.0
    monkeypatch.setattr("ppo_rlhf.training.optimisation.update.SMALL", small)
    monkeypatch.setattr("ppo_rlhf.training.optimisation.update.return_freed_memory", lambda **how: asked.append(how))
    optimise(run.state, run.before_update()[-1], run.config)
    assert asked == [{"two_large_models": expected}]


@pytest.mark.parametrize("options", [{"target_kl": 1e-6}, {"gradient_checkpointing": True}], ids=str)
def test_rollouts_of_a_run_in_two_lanes_are_learnt_from_in_one_where_a_setting_excludes_two(
    make_run, threads, monkeypatch, options
):
    """With target_kl the critic's step would race against the decision whether there is one."""
    threads(2)
    rollouts, *_ = make_run("gpt2", side_by_side=True).before_update()
    assert rollouts.side_by_side
    other = make_run("gpt2", **options)
    asked = []

    def watch(first, second, *, at_once):
        asked.append(at_once)
        return side_by_side(first, second, at_once=at_once)

    for module in ("experience", "optimisation.update"):
        monkeypatch.setattr(f"ppo_rlhf.training.{module}.side_by_side", watch)
    scores = score_responses(rollouts, other.scorer, other.state)
    shaped = shape_rewards(rollouts, scores, other.state)
    optimise(other.state, estimate_advantages(rollouts, scores, shaped, other.config), other.config)
    assert set(asked) == {False}


EXCLUDING = [{"value_model": "shared"}, {"target_kl": 0.1}, {"compile": True}, {"gradient_checkpointing": True}]


@pytest.mark.parametrize("settings", EXCLUDING, ids=str)
def test_settings_that_exclude_two_lanes_are_respected_or_refused(settings):
    assert most_tokens_side_by_side(PPOConfig(**settings), Sized(1), on_cpu=True) == 0
    (name,) = settings
    with pytest.raises(ConfigError, match=f"^ppo.side_by_side=true and ppo.{name}=.* exclude each other: .*leave"):
        PPOConfig(side_by_side=True, **settings)


def test_what_is_asked_for_is_taken(threads):
    threads(3)
    assert most_tokens_side_by_side(PPOConfig(side_by_side=True), Sized(10**12), on_cpu=True) == math.inf
    assert most_tokens_side_by_side(PPOConfig(side_by_side=False), Sized(1), on_cpu=True) == 0


def test_on_a_gpu_two_lanes_are_refused():
    lines = list(device_problems(PPOConfig(side_by_side=True), "cuda"))
    assert lines == [
        "ppo.side_by_side=true divides a CPU's threads, and the run computes on cuda (ppo.device=auto): leave it out, "
        "or set ppo.device=cpu"
    ]
    with pytest.raises(ConfigError, match=r"^ppo.side_by_side=true divides a CPU's threads"):
        PPOConfig(side_by_side=True, device="cuda")


def configurations(model: torch.nn.Module) -> set[int]:
    return {id(module.config) for module in model.modules() if "config" in vars(module)}


@pytest.mark.parametrize("options", [{}, {"use_peft": True}, {"side_by_side": False}], ids=str)
def test_models_made_of_one_configuration_get_their_own_before_they_compute_at_the_same_time(make_run, options):
    """Each pass sets how its model attends, in the model's configuration."""
    run = make_run("gpt2", **{"side_by_side": True, **options})
    models = (run.state.policy, run.state.critic, run.reference)
    for model in models:  # as transformers' from_config makes them
        for module in model.modules():
            if "config" in vars(module):
                module.config = run.reference.config
    run.state = TrainingState.create(*models[:2], run.state.tokenizer, run.config)
    run.iteration()
    apart = run.config.side_by_side
    assert [len(configurations(model)) for model in models] == [1, 1, 1]
    assert len(set.union(*map(configurations, models))) == (3 if apart else 1)


def test_the_reward_model_gets_a_configuration_of_its_own(make_run, make_model):
    run = make_run("gpt2", side_by_side=True)
    run.scorer.model = make_model("gpt2")
    for module in run.scorer.model.modules():
        if "config" in vars(module):
            module.config = run.state.critic.backbone.config
    run.before_update()
    assert not configurations(run.scorer.model) & configurations(run.state.critic)


def test_what_one_model_holds_twice_is_copied_once(make_model):
    first, second = make_model("gpt2"), make_model("gpt2")
    for module in (*first.modules(), *second.modules()):
        if "config" in vars(module):
            module.config = first.config
    before = first.config.to_dict()
    keep_apart(first, second)
    assert len(configurations(second)) == 1
    assert second.config.to_dict() == before
    assert second.config is not first.config
