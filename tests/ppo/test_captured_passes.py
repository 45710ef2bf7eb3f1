"""Updates with CUDA graphs, emulated on the CPU, give the results of updates without graphs.

The tests at the end use real CUDA graphs: pytest -m gpu.
"""

import logging

import pytest
import torch
from torch.testing import assert_close

from ppo_rlhf.config import PPOConfig
from ppo_rlhf.models import forward
from ppo_rlhf.models.captures import DECODING, UPDATE, Captures, fixed_state
from ppo_rlhf.ppo import captured_passes, captured_sampling, loop, rollouts, state, update
from ppo_rlhf.ppo.build import build_critic, build_state
from ppo_rlhf.ppo.captured_passes import CapturedPasses
from ppo_rlhf.rewards.scoring import RewardScorer
from tests import ppo_runs
from tests.graph_on_cpu import graphs_on_cpu
from tests.ppo_runs import MEASURED, Run, build_model, build_prompts, build_tokenizer, first_letters
from tests.trainer.test_architectures import tiny

__all__ = ["graphs_on_cpu"]  # a fixture
GPU = "cuda"
SETTINGS = {
    "total_episodes": 48,
    "per_device_train_batch_size": 3,
    "gradient_accumulation_steps": 4,
    "num_mini_batches": 2,
    "num_ppo_epochs": 5,
    "learning_rate": 1e-2,
    "adam_epsilon": 1e-5,  # the gradient of a key's bias is 0 up to rounding, which Adam would turn into whole steps
}
"""Iterations of 10 optimiser steps, each of 2 micro-batches."""
LORA = {"use_peft": True, "lora_r": 2, "lora_alpha": 8}
CASES = {
    "GPT-2": ("gpt2", {}),
    "LoRA": ("llama", LORA),
    "a shared trunk": ("llama", {"value_model": "shared"}),
    "gradient checkpointing": ("llama", {"gradient_checkpointing": True}),
    "an average of weights": ("gpt2", {"ema_decay": 0.9}),
    "more epochs of the critic": ("llama", {"num_critic_epochs": 7, "num_ppo_epochs": 3}),
    "a warm-up of the critic": ("gpt2", {"critic_warmup_iterations": 1, "weight_decay": 0.1}),
    "an early stop": ("llama", {"target_kl": 0.02}),
    "a coefficient that changes": (
        "gpt2",
        {"kl_in": "loss", "kl_estimator": "k2", "kl_controller": "adaptive", "kl_horizon": 24.0, "kl_coef": 0.5},
    ),
    "KL over the vocabulary": ("llama", {"kl_in": "loss", "kl_estimator": "full", "kl_coef": 0.5}),
}
MORE_CASES = {
    "Llama": ("llama", {}),
    "LoRA on a shared trunk": ("gpt2", {**LORA, "value_model": "shared"}),
    "a warm-up of the head on a trunk": ("gpt2", {"critic_warmup_iterations": 1, "value_model": "shared"}),
    "an entropy bonus": ("gpt2", {"entropy_coef": 0.3, "dual_clip": 1.5, "cliprange_high": 0.4}),
    "positive examples": ("llama", {"positive_coef": 0.3, "positive_threshold": 0.75}),
    "means of responses": (
        "gpt2",
        {"loss_aggregation": "seq_mean_token_mean", "truncated_responses": "mask", "missing_eos_penalty": None},
    ),
    "a budget of tokens": ("llama", {"max_tokens_per_micro_batch": 40}),
    "deterministic kernels": ("llama", {"deterministic": True}),
}


def kept(metrics: dict[str, float]) -> dict[str, float]:
    return {name: value for name, value in metrics.items() if not name.startswith(MEASURED)}


def weights(run: Run) -> dict[str, torch.Tensor]:
    models = {"policy": run.state.policy, "critic": run.state.critic}
    actual = {f"{name}.{n}": tensor for name, model in models.items() for n, tensor in model.state_dict().items()}
    average = run.state.policy_average
    return actual if average is None else {**actual, **{f"average.{n}": t for n, t in average.weights.items()}}


