"""Conversion of configurations of TRL, LLaMA-Factory, ms-swift and verl to this project's parameters."""

from ppo_rlhf.compat.conversion import Conversion
from ppo_rlhf.compat.llamafactory import from_llamafactory
from ppo_rlhf.compat.swift import from_swift
from ppo_rlhf.compat.trl import from_trl
from ppo_rlhf.compat.verl import from_verl

__all__ = ["Conversion", "from_llamafactory", "from_swift", "from_trl", "from_verl"]
