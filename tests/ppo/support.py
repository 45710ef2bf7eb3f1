"""Helpers of the update's tests: gradients without optimiser steps, and an experience in which every clip applies."""

import dataclasses

import torch
from torch.testing import assert_close

from ppo_rlhf.ppo.experience import Experience, learning_mask
from tests.ppo_runs import learn_from

ONE_STEP = {"num_ppo_epochs": 1, "num_mini_batches": 1, "max_grad_norm": 1e9}


def freeze(run) -> list[dict[str, torch.Tensor]]:
    """Keep both optimisers from moving; return the gradients of each step, after clipping."""
    seen: list[dict[str, torch.Tensor]] = []
    models = {"policy": run.state.learner.policy, "critic": run.state.learner.critic}

    def look() -> None:
        actual = {f"{name}.{n}": p.grad for name, model in models.items() for n, p in model.named_parameters()}
        seen.append({name: gradient.clone() for name, gradient in actual.items() if gradient is not None})

    run.state.learner.policy_optimizer.step = lambda: None
    run.state.learner.critic_optimizer.step = (
        look  # the critic's optimiser steps last; on a shared trunk it is the only optimiser
    )
    return seen


def with_settings_of(run, experience: Experience) -> Experience:
    """Return the experience with the settings of `run`, whose update cuts it anew."""
    return dataclasses.replace(experience, mask=learning_mask(experience.rollouts, run.config), config=run.config)


def moved_on(experience: Experience) -> Experience:
    """Return the experience as after some updates: ratios differ from 1, and policy and values are clipped."""
    generator = torch.Generator().manual_seed(2)
    rollouts = experience.rollouts

    def shifted(values: torch.Tensor, size: float) -> torch.Tensor:
        return values + size * torch.randn(values.shape, generator=generator, dtype=values.dtype)

    moved = {"old_logprobs": shifted(rollouts.old_logprobs, 0.3), "values": shifted(rollouts.values, 0.5)}
    return dataclasses.replace(experience, rollouts=dataclasses.replace(rollouts, **moved))


def gradients(make_run, experience, kind="llama", reference=None, **settings) -> dict[str, torch.Tensor]:
    run = make_run(kind, **{**ONE_STEP, **settings})
    run.reference = reference or run.reference
    return gradients_of(run, experience)


def gradients_of(run, experience) -> dict[str, torch.Tensor]:
    """Return the gradients at the only step of a run that learns from the experience."""
    seen = freeze(run)
    learn_from(run.state, with_settings_of(run, experience), run.reference)
    (actual,) = seen
    return actual


def assert_same_gradients(actual, expected):
    assert actual.keys() == expected.keys()
    for name in expected:
        assert_close(actual[name], expected[name], rtol=0.0, atol=1e-10, msg=lambda text, name=name: f"{name}: {text}")
