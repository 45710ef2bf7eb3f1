"""PPO-RLHF of language models as a Kedro pipeline."""

import os

__version__ = "0.1.0"

# Read by OpenMP as torch is loaded, so it stands here: docs/decisions/0010-openmp-threads-spin-briefly.md
os.environ.setdefault("GOMP_SPINCOUNT", "1000")
