"""Every option of the losses and the update, against gradients worked one unpadded row at a time in plain torch."""

import dataclasses
import logging
import math

import pytest
import torch
from transformers import PreTrainedModel

from ppo_rlhf.config import PPOConfig
from ppo_rlhf.ppo.experience import Experience
from tests.ppo.support import ONE_STEP, assert_same_gradients, gradients, moved_on, with_settings_of
from tests.ppo_runs import build_model, learn_from, with_responses

NAN = float("nan")


def off_policy(experience: Experience) -> Experience:
    """Return an experience as after some updates, with a large rounding of the sampler and a distant reference."""
    experience, generator = moved_on(experience), torch.Generator().manual_seed(5)
    rollouts = experience.rollouts
    noise = [torch.randn(rollouts.mask.shape, generator=generator, dtype=torch.float64) for _ in range(2)]
    rollouts = dataclasses.replace(
        with_responses(
            rollouts, sampler_logprobs=torch.where(rollouts.mask, rollouts.old_logprobs + 0.3 * noise[0], NAN)
        ),
        reference_logprobs=torch.where(rollouts.mask, rollouts.old_logprobs + 0.7 * noise[1], NAN),
    )
    return dataclasses.replace(experience, rollouts=rollouts)


def counting_rows(experience: Experience, config: PPOConfig) -> list[int]:
    """Return the responses that the losses count."""
    terminated = experience.rollouts.responses.terminated.tolist()
    return [row for row, ended in enumerate(terminated) if ended or config.truncated_responses != "mask"]


def share_of_positives(experience: Experience, config: PPOConfig) -> float:
    """Tokens of all responses by those of the positive ones; where the losses are divided by responses, responses."""
    rows, lengths = counting_rows(experience, config), experience.rollouts.responses.lengths.tolist()
    positive = [row for row in rows if float(experience.scores.total[row]) >= config.positive_threshold]
    if config.loss_aggregation == "token_mean":
        return sum(lengths[row] for row in rows) / sum(lengths[row] for row in positive)
    return len(rows) / len(positive)


def other_reference() -> PreTrainedModel:
    """A reference policy that is not the policy."""
    return build_model(seed=7).requires_grad_(False)


def row_losses(run, experience: Experience, config: PPOConfig, row: int) -> tuple[torch.Tensor, torch.Tensor]:
    """The policy's and the critic's loss of each token of one response, `[length]`; no padding, no mask, no core."""
    rollouts, policy, critic = experience.rollouts, run.state.learner.policy, run.state.learner.critic
    prompt, response = rollouts.prompts.prompt_ids[row], rollouts.responses.token_lists()[row]
    ids, length, start = torch.tensor([prompt + response]), len(response), len(prompt) - 1
    log_p = torch.log_softmax(policy(ids, use_cache=False).logits[0, start:-1] / config.temperature, dim=-1)
    logprobs = log_p[torch.arange(length), response]
    ratio = (logprobs - rollouts.old_logprobs[row, :length]).exp()
    advantage = experience.advantages[row, :length]
    if config.importance_cap is not None:
        mismatch = rollouts.old_logprobs[row, :length] - rollouts.responses.sampler_logprobs[row, :length]
        advantage = advantage * mismatch.exp().clamp(max=config.importance_cap)
    high = config.cliprange if config.cliprange_high is None else config.cliprange_high
    gain = torch.minimum(advantage * ratio, advantage * ratio.clamp(1 - config.cliprange, 1 + high))
    if config.importance_low is not None:  # REINFORCE with a weight that has no gradient, as the paper writes it
        weight = (logprobs.detach() - rollouts.responses.sampler_logprobs[row, :length]).exp()
        weight = torch.where((weight > config.importance_low) & (weight < config.importance_high), weight, 0.0)
        gain = weight * advantage * logprobs
    if config.dual_clip is not None:
        gain = torch.where(advantage < 0, torch.maximum(gain, config.dual_clip * advantage), gain)
    policy_loss = -gain
    if config.kl_in == "loss":
        d = logprobs - rollouts.reference_logprobs[row, :length]
        price = config.kl_coef
        logits = run.reference(ids, use_cache=False).logits[0, start:-1]
        ref_log_p = torch.log_softmax(logits.detach() / config.temperature, dim=-1)
        full = (log_p.exp() * (log_p - ref_log_p)).sum(-1)
        k3_plus = d.detach() * d  # with the right gradient, not the value
        estimates = {"full": full, "k2": d**2 / 2, "k3": (-d).exp() - 1 + d, "k3+": k3_plus}
        policy_loss = policy_loss + price * estimates[config.kl_estimator]
    policy_loss = policy_loss + config.entropy_coef * (log_p.exp() * log_p).sum(-1)
    states = critic.backbone(ids, use_cache=False).last_hidden_state[0, start:-1]
    values = (states @ critic.value_head.weight.T + critic.value_head.bias)[:, 0]
    old, target = rollouts.values[row, :length], experience.returns[row, :length]
    near = values
    if config.cliprange_value is not None:
        near = old + (values - old).clamp(-config.cliprange_value, config.cliprange_value)
    if config.positive_coef and experience.scores.total[row] >= config.positive_threshold:
        # the other terms are divided by the count of all responses, this one by that of the positive ones
        policy_loss = policy_loss - config.positive_coef * logprobs * share_of_positives(experience, config)
    return policy_loss, 0.5 * torch.maximum((values - target) ** 2, (near - target) ** 2)


