"""The host's end of one device rank's two rings. The host never blocks on it: what does not fit waits in an outbox."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator, Sequence
from typing import Any

from staleflow.jobs.plan import RankPlan
from staleflow.roles.messages import Kind
from staleflow.trajectories import microbatch
from staleflow.trajectories.ring import Ring


class DeviceLink:
    """`down` is written, `up` is read."""

    def __init__(self, plan: RankPlan, down: Ring, up: Ring) -> None:
        self.plan, self.down, self.up = plan, down, up
        self.ready = self.gone = False
        self._outbox: deque[tuple[Kind, Any, int]] = deque()

    def send(self, kind: Kind, data: Any, id0: int = 0) -> None:
        """In order, now or as soon as there is room. `data` must stay unchanged until then."""
        self._outbox.append((kind, data, id0))
        self.flush()

    def send_microbatch(self, records: Sequence[Any], advantages: Sequence[float]) -> None:
        """Records are copied once, into the ring, when their turn has come."""
        self._outbox.append((Kind.MICROBATCH, (records, advantages), 0))
        self.flush()

    def flush(self) -> None:
        while self._outbox and self._push(*self._outbox[0]):
            self._outbox.popleft()

    def _push(self, kind: Kind, data: Any, id0: int) -> bool:
        if kind is not Kind.MICROBATCH:
            return bool(self.down.push(int(kind), data, id0=id0))
        records, advantages = data
        nbytes = microbatch.encoded_bytes([len(r) for r in records])
        view = self.down.reserve(nbytes, int(kind))
        if view is None:
            return False
        microbatch.encode_into(view, records, advantages)
        self.down.commit()
        return True

    @property
    def backlog(self) -> int:
        return len(self._outbox)

    def records(self, limit: int = 4096) -> Iterator[Any]:
        """What has come up. Each record is valid until the next one is asked for."""
        for record in self.up.peek(limit):
            sequence = record.sequence
            try:
                yield record
            finally:
                del record
                self.up.release(sequence)

    def stop(self, code: int) -> None:
        """Overtakes everything that is queued."""
        self._outbox.clear()
        self.down.set_stop(code)
