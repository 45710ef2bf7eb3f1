"""Runs with each of some options: the first ratio is exactly 1, and a resumed run is one that was never interrupted."""

import pytest

from ppo_rlhf.checkpoints.restore import restore
from ppo_rlhf.checkpoints.store import write_checkpoint
from tests.ppo_runs import MEASURED

OPTIONS = {
    "lambda by length": {"lam_alpha": 0.3, "lam_critic": 1.0},
    "positive examples": {"positive_coef": 0.3, "positive_threshold": 0.75},
    "more epochs of the critic": {"num_critic_epochs": 4},
    "KL over the vocabulary in the reward": {"kl_estimator": "full", "kl_coef": 0.5},
    "KL over the vocabulary in the loss": {"kl_in": "loss", "kl_estimator": "full", "kl_coef": 0.5},
    "prompts without a signal": {"responses_per_prompt": 2, "drop_uniform_prompts": 2},
    "k3 with the gradient of k2": {"kl_in": "loss", "kl_estimator": "k3+", "kl_coef": 0.5},
}


@pytest.fixture(params=OPTIONS)
def option(request) -> dict:
    return OPTIONS[request.param]


def numbers(metrics: dict[str, float]) -> dict[str, float]:
    return {name: value for name, value in metrics.items() if not name.startswith(MEASURED)}


def test_the_first_ratio_is_exactly_one(make_run, option):
    run = make_run(dtype="float32", num_ppo_epochs=1, num_mini_batches=1, **option)
    metrics = run.iteration()
    assert (metrics["val/ratio"], metrics["policy/approxkl_avg"], metrics["policy/clipfrac_avg"]) == (1.0, 0.0, 0.0)


def test_a_resumed_run_has_the_numbers_of_one_that_was_not_interrupted(make_run, tmp_path, snapshot, option):
    run, plain = make_run(**option), make_run()
    run.iteration()
    saved = write_checkpoint(tmp_path / "run", run.state)
    resumed = make_run(**option, model={"seed": 9})
    restore(resumed.state, saved)
    resumed.reference = run.reference  # no checkpoint holds it
    expected = numbers(run.iteration())
    assert numbers(resumed.iteration()) == expected
    for model in ("policy", "critic"):
        found, wanted = (snapshot(getattr(one.state, model)) for one in (resumed, run))
        assert all((found[name] == tensor).all() for name, tensor in wanted.items())
    plain.iteration()
    assert numbers(plain.iteration()) != expected  # the option does something