def assert_same_training(actual: Run, expected: Run, limit: float = 1e-9) -> None:
    for row, other in zip(actual.state.history, expected.state.history, strict=True):
        for name, value in kept(other).items():
            assert row[name] == pytest.approx(value, rel=limit, abs=limit), name
    wanted = weights(expected)
    for name, tensor in weights(actual).items():
        assert_close(tensor, wanted[name], rtol=0.0, atol=limit, msg=lambda text, name=name: f"{name}: {text}")


def train(*runs: Run) -> None:
    for run in runs:
        while not run.state.finished:
            run.iteration()


@pytest.fixture(autouse=True)
def decoded_plainly(monkeypatch) -> None:
    """Only updates are captured here; tests/ppo/test_captured_sampling.py captures both in one run."""
    monkeypatch.setattr(captured_sampling, "why_not_captured", lambda model: "it is not asked for")


@pytest.fixture
def passes(monkeypatch) -> list[tuple]:
    """The kind and the inputs of each pass that goes through `CapturedPasses`."""
    actual, original = [], CapturedPasses.run

    def spy(self, kind, inputs, compute):
        actual.append((kind, inputs))
        return original(self, kind, inputs, compute)

    monkeypatch.setattr(CapturedPasses, "run", spy)
    return actual


@pytest.mark.parametrize("case", [*CASES, *(pytest.param(case, marks=pytest.mark.slow) for case in MORE_CASES)])
def test_steps_of_replayed_micro_batches_give_the_weights_of_plain_ones(make_run, graphs_on_cpu, passes, case):
    kind, settings = {**CASES, **MORE_CASES}[case]
    run, plain = (make_run(kind, **{**SETTINGS, **settings}, cuda_graphs=on) for on in (None, False))
    train(run, plain)
    graphs = len(run.state.captures)
    assert graphs_on_cpu.replays > len(passes) / 2
    assert 0 < graphs <= 6
    assert run.state.optimiser_steps >= 20 or run.state.early_stops
    assert_same_training(run, plain)
    assert all(parameter.grad is None for model in run.state.forwards for parameter in model.parameters())


@pytest.mark.parametrize(("kind", "value_model"), [("gpt2", "separate"), ("llama", "shared")])
def test_the_first_ratio_is_exactly_one_in_sixteen_bits(make_run, graphs_on_cpu, kind, value_model):
    """In the second iteration the passes are replayed; the old log-probabilities come from plain ones."""
    once = {**SETTINGS, "num_ppo_epochs": 1, "num_mini_batches": 1, "dtype": "bfloat16", "value_model": value_model}
    run = make_run(kind, **once)
    for _ in range(3):
        before = graphs_on_cpu.replays
        metrics = run.iteration()
        actual = [metrics[name] for name in ("val/ratio", "policy/approxkl_avg", "policy/clipfrac_avg")]
        assert actual == [1.0, 0.0, 0.0]
        assert metrics["val/clipfrac_avg"] == 0.0
        assert metrics["policy/grad_norm"] > 0.0
    assert graphs_on_cpu.replays >= before + 3


def test_a_mixture_of_experts_is_captured(graphs_on_cpu):
    run, plain = (run_of(tiny("mixtral").float(), tiny("mixtral").float(), on) for on in (None, False))
    for each in (run, plain):
        each.iteration()
    assert graphs_on_cpu.replays == 19
    assert_same_training(run, plain, 1e-3)


def run_of(policy, reference, cuda_graphs) -> Run:
    settings = {"response_length": 8, "device": "cpu", "dtype": "float32", **SETTINGS}
    config = PPOConfig(**settings, cuda_graphs=cuda_graphs)
    state = build_state(policy, build_critic(config, policy, None), build_tokenizer(), config)
    scorer = RewardScorer([("first_letters", 2.0, first_letters)])
    return Run(state, reference.requires_grad_(False), build_prompts(), scorer, config)


