"""`ppo.compile`: an iteration with compiled layers against one with the layers as they are."""

import pytest
import torch
from ppo_rlhf.models.passes.behind_attention import Tail
from torch._dynamo.utils import counters
from torch.testing import assert_close

from ppo_rlhf.config import PPOConfig
from ppo_rlhf.core.errors import ModelError
from ppo_rlhf.core.randomness import episode_uniforms
from ppo_rlhf.models import compilation
from ppo_rlhf.models import forward as trunks
from ppo_rlhf.models.forward import backbone_of
from ppo_rlhf.models.loading import PretrainedHandle
from ppo_rlhf.ppo.accelerator import autocast
from ppo_rlhf.ppo.build import load_policies
from ppo_rlhf.ppo.logprobs import response_logprobs
from ppo_rlhf.ppo.sampling import generate_responses
from ppo_rlhf.ppo.update import optimise_policy
from tests import tiny_models
from tests.ppo.support import ONE_STEP, gradients, moved_on

pytestmark = pytest.mark.usefixtures("quick_compiler")

TIMED = ("time/", "throughput/", "memory/")
VARIANTS = [
    ("gpt2", {"dtype": "float32", "gradient_checkpointing": True}),
    ("llama", {"dtype": "float32", "value_model": "shared", "entropy_coef": 0.01}),
    pytest.param(
        "gpt2",
        {"dtype": "float32", "use_peft": True, "lora_r": 2, "gradient_checkpointing": True},
        marks=pytest.mark.slow,
    ),
    pytest.param(
        "llama",
        {"dtype": "float64", "deterministic": True, "use_peft": True, "value_model": "shared", "lora_r": 2},
        marks=pytest.mark.slow,
    ),
    pytest.param("bitnet", {"dtype": "bfloat16"}, marks=pytest.mark.slow),
    pytest.param("gpt2", {"dtype": "float16", "ema_decay": 0.9}, marks=pytest.mark.slow),
]


@pytest.mark.parametrize(("kind", "settings"), VARIANTS, ids=str)
def test_an_iteration_is_that_of_the_layers_as_they_are(make_run, snapshot, monkeypatch, kind, settings):
    """Of all tokens: in other sums keys' biases, whose gradient is rounding alone, take other steps of Adam."""
    monkeypatch.setattr(trunks, "_find_tail", lambda _: Tail([]))
    plain, compiled = make_run(kind, **settings), make_run(kind, compile=True, **settings)
    expected, found = plain.iteration(), compiled.iteration()
    assert counters["stats"]["unique_graphs"]
    for name, value in expected.items():
        if not name.startswith(TIMED):
            assert found[name] == pytest.approx(value, rel=1e-5, abs=1e-5), name
    for model in ("policy", "critic"):
        weights = snapshot(getattr(plain.state, model))
        for name, tensor in snapshot(getattr(compiled.state, model)).items():
            assert_close(tensor, weights.pop(name), rtol=0.0, atol=1e-5)
        assert not weights


def test_later_iterations_compile_nothing_anew(make_run):
    run = make_run("gpt2", dtype="float32", compile=True)
    run.iteration()
    compiled = counters["stats"]["unique_graphs"]
    lengths = {run.before_update()[0].lengths.sum().item()}
    for _ in range(2):
        rollouts, *_, experience = run.before_update()
        lengths.add(rollouts.lengths.sum().item())
        optimise_policy(run.state, experience, run.config)
    assert len(lengths) > 1
    assert counters["stats"]["unique_graphs"] == compiled > 0


@pytest.mark.parametrize("kind", ["gpt2", pytest.param("llama", marks=pytest.mark.slow)])
def test_with_torchs_own_compiler_the_gradients_are_those_of_the_layers_as_they_are(make_run, monkeypatch, kind):
    monkeypatch.setattr(compilation, "BACKEND", "inductor")
    experience = moved_on(make_run(kind, dtype="float32", **ONE_STEP).before_update()[-1])
    settings = {"dtype": "float32", "gradient_checkpointing": kind == "gpt2"}
    expected = gradients(make_run, experience, kind, **settings)
    found = gradients(make_run, experience, kind, compile=True, **settings)
    assert found.keys() == expected.keys()
    for name, gradient in expected.items():
        assert_close(found[name], gradient, rtol=0.0, atol=1e-5 * max(1.0, float(gradient.abs().max())), msg=name)


def test_with_torchs_own_compiler_the_first_ratio_is_1_but_for_rounding(make_run, monkeypatch):
    monkeypatch.setattr(compilation, "BACKEND", "inductor")
    metrics = make_run("gpt2", dtype="float32", compile=True, **ONE_STEP).iteration()
    assert metrics["val/ratio"] == pytest.approx(1.0, abs=1e-5)
    assert metrics["policy/approxkl_avg"] < 1e-10


def test_with_torchs_own_compiler_16_bits_are_as_close_to_64_as_without(make_run, monkeypatch):
    monkeypatch.setattr(compilation, "BACKEND", "inductor")
    responses = make_run("gpt2").rollouts()

    def logprobs(dtype: str, **settings: bool) -> torch.Tensor:
        run = make_run("gpt2", dtype=dtype, **settings)
        with autocast(run.config, run.state.device):
            return response_logprobs(
                run.state.policy, responses.prompts.prompt_ids, responses.response_ids, responses.lengths, 0.8, 6
            ).double()

    exact, plain, compiled = logprobs("float64"), logprobs("bfloat16"), logprobs("bfloat16", compile=True)
    assert counters["stats"]["unique_graphs"]
    assert 0.0 < (compiled - exact).norm() < 1.5 * (plain - exact).norm()


def test_sampling_runs_the_layers_as_they_are(make_run):
    plain, compiled = make_run(dtype="float32"), make_run(dtype="float32", compile=True)
    compiled.before_update()  # the layers have been compiled once
    before = counters["stats"]["unique_graphs"]
    uniforms = episode_uniforms(0, "test", 1, 6, 8)
    for engine in ("static", "plain", "hf"):
        found, expected = (
            generate_responses(r.state.policy, r.prompts.prompt_ids, uniforms, r.state.sampling, engine=engine)
            for r in (compiled, plain)
        )
        assert torch.equal(found.response_ids, expected.response_ids)
        assert torch.equal(found.sampler_logprobs, expected.sampler_logprobs)
    assert counters["stats"]["unique_graphs"] == before > 0


@pytest.mark.parametrize("use_peft", [False, True])
def test_the_reference_policy_is_compiled_too(tmp_path, monkeypatch, use_peft):
    asked = []
    monkeypatch.setattr("ppo_rlhf.ppo.build.check_compiler", lambda device: asked.append(device.type))
    handle = PretrainedHandle(tiny_models.save(tmp_path / "sft", tiny_models.tiny_model("gpt2")))
    config = PPOConfig(compile=True, use_peft=use_peft)
    policy, reference = load_policies(handle, config, torch.device("cpu"))
    assert asked == ["cpu"]
    assert backbone_of(reference) in compilation._forwards
    assert backbone_of(policy.model) not in compilation._forwards  # not before its training state is made


def test_checkpointed_gradients_that_the_architecture_lacks_are_refused_with_it_too(make_run, monkeypatch, make_model):
    monkeypatch.setattr(type(make_model("llama")), "supports_gradient_checkpointing", False)
    with pytest.raises(ModelError, match=r"^ppo.gradient_checkpointing=true: LlamaForCausalLM does not support it"):
        make_run("llama", gradient_checkpointing=True, compile=True)
