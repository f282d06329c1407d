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


class Gain:
    """The hypothesis test: Pull when that gains more tokens over the next version's life than it costs.

    Price: the tokens not decoded while the parameters load and the contexts are computed again. Gain: the throughput
    that the instance adds once it runs its share of what may begin (or go on) only at a newer version. The cheapest
    instance is asked first, and takes its share away from the others; an instance that is left out drains, which makes
    its Pull cheaper and its gain larger.
    """

    def __call__(self, desk: Desk) -> bool:
        lagging = [i for i in desk.lagging() if desk.settings.partial_rollout or not i.held]
        if not lagging:
            return False
        told = False
        for instance in [i for i in lagging if not i.held]:
            desk.board.pull(instance, desk.published)
            lagging.remove(instance)
            told = True
        available = desk.beginnable() - self._places(desk)
        share = (sum(i.n for i in desk.board.instances.values()) + max(0, available)) / len(desk.board.instances)
        for instance in sorted(lagging, key=lambda i: i.kv_tokens):
            more = min(available, int(share) + 1 - instance.n) + desk.stranded()
            if more > 0 and self._gain(instance, more, desk) > self._price(instance, desk):
                desk.board.pull(instance, desk.published)
                available -= more
                told = True
        return told

    def _places(self, desk: Desk) -> int:
        """What the instances that hold the newest version already will take."""
        instances = desk.board.instances.values()
        mean = sum(i.n for i in instances) / len(instances)
        return int(sum(max(0.0, mean - i.n) for i in instances if i.spec_version >= desk.published))

    def _gain(self, instance: Instance, more: int, desk: Desk) -> float:
        room = instance.info.kv_capacity_tokens - instance.kv_tokens
        more = min(more, instance.info.max_running - instance.n, int(room / desk.mean_context_tokens))
        if more <= 0:
            return 0.0
        after = desk.cost.throughput(instance.n + more, instance.kv_tokens + more * desk.mean_context_tokens)
        return (after - desk.cost.throughput(instance.n, instance.kv_tokens)) * desk.version_life_s

    def _price(self, instance: Instance, desk: Desk) -> float:
        seconds = desk.settings.pull_s + desk.cost.prefill_s(instance.kv_tokens)
        return seconds * desk.cost.throughput(instance.n, instance.kv_tokens)


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


SYNCHRONIZATIONS: dict[str, type[Synchronization]] = {
    "greedy": Greedy,
    "paper": Paper,
    "gain": Gain,
    "drained": WhenDrained,
}
