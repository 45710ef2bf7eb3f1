"""metrics.jsonl: a line is there once it is written, damage is found and named, and nothing that was whole is lost."""

from __future__ import annotations

import hashlib
import json
import math
import os
import re
import resource
import signal
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import asdict
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from ppo_rlhf.core.errors import CheckpointError
from ppo_rlhf.runtime import metrics_file
from ppo_rlhf.runtime.metrics_file import (
    EVALUATION,
    ITERATION,
    Mark,
    MetricsFile,
    metrics_of,
    read_lines,
    read_lines_until,
)

Content = list[tuple[str, int, dict[str, Any]]]


def row(iteration: int, **others: Any) -> dict[str, Any]:
    return {"iteration": float(iteration), "objective/scores": iteration / 4, **others}


def written(folder: Path, iterations: int) -> MetricsFile:
    """Return a file that has this many iterations."""
    file = MetricsFile(folder)
    file.catch_up([row(iteration) for iteration in range(1, iterations + 1)])
    return file


def content(path: Path) -> Content:
    return [(line.kind, line.step, line.metrics) for line in read_lines(path)]


def iterations(*numbers: int) -> Content:
    return [(ITERATION, number, row(number)) for number in numbers]


# --- what is written -------------------------------------------------------------------------------------------------


def test_a_line_is_in_the_file_as_soon_as_it_is_appended_with_its_time(tmp_path: Path):
    file = MetricsFile(tmp_path / "run")
    assert content(file.path) == []
    assert not file.path.parent.exists()
    expected: Content = []
    for kind, step in ((ITERATION, 1), (EVALUATION, 1), ("sft", 20)):
        before = time.time()
        file.append(kind, step, row(step))
        expected.append((kind, step, row(step)))
        assert content(file.path) == expected
        *_, line = read_lines(file.path)
        assert int(1000 * before) <= line.time <= 1000 * time.time()
        assert line.end.bytes == file.path.stat().st_size


def test_a_line_is_json_with_the_sha256_of_itself_behind_the_sha256_of_the_line_before(tmp_path: Path):
    path, before = written(tmp_path, 3).path, ""
    for line in path.read_text().splitlines():
        stored = json.loads(line)
        assert list(stored) == ["kind", "step", "time", "metrics", "sha256"]
        body = line.removesuffix(f', "sha256": "{stored["sha256"]}"}}')
        assert stored["sha256"] == hashlib.sha256(f"{before}{body}".encode()).hexdigest()
        before = stored["sha256"]


def test_what_is_no_finite_number_is_read_back_as_it_was_and_so_are_texts_and_lists(tmp_path: Path):
    values = {"a": math.nan, "b": math.inf, "c": -math.inf, "d": 0.1 + 0.2, "judge": 'é", "sha256": "0', "e": [0.5, 1]}
    MetricsFile(tmp_path).append(EVALUATION, 1, values)
    [(_, _, found)] = content(tmp_path / "metrics.jsonl")
    assert math.isnan(found.pop("a"))
    assert found == {name: value for name, value in values.items() if name != "a"}


def test_what_the_history_has_and_the_file_lacks_is_written_once(tmp_path: Path):
    history = [row(iteration) for iteration in range(1, 6)]
    file = written(tmp_path, 2)
    file.append(EVALUATION, 2, row(2))
    for _ in range(2):
        MetricsFile(tmp_path).catch_up(history[:4])
        file.catch_up(history)  # has read what another one wrote meanwhile
    assert content(file.path) == [*iterations(1, 2), (EVALUATION, 2, row(2)), *iterations(3, 4, 5)]


