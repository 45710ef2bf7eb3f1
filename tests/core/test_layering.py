"""`core` imports only torch and the standard library."""

import subprocess
import sys


def test_importing_all_of_core_loads_no_other_layer_and_no_framework():
    """Checked in a new interpreter. `ppo_rlhf` itself is allowed: it is the empty top package."""
    code = (
        "import pkgutil, importlib, sys, ppo_rlhf.core\n"
        "for m in pkgutil.iter_modules(ppo_rlhf.core.__path__): importlib.import_module('ppo_rlhf.core.' + m.name)\n"
        "others = {'kedro', 'mlflow', 'transformers', 'trl', 'peft', 'pandas'}\n"
        "bad = [n for n in sys.modules if n.split('.')[0] in others"
        " or (n.startswith('ppo_rlhf.') and not n.startswith('ppo_rlhf.core'))]\n"
        "print(sorted(bad))"
    )
    result = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert result.stdout.strip() == "[]"
