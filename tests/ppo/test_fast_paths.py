"""A run without padding and with logits in chunks, against one with padding and all logits at once."""

import pytest
import torch
from torch.testing import assert_close

from ppo_rlhf.passes import forward, response_logprobs
from ppo_rlhf.passes.sampling import Responses
from ppo_rlhf.ppo import loop
from ppo_rlhf.ppo.rollouts import measure

ITERATIONS = 8
TIMED = ("time/", "throughput/", "memory/", "policy/rollout_logprob_gap")
SETTINGS = {
    "total_episodes": 12 * ITERATIONS,
    "learning_rate": 1e-4,
    "lr_scheduler_type": "constant",
    "adam_epsilon": 1e-5,  # the gradient of a key's bias is 0 up to rounding, which Adam would turn into whole steps
}


def take_the_plain_path(monkeypatch) -> None:
    monkeypatch.setattr(forward, "packs", lambda _: False)
    monkeypatch.setattr("ppo_rlhf.ppo.learner.packs", lambda _: False)
    monkeypatch.setattr(response_logprobs, "logits_held", lambda _: 2**24)


def replayed(run, recorded: list) -> list[dict[str, float]]:
    """Train on responses that another run sampled; everything else is this run's own."""
    history = []
    for rollouts in recorded:
        ours = measure(
            run.state.learner,
            run.state.sampler,
            run.state.progress,
            run.reference,
            rollouts.prompts,
            Responses(rollouts.responses.response_ids, rollouts.responses.lengths, rollouts.responses.terminated),
        )
        history.append(loop.learn(run.state, run.reference, ours, run.scorer))
    return history


@pytest.mark.parametrize(
    ("kind", "options"),
    [pytest.param("gpt2", {}, marks=pytest.mark.slow), ("llama", {"value_model": "shared"})],
    ids=str,
)
def test_losses_and_weights_on_replayed_rollouts_are_those_of_the_plain_path(
    make_run, snapshot, monkeypatch, kind, options
):
    monkeypatch.setattr(response_logprobs, "logits_held", lambda _: 5 * 23)  # 5 tokens' logits at a time
    fast = make_run(kind, dtype="float32", **SETTINGS, **options)
    assert not fast.state.learner.computes_padding
    recorded, history = [], []
    for _ in range(ITERATIONS):
        recorded.append(fast.rollouts())
        history.append(loop.learn(fast.state, fast.reference, recorded[-1], fast.scorer))
    take_the_plain_path(monkeypatch)
    plain = make_run(kind, dtype="float32", **SETTINGS, **options)
    assert plain.state.learner.computes_padding
    for actual, row in zip(history, replayed(plain, recorded), strict=True):
        for name in row:
            if not name.startswith(TIMED):
                assert actual[name] == pytest.approx(row[name], rel=1e-4, abs=1e-4), name
    for ours, theirs in (
        (fast.state.learner.policy, plain.state.learner.policy),
        (fast.state.learner.critic, plain.state.learner.critic),
    ):
        weights = snapshot(theirs)
        for name, tensor in snapshot(ours).items():
            assert_close(tensor, weights[name], rtol=0.0, atol=1e-4, msg=lambda text, name=name: f"{name}: {text}")


@pytest.mark.slow
def test_a_float64_run_samples_the_tokens_of_one_on_the_plain_path(make_run, monkeypatch):
    def tokens(engine: str) -> list[torch.Tensor]:
        run = make_run("gpt2", dtype="float64", rollout_engine=engine, **SETTINGS)
        sampled = []
        for _ in range(ITERATIONS):
            rollouts = run.rollouts()
            sampled.append(rollouts.responses.response_ids)
            loop.learn(run.state, run.reference, rollouts, run.scorer)
        return sampled

    fast = tokens("static")
    take_the_plain_path(monkeypatch)
    assert all(torch.equal(ours, theirs) for ours, theirs in zip(fast, tokens("hf"), strict=True))
    assert not torch.equal(fast[0], fast[-1])
