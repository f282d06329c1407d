"""Which instance goes on with a waiting trajectory, or begins a new one.

Order (paper's multi-level queue): evaluation work, then interrupted trajectories with the oldest `V_traj` first, then
new prompts; strict, so that nothing overtakes a trajectory that an older step waits for. A resumed trajectory prefers
the oldest instance version that may hold it, a new one the newest; inside a version the strategy's score decides.
"""

from __future__ import annotations

import heapq
from collections import defaultdict
from collections.abc import Iterable
from typing import Protocol

from staleflow.coordination.board import Instance, Work
from staleflow.coordination.desk import Desk, Group


class Routing(Protocol):
    def __call__(self, desk: Desk) -> None: ...


class _Fleet:
    """Instances by version, best score first. Scores fall as an instance is filled."""

    def __init__(self, routing: _Scored, desk: Desk) -> None:
        self._routing, self._desk = routing, desk
        self._heaps: dict[int, list[tuple[float, int, Instance]]] = defaultdict(list)
        for index, instance in desk.board.instances.items():
            if instance.spec_version >= 0 and routing.fits(instance, 1, desk):
                self._heaps[instance.spec_version].append((-routing.score(instance, desk), index, instance))
        for heap in self._heaps.values():
            heapq.heapify(heap)
        self.versions = sorted(self._heaps)

    def best(self, version: int, context_tokens: int, fresh: bool) -> Instance | None:
        """The best instance of this version that takes the trajectory; one that is full leaves the heap."""
        heap = self._heaps[version]
        while heap:
            instance = heap[0][2]
            if self._routing.fits(instance, context_tokens, self._desk):
                return instance if self._routing.worth(instance, context_tokens, self._desk, fresh) else None
            heapq.heappop(heap)
        return None

    def used(self, version: int, instance: Instance) -> None:
        """This instance was given something: score it again. One that is not the best is scored when it comes up."""
        heap = self._heaps[version]
        if heap[0][2] is instance:
            entry = (-self._routing.score(instance, self._desk), instance.info.index, instance)
            heapq.heapreplace(heap, entry)


class _Scored:
    """The queue discipline; what makes an instance good is left to the subclass."""

    def score(self, instance: Instance, desk: Desk) -> float:
        raise NotImplementedError

    def fits(self, instance: Instance, context_tokens: int, desk: Desk) -> bool:
        return True

    def worth(self, instance: Instance, context_tokens: int, desk: Desk, fresh: bool) -> bool:
        return True

    def __call__(self, desk: Desk) -> None:
        board = desk.board
        if not (board.evaluations or board.levels or self._may_begin(desk)):
            return
        fleet = _Fleet(self, desk)
        budget = desk.settings.max_routes_per_cycle
        budget -= self._resume(fleet, desk, list(board.evaluations.values())[:budget])
        for _, level in list(board.by_level()):
            waiting = list(level.values())[:budget]
            routed = self._resume(fleet, desk, waiting)
            budget -= routed
            if routed < len(waiting) or not budget:
                return  # strict: what is younger waits
        self._begin(fleet, desk, budget)

    def _may_begin(self, desk: Desk) -> bool:
        """Is there a prompt that the books would admit? What the newest version may not begin, no older one may."""
        newest = max((i.spec_version for i in desk.board.instances.values()), default=-1)
        return bool(desk.offers) and newest >= 0 and desk.ledger.can_reserve(newest, desk.offers[0].group_id)

    def _resume(self, fleet: _Fleet, desk: Desk, waiting: Iterable[Work]) -> int:
        """Place waiting trajectories until the first that finds no instance; returns how many."""
        routed = 0
        for work in waiting:
            admissible = (v for v in fleet.versions if v >= work.floor)
            version = self._place(fleet, admissible, work.context_tokens, False)
            if version is None:
                break
            instance = fleet.best(version, work.context_tokens, False)
            assert instance is not None
            desk.board.route(work, instance)
            fleet.used(version, instance)
            routed += 1
        return routed

    def _begin(self, fleet: _Fleet, desk: Desk, budget: int) -> None:
        newest_first = fleet.versions[::-1]
        while desk.offers and budget > 0:
            group = desk.offers[0]
            if group.placed == group.size:
                desk.offers.popleft()
                continue
            if not group.placed and not desk.may_begin(desk):
                return
            admitted = (v for v in newest_first if desk.ledger.can_reserve(v, group.group_id))
            version = self._place(fleet, admitted, group.prompt_tokens, True)
            if version is None:
                return
            instance = self._beside_siblings(fleet, desk, group, version)
            if not desk.start(group, instance):
                return
            fleet.used(version, instance)
            budget -= 1

    def _beside_siblings(self, fleet: _Fleet, desk: Desk, group: Group, version: int) -> Instance:
        """The best instance of this version, or the one of the member before, where the prompt is cached."""
        best = fleet.best(version, group.prompt_tokens, True)
        assert best is not None
        return best

    def _place(self, fleet: _Fleet, versions: Iterable[int], context_tokens: int, fresh: bool) -> int | None:
        """The first version with an instance that takes the trajectory."""
        return next((v for v in versions if fleet.best(v, context_tokens, fresh) is not None), None)


