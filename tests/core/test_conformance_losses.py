"""Losses and gradients recorded from TRL, DeepSpeed-Chat, OpenRLHF and verl, and two whole PPO steps."""

import pytest
import torch

from ppo_rlhf.core.advantages import generalized_advantage_estimate
from ppo_rlhf.core.aggregation import aggregate_loss
from ppo_rlhf.core.kl import kl_estimate
from ppo_rlhf.core.logprobs import token_logprobs
from ppo_rlhf.core.losses import clipped_policy_loss, clipped_value_loss
from ppo_rlhf.core.responses import length_mask, response_lengths
from ppo_rlhf.core.rewards import shape_rewards
from ppo_rlhf.core.statistics import masked_mean, masked_variance, masked_whiten

from . import test_conformance_experience
from .support import CONFORMANCE, FILES_READ, OUR_AGGREGATION, Case, cases, poison


def test_every_stored_file_is_compared_with():
    """`cases` notes each file it reads when the two conformance modules are imported."""
    assert test_conformance_experience.__doc__
    assert {path.name for path in CONFORMANCE.glob("*.json")} == FILES_READ


def _fixed_length_denominator(case: Case) -> float | None:
    """verl's seq-mean-token-sum-norm divides only by the width, not by sequences × width as ours does by default."""
    return case.i["mask"].shape[1] if case.i.get("agg_mode") == "seq-mean-token-sum-norm" else None


def _aggregation(case: Case) -> str:
    """Return the aggregation of a case: verl and OpenRLHF name it differently, the other peers average over tokens."""
    per_sequence = "seq_mean_token_mean" if case.i.get("token_level") is False else "token_mean"
    return OUR_AGGREGATION[case.i["agg_mode"]] if "agg_mode" in case.i else per_sequence


@cases("agg_loss", "verl")
def test_aggregation_and_its_gradient_agree_with_verl(case: Case):
    loss = case.leaf("loss", case.i["mask"])
    total = aggregate_loss(
        loss, case.i["mask"], OUR_AGGREGATION[case.i["agg_mode"]], denominator=_fixed_length_denominator(case)
    )
    total.backward()
    case.check(total, "loss")
    case.check(loss.grad, "grad")


@cases("agg_loss", "openrlhf")
def test_aggregation_and_its_gradient_agree_with_openrlhf(case: Case):
    """With global totals OpenRLHF multiplies by the number of ranks, because its ranks are averaged afterwards."""
    loss = case.leaf("loss", case.i["mask"])
    token_level = case.i["token_level"]
    denominator = case.i["batch_num_tokens"] if token_level else case.i["global_batch_size"]
    mode = "token_mean" if token_level else "seq_mean_token_mean"
    total = case.i["dp_size"] * aggregate_loss(loss, case.i["mask"], mode, denominator)
    total.backward()
    case.check(total, "loss")
    case.check(loss.grad, "grad")


@cases("policy_loss", "verl", "openrlhf")
def test_policy_loss_and_its_gradient_agree_with_verl_and_openrlhf(case: Case):
    mask = case.i["mask"]
    logprobs = case.leaf("logprobs", mask)
    result = clipped_policy_loss(
        logprobs,
        case.poisoned("old_logprobs", mask),
        case.poisoned("advantages", mask),
        mask,
        cliprange=case.i["clip_low"],
        cliprange_high=case.i["clip_high"],
        dual_clip=case.i["dual_clip"],
        loss_aggregation=_aggregation(case),
        denominator=_fixed_length_denominator(case),
    )
    result.loss.backward()
    case.check(result.loss, "loss")
    case.check(result.clipfrac, "clipfrac")
    case.check(logprobs.grad, "grad_logprobs")


