"""When an instance is told to Pull the published parameters."""

from __future__ import annotations

from typing import Protocol

from staleflow.coordination.board import Instance
from staleflow.coordination.desk import Desk


class Synchronization(Protocol):
    def __call__(self, desk: Desk) -> bool:
        """Tell Pulls; True when any was told."""
        ...


class _EachLagging:
    """Asks `due` of every instance that lags; one without parameters, or without work, always Pulls."""

    def __call__(self, desk: Desk) -> bool:
        told = False
        for instance in list(desk.lagging()):
            may = desk.settings.partial_rollout or not instance.held
            if may and (instance.spec_version < 0 or not instance.held or self.due(instance, desk)):
                desk.board.pull(instance, desk.published)
                told = True
        return told

    def due(self, instance: Instance, desk: Desk) -> bool:
        raise NotImplementedError


class Greedy(_EachLagging):
    """At once."""

    def due(self, instance: Instance, desk: Desk) -> bool:
        return True


class Paper(_EachLagging):
    """When nothing waits that could run at the present version without a new place, and the load is low (paper)."""

    def due(self, instance: Instance, desk: Desk) -> bool:
        if instance.spec_waiting > 0:
            return False
        if instance.kv_tokens > desk.settings.kv_threshold * instance.info.kv_capacity_tokens:
            return False
        oldest = min(desk.board.levels, default=None)
        return oldest is None or oldest > instance.spec_version


class WhenDrained:
    """All together, and only when nothing is being generated: the barrier of `sync` and `one_step`.

    After a loss the barrier yields: to an instance without parameters, and to a trajectory that no instance may hold.
    """

    def __call__(self, desk: Desk) -> bool:
        told = False
        newest = max((i.spec_version for i in desk.board.instances.values()), default=-1)
        stranded = min(desk.board.levels, default=-1) > newest
        for instance in list(desk.lagging()):
            if not desk.unfinished or stranded or instance.spec_version < 0:
                desk.board.pull(instance, desk.published)
                told = True
        return told


SYNCHRONIZATIONS: dict[str, type[Synchronization]] = {"greedy": Greedy, "paper": Paper, "drained": WhenDrained}
