import inspect

import pytest

from ppo_rlhf.core import errors

CLASSES = [c for _, c in inspect.getmembers(errors, inspect.isclass)]
LEAVES = [c for c in CLASSES if c is not errors.PPORLHFError]


@pytest.mark.parametrize("error", LEAVES, ids=lambda c: c.__name__)
def test_every_error_is_in_the_tree_and_also_a_standard_library_type(error: type[Exception]):
    assert issubclass(error, errors.PPORLHFError)
    assert issubclass(error, ValueError | RuntimeError)
    assert error.__name__.endswith("Error")
    assert error.__doc__


def test_an_error_without_a_text_is_told_by_its_kind():
    assert (errors.in_one_line(MemoryError()), errors.kind_and_text(MemoryError())) == ("MemoryError", "MemoryError")
    told = ValueError("no such\nplace")
    assert (errors.in_one_line(told), errors.kind_and_text(told)) == ("no such place", "ValueError: no such place")
