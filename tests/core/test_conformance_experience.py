"""Numbers recorded from TRL, DeepSpeed-Chat, OpenRLHF and verl, up to advantages; padding is NaN wherever it can be.

Where a peer's convention differs from ours, the test either restates the input in our convention (and says how) or the
variant is skipped (and the docstring says why).
"""

import pytest
import torch

from ppo_rlhf.core.advantages import generalized_advantage_estimate
from ppo_rlhf.core.aggregation import aggregate_loss
from ppo_rlhf.core.errors import ShapeError
from ppo_rlhf.core.kl import AdaptiveKLController, kl_estimate
from ppo_rlhf.core.logprobs import token_entropy, token_kl, token_logprobs
from ppo_rlhf.core.responses import length_mask, response_lengths
from ppo_rlhf.core.rewards import overlong_penalty, shape_rewards
from ppo_rlhf.core.statistics import masked_mean, masked_variance, masked_whiten

from .support import OUR_AGGREGATION, OUR_ESTIMATOR, Case, cases, poison

ABS_REWARDS = ("seed1_abs_clip2.0", "seed2_abs_clip2.0", "seed4_abs_clip2.0")


@cases("logprobs", "openrlhf", "verl", "trl_legacy_0.11.4", "deepspeed_chat", "trl_0.14.0")
def test_token_logprobs_agree_with_peers(case: Case):
    """TRL 0.14 divides by temperature + 1e-7 and marks padding with 1.0: only its real tokens are compared."""
    is_trl = "trl_0.14.0" in case.name
    logprobs = token_logprobs(case.i["logits"], case.i["labels"], case.i["temperature"] + 1e-7 * is_trl)
    case.check(logprobs, "logprobs", where=case.i["mask"] if is_trl else None)


@cases("entropy", "openrlhf", "verl", "trl_legacy_0.11.4", "trl_0.14.0")
def test_token_entropy_agrees_with_peers(case: Case):
    """TRL 0.14 shifts the temperature by 1e-7, and its mean runs over padding too: only its tokens are compared."""
    is_trl = "trl_0.14.0" in case.name
    entropy = token_entropy(case.i["logits"], case.i["temperature"] + 1e-7 if is_trl else 1.0)
    case.check(entropy, "entropy")
    if not is_trl:
        per_sequence = "seq_mean_token_mean" if case.i.get("token_level") is False else "token_mean"
        mode = OUR_AGGREGATION[case.i["agg_mode"]] if "agg_mode" in case.i else per_sequence
        case.check(aggregate_loss(poison(entropy, case.i["mask"]), case.i["mask"], mode), "entropy_mean")


@cases("truncate", "trl_0.14.0", skip=("no_stop_token",))
def test_response_lengths_agree_with_trl(case: Case):
    """`no_stop_token` is skipped: there TRL ends a response at the first pad id, and ours only at a stop token."""
    lengths, terminated = response_lengths(case.i["responses"], (case.i["stop_token_id"],))
    assert torch.equal(lengths - 1, case.o["last_index"])
    assert torch.equal(terminated.long(), case.o["contains_eos"])
    assert torch.equal(length_mask(lengths, case.i["responses"].shape[1]), case.o["mask"])


@cases("first_true", "trl_0.14.0")
def test_the_first_stop_token_is_where_trl_finds_it(case: Case):
    """For a row without a stop token TRL returns the row's length; ours also returns `terminated` False."""
    lengths, terminated = response_lengths(case.i["flags"], (1,))
    assert torch.equal(torch.where(terminated, lengths - 1, lengths), case.o["index"])


@cases("truncate", "verl")
def test_response_mask_agrees_with_verl(case: Case):
    stop = case.i["eos_token"]
    lengths, _ = response_lengths(case.i["responses"], [stop] if isinstance(stop, int) else stop.tolist())
    assert torch.equal(length_mask(lengths, case.i["responses"].shape[1]), case.o["mask"])


@cases("kl", "openrlhf", skip=("large_gap_k1", "large_gap_k3"))
def test_kl_and_its_gradient_agree_with_openrlhf(case: Case):
    """The two large gaps are skipped: OpenRLHF clamps the result to ±10, which biases the reward."""
    _check_kl_with_gradient(case)


