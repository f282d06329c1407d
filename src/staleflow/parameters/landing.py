"""One version on its way from the wire into a slot of the store, and on to the next relay of the chain."""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass, field

import numpy as np
import numpy.typing as npt

from staleflow.parameters.checksum import MASK, piece_sum
from staleflow.parameters.layout import Piece
from staleflow.parameters.rounds import Chain, Course, Header, Kind
from staleflow.parameters.store import Slot
from staleflow.parameters.wire import Message, Wire

Bytes = npt.NDArray[np.uint8]
HEADERS_AHEAD = 4
FORWARDING = 2 * HEADERS_AHEAD
KEEP_BELOW = 1 / 8  # of the piece: a longer delta is not kept, copying the piece costs no more


class CorruptPieceError(RuntimeError):
    """What landed is not what the trainer rank sent."""


@dataclass
class Deltas:
    """The deltas of the last push, by place, which turned version `before` into `after`.

    The slot to be written next still holds `before`: applying them again brings it to `after`, the base of the next
    delta, for a hundredth of what copying the base from the other slot costs.
    """

    before: int | None = None
    after: int | None = None
    payloads: dict[int, Bytes] = field(default_factory=dict)

    def lead(self, slot: Slot) -> bool:
        """Whether they lead from what the slot holds to what the other slot holds."""
        return slot.held is not None and (self.before, self.after) == (slot.held, slot.base_version)


@dataclass
class _Arrival:
    place: int
    trainer: int
    piece: Piece
    header: Header
    data: Bytes  # where the payload lands: the slot itself, or a buffer
    message: Message | None


class Landing:
    """Receives one version into `slot`; `kept` are the deltas of the push before."""

    def __init__(self, wire: Wire, chain: Chain, course: Course, slot: Slot, kept: Deltas) -> None:
        self._wire, self._chain, self._course, self._slot, self._kept = wire, chain, course, slot, kept
        self._next = chain.after(wire.rank)
        self._forwarded: deque[tuple[Message, Bytes]] = deque()  # data is held until it has been sent
        self._kept_lead = kept.lead(slot)
        self.payloads: dict[int, Bytes] = {}

    def run(self) -> None:
        """Receive piece k + 1 while piece k is stored and passed on. Raises PeerLostError, CorruptPieceError."""
        steps = self._course.steps
        headers = deque(self._expect_header(place) for place in range(min(HEADERS_AHEAD, len(steps))))
        previous: _Arrival | None = None
        for place in range(len(steps)):
            if place + HEADERS_AHEAD < len(steps):
                headers.append(self._expect_header(place + HEADERS_AHEAD))
            arrival = self._expect_payload(place, *headers.popleft())
            if previous is not None:
                self._finish(previous)
            previous = arrival
        if previous is not None:
            self._finish(previous)
        while self._forwarded:
            self._wire.wait(self._forwarded.popleft()[0])

    def _source(self, place: int) -> int:
        return self._chain.before(self._wire.rank, self._course.steps[place][0])

    def _expect_header(self, place: int) -> tuple[Message, Bytes]:
        data = np.empty(Header.NBYTES, np.uint8)
        return self._wire.receive(data, self._source(place), 2 * place), data

    def _expect_payload(self, place: int, message: Message, data: Bytes) -> _Arrival:
        """Wait for the header, pass it on, post a buffer for the payload: the slot itself where it can land there."""
        self._wire.wait(message)
        self._forward(data, 2 * place)
        header = Header.unpack(data)
        trainer, piece = self._course.steps[place]
        lands = header.kind is Kind.FULL and piece.direct
        buffer = self._in_slot(piece) if lands else np.empty(header.nbytes, np.uint8)
        payload = self._wire.receive(buffer, self._source(place), 2 * place + 1) if header.nbytes else None
        return _Arrival(place, trainer, piece, header, buffer, payload)

    def _finish(self, arrival: _Arrival) -> None:
        if arrival.message is not None:
            self._wire.wait(arrival.message)
            self._forward(arrival.data, 2 * arrival.place + 1)
        checksum = piece_sum(self._land(arrival), arrival.piece)
        if checksum != arrival.header.checksum:
            sender = self._wire.names[self._chain.trainers[arrival.trainer]]
            raise CorruptPieceError(f"piece {arrival.place} of {sender} arrived damaged (checksum {checksum:#x})")
        self._slot.checksum = (self._slot.checksum + checksum) & MASK

    def _land(self, arrival: _Arrival) -> Bytes:
        """Bring the piece's range of the slot to the new version; returns the piece's content."""
        piece = arrival.piece
        if arrival.header.kind is Kind.FULL:
            content = arrival.data
        else:
            content = self._base(arrival)
            delta_apply(content, arrival.data)
            if arrival.data.nbytes <= KEEP_BELOW * piece.nbytes:
                self.payloads[arrival.place] = arrival.data
        if not piece.direct:
            self._scatter(piece, content)
        return content

    def _base(self, arrival: _Arrival) -> Bytes:
        """The piece's content in the version before: in the slot itself, or (packed pieces) gathered."""
        piece = arrival.piece
        if not piece.direct:
            return np.concatenate([self._slot.base(part.image_bytes, part.nbytes) for part in piece.ranges])
        content = self._in_slot(piece)
        if self._kept_lead and arrival.place in self._kept.payloads:
            delta_apply(content, self._kept.payloads[arrival.place])
        else:
            content[:] = self._slot.base(piece.ranges[0].image_bytes, piece.nbytes)
        return content

    def _in_slot(self, piece: Piece) -> Bytes:
        return self._slot.view(piece.ranges[0].image_bytes, piece.nbytes)

    def _scatter(self, piece: Piece, content: Bytes) -> None:
        at = 0
        for part in piece.ranges:
            self._slot.view(part.image_bytes, part.nbytes)[:] = content[at : at + part.nbytes]
            at += part.nbytes

    def _forward(self, data: Bytes, tag: int) -> None:
        if self._next is None:
            return
        self._forwarded.append((self._wire.send(data, self._next, tag), data))
        while len(self._forwarded) > FORWARDING:
            self._wire.wait(self._forwarded.popleft()[0])


def delta_apply(target: Bytes, payload: Bytes) -> None:
    """`delta.apply`; imported late, so that a job without deltas does not need csrc's ops."""
    from staleflow.parameters import delta

    delta.apply(target, payload)
