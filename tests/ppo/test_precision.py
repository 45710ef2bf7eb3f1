"""Number types: what is kept wide, what is narrow, float16's loss scaling, and deterministic kernels."""

import copy
import dataclasses
import logging
from unittest.mock import Mock

import pytest
import torch

from ppo_rlhf.config import PPOConfig
from ppo_rlhf.core.errors import TrainingError
from ppo_rlhf.models.products import processors
from ppo_rlhf.models.reward_model import CausalLMRewardModel
from ppo_rlhf.ppo import precision, rollout, update
from ppo_rlhf.ppo.precision import autocast, deterministic, frozen_dtype, torch_dtype, type_that_saves_no_time
from ppo_rlhf.ppo.update import optimise
from ppo_rlhf.training.trainer import PPOTrainer
from tests.tiny_models import tiny_model, word_tokenizer

from .support import ONE_STEP, freeze

CPU = torch.device("cpu")
REDUCED = {"bfloat16": torch.bfloat16, "float16": torch.float16}


def scaled(run, policy: float, critic: float):
    """The same run with other loss scales; without float16 nothing is scaled."""
    on = run.config.dtype == "float16"
    run.state.policy_scaler = torch.amp.GradScaler("cpu", init_scale=policy, enabled=on)
    run.state.critic_scaler = torch.amp.GradScaler("cpu", init_scale=critic, enabled=on)
    return run


@pytest.mark.parametrize(
    ("name", "trained", "frozen"),
    [
        ("float32", torch.float32, torch.float32),
        ("bfloat16", torch.float32, torch.bfloat16),
        ("float16", torch.float32, torch.float16),
        ("float64", torch.float64, torch.float64),
    ],
)
def test_weights_that_train_are_float32_or_wider_and_frozen_ones_are_of_the_type_that_is_asked_for(
    name, trained, frozen
):
    config = PPOConfig(dtype=name)
    assert (torch_dtype(config), frozen_dtype(config)) == (trained, frozen)


@pytest.mark.parametrize("name", ["float32", "bfloat16", "float16", "float64"])
def test_matrix_products_run_in_the_type_that_is_asked_for_and_only_inside_the_context(name):
    config = PPOConfig(dtype=name)
    x = torch.ones(2, 2, dtype=torch_dtype(config))
    with autocast(config, CPU):
        assert (x @ x).dtype == REDUCED.get(name, torch_dtype(config))
    assert (x @ x).dtype == torch_dtype(config)


@pytest.mark.parametrize("name", ["bfloat16", "float16"])
def test_an_iteration_in_a_narrow_type_keeps_weights_moments_and_statistics_wide(make_run, name):
    run = make_run(dtype=name)
    assert run.reference.dtype == REDUCED[name]
    run.before_update()  # the first time the model is asked, in float32, what it can
    seen = []
    hook = run.state.policy.lm_head.register_forward_hook(lambda module, inputs, output: seen.append(output.dtype))
    rollouts, scores, _, experience = run.before_update()
    for tensor in (rollouts.old_logprobs, rollouts.reference_logprobs, rollouts.entropy, scores.values):
        assert tensor.dtype == torch.float32
    optimise(run.state, experience, run.config)
    hook.remove()
    assert set(seen) == {REDUCED[name]}  # decoding, old log-probabilities and the update alike
    for module in (run.state.policy, run.state.critic):
        assert {parameter.dtype for parameter in module.parameters()} == {torch.float32}
    for optimizer in (run.state.policy_optimizer, run.state.critic_optimizer):
        moments = [m for row in optimizer.state.values() for m in row.values() if torch.is_tensor(m)]
        assert moments
        assert {moment.dtype for moment in moments} == {torch.float32}


@pytest.mark.parametrize(("name", "closeness"), [("bfloat16", 0.25), ("float16", 0.02)])
def test_narrow_gradients_are_those_of_float32_but_for_rounding(make_run, name, closeness):
    """On one experience, in norm; bfloat16 has 8 bits. float16's scale of 64 is gone from gradients and norms."""
    experience = make_run(dtype="float32", **ONE_STEP).before_update()[-1]
    found = {}
    for dtype in ("float32", name):
        run = scaled(make_run(dtype=dtype, **ONE_STEP), 64.0, 64.0)
        seen = freeze(run)
        metrics = optimise(run.state, experience, run.config)
        assert run.state.skipped_steps == 0
        gradients = [
            torch.cat([gradient.flatten() for name, gradient in seen[0].items() if name.startswith(model)])
            for model in ("policy.", "critic.")
        ]
        found[dtype] = (gradients, (metrics["policy/grad_norm"], metrics["value/grad_norm"]))
    for exact, narrow in zip(found["float32"][0], found[name][0], strict=True):
        assert 0.0 < float((exact - narrow).norm() / exact.norm()) < closeness
    assert found[name][1] == pytest.approx(found["float32"][1], rel=closeness)


