"""QLoRA and 8-bit AdamW with bitsandbytes itself, on the CPU: what is frozen, trains, is saved and exported."""

from pathlib import Path

import pytest
import torch
from torch.testing import assert_close

from ppo_rlhf.checkpoints.exports import exported_policy
from ppo_rlhf.checkpoints.model_files import optimizers
from ppo_rlhf.checkpoints.restore import restore
from ppo_rlhf.checkpoints.store import write_checkpoint
from ppo_rlhf.config import PPOConfig
from ppo_rlhf.core.errors import CheckpointError, ConfigError, ModelError
from ppo_rlhf.models.adapters import has_adapter, merged_parameters
from ppo_rlhf.models.averages import trained_parameters
from ppo_rlhf.models.loading import PretrainedHandle
from ppo_rlhf.models.quantisation import is_quantised
from ppo_rlhf.passes import prefixes
from ppo_rlhf.passes.packed_attention import SharedLayout
from ppo_rlhf.ppo.optimisers import build_optimizer
from ppo_rlhf.ppo.run_setup import build_critic, build_state, load_policies
from ppo_rlhf.ppo.training_state import TrainingState
from ppo_rlhf.preflight.memory import MOMENTS, RunShape, plan_memory
from ppo_rlhf.rewards.scoring import RewardScorer
from ppo_rlhf.trainer.trainer import PPOTrainer
from tests.checkpoints.support import assert_same
from tests.ppo.support import ONE_STEP, gradients_of, moved_on
from tests.ppo.test_update import recorded
from tests.ppo_runs import Run, build_model, build_prompts, build_prompts_alike, build_tokenizer, first_letters

pytest.importorskip("bitsandbytes")

CPU = torch.device("cpu")
IDS = torch.tensor([[3, 9, 14, 6], [5, 7, 4, 12]])
SETTINGS = {
    "use_peft": True,
    "load_in_4bit": True,
    "lora_r": 2,
    "lora_alpha": 8,
    "total_episodes": 36,
    "per_device_train_batch_size": 6,
    "gradient_accumulation_steps": 2,
    "num_mini_batches": 2,
    "num_ppo_epochs": 2,
    "response_length": 8,
    "learning_rate": 1e-2,
    "device": "cpu",
}
WIDE = {"lora_r": 64, "optim": "adamw_8bit"}  # factors of 64 x 64 numbers have moments in 8 bits


@pytest.fixture
def saved(tmp_path: Path):
    """Save models of random weights, 64 wide: a block of 4-bit weights shares a scale."""

    def save(kind: str = "llama", name: str = "sft", seed: int = 0) -> PretrainedHandle:
        size = {"n_embd": 64} if kind == "gpt2" else {"hidden_size": 64, "intermediate_size": 128}
        model = build_model(kind, dtype=torch.float32, seed=seed, spread=0.15, **size)
        model.save_pretrained(tmp_path / name)
        build_tokenizer().save_pretrained(tmp_path / name)
        return PretrainedHandle(str(tmp_path / name))

    return save


def start(handle: PretrainedHandle, **settings) -> Run:
    config = PPOConfig(**{**SETTINGS, **settings})
    policy, reference = load_policies(handle, config, CPU)
    critic = build_critic(config, policy.model, None)
    state = build_state(policy.model, critic, policy.tokenizer, config)
    scorer = RewardScorer([("first_letters", 2.0, first_letters)])
    return Run(state, reference, build_prompts(), scorer, config)


def quantised(model: torch.nn.Module) -> dict[int, torch.nn.Parameter]:
    return {id(layer.weight): layer.weight for layer in model.modules() if is_quantised(layer)}


@pytest.mark.parametrize(
    ("kind", "value_model"), [("gpt2", "separate"), pytest.param("llama", "shared", marks=pytest.mark.slow)]
)
def test_one_base_in_4_bits_is_shared_and_stays_and_adapters_train(saved, kind, value_model):
    run = start(saved(kind), value_model=value_model)
    shared = quantised(run.reference)
    assert len(shared) == 2 * {"gpt2": 4, "llama": 7}[kind]
    assert (
        quantised(run.state.learner.policy).keys()
        == quantised(run.state.learner.critic.backbone).keys()
        == shared.keys()
    )
    layers = [
        m
        for model in (run.reference, run.state.learner.policy, run.state.learner.critic.backbone)
        for m in model.modules()
    ]
    assert len({id(layer.quant_state) for layer in layers if is_quantised(layer)}) == len(shared)
    frozen = {name: p.clone() for name, p in run.state.learner.policy.named_parameters() if not p.requires_grad}
    start_of = {name: p.clone() for name, p in trained_parameters(run.state.learner.policy).items()}
    for _ in range(2):
        run.iteration()
    now = dict(run.state.learner.policy.named_parameters())
    assert all(torch.equal(now[name], before) for name, before in frozen.items())
    assert all(not torch.equal(now[name], before) for name, before in start_of.items())