@pytest.mark.parametrize("length", [100, 1000])
def test_one_more_iteration_writes_one_line_however_long_the_run_is(
    tmp_path: Path, length: int, monkeypatch: pytest.MonkeyPatch
):
    history = [row(1)] * (length - 1)
    file = MetricsFile(tmp_path)
    file.catch_up(history)
    before, same, size = file.path.read_bytes(), file.path.stat().st_ino, len(file.path.read_bytes().splitlines()[-1])
    digested: list[str] = []
    digest = metrics_file._digest
    monkeypatch.setattr(metrics_file, "_digest", lambda *given: (digested.append(given[1]), digest(*given))[1])
    file.catch_up([*history, row(1)])
    file.mark()
    assert len(digested) == 1  # no earlier line is read again
    assert file.path.stat().st_ino == same
    assert file.path.read_bytes()[: len(before)] == before
    assert file.path.stat().st_size == len(before) + size + 1


def test_of_two_evaluations_of_one_iteration_the_newer_counts(tmp_path: Path):
    file = MetricsFile(tmp_path)
    for step, value in ((20, 0.25), (10, 0.5), (20, 0.75)):
        file.append(EVALUATION, step, row(step, value=value))
        file.append(ITERATION, step, row(step))
    expected = [row(10, value=0.5), row(20, value=0.75)]
    assert file.evaluations() == MetricsFile(tmp_path).evaluations() == expected


def test_a_folder_has_one_file_in_a_process_however_it_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.chdir(tmp_path)
    assert metrics_of(Path("run")) is metrics_of(tmp_path / "other" / ".." / "run")
    assert metrics_of(Path("run")) is not metrics_of(Path("other"))


def test_the_length_is_given_once_the_file_is_on_the_disk(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    synced: list[int] = []
    sync = os.fsync
    monkeypatch.setattr(metrics_file.os, "fsync", lambda file: (synced.append(os.fstat(file).st_size), sync(file)))
    assert MetricsFile(tmp_path).mark() == Mark()
    assert not synced
    file = written(tmp_path, 3)
    mark = file.mark()
    assert synced == [mark.bytes] == [file.path.stat().st_size]
    assert mark.sha256 == json.loads(file.path.read_bytes().splitlines()[-1])["sha256"]
    assert Mark(**json.loads(json.dumps(asdict(mark)))) == mark


# --- a kill, and a full disk -----------------------------------------------------------------------------------------


def test_a_line_that_a_kill_cut_at_any_byte_is_ignored_and_overwritten(tmp_path: Path):
    file = written(tmp_path, 2)
    whole = file.path.read_bytes()
    two = whole.index(b"\n") + 1
    for length in range(two, len(whole)):
        file.path.write_bytes(whole[:length])
        again = MetricsFile(tmp_path)
        assert content(file.path) == iterations(1)
        assert again.mark().bytes == two
        again.append(ITERATION, 3, row(3))
        assert content(file.path) == iterations(1, 3)


@contextmanager
def room_for(size: int) -> Iterator[None]:
    """Let no file of this process grow beyond `size` bytes: what fits is written, and the rest is refused."""
    before, handler = resource.getrlimit(resource.RLIMIT_FSIZE), signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
    resource.setrlimit(resource.RLIMIT_FSIZE, (size, before[1]))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)
        signal.signal(signal.SIGXFSZ, handler)


@pytest.mark.parametrize("share", [0.0, 0.01, 0.3, 0.6, 0.99])
def test_a_line_that_does_not_fit_leaves_the_file_as_it_was(tmp_path: Path, share: float):
    """The tail of the line that did not fit was written when the file was closed: all that came later was damaged."""
    file = written(tmp_path, 2)
    before = file.path.read_bytes()
    with room_for(len(before) + int(share * len(before) / 2)), pytest.raises(CheckpointError) as refused:
        file.append(ITERATION, 3, row(3))
    assert re.match(
        rf"{re.escape(str(file.path))}: cannot be written: (File too large|No space left)", str(refused.value)
    )
    assert file.path.read_bytes() == before
    file.append(ITERATION, 3, row(3))
    assert content(file.path) == iterations(1, 2, 3)


# --- damage ----------------------------------------------------------------------------------------------------------


