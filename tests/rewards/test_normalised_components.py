"""Rewards that are normalised each by itself before their sum: by numpy, in the loop, in a checkpoint."""

from __future__ import annotations

import logging
import math
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor
from torch.testing import assert_close

from ppo_rlhf.checkpoints.files import Checkpoint
from ppo_rlhf.checkpoints.store import read_checkpoint, write_checkpoint
from ppo_rlhf.config import PPOConfig
from ppo_rlhf.core.errors import CheckpointError, ConfigError
from ppo_rlhf.ppo import loop
from ppo_rlhf.rewards.config import RewardConfig
from ppo_rlhf.rewards.scorers import build_reward_scorer
from ppo_rlhf.rewards.scoring import ResponseBatch, RewardScorer
from ppo_rlhf.trainer.trainer import PPOTrainer
from tests.checkpoints.support import assert_same, everything
from tests.ppo_runs import Run, build_run
from tests.tiny_models import save, tiny_model

WEIGHTS = {"length": 1.0, "letters": -0.5, "rare": 2.0}
PLAIN = {"missing_eos_penalty": None, "kl_coef": 0.0, "dtype": "float64"}


def lengths(batch: ResponseBatch) -> Tensor:
    """Numbers that spread a thousand times as much as those of `letters`."""
    return torch.tensor([1e3 * len(ids) for ids in batch.response_ids], dtype=torch.float64)


def letters(batch: ResponseBatch) -> Tensor:
    return torch.tensor([sum(i < 13 for i in ids) / len(ids) for ids in batch.response_ids], dtype=torch.float64)


def rare(batch: ResponseBatch) -> Tensor:
    return torch.tensor([float(5 in ids) + 100.0 for ids in batch.response_ids], dtype=torch.float64)


def always(batch: ResponseBatch) -> Tensor:
    return torch.full((len(batch),), 0.1, dtype=torch.float64)


def build(normalise: Any = "component", *more: tuple[str, float, Any], **settings: Any) -> Run:
    functions = {"length": lengths, "letters": letters, "rare": rare}
    components = [(name, WEIGHTS[name], function) for name, function in functions.items()]
    scorer = RewardScorer([*components, *more], normalise=normalise)
    return build_run(scorer=scorer, **{**PLAIN, **settings})


def paid(run: Run) -> tuple[np.ndarray, dict[str, np.ndarray]]:
    """Rewards of the last tokens of an iteration, and the components' scores; the padding of the KL is NaN."""
    rollouts = run.rollouts()
    scores = loop.score_responses(rollouts, run.scorer, run.state.sampler, run.state.progress)
    poisoned = torch.where(rollouts.mask, rollouts.old_logprobs, math.nan)
    rewards = loop.shape_rewards(rollouts, scores, run.state.shaping)
    again = loop.shape_rewards(replace(rollouts, old_logprobs=poisoned), scores, run.state.shaping)
    assert torch.equal(rewards, again)
    last = rewards.gather(1, rollouts.responses.lengths[:, None] - 1)[:, 0]
    assert_close(rewards.sum(-1), last, rtol=0.0, atol=0.0)
    return last.numpy(), {name: values.numpy() for name, values in scores.components.items()}


def by_numpy(seen: list[dict[str, np.ndarray]], how: str) -> np.ndarray:
    """The sum of z-scores of the last batch, over it or over all batches up to it, with n - 1 under the variance."""
    total = np.zeros(len(seen[-1]["length"]))
    for name, weight in WEIGHTS.items():
        over = np.concatenate([each[name] for each in (seen if how == "running" else seen[-1:])])
        total += weight * (seen[-1][name] - over.mean()) / np.sqrt(over.var(ddof=1) + 1e-8)
    return total


@pytest.mark.parametrize("how", ["batch", "running"])
def test_the_reward_is_the_sum_of_what_numpy_makes_of_each_component(how: str):
    run, seen = build(reward_normalisation=how), []
    for iteration in range(2):
        found, components = paid(run)
        seen.append(components)
        np.testing.assert_allclose(found, by_numpy(seen, how), rtol=0.0, atol=1e-9)
        metrics = run.iteration()
        for name in WEIGHTS:
            over = np.concatenate([each[name] for each in (seen if how == "running" else seen[-1:])])
            assert metrics[f"reward_std/{name}"] == pytest.approx(over.std(ddof=1), rel=1e-12)
            assert run.state.shaping.component_moments[name].count == 12 * (iteration + 1)
    assert metrics["objective/scores"] == pytest.approx(sum(w * components[n].mean() for n, w in WEIGHTS.items()))