# --- loss scaling ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("align", [False, True], ids=["own", "aligned"])
def test_an_overflow_of_float16_skips_the_step_and_halves_that_models_scale(
    make_run, snapshot, same_tensors, caplog, align
):
    run = scaled(make_run(dtype="float16", align_overflow=align, **ONE_STEP), 2.0**40, 64.0)
    before = [snapshot(module) for module in (run.state.policy, run.state.critic)]
    with caplog.at_level(logging.INFO, logger="ppo_rlhf"):
        metrics = run.iteration()
    assert same_tensors(before[0], snapshot(run.state.policy))
    assert same_tensors(before[1], snapshot(run.state.critic)) == align
    assert (run.state.policy_scaler.get_scale(), run.state.critic_scaler.get_scale()) == (2.0**39, 64.0)
    assert (run.state.optimiser_steps, run.state.skipped_steps, run.state.skipped_in_a_row) == (0, 1, 0)
    assert metrics["optimiser/loss_scale"] == 64.0
    assert caplog.messages == [
        "float16 overflow of the policy in iteration 1, optimiser step 1: step skipped, loss scale now 5.49756e+11."
    ]


def test_overflows_that_a_smaller_scale_mends_do_not_stop_the_run(make_run):
    run = scaled(make_run(dtype="float16", max_skipped_steps=2, num_ppo_epochs=15, num_mini_batches=2), 2.0**30, 64.0)
    run.iteration()
    assert run.state.skipped_steps > 2
    assert run.state.optimiser_steps > 0
    assert run.state.policy_scaler.get_scale() < 2.0**30


def test_a_loss_that_is_not_finite_is_no_overflow_and_stops_the_run(make_run):
    run = make_run(dtype="float16", max_skipped_steps=2)
    experience = run.before_update()[-1]
    experience = dataclasses.replace(experience, advantages=experience.advantages * float("nan"))
    with pytest.raises(TrainingError, match=r"^2 optimiser steps in a row had a non-finite gradient, the last of the"):
        optimise(run.state, experience, run.config)


@pytest.mark.parametrize("iterations_before", [0, 1])
@pytest.mark.parametrize("align", [False, True], ids=["own", "aligned"])
def test_an_update_interrupted_between_the_models_steps_is_done_anew_as_if_nothing_had_been(
    make_run, snapshot, same_tensors, monkeypatch, align, iterations_before
):
    """Aligned, nobody has moved when the critic's passes begin. Else the policy has, and gets back what it had."""
    settings = {"dtype": "float16", "side_by_side": False, "align_overflow": align}
    run, whole = (scaled(make_run(**settings), 64.0, 64.0) for _ in range(2))
    for _ in range(iterations_before):
        run.iteration()
        whole.iteration()
    experience, state = run.before_update()[-1], run.state
    saved = copy.deepcopy([part.state_dict() for part in (state.policy, state.policy_optimizer, state.policy_scaler)])
    with monkeypatch.context() as context:
        context.setattr(update, "response_values", Mock(side_effect=KeyboardInterrupt))
        with pytest.raises(KeyboardInterrupt):
            optimise(state, experience, run.config)
    if not align:
        assert not same_tensors(saved[0], snapshot(state.policy))
        for part, content in zip((state.policy, state.policy_optimizer, state.policy_scaler), saved, strict=True):
            part.load_state_dict(content)
    assert same_tensors(saved[0], snapshot(state.policy))
    optimise(state, experience, run.config)
    whole.iteration()
    for name in ("policy", "critic"):
        found, expected = getattr(state, name), getattr(whole.state, name)
        assert same_tensors(snapshot(found), snapshot(expected))
        scalers = [getattr(each, f"{name}_scaler").state_dict() for each in (state, whole.state)]
        assert scalers[0] == scalers[1]
        assert scalers[0]["_growth_tracker"] == 4 * (iterations_before + 1)  # steps without an overflow


def test_without_float16_nothing_is_scaled(make_run):
    run = make_run(dtype="bfloat16")
    assert not run.state.policy_scaler.is_enabled()
    assert run.iteration()["optimiser/loss_scale"] == 1.0


