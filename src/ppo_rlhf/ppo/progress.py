"""`Progress`: how far a run has come, with its history, its clock and the open requests to stop, save or evaluate."""

from __future__ import annotations

import logging
import time
from collections import defaultdict
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field

from ppo_rlhf.config import PPOConfig
from ppo_rlhf.core.errors import TrainingError
from ppo_rlhf.ppo.kl_alarms import KLAlarms
from ppo_rlhf.ppo.stop_requests import RunRequests, Stop

log = logging.getLogger(__name__)

SAMPLING, LOGPROBS, VALUES, REWARDS, UPDATE = "sampling", "log-probabilities", "values", "rewards", "update"
"""Names of the timed parts of an iteration, which are the keys of `Clock.seconds`."""


class Clock:
    """Measures how many seconds each part of an iteration takes, and stores when the iteration began."""

    def __init__(self) -> None:
        self.restart()

    def restart(self) -> None:
        """Reset the clock at the beginning of an iteration."""
        self.started = self.entered = time.perf_counter()  # when the iteration, and its last timed part, began
        # Seconds that each part of the iteration has taken so far
        self.seconds: defaultdict[str, float] = defaultdict(float)

    @contextmanager
    def timed(self, part: str) -> Iterator[None]:
        """Add the seconds that the `with` block takes to `part` of the iteration."""
        self.entered = time.perf_counter()
        yield
        self.seconds[part] += time.perf_counter() - self.entered


@dataclass
class Progress:
    """How far a run has come."""

    config: PPOConfig
    iteration: int = 0  # number of complete iterations
    episode: int = 0  # number of responses trained on
    # Metrics of each complete iteration; the key `iteration` has the iteration's number
    history: list[dict[str, float]] = field(default_factory=list)
    clock: Clock = field(default_factory=Clock)  # clock that times the parts of the current iteration
    updating: bool = False  # True from an iteration's first optimiser step until the iteration is complete
    requests: RunRequests = field(default_factory=RunRequests)  # requests to stop the run and to evaluate
    # Iteration of the best evaluation so far (0: SFT's), whose checkpoint is kept; None unless
    # `evaluation.on_exploitation` is `stop`
    best_evaluation: int | None = None
    # Iteration whose policy and critic were loaded after the end of training; None: they are those of `iteration`
    loaded_iteration: int | None = None

    def __post_init__(self) -> None:
        self._alarms = KLAlarms(self.config)

    @property
    def total_iterations(self) -> int:
        """Number of iterations of the whole run."""
        return self.config.num_total_batches

    @property
    def finished(self) -> bool:
        """Whether the run is over: all iterations are done, or a callback or an evaluation ended training."""
        return self.requests.end or self.iteration >= self.total_iterations

    @property
    def policy_iteration(self) -> int:
        """The iteration that the policy is of: the last one, unless `load_best` went back to the best evaluation."""
        return self.iteration if self.loaded_iteration is None else self.loaded_iteration

    def complete(self, metrics: dict[str, float]) -> None:
        """Complete an iteration with these metrics: count it, add it to the history, and log alarms."""
        self.iteration += 1
        self.episode += self.config.batch_size
        self.history.append({"iteration": float(self.iteration), **metrics})
        for line in self._alarms.after(self.history[-1]):
            log.warning(line)
        self.updating = False

    def restore_history(self, history: list[dict[str, float]]) -> None:
        """Replace the history by that of a checkpoint; the alarms of its iterations were logged when they ran."""
        self.history, self._alarms = history, KLAlarms(self.config)
        for row in history:
            self._alarms.after(row)

    def share_requests(self) -> Stop | None:
        """Return what asked any process to stop a run that has not finished, or None; every process calls this."""
        return self.requests.share(None if self.finished else self.config.max_time)

    def update_left(self) -> float | None:
        """Return about how many seconds the rest of this update takes; None in the first update."""
        if not self.history:
            return None
        return max(0.0, self.history[-1]["time/optimise_s"] - (time.perf_counter() - self.clock.entered))

    def check_whole(self) -> None:
        """Raise `TrainingError` if an update or the loading of a checkpoint was interrupted."""
        if self.updating:
            raise TrainingError(
                f"an update, or the loading of a checkpoint, was interrupted after iteration {self.iteration}: load a "
                "whole checkpoint (in PPOTrainer resume_from_checkpoint), or start a new run from unchanged models"
            )
