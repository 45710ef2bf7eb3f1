"""The calls to hooks that the loop's nodes cause: who hears of them, and what the runner learns from them."""

from __future__ import annotations

from typing import Any

from kedro.pipeline.node import Node
from pluggy import PluginManager

from ppo_rlhf.runner.shutdown import Shutdown

RECORDS_EVERY_CALL = "kedro_viz"
RECORDED_CALLS = (
    "before_dataset_loaded",
    "after_dataset_loaded",
    "before_dataset_saved",
    "after_dataset_saved",
    "before_node_run",
    "after_node_run",
)


class WatchedHooks:
    """A hook manager, as far as Kedro's tasks use one, that also tells `shutdown` of saves."""

    def __init__(self, manager: Any, shutdown: Shutdown) -> None:
        """Stand before a hook manager, or before what takes its place."""
        self._hooks = manager.hook
        self._shutdown = shutdown
        self.hook = self

    def before_dataset_saved(self, dataset_name: str, data: Any, node: Node) -> None:
        """Tell the runner first: what hooks do for a save takes time too."""
        self._shutdown.before_save(dataset_name, data)
        self._hooks.before_dataset_saved(dataset_name=dataset_name, data=data, node=node)

    def after_dataset_saved(self, dataset_name: str, data: Any, node: Node) -> None:
        """Tell the runner last."""
        self._hooks.after_dataset_saved(dataset_name=dataset_name, data=data, node=node)
        self._shutdown.after_save(dataset_name)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._hooks, name)


class _Subset:
    """A hook manager that leaves some plugins out of the calls that loads, saves and nodes cause."""

    def __init__(self, manager: PluginManager, left_out: list[object]) -> None:
        self._all = manager.hook
        self.hook = self
        for name in RECORDED_CALLS:
            setattr(self, name, manager.subset_hook_caller(name, left_out))

    def __getattr__(self, name: str) -> Any:
        return getattr(self._all, name)


def without_records(manager: Any) -> Any:
    """Return hooks without the plugin that records every call, for all iterations but one.

    Kedro-Viz keeps a record of each such call until the run ends: some 60 an iteration, without bound. It still hears
    of errors.
    """
    if not isinstance(manager, PluginManager):
        return manager
    left_out = [plugin for plugin in manager.get_plugins() if type(plugin).__module__.startswith(RECORDS_EVERY_CALL)]
    return _Subset(manager, left_out)