def test_4_bit_weights_are_those_of_the_16_numbers_of_nf4_with_a_scale_for_64(saved):
    """Reference: Dettmers et al. 2023, appendix E. Only the scales are rounded, to 8 bits."""
    below = [-1.0, -0.6961928, -0.5250731, -0.3949175, -0.2844414, -0.1847734, -0.0910500, 0.0]
    above = [0.0795803, 0.1609302, 0.2461123, 0.3379152, 0.4407098, 0.5626170, 0.7229568, 1.0]
    levels = torch.tensor([*below, *above])
    handle = saved()
    actual = (
        exported_policy(start(handle).state.learner, start(handle).state.sampler)
        .model.model.layers[0]
        .mlp.up_proj.weight
    )
    true = handle.causal_lm().model.layers[0].mlp.up_proj.weight
    scales = true.detach().view(-1, 64).abs().amax(-1, keepdim=True)
    distances = (true.detach().view(-1, 64, 1) / scales[:, :, None] - levels).abs()
    expected = levels[distances.argmin(-1)] * scales
    assert_close(actual.view(-1, 64), expected, rtol=0.0, atol=0.01 * float(scales.max()))


def test_cpus_with_bfloat16_keep_the_weights_as_they_are(saved, monkeypatch):
    """bitsandbytes would repack them in a pass without gradients, for a kernel that has none."""
    monkeypatch.setattr("bitsandbytes.nn.modules.has_avx512bf16", lambda: True)
    policy = start(saved()).state.learner.policy
    with torch.no_grad():
        policy(IDS)
    states = [weight.quant_state for weight in quantised(policy).values()]
    assert not any(getattr(state, "packing_format_for_cpu", False) for state in states)


@pytest.mark.parametrize(
    ("kind", "dtype"), [pytest.param("gpt2", "float32", marks=pytest.mark.slow), ("llama", "bfloat16")]
)
def test_the_first_ratio_is_one_to_the_last_bit(saved, monkeypatch, kind, dtype):
    run = start(saved(kind), dtype=dtype)
    calls = recorded(monkeypatch, "clipped_policy_loss")
    run.iteration()
    assert torch.equal(calls[0]["new"][calls[0]["mask"]], calls[0]["old"][calls[0]["mask"]])
    assert not torch.equal(calls[-1]["new"][calls[-1]["mask"]], calls[-1]["old"][calls[-1]["mask"]])


@pytest.mark.parametrize("kind", ["gpt2", pytest.param("llama", marks=pytest.mark.slow)])
def test_the_exported_policy_and_a_checkpoints_are_plain_and_compute_what_was_trained(saved, tmp_path, kind):
    run = start(saved(kind), ema_decay=0.9)
    run.iteration()
    logits = run.state.learner.policy(IDS).logits
    exported = exported_policy(run.state.learner, run.state.sampler)
    averaged = run.state.learner.policy_average.applied_to(run.state.learner.policy)(IDS).logits
    assert_close(exported.average(IDS).logits, averaged, rtol=0.0, atol=2e-5 * float(averaged.detach().abs().max()))
    assert not torch.allclose(averaged, logits, atol=1e-3)
    exported.save(tmp_path / "exported")
    checkpoint = write_checkpoint(tmp_path / "run", run.state)
    again = PretrainedHandle(str(tmp_path / "exported")).causal_lm()
    loaded = PretrainedHandle(str(checkpoint / "policy")).causal_lm()
    for plain in (exported.model, again, loaded):
        assert not has_adapter(plain)
        assert not quantised(plain)
        assert {p.dtype for p in plain.parameters()} == {torch.float32}
        assert_close(plain(IDS).logits, logits, rtol=0.0, atol=2e-5 * float(logits.detach().abs().max()))
    one_by_one = dict(merged_parameters(run.state.learner.policy))  # as vLLM gets them
    assert one_by_one.keys() == dict(exported.model.named_parameters()).keys()
    for name, parameter in exported.model.named_parameters():
        assert_close(one_by_one[name], parameter.detach(), rtol=0.0, atol=1e-7, check_dtype=False)
    assert "quantization_config" not in again.config.to_dict()
    assert quantised(run.state.learner.policy)


