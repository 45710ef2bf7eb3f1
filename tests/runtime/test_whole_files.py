"""A file or a folder is complete or does not exist."""

import os
import stat
import subprocess
import sys
from pathlib import Path

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


WRITER = """
import os, sys
os.getpid = lambda: 1
from pathlib import Path
from ppo_rlhf.runtime.whole_files import written_whole
target = Path(sys.argv[1])
with written_whole(target) as draft:
    draft.mkdir()
    (draft / "weights").write_text(sys.argv[2])
    (draft.parent / "draft-journal").touch()
    print(draft.parent.name, flush=True)
    sys.stdin.readline()
"""


def writing(target: Path, text: str) -> tuple[subprocess.Popen, str]:
    """Start a process that writes a folder, and ends when it reads a line; return it and the name of its draft."""
    command = [sys.executable, "-c", WRITER, str(target), text]
    writer = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
    return writer, writer.stdout.readline().strip()


def test_two_writers_of_one_process_id_and_host_name_share_no_draft(tmp_path):
    (one, draft_of_one), (two, draft_of_two) = (writing(tmp_path / "policy", text) for text in ("one", "two"))
    assert draft_of_one != draft_of_two
    one.communicate("\n")
    assert [path.name for path in (tmp_path / "policy").iterdir()] == ["weights"]
    two.communicate("\n")
    assert (one.returncode, two.returncode) == (0, 1)  # a folder is not replaced
    assert (tmp_path / "policy" / "weights").read_text() == "one"
    assert [path.name for path in tmp_path.iterdir()] == ["policy"]


def test_a_draft_is_deleted_at_once_when_its_writer_was_killed_and_never_before(tmp_path):
    writer, name = writing(tmp_path / "policy", "half")
    os.utime(tmp_path / name, (0, 0))  # a writer may take days, and a clock may jump
    with written_whole(tmp_path / "file") as draft:
        draft.write_text("new")
    assert (tmp_path / name / "draft" / "weights").read_text() == "half"
    writer.kill()
    writer.communicate()
    (tmp_path / ".empty.0123456789abcdef.draft").mkdir()  # its writer was killed before it had made the lock
    (tmp_path / ".mine.draft").mkdir()  # the user's
    with written_whole(tmp_path / "file") as draft:
        draft.write_text("newer")
    assert sorted(path.name for path in tmp_path.iterdir()) == [".mine.draft", "file"]
    assert (tmp_path / "file").read_text() == "newer"


def test_where_nothing_can_be_locked_files_are_written_and_no_draft_of_another_is_deleted(tmp_path, monkeypatch):
    def refuse(file, operation):
        raise OSError(37, "No locks available")

    writer, name = writing(tmp_path / "policy", "half")
    writer.kill()
    writer.communicate()
    monkeypatch.setattr("ppo_rlhf.runtime.locks.fcntl.flock", refuse)
    with written_whole(tmp_path / "file") as draft:
        draft.write_text("new")
    assert sorted(path.name for path in tmp_path.iterdir()) == [name, "file"]


def test_a_new_draft_that_another_process_deletes_before_it_is_locked_is_made_again(tmp_path, monkeypatch):
    """Another process may find the folder before its lock, the lock before it is taken, or hold the lock just then."""
    taken, taking = [], whole_files.take_lock
    names = iter(["0" * 16, "1" * 16, "2" * 16, "3" * 16])
    monkeypatch.setattr(whole_files.secrets, "token_hex", lambda _: next(names))
    opened = Path.open

    def delete_first(path, *arguments, **options):
        if "0" * 16 in path.parent.name:
            path.parent.rmdir()
        return opened(path, *arguments, **options)

    def delete_then_take(file):
        taken.append(Path(file.name).parent.name)
        if "1" * 16 in taken[-1]:
            whole_files.shutil.rmtree(Path(file.name).parent)
        return False if "2" * 16 in taken[-1] else taking(file)

    monkeypatch.setattr(Path, "open", delete_first)
    monkeypatch.setattr(whole_files, "take_lock", delete_then_take)
    with written_whole(tmp_path / "file") as draft:
        draft.write_text("new")
    assert taken == [f".file.{digit * 16}.draft" for digit in "123"]
    assert (tmp_path / "file").read_text() == "new"
