"""A file or a folder is complete or does not exist."""

import os
import platform
import stat
import subprocess

import pytest

from ppo_rlhf.runtime import whole_files
from ppo_rlhf.runtime.whole_files import written_whole


def test_a_file_is_replaced_and_a_folder_made_with_the_permissions_of_the_umask(tmp_path):
    (tmp_path / "file").write_text("old")
    for name in ("file", "new/folder"):
        with written_whole(tmp_path / name) as draft:
            if name == "file":
                draft.write_text("new")
            else:
                draft.mkdir()
                (draft / "inner").write_text("new")
            assert not (tmp_path / "new/folder").exists()
    assert (tmp_path / "file").read_text() == (tmp_path / "new/folder/inner").read_text() == "new"
    assert sorted(path.name for path in tmp_path.rglob("*")) == ["file", "folder", "inner", "new"]
    mask = os.umask(0)
    os.umask(mask)
    assert stat.S_IMODE((tmp_path / "file").stat().st_mode) == 0o666 & ~mask
    assert stat.S_IMODE((tmp_path / "new/folder").stat().st_mode) == 0o777 & ~mask


@pytest.mark.parametrize("error", [KeyboardInterrupt, OSError])
def test_a_block_that_fails_leaves_what_was_there(tmp_path, error):
    (tmp_path / "file").write_text("old")
    with pytest.raises(error), written_whole(tmp_path / "file") as draft:  # noqa: PT012
        draft.write_text("half")
        raise error
    assert [(path.name, path.read_text()) for path in tmp_path.iterdir()] == [("file", "old")]


def test_it_is_on_the_disk_before_it_has_its_name(tmp_path, monkeypatch):
    def full(descriptor: int) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(os, "fsync", full)
    with pytest.raises(OSError, match="No space left"), written_whole(tmp_path / "file") as draft:
        draft.write_text("new")
    assert list(tmp_path.iterdir()) == []


def test_the_drafts_of_killed_processes_are_deleted_and_those_of_others_stay(tmp_path, monkeypatch):
    (tmp_path / ".model.1.draft").mkdir()
    (tmp_path / ".model.2.draft").mkdir()
    os.utime(tmp_path / ".model.1.draft", (0, 0))
    (tmp_path / ".gone.3.draft").symlink_to("nowhere")  # renamed by another process meanwhile: `stat` fails
    with written_whole(tmp_path / "file") as draft:
        draft.write_text("new")
    assert sorted(path.name for path in tmp_path.iterdir()) == [".gone.3.draft", ".model.2.draft", "file"]
    assert whole_files.ABANDONED_S >= 3600


def test_the_drafts_of_processes_of_this_machine_that_run_no_more_are_deleted_at_once(tmp_path):
    ended = subprocess.Popen(["true"])
    ended.wait()
    here, others = platform.node(), f".file.{platform.node()}-{os.getppid()}.draft"
    for name in (f".old.db.{here}-{ended.pid}.draft", f".old.db.{here}-{ended.pid}.draft-journal", others):
        (tmp_path / name).write_text("half")
    (tmp_path / f".model.{here}-{os.getpid()}.draft").mkdir()  # left by a killed process with the same process id
    (tmp_path / f".model.{here}-{os.getpid()}.draft" / "stale").touch()
    with written_whole(tmp_path / "model") as draft:
        draft.mkdir()
        (draft / "inner").write_text("new")
    assert sorted(path.relative_to(tmp_path).as_posix() for path in tmp_path.rglob("*")) == [
        others,
        "model",
        "model/inner",
    ]