@cases("kl", "verl", skip=tuple(f"seed{s}_abs" for s in (1, 2, 3, 4)))
def test_kl_and_its_gradient_agree_with_verl(case: Case):
    """`abs` is skipped: we have no such estimator."""
    _check_kl_with_gradient(case)


@cases(
    "kl",
    "trl_head",
    "trl_legacy_0.11.4",
    skip=(*(f"seed{s}_abs" for s in (1, 2, 3, 4)), "large_gap_abs"),
)
def test_kl_agrees_with_trl_head_and_legacy_trl(case: Case):
    """`abs` is skipped: we have no such estimator. For `full` TRL takes log-probabilities, which are valid logits.

    The recorded rows have nine digits, so their probabilities add up to 1 only within 1e-9. TRL uses them as given,
    and `token_kl` divides them by their sums: KL = KL(TRL) / sum p - log(sum p) + log(sum q).
    """
    if case.i["mode"] == "full":
        p_sum, q_sum = (case.i[name].exp().sum(-1) for name in ("logprobs", "ref_logprobs"))
        expected = case.o["kl"] / p_sum - p_sum.log() + q_sum.log()
        case.check(token_kl(case.i["logprobs"], case.i["ref_logprobs"]), expected)
        return
    case.check(kl_estimate(case.i["logprobs"], case.i["ref_logprobs"], OUR_ESTIMATOR[case.i["mode"]]), "kl")


def _check_kl_with_gradient(case: Case) -> None:
    logprobs = case.leaf("logprobs")
    kl = kl_estimate(logprobs, case.i["ref_logprobs"], OUR_ESTIMATOR[case.i["mode"]])
    kl.sum().backward()
    case.check(kl, "kl")
    case.check(logprobs.grad, "grad_logprobs")


@cases("klctl", "openrlhf", "trl_legacy_0.11.4", "verl")
def test_adaptive_controller_follows_the_recorded_traces(case: Case):
    controller = AdaptiveKLController(case.i["init_kl_coef"], case.i["target"], case.i["horizon"])
    seen = []
    for kl in case.i["kl_trace"].tolist():
        controller.update(kl, case.i["n_steps"])
        seen.append(controller.kl_coef)
    case.check(torch.tensor(seen, dtype=torch.float64), "coef_after")


@cases("masked_mean", "openrlhf", "trl_0.14.0", "verl")
def test_masked_mean_agrees_with_peers(case: Case):
    """Means of rows with a token are compared: that of an empty row is NaN in TRL and OpenRLHF, 0 in verl and here."""
    mask, values = case.i["mask"], case.poisoned("values", case.i["mask"])
    case.check(masked_mean(values, mask), "mean_all")
    rows = torch.stack([masked_mean(*row) for row in zip(values, mask, strict=True)])
    case.check(rows, "mean_rows", where=mask.any(dim=1))


@cases("whiten", "trl_0.14.0", "trl_legacy_0.11.4", "verl")
def test_whitening_agrees_with_peers_on_real_tokens(case: Case):
    """Padding is compared with 0, our convention: the peers leave shifted numbers in padding."""
    mask, values = case.i["mask"], case.poisoned("values", case.i["mask"])
    whitened = masked_whiten(values, mask, shift_mean=case.i["shift_mean"])
    case.check(whitened, "whitened", where=mask)
    assert (whitened[~mask] == 0).all()
    case.check(masked_mean(values, mask), "mean")
    case.check(masked_variance(values, mask, unbiased=True), "var")


@cases("whiten", "trl_legacy_0.11.4_nomask")
def test_whitening_without_padding_agrees_with_legacy_trl(case: Case):
    values = case.i["values"]
    whitened = masked_whiten(values, torch.ones_like(values, dtype=torch.bool), shift_mean=case.i["shift_mean"])
    case.check(whitened, "whitened")


