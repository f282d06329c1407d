"""Views of the protocol that are derived from its groups, each O(outstanding): for people, routers and error texts."""

from __future__ import annotations

from itertools import islice
from operator import itemgetter
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from staleflow.protocol.core import StalenessProtocol

BufferView = tuple[int, int, int, int, str]


def unfinished(protocol: StalenessProtocol, deadline: int) -> list[int]:
    """Unfinished groups that must be trained by step `deadline`, earliest deadline first, then oldest reservation."""
    newest = deadline - protocol.eta
    found = [(version, i) for i, version, missing in protocol._rows() if version <= newest and missing]
    return [i for _, i in sorted(found, key=itemgetter(0))]


def finished(protocol: StalenessProtocol, deadline: int) -> list[int]:
    """Finished groups that must be trained by step `deadline`, in the order in which they would be trained."""
    classes = islice(protocol._finished, deadline - protocol.version + 1)
    return [group_id for ids in classes for group_id in ids]


def dispensable(protocol: StalenessProtocol, deadline: int) -> list[int]:
    """Groups due by step `deadline` in the order in which they may be dropped: unfinished first, newest first."""
    running = unfinished(protocol, deadline)[::-1]
    done = finished(protocol, deadline)[::-1]
    # Stable sorts of reversed lists: among equal versions the latest reservation, or the latest finish, comes first.
    return sorted(running, key=lambda i: -protocol.version_of(i)) + sorted(done, key=lambda i: -protocol.version_of(i))


def buffers(protocol: StalenessProtocol) -> list[BufferView]:
    """See StalenessProtocol.buffers. What a READY step would drop as surplus when consumed is in none of them."""
    ready = protocol.ready()
    places = protocol.batch_groups + protocol.spare_groups
    batch = list(islice(finished(protocol, protocol.version + protocol.eta), protocol.batch_groups)) if ready else []
    rest = _by_deadline(protocol, set(batch))
    rows = [batch] if ready else []
    rows += [rest[start : start + places] for start in range(0, places * (protocol.eta + 1), places)]
    done = set(finished(protocol, protocol.version + protocol.eta))
    counted = [(sum(i in done for i in row), len(row)) for row in rows[: protocol.eta + 1]]
    return [_row(protocol, i, *counts, ready, places) for i, counts in enumerate(counted)]


def _by_deadline(protocol: StalenessProtocol, without: set[int]) -> list[int]:
    last = protocol.version + protocol.eta
    done = [i for i in finished(protocol, last) if i not in without]
    # A stable sort of finished before unfinished: earliest deadline first, finished first on ties.
    return sorted(done + unfinished(protocol, last), key=protocol.version_of)


def _row(protocol: StalenessProtocol, i: int, occupied: int, held: int, ready: bool, places: int) -> BufferView:
    reserved = held - occupied
    if i == 0 and ready:
        return protocol.version, 0, occupied, 0, "READY"
    if i == 0:
        state = "STUCK" if protocol.waiting_for() else "PENDING"
    elif held < places:
        state = "PENDING"
    else:
        state = "STUCK" if reserved else "READY"
    return protocol.version + i, reserved, occupied, places - held, state


def describe(protocol: StalenessProtocol) -> str:
    """One line on why the next step is not ready."""
    needed, done = protocol.batch_groups, protocol._finished_count
    waiting, outstanding = protocol.waiting_for(), protocol.counters()["groups"]["outstanding"]
    if not waiting:
        return f"{done} of {needed} groups are finished and {outstanding} are outstanding: reserve more"
    shown = ", ".join(map(str, waiting[:8])) + (", ..." if len(waiting) > 8 else "")
    return f"{done} groups are finished, and it waits for {len(waiting)} unfinished: {shown}"