def test_a_checkpoints_adapter_is_merged_into_the_weights_that_were_rounded_to_4_bits(saved, tmp_path):
    """Those of `dtype`: the numbers nearest to weights in float32 are others."""
    run = start(saved(), dtype="bfloat16")
    policy = write_checkpoint(tmp_path / "run", run.state) / "policy"
    assert_close(
        PretrainedHandle(str(policy)).causal_lm()(IDS).logits,
        exported_policy(run.state.learner, run.state.sampler).model(IDS).logits,
    )
    assert PretrainedHandle(str(policy)).causal_lm(torch.bfloat16).dtype == torch.bfloat16
    with pytest.raises(ModelError, match=r"ppo\.load_in_4bit=false"):
        PretrainedHandle(str(policy)).causal_lm(quantised_on=CPU)


@pytest.mark.slow
@pytest.mark.parametrize("settings", [{**WIDE, "ema_decay": 0.9}, {"gradient_checkpointing": True}], ids=str)
def test_a_resumed_run_is_the_uninterrupted_one_bit_for_bit(saved, tmp_path, settings):
    handle = saved()
    run = start(handle, **settings)
    run.iteration()
    directory = write_checkpoint(tmp_path / "run", run.state)
    resumed = start(handle, **settings)
    restore(resumed.state, directory)
    for each in (run, resumed):
        each.iteration()
    assert_same(moments_and_weights(resumed.state), moments_and_weights(run.state))


def moments_and_weights(state: TrainingState) -> dict[str, torch.Tensor]:
    trained = {**trained_parameters(state.learner.policy), **trained_parameters(state.learner.critic)}
    actual = {name: parameter.detach().clone() for name, parameter in trained.items()}
    for name, optimizer in optimizers(state.learner).items():
        for index, row in torch.optim.Optimizer.state_dict(optimizer)["state"].items():
            actual |= {f"{name}.{index}.{key}": torch.as_tensor(value).clone() for key, value in row.items()}
    return actual


@pytest.mark.slow
def test_full_weights_train_and_resume_with_8_bit_moments(make_run, tmp_path):
    settings = {"optim": "adamw_8bit", "dtype": "float32", "model": {"hidden_size": 64, "intermediate_size": 128}}
    run = make_run(**settings)
    run.iteration()
    kinds = {row["state1"].dtype for row in run.state.learner.policy_optimizer.state.values()}
    assert kinds == {torch.uint8, torch.float32}
    resumed = make_run(**settings)
    restore(resumed.state, write_checkpoint(tmp_path / "run", run.state))
    for each in (run, resumed):
        each.iteration()
    assert_same(moments_and_weights(resumed.state), moments_and_weights(run.state))


@pytest.mark.slow
def test_an_adapter_is_not_put_on_other_weights_or_on_the_same_in_another_precision(saved, tmp_path):
    run = start(saved())
    run.iteration()
    directory = write_checkpoint(tmp_path / "run", run.state)
    with pytest.raises(CheckpointError, match="frozen weights"):
        restore(start(saved(name="other", seed=3)).state, directory)
    with pytest.raises(ConfigError, match="load_in_4bit"):
        restore(start(saved(), load_in_4bit=False).state, directory)


def test_8_bit_adamw_follows_adamw_and_decays_only_matrices():
    """Moments in 8 bits are off by up to a few hundredths, so steps of a few thousandths are, too, at most."""
    generator = torch.Generator().manual_seed(0)
    modules = [torch.nn.Linear(64, 64) for _ in range(2)]
    modules[1].load_state_dict(modules[0].state_dict())
    start_of = modules[0].weight.detach().clone()
    choices = ("adamw_torch_fused", "adamw_8bit")
    built = [
        build_optimizer(module, 1e-2, PPOConfig(optim=optim, weight_decay=0.1))
        for module, optim in zip(modules, choices, strict=True)
    ]
    for _ in range(5):
        drawn = torch.randn(64, 64, generator=generator) + 0.5, torch.randn(64, generator=generator) + 0.5
        for module, optimizer in zip(modules, built, strict=True):
            module.weight.grad, module.bias.grad = (each.clone() for each in drawn)
            optimizer.step()
    exact, actual = modules
    assert_close(actual.bias, exact.bias, rtol=0.0, atol=1e-6)  # fewer than 4096 numbers: moments in 32 bits
    moved = (exact.weight - start_of).detach()
    assert 0.0 < (actual.weight - exact.weight).norm() < 0.05 * moved.norm()