@cases("whiten", "openrlhf")
def test_given_the_population_variance_whitening_agrees_with_openrlhf_on_real_tokens(case: Case):
    """OpenRLHF divides the variance by n and floors it at 1e-8. Ours gets these moments, and adds 1e-8 to them."""
    mask, values = case.i["mask"], case.poisoned("values", case.i["mask"])
    mean = masked_mean(values, mask)
    if case.i["no_std_norm"]:
        case.check(values - mean, "whitened", where=mask)
    else:
        moments = (mean, masked_variance(values, mask, unbiased=False))
        case.check(masked_whiten(values, mask, moments=moments), "whitened", where=mask)


@cases("whiten_rows", "openrlhf")
def test_given_each_rows_population_variance_whitening_agrees_with_openrlhf_everywhere(case: Case):
    mask, values = case.i["mask"], case.poisoned("values", case.i["mask"])
    rows = [
        masked_whiten(row, counts, moments=(masked_mean(row, counts), masked_variance(row, counts, unbiased=False)))
        for row, counts in zip(values, mask, strict=True)
    ]
    case.check(torch.stack(rows), "normalized")


@cases("rewards", "openrlhf", skip=("mask_hole",))
def test_shaped_rewards_agree_with_openrlhf_on_real_tokens(case: Case):
    """OpenRLHF leaves KL in padding, so only real tokens are compared; its mask with a hole is refused here.

    OpenRLHF's clip may be asymmetric (−1..3), ours is symmetric: then the test clips the score before the call.
    """
    low, high = case.i.get("clip_range") if case.i.get("clip_range") is not None else (None, None)
    symmetric = high is not None and low == -high
    if high is not None and not symmetric:
        case.i["scores"] = case.i["scores"].clamp(low, high)
    _check_rewards(case, case.i["kl_coef"], float(high) if symmetric else None)


@cases("rewards", "trl_legacy_0.11.4", skip=("mask_hole", *ABS_REWARDS))
def test_shaped_rewards_agree_with_legacy_trl_on_real_tokens(case: Case):
    """Legacy TRL leaves KL in padding. `abs` is skipped: we have no such estimator. Ours refuses a mask with a hole."""
    _check_rewards(case, case.i["kl_coef"], case.i["score_clip"])


def _check_rewards(case: Case, kl_coef: float, reward_clip: float | None) -> None:
    mask = case.i["mask"]
    kl = kl_estimate(case.poisoned("logprobs", mask), case.i["ref_logprobs"], OUR_ESTIMATOR[case.i["mode"]])
    rewards = shape_rewards(case.i["scores"], kl, mask, kl_coef, reward_clip=reward_clip)
    case.check(rewards, "rewards", where=mask)
    assert (rewards[~mask] == 0).all()


@cases("rewards", "verl", skip=("large_gap_low_var",))
def test_shaped_rewards_agree_with_verl_everywhere(case: Case):
    """The score is read where verl's reward manager put it. The large gap is skipped: verl clamps k3 to ±10.

    verl feeds its controller the mean over rows of the mean KL; given the same number, ours does the same.
    """
    mask = case.i["mask"]
    kl = kl_estimate(case.poisoned("logprobs", mask), case.i["ref_logprobs"], OUR_ESTIMATOR[case.i["mode"]])
    scores = case.i["token_scores"].masked_fill(~mask, 0.0).sum(dim=1)
    case.check(shape_rewards(scores, kl, mask, case.i["kl_coef"]), "rewards")
    controller = AdaptiveKLController(case.i["kl_coef"], case.i["target"], case.i["horizon"])
    mean_kl = aggregate_loss(kl, mask, "seq_mean_token_mean")
    case.check(mean_kl, "kl_mean")
    controller.update(mean_kl.item(), len(mask))
    assert controller.kl_coef == pytest.approx(case.o["coef_after"], rel=case.rtol)


@cases("gae", "openrlhf", skip=("mask_hole",))
def test_gae_agrees_with_openrlhf_everywhere(case: Case):
    advantages, returns = _gae(case, case.i["mask"])
    case.check(advantages, "advantages", where=case.i["mask"])
    case.check(returns, "returns")


