"""16-bit runs with copies of the policy's weights equal runs in which autocast casts the weights."""

from contextlib import nullcontext

import pytest
import torch
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode

from ppo_rlhf.models.weight_copies import WeightCopies, linear_weights
from ppo_rlhf.ppo import batch_sampling, engines, loop
from ppo_rlhf.ppo import rollouts as ppo_rollouts
from tests.graph_on_cpu import graphs_on_cpu
from tests.ppo_runs import MEASURED, Run, learn_from, weights_of

__all__ = ["graphs_on_cpu"]  # a fixture
RUNS = {
    "GPT-2": ("gpt2", {}),
    "Llama": ("llama", {"max_tokens_per_micro_batch": 30}),
    "LoRA": ("llama", {"use_peft": True, "lora_r": 2, "learning_rate": 1e-2}),
    "shared trunk": ("gpt2", {"value_model": "shared"}),
    "turns": ("llama", {"environment": "tests.ppo.test_copied_weights:reply_once", "turn_length": 3}),
    "the reference's logits": ("gpt2", {"kl_estimator": "full"}),
}

pytestmark = pytest.mark.usefixtures("graphs_on_cpu")


def reply_once(prompts: list[str], completions: list[str], turns: list[list[str]], **columns: object) -> list:
    return ["a b" if len(said) == 1 else None for said in turns]


def trained(run: Run) -> list[tuple[list[torch.Tensor], dict[str, float]]]:
    """Train to the end; return what each update learned from, and its metrics."""
    actual = []
    while not run.state.finished:
        rollouts, _, _, experience = run.before_update()
        responses = rollouts.responses
        tensors = [responses.response_ids, responses.sampler_logprobs, rollouts.old_logprobs, rollouts.entropy]
        metrics = learn_from(run.state, experience)
        comparable = {name: value for name, value in metrics.items() if not name.startswith(MEASURED)}
        actual.append(([*tensors, rollouts.values], comparable))
    return actual


@pytest.mark.parametrize("name", RUNS)
def test_samples_log_probabilities_values_and_weights_are_equal_to_the_bit(make_run, monkeypatch, name):
    kind, settings = RUNS[name]
    monkeypatch.setattr(engines, "_decode_with_generate", None)  # copies do not hide what the model can do
    copying = make_run(kind, dtype="bfloat16", **settings)
    actual = trained(copying)
    assert copying.state.captures.held[WeightCopies].bytes == 2 * sum(
        weight.numel() for weight in linear_weights(copying.state.policy)
    )
    for place in (batch_sampling, ppo_rollouts):
        monkeypatch.setattr(place, "copied_weights", lambda *_: nullcontext())
    casting = make_run(kind, dtype="bfloat16", **settings)
    for (tensors, metrics), (expected, expected_metrics) in zip(actual, trained(casting), strict=True):
        assert all(map(torch.equal, tensors, expected))
        assert metrics == pytest.approx(expected_metrics, rel=0.0, abs=0.0, nan_ok=True)
    assert WeightCopies not in casting.state.captures.held
    for ours, theirs in ((copying.state.policy, casting.state.policy), (copying.state.critic, casting.state.critic)):
        weights = weights_of(theirs)
        assert all(torch.equal(tensor, weights[name]) for name, tensor in weights_of(ours).items())


def test_graphs_that_read_the_copies_are_replayed_in_later_iterations_with_the_weights_of_then(
    make_run, monkeypatch, graphs_on_cpu
):
    """Graphs captured in the first iteration must sample with the new weights."""
    run = make_run("gpt2", dtype="bfloat16", learning_rate=3e-2, stop_token="none", missing_eos_penalty=None)
    run.iteration()
    captured, before = graphs_on_cpu.captures, graphs_on_cpu.replays
    assert len(run.state.captures) > 0
    replayed = run.rollouts()
    assert graphs_on_cpu.captures == captured
    assert graphs_on_cpu.replays > before
    for place in (batch_sampling, ppo_rollouts):
        monkeypatch.setattr(place, "copied_weights", lambda *_: nullcontext())
    run.state.captures.release()
    expected = run.rollouts()
    assert torch.equal(replayed.responses.response_ids, expected.responses.response_ids)
    assert torch.equal(replayed.responses.sampler_logprobs, expected.responses.sampler_logprobs)


@pytest.mark.parametrize("kind", ["gpt2", "llama"])
def test_the_first_ratio_is_exactly_one(make_run, kind):
    """Old log-probabilities come from the copies, new ones from weights that autocast casts."""
    run = make_run(kind, dtype="bfloat16", num_mini_batches=1, num_ppo_epochs=1)
    for _ in range(2):
        metrics = run.iteration()
        assert (metrics["val/ratio"], metrics["policy/approxkl_avg"]) == (1.0, 0.0)
    assert run.state.captures.held[WeightCopies]


@pytest.mark.parametrize(
    ("settings", "copies"),
    [
        ({"dtype": "bfloat16"}, True),
        ({"dtype": "bfloat16", "rollout_engine": "hf"}, False),
        ({"dtype": "bfloat16", "cuda_graphs": False}, False),
        ({"dtype": "float32"}, False),
        ({"dtype": "float64"}, False),
    ],
    ids=str,
)
def test_copies_are_held_where_steps_are_captured_and_given_back_at_the_end(make_run, settings, copies):
    run = make_run(total_episodes=24, **settings)
    held = []
    loop.train(
        run.state,
        run.reference,
        run.prompts,
        run.scorer,
        lambda _: held.append(WeightCopies in run.state.captures.held),
    )
    assert held == [copies] * 2
    assert run.state.captures.held == {}


def test_an_error_while_sampling_leaves_the_policy_its_weights(make_run, monkeypatch):
    run = make_run("gpt2", dtype="bfloat16")
    before = dict(run.state.policy.named_parameters())

    def fail(model: nn.Module, *_: object, **__: object) -> None:
        assert model.lm_head.weight.dtype == torch.bfloat16
        raise ZeroDivisionError

    monkeypatch.setattr(batch_sampling, "generate_responses", fail)
    with pytest.raises(ZeroDivisionError):
        run.rollouts()
    assert all(parameter is before[name] for name, parameter in run.state.policy.named_parameters())


@pytest.mark.parametrize("part", ["log-probabilities", "values"])
def test_without_copies_a_block_of_passes_casts_each_weight_once(make_run, monkeypatch, part):
    """Autocast keeps its casts until its context ends."""

    class Casts(TorchDispatchMode):
        def __torch_dispatch__(self, func, types, args=(), kwargs=None):
            if func is torch.ops.aten._to_copy.default and isinstance(args[0], nn.Parameter):
                cast.append(id(args[0]))
            return func(*args, **(kwargs or {}))

    cast: list[int] = []
    run = make_run("gpt2", dtype="bfloat16", cuda_graphs=False, per_device_train_batch_size=2, num_mini_batches=1)
    run.rollouts()
    plan = run.state.plan
    assert len(plan.first_inputs) > 1
    with Casts():
        if part == "values":
            ppo_rollouts.critic_values(run.state)
        else:
            ppo_rollouts.policy_passes(run.state, plan, None)
    assert cast
    assert len(set(cast)) == len(cast)
