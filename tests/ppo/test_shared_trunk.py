"""Policy and value head on one trunk: one pass, one loss, and every invariant of the update."""

import pytest
import torch
from torch.testing import assert_close

from tests.ppo.test_update import poisoned, recorded, with_nan
from tests.ppo_runs import learn_from

from .support import ONE_STEP, assert_same_gradients, gradients, moved_on, with_settings_of

KINDS = ["gpt2", "llama", "bitnet"]
SHARED = {"value_model": "shared", "vf_coef": 0.3}


@pytest.fixture
def experience(make_run):
    """Return an experience as after some updates, in which ratios differ from 1 and both clips apply."""
    return moved_on(make_run(**SHARED).before_update()[-1])


# --- the invariants of the update ------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("kind", "sizes", "dtype"),
    [("gpt2", (12, 1, 1), "float32"), ("llama", (5, 3, 3), "bfloat16"), ("bitnet", (1, 12, 4), "float32")],
    ids=str,
)
def test_first_ratio_and_first_values_repeat_the_rollouts_to_the_last_bit(make_run, monkeypatch, kind, sizes, dtype):
    per_device, accumulation, minibatches = sizes
    run = make_run(
        kind,
        dtype=dtype,
        per_device_train_batch_size=per_device,
        gradient_accumulation_steps=accumulation,
        num_mini_batches=minibatches,
        **SHARED,
    )
    policy_calls, value_calls = (recorded(monkeypatch, f"clipped_{name}_loss") for name in ("policy", "value"))
    run.iteration()
    in_first = -(-(run.config.local_batch_size // run.config.num_mini_batches) // run.config.local_micro_batch_size)
    for call in [*policy_calls[:in_first], *value_calls[:in_first]]:
        assert torch.equal(call["new"][call["mask"]], call["old"][call["mask"]])
        assert bool(call["new"][call["mask"]].abs().max() > 0)
    for calls in (policy_calls, value_calls):
        assert any(not torch.equal(call["new"][call["mask"]], call["old"][call["mask"]]) for call in calls[in_first:])


def test_the_gradient_is_that_of_one_loss_worked_one_row_at_a_time(make_run, experience):
    run, actual = make_run(**SHARED), gradients(make_run, experience, **SHARED)
    config, rollouts, policy, head = (
        run.config,
        experience.rollouts,
        run.state.learner.policy,
        run.state.learner.critic.value_head,
    )
    tokens = int(rollouts.responses.lengths.sum())
    for row, length in enumerate(rollouts.responses.lengths.tolist()):
        prompt, response = rollouts.prompts.prompt_ids[row], rollouts.responses.token_lists()[row]
        output = policy(torch.tensor([prompt + response]), output_hidden_states=True)
        steps = slice(len(prompt) - 1, -1)
        log_p = torch.log_softmax(output.logits[0, steps] / config.temperature, dim=-1)
        ratio = (log_p[torch.arange(length), response] - rollouts.old_logprobs[row, :length]).exp()
        advantage, old = experience.advantages[row, :length], rollouts.values[row, :length]
        surrogate = torch.minimum(advantage * ratio, advantage * ratio.clamp(0.8, 1.2))
        values = (output.hidden_states[-1][0, steps] @ head.weight.T + head.bias)[:, 0]
        target, near = experience.returns[row, :length], old + (values - old).clamp(-0.2, 0.2)
        value_loss = 0.5 * torch.maximum((values - target) ** 2, (near - target) ** 2)
        ((-surrogate.sum() + 0.3 * value_loss.sum()) / tokens).backward()
    expected = {f"policy.{n}": p.grad for n, p in policy.named_parameters()}
    expected |= {f"critic.{n}": p.grad for n, p in run.state.learner.critic.named_parameters()}
    assert_same_gradients(actual, expected)


@pytest.mark.parametrize("kind", [*KINDS[:2], *(pytest.param(case, marks=pytest.mark.slow) for case in KINDS[2:])])
def test_the_gradient_depends_neither_on_the_cut_nor_on_nan_in_padded_slots(make_run, kind):
    experience = moved_on(make_run(kind, **SHARED).before_update()[-1])
    expected = gradients(make_run, experience, kind, **SHARED)
    cut = {"per_device_train_batch_size": 1, "gradient_accumulation_steps": 12}
    assert_same_gradients(gradients(make_run, experience, kind, **SHARED, **cut), expected)
    assert_same_gradients(gradients(make_run, poisoned(experience), kind, **SHARED), expected)


def test_a_non_finite_gradient_moves_neither_trunk_nor_head_and_is_counted(make_run, snapshot, same_tensors):
    run = make_run(**{**SHARED, **ONE_STEP})
    experience = run.before_update()[-1]
    before = [snapshot(model) for model in (run.state.learner.policy, run.state.learner.critic)]
    learn_from(run.state, with_nan(experience, 0, ("returns",)))
    assert all(
        same_tensors(old, snapshot(model))
        for old, model in zip(before, (run.state.learner.policy, run.state.learner.critic), strict=True)
    )
    assert (run.state.learner.optimiser_steps, run.state.learner.skipped_steps, run.state.learner.skipped_in_a_row) == (
        0,
        1,
        1,
    )


# --- what sharing means ----------------------------------------------------------------------------------------------


def count_passes(run) -> tuple[int, int]:
    """Forward passes of policy and critic before the update, and in it."""
    run.before_update()  # models are probed at their first pass
    passes = []
    for backbone in {run.state.learner.policy.base_model, run.state.learner.critic.backbone}:
        backbone.register_forward_hook(lambda *_: passes.append(1))
    experience = run.before_update()[-1]
    before = len(passes)
    learn_from(run.state, experience)
    return before, len(passes) - before


def test_one_forward_pass_of_the_trunk_gives_logits_and_values(make_run):
    sizes = {"per_device_train_batch_size": 3, "gradient_accumulation_steps": 4}  # 4 micro-batches an epoch, 2 epochs
    shared, separate = count_passes(make_run(**SHARED, **sizes)), count_passes(make_run(**sizes))
    assert (shared[1], separate[1]) == (8, 16)
    assert separate[0] - shared[0] == 4


def test_trunk_and_head_are_clipped_as_one_gradient(make_run, experience):
    free = gradients(make_run, experience, **SHARED)
    norm = torch.cat([g.flatten() for g in free.values()]).norm()
    limit = 0.1 * float(norm)
    clipped = gradients(make_run, experience, **SHARED, max_grad_norm=limit)
    for name in free:
        assert_close(clipped[name], 0.1 * free[name], rtol=1e-4, atol=1e-10)
    run = make_run(**{**SHARED, **ONE_STEP})
    metrics = learn_from(run.state, with_settings_of(run, experience))
    assert metrics["policy/grad_norm"] == metrics["value/grad_norm"] == pytest.approx(float(norm), rel=1e-9)


def test_one_optimiser_holds_every_weight_once(make_run):
    state = make_run("gpt2", **SHARED).state
    assert state.learner.critic_optimizer is state.learner.policy_optimizer
    held = [id(p) for group in state.learner.policy_optimizer.param_groups for p in group["params"]]
    assert len(held) == len(set(held))
    assert set(held) == {id(p) for model in (state.learner.policy, state.learner.critic) for p in model.parameters()}


def test_in_its_warm_up_only_the_head_learns(make_run, snapshot, same_tensors):
    run = make_run(critic_warmup_iterations=2, weight_decay=0.1, **SHARED)
    policy = snapshot(run.state.learner.policy)
    for _ in range(2):
        head = snapshot(run.state.learner.critic)
        metrics = run.iteration()
        assert same_tensors(policy, snapshot(run.state.learner.policy))
        assert not same_tensors(head, snapshot(run.state.learner.critic))
        assert (metrics["policy/grad_norm"], metrics["val/ratio"]) == (0.0, 1.0)
        assert metrics["value/grad_norm"] > 0.0
    run.iteration()
    assert not same_tensors(policy, snapshot(run.state.learner.policy))


# --- the head's own learning rate ------------------------------------------------------------------------------------


def moves(run, snapshot) -> list[float]:
    """Return the greatest change of a weight in one iteration: of the trunk, and of the value head."""
    models = run.state.learner.policy, run.state.learner.critic
    before = [snapshot(model) for model in models]
    run.iteration()
    pairs = zip(before, map(snapshot, models), strict=True)
    return [max(float((new[name] - old[name]).abs().max()) for name in old) for old, new in pairs]


def test_the_head_steps_at_its_own_rate_and_the_trunk_at_the_policys(make_run, snapshot):
    """Adam's first step moves a weight by rate x g / (|g| + 1e-8): by the rate, where the gradient is not tiny."""
    run = make_run(**{**SHARED, **ONE_STEP}, learning_rate=1e-3, value_learning_rate=4e-3)
    assert moves(run, snapshot) == pytest.approx([1e-3, 4e-3], rel=1e-4)
    assert [run.state.progress.history[0][f"lr/{name}"] for name in ("policy", "value")] == [1e-3, 4e-3]


def test_the_policys_rate_given_to_the_head_changes_no_bit(make_run, snapshot, same_tensors):
    """Clipping is on: trunk and head are one gradient, whatever the number of optimisers."""
    one, two = (make_run(**SHARED, max_grad_norm=0.1, value_learning_rate=rate) for rate in (None, 1e-3))
    assert (len(one.state.learner.optimizers), len(two.state.learner.optimizers)) == (1, 2)
    for _ in range(2):
        assert one.iteration()["policy/grad_norm"] == two.iteration()["policy/grad_norm"]
    assert same_tensors(snapshot(one.state.learner.policy), snapshot(two.state.learner.policy))
    assert same_tensors(snapshot(one.state.learner.critic), snapshot(two.state.learner.critic))


def test_in_the_warm_up_of_a_head_with_its_own_rate_the_trunk_stays(make_run, snapshot):
    run = make_run(**SHARED, value_learning_rate=4e-3, critic_warmup_iterations=1, weight_decay=0.1)
    trunk, head = moves(run, snapshot)
    assert (trunk, head > 0.0) == (0.0, True)
    assert min(moves(run, snapshot)) > 0.0
