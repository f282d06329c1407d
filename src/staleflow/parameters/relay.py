"""The relay of a rollout node: receives every version and lands it in the node's store (paper §4).

consumes      agreements and pieces of the publish group
waits for     (own thread) the trainers' next version, as long as it takes; then each piece, at most `timeout_s`
unblocked by  the trainers, or `close`; never by a reader
produces      a version in the store, `on_stored(version, seconds)`; the same pieces for the next relay of the chain
"""

from __future__ import annotations

import logging
import threading
import time
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np
import numpy.typing as npt

from staleflow.parameters.layout import Piece
from staleflow.parameters.manifest import Manifest
from staleflow.parameters.rounds import Chain, Course, Header, Round, decide, handshake, relay_row
from staleflow.parameters.staging import piece_sum
from staleflow.parameters.store import NodeStore, Slot
from staleflow.parameters.wire import Message, PeerLostError, StoppedError, Wire

if TYPE_CHECKING:
    from torch.distributed import ProcessGroup

Bytes = npt.NDArray[np.uint8]
HEADERS_AHEAD = 4

log = logging.getLogger(__name__)


class CorruptPieceError(RuntimeError):
    """What landed is not what the trainer rank sent."""


@dataclass
class _Arrival:
    """A piece on its way in."""

    place: int
    trainer: int
    piece: Piece
    header: Header
    data: Bytes  # where the payload lands: the slot itself, or a buffer
    message: Message


class Relay:
    """One per node, in the host's process."""

    def __init__(
        self,
        group: ProcessGroup,
        manifest: Manifest,
        store: NodeStore,
        on_stored: Callable[[int, float], None] = lambda version, seconds: None,
        *,
        trainer_ranks_in_group: Sequence[int] = (0,),
        names: Sequence[str] = (),
        timeout_s: float = 60.0,
        on_error: Callable[[BaseException], None] = lambda error: None,
    ) -> None:
        """Start the relay's thread. `on_stored` and `on_error` are called from it (or from a watching one)."""
        self.manifest = manifest
        self.store = store
        self.failure: BaseException | None = None
        self.ended = threading.Event()  # the trainers have said that no more is coming, or it failed
        self._chain = Chain.of(group.size(), trainer_ranks_in_group)
        self._wire = Wire(group, names, timeout_s, self._fail)
        self._on_stored = on_stored
        self._on_error = on_error
        self._thread = threading.Thread(target=self._run, name="relay", daemon=True)
        self._thread.start()

    def close(self, timeout_s: float = 10.0) -> None:
        """Stop: at once while nothing arrives, otherwise after the version under way. Never raises."""
        self._wire.stop()
        self._thread.join(timeout_s)
        if self._thread.is_alive():
            log.warning("the relay did not end within %.0f s; leaving it", timeout_s)

    def _run(self) -> None:
        try:
            course = handshake(self._wire, self._chain, self.manifest, None, 0)
            while (round_ := self._agree()) is not None:
                self._store(course, round_)
        except StoppedError:
            pass
        except Exception as error:
            self._fail(error)
        finally:
            self.ended.set()

    def _agree(self) -> Round | None:
        rows = self._wire.agree(relay_row(self.store.newest()))
        return decide(rows, self._chain, self._wire.names)

    def _store(self, course: Course, round_: Round) -> None:
        begin = time.monotonic()
        if round_.fresh:
            self.store.forget(round_.version)
        with self.store.writing(round_.version) as slot:
            _Landing(self._wire, self._chain, course, slot).run()
        self._on_stored(round_.version, time.monotonic() - begin)

    def _fail(self, error: BaseException | PeerLostError) -> None:
        if self.failure is None:
            log.error("the relay stopped: %s", error)
            self.failure = error
            self._on_error(error)


class _Landing:
    """One version on its way into a slot."""

    def __init__(self, wire: Wire, chain: Chain, course: Course, slot: Slot) -> None:
        self.wire, self.chain, self.course, self.slot = wire, chain, course, slot
        self.next = chain.after(wire.rank)
        self.forwarded: deque[tuple[Message, Bytes]] = deque()  # the data is kept until it has been sent

    def run(self) -> None:
        """Receive piece k + 1 while piece k is summed, stored and passed on."""
        steps = list(enumerate(self.course.steps))
        headers = [self._expect_header(place, trainer) for place, (trainer, _) in steps[:HEADERS_AHEAD]]
        previous: _Arrival | None = None
        for place, (trainer, piece) in steps:
            if place + HEADERS_AHEAD < len(steps):
                ahead, (ahead_trainer, _) = steps[place + HEADERS_AHEAD]
                headers.append(self._expect_header(ahead, ahead_trainer))
            arrival = self._expect_payload(place, trainer, piece, *headers[place])
            if previous is not None:
                self._finish(previous)
            previous = arrival
        if previous is not None:
            self._finish(previous)
        while self.forwarded:
            self.wire.wait(self.forwarded.popleft()[0])

    def _expect_header(self, place: int, trainer: int) -> tuple[Message, Bytes]:
        data = np.empty(Header.NBYTES, np.uint8)
        return self.wire.receive(data, self.chain.before(self.wire.rank, trainer), 2 * place), data

    def _expect_payload(self, place: int, trainer: int, piece: Piece, message: Message, data: Bytes) -> _Arrival:
        """Wait for the header, pass it on, post the buffer for the payload: the slot itself if it can land there."""
        self.wire.wait(message)
        self._forward(data, 2 * place)
        header = Header.unpack(data)
        target = piece.ranges[0]
        buffer = (
            self.slot.view(target.image_bytes, target.nbytes) if piece.direct else np.empty(header.nbytes, np.uint8)
        )
        source = self.chain.before(self.wire.rank, trainer)
        return _Arrival(place, trainer, piece, header, buffer, self.wire.receive(buffer, source, 2 * place + 1))

    def _finish(self, arrival: _Arrival) -> None:
        self.wire.wait(arrival.message)
        self._forward(arrival.data, 2 * arrival.place + 1)
        if not arrival.piece.direct:
            self._scatter(arrival)
        checksum = piece_sum(arrival.data, arrival.piece)
        if checksum != arrival.header.checksum:
            sender = self.wire.names[self.chain.trainers[arrival.trainer]]
            raise CorruptPieceError(f"piece {arrival.place} of {sender} arrived damaged (checksum {checksum:#x})")
        self.slot.checksum = (self.slot.checksum + checksum) & ((1 << 64) - 1)

    def _scatter(self, arrival: _Arrival) -> None:
        at = 0
        for part in arrival.piece.ranges:
            self.slot.view(part.image_bytes, part.nbytes)[:] = arrival.data[at : at + part.nbytes]
            at += part.nbytes

    def _forward(self, data: Bytes, tag: int) -> None:
        if self.next is not None:
            self.forwarded.append((self.wire.send(data, self.next, tag), data))
            while len(self.forwarded) > 2 * HEADERS_AHEAD:
                self.wire.wait(self.forwarded.popleft()[0])
