"""A run without padding and with logits in chunks against one on the plain path: padded batches, all logits at once."""

import pytest
import torch
from ppo_rlhf.models.passes import attention_by_sequence
from torch.testing import assert_close

from ppo_rlhf.models import forward as trunks
from ppo_rlhf.ppo import experience as steps
from ppo_rlhf.ppo import logprobs as scoring
from ppo_rlhf.ppo.rollout import complete_rollouts
from ppo_rlhf.ppo.sampling import Responses
from ppo_rlhf.ppo.update import optimise_policy

ITERATIONS = 20
TIMED = ("time/", "throughput/", "memory/", "policy/rollout_logprob_gap")
SETTINGS = {
    "total_episodes": 12 * ITERATIONS,
    "learning_rate": 1e-4,
    "lr_scheduler_type": "constant",
    "adam_epsilon": 1e-5,  # the gradient of a key's bias is 0 but for rounding, which Adam would make whole steps of
}


@pytest.fixture(autouse=True)
def _by_sequence(monkeypatch):
    """Attention takes one sequence after the other wherever it can: these short ones would spare too little."""
    monkeypatch.setattr(attention_by_sequence, "FEWEST_PAIRS", 1)


def take_the_plain_path(monkeypatch) -> None:
    monkeypatch.setattr(trunks, "packs", lambda _: False)
    monkeypatch.setattr("ppo_rlhf.ppo.state.packs", lambda _: False)
    monkeypatch.setattr(scoring, "LOGITS_HELD", 2**24)


def replayed(run, recorded: list) -> list[dict[str, float]]:
    """Train on responses that another run sampled; everything else is this run's own."""
    history = []
    for rollouts in recorded:
        responses = Responses(rollouts.response_ids, rollouts.lengths, rollouts.terminated)
        ours = complete_rollouts(
            run.state,
            run.reference,
            rollouts.prompts,
            responses,
            run.config,
            sampler_logprobs=None,
            started=0.0,
            generation_seconds=None,
        )
        scores = steps.score_responses(ours, run.scorer, run.state)
        shaped = steps.shape_rewards(ours, scores, run.state)
        history.append(
            optimise_policy(run.state, steps.estimate_advantages(ours, scores, shaped, run.config), run.config)
        )
    return history


@pytest.mark.parametrize(
    ("kind", "options"),
    [
        ("gpt2", {}),
        ("llama", {}),
        ("bitnet", {}),
        ("gpt2", {"use_peft": True}),
        ("llama", {"value_model": "shared"}),
        pytest.param("gpt2", {"value_model": "shared"}, marks=pytest.mark.slow),
        pytest.param("llama", {"use_peft": True}, marks=pytest.mark.slow),
        pytest.param("bitnet", {"value_model": "shared"}, marks=pytest.mark.slow),
        pytest.param("bitnet", {"use_peft": True}, marks=pytest.mark.slow),
    ],
    ids=str,
)
def test_after_20_iterations_on_replayed_rollouts_losses_and_weights_are_those_of_the_plain_path(
    make_run, snapshot, monkeypatch, kind, options
):
    monkeypatch.setattr(scoring, "LOGITS_HELD", 5 * 23)  # 5 tokens' logits at a time
    fast = make_run(kind, dtype="float32", **SETTINGS, **options)
    recorded, history = [], []
    for _ in range(ITERATIONS):
        rollouts, *_, experience = fast.before_update()
        assert not rollouts.padded
        recorded.append(rollouts)
        history.append(optimise_policy(fast.state, experience, fast.config))
    take_the_plain_path(monkeypatch)
    plain = make_run(kind, dtype="float32", **SETTINGS, **options)
    expected = replayed(plain, recorded)
    assert plain.state.computes_padding
    for found, row in zip(history, expected, strict=True):
        for name, value in row.items():
            if not name.startswith(TIMED):
                assert found[name] == pytest.approx(value, rel=1e-4, abs=1e-4), name
    for ours, theirs in ((fast.state.policy, plain.state.policy), (fast.state.critic, plain.state.critic)):
        weights = snapshot(theirs)
        for name, tensor in snapshot(ours).items():
            assert_close(tensor, weights[name], rtol=0.0, atol=1e-4, msg=lambda text, name=name: f"{name}: {text}")


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("kind", ["gpt2", "llama"])
def test_the_first_ratio_is_exactly_1(make_run, kind, dtype):
    run = make_run(kind, dtype=dtype, num_ppo_epochs=1, num_mini_batches=1)
    assert run.iteration()["val/ratio"] == 1.0


@pytest.mark.parametrize("kind", ["gpt2", "llama"])
def test_a_live_float64_run_samples_the_same_tokens_as_one_on_the_plain_path(make_run, monkeypatch, kind):
    def tokens(engine: str) -> list[torch.Tensor]:
        run = make_run(kind, dtype="float64", rollout_engine=engine, **SETTINGS)
        sampled = []
        for _ in range(ITERATIONS):
            rollouts, *_, experience = run.before_update()
            sampled.append(rollouts.response_ids)
            optimise_policy(run.state, experience, run.config)
        return sampled

    fast = tokens("static")
    take_the_plain_path(monkeypatch)
    plain = tokens("plain")
    assert all(torch.equal(ours, theirs) for ours, theirs in zip(fast, plain, strict=True))
    assert not torch.equal(fast[0], fast[-1])
