"""`ppo_rlhf init`, the project that it writes, and the package outside of a project."""

from __future__ import annotations

import json
import os
import re
import shutil
import subprocess
import sys
import sysconfig
import tomllib
from collections.abc import Callable
from pathlib import Path

import pytest
import yaml
from click.testing import CliRunner, Result
from kedro.config import OmegaConfigLoader

from ppo_rlhf import __main__
from ppo_rlhf.cli import cli
from ppo_rlhf.runtime.paths import DOCS
from ppo_rlhf.settings import CONFIG_LOADER_ARGS
from tests.conftest import REPOSITORY
from tests.tiny_models import draw_weights, save, tiny_model

Kedro = Callable[..., Result]
SMALL = "ppo.total_episodes=8,ppo.per_device_train_batch_size=4,ppo.response_length=8,evaluation.iteration_prompts=4"
OWN_NODE = """
def publish(summary: dict) -> dict:
    return {"better": summary["eval/win_rate"] > 0.5}
"""
ANNOUNCEMENT = "announcement: {type: json.JSONDataset, filepath: data/08_reporting/announcement.json}\n"


def files_of(folder: Path) -> list[str]:
    return sorted(path.relative_to(folder).as_posix() for path in folder.rglob("*") if path.is_file())


SHIPPED = [path for path in files_of(REPOSITORY / "conf") if path.startswith(("base/", "accelerate", "logging.yml"))]
"""The files of this repository's conf that every new project gets."""


def settings(project: Path) -> OmegaConfigLoader:
    return OmegaConfigLoader(str(project / "conf"), **CONFIG_LOADER_ARGS)


def init(*arguments: str | Path) -> Result:
    return CliRunner().invoke(cli, ["init", *map(str, arguments)])


def inputs(folder: Path) -> tuple[Path, Path]:
    """A tiny SFT model, and prompts for it."""
    model = save(folder / "models", tiny_model())
    prompts = folder / "prompts.jsonl"
    prompts.write_text("".join(json.dumps({"prompt": "a b " * count}) + "\n" for count in range(1, 9)))
    return model, prompts


def add_own_node(project: Path) -> None:
    """Add a node where the project's registry suggests it, by the line that is a comment there."""
    registry = next(project.glob("src/*/pipeline_registry.py"))
    text = registry.read_text().replace("import Pipeline", "import Node, Pipeline")
    uncommented = text.replace("    # pipelines[", "    pipelines[")
    assert uncommented != text
    registry.write_text(uncommented + OWN_NODE)
    (project / "conf/base/catalog_own.yml").write_text(ANNOUNCEMENT)


def test_a_name_that_yaml_reads_as_no_text_is_the_experiments_name(tmp_path: Path) -> None:
    assert init(tmp_path / "null").exit_code == 0
    assert yaml.safe_load((tmp_path / "null/conf/base/globals.yml").read_text())["experiment"] == "null"


def test_a_project_gets_real_copies_of_the_settings_that_stand_once_here(tmp_path: Path) -> None:
    """In the package conf/base is a link to this project's own."""
    assert init(tmp_path / "copied").exit_code == 0
    shipped = {path.relative_to(REPOSITORY) for path in (REPOSITORY / "conf/base").iterdir()}
    for path in shipped | {Path("conf/logging.yml"), Path("conf/accelerate.yaml"), Path("conf/accelerate/fsdp2.yaml")}:
        copy = tmp_path / "copied" / path
        assert copy.is_file(), path
        assert not any(each.is_symlink() for each in (copy, *copy.parents)), path
        assert path.name == "globals.yml" or copy.read_bytes() == (REPOSITORY / path).read_bytes(), path


