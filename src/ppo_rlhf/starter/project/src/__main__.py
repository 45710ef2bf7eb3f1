"""`PROJECT_NAME run …` and `python -m PROJECT_NAME run …`, if this project is installed from its wheel."""

from collections.abc import Sequence
from typing import Any

from ppo_rlhf import __main__


def main(args: Sequence[str] | None = None, **options: Any) -> Any:
    """Run a command with the pipelines and settings of this project. Outside its folder, give `--conf-source`."""
    return __main__.main(args, package="PROJECT_NAME", **options)


if __name__ == "__main__":
    main()
