"""PPO-RLHF of language models as a Kedro pipeline."""

import logging
import os

__version__ = "0.1.0"

# cuBLAS repeats its sums (ppo.deterministic) only with a workspace of fixed size, and reads this at its first product.
# These are the 32 MiB that torch takes on newer devices by itself.
os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")

# bitsandbytes warns of an optional kernel for CPUs whenever peft imports it, also where nothing has 4 bits.
logging.getLogger("bitsandbytes.backends.cpu.ops").setLevel(logging.ERROR)


def __getattr__(name: str) -> object:
    """Import PPOConfig and PPOTrainer at their first use: torch and transformers take seconds."""
    if name in ("PPOConfig", "PPOTrainer"):
        from ppo_rlhf import training

        return getattr(training, name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