class Balanced(_Scored):
    """The fewest trajectories first, no limit: what a plain load balancer does; the engine queues by itself."""

    def score(self, instance: Instance, desk: Desk) -> float:
        return -float(instance.n)


class LeastLoaded(Balanced):
    """The fewest trajectories first, as long as there is room."""

    def fits(self, instance: Instance, context_tokens: int, desk: Desk) -> bool:
        n = instance.n
        if n >= instance.info.max_running or instance.spec_waiting > 0:
            return False
        return n == 0 or context_tokens <= self.room(instance, n, desk)

    def room(self, instance: Instance, n: int, desk: Desk) -> float:
        """Tokens of cache that routing may still fill."""
        return desk.settings.kv_limit * instance.info.kv_capacity_tokens - instance.kv_tokens


class MarginalGain(LeastLoaded):
    """The largest gain in throughput by the cost model, and only where it is at least `mu` of the ideal (paper).

    Other than in the paper, a resumed trajectory is not kept waiting for its gain: an older step waits for it.
    """

    def score(self, instance: Instance, desk: Desk) -> float:
        return desk.cost.gain(instance.n, instance.kv_tokens, 0.0)

    def worth(self, instance: Instance, context_tokens: int, desk: Desk, fresh: bool) -> bool:
        if not fresh:
            return True
        ideal = desk.cost.throughput(1, context_tokens)
        return desk.cost.gain(instance.n, instance.kv_tokens, context_tokens) >= desk.settings.mu * ideal


class StepTime(LeastLoaded):
    """The shortest decode step first, as it will be when all have grown to their mean; growth-, prefill-aware.

    Throughput follows from balance, so no trajectory is kept waiting for its marginal gain: begun early it has more
    time until the step that must train on it. It is kept waiting where the cache would not hold what all will have
    grown to, since a preempted context is computed twice. The members of a group stay together, where their prompt is
    computed once, as long as that step is at most `affinity` times the best one.
    """

    def score(self, instance: Instance, desk: Desk) -> float:
        n = instance.n + 1
        return -desk.cost.step_s(n, instance.kv_tokens + desk.settings.growth * desk.mean_context_tokens * n)

    def room(self, instance: Instance, n: int, desk: Desk) -> float:
        grown = instance.kv_tokens + desk.settings.growth * desk.mean_context_tokens * (n + 1)
        return desk.settings.kv_limit * instance.info.kv_capacity_tokens - grown

    def _beside_siblings(self, fleet: _Fleet, desk: Desk, group: Group, version: int) -> Instance:
        best = super()._beside_siblings(fleet, desk, group, version)
        before = next(reversed(group.works.values()), None)
        home = None if before is None or before.instance is None else desk.board.instances[before.instance]
        if home is None or home.spec_version != version or not self.fits(home, group.prompt_tokens, desk):
            return best
        near = self.score(home, desk) >= desk.settings.affinity * self.score(best, desk)  # scores are negative
        return home if near and self.worth(home, group.prompt_tokens, desk, True) else best


ROUTINGS: dict[str, type[_Scored]] = {
    "balanced": Balanced,
    "least_loaded": LeastLoaded,
    "marginal_gain": MarginalGain,
    "step_time": StepTime,
}