@cases("gae", "trl_legacy_0.11.4", skip=("mask_hole", *(f"seed{s}_g0.99_l0.95" for s in (1, 2, 3, 4))))
def test_gae_with_whitening_agrees_with_legacy_trl_on_real_tokens(case: Case):
    """whiten_rewards is skipped: legacy TRL makes the zero rewards in padding non-zero and discounts them back."""
    mask = case.i["mask"]
    assert not case.i["whiten_rewards"]
    advantages, returns = _gae(case, mask)
    case.check(masked_whiten(advantages, mask), "advantages", where=mask)
    case.check(returns, "returns", where=mask)


@cases("gae", "verl", skip=("mask_hole",))
def test_gae_with_whitening_agrees_with_verl_on_real_tokens(case: Case):
    mask = case.i["mask"]
    advantages, returns = _gae(case, mask)
    case.check(masked_whiten(advantages, mask), "advantages", where=mask)
    case.check(returns, "returns", where=mask)


@cases("gae", "trl_0.14.0")
def test_gae_with_whitening_agrees_with_trl_given_its_extra_slot(case: Case):
    """TRL's recursion includes the first pad position of each row: our mask is extended by this position."""
    mask = case.i["mask"]
    advantages, returns = _gae(case, _with_next_slot(mask))
    case.check(masked_whiten(poison(advantages, mask), mask), "advantages")
    case.check(returns, "returns", where=mask)


@cases("gae", "deepspeed_chat")
def test_gae_agrees_with_deepspeed_chat_on_response_columns(case: Case):
    """DeepSpeed's recursion has no mask and starts at column `start`: our mask is full, prompt columns are cut off."""
    rewards, values = (case.i[name][:, case.i["start"] :] for name in ("rewards", "values"))
    mask = torch.ones_like(rewards, dtype=torch.bool)
    advantages, returns = generalized_advantage_estimate(rewards, values, mask, case.i["gamma"], case.i["lam"])
    case.check(advantages, "advantages")
    case.check(returns, "returns")


