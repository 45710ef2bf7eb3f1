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