def gradients_by_hand(run, experience: Experience, config: PPOConfig) -> dict[str, torch.Tensor]:
    rollouts, rows = experience.rollouts, counting_rows(experience, config)
    tokens = sum(int(rollouts.responses.lengths[row]) for row in rows)
    run.state.learner.policy.zero_grad()
    run.state.learner.critic.zero_grad()
    for row in rows:
        divisor = {
            "token_mean": tokens,
            "seq_mean_token_sum": len(rows),
            "seq_mean_token_mean": len(rows) * int(rollouts.responses.lengths[row]),
            "token_sum_fixed_length": len(rows) * config.response_length,
        }[config.loss_aggregation]
        policy_loss, value_loss = row_losses(run, experience, config, row)
        ((policy_loss.sum() + config.vf_coef * value_loss.sum()) / divisor).backward()
    return {
        **{f"policy.{n}": p.grad.clone() for n, p in run.state.learner.policy.named_parameters()},
        **{f"critic.{n}": p.grad.clone() for n, p in run.state.learner.critic.named_parameters()},
    }


OPTIONS = [
    {"cliprange_high": 0.35, "cliprange": 0.1},
    {"dual_clip": 1.1},
    {"entropy_coef": 0.3},
    {"kl_in": "loss", "kl_estimator": "k2"},
    {"kl_in": "loss", "kl_estimator": "k3"},
    {"kl_in": "loss", "kl_estimator": "k3+"},
    {"kl_in": "loss", "kl_estimator": "full"},
    {"importance_cap": 1.15},
    {"importance_low": 0.8, "importance_high": 1.3},
    {"importance_low": 0.8, "importance_high": 1.3, "loss_aggregation": "seq_mean_token_mean", "entropy_coef": 0.1},
    {"cliprange_value": None},
    {"positive_coef": 0.3, "positive_threshold": 0.75},
    {"positive_coef": 0.3, "positive_threshold": 0.75, "loss_aggregation": "seq_mean_token_mean"},
    {"loss_aggregation": "seq_mean_token_sum"},
    {"loss_aggregation": "seq_mean_token_mean"},
    {"loss_aggregation": "token_sum_fixed_length"},
    {"truncated_responses": "mask", "missing_eos_penalty": None},
    {
        "truncated_responses": "mask",
        "missing_eos_penalty": None,
        "loss_aggregation": "seq_mean_token_mean",
        "kl_in": "loss",
        "kl_estimator": "k2",
        "entropy_coef": 0.1,
        "importance_cap": 1.2,
        "positive_coef": 0.2,
        "positive_threshold": 0.5,
    },
]
PRICE = {"kl_coef": 0.4}
NAMES = ["-".join(f"{v}" for k, v in option.items() if v is not None) for option in OPTIONS]


@pytest.fixture
def experience(make_run) -> Experience:
    """Twelve responses of different lengths, some of them cut off."""
    experience = off_policy(make_run(**ONE_STEP, **PRICE).before_update()[-1])
    assert 0 < int(experience.rollouts.responses.terminated.sum()) < 12
    full_kl = torch.zeros(12, 8)  # which only a metric reads
    return dataclasses.replace(experience, rollouts=dataclasses.replace(experience.rollouts, full_kl=full_kl))


