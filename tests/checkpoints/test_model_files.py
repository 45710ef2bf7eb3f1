"""Models in checkpoints and in exports: every bit comes back, adapters alone are written, averages are beside."""

import logging
import shutil

import pytest
import torch
from peft import AutoPeftModelForCausalLM, PeftModel
from safetensors.torch import load_file, save_file
from torch.testing import assert_close
from transformers import GenerationConfig, Zamba2Config, Zamba2ForCausalLM, pipeline

from ppo_rlhf.checkpoints.exports import exported_policy
from ppo_rlhf.checkpoints.files import Checkpoint, checkpoint_name, write_directory
from ppo_rlhf.checkpoints.model_files import CRITIC, read_models, write_models
from ppo_rlhf.checkpoints.store import read_checkpoint, write_checkpoint
from ppo_rlhf.config import PPOConfig
from ppo_rlhf.core.errors import CheckpointError, ModelError
from ppo_rlhf.datasets import PretrainedModelDataset
from ppo_rlhf.models.adapters import LoraSettings, has_adapter, save_adapter, with_adapter
from ppo_rlhf.models.averages import trained_parameters
from ppo_rlhf.models.loading import PretrainedHandle
from ppo_rlhf.models.reward_model import CausalLMRewardModel
from ppo_rlhf.ppo.run_setup import check_export
from ppo_rlhf.trainer.trainer import PPOTrainer
from tests.checkpoints.support import assert_same, everything
from tests.ppo_runs import build_tokenizer, learn_from
from tests.tiny_models import save

IDS = torch.tensor([[3, 9, 14, 6], [5, 7, 4, 12]])
LORA = {"use_peft": True, "lora_r": 2}
VARIANTS = [
    pytest.param(
        "gpt2", {"value_model": "shared", "vf_coef": 0.5, "dtype": "float64"}, id="shared", marks=pytest.mark.slow
    ),
    pytest.param(
        "llama",
        {**LORA, "value_model": "reward_init", "dtype": "bfloat16"},
        id="lora, reward_init",
        marks=pytest.mark.slow,
    ),
    pytest.param(
        "llama", {**LORA, "value_model": "shared", "ema_decay": 0.7, "weight_decay": 0.01}, id="lora, shared, average"
    ),
    pytest.param("gpt2", {"value_model": "shared", "value_learning_rate": 0.01}, id="shared, the head's own rate"),
]


@pytest.fixture
def build(make_run, make_model):
    def build(kind: str = "llama", **settings):
        reward_model = CausalLMRewardModel.from_causal_lm(make_model(kind, seed=2))
        with torch.no_grad():  # its head is drawn from torch's global generator
            reward_model.score.weight.fill_(0.1)
        return make_run(kind, reward_model=reward_model, **settings)

    return build


# --- checkpoints -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("kind", "variant"), VARIANTS)
def test_going_on_from_a_checkpoint_equals_never_having_stopped(build, tmp_path, kind, variant):
    whole = build(kind, **variant)
    whole.iteration()
    directory = write_checkpoint(tmp_path, whole.state)
    at_one = everything(whole.state)
    whole.iteration()
    resumed = build(kind, **variant)
    read_checkpoint(Checkpoint(directory), resumed.state)
    assert_same(everything(resumed.state), at_one)
    shutil.rmtree(directory)
    resumed.iteration()
    assert_same(everything(resumed.state), everything(whole.state))


@pytest.mark.slow
def test_a_checkpoint_with_lora_holds_what_trained_and_no_frozen_weight(build, tmp_path):
    run = build(**LORA)
    run.iteration()
    write_models(tmp_path, run.state.learner, run.state.sampler)
    assert sorted(file.name for file in (tmp_path / "policy").glob("*.safetensors")) == ["adapter_model.safetensors"]
    policy, critic = (
        load_file(tmp_path / "policy" / "adapter_model.safetensors"),
        load_file(tmp_path / "critic.safetensors"),
    )
    assert len(policy) == len(trained_parameters(run.state.learner.policy))
    assert critic.keys() == trained_parameters(run.state.learner.critic).keys()
    assert {name for name in critic if "lora" not in name} == {"value_head.weight", "value_head.bias"}


@pytest.mark.slow
def test_peft_reads_the_policy_in_a_checkpoint(build, make_model, tmp_path):
    run = build(**LORA)
    run.iteration()
    write_models(tmp_path, run.state.learner, run.state.sampler)
    theirs = PeftModel.from_pretrained(make_model("llama", dtype=torch.float64), tmp_path / "policy").eval()
    assert torch.equal(theirs(IDS).logits, run.state.learner.policy(IDS).logits)


