"""TrainingState: initial counters and controllers, and how the critic and the sampling settings are built."""

import json
import signal
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from transformers import GenerationConfig

from ppo_rlhf.config import PPOConfig
from ppo_rlhf.core.errors import CheckpointError, ConfigError
from ppo_rlhf.models.reward_model import CausalLMRewardModel
from ppo_rlhf.ppo import loop, update
from ppo_rlhf.ppo.checkpointer import Checkpointer
from ppo_rlhf.ppo.epoch_batches import EpochBatches
from ppo_rlhf.ppo.progress import Clock
from ppo_rlhf.ppo.run_setup import build_critic, sampling_settings
from ppo_rlhf.runtime.stop_exceptions import StopBeforeUpdate
from tests.bare_state import bare_state
from tests.checkpoints.support import assert_same, everything

# --- a fresh state ---------------------------------------------------------------------------------------------------


def test_a_fresh_state_has_its_counters_at_zero_and_knows_how_long_the_run_is(make_run):
    state = make_run(kl_coef=0.3, total_episodes=25).state
    assert (
        state.progress.iteration,
        state.progress.episode,
        state.learner.optimiser_steps,
        state.learner.skipped_steps,
    ) == (0, 0, 0, 0)
    assert state.learner.skipped_in_a_row == 0
    assert state.progress.history == []
    assert state.progress.total_iterations == 3  # ceil(25 / 12)
    assert state.shaping.kl_controller.kl_coef == 0.3
    assert state.learner.device == torch.device("cpu")


def test_every_process_halves_as_often_as_the_one_whose_memory_ran_out_most_often(make_run, monkeypatch):
    state = make_run().state
    state.sampler.halving.count, state.learner.halving.count = 1, 3
    monkeypatch.setattr("ppo_rlhf.passes.halvings.from_all", lambda own: [own, 2])
    for halving in (state.sampler.halving, state.learner.halving):
        halving.agree()
    assert (state.sampler.halving.count, state.learner.halving.count) == (2, 3)


def test_an_update_follows_the_halvings_of_another_process(make_run, monkeypatch):
    run = make_run(per_device_train_batch_size=12, gradient_accumulation_steps=1, num_mini_batches=1)
    experience = run.before_update()[-1]
    assert experience.rollouts.cut.most_rows == 12
    monkeypatch.setattr("ppo_rlhf.passes.halvings.from_all", lambda own: [own, 1])
    run.state.learner.halving.agree()
    batches = EpochBatches(run.config, experience, run.state.learner.device, run.state.learner.halving.count)
    batches.start(0)
    assert [len(micro_batch.mask) for micro_batch in batches.of(0).micro_batches] == [6, 6]


def test_a_clock_adds_up_what_a_part_takes_and_forgets_it_with_the_next_iteration(monkeypatch):
    now = iter([10.0, 11.0, 13.0, 20.0, 25.0, 40.0])
    monkeypatch.setattr("ppo_rlhf.ppo.progress.time.perf_counter", lambda: next(now))
    clock = Clock()
    assert clock.started == 10.0
    for _ in range(2):  # 11 to 13, 20 to 25
        with clock.timed("update"):
            pass
    assert clock.seconds == {"update": 7.0}
    clock.restart()
    assert (clock.started, clock.seconds) == (40.0, {})


class FakeClock:
    """A clock that only the test moves on."""

    def __init__(self, monkeypatch):
        self.now = 1000.0
        for module in ("progress", "checkpointer"):
            monkeypatch.setattr(f"ppo_rlhf.ppo.{module}.time.perf_counter", lambda: self.now)


def saved_at(
    tmp_path: Path, now: FakeClock, minutes: float | None, seconds: float, writes: float = 0.0, iterations: int = 100
) -> list[int]:
    """Return the iterations, of so many seconds each, that time asks to save; a checkpoint takes `writes` seconds."""
    state, saved = bare_state(1000, save_interval_minutes=minutes), []

    def write() -> None:
        saved.append(state.progress.iteration)
        now.now += writes

    checkpointer = Checkpointer(state.progress, tmp_path, write)
    for _ in range(iterations):
        state.progress.clock.restart()
        now.now += seconds
        state.progress.iteration += 1
        checkpointer.iteration_ended()
    return saved


