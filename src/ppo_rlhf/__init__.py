"""PPO-RLHF of language models as a Kedro pipeline."""

import logging
import os

__version__ = "0.1.0"

# With ppo.deterministic=true, cuBLAS needs a workspace of fixed size to be deterministic: this variable sets the size.
# cuBLAS reads the variable at the first matrix product. The value means 32 MiB, torch's own default on newer GPUs.
os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")

# Hide a warning about an optional CPU kernel, which bitsandbytes prints whenever peft imports bitsandbytes.
logging.getLogger("bitsandbytes.backends.cpu.ops").setLevel(logging.ERROR)


def __getattr__(name: str) -> object:
    """Import PPOConfig and PPOTrainer at their first use, because importing torch and transformers takes seconds."""
    if name in ("PPOConfig", "PPOTrainer"):
        from ppo_rlhf import training

        return getattr(training, name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