def test_copies_of_weights_are_kept_while_responses_are_sampled_and_scored_and_not_where_gradients_are_recorded(
    make_run, monkeypatch
):
    run, seen = make_run(dtype="bfloat16", side_by_side=False), []

    def watched(name: str, function):
        return lambda *given, **named: (
            seen.append((name, torch.is_autocast_cache_enabled())) or function(*given, **named)
        )

    monkeypatch.setattr(rollout, "generate_responses", watched("sampling", rollout.generate_responses))
    monkeypatch.setattr(rollout, "response_statistics", watched("scoring", rollout.response_statistics))
    monkeypatch.setattr(update, "response_statistics", watched("policy", update.response_statistics))
    monkeypatch.setattr(type(run.state.critic), "values", watched("critic", type(run.state.critic).values))
    run.iteration()
    assert [name for name, keeps in seen if keeps and name == "policy"] == []
    assert {name for name, keeps in seen if keeps} == {"sampling", "scoring", "critic"}
    assert {name for name, keeps in seen if not keeps} == {"policy", "critic"}


# --- types that the processor has no fast instructions for ------------------------------------------------------------


@pytest.fixture(params=["no", "only slow", "fast"])
def instructions(request, monkeypatch):
    for module in (processors, precision):
        monkeypatch.setattr(module, "has_instructions", lambda _: request.param != "no")
    monkeypatch.setattr(processors, "_has_slow_ones", lambda _: request.param == "only slow")
    return request.param


def test_a_type_that_the_cpu_has_no_fast_instructions_for_is_named_with_what_it_costs(instructions):
    assert type_that_saves_no_time(PPOConfig(dtype="bfloat16"), torch.device("cuda")) is None
    lines = {dtype: type_that_saves_no_time(PPOConfig(dtype=dtype), CPU) for dtype in ("float32", *REDUCED)}
    assert lines["float32"] is None
    for dtype in REDUCED:
        if instructions == "fast":
            assert lines[dtype] is None
        else:
            assert lines[dtype].startswith(f"ppo.dtype={dtype}: this processor has {instructions} instructions for it")
            assert lines[dtype].endswith("no time is saved, and little memory or none")
            compiled = type_that_saves_no_time(PPOConfig(dtype=dtype, compile=True), CPU)
            times = "many times" if instructions == "no" else "twice"
            assert f"with ppo.compile=true training takes {times} as long" in compiled


# --- determinism -----------------------------------------------------------------------------------------------------


def test_deterministic_kernels_are_on_inside_the_context_alone():
    for wanted in (False, True):
        with deterministic(PPOConfig(deterministic=wanted)):
            assert torch.are_deterministic_algorithms_enabled() == wanted
        assert not torch.are_deterministic_algorithms_enabled()
    torch.use_deterministic_algorithms(True, warn_only=True)
    try:
        with deterministic(PPOConfig(deterministic=True)):
            assert not torch.is_deterministic_algorithms_warn_only_enabled()
        assert torch.is_deterministic_algorithms_warn_only_enabled()
    finally:
        torch.use_deterministic_algorithms(False)


@pytest.mark.gpu
def test_on_a_gpu_a_run_with_deterministic_kernels_goes_through_and_repeats_itself():
    def train() -> list[dict[str, float]]:
        config = PPOConfig(device="cuda", deterministic=True, total_episodes=32, response_length=8)
        reward = CausalLMRewardModel.from_causal_lm(tiny_model(seed=2))
        trainer = PPOTrainer(config, tiny_model(), tokenizer=word_tokenizer(), reward=reward, prompts=["a b c", "d e"])
        return [{k: v for k, v in found.items() if k.startswith(("loss/", "val/"))} for found in trainer.train()]

    assert train() == train()


@pytest.mark.parametrize("wanted", [False, True])
def test_every_trained_forward_and_the_update_run_with_deterministic_kernels_if_asked_for(make_run, wanted):
    run, seen = make_run(deterministic=wanted), []

    def note(*_):
        seen.append((torch.are_deterministic_algorithms_enabled(), torch.is_grad_enabled()))

    for module in (run.state.policy.lm_head, run.state.critic.value_head, run.reference.lm_head):
        module.register_forward_hook(note)
    run.state.policy.lm_head.weight.register_hook(note)
    run.iteration()
    assert {flag for flag, learns in seen if learns} == {wanted}
    assert any(flag == wanted for flag, learns in seen if not learns)