@cases("policy_loss", "trl_0.14.0", "deepspeed_chat")
def test_policy_loss_and_its_gradient_agree_with_trl_and_deepspeed_chat(case: Case):
    """TRL's approxkl and mean ratio include padding (as 0 and 1): the test rescales ours to TRL's denominator."""
    mask = case.i["mask"]
    logprobs = case.leaf("logprobs", mask)
    result = clipped_policy_loss(
        logprobs,
        case.poisoned("old_logprobs", mask),
        case.poisoned("advantages", mask),
        mask,
        cliprange=case.i["clip_range"],
    )
    result.loss.backward()
    case.check(result.loss, "loss")
    case.check(logprobs.grad, "grad_logprobs")
    if "clipfrac" in case.o:
        real = mask.double().mean()
        case.check(result.clipfrac, "clipfrac")
        case.check(result.approxkl * real, "approxkl")
        case.check(result.ratio * real + (1 - real), "ratio_mean")


@cases("value_loss", "verl", "openrlhf", "deepspeed_chat", "trl_0.14.0")
def test_value_loss_and_its_gradient_agree_with_peers(case: Case):
    """TRL's value mask has one position more than its policy mask; ours accepts any mask."""
    mask = case.i.get("mask", case.i.get("value_mask"))
    values = case.leaf("values", mask)
    result = clipped_value_loss(
        values,
        case.poisoned("old_values", mask),
        case.poisoned("returns", mask),
        mask,
        cliprange_value=case.i["clip_range"],
        loss_aggregation=_aggregation(case),
    )
    result.loss.backward()
    case.check(result.loss, "loss")
    case.check(values.grad, "grad_values")
    if "clipfrac" in case.o:
        case.check(result.clipfrac, "clipfrac")


@cases("loss", "trl_legacy_0.11.4")
def test_both_losses_and_statistics_agree_with_legacy_trl(case: Case):
    """Legacy TRL zeroes the losses above a mean ratio (`ratio_over_threshold`, value and policy alike); ours do not."""
    mask, coefficient = case.i["mask"], case.i["vf_coef"]
    logprobs, values = case.leaf("logprobs", mask), case.leaf("values", mask)
    advantages, returns = case.poisoned("advantages", mask), case.poisoned("returns", mask)
    policy = clipped_policy_loss(
        logprobs, case.poisoned("old_logprobs", mask), advantages, mask, cliprange=case.i["clip_range"]
    )
    value = clipped_value_loss(
        values, case.poisoned("old_values", mask), returns, mask, cliprange_value=case.i["value_clip_range"]
    )
    case.check(policy.approxkl, "approxkl")
    case.check(policy.clipfrac, "clipfrac")
    case.check(value.clipfrac, "value_clipfrac")
    case.check(masked_mean(advantages, mask), "advantages_mean")
    case.check(masked_mean(returns, mask), "returns_mean")
    case.check(masked_variance(returns, mask, unbiased=True), "returns_var")
    if policy.ratio <= case.i["ratio_threshold"]:
        total = policy.loss + coefficient * value.loss
        total.backward()
        case.check(policy.loss, "policy_loss")
        case.check(coefficient * value.loss, "value_loss_times_coef")
        case.check(total, "total_loss")
        case.check(logprobs.grad, "grad_logprobs")
        case.check(values.grad, "grad_values")


