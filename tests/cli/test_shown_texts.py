"""Answers, errors and log lines that quote a text a terminal would obey write it out."""

import logging

import click
import pytest

from ppo_rlhf.cli.errors import with_one_line_errors
from ppo_rlhf.cli.generate import _written
from ppo_rlhf.core.errors import DataError
from ppo_rlhf.core.escaped_text import escaped
from tests.core.test_escaped_text import EVIL


def test_generate_shows_answers_without_control_characters():
    written = click.unstyle(_written("SFT", EVIL, tokens=3, has_ended=True, reward=None))
    assert written.startswith(f"  SFT   {escaped(EVIL)}")


def test_errors_that_quote_a_text_are_shown_without_control_characters():
    def lines():
        raise DataError(f"the template refuses {EVIL}")

    with pytest.raises(click.ClickException) as shown:
        with_one_line_errors(lines)
    assert shown.value.message == f"the template refuses {escaped(EVIL)}"


def test_log_lines_are_written_without_control_characters():
    import ppo_rlhf.settings  # noqa: F401  # as Kedro does

    record = logging.getLogRecordFactory()("ppo_rlhf", logging.INFO, "", 0, "reward of %s", (EVIL,), None)
    assert record.getMessage() == f"reward of {escaped(EVIL)}"