@pytest.mark.parametrize(
    "kind", ["gpt2", *(pytest.param(kind, marks=pytest.mark.slow) for kind in ("llama", "bitnet"))]
)
def test_the_gradient_is_that_of_the_plain_losses_worked_one_row_at_a_time(make_run, kind):
    run = make_run(kind, **ONE_STEP)
    experience = moved_on(run.before_update()[-1])
    expected = gradients_by_hand(run, experience, run.config)
    assert_same_gradients(gradients(make_run, experience, kind), expected)
    assert all(float(gradient.abs().max()) > 1e-6 for gradient in expected.values())


@pytest.mark.parametrize(
    "option", [*(pytest.param(option, marks=pytest.mark.slow) for option in OPTIONS[:-1]), OPTIONS[-1]], ids=NAMES
)
def test_with_an_option_the_gradient_is_that_of_its_losses_worked_one_row_at_a_time(make_run, experience, option):
    run, reference = make_run(**ONE_STEP, **PRICE, **option), other_reference()
    run.reference = reference
    actual = gradients(make_run, experience, reference=reference, **PRICE, **option)
    assert_same_gradients(actual, gradients_by_hand(run, experience, run.config))
    plain = gradients(make_run, experience, missing_eos_penalty=None)
    assert (
        max(float((actual[name] - plain[name]).abs().max()) for name in actual) > 1e-4
    )  # and the option does something


@pytest.mark.parametrize(
    ("option", "cut"),
    [
        pytest.param(
            {"entropy_coef": 0.3},
            {"per_device_train_batch_size": 4, "gradient_accumulation_steps": 3},
            marks=pytest.mark.slow,
        ),
        pytest.param(
            {"loss_aggregation": "seq_mean_token_mean"}, {"max_tokens_per_micro_batch": 40}, marks=pytest.mark.slow
        ),
        (OPTIONS[-1], {"per_device_train_batch_size": 1, "gradient_accumulation_steps": 12}),
        pytest.param(OPTIONS[-1], {"max_tokens_per_micro_batch": 2}, marks=pytest.mark.slow),
        ({"kl_in": "loss", "kl_estimator": "full"}, {"max_tokens_per_micro_batch": 40}),
    ],
    ids=lambda given: "-".join(map(str, given)),
)
def test_the_gradient_does_not_depend_on_how_the_minibatch_is_cut(make_run, experience, option, cut):
    reference = other_reference()
    expected = gradients(make_run, experience, reference=reference, **option)
    assert_same_gradients(gradients(make_run, experience, reference=reference, **{**option, **cut}), expected)


@pytest.mark.parametrize(
    "window", [pytest.param(None, marks=pytest.mark.slow), 64]
)  # a model with a window needs padding, which then counts
def test_a_token_budget_cuts_the_minibatch_and_the_first_ratio_stays_exactly_one(make_run, window):
    settings = {"max_tokens_per_micro_batch": 30, "num_ppo_epochs": 1, "num_mini_batches": 1, "dtype": "float32"}
    run = make_run(model={"sliding_window": window}, **settings)
    experience = run.before_update()[-1]
    pieces = experience.rollouts.cut.first_micro_batches
    assert len(pieces) > 2
    assert sorted(row for piece in pieces for row in piece) == list(range(12))
    for piece in pieces:
        prompts = [len(experience.rollouts.prompts.prompt_ids[row]) for row in piece]
        tokens = [a + b for a, b in zip(prompts, experience.rollouts.responses.lengths[piece].tolist(), strict=True)]
        assert (len(piece) * max(tokens) if window else sum(tokens)) <= 30
    metrics = learn_from(run.state, experience)
    assert (metrics["val/ratio"], metrics["policy/approxkl_avg"]) == (1.0, 0.0)


# --- the KL over the vocabulary --------------------------------------------------------------------------------------


