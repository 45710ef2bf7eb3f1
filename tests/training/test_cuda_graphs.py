"""Rollouts by recorded steps, with a recorder that calls the function again; and where `cuda_graphs` is refused."""

import pytest
import torch
from torch.testing import assert_close

from ppo_rlhf.core.errors import ConfigError
from ppo_rlhf.models.loading import PretrainedHandle
from ppo_rlhf.models.passes import decoding
from ppo_rlhf.models.passes.recorded_steps import RecordedSteps
from ppo_rlhf.training import PPOTrainer, run_models, trainer_models
from ppo_rlhf.training.config import PPOConfig
from ppo_rlhf.training.generation import responses
from ppo_rlhf.training.generation.responses import generate_responses
from ppo_rlhf.training.run_models import load_policies
from tests.models.passes.test_recorded_steps import Again
from tests.tiny_models import save, tiny_model, word_tokenizer
from tests.training.generation.test_responses import UNEVEN, noise, settings

CPU = torch.device("cpu")
ON_THE_CPU = (
    "ppo.cuda_graphs=true needs CUDA, and the run computes on cpu (ppo.device=auto): leave it out, or run on a GPU"
)


@pytest.fixture(autouse=True)
def small_buckets(monkeypatch):
    monkeypatch.setattr(decoding, "BUCKET", 4)


@pytest.mark.parametrize("batch_size", [64, 4])
@pytest.mark.parametrize("kind", ["gpt2", "llama", "bitnet"])
def test_responses_are_those_of_steps_that_are_computed_anew_and_of_the_plain_engine(make_model, kind, batch_size):
    model, again = make_model(kind), Again()
    recorded = RecordedSteps(model, again)
    for how in (settings(), settings(min_response_length=4, top_k=5), settings(stop_token_ids=())):
        found = generate_responses(model, UNEVEN, noise(6), how, batch_size=batch_size, recorded=recorded)
        for engine in ("static", "plain"):
            expected = generate_responses(model, UNEVEN, noise(6), how, engine=engine, batch_size=batch_size)
            assert found.token_lists() == expected.token_lists()
            assert torch.equal(found.terminated, expected.terminated)
            assert_close(found.sampler_logprobs, expected.sampler_logprobs, rtol=0.0, atol=1e-10)
    assert len({rows for rows, _ in recorded._steps}) > 1  # rows ended
    assert len({columns for _, columns in recorded._steps}) > 1


@pytest.mark.parametrize("looks", [1, 3])
def test_responses_are_the_same_where_ended_rows_leave_late(make_model, monkeypatch, looks):
    """On an accelerator it is asked every so many steps; until then what has ended goes on."""
    monkeypatch.setattr(responses, "_is_time_to_look", lambda step, _: step % looks == looks - 1)
    model = make_model("llama")
    found = generate_responses(model, UNEVEN, noise(6), settings(), recorded=RecordedSteps(model, Again()))
    expected = generate_responses(model, UNEVEN, noise(6), settings(), engine="plain")
    assert found.token_lists() == expected.token_lists()


@pytest.mark.parametrize(
    ("changes", "atol"),
    [({}, 1e-10), ({"dtype": "bfloat16"}, 1e-5), ({"use_peft": True, "dtype": "float32"}, 1e-5)],
    ids=str,
)
def test_a_run_has_the_same_rollouts_and_trains_the_same_parameters(make_run, changes, atol):
    plain, run = (make_run("gpt2", local_rollout_forward_batch_size=8, **changes) for _ in range(2))
    again = Again()
    run.state.recorded_steps = RecordedSteps(run.state.policy, again)
    recordings = []
    for _ in range(2):
        parameters = list(run.state.policy.parameters())
        found, expected = run.rollouts(), plain.rollouts()
        assert found.token_lists() == expected.token_lists()
        assert_close(found.sampler_logprobs, expected.sampler_logprobs, rtol=0.0, atol=atol)
        assert all(a is b for a, b in zip(parameters, run.state.policy.parameters(), strict=True))
        run.iteration()
        plain.iteration()
        recordings.append(again.recordings)
    assert 0 < recordings[0] <= recordings[1] <= 8  # of 1, 2, 4 or 8 rows at 8, 12 or 16 columns


def test_where_auto_is_the_cpu_it_is_refused_before_a_model_is_loaded(tmp_path):
    with pytest.raises(ConfigError) as caught:
        load_policies(PretrainedHandle(str(tmp_path / "nothing")), PPOConfig(cuda_graphs=True), CPU)
    assert str(caught.value) == ON_THE_CPU


def test_the_trainer_refuses_it_on_the_cpu_too(monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    with pytest.raises(ConfigError) as caught:
        PPOTrainer(PPOConfig(cuda_graphs=True), tiny_model(), tokenizer=word_tokenizer(), reward=len)
    assert str(caught.value) == ON_THE_CPU


def test_a_policy_that_needs_padding_is_refused_by_the_name_of_the_setting(monkeypatch):
    monkeypatch.setattr(run_models, "check_device", lambda *_: None)
    model = tiny_model()
    model.config.sliding_window = 4
    with pytest.raises(ConfigError) as caught:
        run_models.recorded_steps(model, PPOConfig(cuda_graphs=True))
    assert str(caught.value) == (
        "ppo.cuda_graphs=true: LlamaForCausalLM cannot be decoded without padding; set it to false"
    )


def test_without_the_setting_nothing_is_recorded(make_run):
    assert make_run().state.recorded_steps is None


def train(tmp_path, device, **changes):
    config = PPOConfig(
        device=device,
        total_episodes=24,
        response_length=8,
        sft_model_path=save(tmp_path / "p", tiny_model("gpt2")),
        **changes,
    )
    trainer = PPOTrainer(config, reward=lengths, prompts=["a b c", "d e"])
    return [row["objective/kl"] for row in trainer.train()]


def lengths(completions, **_):
    return [float(len(text)) for text in completions]


def test_a_trainer_with_the_setting_replays_its_policys_steps(tmp_path, monkeypatch):
    recorders = []
    monkeypatch.setattr(run_models, "CudaGraphs", lambda device: recorders.append(Again()) or recorders[-1])
    for module in (run_models, trainer_models):
        monkeypatch.setattr(module, "check_device", lambda *_: None)
    expected = train(tmp_path, "auto")
    assert_close(train(tmp_path, "auto", cuda_graphs=True), expected, rtol=0.0, atol=1e-4)
    assert len(recorders) == 1
    assert recorders[0].recordings > 0


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_on_a_gpu_a_run_with_captured_steps_samples_the_same(tmp_path, dtype):
    expected = train(tmp_path, "cuda", dtype=dtype)
    assert_close(train(tmp_path, "cuda", dtype=dtype, cuda_graphs=True), expected, rtol=0.0, atol=1e-2)