def test_a_weight_without_a_gradient_is_left_alone_by_the_decay(make_run, graphs_on_cpu):
    run = make_run(**SETTINGS, weight_decay=0.1)
    idle = torch.nn.Parameter(torch.ones(3, 3, dtype=torch.float64))
    run.state.policy.register_parameter("idle", idle)
    run.state.policy_optimizer.param_groups[0]["params"].append(idle)
    run.iteration()
    assert graphs_on_cpu.replays
    assert torch.equal(idle, torch.ones_like(idle))


@pytest.mark.parametrize("rows", [3, 4], ids=["a capture fails", "a first run"])
def test_a_weight_that_a_plain_pass_goes_without_has_no_gradient(graphs_on_cpu, rows):
    """One minibatch uses an expert and the next does not. With a gradient of zeros AdamW would decay the expert."""
    always, sometimes = (torch.nn.Parameter(torch.ones(())) for _ in range(2))
    passes = CapturedPasses(Captures(torch.device("cpu")), [], [torch.optim.AdamW([always, sometimes])])

    def compute(inputs):
        loss = (always * inputs[0]).sum()
        if inputs[0].max().item() > 0:
            loss = loss + (sometimes * inputs[0]).sum()
        loss.backward()
        return loss.detach()

    passes.run("kind", (torch.ones(3),), compute)
    assert sometimes.grad == 3
    always.grad = sometimes.grad = None
    for _ in range(2):  # micro-batches of one minibatch
        passes.run("kind", (torch.full((rows,), -1.0),), compute)
    assert always.grad == -2 * rows
    assert sometimes.grad is None
    passes.run("kind", (torch.ones(rows),), compute)
    assert (always.grad, sometimes.grad) == (-rows, rows)


def test_a_step_that_is_skipped_leaves_nothing_in_the_gradients_that_stay(make_run, graphs_on_cpu, monkeypatch):
    """One minibatch's advantages have a NaN; later steps must equal those of a run without graphs."""

    def skipping(run: Run) -> None:
        run.iteration()
        experience = run.before_update()[-1]
        experience.advantages[run.state.plan.epochs[0][0].rows[0], 0] = float("nan")
        metrics = loop.iteration_metrics(
            run.state, experience, loop.optimise_policy(run.state, experience, run.reference)
        )
        run.state.advance(experience.scores, metrics)

    run, plain = (make_run(**SETTINGS, cuda_graphs=on) for on in (None, False))
    for each in (run, plain):
        skipping(each)
        each.iteration()
    assert run.state.skipped_steps == plain.state.skipped_steps == 5
    for name, tensor in weights(run).items():
        assert_close(tensor, weights(plain)[name], rtol=0.0, atol=1e-9)


def test_the_scale_of_losses_in_float16_is_read_anew(make_run, graphs_on_cpu):
    """Without a GPU the test passes in a gradient scaler, which grows after each step."""
    run, plain = (make_run(**SETTINGS, cuda_graphs=on) for on in (None, False))
    for each in (run, plain):
        each.state.accelerator.scaler = torch.amp.GradScaler("cpu", init_scale=4.0, growth_interval=1)
        for _ in range(2):
            each.iteration()
        assert each.state.accelerator.scaler.get_scale() == 2.0**22
    assert graphs_on_cpu.replays
    assert_same_training(run, plain)


def test_a_pass_that_reads_from_the_device_trains_without_graphs_and_loses_nothing(make_run, graphs_on_cpu, caplog):
    run, plain = (make_run(**SETTINGS, cuda_graphs=on) for on in (None, False))
    for each in (run, plain):
        layer = each.state.policy.model.layers[1].mlp
        layer.register_forward_hook(lambda module, given, actual: None if actual.isfinite().all() else actual.zero_())
        for _ in range(2):
            each.iteration()
    assert graphs_on_cpu.replays == 0
    assert sum("update" in line and "CUDA graphs" in line for line in caplog.messages) == 1
    assert_same_training(run, plain)
    assert not run.state.captures.held
    assert (run.state.captures.serves(UPDATE), run.state.captures.serves(DECODING)) == (False, True)