@pytest.mark.parametrize("kl_in", ["reward", "loss"])
def test_the_kl_over_the_vocabulary_is_paid_in_the_reward_or_is_at_first_that_of_the_loss(make_run, kl_in):
    run = make_run(kl_in=kl_in, kl_estimator="full", num_ppo_epochs=1, num_mini_batches=1)
    run.reference = other_reference()
    rollouts, _, rewards, experience = run.before_update()
    mask, full_kl = rollouts.mask, rollouts.full_kl
    assert bool((full_kl[mask] > 0).all())
    assert not full_kl[~mask].any()
    assert torch.equal(rollouts.kl_penalty("full"), full_kl)
    metrics = learn_from(run.state, experience, run.reference)
    assert metrics["objective/kl_estimate"] == pytest.approx(float(full_kl.sum() / 12), rel=1e-12)
    assert metrics["val/ratio"] == 1.0
    paid = float((rewards.sum(-1) - torch.where(rollouts.responses.terminated, 0.0, -0.5)).sum())
    price = 0.05 if kl_in == "reward" else 0.0
    assert paid == pytest.approx(float(experience.scores.total.sum() - price * full_kl.sum()), rel=1e-9)
    assert metrics["loss/kl_avg"] == pytest.approx(0.0 if price else float(full_kl[mask].mean()), rel=1e-9)


# --- more epochs for the critic ---------------------------------------------------------------------------------------


def test_with_more_epochs_for_the_critic_each_model_is_that_of_a_run_with_its_epochs(make_run, snapshot, same_tensors):
    """Neither loss reads the other model, so two runs without the option are the oracle, bit for bit."""
    runs = [make_run(**epochs) for epochs in ({}, {"num_ppo_epochs": 5}, {"num_critic_epochs": 5})]
    taken = {"policy": 0, "critic": 0}
    for name in taken:
        optimizer = getattr(runs[2].state.learner, f"{name}_optimizer")
        optimizer.register_step_post_hook(lambda *_, name=name: taken.__setitem__(name, taken[name] + 1))
    short, long, actual = [run.iteration() for run in runs]
    assert same_tensors(snapshot(runs[2].state.learner.policy), snapshot(runs[0].state.learner.policy))
    assert same_tensors(snapshot(runs[2].state.learner.critic), snapshot(runs[1].state.learner.critic))
    assert not same_tensors(snapshot(runs[0].state.learner.critic), snapshot(runs[1].state.learner.critic))
    assert taken == {"policy": 2 * 2, "critic": 5 * 2}
    assert actual["optimiser/steps"] == 5 * 2
    for name, value in actual.items():
        if name.startswith(("policy/", "loss/", "val/", "value/")) and name != "loss/total":
            of_critic = name.startswith("value/") or name in ("loss/value_avg", "val/clipfrac_avg")
            assert value == (long if of_critic else short)[name], name


# --- early stopping --------------------------------------------------------------------------------------------------


def test_the_update_ends_before_a_step_once_the_policy_has_moved_one_and_a_half_targets(
    make_run, snapshot, same_tensors
):
    """approxkl of the first minibatch, after the shift of the old log-probabilities, is known; the limit is 1.5 x."""
    run = make_run(num_ppo_epochs=3, num_mini_batches=1)
    exact = run.before_update()[-1]
    experience, mask = moved_on(exact), exact.rollouts.mask
    moved = 0.5 * (exact.rollouts.old_logprobs - experience.rollouts.old_logprobs)[mask].square().mean()
    limit = float(moved) / 1.5
    stopped = make_run(num_ppo_epochs=3, num_mini_batches=1, target_kl=limit * 0.999)
    before = snapshot(stopped.state.learner.policy)
    metrics = learn_from(stopped.state, experience)
    assert (
        stopped.state.learner.optimiser_steps,
        stopped.state.learner.early_stops,
        metrics["optimiser/early_stops"],
    ) == (0, 1, 1.0)
    assert same_tensors(before, snapshot(stopped.state.learner.policy))
    assert metrics["policy/approxkl_avg"] == pytest.approx(float(moved), rel=1e-9)
    continued = make_run(num_ppo_epochs=3, num_mini_batches=1, target_kl=limit * 1.001)
    learn_from(continued.state, experience)
    assert continued.state.learner.optimiser_steps >= 1


def test_the_step_that_is_not_taken_has_no_gradient_norm(make_run):
    """The first minibatch of a batch has the ratio 1, so its step is taken; the second is above the limit."""
    once = make_run(num_ppo_epochs=1, num_mini_batches=1)
    stopped = make_run(num_ppo_epochs=3, num_mini_batches=1, target_kl=1e-12)
    metrics = learn_from(stopped.state, stopped.before_update()[-1])
    assert (stopped.state.learner.optimiser_steps, metrics["optimiser/early_stops"]) == (1, 1.0)
    expected = learn_from(once.state, once.before_update()[-1])
    assert once.state.learner.optimiser_steps == 1
    for key in ("policy/grad_norm", "value/grad_norm"):
        assert metrics[key] == pytest.approx(expected[key], rel=1e-9)


