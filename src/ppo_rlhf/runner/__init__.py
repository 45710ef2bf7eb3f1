"""The runner that folds PPO's iteration: everything before it once, it until training is finished, the rest once."""

from ppo_rlhf.runner.loop import LoopRunner, make_session_default
from ppo_rlhf.runner.plan import CARRY_IN, CARRY_OUT, ITERATION_TAG, plan_loop
from ppo_rlhf.runner.signals import RunInterruptedError, TerminationSignal, deferring_signals, raising_on_signals

__all__ = [
    "CARRY_IN",
    "CARRY_OUT",
    "ITERATION_TAG",
    "LoopRunner",
    "RunInterruptedError",
    "TerminationSignal",
    "deferring_signals",
    "make_session_default",
    "plan_loop",
    "raising_on_signals",
]
