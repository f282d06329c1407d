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


def _room(instance: Instance) -> int:
    """Trajectories that the instance could take at once."""
    return max(0, instance.info.max_running - instance.n) if instance.spec_waiting <= 0 else 0


MIGRATIONS: dict[str, type[Migration]] = {"none": Stay, "subset": Subset, "all": Everything}
