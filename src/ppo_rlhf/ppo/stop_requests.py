"""The one place that says what can ask a run to stop, to save or to evaluate, and who asks."""

from dataclasses import dataclass

from ppo_rlhf.runtime.processes import from_all
from ppo_rlhf.runtime.stop_exceptions import StopBeforeUpdate


@dataclass
class RunRequests:
    """The open requests of a run.

    `Progress.finished`, `Progress.checkpoint_due` and `evaluation.during_training.is_due` say what follows
    from them, together with the settings `total_episodes`, `save_interval` and `eval_interval`.
    """

    # The signal that asked this process to stop. The signal handler sets it (`RunControl.ask`; in a script
    # `trainer.bookkeeping`)
    signum: int | None = None
    # True if a signal to any process asked (`agree`): the run saves the current iteration and stops; it can be resumed
    stop: bool = False
    # True if a callback set `should_training_stop`: no further iteration runs, also not in a resumed run. Checkpoints
    # store it
    end: bool = False
    # True if an evaluation found that the policy exploits its reward, with `evaluation.on_exploitation=stop`: `end` is
    # True, too, and the run exports the policy of its best evaluation. Checkpoints store it
    restore_best: bool = False
    save_by_time: bool = False  # True if `ppo.save_interval_minutes` are over (`Clock`): the current iteration is saved
    evaluate: bool = False  # True if a callback set `should_evaluate`: the policy is evaluated in this iteration

    @property
    def ask_to_save(self) -> bool:
        """Whether the current iteration is to be saved though it is not the last, whatever `save_interval` says."""
        return self.stop or self.save_by_time

    def agree(self, *, save_by_time: bool) -> None:
        """Share the processes' requests at the end of an iteration; every process calls `agree`.

        A signal may have reached only one process. The main process's clock decides about `save_by_time`.
        """
        answers = from_all((self.signum, save_by_time))
        self.stop = any(signum is not None for signum, _ in answers)
        self.save_by_time = answers[0][1]

    def meet(self) -> None:
        """Raise `StopBeforeUpdate` if any process was asked to stop; all processes call `meet`, outside of updates."""
        for signum in from_all(self.signum):
            if signum is not None:
                raise StopBeforeUpdate(signum)