# --- warm-up of the critic, and the hold of the controller ------------------------------------------------------------


def test_in_its_warm_up_only_the_critic_learns_and_the_controller_hears_nothing(make_run, snapshot, same_tensors):
    run = make_run(critic_warmup_iterations=2, kl_controller="adaptive", kl_horizon=100.0, kl_coef=0.2)
    policy, critic = snapshot(run.state.learner.policy), snapshot(run.state.learner.critic)
    for _ in range(2):
        metrics = run.iteration()
        assert same_tensors(policy, snapshot(run.state.learner.policy))
        assert not same_tensors(critic, snapshot(run.state.learner.critic))
        assert (metrics["policy/grad_norm"], metrics["val/ratio"]) == (0.0, 1.0)
        assert metrics["objective/kl"] == pytest.approx(0.0, abs=1e-12)
        assert metrics["value/grad_norm"] > 0.0
        assert run.state.shaping.kl_controller.kl_coef == 0.2
        critic = snapshot(run.state.learner.critic)
    assert not run.state.learner.policy_optimizer.state
    run.iteration()
    assert not same_tensors(policy, snapshot(run.state.learner.policy))
    assert run.state.shaping.kl_controller.kl_coef == pytest.approx(
        0.2 * (1 - 0.2 * 12 / 100)
    )  # KL was 0 still: wound down
    assert run.state.learner.optimiser_steps == 12


def test_the_adaptive_controller_holds_still_while_the_critic_warms_up_and_then_follows_the_kl(make_run):
    adaptive = {"kl_controller": "adaptive", "kl_horizon": 50.0, "kl_target": 2.0}
    run = make_run(**adaptive, critic_warmup_iterations=2, total_episodes=60)
    coefficients, observed = [], []
    while not run.state.progress.finished:
        metrics = run.iteration()
        coefficients.append(metrics["objective/kl_coef"])
        observed.append(metrics["objective/kl"])
    expected = [0.05, 0.05, 0.05]
    for kl in observed[2:4]:
        expected.append(expected[-1] * (1 + min(max(kl / 2.0 - 1, -0.2), 0.2) * 12 / 50))
    assert coefficients == pytest.approx(expected, rel=1e-12)
    assert len(set(coefficients)) > 1


# --- cut-off responses left out of the loss ---------------------------------------------------------------------------


def test_a_minibatch_of_only_cut_off_responses_is_no_step_and_a_batch_of_them_is_warned_of(
    make_run, snapshot, same_tensors, caplog
):
    run = make_run(truncated_responses="mask", missing_eos_penalty=None, num_ppo_epochs=1)
    experience = run.before_update()[-1]
    rollouts = with_responses(experience.rollouts, terminated=torch.zeros(12, dtype=torch.bool))
    before = [snapshot(module) for module in (run.state.learner.policy, run.state.learner.critic)]
    with caplog.at_level(logging.WARNING):
        metrics = learn_from(run.state, with_settings_of(run, dataclasses.replace(experience, rollouts=rollouts)))
    assert all(
        same_tensors(*pair)
        for pair in zip(before, map(snapshot, (run.state.learner.policy, run.state.learner.critic)), strict=True)
    )
    assert (run.state.learner.optimiser_steps, run.state.learner.skipped_steps) == (0, 0)
    assert all(math.isfinite(value) for value in metrics.values())
    assert metrics["val/ratio"] == 1.0
    (message,) = caplog.messages
    assert "ppo.truncated_responses=mask" in message


def test_minibatches_of_cut_off_responses_are_not_in_the_averages_over_steps(make_run):
    settings = {"truncated_responses": "mask", "missing_eos_penalty": None, "num_ppo_epochs": 1}
    run = make_run(num_mini_batches=12, learning_rate=1e-12, **settings)
    experience = run.before_update()[-1]
    terminated = torch.zeros(12, dtype=torch.bool)
    terminated[[2, 7]] = True
    rollouts = with_responses(experience.rollouts, terminated=terminated)
    metrics = learn_from(run.state, with_settings_of(run, dataclasses.replace(experience, rollouts=rollouts)))
    assert run.state.learner.optimiser_steps == 2
    assert metrics["val/ratio"] == pytest.approx(1.0, abs=1e-6)
    assert metrics["val/ratio_var"] == pytest.approx(0.0, abs=1e-9)