def test_a_shared_trunk_has_one_optimiser_and_its_head_in_a_file_of_its_own(build, tmp_path):
    run = build(value_model="shared")
    run.iteration()
    directory = write_checkpoint(tmp_path, run.state)
    assert not (directory / "critic_optimizer.safetensors").exists()
    assert load_file(directory / "critic.safetensors").keys() == {"value_head.weight", "value_head.bias"}


@pytest.mark.parametrize(
    ("spoiled", "name"), [("policy", "policy"), pytest.param("reward", "critic", marks=pytest.mark.slow)]
)
def test_adapters_of_other_frozen_weights_are_refused(make_run, make_model, tmp_path, spoiled, name):
    def build(**seeds):
        reward_model = CausalLMRewardModel.from_causal_lm(make_model("llama", seed=seeds.get("reward", 2)))
        model = {"seed": seeds.get("policy", 0)}
        return make_run(reward_model=reward_model, value_model="reward_init", model=model, **LORA)

    run = build()
    directory = write_checkpoint(tmp_path, run.state)
    other = build(**{spoiled: 9})
    before = everything(other.state)
    with pytest.raises(CheckpointError) as caught:
        read_checkpoint(Checkpoint(directory), other.state)
    assert f"adapter of the {name}" in str(caught.value)
    assert_same(everything(other.state), before)


@pytest.mark.parametrize(
    ("saved", "read"),
    [
        ({}, LORA),
        pytest.param(LORA, {}, marks=pytest.mark.slow),
        ({}, {"value_model": "shared"}),
        pytest.param({}, {"ema_decay": 0.5}, marks=pytest.mark.slow),
    ],
    ids=str,
)
def test_a_checkpoint_of_other_models_is_refused_in_one_line(build, tmp_path, saved, read):
    directory = write_checkpoint(tmp_path, build(**saved).state)
    with pytest.raises(CheckpointError, match=f"^{directory}: [^\\n]*$"):
        read_checkpoint(Checkpoint(directory), build(**read).state)


# --- layers that are one module in several places --------------------------------------------------------------------


def zamba2() -> Zamba2ForCausalLM:
    """Five layers, of which the second and the fourth share one block of attention; the model class says so."""
    shape = {"hidden_size": 16, "intermediate_size": 24, "num_hidden_layers": 5, "vocab_size": 23, "pad_token_id": 0}
    attention = {"num_attention_heads": 2, "num_key_value_heads": 2, "attention_head_dim": 16, "num_mem_blocks": 1}
    mamba = {"mamba_d_state": 8, "n_mamba_heads": 2, "mamba_headdim": 16, "mamba_ngroups": 1, "chunk_size": 4}
    kinds = ["mamba", "hybrid", "mamba", "hybrid", "mamba"]
    torch.manual_seed(0)
    return Zamba2ForCausalLM(Zamba2Config(**shape, **attention, **mamba, layers_block_type=kinds, adapter_rank=4))


def words(prompts, completions, **_) -> list[float]:
    return [len(text.split()) / 4 for text in completions]


@pytest.mark.parametrize(
    "settings",
    [pytest.param({}, marks=pytest.mark.slow), pytest.param(LORA, marks=pytest.mark.slow)],
    ids=["separate", "separate, lora"],
)
def test_models_of_one_block_in_several_places_go_on_from_a_checkpoint(
    make_prompts, make_tokenizer, tmp_path, settings
):
    def trainer() -> PPOTrainer:
        config = PPOConfig(
            **settings, total_episodes=8, per_device_train_batch_size=4, response_length=3, save_interval=1,
            ema_decay=0.7, device="cpu", learning_rate=1e-2, save_total_limit=2,
        )  # fmt: skip
        return PPOTrainer(config, zamba2(), None, make_tokenizer(), reward=words, prompts=make_prompts())

    whole, resumed = trainer(), trainer()
    whole.train(output_dir=tmp_path)
    resumed.train(resume_from_checkpoint=tmp_path / "iteration_000001")
    assert resumed.state.progress.iteration == 2
    assert_same(everything(resumed.state), everything(whole.state))


def test_a_critic_of_one_block_in_several_places_is_held_once_and_read_strictly(build, tmp_path):
    def with_a_block_twice():
        run = build()
        run.state.learner.critic.backbone.layers[1] = run.state.learner.critic.backbone.layers[0]
        return run

    def models_with(critic=None):
        def write(folder):
            write_models(folder, run.state.learner, run.state.sampler)
            if critic is not None:
                save_file(critic, folder / CRITIC)

        write_directory(tmp_path / checkpoint_name(1), 1, write)
        return Checkpoint(tmp_path / checkpoint_name(1))

    run = with_a_block_twice()
    models = models_with()
    held = load_file(models.directory / CRITIC)
    assert len(held) == len(list(run.state.learner.critic.named_parameters()))
    other = with_a_block_twice()
    with torch.no_grad():
        for parameter in other.state.learner.critic.parameters():
            parameter.fill_(2.0)
    read_models(models, other.state.learner)
    assert_same(everything(other.state), everything(run.state))
    for spoiled in (dict(list(held.items())[1:]), {**held, "more": torch.zeros(1)}):
        models = models_with(spoiled)
        with pytest.raises(RuntimeError, match="key"):
            read_models(models, other.state.learner)


