"""TrainingState: fresh optimisers, the learning-rate schedules, and what the critic and the sampler are made from."""

import math

import pytest
import torch
from torch.optim import AdamW
from transformers import GenerationConfig

from ppo_rlhf.core.errors import ConfigError
from ppo_rlhf.models.reward_model import CausalLMRewardModel
from ppo_rlhf.training.config import PPOConfig
from ppo_rlhf.training.state import (
    build_critic,
    learning_rate_factor,
    resolve_device,
    sampling_settings,
    set_learning_rates,
    torch_dtype,
)


def factors(iterations: int, **settings) -> list[float]:
    config = PPOConfig(per_device_train_batch_size=1, total_episodes=iterations, **settings)
    return [learning_rate_factor(config, iteration) for iteration in range(1, iterations + 1)]


# --- schedules -------------------------------------------------------------------------------------------------------


def test_a_linear_schedule_starts_at_the_peak_and_its_last_step_is_not_zero():
    assert factors(4) == pytest.approx([1.0, 0.75, 0.5, 0.25], rel=0.0, abs=1e-12)


def test_a_cosine_schedule_has_its_closed_form():
    expected = [0.5 * (1.0 + math.cos(math.pi * step / 7)) for step in range(7)]
    assert factors(7, lr_scheduler_type="cosine") == pytest.approx(expected, rel=0.0, abs=1e-12)


def test_a_constant_schedule_stays_at_the_peak():
    assert factors(5, lr_scheduler_type="constant") == [1.0] * 5


def test_a_warm_up_rises_to_the_peak_in_equal_steps_and_the_decay_follows():
    linear = factors(10, warmup_ratio=0.4)
    assert linear == pytest.approx([1 / 4, 2 / 4, 3 / 4, 1, 1, 5 / 6, 4 / 6, 3 / 6, 2 / 6, 1 / 6], rel=0.0, abs=1e-12)
    cosine = factors(10, warmup_ratio=0.4, lr_scheduler_type="cosine")
    decay = [0.5 * (1.0 + math.cos(math.pi * step / 6)) for step in range(6)]
    assert cosine == pytest.approx([1 / 4, 2 / 4, 3 / 4, 1, *decay], rel=0.0, abs=1e-12)
    constant = factors(10, warmup_ratio=0.4, lr_scheduler_type="constant")
    assert constant == pytest.approx([1 / 4, 2 / 4, 3 / 4, *[1.0] * 7], rel=0.0, abs=1e-12)


@pytest.mark.parametrize("name", ["linear", "cosine", "constant"])
@pytest.mark.parametrize("ratio", [0.0, 0.01, 0.1, 0.5, 0.9, 0.99])
@pytest.mark.parametrize("iterations", [1, 2, 3, 7, 40])
def test_no_rate_of_any_schedule_is_zero_or_above_the_peak(name, ratio, iterations):
    found = factors(iterations, warmup_ratio=ratio, lr_scheduler_type=name)
    assert min(found) > 0.0
    assert max(found) == pytest.approx(1.0, rel=0.0, abs=1e-12)


def test_both_optimisers_follow_one_schedule_with_their_own_peaks(make_run):
    run = make_run(learning_rate=1e-3, value_learning_rate=4e-3, total_episodes=36)  # 3 iterations
    for iteration, factor in [(1, 1.0), (2, 2 / 3), (3, 1 / 3)]:
        rates = set_learning_rates(run.state, iteration)
        assert rates == pytest.approx((1e-3 * factor, 4e-3 * factor), rel=1e-12)
        assert run.state.policy_optimizer.param_groups[0]["lr"] == rates[0]
        assert run.state.critic_optimizer.param_groups[0]["lr"] == rates[1]


def test_without_a_rate_of_its_own_the_critic_takes_the_policys(make_run):
    run = make_run(learning_rate=1e-3, value_learning_rate=None)
    assert set_learning_rates(run.state, 1) == (1e-3, 1e-3)


# --- a fresh state ---------------------------------------------------------------------------------------------------


def test_a_fresh_state_has_its_counters_at_zero_and_knows_how_long_the_run_is(make_run):
    state = make_run(kl_coef=0.3, total_episodes=25).state
    assert (state.iteration, state.episode, state.optimiser_steps, state.skipped_steps) == (0, 0, 0, 0)
    assert state.skipped_in_a_row == 0
    assert state.history == []
    assert state.total_iterations == 3  # ceil(25 / 12)
    assert state.kl_controller.kl_coef == 0.3
    assert state.device == torch.device("cpu")


def test_a_run_is_finished_after_its_last_iteration_and_not_before(make_run):
    state = make_run().state
    finished = []
    for iteration in range(5):
        state.iteration = iteration
        finished.append(state.finished)
    assert finished == [False, False, False, True, True]