@pytest.mark.parametrize("why", ["processes", "padding", "generate"])
def test_what_is_not_captured_trains_as_without_graphs_and_says_so_once(
    make_run, graphs_on_cpu, passes, monkeypatch, caplog, why
):
    caplog.set_level(logging.INFO)
    engine = "hf" if why == "generate" else "static"
    if why == "processes":
        monkeypatch.setattr(rollouts, "process_count", lambda: 2)
    elif why == "padding":
        for place in (forward, rollouts, state):
            monkeypatch.setattr(place, "packs", lambda _: False)
    run, plain = (make_run(**SETTINGS, rollout_engine=engine, cuda_graphs=on) for on in (None, False))
    for each in (run, plain):
        for _ in range(2):
            each.iteration()
    (line,) = [line for line in caplog.messages if "without CUDA graphs" in line]
    assert f" {why} " in f"{line.rstrip('.')} "
    assert passes == []
    assert [kept(row) for row in run.state.history] == [kept(row) for row in plain.state.history]


def test_buffers_and_graphs_are_kept_over_iterations_and_made_anew_where_weights_have_moved(make_run, graphs_on_cpu):
    run, plain = (make_run(**SETTINGS, cuda_graphs=on) for on in (None, False))
    for each in (run, plain):
        each.iteration()
    first, gradients = run.state.captures.held[UPDATE], sum(p.nbytes for p in trained(run))
    assert gradients < first.bytes < 2 * gradients
    for each in (run, plain):
        each.iteration()
    assert run.state.captures.held[UPDATE] is first
    weight = run.state.policy.model.layers[0].mlp.up_proj.weight
    weight.data = weight.data.clone()
    for each in (run, plain):
        each.iteration()
    assert run.state.captures.held[UPDATE] is not first
    assert_same_training(run, plain)
    run.state.captures.close()
    assert run.state.captures.bytes == 0


def frozen(run: Run) -> None:
    for parameter in run.state.policy.model.layers[0].parameters():
        parameter.requires_grad_(False)


def hooked(run: Run) -> None:
    run.state.policy.model.layers[0].mlp.register_forward_hook(lambda module, given, made: 2.0 * made)


def hotter(run: Run) -> None:
    run.state.policy_forward.temperature = 3.0


def patched(run: Run) -> None:
    layer = run.state.policy.model.layers[0].mlp
    original = layer.forward
    layer.forward = lambda states: 0.5 * original(states)


def replaced(run: Run) -> None:
    class Other(type(run.state.policy.model.layers[0].mlp)):
        def forward(self, states):
            return 0.5 * super().forward(states)

    run.state.policy.model.layers[0].mlp.__class__ = Other


@pytest.mark.parametrize("change", [frozen, hooked, hotter, patched, replaced])
def test_what_a_callback_changes_between_iterations_is_captured_anew(make_run, graphs_on_cpu, caplog, change):
    """Before, captured updates went on training weights that a callback had frozen."""
    caplog.set_level(logging.INFO)
    run, plain = (make_run(**SETTINGS, cuda_graphs=on) for on in (None, False))
    for each in (run, plain):
        each.iteration()
    replays = graphs_on_cpu.replays
    before = [parameter.clone() for parameter in run.state.policy.model.layers[0].parameters()]
    for each in (run, plain):
        change(each)
        each.iteration()
        each.iteration()
    assert graphs_on_cpu.replays > replays
    assert_same_training(run, plain)
    (line,) = [line for line in caplog.messages if "captured anew" in line]
    assert "layers.0" in line or "temperature" in line or ".modules." in line
    after = run.state.policy.model.layers[0].parameters()
    assert all(map(torch.equal, before, after)) == (change is frozen)


