"""What happens to checkpoints on a disk that is full or read-only; run by test_store_on_bad_disks.py.

unshare --map-root-user --mount python -m tests.checkpoints.on_a_bad_disk full|small|read_only FOLDER
"""

from __future__ import annotations

import shutil
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

from ppo_rlhf.checkpoints.files import newest_whole_checkpoint
from ppo_rlhf.checkpoints.store import write_checkpoint
from ppo_rlhf.core.errors import CheckpointError
from ppo_rlhf.ppo.state import TrainingState
from tests.ppo_runs import build_run


def main(kind: str, folder: Path) -> None:
    """Save one checkpoint, spoil the disk, try to save a second one, and print what is left."""
    subprocess.run(["mount", "-t", "tmpfs", "-o", "size=4m", "none", str(folder)], check=True)
    run_directory, run = folder / "run", build_run()
    run.iteration()
    if kind == "small":  # 4 MB where 17 are expected to be needed
        print(refusal(run_directory, run.state))
        print(sorted(path.name for path in folder.iterdir()))
        return
    shutil.disk_usage = lambda place: SimpleNamespace(free=10**12)  # as if another process took the space meanwhile
    write_checkpoint(run_directory, run.state)
    run.iteration()
    if kind == "full":
        with (folder / "filler").open("wb", buffering=0) as filler:
            try:
                while filler.write(bytes(4096)):
                    pass
            except OSError:
                filler.truncate(filler.tell() - 16384)
    else:
        subprocess.run(["mount", "-o", "remount,ro", str(folder)], check=True)
    print(refusal(run_directory, run.state))
    print(sorted(path.name for path in run_directory.iterdir()))
    print(newest_whole_checkpoint(run_directory))


def refusal(run_directory: Path, state: TrainingState) -> str:
    """Return why the state cannot be saved."""
    try:
        return f"saved as {write_checkpoint(run_directory, state)}"
    except CheckpointError as error:
        return str(error)


if __name__ == "__main__":
    main(sys.argv[1], Path(sys.argv[2]))