def test_time_asks_for_a_checkpoint_every_ten_minutes_and_after_a_first_iteration_of_more_than_one(
    monkeypatch, tmp_path
):
    now = FakeClock(monkeypatch)
    assert saved_at(tmp_path, now, 10.0, seconds=60.0, iterations=35) == [10, 20, 30]
    assert saved_at(tmp_path, now, 10.0, seconds=61.0, iterations=25) == [1, 11, 21]  # 10 iterations are 610 s
    assert saved_at(tmp_path, now, 10.0, seconds=700.0, iterations=3) == [1, 2, 3]
    assert saved_at(tmp_path, now, 0.5, seconds=7.0, iterations=12) == [5, 10]
    assert saved_at(tmp_path, now, None, seconds=700.0, iterations=3) == []


def test_checkpoints_by_time_take_at_most_a_twentieth_of_the_time(monkeypatch, tmp_path):
    """A checkpoint of 190 s waits 3610 s for the next, 37 iterations of 100 s: 190 of 3890 s are 4.9 %."""
    now = FakeClock(monkeypatch)
    assert saved_at(tmp_path, now, 10.0, seconds=100.0, writes=190.0) == [1, 38, 75]


def test_a_checkpoint_begins_the_time_anew_and_the_clock_of_the_main_process_decides(monkeypatch, tmp_path):
    now, state, saved = FakeClock(monkeypatch), bare_state(100), []
    checkpointer = Checkpointer(state.progress, tmp_path, lambda: saved.append(state.progress.iteration))

    def is_saved_after(seconds: float) -> bool:
        now.now += seconds
        state.progress.iteration += 1
        checkpointer.iteration_ended()
        assert checkpointer.is_saved == (state.progress.iteration in saved)
        return checkpointer.is_saved

    assert [is_saved_after(seconds) for seconds in (59.0, 540.0, 1.0, 1.0)] == [False, False, True, False]
    checkpointer.save()
    assert [is_saved_after(seconds) for seconds in (599.0, 1.0)] == [False, True]
    for decides in (True, False):
        monkeypatch.setattr("ppo_rlhf.ppo.checkpointer.from_main", lambda own, d=decides: d)
        assert is_saved_after(0.0) is decides


@pytest.mark.parametrize(
    ("iteration", "interval", "signum", "saved"),
    [(1, 2, None, False), (2, 2, None, True), (3, 10, None, True), (1, 2, signal.SIGTERM, True)],
)
def test_an_iteration_is_saved_at_every_interval_at_the_end_and_on_a_signal(
    tmp_path, iteration, interval, signum, saved
):
    progress = bare_state(3, iteration - 1, save_interval=interval).progress
    checkpointer = Checkpointer(progress, tmp_path, lambda: None)
    assert checkpointer.is_saved  # what a run begins with needs no checkpoint
    progress.iteration, progress.requests.signum = iteration, signum
    checkpointer.iteration_ended()
    assert checkpointer.is_saved is saved
    checkpointer.save_if_new()
    assert checkpointer.is_saved


def test_a_run_that_saves_no_checkpoints_is_never_saved():
    progress = bare_state(3).progress
    checkpointer = Checkpointer(progress, None, None)
    progress.iteration = 3
    checkpointer.iteration_ended()
    assert not checkpointer.is_saved


def test_processes_stop_together_before_an_update_if_one_of_them_was_asked_to(make_run, monkeypatch):
    run = make_run()
    experience = run.before_update()[-1]
    before = everything(run.state)
    monkeypatch.setattr("ppo_rlhf.ppo.stop_requests.from_all", lambda own: [own, (signal.SIGINT, "")])
    for stage in (
        run.rollouts,
        lambda: loop.score_responses(experience.rollouts, run.scorer, run.state.sampler, run.state.progress),
        lambda: loop.update(run.state, experience, run.reference),
    ):
        with pytest.raises(StopBeforeUpdate) as stopped:
            stage()
        assert stopped.value.signum == signal.SIGINT
    assert not run.state.progress.updating
    assert_same(everything(run.state), before)


def test_processes_stop_together_after_the_first_gradients_and_no_later(make_run, monkeypatch):
    run = make_run(num_mini_batches=2, num_ppo_epochs=1)
    experience, gradients = run.before_update()[-1], update._gradients_in_memory
    before, asks_at = everything(run.state), 1
    counted: list[int] = []

    def asked(*given):
        counted.append(1)
        run.state.progress.requests.signum = signal.SIGTERM if len(counted) == asks_at else None
        return gradients(*given)

    monkeypatch.setattr(update, "_gradients_in_memory", asked)
    with pytest.raises(StopBeforeUpdate):
        loop.update(run.state, experience, run.reference)
    assert not run.state.progress.updating
    assert_same(everything(run.state), before)
    run.state.progress.requests.signum, asks_at = None, 2
    counted.clear()
    loop.update(run.state, experience, run.reference)
    assert run.state.progress.updating