def test_scale_and_clip_come_after_the_sum():
    settings = {"reward_normalisation": "batch", "reward_scale": 3.0, "reward_clip": 2.5}
    found, components = paid(build(**settings))
    expected = np.clip(3.0 * by_numpy([components], "batch"), -2.5, 2.5)
    assert (np.abs(3.0 * by_numpy([components], "batch")) > 2.5).any()
    assert (np.abs(expected) < 2.5).any()
    np.testing.assert_allclose(found, expected, rtol=0.0, atol=1e-9)


def test_normalising_the_total_lets_the_component_with_the_largest_numbers_decide():
    """The difference that the setting makes: correlations with each component's own z-scores."""
    by_mode = {}
    for mode in ("total", "component"):
        found, components = paid(build(mode, reward_normalisation="batch"))
        by_mode[mode] = [np.corrcoef(found, components[name])[0, 1] for name in ("length", "rare")]
    assert by_mode["total"][0] > 0.9999
    assert by_mode["component"][1] > by_mode["total"][1] + 0.3


def test_a_component_that_does_not_vary_adds_nothing_and_is_named_once(caplog: pytest.LogCaptureFixture):
    for how in ("batch", "running"):
        with_it = build("component", ("always", 5.0, always), reward_normalisation=how)
        for _ in range(2):
            found, components = paid(with_it)
            assert np.isfinite(found).all()
            with caplog.at_level(logging.WARNING, logger="ppo_rlhf"):
                metrics = with_it.iteration()
            assert metrics["reward_std/always"] == pytest.approx(0.0, abs=1e-15)
        assert [line for line in caplog.messages if "reward/" in line] == [
            "reward/always is 0.1 for each of the first 12 responses; normalised alone it adds 0 until it varies"
        ]
        caplog.clear()
    found, components = paid(build("component", ("always", 5.0, always), reward_normalisation="batch"))
    np.testing.assert_allclose(found, by_numpy([components], "batch"), rtol=0.0, atol=1e-9)


def test_rows_of_prompts_that_are_drawn_again_keep_the_weights():
    run = build(reward_normalisation="batch", responses_per_prompt=2, drop_uniform_prompts=2)
    rollouts = run.rollouts()
    assert rollouts.scores is not None
    assert rollouts.scores.apart == WEIGHTS


# --- checkpoints -----------------------------------------------------------------------------------------------------


def test_a_resumed_run_goes_on_with_each_components_moments(tmp_path: Any):
    whole = build(reward_normalisation="running", total_episodes=36)
    whole.iteration()
    directory = write_checkpoint(tmp_path, whole.state)
    resumed = build(reward_normalisation="running", total_episodes=36)
    read_checkpoint(Checkpoint(directory), resumed.state)
    for run in (whole, resumed):
        while not run.state.progress.finished:
            run.iteration()
    assert_same(everything(resumed.state), everything(whole.state))
    assert resumed.state.extra_state() == whole.state.extra_state()
    assert resumed.state.shaping.component_moments["rare"].count == 36


def test_a_checkpoint_of_a_normalised_total_is_not_resumed_by_component(tmp_path: Any):
    total = build("total", reward_normalisation="running")
    total.iteration()
    assert total.state.extra_state()["component_moments"] == {}
    assert not any(name.startswith("reward_std/") for name in total.state.progress.history[0])
    run = build(reward_normalisation="running")
    read_checkpoint(Checkpoint(write_checkpoint(tmp_path, total.state)), run.state)
    with pytest.raises(CheckpointError, match=r"^reward\.normalise=component: in the 1 iterations of this checkpoint"):
        run.before_update()


# --- settings --------------------------------------------------------------------------------------------------------


def component(name: str) -> dict[str, Any]:
    return {"type": "function", "function": f"builtins:{name}", "name": name}


def test_one_component_has_no_sum_and_is_refused():
    with pytest.raises(ConfigError, match=r"reward\.normalise=component: len is the only component"):
        RewardConfig(components=[component("len")], normalise="component")  # type: ignore[list-item]
    with pytest.raises(ConfigError, match="reward_std/"):
        RewardConfig(components=[component("len"), {**component("sum"), "name": "x" * 241}], normalise="component")  # type: ignore[list-item]


def test_components_that_nothing_normalises_are_refused_before_a_run(tmp_path: Any):
    reward = RewardConfig(components=[component("len"), component("sum")], normalise="component")  # type: ignore[list-item]
    assert build_reward_scorer(reward, None, tiny_model()).normalise == "component"  # type: ignore[arg-type]
    config = PPOConfig(total_episodes=4, per_device_train_batch_size=4, response_length=8, device="cpu")
    message = r"reward\.normalise=component and ppo\.reward_normalisation=none: nothing says how"
    with pytest.raises(ConfigError, match=message):
        PPOTrainer(config, save(tmp_path / "sft", tiny_model()), reward=reward)
    with pytest.raises(ConfigError, match=message):
        build(reward_normalisation="none").before_update()
