"""PPO-RLHF of language models as a Kedro pipeline."""

import os

__version__ = "0.1.0"

# Read by OpenMP as torch is loaded, so it stands here: docs/decisions/0010-openmp-threads-spin-briefly.md
os.environ.setdefault("GOMP_SPINCOUNT", "3000")

# Read by torch with the first product on CUDA, whoever computes it: cuBLAS repeats its sums (ppo.deterministic) only
# with a workspace of fixed size. These are the 32 MiB that torch takes on newer devices by itself.
os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")

# Read by torch and oneDNN with the first product on a CPU that oneDNN computes. They keep compiled code for each shape,
# up to 1024 of them each: with responses of many lengths that was 170 MiB, scattered over the heap. Torch's own are
# needless, and a step of a large model needs few: docs/decisions/0017-few-compiled-shapes.md
os.environ.setdefault("LRU_CACHE_CAPACITY", "1")
os.environ.setdefault("ONEDNN_PRIMITIVE_CACHE_CAPACITY", "32")