@cases("pipeline_step", "trl_0.14.0")
def test_a_whole_step_from_logits_to_gradients_agrees_with_trl(case: Case):
    """Rollout logits to log-probabilities, KL, rewards, advantages, both losses, and gradients down to the new logits.

    TRL's extra slot after the last token is a longer mask to us; its temperature is shifted by 1e-7. Values have
    T + 1 columns of which the last is not used.
    """
    i, width = case.i, case.i["responses"].shape[1]
    temperature = i["temperature"] + 1e-7
    lengths, terminated = response_lengths(i["responses"], (i["stop_token_id"],))
    mask = length_mask(lengths, width)
    value_mask = length_mask((lengths + 1).clamp(max=width), width)
    assert torch.equal(mask, case.o["mask"])
    assert torch.equal(value_mask, case.o["value_mask"])
    tokens = i["responses"].masked_fill(~mask, i["pad_token_id"])

    logprobs = token_logprobs(i["logits"], tokens, temperature)
    case.check(logprobs, "logprobs", where=mask)
    kl = kl_estimate(logprobs, token_logprobs(i["ref_logits"], tokens, temperature), "k1").masked_fill(~mask, 0.0)
    scores = i["scores"] - (i["missing_eos_penalty"] or 0.0) * ~terminated
    rewards = shape_rewards(scores, kl, value_mask, i["kl_coef"])
    if i["whiten_rewards"]:
        rewards = masked_whiten(rewards, value_mask, shift_mean=False)
    case.check(rewards, "rewards")
    values = poison(i["values"][:, :width], value_mask)
    advantages, returns = generalized_advantage_estimate(rewards, values, value_mask, i["gamma"], i["lam"])
    advantages = masked_whiten(advantages, mask)
    case.check(advantages, "advantages")
    case.check(returns, "returns", where=mask)

    new_logits, new_values = case.leaf("new_logits"), case.leaf("new_values")
    new_logprobs = token_logprobs(new_logits, tokens, temperature)
    policy = clipped_policy_loss(new_logprobs, logprobs, poison(advantages, mask), mask, cliprange=i["clip_range"])
    value = clipped_value_loss(
        new_values[:, :width], values, poison(returns, value_mask), value_mask, cliprange_value=i["value_clip_range"]
    )
    total = policy.loss + i["vf_coef"] * value.loss
    total.backward()
    case.check(policy.loss, "policy_loss")
    case.check(value.loss, "value_loss")
    case.check(total, "total_loss")
    case.check(policy.clipfrac, "clipfrac")
    case.check(value.clipfrac, "value_clipfrac")
    case.check(new_logits.grad, "grad_new_logits")
    case.check(new_values.grad, "grad_new_values")


@cases("pipeline_step", "deepspeed_chat")
def test_a_whole_step_agrees_with_deepspeed_chat(case: Case):
    """DeepSpeed's extra slot (score, KL and value one past the last token) is a longer mask to us.

    The prompt's columns are cut off; log-probabilities start at column P − 1, which scores the first response token.
    """
    i, start = case.i, case.i["prompt_length"] - 1
    response_mask = i["attention_mask"][:, start + 1 :]
    width = response_mask.shape[1]
    mask = length_mask((response_mask.sum(dim=1) + 1).clamp(max=width), width)
    logprobs = poison(i["logprobs"][:, start:], mask)
    kl = kl_estimate(logprobs, i["ref_logprobs"][:, start:], "k1")
    rewards = shape_rewards(i["scores"], kl, mask, i["kl_coef"], reward_clip=float(i["clip_reward"]))
    case.check(rewards, case.o["rewards"][:, start:])
    values = poison(i["values"][:, start:], mask)
    advantages, returns = generalized_advantage_estimate(rewards, values, mask, i["gamma"], i["lam"])
    case.check(advantages, "advantages")
    case.check(returns, "returns")

    logits, new_values = case.leaf("actor_logits"), case.leaf("new_values")
    new_logprobs = token_logprobs(logits[:, start:-1], i["input_ids"][:, start + 1 :])
    policy = clipped_policy_loss(new_logprobs, logprobs, advantages, response_mask, cliprange=i["clip_range"])
    value = clipped_value_loss(
        new_values[:, start:-1], values, returns, response_mask, cliprange_value=i["value_clip_range"]
    )
    (policy.loss + value.loss).backward()
    case.check(policy.loss, "policy_loss")
    case.check(value.loss, "value_loss")
    case.check(logits.grad, "grad_actor_logits")
    case.check(new_values.grad, "grad_new_values")


def test_a_case_that_is_off_by_more_than_its_tolerance_fails():
    """The comparison itself must be able to fail."""
    case = Case("x", torch.float32, {}, {"y": torch.tensor([1.0, 2.0])}, rtol=1e-5, atol=2e-6)
    case.check(torch.tensor([1.0, 2.0]), "y")
    with pytest.raises(AssertionError, match="x: "):
        case.check(torch.tensor([1.0, 2.0001]), "y")
