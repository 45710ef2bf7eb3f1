"""Every command in README and docs is parsed by the real command line, and what they name exists."""

from __future__ import annotations

import contextlib
import re
import shlex
from collections.abc import Iterator, Mapping
from functools import cache
from pathlib import Path
from typing import Any

import click
import pytest
from kedro.config import OmegaConfigLoader
from kedro.framework.cli.cli import KedroCLI
from kedro.framework.project import pipelines
from pydantic import ValidationError

from ppo_rlhf.cli.project import split_params
from ppo_rlhf.config import PPOConfig
from ppo_rlhf.core.errors import ConfigError
from ppo_rlhf.pipeline_registry import register_pipelines
from ppo_rlhf.preflight import memory
from ppo_rlhf.settings import CONFIG_LOADER_ARGS

REPOSITORY = Path(__file__).parents[2]
PAGES = [REPOSITORY / "README.md", REPOSITORY / "CONTRIBUTING.md", *sorted((REPOSITORY / "docs").rglob("*.md"))]
SHELL = ("", "bash")
"""Languages of fenced blocks that hold commands; the others hold code, output and settings."""
PROGRAM = re.compile(r"(?:^|[\s/])(?:kedro|ppo_rlhf) +(?P<arguments>[a-z].*)")
ELSEWHERE = ("airflow",)
"""Commands of plugins that the project does not depend on."""
COMPANIONS: dict[str, dict[str, Any]] = {
    "ppo.kl_in=loss": {"kl_estimator": "k2"},
    "ppo.truncated_responses=replace": {"missing_eos_penalty": 1.0},
}
"""Settings without which a setting that a page defines is refused; its definition names them, too."""
OPEN = "…"
"""The sign that stands for a value, or for the rest of a command."""
CITED = re.compile(r"\b(?P<file>(?:\w+/)*test_\w+\.py)(?:::(?P<test>test_\w+))?")


def code_of(text: str) -> Iterator[str]:
    """Yield the lines of a page's shell blocks, continued ones as one, and its code spans."""
    for language, block in re.findall(r"^ *```(\w*)\n(.*?)^ *```", text, flags=re.M | re.S):
        if language in SHELL:
            yield from block.replace("\\\n", " ").splitlines()
    prose = re.sub(r"^ *```.*?^ *```", "", text, flags=re.M | re.S)
    for span in re.findall(r"(?<!`)`([^`]+)`(?!`)", prose):
        yield " ".join(span.split())


def commands_of(text: str) -> Iterator[list[str]]:
    """Yield the arguments of each command of Kedro or of the project."""
    for line in code_of(text):
        without_comment = re.sub(r"\s#\s.*", "", line)
        for part in re.split(r"&&|[;|]| >", without_comment):
            found = PROGRAM.search(part)
            if found is not None:
                *words, last = shlex.split(found["arguments"])
                has_more = last == OPEN and not words[-1].startswith("-")
                yield words if has_more else [*words, last]


COMMANDS = [(page, arguments) for page in PAGES for arguments in commands_of(page.read_text(encoding="utf-8"))]


@pytest.fixture(scope="module")
def command_line() -> KedroCLI:
    """The command `kedro` as it is in the project's folder."""
    return KedroCLI(REPOSITORY)


def parsed(group: click.Group | click.CommandCollection, arguments: list[str], parent: click.Context) -> click.Context:
    """Parse arguments as the command line does, and run nothing."""
    name, command, rest = group.resolve_command(parent, list(arguments))
    assert command is not None
    if isinstance(command, click.Group) and rest:
        return parsed(command, rest, parent)
    return command.make_context(name, rest, parent=parent)


