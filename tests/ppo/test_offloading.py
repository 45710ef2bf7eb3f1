"""Runs that offload frozen models to the host, here the device `meta`, and the refused settings.

On `meta` a model has no values, so a pass while it is offloaded, or a missing copy, fails the run.
"""

import pytest
import torch
from torch.testing import assert_close

from ppo_rlhf.config import PPOConfig
from ppo_rlhf.core.errors import ConfigError
from ppo_rlhf.models.loading import PretrainedHandle
from ppo_rlhf.models.reward_model import CausalLMRewardModel
from ppo_rlhf.ppo.run_setup import load_policies
from ppo_rlhf.rewards.config import RewardComponentConfig, RewardConfig
from ppo_rlhf.rewards.scorers import ModelScorer, build_reward_scorer
from ppo_rlhf.rewards.scoring import RewardScorer
from ppo_rlhf.training import PPOTrainer
from tests.passes.test_transfers import Waiting
from tests.ppo_runs import MEASURED
from tests.tiny_models import save, tiny_model, word_tokenizer

CPU = torch.device("cpu")
FIELDS = ["offload_reference_policy", "offload_reward_model"]


@pytest.fixture
def reward_model(make_model):
    return CausalLMRewardModel.from_causal_lm(make_model("llama", seed=2)).requires_grad_(False)


@pytest.fixture
def run_with(make_run, make_tokenizer, reward_model):
    """Build a run with a reward model; `wait` offloads both frozen models after the critic has been built."""

    def build(monkeypatch=None, **settings):
        tokenizer = make_tokenizer()
        scorer = RewardScorer([("model", 1.0, ModelScorer(reward_model, tokenizer, tokenizer))], reward_model)
        run = make_run(scorer=scorer, reward_model=reward_model, **settings)
        if monkeypatch is None:
            return run, None, None
        reference, score = Waiting(run.reference, monkeypatch), Waiting(reward_model, monkeypatch)
        values = {**reference._values, **score._values}

        def copy(tensor, device):
            (reference if id(tensor) in reference._values else score).copied.append(tensor)
            return values[id(tensor)].to(device)

        monkeypatch.setattr("ppo_rlhf.passes.transfers.copied_to", copy)
        return run, reference, score

    return build


@pytest.mark.parametrize(
    ("value_model", "dtype"), [("separate", "bfloat16"), ("shared", "float32"), ("reward_init", "float64")]
)
def test_a_run_with_models_that_wait_has_the_same_numbers_bit_for_bit(run_with, monkeypatch, value_model, dtype):
    settings = {"value_model": value_model, "dtype": dtype}
    plain, _, _ = run_with(**settings)
    expected = [plain.iteration() for _ in range(2)]
    run, reference, score = run_with(monkeypatch, **settings)
    actual = [run.iteration() for _ in range(2)]
    for first, second in zip(actual, expected, strict=True):
        assert {k: v for k, v in first.items() if not k.startswith(MEASURED)} == {
            k: v for k, v in second.items() if not k.startswith(MEASURED)
        }
    for waiting in (reference, score):
        assert waiting.devices == {"meta"}
        assert len(waiting.copied) == 2 * len([*waiting.model.parameters(), *waiting.model.buffers()])  # once a batch


@pytest.mark.parametrize("name", FIELDS)
def test_on_the_cpu_it_is_refused_by_name_before_a_model_is_loaded(name, tmp_path, monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    refused = rf"ppo\.{name}=true"
    with pytest.raises(ConfigError, match=refused):
        PPOConfig(**{name: True}, device="cpu")
    with pytest.raises(ConfigError, match=refused):
        load_policies(PretrainedHandle(str(tmp_path / "nothing")), PPOConfig(**{name: True}), CPU)
    with pytest.raises(ConfigError, match=refused):
        PPOTrainer(PPOConfig(**{name: True}), tiny_model(), tokenizer=word_tokenizer(), reward=len)


def test_with_adapters_on_the_same_weights_it_is_refused():
    with pytest.raises(ConfigError, match=r"ppo\.offload_reference_policy=true and ppo\.use_peft=true"):
        PPOConfig(offload_reference_policy=True, use_peft=True)
    with pytest.raises(ConfigError, match=r"ppo\.offload_reward_model=true and ppo\.use_peft=true and .*value"):
        PPOConfig(offload_reward_model=True, use_peft=True, value_model="reward_init")
    assert PPOConfig(offload_reward_model=True, use_peft=True).offload_reward_model
    assert PPOConfig(offload_reward_model=True, value_model="reward_init").offload_reward_model


def test_without_a_reward_model_there_is_nothing_to_offload(make_tokenizer):
    function = RewardConfig(components=[RewardComponentConfig(type="function", function="builtins:len")])
    with pytest.raises(ConfigError, match="offload_reward_model"):
        build_reward_scorer(function, None, make_tokenizer(), offload=True)


@pytest.mark.gpu
def test_on_a_gpu_frozen_models_take_memory_only_while_they_score(tmp_path):
    def train(**settings):
        config = PPOConfig(
            device="cuda",
            total_episodes=16,
            response_length=8,
            sft_model_path=save(tmp_path / "p", tiny_model()),
            **settings,
        )
        torch.manual_seed(0)  # of the reward model's head
        reward = CausalLMRewardModel.from_causal_lm(tiny_model(seed=2))
        trainer = PPOTrainer(config, reward=reward, prompts=["a b c", "d e"])
        held = torch.cuda.memory_allocated()
        return held, trainer.reference_policy.device.type, list(trainer.train())

    held, device, expected = train()
    less, host, actual = train(offload_reference_policy=True, offload_reward_model=True)
    assert (device, host) == ("cuda", "cpu")
    assert less < held
    assert_close([row["objective/kl"] for row in actual], [row["objective/kl"] for row in expected], rtol=0.0, atol=0.0)