# --- the moving average ----------------------------------------------------------------------------------------------


def test_the_average_follows_each_optimiser_step_and_no_skipped_one(make_run, monkeypatch):
    """w̄ = d w̄ + (1 − d) w after every step, worked along with the optimiser."""
    monkeypatch.setattr("ppo_rlhf.ppo.learner.MAX_SKIPPED_STEPS", 100)
    run = make_run(ema_decay=0.7, num_ppo_epochs=2, num_mini_batches=3)
    expected = {name: p.detach().clone() for name, p in run.state.learner.policy.named_parameters()}

    def follow(*_):
        for name, parameter in run.state.learner.policy.named_parameters():
            expected[name] = 0.7 * expected[name] + 0.3 * parameter.detach()

    run.state.learner.policy_optimizer.register_step_post_hook(follow)
    run.iteration()
    for name, weight in run.state.learner.policy_average.weights.items():
        assert_close(weight, expected[name], rtol=0.0, atol=1e-12)
    before = {name: weight.clone() for name, weight in run.state.learner.policy_average.weights.items()}
    experience = run.before_update()[-1]
    experience.advantages[:, 0] = float("nan")
    learn_from(run.state, experience)
    assert run.state.learner.skipped_steps == 6
    assert all(torch.equal(before[name], weight) for name, weight in run.state.learner.policy_average.weights.items())


def test_the_average_follows_no_step_that_only_the_critic_takes(make_run):
    run = make_run(ema_decay=0.7, num_ppo_epochs=1, num_critic_epochs=3, num_mini_batches=2)
    expected = {name: p.detach().clone() for name, p in run.state.learner.policy.named_parameters()}

    def follow(*_):
        for name, parameter in run.state.learner.policy.named_parameters():
            expected[name] = 0.7 * expected[name] + 0.3 * parameter.detach()

    run.state.learner.policy_optimizer.register_step_post_hook(follow)
    run.iteration()
    assert run.state.learner.optimiser_steps == 6  # two of them the policy's
    for name, weight in run.state.learner.policy_average.weights.items():
        assert_close(weight, expected[name], rtol=0.0, atol=1e-12)


@pytest.mark.slow
def test_the_average_stands_still_while_the_critic_is_warmed_up(make_run):
    run = make_run(ema_decay=0.7, critic_warmup_iterations=1)
    start = {name: weight.clone() for name, weight in run.state.learner.policy_average.weights.items()}
    run.iteration()
    assert all(torch.equal(start[name], weight) for name, weight in run.state.learner.policy_average.weights.items())


@pytest.mark.slow
def test_the_average_does_not_touch_what_is_learnt(make_run):
    plain, averaged = make_run(), make_run(ema_decay=0.9)
    for run in (plain, averaged):
        run.iteration()
    assert_same(averaged.state.learner.policy.state_dict(), plain.state.learner.policy.state_dict())


# --- exports ---------------------------------------------------------------------------------------------------------


def test_without_options_the_policy_itself_is_exported_and_nothing_beside_it(make_run):
    state = make_run().state
    exported = exported_policy(state.learner, state.sampler)
    assert exported.model is state.learner.policy
    assert (exported.value_head, exported.average) == (None, None)


def test_the_export_says_how_ppo_sampled(make_run, tmp_path):
    state = make_run(temperature=0.7, top_k=5, top_p=0.9, response_length=6).state
    state.learner.policy.generation_config.bos_token_id = 4
    exported_policy(state.learner, state.sampler).save(tmp_path / "policy")
    saved = GenerationConfig.from_pretrained(tmp_path / "policy")
    assert (saved.do_sample, saved.temperature, saved.top_k, saved.top_p) == (True, 0.7, 5, 0.9)
    assert (saved.max_length, saved.max_new_tokens) == (None, 6)
    assert saved.eos_token_id == state.sampler.settings.stop_token_ids[0]
    assert saved.bos_token_id == 4