def test_a_project_holds_the_names_that_were_given_and_nothing_of_the_demo(tmp_path: Path) -> None:
    model, prompts = inputs(tmp_path)
    project = tmp_path / "My-First"
    result = init(project, "--model", model, "--reward", "org/reward-model", "--prompts", prompts)
    assert result.exit_code == 0, result.output
    names = yaml.safe_load((project / "conf/base/globals.yml").read_text())
    given = {"sft_model_path": str(model), "prompts_path": str(prompts), "reward_model_path": "org/reward-model"}
    shipped = (REPOSITORY / "conf/base/globals.yml").read_text()
    assert names == yaml.safe_load(shipped) | given | {"experiment": "my_first"}
    filled_in = (project / "conf/base/globals.yml").read_text()
    comments = [[line.partition(" # ")[2] for line in text.splitlines()] for text in (filled_in, shipped)]
    assert comments[0] == comments[1]
    assert "org/reward-model (not here: a name on the hub" in result.output
    assert settings(project)["parameters"]["reward"] == {"components": [{"type": "model"}]}
    assert settings(project)["mlflow"]["tracking"]["experiment"]["name"] == "my_first"
    written = [path for path in project.rglob("*") if path.is_file()]
    assert not [path for path in written if path.is_symlink()]
    for path in written:
        assert not re.search(r"\bdemo\b|movie|PROJECT_NAME|REQUIREMENT|KEDRO_VERSION", path.read_text()), path
    described = tomllib.loads((project / "pyproject.toml").read_text())
    assert described["tool"]["kedro"]["package_name"] == "my_first"
    assert (project / ".gitignore").is_file()
    assert (project / "src/my_first/rewards.py").is_file()


