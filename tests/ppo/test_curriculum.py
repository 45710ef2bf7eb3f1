"""Runs with `ppo.curriculum`: which prompts they draw, what they log, and that a resumed run draws the same."""

from itertools import islice

import pytest
import torch

from ppo_rlhf.checkpoints.restore import restore
from ppo_rlhf.checkpoints.store import CURRICULUM, write_checkpoint
from ppo_rlhf.core.errors import ConfigError
from ppo_rlhf.core.randomness import permutation
from ppo_rlhf.rewards.scoring import RewardScorer
from tests.ppo_runs import MEASURED, build_prompts, weight_sums

WORDS = "abcdef"  # the words `wanted` of the six prompts
SETTINGS = {"curriculum": 0.5, "responses_per_prompt": 4, "total_episodes": 144}  # twelve iterations of three prompts


def by_prompt(batch):
    """Score a and b below the threshold, c at the threshold, and the other prompts' responses by their tokens."""
    scores = {"a": 0.25, "b": 0.25, "c": 0.5}
    chance = [float(sum(ids) % 2) for ids in batch.response_ids]
    return torch.tensor([scores.get(word, score) for word, score in zip(batch.columns["wanted"], chance, strict=True)])


@pytest.fixture
def build(make_run):
    def make(**settings):
        """Return a run, and the batches that its reward scores."""
        batches = []
        scorer = RewardScorer([("given", 1.0, lambda batch: batches.append(batch) or by_prompt(batch))])
        return make_run(scorer=scorer, **{**SETTINGS, **settings}), batches

    return make


def numbers(metrics):
    return {key: value for key, value in metrics.items() if not key.startswith(MEASURED)}


def all_places(seed):
    """Yield the places of all passes over the six prompts."""
    number = 0
    while True:
        yield from enumerate(permutation(6, seed, "prompts", number).tolist())
        number += 1


def test_a_run_draws_by_the_outcomes_of_its_own_responses_and_logs_the_shares(build):
    run, batches = build()
    outcomes = {word: [] for word in WORDS}
    places = all_places(run.config.seed)
    seen = set()

    def is_aside(word):
        return len(outcomes[word]) >= 8 and len(set(outcomes[word][-8:])) == 1

    for _ in range(12):
        due = (WORDS[prompt] for place, prompt in places if place == 0 or not is_aside(WORDS[prompt]))
        expected = list(islice(due, 3))
        solved, unsolved = ([is_aside(w) and outcomes[w][-1] == end for w in WORDS].count(True) for end in (1, 0))
        metrics = run.iteration()
        (batch,) = batches
        assert batch.columns["wanted"] == [word for word in expected for _ in range(4)]
        assert metrics["curriculum/solved"] == solved / 6
        assert metrics["curriculum/unsolved"] == unsolved / 6
        assert metrics["curriculum/in_reach"] == pytest.approx((6 - solved - unsolved) / 6, abs=1e-12)
        for word, score in zip(batch.columns["wanted"], by_prompt(batch).tolist(), strict=True):
            outcomes[word].append(score >= 0.5)
        seen.add((solved, unsolved))
        batches.clear()
    assert (1, 2) in seen  # a, b and c were set aside


def test_a_resumed_run_has_the_numbers_of_one_that_was_not_interrupted(build, tmp_path):
    run, _ = build()
    for _ in range(6):
        run.iteration()
    saved = write_checkpoint(tmp_path / "run", run.state)
    resumed, _ = build(model={"seed": 9})
    restore(resumed.state, saved)
    resumed.reference = run.reference  # no checkpoint holds it
    plain, _ = build(curriculum=None)
    for _ in range(6):
        plain.iteration()
    drawn = []
    for _ in range(4):
        drawn.append((run.rollouts().prompts.texts, plain.rollouts().prompts.texts))
        assert numbers(resumed.iteration()) == numbers(run.iteration())
        plain.iteration()
    assert weight_sums(resumed) == weight_sums(run)
    assert any(found != uniform for found, uniform in drawn)  # the option does something
    assert not any(key.startswith("curriculum/") for key in plain.state.history[-1])


def test_its_state_is_a_byte_a_prompt_beside_the_json_and_only_with_the_setting(build, tmp_path):
    prompts = build_prompts((3,) * 2_000)
    sizes = {}
    for curriculum in (0.5, None):
        run, _ = build(curriculum=curriculum, prompts=prompts)
        run.iteration()
        saved = write_checkpoint(tmp_path / str(curriculum), run.state)
        sizes[curriculum] = {path.name: path.stat().st_size for path in saved.iterdir() if path.is_file()}
    assert sizes[0.5].keys() - sizes[None].keys() == {CURRICULUM}
    assert sizes[0.5][CURRICULUM] < 2_000 + 300
    assert abs(sizes[0.5]["state.json"] - sizes[None]["state.json"]) < 50


@pytest.mark.parametrize(("before", "now"), [(0.5, None), (None, 0.5), (0.5, 0.75)])
def test_a_run_is_resumed_only_with_the_threshold_that_it_had(build, tmp_path, before, now):
    run, _ = build(curriculum=before)
    run.iteration()
    saved = write_checkpoint(tmp_path / "run", run.state)
    with pytest.raises(ConfigError, match=rf"^ppo\.curriculum: {before} in .*, {now} now"):
        restore(build(curriculum=now)[0].state, saved)


def test_other_prompts_after_a_resume_are_refused(build, tmp_path):
    run, _ = build()
    run.iteration()
    resumed, _ = build(prompts=build_prompts((2, 3, 4)))
    restore(resumed.state, write_checkpoint(tmp_path / "run", run.state))
    with pytest.raises(ConfigError, match=r"outcomes of 6 prompts were counted, and now there are 3"):
        resumed.rollouts()