def test_a_plain_pipeline_on_the_export_answers_with_as_many_tokens_as_ppo_did_and_warns_of_nothing(
    make_run, make_model, tmp_path, caplog, monkeypatch
):
    """Of a policy that never ends a text. transformers 5.17 warns of a default of its own, of any model."""
    monkeypatch.setattr(logging.getLogger("transformers"), "propagate", True)
    state = make_run(stop_token="none", response_length=6, missing_eos_penalty=None).state
    exported_policy(state.learner, state.sampler).save(tmp_path / "policy")
    other = make_model("gpt2")
    other.generation_config.max_new_tokens = 6
    save(tmp_path / "other", other, build_tokenizer())
    said = []
    for model in ("other", "policy"):
        generator = pipeline("text-generation", model=str(tmp_path / model))
        caplog.clear()
        for length in (3, 20):
            (answer,) = generator(" ".join("abcdefghij" * 2)[: 2 * length], return_tensors=True)
            if model == "policy":
                assert len(answer["generated_token_ids"]) == length + 6
        said.append(list(caplog.messages))
    of_other, of_policy = said
    assert of_policy == of_other
    assert all("max_length" in line for line in of_other)


def test_an_adapter_that_is_exported_alone_is_opened_by_peft_and_by_this_project(make_run, make_model, tmp_path):
    base = save(tmp_path / "base", make_model("llama"), build_tokenizer())
    settings = {**LORA, "export": "adapter", "ema_decay": 0.5, "learning_rate": 1e-2}
    run = make_run(**settings, model={"name_or_path": base})
    run.iteration()
    exported_policy(run.state.learner, run.state.sampler).save(tmp_path / "policy")
    assert not list(tmp_path.glob("policy/**/model*.safetensors"))
    expected = run.state.learner.policy(IDS).logits
    opened = AutoPeftModelForCausalLM.from_pretrained(tmp_path / "policy", dtype=torch.float64)
    assert_close(opened(IDS).logits, expected, rtol=0.0, atol=1e-10)
    handle = PretrainedHandle(str(tmp_path / "policy"))
    assert_close(handle.causal_lm(torch.float64)(IDS).logits, expected, rtol=0.0, atol=1e-10)
    assert handle.generation_config().max_new_tokens == run.state.config.response_length
    average = AutoPeftModelForCausalLM.from_pretrained(tmp_path / "policy" / "ema", dtype=torch.float64)
    assert_close(
        average(IDS).logits,
        exported_policy(run.state.learner, run.state.sampler).average(IDS).logits,
        rtol=0.0,
        atol=1e-10,
    )
    assert PretrainedModelDataset(str(tmp_path / "policy")).exists()


def test_an_adapter_that_nothing_could_be_put_below_is_refused_before_the_training(make_run, make_model, tmp_path):
    with pytest.raises(ModelError, match=r"^ppo\.export=adapter: "):
        make_run(**LORA, export="adapter")
    base = make_model("llama", name_or_path=save(tmp_path / "base", make_model("llama")))
    settings = LoraSettings(rank=2, alpha=4, target_modules="all-linear")
    save_adapter(with_adapter(base, settings, torch.Generator()), tmp_path / "adapter", settings)
    policy = make_model("llama", name_or_path=str(tmp_path / "adapter"))
    with pytest.raises(ModelError, match=r"^ppo\.export=adapter: .*adapter "):
        check_export(policy.name_or_path, PPOConfig(**LORA, export="adapter"))


@pytest.mark.parametrize("variant", [{}, LORA], ids=str)
def test_the_average_is_exported_as_a_plain_model_beside_the_policy(make_run, variant):
    run = make_run(ema_decay=0.5, learning_rate=1e-2, **variant)
    run.iteration()
    exported = exported_policy(run.state.learner, run.state.sampler)
    assert not has_adapter(exported.average)
    policy = exported.model(IDS).logits.detach().clone()
    with torch.no_grad():
        for name, parameter in trained_parameters(run.state.learner.policy).items():
            parameter.copy_(run.state.learner.policy_average.weights[name])
    assert_close(exported.average(IDS).logits, run.state.learner.policy(IDS).logits, rtol=0.0, atol=1e-10)
    assert float((policy - exported.average(IDS).logits).detach().abs().max()) > 1e-3


def test_a_model_saved_over_one_with_an_average_says_that_the_average_is_of_the_earlier_one(make_run, tmp_path, caplog):
    states = [make_run(ema_decay=decay).state for decay in (0.5, None)]
    averaged, plain = (exported_policy(state.learner, state.sampler) for state in states)
    averaged.save(tmp_path)
    averaged.save(tmp_path)
    assert not caplog.messages
    plain.save(tmp_path)
    [line] = caplog.messages
    assert str(tmp_path / "ema") in line


def test_the_value_head_is_exported_if_it_is_asked_for(make_run):
    settings = {"value_model": "shared"}
    assert exported_policy(make_run(**settings).state.learner, make_run(**settings).state.sampler).value_head is None
    state = make_run(export_value_head=True, **settings).state
    assert exported_policy(state.learner, state.sampler).value_head is state.learner.critic.value_head