def test_prompts_whose_name_looks_like_a_pattern_are_found(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    Path("prompts[v2].jsonl").write_text('{"prompt": "a"}')
    assert init("new", "--prompts", "prompts[v2].jsonl").exit_code == 0
    named = yaml.safe_load(Path("new/conf/base/globals.yml").read_text())
    assert named["prompts_path"] == str(tmp_path / "prompts[v2].jsonl")


@pytest.mark.parametrize("options", [[], ["--model", "", "--reward", "", "--prompts", ""]])
def test_what_is_left_out_is_left_open_and_said(tmp_path: Path, options: list[str]) -> None:
    result = init(tmp_path / "later", *options)
    assert result.exit_code == 0, result.output
    for setting in ("sft_model_path", "prompts_path"):
        assert re.search(rf"{setting}: .* {tmp_path}/later/conf/base/globals\.yml", result.output)
    components = settings(tmp_path / "later")["parameters"]["reward"]["components"]
    assert components == [{"type": "function", "function": "later.rewards:score"}]


@pytest.mark.slow
def test_in_a_project_whose_reward_is_a_function_the_feedback_page_ends_with_a_policy_of_peoples_answers(
    tmp_path: Path, kedro: Kedro, kedro_logging: None, no_mlflow_left_over: None, migrated_database: Path
) -> None:
    model = save(tmp_path / "models", draw_weights(tiny_model(), 0.5))
    prompts, project = tmp_path / "prompts.jsonl", tmp_path / "own"
    prompts.write_text("".join(json.dumps({"prompt": f"{a} {b}"}) + "\n" for a in "abcdefg" for b in "hijklm"))
    assert init(project, "--model", model, "--prompts", prompts).exit_code == 0
    shutil.copy(migrated_database, project / "mlflow.db")
    small = "ppo.response_length=8,reward_modelling.minimum_accuracy=0,evaluation.iteration_prompts=4"
    small += ",ppo.total_episodes=8,ppo.per_device_train_batch_size=4"
    asked = "feedback.pairs=16,ppo.response_length=8,feedback.export=pairs.jsonl"
    collected = kedro(project, "run", "--pipelines", "collect_feedback", "--params", asked)
    assert collected.exit_code == 0, collected.output
    pairs = [json.loads(line) for line in (project / "pairs.jsonl").read_text().splitlines()]
    rows = [f"{pair['number']},{'BA'[len(pair['response_a']) > len(pair['response_b'])]}" for pair in pairs]
    (project / "answers.csv").write_text("\n".join(["number,answer", *rows]))
    reads = f"preferences_path=answers.csv,{small}"
    refused = kedro(project, "run", "--pipelines", "reward_modelling,align", "--params", reads)
    assert refused.exit_code == 1
    assert "reward_components=[{type: model}]" in refused.stderr
    by_model = "reward_components=[{type: model}]"
    trained = kedro(project, "run", "--pipelines", "reward_modelling,align", "--params", f"{reads},{by_model}")
    assert trained.exit_code == 0, trained.output
    for pipeline in ("evaluation", "reporting"):
        result = kedro(project, "run", "--pipelines", pipeline, "--params", by_model)
        assert result.exit_code == 0, result.output


@pytest.mark.parametrize(
    ("folder", "options", "reason"),
    [
        ("full", [], "full is not empty"),
        ("full/file", [], "full/file .*File exists"),
        ("3rd", [], "'3rd' cannot"),
        ("größe", [], "'größe' cannot"),
        ("_mine", [], "'_mine' cannot"),
        ("Torch", [], "torch exists"),
        ("new", ["--reward", "my-rewards:score"], "--reward my-rewards:score: .*module:name"),
        ("new", ["--reward", "rewards.py"], r"--reward rewards\.py: .*module:name"),
        ("new", ["--model", "./nowhere"], r"--model \./nowhere: .*leave --model out"),
        ("new", ["--modle", "a"], "'--modle'"),
    ],
)
def test_what_cannot_be_written_is_refused_in_one_line(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, folder: str, options: list[str], reason: str
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "full").mkdir()
    (tmp_path / "full/file").write_text("mine")
    result = init(folder, *options)
    assert result.exit_code != 0
    (line,) = (line for line in result.stderr.splitlines() if line.startswith("Error:"))
    assert re.search(reason, line)
    assert [path.name for path in tmp_path.rglob("*")] == ["full", "file"]
    assert (tmp_path / "full/file").read_text() == "mine"


def test_an_empty_folder_is_taken_and_a_function_named_as_reward(tmp_path: Path) -> None:
    (tmp_path / "get ready").mkdir()
    result = init(tmp_path / "get ready", "--reward", "my.rewards:polite")
    assert result.exit_code == 0
    assert f"Next: cd '{tmp_path}/get ready', kedro doctor" in result.output  # as a shell takes it
    components = settings(tmp_path / "get ready")["parameters"]["reward"]["components"]
    assert components == [{"type": "function", "function": "my.rewards:polite"}]


@pytest.mark.parametrize(
    ("reward", "is_said"), [("of_mine.scores:f", True), ("json:loads", False), ("new.rewards:f", False)]
)
def test_a_reward_in_a_module_that_the_project_lacks_is_said_to_be_not_copied(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, reward: str, is_said: bool
) -> None:
    """The module lies in the working directory, from which `python -m` and pytest would import it."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(str(tmp_path))
    (tmp_path / "of_mine").mkdir()
    (tmp_path / "of_mine/scores.py").write_text("def f(completions):\n    return [0.0 for _ in completions]\n")
    result = init("new", "--reward", reward)
    assert result.exit_code == 0
    line = "of_mine/scores.py: not copied; put the module of the reward into new or new/src"
    assert (line in result.output.splitlines()) == is_said
    assert ("not copied" in result.output) == is_said


def test_of_conf_a_project_has_our_files_and_only_the_globals_are_its_own(tmp_path: Path) -> None:
    model, prompts = inputs(tmp_path)
    init(tmp_path / "alike", "--model", model, "--prompts", prompts, "--reward", "mine:score")
    ours, theirs = REPOSITORY / "conf", tmp_path / "alike/conf"
    assert {*files_of(theirs)} == {*SHIPPED, "local/.gitkeep"}
    assert [path for path in SHIPPED if (ours / path).read_bytes() != (theirs / path).read_bytes()] == [
        "base/globals.yml"
    ]


def test_a_project_runs_with_a_node_of_its_own_and_tells_a_misspelt_name(
    tmp_path: Path, kedro: Kedro, kedro_logging: None, no_mlflow_left_over: None, migrated_database: Path
) -> None:
    model, prompts = inputs(tmp_path)
    project = tmp_path / "own_node"
    assert init(project, "--model", model, "--prompts", prompts).exit_code == 0
    shutil.copy(migrated_database, project / "mlflow.db")
    add_own_node(project)
    (project / "conf/base/globals.yml").open("a").write("promts_path: a\n")
    result = kedro(project, "run", "--params", SMALL)
    assert result.exit_code == 1
    assert "Error: conf/base: promts_path (globals): nothing reads this name. Did you mean `prompts_path`?" in (
        result.stderr
    )
    text = (project / "conf/base/globals.yml").read_text().removesuffix("promts_path: a\n")
    (project / "conf/base/globals.yml").write_text(text)
    result = kedro(project, "run", "--params", SMALL)
    assert result.exit_code == 0, result.output
    assert json.loads((project / "data/08_reporting/announcement.json").read_text()).keys() == {"better"}
    assert (project / "data/08_reporting/report.html").is_file()


@pytest.mark.parametrize(
    ("given", "expected"),
    [
        (["--env", "test"], ["run", "--env", "test"]),
        ([], ["run"]),
        (["run", "--env", "test"], ["run", "--env", "test"]),
        (["--help"], ["--help"]),
        (["doctor"], ["doctor"]),
    ],
)
def test_main_takes_the_words_that_kedros_own_template_takes(
    monkeypatch: pytest.MonkeyPatch, given: list[str], expected: list[str]
) -> None:
    seen = []
    monkeypatch.setattr("ppo_rlhf.cli.cli", lambda words, **options: seen.append((words, options["standalone_mode"])))
    __main__.main(given)
    __main__.main(given, standalone_mode=False)
    assert seen == [(expected, True), (expected, False)]


def environment() -> dict[str, str]:
    """`sys.path` as in a project: Python finds only installed packages."""
    return {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}


def install(programs: Path, *wheels: Path) -> None:
    pip = [sys.executable, "-m", "pip", "--python", programs / "python", "install", "--quiet", "--no-deps", *wheels]
    subprocess.run(pip, check=True, env=environment())


def fresh_environment(folder: Path) -> Path:
    """A virtual environment with this package's wheel and with the tests' versions of its dependencies."""
    source = folder / "source"  # build from a copy, because setuptools would reuse files of an earlier build
    for name in ("src", "conf", "docs"):
        shutil.copytree(REPOSITORY / name, source / name, symlinks=True)
    for name in ("pyproject.toml", "README.md", "LICENSE"):
        shutil.copy(REPOSITORY / name, source / name)
    build = [sys.executable, "-m", "pip", "wheel", "--quiet", "--no-deps", "--wheel-dir", folder / "dist", source]
    subprocess.run(build, check=True)
    subprocess.run([sys.executable, "-m", "venv", "--without-pip", folder / "venv"], check=True)
    (packages,) = folder.glob("venv/lib/python*/site-packages")
    (wheel,) = (folder / "dist").glob("*.whl")
    install(folder / "venv/bin", wheel)
    (packages / "dependencies.pth").write_text(sysconfig.get_path("purelib"))  # after the wheel's own place
    return folder / "venv/bin"


@pytest.mark.slow
def test_the_wheel_makes_a_project_that_runs_resumes_and_is_drawn(tmp_path: Path) -> None:
    programs, (model, prompts) = fresh_environment(tmp_path), inputs(tmp_path)

    def call(folder: Path, *words: str | Path, code: int = 0) -> str:
        done = subprocess.run(
            [programs / words[0], *words[1:]], cwd=folder, env=environment(), capture_output=True, text=True
        )
        assert done.returncode == code, done.stdout + done.stderr
        return done.stdout + done.stderr

    where = call(tmp_path, "python", "-c", "import ppo_rlhf; print(ppo_rlhf.__file__)")
    assert where.startswith(str(tmp_path / "venv"))
    said = call(tmp_path, "ppo_rlhf", "init", "from-wheel", "--model", model, "--prompts", prompts)
    (pages,) = re.findall(r"Pages named docs/… .* are in (.*)", said)
    assert pages.startswith(str(tmp_path / "venv"))
    assert Path(pages, "your_model.md").is_file()
    project = tmp_path / "from-wheel"
    add_own_node(project)
    kedro = ("python", "-m", "kedro")
    assert "- align" in call(project, *kedro, "registry", "list")
    found = call(project, *kedro, "doctor", "--params", SMALL)
    assert "No problem found." in found
    assert "--pipelines align" not in found, "plain `kedro run` starts from the user's model here"
    registry = project / "src/from_wheel/pipeline_registry.py"
    whole = registry.read_text()
    registry.write_text(whole.replace("    return {", "    raise RuntimeError('not yet')\n    return {"))
    assert "not yet" in call(project, *kedro, "run", "--params", SMALL, code=1)
    registry.write_text(whole)
    log = call(project, *kedro, "run", "--params", f"{SMALL},resume=latest")
    assert "Training is already complete (2 of 2 iterations)." in log
    assert (project / "data/08_reporting/announcement.json").is_file()
    call(project, *kedro, "viz", "build")
    assert (project / "build/index.html").is_file()

    call(project, *kedro, "package")
    install(programs, *(project / "dist").glob("*.whl"))
    packaged = tmp_path / "packaged"
    packaged.mkdir()
    shutil.unpack_archive(project / "dist/conf-from_wheel.tar.gz", packaged)
    call(packaged, "from_wheel", "--conf-source", "conf", "--params", SMALL)
    assert (packaged / "data/08_reporting/announcement.json").is_file()

    plain = tmp_path / "plain"  # no project: options without `run`, conf from elsewhere, a list for main
    shutil.copytree(REPOSITORY / "data/01_raw", plain / "data/01_raw")
    shutil.copytree(REPOSITORY / "conf", tmp_path / "conf", ignore=shutil.ignore_patterns("local"))
    words = ["--conf-source", str(tmp_path / "conf"), "--env", "test", "--pipelines", "data_preparation"]
    call(plain, "python", "-m", "ppo_rlhf", *words)
    first = sorted((plain / "data/test/03_primary").rglob("*.parquet"))
    assert first
    call(plain, "python", "-c", f"from ppo_rlhf.__main__ import main; main({words})")
    assert sorted((plain / "data/test/03_primary").rglob("*.parquet")) >= first


def test_each_page_that_a_message_or_a_project_names_is_in_the_wheel() -> None:
    patterns = tomllib.loads((REPOSITORY / "pyproject.toml").read_text())["tool"]["setuptools"]["package-data"]
    package = DOCS.parent
    packaged = {str(page.relative_to(package)) for each in patterns["ppo_rlhf"] for page in package.glob(each)}
    files = [path for path in package.rglob("*") if path.suffix in (".py", ".md", ".yml", ".toml")]
    files += (REPOSITORY / "conf/base").iterdir()
    named = {name for path in files for name in re.findall(r"(?<![\w/.])docs/[\w/]+\.md", path.read_text())}
    assert len(named) > 10
    assert named <= packaged
    for page in DOCS.glob("*.md"):
        links = re.findall(r"\]\(((?:decisions/)?[\w-]+\.md)", page.read_text())
        assert {f"docs/{link}" for link in links} <= packaged, page


@pytest.mark.slow
def test_kedros_server_may_be_asked_for_our_runner_in_an_own_project(tmp_path: Path, kedro: Kedro) -> None:
    from kedro.framework.project import configure_project
    from kedro.server.http_server import _validate_runner_module

    assert init(tmp_path / "asked").exit_code == 0
    assert kedro(tmp_path / "asked", "registry", "list").exit_code == 0  # makes it the project of this process
    try:
        assert _validate_runner_module("ppo_rlhf.runner.LoopRunner", "asked")
        assert not _validate_runner_module("os.path.join", "asked")
    finally:
        configure_project("ppo_rlhf")
