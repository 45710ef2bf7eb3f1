"""Draws of the curriculum against a plain implementation, place by place, and against the shares that it promises."""

import random
from collections import Counter
from itertools import islice

import pytest
import torch

from ppo_rlhf.core.curriculum import Curriculum
from ppo_rlhf.core.errors import ConfigError
from ppo_rlhf.core.randomness import episode_prompts, permutation

SOLVED = 0.75


def is_set_aside(outcomes: list[bool]) -> bool:
    return len(outcomes) >= 8 and len(set(outcomes[-8:])) == 1


class Plain:
    """The curriculum with every outcome in a list."""

    def __init__(self, seed: int, num_prompts: int) -> None:
        self.outcomes: list[list[bool]] = [[] for _ in range(num_prompts)]
        self.places = self.all_places(seed)

    def all_places(self, seed: int):
        number = 0
        while True:
            yield from enumerate(permutation(len(self.outcomes), seed, "prompts", number).tolist())
            number += 1

    def draw(self, count: int) -> list[int]:
        due = (prompt for place, prompt in self.places if place % 8 == 0 or not is_set_aside(self.outcomes[prompt]))
        return list(islice(due, count))

    def shares(self) -> tuple[float, float, float]:
        ends = Counter((is_set_aside(each), bool(each) and each[-1]) for each in self.outcomes)
        solved, unsolved = ends[True, True], ends[True, False]
        total = len(self.outcomes)
        return solved / total, unsolved / total, (total - solved - unsolved) / total


@pytest.mark.parametrize(("num_prompts", "count", "group"), [(30, 7, 1), (5, 12, 1), (13, 13, 3), (1, 4, 2)])
def test_it_draws_what_a_plain_implementation_with_all_outcomes_draws(num_prompts, count, group):
    curriculum, plain, noise = Curriculum(11, SOLVED), Plain(11, num_prompts), random.Random(1)
    chances = [noise.choice([0.0, 0.1, 0.5, 0.95, 1.0]) for _ in range(num_prompts)]
    for _ in range(120):
        drawn = curriculum.draw(count, num_prompts)
        assert drawn == curriculum.draw(count, num_prompts)  # an iteration that is begun again draws the same
        assert drawn == plain.draw(count)
        assert tuple(curriculum.shares().values()) == pytest.approx(plain.shares(), abs=1e-12)
        outcomes = [noise.random() < chances[prompt] for prompt in drawn for _ in range(group)]
        curriculum.update(torch.where(torch.tensor(outcomes), SOLVED, SOLVED - 0.01).double(), group)
        for row, outcome in enumerate(outcomes):
            plain.outcomes[drawn[row // group]].append(outcome)
    assert list(curriculum.shares()) == ["curriculum/solved", "curriculum/unsolved", "curriculum/in_reach"]


def test_without_a_prompt_set_aside_the_draws_are_those_of_a_run_without_it():
    curriculum = Curriculum(5, SOLVED)
    for iteration in range(1, 20):
        assert curriculum.draw(4, 10) == episode_prompts(5, iteration, 4, 10)
        curriculum.update(torch.full((4,), float(iteration % 2)), 1)


def settled(*streaks: int) -> Curriculum:
    curriculum = Curriculum(3, SOLVED)
    curriculum.draw(1, len(streaks))
    curriculum.streaks_N = torch.tensor(streaks, dtype=torch.int8)
    return curriculum


def test_a_prompt_set_aside_is_drawn_an_eighth_as_often_as_each_other():
    counts = Counter(settled(*[8, -8] * 40, *[7, -7, 0, 1] * 20).draw(36_000, 160))
    rest, aside = ([counts[prompt] for prompt in half] for half in (range(80, 160), range(80)))
    assert max(rest) - min(rest) <= 1  # once a pass
    # a pass has 80 and about 10 draws: 400 passes, probability 1/8, mean 50, standard deviation 6.6
    assert all(17 <= count <= 83 for count in aside)
    assert sum(aside) / 80 == pytest.approx(50.0, abs=5 * 6.6 / 80**0.5)
    assert sum(aside[::2]) / 40 == pytest.approx(50.0, abs=5 * 6.6 / 40**0.5)  # solved ones as often as unsolved ones


def test_if_all_are_set_aside_all_are_drawn_equally_often():
    counts = Counter(settled(*[8] * 20, *[-8] * 20).draw(20_000, 40))
    # five places of a pass, 40 prompts: 500 each in 4,000 passes, standard deviation 20.9
    assert all(500 - 5 * 21 < counts[prompt] < 500 + 5 * 21 for prompt in range(40))


def test_eight_equal_outcomes_in_a_row_set_a_prompt_aside_and_one_other_brings_it_back():
    curriculum, found = Curriculum(0, SOLVED), []
    for score in [0.0, *[SOLVED] * 9, 0.0]:
        assert curriculum.draw(1, 1) == [0]
        curriculum.update(torch.tensor([score]), 1)
        found.append(curriculum.shares()["curriculum/solved"])
    assert found == [0.0] * 8 + [1.0, 1.0, 0.0]


def test_other_prompts_than_those_with_outcomes_are_refused():
    curriculum = Curriculum(0, SOLVED)
    curriculum.draw(2, 5)
    with pytest.raises(ConfigError, match=r"^ppo\.curriculum=0\.75: outcomes of 5 prompts .* now there are 6; give"):
        curriculum.draw(2, 6)


def test_its_tensors_are_its_whole_state_in_a_byte_a_prompt():
    curriculum, other = Curriculum(7, SOLVED), Curriculum(7, SOLVED)
    for number in range(30):
        curriculum.draw(9, 12)
        curriculum.update(torch.tensor([0.0, 1.0, 1.0] * 3) if number % 5 else torch.ones(9), 1)
    saved = curriculum.tensors()
    assert saved["streaks"].nbytes == 12
    other.load_tensors(saved)
    for _ in range(10):
        assert other.draw(9, 12) == curriculum.draw(9, 12)
        for each in (curriculum, other):
            each.update(torch.tensor([0.0, 1.0, 1.0] * 3), 1)