def test_every_command_in_readme_and_docs_is_one_that_the_command_line_takes(command_line: KedroCLI) -> None:
    refused = {}
    for page, arguments in COMMANDS:
        if arguments[0] in ELSEWHERE:
            continue
        words = f"{page.relative_to(REPOSITORY)}: kedro {shlex.join(arguments)}"
        try:
            options = parsed(command_line, arguments, click.Context(command_line)).params
        except click.MissingParameter:
            continue  # prose may name a command without its arguments
        except click.ClickException as error:
            refused[words] = error.format_message()
            continue
        environment = options.get("env") or "base"
        names = [*(options.get("pipelines") or ()), options.get("pipeline") or "__default__"]
        if unknown := [name for name in names if name not in pipelines]:
            refused[words] = f"no pipeline {unknown}"
        given = options.get("params") or {}
        if unknown := [name for name in given.get("ppo", {}) if name not in PPOConfig.__dataclass_fields__]:
            refused[words] = f"no setting of ppo {unknown}"
        if environment not in (OPEN, "<recipe>") and not (REPOSITORY / "conf" / environment).is_dir():
            refused[words] = f"no environment {environment}"
    assert refused == {}
    assert len({tuple(arguments) for _, arguments in COMMANDS}) > 30, "the pages' commands are not found any more"


@cache
def settings_of(environment: str) -> dict[str, Any]:
    loader = OmegaConfigLoader(str(REPOSITORY / "conf"), env=environment, **CONFIG_LOADER_ARGS)
    settings: dict[str, Any] = loader["parameters"]["ppo"]
    return settings


def typed(environment: str, given: Mapping[str, Any]) -> str:
    """Return why `ppo` with these settings typed on top of an environment's is refused; empty if it is not."""
    try:
        PPOConfig(**{**settings_of(environment), **given})
    except (ConfigError, ValidationError) as error:
        return str(error)
    return ""


def test_the_settings_of_every_command_go_with_those_of_its_environment(command_line: KedroCLI) -> None:
    refused = {}
    for page, arguments in COMMANDS:
        if arguments[0] in ELSEWHERE:
            continue
        with contextlib.suppress(click.ClickException):
            options = parsed(command_line, arguments, click.Context(command_line)).params
            given = (options.get("params") or {}).get("ppo", {})
            environment = options.get("env") or "base"
            if (REPOSITORY / "conf" / environment).is_dir() and (why := typed(environment, given)):
                refused[f"{page.name}: {shlex.join(arguments)}"] = why
    assert refused == {}


def test_every_setting_of_ppo_that_a_page_gives_goes_with_those_of_base() -> None:
    """Settings in code spans, `ppo.value_model=shared`; several settings of a span go together."""
    refused, found = {}, 0
    for page in PAGES:
        for span in code_of(page.read_text(encoding="utf-8")):
            if re.fullmatch(r"(ppo\.\w+=[^=, ]+,?)+", span) and OPEN not in span:
                given, found = split_params(None, None, span)["ppo"], found + 1
                if why := typed("base", given | COMPANIONS.get(span, {})):
                    refused[f"{page.name}: {span}"] = why
    assert refused == {}
    assert found > 20, "the pages' settings are not found any more"


def test_each_change_of_settings_that_the_memory_plan_suggests_goes_with_the_settings_of_base() -> None:
    """The settings of a GPU, so that no step is left out for the device."""
    base = PPOConfig(**{**settings_of("base"), "device": "cuda"})
    seen = {}
    for _, changes in memory._STEPS:
        assert typed("base", {"device": "cuda", **changes(base)}) == ""
        seen |= changes(base)
    assert seen["value_model"] == "shared"


def test_what_the_page_trains_from_own_pairs_reads_the_sft_model_and_the_pairs() -> None:
    page = (REPOSITORY / "docs" / "your_model.md").read_text()
    [names] = re.findall(r"from your pairs.*?--pipelines ([\w,]+)`", page, re.DOTALL)
    registered = register_pipelines()
    inputs = sum((registered[name] for name in names.split(",")), start=registered["align"]).inputs()
    assert {"sft_policy", "raw_preferences", "raw_prompts"} <= inputs
    assert "reward_model" not in inputs


def test_every_test_that_a_page_cites_exists() -> None:
    missing = set()
    for page in PAGES:
        for found in CITED.finditer(page.read_text(encoding="utf-8")):
            file = REPOSITORY / "tests" / found["file"].removeprefix("tests/")
            text = file.read_text() if file.is_file() else ""
            if not re.search(rf"^ *def {found['test'] or 'test_'}", text, flags=re.M):
                missing.add(f"{page.relative_to(REPOSITORY)}: {found[0]}")
    assert missing == set()
