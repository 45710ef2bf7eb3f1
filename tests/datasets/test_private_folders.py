import errno
import fcntl
import multiprocessing
import os
import time
from pathlib import Path
from typing import Any

import pytest

from ppo_rlhf.datasets.private_folders import private_folder, put

FORK = multiprocessing.get_context("fork")  # spares each process the seconds of importing


def hold_a_folder(parent: Path, ready: Any) -> None:
    with private_folder(parent) as folder:
        (folder / "half").write_text("of it")
        ready.set()
        time.sleep(60)


def make_folders(parent: Path, begin: Any) -> None:
    begin.wait()
    for number in range(150):
        with private_folder(parent) as folder:
            (folder / "file").write_text(str(number))
            assert (folder / "file").read_text() == str(number)


def test_a_folder_of_a_process_that_lives_stays_and_one_of_a_killed_process_goes(tmp_path):
    ready = FORK.Event()
    process = FORK.Process(target=hold_a_folder, args=(tmp_path, ready))
    process.start()
    assert ready.wait(30)
    with private_folder(tmp_path):
        (theirs,) = [folder for folder in tmp_path.iterdir() if (folder / "half").exists()]
    assert (theirs / "half").read_text() == "of it"
    process.kill()
    process.join()
    assert theirs.exists()
    with private_folder(tmp_path) as mine:
        assert list(tmp_path.iterdir()) == [mine]


def test_a_second_folder_of_the_same_process_leaves_the_first_alone(tmp_path):
    with private_folder(tmp_path) as first, private_folder(tmp_path) as second:
        assert {first, second} == set(tmp_path.iterdir())
    assert list(tmp_path.iterdir()) == []


def test_a_folder_without_a_lock_is_a_leftover(tmp_path):
    (tmp_path / ".unfinished-1" / "model").mkdir(parents=True)
    (tmp_path / "kept").mkdir()
    with private_folder(tmp_path) as mine:
        assert {mine, tmp_path / "kept"} == set(tmp_path.iterdir())


@pytest.mark.parametrize("end", [OSError, KeyboardInterrupt])
def test_a_block_that_fails_leaves_nothing(tmp_path, end):
    def fail() -> None:
        with private_folder(tmp_path / "a" / "b") as folder:
            (folder / "file").touch()
            raise end

    with pytest.raises(end):
        fail()
    assert list((tmp_path / "a" / "b").iterdir()) == []


def test_where_no_locks_can_be_had_folders_are_made_and_never_swept(tmp_path, monkeypatch):
    def refuse(descriptor: int, operation: int) -> None:
        raise OSError(errno.ENOLCK, "no locks available")

    monkeypatch.setattr(fcntl, "flock", refuse)
    (tmp_path / ".unfinished-1").mkdir()
    with private_folder(tmp_path) as mine:
        assert {mine, tmp_path / ".unfinished-1"} == set(tmp_path.iterdir())


def test_processes_that_sweep_while_others_begin_never_take_a_living_folder(tmp_path):
    """Four processes make, check and leave folders as fast as they can; a swept file would be missed by its owner."""
    begin = FORK.Event()
    processes = [FORK.Process(target=make_folders, args=(tmp_path, begin)) for _ in range(4)]
    for process in processes:
        process.start()
    begin.set()
    for process in processes:
        process.join()
    assert [process.exitcode for process in processes] == [0] * 4
    assert list(tmp_path.iterdir()) == []


def test_what_is_put_replaces_a_file_whole(tmp_path):
    target = tmp_path / "report.html"
    target.write_text("old")
    reader = target.open()
    (tmp_path / "draft").write_text("new")
    put(tmp_path / "draft", target)
    assert reader.read() == "old"
    assert target.read_text() == "new"
    assert [path.name for path in tmp_path.iterdir()] == ["report.html"]


def test_what_is_put_is_on_the_disk_before_it_has_its_name(tmp_path, monkeypatch):
    synced: list[Path] = []
    monkeypatch.setattr(os, "fsync", lambda descriptor: synced.append(Path(os.readlink(f"/proc/self/fd/{descriptor}"))))
    (tmp_path / "draft" / "inner").mkdir(parents=True)
    (tmp_path / "draft" / "inner" / "weights").write_text("x")
    put(tmp_path / "draft", tmp_path / "model")
    draft = tmp_path / "draft"
    assert set(synced[:-1]) == {draft / "inner" / "weights", draft / "inner", draft}
    assert synced[-1] == tmp_path
