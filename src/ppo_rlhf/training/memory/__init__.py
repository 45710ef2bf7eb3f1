"""How much memory a run will need, by phase, before any weight is read (docs/memory.md).

`simulation` puts the run's own models and passes through torch's fake tensors, which have shapes and no data;
`live_bytes` counts what is alive meanwhile; `plan` adds what is held all the time; `machine` says what there is, and
`remedies` what to change first.
"""

from ppo_rlhf.training.memory.machine import Machine, available_memory
from ppo_rlhf.training.memory.plan import MemoryPlan, Phase, RunShape, plan_memory
from ppo_rlhf.training.memory.remedies import Remedy, remedies

__all__ = ["Machine", "MemoryPlan", "Phase", "Remedy", "RunShape", "available_memory", "plan_memory", "remedies"]
