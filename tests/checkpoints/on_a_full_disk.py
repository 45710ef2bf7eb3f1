"""A checkpoint on a disk that is full; run by test_store_on_a_full_disk.py.

unshare --map-root-user --mount python -m tests.checkpoints.on_a_full_disk FOLDER
"""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

from ppo_rlhf.checkpoints.files import newest_whole_checkpoint
from ppo_rlhf.checkpoints.store import write_checkpoint
from ppo_rlhf.core.errors import CheckpointError
from tests.ppo_runs import build_run


def main(folder: Path) -> None:
    """Save one checkpoint, fill the disk, try to save a second one, and print the error and the files left."""
    subprocess.run(["mount", "-t", "tmpfs", "-o", "size=4m", "none", str(folder)], check=True)
    run_directory, run = folder / "run", build_run()
    run.iteration()
    write_checkpoint(run_directory, run.state)
    run.iteration()
    with (folder / "filler").open("wb", buffering=0) as filler:
        try:
            while filler.write(bytes(4096)):
                pass
        except OSError:
            filler.truncate(filler.tell() - 16384)
    try:
        print(f"saved as {write_checkpoint(run_directory, run.state)}")
    except CheckpointError as error:
        print(error)
    print(sorted(path.name for path in run_directory.iterdir()))
    print(newest_whole_checkpoint(run_directory))


if __name__ == "__main__":
    main(Path(sys.argv[1]))
