"""What compare.py and scaling.py are made of; what the peer's Python runs too imports nothing of this project."""

import os

GIVEN = dict(os.environ)
"""The environment as the command was given it. `import ppo_rlhf` adds what its own libraries are to read; a worker that
inherited that would run the peer with this project's settings."""