def _gae(case: Case, mask: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    rewards, values = case.poisoned("rewards", mask), case.poisoned("values", mask)
    return generalized_advantage_estimate(rewards, values, mask, case.i["gamma"], case.i["lam"])


def _with_next_slot(mask: torch.Tensor) -> torch.Tensor:
    return torch.cat([torch.ones_like(mask[:, :1]), mask[:, :-1]], dim=1) | mask


@cases("gae", "openrlhf", "trl_legacy_0.11.4", "verl")
def test_only_masks_without_holes_are_taken(case: Case):
    """Peers disagree about a hole in the mask (DISAGREEMENTS, 4), so we refuse it."""
    if case.variant == "mask_hole":
        with pytest.raises(ShapeError, match="row 0 of mask"):
            _gae(case, case.i["mask"])
    else:
        _gae(case, case.i["mask"])


@cases("pipeline_advantages", "verl")
def test_rewards_to_advantages_agree_with_verl_on_real_tokens(case: Case):
    scores = case.i["token_scores"].masked_fill(~case.i["mask"], 0.0).sum(dim=1)
    _check_pipeline(case, scores, case.i["mask"])


@cases("pipeline_advantages", "trl_legacy_0.11.4", skip=tuple(f"seed{s}_1" for s in (1, 2, 3, 4)))
def test_rewards_to_advantages_agree_with_legacy_trl_on_real_tokens(case: Case):
    """whiten_rewards is skipped: it leaks rewards out of padding there. `abs` is skipped: we have no such estimator."""
    _check_pipeline(case, case.i["scores"], case.i["mask"])


def _check_pipeline(case: Case, scores: torch.Tensor, mask: torch.Tensor) -> None:
    kl = kl_estimate(case.poisoned("logprobs", mask), case.i["ref_logprobs"], OUR_ESTIMATOR[case.i["mode"]])
    rewards = shape_rewards(scores, kl, mask, case.i["kl_coef"])
    case.check(rewards, "rewards", where=mask)
    advantages, returns = generalized_advantage_estimate(
        rewards, case.poisoned("values", mask), mask, case.i["gamma"], case.i["lam"]
    )
    case.check(masked_whiten(advantages, mask), "advantages", where=mask)
    case.check(returns, "returns", where=mask)


@cases("pipeline_advantages", "openrlhf")
def test_rewards_to_returns_agree_with_openrlhf(case: Case):
    """Advantages are not compared: the peer whitens with the population variance, we with Bessel's correction."""
    mask, clip = case.i["mask"], case.i.get("clip_range")
    reward_clip = None if clip is None else float(clip[1])
    assert clip is None or clip[0] == -clip[1]
    kl = kl_estimate(case.poisoned("logprobs", mask), case.i["ref_logprobs"], OUR_ESTIMATOR[case.i["mode"]])
    rewards = shape_rewards(case.i["scores"], kl, mask, case.i["kl_coef"], reward_clip=reward_clip)
    values = case.poisoned("values", mask)
    _, returns = generalized_advantage_estimate(rewards, values, mask, case.i["gamma"], case.i["lam"])
    case.check(returns, "returns")


@cases("pipeline_advantages", "trl_0.14.0")
def test_rewards_to_advantages_agree_with_trl_given_its_extra_slot(case: Case):
    """TRL puts the score one slot after the last token and bootstraps from the value there.

    TRL's numbers equal ours for a response that is one token longer, with KL 0 at the extra token.
    """
    mask, value_mask = case.o["mask"], case.o["value_mask"]
    kl = kl_estimate(case.i["logprobs"], case.i["ref_logprobs"], "k1").masked_fill(~mask, 0.0)
    missing = 1 - case.o["contains_eos"]
    scores = case.i["scores"] - (case.i["missing_eos_penalty"] or 0.0) * missing
    rewards = shape_rewards(scores, poison(kl, value_mask), value_mask, case.i["kl_coef"])
    if case.i["whiten_rewards"]:
        rewards = masked_whiten(poison(rewards, value_mask), value_mask, shift_mean=False)
    case.check(rewards, "rewards")
    values = case.poisoned("values", value_mask)
    advantages, returns = generalized_advantage_estimate(rewards, values, value_mask, case.i["gamma"], case.i["lam"])
    case.check(masked_whiten(advantages, mask), "advantages")
    case.check(returns, "returns", where=mask)


@cases("rewards", "trl_0.14.0", "trl_head")
def test_shaped_rewards_agree_with_trl_given_its_extra_slot(case: Case):
    mask, value_mask = case.o["mask"], case.o["value_mask"]
    estimator = OUR_ESTIMATOR[case.i.get("mode", "k1")]
    kl = kl_estimate(case.i["logprobs"], case.i["ref_logprobs"], estimator).masked_fill(~mask, 0.0)
    case.check(kl, "kl")
    rewards = shape_rewards(case.o["scores"], poison(kl, value_mask), value_mask, case.i["kl_coef"])
    if case.i["whiten_rewards"]:
        rewards = masked_whiten(rewards, value_mask, shift_mean=False)
    case.check(rewards, "rewards")


@cases("rewards", "deepspeed_chat")
def test_shaped_rewards_agree_with_deepspeed_chat_given_its_extra_slot(case: Case):
    """DeepSpeed's score also sits one slot late, over an unmasked KL. The response and this slot are compared."""
    start = case.i["prompt_length"] - 1
    mask = _with_next_slot(case.i["mask"][:, start:])
    kl = kl_estimate(case.i["logprobs"], case.i["ref_logprobs"], "k1")[:, start:]
    clip = float(case.i["clip_reward"])
    rewards = shape_rewards(case.i["scores"], poison(kl, mask), mask, case.i["kl_coef"], reward_clip=clip)
    case.check(rewards, case.o["rewards"][:, start:], where=mask)


@cases("length_penalty", "openrlhf", skip=("stop_scale", "stop_override"))
def test_overlong_responses_pay_what_they_pay_in_openrlhf(case: Case):
    """The two `stop` cases are skipped: they are about cut-off responses, which `core` does not handle."""
    penalty = overlong_penalty(case.i["lengths"], case.i["max_new_tokens"], int(case.i["buffer_len"]))
    case.check(case.i["scores"] - case.i["factor"] * penalty.float(), "scores")
    assert int((penalty > 0).sum()) == case.o["count"]