def test_a_buffer_that_has_moved_is_part_of_what_is_captured():
    module = torch.nn.BatchNorm1d(2)
    before = fixed_state(module)
    assert fixed_state(module) == before
    module.running_mean = module.running_mean.clone()
    assert fixed_state(module) != before
    module = torch.nn.Dropout(0.5)
    before = fixed_state(module)
    for change in (module.eval, lambda: setattr(module, "p", 0.1)):
        change()
        assert fixed_state(module) != before
        before = fixed_state(module)


@pytest.mark.parametrize("at", [1, 2], ids=["first buffers", "a capture"])
def test_where_the_updates_buffers_do_not_fit_the_minibatch_begins_again_plainly(
    make_run, graphs_on_cpu, monkeypatch, caplog, at
):
    """The error comes behind a micro-batch whose gradients are there already."""
    run, plain = (make_run(**SETTINGS, cuda_graphs=on) for on in (None, False))
    made = []

    class Full(captured_passes._Buffers):
        def compute(self, compute):
            made.append(compute)
            super().compute(compute)  # adds its gradients first
            if len(made) == at:
                raise torch.OutOfMemoryError("CUDA out of memory")

    monkeypatch.setattr(captured_passes, "_Buffers", Full)
    for each in (run, plain):
        each.iteration()
        each.iteration()
    assert len(made) >= at
    assert_same_training(run, plain)
    assert sum("The update runs without CUDA graphs" in line for line in caplog.messages) == 1


def test_an_error_that_is_no_lack_of_memory_is_raised_by_the_plain_pass(make_run, graphs_on_cpu, monkeypatch):
    run = make_run(**SETTINGS)
    run.iteration()

    def broken(*_, **__):
        raise KeyError("mine")

    monkeypatch.setattr(update, "clipped_value_loss", broken)
    run.state.captures.release()
    with pytest.raises(KeyError, match="mine"):
        run.iteration()


def trained(run: Run) -> list[torch.nn.Parameter]:
    models = run.state.policy, run.state.critic
    return [parameter for model in models for parameter in model.parameters() if parameter.requires_grad]


@pytest.fixture
def models_on_the_gpu(monkeypatch) -> None:
    monkeypatch.setattr(ppo_runs, "build_model", lambda *which, **shape: build_model(*which, **shape).to(GPU))


@pytest.mark.gpu
@pytest.mark.usefixtures("models_on_the_gpu")
@pytest.mark.parametrize("case", [*CASES, *MORE_CASES])
def test_on_a_gpu_replayed_micro_batches_give_the_weights_of_plain_ones(make_run, case):
    kind, settings = {**CASES, **MORE_CASES}[case]
    run, plain = (make_run(kind, **{**SETTINGS, **settings}, device=GPU, cuda_graphs=on) for on in (None, False))
    train(run, plain)
    assert not run.state.captures.trouble
    assert len(run.state.captures) > 0
    assert_same_training(run, plain, 1e-6)


@pytest.mark.gpu
@pytest.mark.usefixtures("models_on_the_gpu")
@pytest.mark.parametrize("dtype", ["bfloat16", "float16", "float32"])
@pytest.mark.parametrize("kind", ["gpt2", "llama"])
def test_on_a_gpu_the_first_ratio_is_exactly_one(make_run, kind, dtype):
    """In 16 bits attention is FlashAttention's, beside sequences of no token."""
    once = {**SETTINGS, "num_ppo_epochs": 1, "num_mini_batches": 1, "dtype": dtype, "device": GPU}
    run = make_run(kind, **once)
    train(run)
    assert not run.state.captures.trouble
    assert len(run.state.captures) > 0
    for row in run.state.history:
        assert (row["val/ratio"], row["policy/approxkl_avg"]) == (1.0, 0.0)
        assert row["policy/grad_norm"] > 0.0
