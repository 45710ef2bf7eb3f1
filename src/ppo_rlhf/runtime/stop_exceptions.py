"""The exceptions by which a signal or a time limit stops a run; `runtime.signals` raises them."""

import signal


class TerminationSignal(BaseException):
    """Raised in the main thread when a signal or a time limit asks this process to stop."""

    def __init__(self, signum: int, why: str = "") -> None:
        super().__init__(signal.Signals(signum).name)
        self.signum, self.why = signum, why


class StopBeforeUpdate(TerminationSignal):
    """Raised in all processes, outside of updates: the training state is that of the last iteration, and can be
    saved.
    """
