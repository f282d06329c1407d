"""One version on its way from the wire into a slot of the store, and on to the next relay of the chain."""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass, field

import numpy as np
import numpy.typing as npt
import torch

from staleflow.parameters.checksum import MASK, piece_sum
from staleflow.parameters.lane import LANE_AHEAD, Lane
from staleflow.parameters.layout import Piece
from staleflow.parameters.rounds import Chain, Course, Header, Kind, header_tag, payload_tag
from staleflow.parameters.store import Slot
from staleflow.parameters.wire import InFlight, Message, Wire

Bytes = npt.NDArray[np.uint8]
AHEAD = 16  # pieces that are posted: most land in the slot itself, the packed ones are small
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
    """A piece on its way in. `data` is where the payload lands: the slot itself, or a buffer."""

    place: int
    trainer: int
    piece: Piece
    header_data: Bytes | None = None  # in a round of deltas
    header_message: Message | None = None
    header: Header | None = None
    data: Bytes | None = None
    on_device: torch.Tensor | None = None  # with a lane: where it arrives before it is copied to `data`
    payload_message: Message | None = None


class Landing:
    """Receives one version into `slot`; `whole` when the round has no deltas; `kept` are the deltas of the last push.

    Without deltas all sizes are known, so payloads are posted well ahead and stream by themselves, and the checksums
    come last, one message from each trainer. With deltas a header goes before each payload and says how long it is.
    Either way the slot is complete only when every piece has been compared with its trainer's checksum. With a `lane`
    whole pieces arrive on the device, are passed on from there, and are copied into the slot.
    """

    def __init__(
        self,
        wire: Wire,
        chain: Chain,
        course: Course,
        slot: Slot,
        kept: Deltas,
        *,
        whole: bool,
        lane: Lane | None = None,
    ) -> None:
        self._lane, self._ahead = lane, AHEAD if lane is None else LANE_AHEAD
        self._wire, self._chain, self._course, self._slot, self._kept = wire, chain, course, slot, kept
        self._whole = whole
        self._next = chain.after(wire.rank)
        self._forwarded = InFlight(wire, 2 * self._ahead)
        self._kept_lead = kept.lead(slot)
        self._sums: dict[int, int] = {}  # of the landed pieces, by place, until their trainer's have arrived
        self.payloads: dict[int, Bytes] = {}

    def run(self) -> None:
        """Receive pieces while the one before is stored and passed on. Raises PeerLostError, CorruptPieceError."""
        count = len(self._course.steps)
        promised = self._expect_sums() if self._whole else {}
        window = deque(self._expect(place) for place in range(min(self._ahead, count)))
        previous: _Arrival | None = None
        for place in range(count):
            if not self._whole:
                self._read_header(window[0])
            if previous is not None:
                self._finish(previous)
            previous = window.popleft()
            if place + self._ahead < count:
                window.append(self._expect(place + self._ahead))
        if previous is not None:
            self._finish(previous)
        for trainer, (data, message) in promised.items():
            self._compare(trainer, data, message)
        self._forwarded.finish()

    def _source(self, place: int) -> int:
        return self._chain.before(self._wire.rank, self._course.steps[place][0])

    def _expect(self, place: int) -> _Arrival:
        trainer, piece = self._course.steps[place]
        arrival = _Arrival(place, trainer, piece)
        if self._whole:
            self._post_payload(arrival, piece.nbytes, lands=piece.direct)
        else:
            arrival.header_data = np.empty(Header.NBYTES, np.uint8)
            arrival.header_message = self._wire.receive(arrival.header_data, self._source(place), header_tag(place))
        return arrival

    def _expect_sums(self) -> dict[int, tuple[Bytes, Message]]:
        """Post the last message of each trainer that has pieces, by its number."""
        promised = {}
        for trainer in range(len(self._chain.trainers)):
            if mine := self._course.mine(trainer):
                data = np.empty(8 * len(mine), np.uint8)
                source = self._chain.before(self._wire.rank, trainer)
                promised[trainer] = data, self._wire.receive(data, source, self._course.sums_tag(trainer))
        return promised

    def _compare(self, trainer: int, data: Bytes, message: Message) -> None:
        """Wait for a trainer's checksums, pass them on, and compare them with those of what has landed."""
        self._wire.wait(message)
        self._forward(data, self._course.sums_tag(trainer))
        for (place, _), wanted in zip(self._course.mine(trainer), data.view(np.uint64), strict=True):
            self._require(trainer, place, self._sums[place], int(wanted))

    def _require(self, trainer: int, place: int, found: int, wanted: int) -> None:
        if found != wanted:
            sender = self._wire.names[self._chain.trainers[trainer]]
            raise CorruptPieceError(f"piece {place} of {sender} arrived damaged (checksum {found:#x})")

    def _read_header(self, arrival: _Arrival) -> None:
        """Wait for it, pass it on, and post a buffer for the payload."""
        assert arrival.header_message is not None and arrival.header_data is not None
        self._wire.wait(arrival.header_message)
        self._forward(arrival.header_data, header_tag(arrival.place))
        header = arrival.header = Header.unpack(arrival.header_data)
        self._post_payload(arrival, header.nbytes, lands=header.kind is Kind.FULL and arrival.piece.direct)

    def _post_payload(self, arrival: _Arrival, nbytes: int, *, lands: bool) -> None:
        arrival.data = self._in_slot(arrival.piece) if lands else np.empty(nbytes, np.uint8)
        source = self._source(arrival.place)
        if self._lane is not None:
            arrival.on_device, arrival.payload_message = self._lane.receive(arrival.place, nbytes, source)
        elif nbytes:
            arrival.payload_message = self._wire.receive(arrival.data, source, payload_tag(arrival.place))

    def _finish(self, arrival: _Arrival) -> None:
        assert arrival.data is not None
        if arrival.payload_message is not None:
            self._wire.wait(arrival.payload_message)
            self._pass_on(arrival, arrival.data)
        kind = arrival.header.kind if arrival.header else Kind.FULL
        checksum = piece_sum(self._land(arrival, arrival.data, kind), arrival.piece)
        if arrival.header:
            self._require(arrival.trainer, arrival.place, checksum, arrival.header.checksum)
        else:
            self._sums[arrival.place] = checksum
        self._slot.checksum = (self._slot.checksum + checksum) & MASK

    def _land(self, arrival: _Arrival, data: Bytes, kind: Kind) -> Bytes:
        """Bring the piece's range of the slot to the new version; returns the piece's content."""
        piece, content = arrival.piece, data
        if kind is Kind.DELTA:
            content = self._base(arrival)
            delta_apply(content, data)
            if data.nbytes <= KEEP_BELOW * piece.nbytes:
                self.payloads[arrival.place] = data
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

    def _pass_on(self, arrival: _Arrival, data: Bytes) -> None:
        """To the next relay; what has arrived on the device is brought to host memory beside that."""
        if arrival.on_device is None:
            self._forward(data, payload_tag(arrival.place))
            return
        assert self._lane is not None
        if self._next is not None:
            self._forwarded.add(self._lane.send(arrival.place, arrival.on_device, self._next))
        torch.from_numpy(data).copy_(arrival.on_device)

    def _forward(self, data: Bytes, tag: int) -> None:
        if self._next is not None:
            self._forwarded.add(self._wire.send(data, self._next, tag), data)


def delta_apply(target: Bytes, payload: Bytes) -> None:
    """`delta.apply`; imported late, so that a job without deltas does not need csrc's ops."""
    from staleflow.parameters import delta

    delta.apply(target, payload)