def test_a_run_is_finished_after_its_last_iteration_and_not_before(make_run):
    state = make_run().state
    finished = []
    for iteration in range(5):
        state.progress.iteration = iteration
        finished.append(state.progress.finished)
    assert finished == [False, False, False, True, True]


@pytest.mark.parametrize("needy", ["neither", "policy", "critic"])
def test_padding_is_computed_if_one_of_the_two_models_needs_it(make_run, needy):
    models = {name: {"sliding_window": 64} if name == needy else {} for name in ("policy", "critic")}
    state = make_run(model=models["policy"]).state
    state.learner.critic = make_run(model=models["critic"]).state.learner.critic
    assert state.learner.computes_padding is (needy != "neither")


def test_all_that_a_resume_needs_beside_weights_and_counters_goes_through_json(make_run):
    settings = {
        "kl_controller": "adaptive",
        "kl_horizon": 50.0,
        "reward_normalisation": "running",
        "target_kl": 1e-4,
    }
    run, fresh = make_run(**settings), make_run(**settings)
    run.iteration()
    run.state.learner.early_stops += 1
    extra = json.loads(json.dumps(run.state.extra_state()))
    assert fresh.state.extra_state() != run.state.extra_state()
    fresh.state.load_extra_state(extra)
    assert fresh.state.extra_state() == run.state.extra_state()
    assert fresh.state.shaping.kl_controller.kl_coef != 0.05
    assert fresh.state.shaping.reward_moments.count == 12
    assert fresh.state.learner.early_stops >= 2


def test_in_float16_the_loss_scale_is_a_part_of_the_state(make_run):
    """Without a GPU the test passes in a gradient scaler."""
    run = make_run()
    run.state.learner.accelerator = SimpleNamespace(scaler=torch.amp.GradScaler("cpu", init_scale=1024.0))
    extra = json.loads(json.dumps(run.state.extra_state()))
    run.state.learner.accelerator.scaler = torch.amp.GradScaler("cpu")
    run.state.load_extra_state(extra)
    assert run.state.extra_state()["loss_scale"]["scale"] == 1024.0


def test_extra_state_of_another_version_is_refused(make_run):
    with pytest.raises(CheckpointError, match=r"TrainingState\.load_extra_state"):
        make_run().state.load_extra_state({"kl_controller": {"kl_coef": 0.1}})


# --- critic and sampling ---------------------------------------------------------------------------------------------


def test_the_critic_is_copied_from_the_policy_or_from_the_reward_model(make_model):
    policy = make_model("llama", seed=1)
    reward_model = CausalLMRewardModel.from_causal_lm(make_model("llama", seed=2))
    from_policy = build_critic(PPOConfig(value_model="separate"), policy, reward_model)
    from_reward = build_critic(PPOConfig(value_model="reward_init"), policy, reward_model)
    assert torch.equal(from_policy.backbone.embed_tokens.weight, policy.model.embed_tokens.weight)
    assert torch.equal(from_reward.backbone.embed_tokens.weight, reward_model.backbone.embed_tokens.weight)
    assert torch.equal(from_reward.value_head.weight, reward_model.score.weight)


def test_a_critic_from_the_reward_model_needs_one(make_model):
    with pytest.raises(ConfigError, match=r"ppo\.value_model=reward_init"):
        build_critic(PPOConfig(value_model="reward_init"), make_model("llama"), None)


def test_sampling_settings_resolve_stop_and_pad_tokens_with_the_tokenizer(make_model, make_tokenizer):
    policy = make_model("llama")
    policy.generation_config = GenerationConfig(eos_token_id=[9, 4], top_p=0.5, do_sample=True)
    config = PPOConfig(response_length=6, temperature=0.9, top_k=3, top_p=0.8)
    actual = sampling_settings(config, make_tokenizer(pad_token="<unk>"), policy)
    assert (actual.response_length, actual.temperature, actual.top_k, actual.top_p) == (6, 0.9, 3, 0.8)
    assert actual.stop_token_ids == (2, 4, 9)  # the tokenizer's end of text, and both of the generation config
    assert actual.pad_token_id == 1


@pytest.mark.parametrize("configured", [50256, [50256, 2], -1], ids=str)
def test_an_end_of_text_outside_the_models_vocabulary_ends_nothing(make_model, make_tokenizer, configured):
    policy = make_model("llama")
    policy.generation_config = GenerationConfig(eos_token_id=configured)
    assert sampling_settings(PPOConfig(), make_tokenizer(), policy).stop_token_ids == (2,)
