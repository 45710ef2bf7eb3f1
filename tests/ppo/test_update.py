"""The update: the first ratio is exactly 1, gradients do not depend on micro-batches, non-finite steps are skipped."""

import dataclasses
import logging
from contextlib import nullcontext
from types import SimpleNamespace

import pytest
import torch
from torch.testing import assert_close

from ppo_rlhf.core import randomness
from ppo_rlhf.core.errors import DivergenceError, TrainingError
from ppo_rlhf.ppo import epoch_batches, learner, loop, losses
from ppo_rlhf.ppo.experience import Experience
from ppo_rlhf.ppo.learner import Learner
from ppo_rlhf.ppo.losses import LossTerm, Term
from ppo_rlhf.ppo.micro_batches import BatchCut, own_micro_batches
from ppo_rlhf.rewards.scoring import RewardScorer
from tests.ppo.support import ONE_STEP, assert_same_gradients, freeze, gradients, moved_on
from tests.ppo_runs import MEASURED, learn_from, with_responses

NAN = float("nan")


def recorded(monkeypatch, name: str) -> list[dict[str, torch.Tensor]]:
    """Record the arguments of each call of the named loss function, by parameter name."""
    calls: list[dict[str, torch.Tensor]] = []
    original = getattr(losses, name)

    def spy(new, old, target, mask, **options):
        calls.append({"new": new.detach().clone(), "old": old, "target": target, "mask": mask, **options})
        return original(new, old, target, mask, **options)

    monkeypatch.setattr(losses, name, spy)
    return calls


def poisoned(experience: Experience) -> Experience:
    """Return the experience with NaN in every padded slot that the update may read."""
    mask = experience.rollouts.mask

    def poison(values: torch.Tensor) -> torch.Tensor:
        wide = torch.cat([mask, torch.zeros(len(mask), values.shape[1] - mask.shape[1], dtype=torch.bool)], dim=1)
        return torch.where(wide, values, NAN)

    names, responses = ("old_logprobs", "reference_logprobs", "entropy", "values"), experience.rollouts.responses
    rollouts = dataclasses.replace(
        with_responses(
            experience.rollouts,
            response_ids=torch.where(mask, responses.response_ids, 10**9),  # no such token
            sampler_logprobs=poison(responses.sampler_logprobs),
        ),
        **{name: poison(getattr(experience.rollouts, name)) for name in names},
    )
    return dataclasses.replace(
        experience,
        rollouts=rollouts,
        advantages=poison(experience.advantages),
        returns=poison(experience.returns),
    )


def with_nan(experience: Experience, row: int, names: tuple[str, ...] = ("advantages", "returns")) -> Experience:
    changed = {name: getattr(experience, name).clone() for name in names}
    for tensor in changed.values():
        tensor[row, 0] = NAN
    return dataclasses.replace(experience, **changed)


