"""What libraries import no sooner than with the first model or optimiser: it counts among the imports, on both sides.

A worker reports its memory above them. TRL's import loads nearly all of it; this project's does not, to start fast.
"""

import importlib
import importlib.util

LATE = (
    "torch._dynamo",  # by AdamW
    "transformers.generation.utils",
    "transformers.models.gpt2.modeling_gpt2",
    "transformers.models.llama.modeling_llama",
    "transformers.optimization",
)


def import_late() -> None:
    """Import them all now."""
    for name in LATE:
        importlib.import_module(name)
    if importlib.util.find_spec("peft"):  # where it is installed, transformers imports it with every model
        importlib.import_module("peft")
