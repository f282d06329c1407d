"""Views of the protocol that are derived from its groups, each O(outstanding): for people, routers and error texts."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import islice
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from staleflow.protocol.core import StalenessProtocol

BufferView = tuple[int, int, int, int, str]


def unfinished(protocol: StalenessProtocol, deadline: int) -> list[int]:
    """Unfinished groups that must be trained by step `deadline`, earliest deadline first, then oldest reservation."""
    newest = deadline - protocol.eta
    groups = protocol._groups
    found = [i for i, group in groups.items() if group.version <= newest and group.missing]
    return sorted(found, key=lambda i: groups[i].version)


def finished(protocol: StalenessProtocol, deadline: int) -> list[int]:
    """Finished groups that must be trained by step `deadline`, in the order in which they would be trained."""
    classes = islice(protocol._finished, deadline - protocol.version + 1)
    return [group_id for ids in classes for group_id in ids]


def dispensable(protocol: StalenessProtocol, deadline: int) -> list[int]:
    """Groups due by step `deadline` in the order in which they may be dropped: unfinished first, newest first."""
    groups = protocol._groups
    running = unfinished(protocol, deadline)[::-1]
    done = finished(protocol, deadline)[::-1]
    # Stable sorts of reversed lists: among equal versions the latest reservation, or the latest finish, comes first.
    return sorted(running, key=lambda i: -groups[i].version) + sorted(done, key=lambda i: -groups[i].version)


def buffers(protocol: StalenessProtocol) -> list[BufferView]:
    """See StalenessProtocol.buffers. What a READY step would drop as surplus when consumed is in none of them."""
    ready = protocol.ready()
    places = protocol.batch_groups + protocol.spare_groups
    batch = list(islice(finished(protocol, protocol.version + protocol.eta), protocol.batch_groups)) if ready else []
    rest = _by_deadline(protocol, set(batch))
    rows = [batch] if ready else []
    rows += [rest[start : start + places] for start in range(0, places * (protocol.eta + 1), places)]
    return [_row(protocol, i, row, ready, places) for i, row in enumerate(rows[: protocol.eta + 1])]


def _by_deadline(protocol: StalenessProtocol, without: set[int]) -> list[int]:
    last = protocol.version + protocol.eta
    done = [i for i in finished(protocol, last) if i not in without]
    # A stable sort of finished before unfinished: earliest deadline first, finished first on ties.
    return sorted(done + unfinished(protocol, last), key=lambda i: protocol._groups[i].version)


def _row(protocol: StalenessProtocol, i: int, row: Sequence[int], ready: bool, places: int) -> BufferView:
    occupied = sum(not protocol._groups[group_id].missing for group_id in row)
    reserved = len(row) - occupied
    if i == 0 and ready:
        return protocol.version, 0, occupied, 0, "READY"
    if i == 0:
        state = "STUCK" if protocol.waiting_for() else "PENDING"
    elif len(row) < places:
        state = "PENDING"
    else:
        state = "STUCK" if reserved else "READY"
    return protocol.version + i, reserved, occupied, places - len(row), state


def describe(protocol: StalenessProtocol) -> str:
    """One line on why the next step is not ready."""
    needed, done = protocol.batch_groups, protocol._finished_count
    waiting = protocol.waiting_for()
    if not waiting:
        return f"{done} of {needed} groups are finished and {len(protocol._groups)} are outstanding: reserve more"
    shown = ", ".join(map(str, waiting[:8])) + (", ..." if len(waiting) > 8 else "")
    return f"{done} groups are finished, and it waits for {len(waiting)} unfinished: {shown}"
