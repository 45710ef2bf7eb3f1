"""Command lines: the same settings from a list, from text and from a shell script."""

from __future__ import annotations

import pytest

from ppo_rlhf.compat.command_line import CommandLine, read_command_line
from ppo_rlhf.core.errors import ConfigError

KINDS = {"size": "value", "rate": "value", "data": "values", "fast": "nothing"}


def settings(given: str | list[str]) -> dict[str, object]:
    return dict(read_command_line(given, KINDS).settings)


@pytest.mark.parametrize(
    "given",
    [
        ["--size", "4", "--rate=1e-5", "--data", "a", "b", "--fast"],
        "--size 4 --rate=1e-5 --data a b --fast",
        "main.py --size=4 --rate 1e-5 --data a 'b' --fast",
        "python path/to/main.py --size 4 --rate '1e-5' --data a b --fast &> log.txt",
        "deepspeed main.py --size 4 \\\n  --rate 1e-5 \\\n  --data a b \\\n  --fast > log.txt 2>&1",
        ["deepspeed", "main.py", "--size", "4", "--rate", "1e-5", "--data", "a", "b", "--fast"],
    ],
)
def test_every_way_of_writing_a_command_gives_the_same_settings(given: str | list[str]):
    assert settings(given) == {"size": "4", "rate": "1e-5", "data": ["a", "b"], "fast": True}


def test_options_before_the_program_are_the_launchers():
    line = read_command_line("deepspeed --num_gpus 8 --hostfile=h main.py --size 1", KINDS)
    assert line == CommandLine(settings={"size": "1"}, launcher={"num_gpus": "8", "hostfile": "h"})


@pytest.mark.parametrize("before", ["", "cd a/b && ", "mkdir -p out; cd a/b; ", "cd a/b&&", "cat list | "])
@pytest.mark.parametrize(
    "after", ["", " && echo done", "; ls --all", " | tee log", " &", " > 'my log' 2>&1", " 2> log"]
)
def test_other_commands_of_the_line_are_left_out(before: str, after: str):
    line = read_command_line(f"{before}deepspeed --num_gpus 8 main.py --rate 1e-6 --size 3{after}", KINDS)
    assert line == CommandLine(settings={"rate": "1e-6", "size": "3"}, launcher={"num_gpus": "8"})


@pytest.mark.parametrize(
    "given",
    [
        "(cd x; deepspeed main.py --size 4 --rate 1)",
        "( cd x && deepspeed main.py --size 4 --rate 1 ) > log 2>&1",
        "((deepspeed main.py --size 4 --rate 1) | tee log)",
        "cd $(dirname $0); (deepspeed main.py --size 4 --rate 1)&& echo (done)",
        "deepspeed main.py --size 4 --rate 1)",  # opened on a line before
    ],
)
def test_parentheses_around_commands_belong_to_no_value(given: str):
    assert read_command_line(given, KINDS).settings == {"size": "4", "rate": "1"}


def test_parentheses_within_a_word_and_quoted_ones_stay():
    given = "(main.py --data $(pwd)/a $((1+(2))) '(b)' \"c)\" d\\)e --size '4)')"
    assert settings(given) == {"data": ["$(pwd)/a", "$((1+(2)))", "(b)", "c)", "d)e"], "size": "4)"}


def test_what_is_quoted_ends_no_value():
    assert settings("main.py --size 'a;b' --rate \"c && d\" --fast") == {"size": "a;b", "rate": "c && d", "fast": True}


@pytest.mark.parametrize("command", ["deepspeed main.py --size 3", "--size 3"])
def test_lines_of_comment_are_no_commands(command: str):
    assert settings(f"#!/bin/bash\n  # options of main.py\n{command}") == {"size": "3"}


def test_no_arguments_are_none():
    assert settings([]) == settings("python main.py") == {}


def test_an_unknown_option_takes_the_words_up_to_the_next_one():
    assert settings("--odd a b --size 1 --odder --oddest=3") == {
        "odd": ["a", "b"],
        "size": "1",
        "odder": True,
        "oddest": "3",
    }


def test_a_negative_number_is_a_value():
    assert settings("--size -1 --rate -.5") == {"size": "-1", "rate": "-.5"}


def test_the_last_of_two_equal_options_counts():
    assert settings("--size 1 --size 2") == {"size": "2"}


def test_words_that_belong_to_no_option_are_kept_apart():
    assert read_command_line("main.py stray --fast more --size 1 again", KINDS).stray == ["stray", "more", "again"]


def test_variables_of_a_script_are_filled_in_where_it_sets_them():
    script = """
    # a comment with main.py in it, and with $A
    A=$1
    B=two
    if [ "$B" == "" ]; then
        B=three   # indented, and the last that is set
    fi
    export C="$B/four"
    deepspeed main.py --size $A --rate ${B} --data $C x$C $5
    """
    assert settings(script) == {"size": "$A", "rate": "three", "data": ["three/four", "xthree/four", "$5"]}


@pytest.mark.parametrize(
    ("given", "expected"),
    [
        ("--fast=1", "--fast=1: it takes no value; write --fast."),
        ("--size", "--size has no value: write --size VALUE."),
        ("--size --fast", "--size has no value: write --size VALUE."),
        ("--size 'open", "the command cannot be read: no closing quotation. Close every quotation mark."),
        (
            "cd here\nls",
            "the text holds 0 commands with main.py; exactly one step-3 command is expected. Give it alone, as one "
            "line or with each line but the last ending in a backslash.",
        ),
        (
            "python main.py --size 1\npython main.py --size 2",
            "the text holds 2 commands with main.py; exactly one step-3 command is expected. Give it alone, as one "
            "line or with each line but the last ending in a backslash.",
        ),
        (
            "test -f main.py && python main.py --size 1",
            "the text holds 2 commands with main.py; exactly one step-3 command is expected. Give it alone, as one "
            "line or with each line but the last ending in a backslash.",
        ),
        (
            "/home/me/My Project/run.sh",
            "/home/me/My Project/run.sh: neither main.py nor an option is in it. Give a step-3 command, or a file that "
            "exists and holds one.",
        ),
        (
            "/home/me/My Project (old)/run.sh",
            "/home/me/My Project (old)/run.sh: neither main.py nor an option is in it. Give a step-3 command, or a "
            "file that exists and holds one.",
        ),
        (
            "(python main.py --size 1) && python main.py --size 2",
            "the text holds 2 commands with main.py; exactly one step-3 command is expected. Give it alone, as one "
            "line or with each line but the last ending in a backslash.",
        ),
        (
            ["/home/me/My", "Project/run.sh"],
            "/home/me/My Project/run.sh: neither main.py nor an option is in it. Give a step-3 command, or a file that "
            "exists and holds one.",
        ),
    ],
)
def test_what_cannot_be_read_is_refused_in_plain_words(given: str | list[str], expected: str):
    with pytest.raises(ConfigError) as caught:
        settings(given)
    assert str(caught.value) == expected