# --- the first ratio -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("kind", "sizes", "dtype"),
    [
        ("gpt2", (12, 1, 1), "float32"),
        pytest.param("llama", (6, 2, 2), "bfloat16", marks=pytest.mark.slow),
        ("bitnet", (5, 3, 3), "float32"),
        pytest.param("llama", (1, 12, 4), "float32", marks=pytest.mark.slow),
        pytest.param("llama", (4, 3, 2), "float64", marks=pytest.mark.slow),
    ],
    ids=str,
)
def test_the_ratio_of_the_first_minibatch_is_one_to_the_last_bit(make_run, monkeypatch, kind, sizes, dtype):
    per_device, accumulation, minibatches = sizes
    run = make_run(
        kind,
        dtype=dtype,
        per_device_train_batch_size=per_device,
        gradient_accumulation_steps=accumulation,
        num_mini_batches=minibatches,
    )
    policy_calls, value_calls = (recorded(monkeypatch, f"clipped_{name}_loss") for name in ("policy", "value"))
    experience = run.before_update()[-1]
    assert len(set(map(len, experience.rollouts.prompts.prompt_ids))) > 1
    learn_from(run.state, experience)
    config = run.config
    in_first = -(-(config.local_batch_size // config.num_mini_batches) // config.local_micro_batch_size)
    for call in [*policy_calls[:in_first], *value_calls[:in_first]]:
        assert torch.equal(call["new"][call["mask"]], call["old"][call["mask"]])
    later = policy_calls[in_first:]  # the weights have moved by then
    assert any(not torch.equal(call["new"][call["mask"]], call["old"][call["mask"]]) for call in later)


def test_every_minibatch_of_the_first_epoch_repeats_the_rollouts_forward_while_the_weights_stand_still(
    make_run, monkeypatch
):
    run = make_run(dtype="float32", num_ppo_epochs=1, num_mini_batches=4)
    calls = recorded(monkeypatch, "clipped_policy_loss")
    freeze(run)
    metrics = run.iteration()
    assert len(calls) == 4
    assert all(torch.equal(call["new"][call["mask"]], call["old"][call["mask"]]) for call in calls)
    assert (metrics["val/ratio"], metrics["policy/approxkl_avg"], metrics["policy/clipfrac_avg"]) == (1.0, 0.0, 0.0)
    assert metrics["val/clipfrac_avg"] == 0.0


# --- steps -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("per_device", "accumulation", "minibatches", "epochs", "episodes"),
    [
        pytest.param(4, 1, 1, 1, 12, marks=pytest.mark.slow),
        pytest.param(4, 3, 2, 3, 30, marks=pytest.mark.slow),
        (2, 4, 4, 2, 8),
    ],
)
def test_the_steps_taken_are_batches_times_epochs_times_minibatches(
    make_run, per_device, accumulation, minibatches, epochs, episodes
):
    run = make_run(
        per_device_train_batch_size=per_device,
        gradient_accumulation_steps=accumulation,
        num_mini_batches=minibatches,
        num_ppo_epochs=epochs,
        total_episodes=episodes,
    )
    taken = {"policy": 0, "critic": 0}
    for name, optimizer in (
        ("policy", run.state.learner.policy_optimizer),
        ("critic", run.state.learner.critic_optimizer),
    ):
        optimizer.register_step_post_hook(
            lambda *_, name=name: taken.__setitem__(name, taken[name] + 1),
        )
    iterations = 0
    while not run.state.progress.finished:
        metrics = run.iteration()
        iterations += 1
    batch = per_device * accumulation
    assert iterations == -(-episodes // batch)
    expected = iterations * epochs * minibatches
    assert taken == {"policy": expected, "critic": expected}
    assert run.state.learner.optimiser_steps == metrics["optimiser/steps"] == expected
    assert run.state.progress.episode == metrics["episode"] == iterations * batch
    assert run.state.learner.skipped_steps == 0


def test_each_epoch_visits_each_response_once_in_other_minibatches(make_run, monkeypatch):
    run = make_run(num_ppo_epochs=3, num_mini_batches=2)
    experience = run.before_update()[-1]
    visited = []
    original = epoch_batches._micro_batches

    def spy(experience, cut, groups, *inputs):
        visited.append(groups)
        return original(experience, cut, groups, *inputs)

    monkeypatch.setattr(epoch_batches, "_micro_batches", spy)
    learn_from(run.state, experience)
    assert [sorted(row for rows in epoch for row in rows) for epoch in visited] == [list(range(12))] * 3
    assert len({frozenset(map(frozenset, epoch)) for epoch in visited}) == 3


def test_an_epochs_inputs_are_made_once_and_the_first_ones_before_the_update(make_run, monkeypatch):
    run, made = make_run(num_ppo_epochs=3, num_mini_batches=2), []
    inputs = BatchCut.inputs
    monkeypatch.setattr(BatchCut, "inputs", lambda cut, groups: (made.append(groups), inputs(cut, groups))[1])
    experience = run.before_update()[-1]
    epochs = [own_micro_batches(epoch) for epoch in experience.rollouts.cut.epochs]
    assert made == epochs[:1]
    learn_from(run.state, experience)
    assert made == epochs


def test_the_next_epochs_batches_are_made_before_the_wait_of_an_epochs_last_step(make_run, monkeypatch):
    """A step's only device sync reads the gradient norms, so the CPU prepares the next epoch before it."""
    run, events = make_run(num_ppo_epochs=3, num_mini_batches=2), []
    experience = run.before_update()[-1]

    def note(owner, name):
        call = getattr(owner, name)
        monkeypatch.setattr(owner, name, lambda *args: (events.append(name), call(*args))[1])

    note(epoch_batches, "_micro_batches")
    note(Learner, "take_step")
    loop.update(run.state, experience, run.reference)
    epoch = ["take_step", "_micro_batches", "take_step"]
    assert events == ["_micro_batches", *epoch, *epoch, "take_step", "take_step"]


def test_an_iteration_advances_the_state_and_returns_and_remembers_its_metrics(make_run):
    run = make_run()
    first = run.iteration()
    second = run.iteration()
    assert (run.state.progress.iteration, run.state.progress.episode) == (2, 24)
    assert run.state.progress.history == [{"iteration": 1.0, **first}, {"iteration": 2.0, **second}]
    assert first["lr/policy"] == pytest.approx(1e-3, rel=1e-12)
    assert second["lr/policy"] == pytest.approx(1e-3 * 2 / 3, rel=1e-12)


def test_the_kl_controller_is_told_the_kl_summed_over_a_response_and_the_number_of_episodes(make_run):
    run, told = make_run(), []
    run.state.shaping.kl_controller.update = lambda *arguments: told.append(arguments)
    metrics = run.iteration()
    assert told == [(metrics["objective/kl"], 12)]


def test_policy_and_critic_step_at_their_own_learning_rates(make_run, snapshot):
    """Adam's first step moves a weight by the learning rate, whatever the size of its gradient."""
    run = make_run(learning_rate=1e-4, value_learning_rate=5e-3, **ONE_STEP)
    before = [snapshot(module) for module in (run.state.learner.policy, run.state.learner.critic)]
    run.iteration()
    for module, old, rate in zip(
        (run.state.learner.policy, run.state.learner.critic), before, (1e-4, 5e-3), strict=True
    ):
        largest = max(float((tensor - old[name]).abs().max()) for name, tensor in module.state_dict().items())
        assert largest == pytest.approx(rate, rel=1e-3)


# --- gradients -------------------------------------------------------------------------------------------------------


def test_nan_in_every_padded_slot_changes_neither_gradients_nor_statistics(make_run):
    run = make_run(**ONE_STEP)
    experience = moved_on(run.before_update()[-1])
    assert not bool(experience.rollouts.mask.all())
    expected = gradients(make_run, experience)
    assert_same_gradients(gradients(make_run, poisoned(experience)), expected)
    freeze(run)
    metrics = learn_from(run.state, poisoned(experience))
    assert all(value == value for value in metrics.values())


def test_the_gradient_of_a_minibatch_does_not_depend_on_the_other_minibatches(make_run):
    """Each minibatch is divided by its own tokens: two halves weighed by their tokens make the whole.

    GPT-2, because a Llama's norm rounds to float32 even in float64.
    """
    run = make_run("gpt2", **{**ONE_STEP, "num_mini_batches": 2})
    experience = moved_on(run.before_update()[-1])
    seen = freeze(run)
    learn_from(run.state, experience)
    halves = randomness.minibatch_partition(run.config.seed, 1, 0, 12, 2)
    tokens = [int(experience.rollouts.responses.lengths[rows].sum()) for rows in halves]
    assert tokens[0] != tokens[1]
    whole = gradients(make_run, experience, "gpt2")
    for name, expected in whole.items():
        mean = (tokens[0] * seen[0][name] + tokens[1] * seen[1][name]) / sum(tokens)
        assert_close(mean, expected, rtol=0.0, atol=1e-10)


def test_gradients_of_policy_and_critic_are_each_clipped_to_the_norm(make_run):
    run = make_run(**ONE_STEP)
    experience = moved_on(run.before_update()[-1])
    free = gradients(make_run, experience)
    clipped = gradients(make_run, experience, max_grad_norm=1e-3)
    metrics = learn_from(run.state, experience)
    for name in ("policy", "critic"):
        norms = [
            float(torch.stack([g.norm() for n, g in actual.items() if n.startswith(name)]).norm())
            for actual in (free, clipped)
        ]
        assert norms[0] > 1e-3
        assert norms[1] == pytest.approx(1e-3, rel=1e-3)
        for key, gradient in free.items():
            if key.startswith(name):
                assert_close(clipped[key], gradient * (1e-3 / norms[0]), rtol=1e-2, atol=1e-12)
        key = {"policy": "policy/grad_norm", "critic": "value/grad_norm"}[name]
        assert metrics[key] == pytest.approx(norms[0], rel=1e-9)  # the norm before clipping is what is logged


def test_the_logged_statistics_are_means_over_the_tokens_of_the_minibatch(make_run):
    run = make_run(per_device_train_batch_size=5, gradient_accumulation_steps=3, **ONE_STEP)
    exact = run.before_update()[-1]
    experience = moved_on(exact)
    mask, new = exact.rollouts.mask, exact.rollouts.old_logprobs[exact.rollouts.mask]
    old, advantages = experience.rollouts.old_logprobs[mask], experience.advantages[mask]
    ratio = (new - old).exp()
    unclipped, clipped = advantages * ratio, advantages * ratio.clamp(0.8, 1.2)
    freeze(run)
    metrics = learn_from(run.state, experience)
    close = {"rel": 0.0, "abs": 1e-10}
    assert metrics["val/ratio"] == pytest.approx(float(ratio.mean()), **close)
    assert metrics["policy/approxkl_avg"] == pytest.approx(float(0.5 * (new - old).square().mean()), **close)
    assert metrics["policy/clipfrac_avg"] == pytest.approx(float((clipped < unclipped).double().mean()), **close)
    assert metrics["loss/policy_avg"] == pytest.approx(float(-torch.minimum(clipped, unclipped).mean()), **close)


@pytest.mark.parametrize("shared", [False, True])
def test_a_term_of_the_loss_that_is_added_to_the_table_trains_and_is_logged_and_in_the_total(
    make_run, monkeypatch, shared
):
    """The mean log-probability, 50 times: one step against its gradient makes the responses less likely."""
    run, other = (make_run(value_model="shared" if shared else "separate", **ONE_STEP) for _ in range(2))
    experience = run.before_update()[-1]
    plain = learn_from(other.state, experience)
    term = LossTerm(lambda output, inputs: Term(inputs.aggregated(output.logprobs)), lambda config, kl_coef: 50.0)
    monkeypatch.setitem(losses.POLICY_TERMS, "likelihood", term)
    metrics = learn_from(run.state, experience)
    mean = float(experience.rollouts.old_logprobs[experience.mask].mean())
    assert metrics["loss/likelihood_avg"] == pytest.approx(mean, rel=1e-9)
    assert metrics["loss/total"] - plain["loss/total"] == pytest.approx(50.0 * mean, rel=1e-9)
    assert metrics["policy/grad_norm"] > 10 * plain["policy/grad_norm"]


# --- non-finite gradients --------------------------------------------------------------------------------------------


CULPRITS = {"advantages": "policy", "returns": "critic"}


@pytest.mark.parametrize("names", [("advantages",), ("returns",)], ids="+".join)
def test_a_non_finite_gradient_of_either_model_skips_the_step_of_both(make_run, snapshot, same_tensors, caplog, names):
    run = make_run(**ONE_STEP)
    experience = with_nan(run.before_update()[-1], 3, names)
    models = run.state.learner.policy, run.state.learner.critic
    before = [snapshot(model) for model in models]
    with caplog.at_level(logging.WARNING):
        metrics = learn_from(run.state, experience)
    assert all(same_tensors(old, snapshot(model)) for old, model in zip(before, models, strict=True))
    assert not run.state.learner.policy_optimizer.state
    assert not run.state.learner.critic_optimizer.state
    assert (run.state.learner.optimiser_steps, run.state.learner.skipped_steps, run.state.learner.skipped_in_a_row) == (
        0,
        1,
        1,
    )
    assert (metrics["optimiser/steps"], metrics["optimiser/skipped_steps"]) == (0.0, 1.0)
    (message,) = caplog.messages
    assert f"of the {' and '.join(CULPRITS[name] for name in names)} in iteration 1" in message


def test_only_the_minibatch_with_the_bad_row_is_skipped_and_training_continues(make_run, snapshot, same_tensors):
    run = make_run(**{**ONE_STEP, "num_mini_batches": 3, "num_ppo_epochs": 2})
    before = snapshot(run.state.learner.policy)
    learn_from(run.state, with_nan(run.before_update()[-1], 0))
    assert (run.state.learner.optimiser_steps, run.state.learner.skipped_steps) == (4, 2)
    assert run.state.progress.iteration == 1
    weights = snapshot(run.state.learner.policy)
    assert not same_tensors(weights, before)
    assert all(bool(torch.isfinite(tensor).all()) for tensor in weights.values())


def test_too_many_skipped_steps_in_a_row_stop_the_run_and_say_where(make_run, snapshot, same_tensors):
    run = make_run(num_ppo_epochs=4, num_mini_batches=2)
    run.iteration()
    experience = run.before_update()[-1]
    experience = dataclasses.replace(experience, advantages=experience.advantages * NAN)
    before = [snapshot(module) for module in (run.state.learner.policy, run.state.learner.critic)]
    with pytest.raises(TrainingError) as caught:
        learn_from(run.state, experience)
    assert str(caught.value).startswith("5 optimiser steps in a row had a non-finite gradient")
    assert "iteration 2, optimiser step 13" in str(caught.value)
    after = [snapshot(module) for module in (run.state.learner.policy, run.state.learner.critic)]
    assert all(same_tensors(*pair) for pair in zip(before, after, strict=True))
    assert (run.state.progress.iteration, len(run.state.progress.history)) == (1, 1)
    assert isinstance(caught.value, DivergenceError)
    assert caught.value.last_good_iteration == 1


@pytest.mark.parametrize("drift", [3.0, pytest.param(NAN, marks=pytest.mark.slow)], ids=["too far", "not a number"])
def test_rollouts_too_far_from_the_reference_stop_the_run_before_anything_changes(
    make_run, snapshot, same_tensors, drift
):
    run = make_run(kl_stop=2.5, total_episodes=60)
    run.iteration()
    run.iteration()
    experience = run.before_update()[-1]
    old_logprobs = experience.rollouts.reference_logprobs.clone()
    old_logprobs[:, 0] += drift
    rollouts = dataclasses.replace(experience.rollouts, old_logprobs=old_logprobs)
    before = [snapshot(module) for module in (run.state.learner.policy, run.state.learner.critic)]
    with pytest.raises(DivergenceError) as caught:
        learn_from(run.state, dataclasses.replace(experience, rollouts=rollouts))
    assert "ppo.kl_stop=2.5" in str(caught.value)
    assert caught.value.last_good_iteration == 1  # iteration 2's own rollouts were near; what it led to is not
    after = [snapshot(module) for module in (run.state.learner.policy, run.state.learner.critic)]
    assert all(same_tensors(*pair) for pair in zip(before, after, strict=True))
    assert (run.state.progress.iteration, len(run.state.progress.history)) == (2, 2)


def test_a_step_taken_ends_the_row_of_skipped_ones(make_run):
    run = make_run(**{**ONE_STEP, "total_episodes": 60})
    for _ in range(2):
        learn_from(run.state, with_nan(run.before_update()[-1], 0))
        assert run.state.learner.skipped_in_a_row == 1
        run.iteration()
        assert run.state.learner.skipped_in_a_row == 0
    assert (run.state.learner.optimiser_steps, run.state.learner.skipped_steps) == (2, 2)


def test_skipped_steps_in_a_row_are_counted_across_iterations(make_run):
    run = make_run(**{**ONE_STEP, "total_episodes": 120})
    for _ in range(4):
        learn_from(run.state, with_nan(run.before_update()[-1], 0))
    with pytest.raises(TrainingError, match=r"^5 .* iteration 5, optimiser step 5\."):
        learn_from(run.state, with_nan(run.before_update()[-1], 0))


def test_a_score_that_is_not_a_number_never_reaches_the_weights(make_run, snapshot, same_tensors):
    def broken(batch):
        return torch.tensor([NAN, *[1.0] * (len(batch) - 1)])

    run = make_run(scorer=RewardScorer([("broken", 1.0, broken)]), num_ppo_epochs=5)
    before = snapshot(run.state.learner.policy)
    with pytest.raises(TrainingError, match=r"^5 .*non-finite"):
        run.iteration()
    assert same_tensors(before, snapshot(run.state.learner.policy))  # whitening spreads it to every advantage
    assert all(bool(torch.isfinite(tensor).all()) for tensor in snapshot(run.state.learner.critic).values())


# --- reproducibility -------------------------------------------------------------------------------------------------


def test_two_runs_with_one_seed_are_bit_identical_and_another_seed_is_not(make_run, snapshot, same_tensors):
    results = []
    for seed in (1, 1, 2):
        torch.manual_seed(len(results))  # the process's own randomness has no part in it
        run = make_run(dtype="float32", seed=seed)
        while not run.state.progress.finished:
            run.iteration()
        # as texts: the norm of a gradient that overflowed is NaN, which is no NaN's equal
        history = [
            {k: repr(v) for k, v in row.items() if not k.startswith(MEASURED)} for row in run.state.progress.history
        ]
        results.append((snapshot(run.state.learner.policy), snapshot(run.state.learner.critic), history))
    first, second, other = results
    assert same_tensors(first[0], second[0])
    assert same_tensors(first[1], second[1])
    assert first[2] == second[2]
    assert not same_tensors(first[0], other[0])


def test_the_update_changes_neither_the_experience_nor_the_reference(make_run, snapshot, same_tensors):
    run = make_run()
    experience = run.before_update()[-1]
    records = (experience, experience.rollouts, experience.scores)
    kept = [{n: v.clone() for n, v in vars(record).items() if isinstance(v, torch.Tensor)} for record in records]
    reference = snapshot(run.reference)
    learn_from(run.state, experience)
    for record, tensors in zip(records, kept, strict=True):
        assert all(torch.equal(getattr(record, name), tensor) for name, tensor in tensors.items())
    assert same_tensors(snapshot(run.reference), reference)


def test_no_gradient_is_held_after_an_update(make_run):
    run = make_run()
    run.iteration()
    models = (run.state.learner.policy, run.state.learner.critic)
    assert all(parameter.grad is None for model in models for parameter in model.parameters())


@pytest.mark.parametrize(
    ("is_last", "shards", "unsummed"), [(False, False, ["policy", "critic"]), (True, False, []), (False, True, [])]
)
def test_processes_sum_gradients_after_the_last_micro_batch_and_where_they_share_weights_out_after_each(
    monkeypatch, is_last, shards, unsummed
):
    """Between two sums a process holds the gradients of all weights, for which FSDP2's processes have no room."""
    left_out: list[str] = []

    def no_sync(forward):
        left_out.append(forward)
        return nullcontext()

    monkeypatch.setattr(learner, "shards_models", lambda: shards)
    of = SimpleNamespace(forwards=["policy", "critic"], accelerator=SimpleNamespace(no_sync=no_sync))
    with Learner.synchronised(of, is_last=is_last):
        assert left_out == unsummed
