"""`ppo.compile`: an iteration with compiled layers equals an iteration without compilation."""

import pytest
import torch
from torch._dynamo.utils import counters
from torch.testing import assert_close

from ppo_rlhf.config import PPOConfig
from ppo_rlhf.models.loading import PretrainedHandle
from ppo_rlhf.passes import compilation
from ppo_rlhf.ppo.run_setup import load_policies
from tests import tiny_models
from tests.ppo.support import ONE_STEP, gradients, moved_on

pytestmark = [pytest.mark.slow, pytest.mark.usefixtures("quick_compiler")]  # tests/passes/test_compilation.py is not

TIMED = ("time/", "throughput/", "memory/")
VARIANTS = [
    ("gpt2", {"gradient_checkpointing": True}),
    ("llama", {"use_peft": True, "value_model": "shared", "lora_r": 2}),
]


@pytest.mark.parametrize(("kind", "settings"), VARIANTS, ids=str)
def test_an_iteration_is_that_of_the_layers_as_they_are(make_run, snapshot, kind, settings):
    settings = {"dtype": "float64", **settings}
    plain, compiled = make_run(kind, **settings), make_run(kind, compile=True, **settings)
    expected, actual = plain.iteration(), compiled.iteration()
    assert counters["stats"]["unique_graphs"]
    for name, value in expected.items():
        if not name.startswith(TIMED):
            assert actual[name] == pytest.approx(value, rel=1e-5, abs=1e-5), name
    for model in ("policy", "critic"):
        weights = snapshot(getattr(plain.state.learner, model))
        for name, tensor in snapshot(getattr(compiled.state.learner, model)).items():
            assert_close(tensor, weights.pop(name), rtol=0.0, atol=1e-5)
        assert not weights


def test_later_iterations_compile_nothing_again(make_run):
    run = make_run("gpt2", dtype="float32", compile=True)
    run.iteration()
    compiled = counters["stats"]["unique_graphs"]
    for _ in range(2):
        run.iteration()
    assert len({row["response/length"] for row in run.state.progress.history}) > 1
    assert counters["stats"]["unique_graphs"] == compiled > 0


def test_with_torchs_own_compiler_gradients_and_first_ratio_are_right_up_to_rounding(make_run, monkeypatch):
    monkeypatch.setattr(compilation, "BACKEND", "inductor")
    experience = moved_on(make_run("gpt2", dtype="float32", **ONE_STEP).before_update()[-1])
    expected = gradients(make_run, experience, "gpt2", dtype="float32")
    actual = gradients(make_run, experience, "gpt2", dtype="float32", compile=True)
    assert actual.keys() == expected.keys()
    for name, gradient in expected.items():
        assert_close(actual[name], gradient, rtol=0.0, atol=1e-5 * max(1.0, float(gradient.abs().max())), msg=name)
    metrics = make_run("gpt2", dtype="float32", compile=True, **ONE_STEP).iteration()
    assert metrics["val/ratio"] == pytest.approx(1.0, abs=1e-5)


@pytest.mark.parametrize("use_peft", [False, True])
def test_the_reference_policy_is_compiled_too(tmp_path, use_peft):
    handle = PretrainedHandle(tiny_models.save(tmp_path / "sft", tiny_models.tiny_model("gpt2")))
    config = PPOConfig(compile=True, use_peft=use_peft)
    policy, reference = load_policies(handle, config, torch.device("cpu"))
    ids = torch.tensor([[4, 5, 6]])
    expected = tiny_models.tiny_model("gpt2")(ids).logits
    counters.clear()
    assert_close(policy.model(ids).logits, expected, rtol=1e-5, atol=1e-5)
    assert not counters["stats"]["unique_graphs"]  # layers are compiled only when the training state is built
    assert_close(reference(ids).logits, expected, rtol=1e-5, atol=1e-5)
    assert counters["stats"]["unique_graphs"]
