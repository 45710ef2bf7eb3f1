"""Typical answers of models, compared with verl's rule and with a reader's judgement."""

from __future__ import annotations

import pytest

from ppo_rlhf.recipes.exact_answer import after_hashes, last_number

SOLUTION = "Half of 144 is <<144/2=72>>72, so she sold 72 more.\n#### 72"


@pytest.mark.parametrize(
    ("completion", "answer", "strict", "lenient"),
    [
        ("She sold 144 / 2 = 72.\n#### 72", SOLUTION, 1, 1),
        ("#### 72 clips", SOLUTION, 1, 1),
        ("#### 71", SOLUTION, 0, 0),
        ("#### 71\nNo, wait: #### 72", SOLUTION, 0, 1),  # the first one counts
        ("The answer is 72.", SOLUTION, 0, 1),
        ("The answer is \\boxed{72}", SOLUTION, 0, 1),
        ("#### $72", SOLUTION, 0, 1),
        ("#### 72.", SOLUTION, 0, 1),
        ("#### 72.00", SOLUTION, 0, 1),
        ("#### 720", SOLUTION, 0, 0),
        ("#### 1,080,000", "… = 1080000\n#### 1,080,000", 1, 1),
        ("#### 1080000", "#### 1,080,000", 1, 1),
        ("So Bob lost money: #### -3.5", "#### -3.5", 1, 1),
        ("So Bob lost money: -3.50", "-3.5", 0, 1),
        ("It takes 10-7=3 hours", "3", 0, 1),
        ("It takes 12-15 minutes", "#### 15", 0, 1),
        ("A ratio of .5", "0.5", 0, 1),
        ("#### 18", 18, 1, 1),  # a column of numbers
        ("", SOLUTION, 0, 0),
        ("#### ", SOLUTION, 0, 0),
        ("I do not know.", SOLUTION, 0, 0),
    ],
)
def test_only_the_right_number_is_worth_one(completion: str, answer: object, strict: int, lenient: int) -> None:
    called = {"prompts": ["q"], "completions": [completion], "answer": [answer], "another_column": [None]}
    assert after_hashes(**called) == [float(strict)]
    assert last_number(**called) == [float(lenient)]
