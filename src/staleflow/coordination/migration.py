"""Which trajectories leave an instance for another one."""

from __future__ import annotations

from itertools import islice
from typing import Protocol

from staleflow.coordination.board import Instance, Phase, Work
from staleflow.coordination.desk import Desk


class Migration(Protocol):
    def __call__(self, desk: Desk) -> int:
        """Interrupt what should move; returns how many. Routing places it once it has returned."""
        ...


class Stay:
    """Nobody moves."""

    def __call__(self, desk: Desk) -> int:
        return 0


class Subset:
    """What waits on an overfull instance moves, as far as others have room for it now."""

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
        """The last that were routed there: engines admit in order and preempt the youngest."""
        last = (w for w in reversed(instance.held.values()) if w.phase is Phase.RUNNING and not w.evaluation)
        return list(islice(last, most))


class Everything(Subset):
    """The published system's choice: all trajectories of the overfull instance."""

    def chosen(self, instance: Instance, most: int) -> list[Work]:
        return [w for w in instance.held.values() if w.phase is Phase.RUNNING and not w.evaluation]


class Rebalance:
    """Even out the step times of the instances that hold stragglers."""

    def __call__(self, desk: Desk) -> int:
        instances = [i for i in desk.board.instances.values() if i.spec_version >= 0]
        if len(instances) < 2 or any(i.leaving for i in instances):
            return 0
        due = desk.ledger.version - desk.ledger.eta
        loads = {i.info.index: [i.n, i.kv_tokens] for i in instances}
        moved = 0
        for instance in instances:
            desk.board.refresh(instance)
        while moved < desk.settings.moves:
            t = {i.info.index: desk.cost.step_s(*loads[i.info.index]) for i in instances}
            held = [i for i in instances if i.due(due)]
            if not held:
                break
            worst = max(held, key=lambda i: t[i.info.index])
            best = min(instances, key=lambda i: t[i.info.index])
            if t[worst.info.index] < desk.settings.ratio * t[best.info.index]:
                break
            a, b = loads[worst.info.index], loads[best.info.index]
            choice, value = None, t[worst.info.index]
            for work in worst.held.values():
                if work.phase is not Phase.RUNNING or work.evaluation or work.floor > best.spec_version: continue
                if desk.settings.crit and work.version>due: continue
                c = work.context_tokens
                after = max(desk.cost.step_s(a[0] - 1, a[1] - c), desk.cost.step_s(b[0] + 1, b[1] + c))
                if after < value: choice, value = work, after
            if choice is None or value > t[worst.info.index] * 0.98:
                break
            desk.board.interrupt(choice, worst)
            c = choice.context_tokens
            a[0] -= 1; a[1] -= c; b[0] += 1; b[1] += c
            moved += 1
        return moved


def _room(instance: Instance) -> int:
    """Trajectories that the instance could take at once."""
    return max(0, instance.info.max_running - instance.n) if instance.spec_waiting <= 0 else 0


MIGRATIONS: dict[str, type[Migration]] = {"none": Stay, "subset": Subset, "all": Everything, "rebalance": Rebalance}
