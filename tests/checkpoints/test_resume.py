"""Restoring a run: the settings that must be the same, those that may differ, and all of the state."""

import dataclasses

import pytest

from ppo_rlhf.checkpoints.resume import CHANGES_NUMBERS, MAY_CHANGE, config_changes, restore
from ppo_rlhf.checkpoints.store import write_checkpoint
from ppo_rlhf.config import PPOConfig
from ppo_rlhf.core.errors import CheckpointError, ConfigError

SETTINGS = dataclasses.asdict(PPOConfig())


@pytest.fixture
def saved(make_run, tmp_path):
    run = make_run()
    run.iteration()
    return write_checkpoint(tmp_path / "run", run.state)


def test_equal_settings_have_no_changes():
    assert config_changes(SETTINGS, PPOConfig()) == {}


def test_every_difference_is_reported_with_its_two_values():
    assert config_changes(SETTINGS, PPOConfig(kl_coef=0.5, total_episodes=7)) == {
        "kl_coef": (0.05, 0.5),
        "total_episodes": (10_000, 7),
    }


def test_a_setting_that_the_checkpoint_does_not_know_had_its_default():
    older = {name: value for name, value in SETTINGS.items() if name != "kl_stop"}
    assert config_changes(older, PPOConfig()) == {}
    assert config_changes(older, PPOConfig(kl_stop=50.0)) == {"kl_stop": (None, 50.0)}


def test_a_setting_that_this_version_does_not_know_is_reported():
    assert config_changes({**SETTINGS, "ancient": 3}, PPOConfig()) == {"ancient": (3, None)}


def test_what_may_change_are_settings_and_few_of_them_change_numbers():
    assert set(SETTINGS) > MAY_CHANGE > CHANGES_NUMBERS


def test_a_run_goes_on_where_it_was(make_run, saved, caplog):
    caplog.set_level("INFO")
    fresh = make_run(model={"seed": 9})
    restore(fresh.state, saved)
    assert (fresh.state.iteration, len(fresh.state.history)) == (1, 1)
    assert f"Resumed after iteration 1 of 3 from {saved}." in caplog.messages


def test_a_run_with_other_settings_is_refused_with_a_line_for_each(make_run, saved, snapshot, same_tensors):
    other = make_run(kl_coef=0.125, gamma=0.9, total_episodes=60)
    before = snapshot(other.state.critic)
    with pytest.raises(ConfigError) as caught:
        restore(other.state, saved)
    rule = "a resumed run goes on with the settings that it began with"
    assert str(caught.value).splitlines() == [
        f"ppo.gamma: 1.0 in {saved}, 0.9 now; {rule}",
        f"ppo.kl_coef: 0.05 in {saved}, 0.125 now; {rule}",
    ]
    assert same_tensors(snapshot(other.state.critic), before)


def test_a_longer_run_takes_its_schedule_from_the_new_length(make_run, saved):
    longer = make_run(total_episodes=120)
    restore(longer.state, saved)
    metrics = longer.iteration()
    assert longer.state.iteration == 2
    assert metrics["lr/policy"] == pytest.approx(1e-3 * 9 / 10, rel=1e-12)  # linear over ten iterations, not three


def test_a_shorter_run_is_finished_at_once(make_run, saved):
    shorter = make_run(total_episodes=12)
    restore(shorter.state, saved)
    assert shorter.state.finished


def test_a_damaged_checkpoint_is_refused(make_run, saved):
    (saved / "critic.safetensors").unlink()
    with pytest.raises(CheckpointError, match=r"critic\.safetensors: missing"):
        restore(make_run().state, saved)