def changed(old: bytes, new: bytes) -> Callable[[list[bytes]], list[bytes]]:
    def change(lines: list[bytes]) -> list[bytes]:
        assert lines[1].count(old) == 1
        return [lines[0], lines[1].replace(old, new), *lines[2:]]

    return change


def of_another_run(lines: list[bytes]) -> list[bytes]:
    with tempfile.TemporaryDirectory() as folder:
        other = MetricsFile(Path(folder))
        for number in range(1, 5):
            other.append(ITERATION, number, row(number, another=1.0))
        theirs = other.path.read_bytes().splitlines(keepends=True)
    return [lines[0], theirs[1], *lines[2:]]


DAMAGE: dict[str, Callable[[list[bytes]], list[bytes]]] = {
    "a flipped bit in a number": changed(b'"objective/scores": 0.5', b'"objective/scores": 0.7'),
    "a flipped bit in a name": changed(b"objective/scores", b"objective/scorer"),
    "a flipped bit in the digest": changed(b'"sha256": "', b'"sha256": "0'),
    "another step": changed(b'"step": 2', b'"step": 3'),
    "no digest": changed(b'"sha256"', b'"md5"'),
    "bytes that are no text": changed(b"objective/scores", b"\xff\xfe"),
    "an empty line": lambda lines: [lines[0], b"\n", *lines[1:]],
    "something else": lambda lines: [lines[0], b"[" * 100_000 + b"\n", *lines[2:]],
    "a lost line": lambda lines: [lines[0], *lines[2:]],
    "a line twice": lambda lines: [*lines[:2], *lines[1:]],
    "swapped lines": lambda lines: [lines[0], lines[2], lines[1], lines[3]],
    "the line of another run": of_another_run,
}


@pytest.mark.parametrize("what", DAMAGE)
def test_damage_is_an_error_that_names_the_file_and_the_place_and_leaves_it_as_it_is(tmp_path: Path, what: str):
    file = written(tmp_path, 4)
    mark, lines = file.mark(), file.path.read_bytes().splitlines(keepends=True)
    damaged = b"".join(DAMAGE[what](lines))
    file.path.write_bytes(damaged)
    place = len(lines[0]) + (len(lines[1]) if what == "a line twice" else 0)
    for use in (
        lambda: content(file.path),
        lambda: list(read_lines_until(file.path, mark)),
        lambda: MetricsFile(tmp_path).append(ITERATION, 5, row(5)),
        lambda: MetricsFile(tmp_path).evaluations(),
        lambda: MetricsFile(tmp_path).mark(),
        lambda: MetricsFile(tmp_path).cut(mark),
    ):
        with pytest.raises(CheckpointError, match=rf"^{re.escape(str(file.path))}: damaged behind byte {place} \("):
            use()
    assert file.path.read_bytes() == damaged
    assert [path.name for path in tmp_path.iterdir()] == ["metrics.jsonl"]


def test_a_file_that_lost_lines_while_it_was_in_use_is_damaged(tmp_path: Path):
    file = written(tmp_path, 2)
    os.truncate(file.path, file.path.read_bytes().index(b"\n") + 1)
    for use in (file.mark, file.evaluations, lambda: file.append(ITERATION, 3, row(3))):
        with pytest.raises(CheckpointError, match=rf"^{re.escape(str(file.path))}: damaged; it had "):
            use()


# --- where a run goes on ---------------------------------------------------------------------------------------------


def test_what_is_behind_the_mark_is_set_aside_byte_for_byte_at_each_attempt(tmp_path: Path):
    file = written(tmp_path, 2)
    mark = file.mark()
    for attempt in (1, 2):
        for number in (3, 4)[:attempt]:
            file.append(ITERATION, number, row(number, attempt=attempt))
        file.append(EVALUATION, 3, row(3))
        behind = file.path.read_bytes()[mark.bytes :] + b'{"kind": "iter'
        file.path.open("ab").write(b'{"kind": "iter')  # as a kill leaves it
        file = file if attempt == 1 else MetricsFile(tmp_path)
        file.cut(mark)
        assert (tmp_path / f"metrics.attempt_{attempt:03d}.jsonl").read_bytes() == behind
        assert content(file.path) == iterations(1, 2)
        assert file.evaluations() == []
    file.cut(file.mark())
    file.catch_up([row(number) for number in (1, 2, 3)])
    assert content(file.path) == iterations(1, 2, 3)
    assert sorted(path.name for path in tmp_path.iterdir()) == [
        "metrics.attempt_001.jsonl",
        "metrics.attempt_002.jsonl",
        "metrics.jsonl",
    ]


