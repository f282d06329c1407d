"""The device rank's end of its two rings: what comes down, what goes up, and nobody blocks on a full ring."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterator
from typing import Any

from staleflow.roles.messages import Kind, Report, StopRequested, encode
from staleflow.trajectories.ring import Ring
from staleflow.trajectories.schema import Trajectory
from staleflow.trajectories.schema import encode as encode_trajectory


class RankLink:
    """`down` is read, `up` is written. What does not fit into `up` waits in order until it does."""

    def __init__(self, down: Ring, up: Ring) -> None:
        self._down, self._up = down, up
        self._backlog: deque[tuple[int, bytes, int]] = deque()

    @property
    def stop_code(self) -> int:
        """Not 0 once the host has told this rank to leave; overtakes everything that is queued."""
        return self._down.stop_code

    def records(self, limit: int = 1024) -> Iterator[Any]:
        """Records that have arrived. Each is valid until the next one is asked for, then released."""
        for record in self._down.peek(limit):
            sequence = record.sequence
            try:
                yield record
            finally:
                del record
                self._down.release(sequence)

    def wait(self, timeout_s: float) -> bool:
        """Until something has arrived. Raises when the host is dead."""
        return self._down.wait(timeout_s)

    def report(self, report: Report) -> None:
        self._push(Kind.REPORT, encode(report), 0)

    def hand_over(self, kind: Kind, trajectory: Trajectory) -> None:
        """Finished and returned trajectories."""
        self._push(kind, bytes(encode_trajectory(trajectory)), trajectory.tid)

    def flush(self) -> bool:
        """Push what waited. True when nothing is left."""
        while self._backlog:
            kind, data, id0 = self._backlog[0]
            if not self._up.push(kind, data, id0=id0):
                return False
            self._backlog.popleft()
        return True

    def _push(self, kind: Kind, data: bytes, id0: int) -> None:
        if not self.flush() or not self._up.push(int(kind), data, id0=id0):
            self._backlog.append((int(kind), data, id0))

    def close(self, reason: str) -> None:
        self._up.close(reason)


class SignalReporter:
    """Tells the host, once, that this rank has got a signal; the host decides what follows."""

    def __init__(self, rank: int, link: RankLink, signal: Callable[[], int]) -> None:
        self._rank, self._link, self._signal, self._told = rank, link, signal, False

    def look(self) -> None:
        if (number := self._signal()) and not self._told:
            self._told = True
            self._link.report(StopRequested(self._rank, number))
