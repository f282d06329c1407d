"""Which trajectories leave an instance for another one: a few, those whose move gains most net of its prefill."""

from __future__ import annotations

import math
from dataclasses import dataclass
from itertools import islice
from typing import Protocol

from staleflow.coordination.board import Instance, Phase, Work
from staleflow.coordination.desk import Desk

_LOOKS = 50  # times per life of a version that imbalance is looked at
_SETTLE = 1.25  # a trajectory moves again only when it has grown by this factor


class Migration(Protocol):
    def __call__(self, desk: Desk) -> int:
        """Interrupt what should move; returns how many. Routing places it once it has returned."""
        ...


class Stay:
    """Nobody moves."""

    def __call__(self, desk: Desk) -> int:
        return 0


class Everything:
    """The published system's choice: all trajectories of an instance with too many waiting."""

    def __call__(self, desk: Desk) -> int:
        room = sum(_room(instance) for instance in desk.board.instances.values())
        moved = 0
        for instance in desk.board.instances.values():
            if room > 0 and instance.waiting > desk.settings.phi_wait and not instance.pending:
                for work in self.chosen(instance, min(instance.waiting, room)):
                    desk.board.interrupt(work, instance)
                    room, moved = room - 1, moved + 1
        return moved

    def chosen(self, instance: Instance, most: int) -> list[Work]:
        return [work for work in instance.held.values() if _movable(work)]


class Subset(Everything):
    """What waits on an overfull instance; and what evens out the decode steps of those that hold stragglers.

    A straggler is a trajectory that the next step waits for. It runs as fast as its instance's step is short, so the
    instance with the longest step that holds one gives up the trajectory whose move shortens the longer of the two
    steps most, while that saves more time than computing its context again costs.
    """

    def __init__(self) -> None:
        self._evened_s = -math.inf

    def __call__(self, desk: Desk) -> int:
        moved = super().__call__(desk)
        if moved or desk.now_s - self._evened_s < desk.version_life_s / _LOOKS:
            return moved
        self._evened_s = desk.now_s
        return self._even_out(desk)

    def chosen(self, instance: Instance, most: int) -> list[Work]:
        """The last that were routed there: engines admit in order and preempt the youngest."""
        return list(islice(filter(_movable, reversed(instance.held.values())), most))

    def _even_out(self, desk: Desk) -> int:
        loads = {i.info.index: _Load(i, i.n, i.kv_tokens, desk) for i in desk.board.instances.values()}
        if any(load.instance.leaving or load.instance.pulling for load in loads.values()):
            return 0  # let the moves under way arrive first
        oldest_due = desk.ledger.version - desk.ledger.eta
        slow = [load for load in loads.values() if load.instance.due(oldest_due)]
        moved = 0
        while slow and moved < desk.settings.max_moves:
            source = max(slow, key=_Load.step)
            target = min(loads.values(), key=_Load.step)
            work = self._best_move(source, target, desk)
            if work is None:
                break
            source.add(-1, -work.context_tokens)
            target.add(1, work.context_tokens)
            work.moved_at_tokens = work.tokens
            desk.board.interrupt(work, source.instance)
            moved += 1
        return moved

    def _best_move(self, source: _Load, target: _Load, desk: Desk) -> Work | None:
        if source.step_s < desk.settings.imbalance * target.step_s or not _room(target.instance):
            return None
        desk.board.refresh(source.instance)
        room = desk.settings.kv_limit * target.instance.info.kv_capacity_tokens - target.kv_tokens
        best, saved = None, desk.settings.imbalance_left * source.step_s
        for work in source.instance.held.values():
            if not _movable(work) or work.floor > target.instance.spec_version or work.context_tokens > room:
                continue
            if work.tokens < _SETTLE * work.moved_at_tokens:
                continue
            after = max(source.with_(-1, -work.context_tokens), target.with_(1, work.context_tokens))
            # A long-tailed length: what has run for so long is expected to run for as long again. All of the source
            # gain by shorter steps, all of the target wait for the prefill.
            gain = (source.step_s - after) * work.tokens * source.n
            if after < saved and gain > desk.cost.prefill_s(work.context_tokens) * (target.n + 1):
                best, saved = work, after
        return best


@dataclass(slots=True, eq=False)
class _Load:
    """An instance's load with the moves of this cycle."""

    instance: Instance
    n: int
    kv_tokens: float
    desk: Desk
    step_s: float = 0.0

    def __post_init__(self) -> None:
        self.add(0, 0)

    def add(self, n: int, kv_tokens: int) -> None:
        self.n, self.kv_tokens = self.n + n, max(0, self.kv_tokens + kv_tokens)
        self.step_s = self.desk.cost.step_s(self.n, self.kv_tokens)

    def with_(self, n: int, kv_tokens: int) -> float:
        return self.desk.cost.step_s(self.n + n, self.kv_tokens + kv_tokens)

    def step(self) -> float:
        return self.step_s


def _movable(work: Work) -> bool:
    return work.phase is Phase.RUNNING and not work.evaluation


def _room(instance: Instance) -> int:
    """Trajectories that the instance could take at once."""
    return max(0, instance.info.max_running - instance.n) if instance.spec_waiting <= 0 else 0


MIGRATIONS: dict[str, type[Migration]] = {"none": Stay, "subset": Subset, "all": Everything}