def test_a_run_without_a_checkpoint_sets_everything_aside(tmp_path: Path):
    MetricsFile(tmp_path).cut(Mark())
    assert not list(tmp_path.iterdir())
    file = written(tmp_path, 2)
    whole = file.path.read_bytes()
    file.cut(Mark())
    assert content(file.path) == []
    assert (tmp_path / "metrics.attempt_001.jsonl").read_bytes() == whole


def test_the_file_of_another_run_or_a_shorter_one_is_refused_and_left_as_it_is(tmp_path: Path):
    file = written(tmp_path / "run", 3)
    file.append(ITERATION, 4, {"a": 0.5})  # no other run has this line, whose time may be that of another run's
    mark = file.mark()
    for name, length in (("other", 5), ("shorter", 2), ("none", 0)):
        file = written(tmp_path / name, length)
        whole = file.path.read_bytes() if length else b""
        for refuse in (lambda path=file.path: list(read_lines_until(path, mark)), lambda cut=file.cut: cut(mark)):
            with pytest.raises(CheckpointError, match=rf"^{re.escape(str(file.path))}: is not the file that the check"):
                refuse()
        assert not length or file.path.read_bytes() == whole
    halfway = Mark(mark.bytes - 10, mark.sha256)
    with pytest.raises(CheckpointError, match="is not the file"):
        written(tmp_path / "run", 3).cut(halfway)


actions = st.one_of(
    st.tuples(st.just("append"), st.sampled_from([ITERATION, EVALUATION, "sft"]), st.integers(0, 9)),
    st.tuples(st.just("killed"), st.just(ITERATION), st.floats(0.0, 1.0, exclude_max=True)),
    st.tuples(st.just("reopen"), st.just(""), st.just(0)),
    st.tuples(st.just("cut"), st.just(""), st.floats(0.0, 1.0)),
)


@settings(max_examples=60, deadline=None, derandomize=True, database=None)
@given(st.lists(actions, max_size=14))
def test_whatever_happens_the_file_has_the_whole_lines_up_to_the_last_cut(done: list[tuple[str, str, Any]]):
    with tempfile.TemporaryDirectory() as folder:
        file, expected, marks, aside = MetricsFile(Path(folder)), [], [Mark()], []
        for action, kind, how in done:
            if action == "append":
                file.append(kind, how, row(how))
                expected.append((kind, how, row(how)))
                marks.append(file.mark())
            elif action == "killed":  # while it wrote a line, of which any part may be there
                before = file.mark().bytes
                file.append(kind, 7, row(7))
                os.truncate(file.path, before + int(how * (file.mark().bytes - before)))
                file = MetricsFile(Path(folder))
            elif action == "reopen":
                file = MetricsFile(Path(folder))
            else:
                until = round(how * len(expected))
                behind = file.path.read_bytes()[marks[until].bytes :] if file.path.is_file() else b""
                aside += [behind] if behind else []
                file.cut(marks[until])
                expected, marks = expected[:until], marks[: until + 1]
            assert content(file.path) == expected
            assert file.mark() == marks[-1]
        evaluated = {step: metrics for kind, step, metrics in expected if kind == EVALUATION}
        assert file.evaluations() == [evaluated[step] for step in sorted(evaluated)]
        kept = sorted(Path(folder).glob("metrics.attempt_*.jsonl"))
        assert [path.read_bytes() for path in kept] == aside