@pytest.mark.parametrize(
    "settings",
    [
        pytest.param({}, marks=pytest.mark.slow),
        WIDE,
        pytest.param({**WIDE, "value_model": "shared"}, marks=pytest.mark.slow),
    ],
    ids=str,
)
def test_the_memory_plan_counts_weights_and_moments_to_the_byte(saved, settings):
    handle = saved()
    run = start(handle, **settings)
    run.iteration()
    planned = plan_memory(run.config, RunShape(handle.config(), 6))
    held: dict[int, int] = {}
    for model in (run.state.learner.policy, run.reference, run.state.learner.critic):
        for tensor in (*model.parameters(), *model.buffers()):
            scales = getattr(tensor, "quant_state", None)
            held[id(tensor)] = tensor.nbytes
            if scales is not None:
                held[id(tensor)] += scales.absmax.nbytes + scales.state2.absmax.nbytes
    weights = sum(size for name, size in planned.held.items() if name != MOMENTS)
    assert weights == sum(held.values())
    moments = {
        id(value): value.nbytes
        for optimizer in optimizers(run.state.learner).values()
        for row in optimizer.state.values()
        for name, value in row.items()
        if name.startswith(("state", "absmax", "exp_avg"))
    }
    assert planned.held[MOMENTS] == sum(moments.values())
    assert planned.exported == sum(
        p.nbytes for p in exported_policy(run.state.learner, run.state.sampler).model.parameters()
    )


@pytest.mark.slow
def test_the_trainer_takes_a_path_in_4_bits_and_no_object(saved):
    handle = saved()
    settings = PPOConfig(**SETTINGS)

    def reward(prompts, completions, **columns):
        return [float(len(response)) for response in completions]

    trainer = PPOTrainer(config=settings, policy=handle.source, reward=reward, prompts=["a b", "c"] * 6)
    trainer.train()
    assert quantised(trainer.state.learner.policy)
    for policy, config in ((handle.causal_lm(), settings), (handle.causal_lm(quantised_on=CPU), PPOConfig())):
        with pytest.raises((ConfigError, ModelError), match="load_in_4bit"):
            PPOTrainer(config=config, policy=policy, tokenizer=handle.tokenizer(), reward=reward, prompts=["a b"])


def test_a_model_that_was_saved_in_4_bits_is_refused(saved, tmp_path):
    handle = saved()
    handle.causal_lm(quantised_on=CPU).save_pretrained(tmp_path / "quantised")
    build_tokenizer().save_pretrained(tmp_path / "quantised")
    with pytest.raises(ModelError, match=r"ppo\.load_in_4bit"):
        PretrainedHandle(str(tmp_path / "quantised")).causal_lm()


def test_prompts_that_begin_alike_give_the_numbers_and_gradients_of_whole_rows(saved, monkeypatch):
    """In float32: bitsandbytes has no float64."""
    handle, found = saved("gpt2"), []
    for least in (99, prefixes.LEAST_SHARED):
        monkeypatch.setattr(prefixes, "LEAST_SHARED", least)
        run = start(handle, **ONE_STEP)
        run.prompts = build_prompts_alike()
        rollouts = (experience := run.before_update()[-1]).rollouts
        shares = [isinstance(batch.rows.layout, SharedLayout) for batch in rollouts.cut.first_inputs]
        assert any(shares) is (least < 99)
        moved = moved_on(experience)
        numbers = {name: getattr(rollouts, name) for name in ("old_logprobs", "reference_logprobs", "values")}
        found.append(numbers | gradients_of(run, moved))
    whole, shared = found
    for name, tensor in whole.items():
        assert_close(shared[name], tensor, rtol=0.0, atol=1e-6 + 1e-5 * float(tensor.abs().max()), msg=name)