def test_each_optimiser_is_adamw_without_decay_on_exactly_its_own_parameters(make_run):
    state = make_run("gpt2").state
    for optimizer, module in ((state.policy_optimizer, state.policy), (state.critic_optimizer, state.critic)):
        (group,) = optimizer.param_groups
        assert isinstance(optimizer, AdamW)
        assert (group["betas"], group["eps"], group["weight_decay"]) == ((0.9, 0.999), 1e-8, 0.0)
        assert {id(p) for p in group["params"]} == {id(p) for p in module.parameters()}
        assert len(group["params"]) == len(set(map(id, group["params"])))  # tied embeddings are stepped once


def test_policy_and_critic_share_no_memory(make_run):
    state = make_run().state
    pointers = [{p.data_ptr() for p in module.parameters()} for module in (state.policy, state.critic)]
    assert pointers[0].isdisjoint(pointers[1])


def test_frozen_parameters_are_not_given_to_the_optimiser(make_run, make_model, make_tokenizer):
    run = make_run()
    run.state.policy.lm_head.requires_grad_(False)
    state = type(run.state).create(run.state.policy, run.state.critic, make_tokenizer(), run.config)
    given = {id(p) for p in state.policy_optimizer.param_groups[0]["params"]}
    assert id(run.state.policy.lm_head.weight) not in given


# --- critic and sampling ---------------------------------------------------------------------------------------------


def test_the_critic_is_copied_from_the_policy_or_from_the_reward_model(make_model):
    policy = make_model("llama", seed=1)
    reward_model = CausalLMRewardModel.from_causal_lm(make_model("llama", seed=2))
    from_policy = build_critic(PPOConfig(value_model="separate"), policy, reward_model)
    from_reward = build_critic(PPOConfig(value_model="reward_init"), policy, reward_model)
    assert torch.equal(from_policy.backbone.embed_tokens.weight, policy.model.embed_tokens.weight)
    assert torch.equal(from_reward.backbone.embed_tokens.weight, reward_model.backbone.embed_tokens.weight)
    assert torch.equal(from_reward.value_head.weight, reward_model.score.weight)


def test_a_critic_from_the_reward_model_needs_one(make_model):
    with pytest.raises(ConfigError) as caught:
        build_critic(PPOConfig(value_model="reward_init"), make_model("llama"), None)
    assert str(caught.value) == (
        "ppo.value_model=reward_init copies the critic from the reward model, but no reward component is of type "
        "model; set ppo.value_model=separate"
    )


def test_sampling_settings_resolve_stop_and_pad_tokens_with_the_tokenizer(make_model, make_tokenizer):
    policy = make_model("llama")
    policy.generation_config = GenerationConfig(eos_token_id=[9, 4], top_p=0.5, do_sample=True)
    config = PPOConfig(response_length=6, temperature=0.9, top_k=3, top_p=0.8)
    found = sampling_settings(config, make_tokenizer(pad_token="<unk>"), policy)
    assert (found.response_length, found.temperature, found.top_k, found.top_p) == (6, 0.9, 3, 0.8)
    assert found.stop_token_ids == (2, 4, 9)  # the tokenizer's end of text, and both of the generation config
    assert found.pad_token_id == 1


@pytest.mark.parametrize(
    ("values", "stops"), [({"stop_token": "none"}, ()), ({"stop_token_id": 7}, (7,)), ({"stop_token": "eos"}, (2,))]
)
def test_stop_tokens_follow_the_configuration(make_model, make_tokenizer, values, stops):
    assert sampling_settings(PPOConfig(**values), make_tokenizer(), make_model("llama")).stop_token_ids == stops


def test_a_stop_token_id_outside_the_vocabulary_is_refused(make_model, make_tokenizer):
    with pytest.raises(ConfigError, match=r"^stop_token_id=99 is not an id of the tokenizer \(0 to 22\)\.$"):
        sampling_settings(PPOConfig(stop_token_id=99), make_tokenizer(), make_model("llama"))


# --- device and precision --------------------------------------------------------------------------------------------


def test_auto_is_the_best_device_there_is(monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    assert resolve_device("auto") == torch.device("cpu")
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    assert resolve_device("auto") == torch.device("cuda")
    assert resolve_device("cpu") == torch.device("cpu")


def test_a_device_that_torch_does_not_know_is_refused():
    with pytest.raises(ConfigError) as caught:
        resolve_device("gpu0")
    assert str(caught.value) == "device=gpu0 is not a device; use auto, cpu, cuda, or a number such as cuda:1"


def test_a_device_that_this_machine_does_not_have_is_refused(monkeypatch):
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    assert resolve_device("cuda:1") == torch.device("cuda:1")
    with pytest.raises(ConfigError) as caught:
        resolve_device("cuda:2")
    assert str(caught.value) == "device=cuda:2: this machine has 2 CUDA devices; use auto or cpu"


def test_precision_is_a_torch_type():
    assert torch_dtype(PPOConfig()) == torch.float32
    assert torch_dtype(PPOConfig(dtype="float64")) == torch.float64
