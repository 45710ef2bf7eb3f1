"""Restoring a run: the settings that must be the same, those that may differ, and all of the state."""

import dataclasses
import re
from pathlib import Path

import pytest

from ppo_rlhf.checkpoints.restore import CHANGES_NUMBERS, MAY_CHANGE, config_changes, restore
from ppo_rlhf.checkpoints.store import write_checkpoint
from ppo_rlhf.config import PPOConfig
from ppo_rlhf.core.errors import ConfigError

PAGE = Path(__file__).parents[2] / "docs" / "resume.md"
SETTINGS = dataclasses.asdict(PPOConfig())


@pytest.fixture
def saved(make_run, tmp_path):
    run = make_run()
    run.iteration()
    return write_checkpoint(tmp_path / "run", run.state)


def test_every_difference_is_reported_with_its_two_values():
    assert config_changes(SETTINGS, PPOConfig()) == {}
    assert config_changes(SETTINGS, PPOConfig(kl_coef=0.5, total_episodes=7)) == {
        "kl_coef": (0.05, 0.5),
        "total_episodes": (10_000, 7),
    }
    assert config_changes({**SETTINGS, "foreign": 3}, PPOConfig()) == {"foreign": (3, None)}


def test_the_lists_name_settings():
    assert set(SETTINGS) > MAY_CHANGE > CHANGES_NUMBERS


def test_what_may_change_is_what_the_page_says():
    """A setting that is added here by mistake would let a run go on as another one."""
    section = PAGE.read_text().partition("## What may change\n")[2]
    (said, *_) = re.findall(r"A resumed run may change [^\n]*`ppo`[^\n]*:\n\n(.*?)\n\n", section, flags=re.DOTALL)
    assert set(re.findall(r"`(\w+)`", said)) == MAY_CHANGE


def test_a_run_with_other_settings_is_refused_with_a_line_for_each(make_run, saved, snapshot, same_tensors):
    other = make_run(kl_coef=0.125, gamma=0.9, learning_rate=2e-3, total_episodes=60)
    before = snapshot(other.state.learner.critic)
    with pytest.raises(ConfigError) as caught:
        restore(other.state, saved)
    assert [line.split(":")[0] for line in str(caught.value).splitlines()] == [
        "ppo.gamma",
        "ppo.kl_coef",
        "ppo.learning_rate",
    ]
    assert same_tensors(snapshot(other.state.learner.critic), before)


def test_another_batch_size_is_refused_and_the_same_batch_cut_otherwise_is_taken(make_run, saved):
    """On twice as many processes, the same two settings make twice the batch."""
    restore(make_run(per_device_train_batch_size=3, gradient_accumulation_steps=4).state, saved)
    with pytest.raises(ConfigError, match=r"batch_size: 12 .* 24 now") as caught:
        restore(make_run(per_device_train_batch_size=12).state, saved)
    for name in ("ppo.per_device_train_batch_size", "ppo.gradient_accumulation_steps", "number of processes"):
        assert name in str(caught.value)


def test_a_run_goes_on_where_it_was_with_the_schedule_of_its_new_length(make_run, saved):
    longer = make_run(total_episodes=120, model={"seed": 9})
    restore(longer.state, saved)
    assert (longer.state.progress.iteration, len(longer.state.progress.history)) == (1, 1)
    metrics = longer.iteration()
    assert metrics["lr/policy"] == pytest.approx(1e-3 * 9 / 10, rel=1e-12)  # linear over ten iterations, not three
    shorter = make_run(total_episodes=12)
    restore(shorter.state, saved)
    assert shorter.state.progress.finished
