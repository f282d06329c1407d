"""Transport `direct`: trainers and the instances that pull together in one group, with nothing stored in between.

Every version is pulled by every instance of the group, in order: a push lasts until all have taken it, and nothing is
stored. All pieces go in the order of the image. Where every member has a GPU of its own, each goes from GPU to GPU
(`lane`), from the trainer rank that holds it to the first rollout rank, and so on down the chain. Otherwise that
trainer rank broadcasts it from and into host memory: out of a GPU through pinned buffers, and into one tensor by
tensor, as the engine loads them.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING

import numpy as np
import torch

from staleflow.parameters.grouped import Grouped
from staleflow.parameters.lane import LANE_AHEAD, Lane, LaneOffer, open_lane
from staleflow.parameters.layout import Piece, Range
from staleflow.parameters.manifest import Entry, Manifest
from staleflow.parameters.rounds import Chain, Course, decide, handshake, relay_row, trainer_row
from staleflow.parameters.staging import Staging
from staleflow.parameters.store import StoreError
from staleflow.parameters.transports import Sent
from staleflow.parameters.wire import Agreement, InFlight, Message, Wire

if TYPE_CHECKING:
    from torch.distributed import ProcessGroup


class Direct(Grouped):
    """The trainer rank's end (`transports.Transport`); the members that are no trainer ranks are rollout ranks."""

    def push(self, version: int, *, fresh: bool) -> Sent:
        course, staging = self._opened()
        decide(self.wire.agree(trainer_row(version, None, fresh)), self.chain, self.wire.names)
        begin = time.monotonic()
        if self._lane is None:
            self._broadcast(course, staging)
        else:
            self._send(self._lane, course, staging)
        sent = sum(piece.nbytes for _, piece in course.mine(self._number))
        return Sent(version, time.monotonic() - begin, sent, staging.shard.nbytes)

    def _broadcast(self, course: Course, staging: Staging) -> None:
        """All pieces, with all members."""
        for _, (trainer, piece) in in_image_order(course):
            data = staging.read(piece) if trainer == self._number else np.empty(piece.nbytes, np.uint8)
            self.wire.broadcast(data, self.chain.trainers[trainer])

    def _send(self, lane: Lane, course: Course, staging: Staging) -> None:
        """Its own pieces, to the first rollout rank, which passes them on."""
        flying = InFlight(self.wire, LANE_AHEAD)
        for place, (trainer, piece) in in_image_order(course):
            if trainer == self._number:
                flying.add(lane.send(place, staging.part(piece), self.chain.relays[0]))
        flying.finish()


class DirectSource:
    """The rollout rank's end: a source for `pull.Puller`. All its calls come from the rank's main thread."""

    def __init__(
        self,
        group: ProcessGroup,
        manifest: Manifest,
        trainers: Sequence[int],
        *,
        names: Sequence[str] = (),
        timeout_s: float = 60.0,
        offer: LaneOffer | None = None,
    ) -> None:
        self.manifest = manifest
        self._offer = offer
        self._lane: Lane | None = None
        self._chain = Chain.of(group.size(), trainers)
        self._wire = Wire(group, names, timeout_s)
        self._course: Course | None = None
        self._agreement: Agreement | None = None
        self._offered: int | None = None
        self._last: int | None = None

    def newest(self) -> int | None:
        """The version that the trainers offer now; None while they have none (waits a moment for one)."""
        if self._course is None:
            self._course = handshake(self._wire, self._chain, self.manifest, None, 0, self._offer)
            self._lane = open_lane(self._offer, self._wire, self._chain, self._course)
        if self._offered is None:
            self._offered = self._poll()
        return self._offered

    def read(self, version_min: int = 0, *, exactly: int | None = None) -> DirectReading:
        """Begin to receive the offered version. StoreError when none, or another one, is offered."""
        version = self._offered
        if version is None or version < version_min or (exactly is not None and version != exactly):
            raise StoreError(f"the trainers offer version {version}, not {version_min if exactly is None else exactly}")
        return DirectReading(self, version)

    def close(self) -> None:
        self._wire.break_off()
        if self._lane is not None:
            self._lane.close()

    def _poll(self) -> int | None:
        if self._agreement is None:
            self._agreement = self._wire.enter(relay_row(self._last))
        rows = self._wire.poll(self._agreement)
        if rows is None:
            return None
        self._agreement = None
        offer = decide(rows, self._chain, self._wire.names)
        if offer is None:
            raise StoreError("the trainers have ended: no further version is coming")
        return offer.version

    def _receive(self) -> Iterator[tuple[str, torch.Tensor]]:
        assert self._course is not None, "newest() comes first"
        assembly = _Assembly(self.manifest)
        arriving = self._from_broadcasts(self._course) if self._lane is None else self._from(self._lane, self._course)
        for piece, data in arriving:
            yield from assembly.add(piece, data)
        self._last, self._offered = self._offered, None

    def _from_broadcasts(self, course: Course) -> Iterator[tuple[Piece, torch.Tensor]]:
        for _, (trainer, piece) in in_image_order(course):
            data = np.empty(piece.nbytes, np.uint8)
            self._wire.broadcast(data, self._chain.trainers[trainer])
            yield piece, torch.from_numpy(data)

    def _from(self, lane: Lane, course: Course) -> Iterator[tuple[Piece, torch.Tensor]]:
        """Pieces from the member before, each passed on to the one behind."""
        me, behind = self._wire.rank, self._chain.after(self._wire.rank)
        steps = in_image_order(course)
        arriving: deque[tuple[torch.Tensor, Message]] = deque()
        passed_on = InFlight(self._wire, LANE_AHEAD)
        for at, (place, (_, piece)) in enumerate(steps):
            for ahead, (trainer, its_piece) in steps[at + len(arriving) : at + LANE_AHEAD]:
                arriving.append(lane.receive(ahead, its_piece.nbytes, self._chain.before(me, trainer)))
            data, message = arriving.popleft()
            self._wire.wait(message)
            if behind is not None:
                passed_on.add(lane.send(place, data, behind))
            yield piece, data
        passed_on.finish()


class DirectReading:
    """One offered version. `tensors` must be consumed to its end: all members of the group take part in it."""

    def __init__(self, source: DirectSource, version: int) -> None:
        self._source = source
        self.version = version

    def tensors(self) -> Iterator[tuple[str, torch.Tensor]]:
        """(name, tensor), each as soon as all its rows are there: memory of its own, with a lane on the device."""
        return self._source._receive()

    def valid(self) -> bool:
        """Nobody overwrites what was received: whole once it has been received to the end."""
        return self._source._last == self.version


class _Assembly:
    """Puts tensors together from pieces that arrive in the order of the image."""

    def __init__(self, manifest: Manifest) -> None:
        self._entries = manifest.entries
        self._open: dict[int, tuple[torch.Tensor, int]] = {}  # entry -> (its bytes, how many are still missing)

    def add(self, piece: Piece, data: torch.Tensor) -> Iterator[tuple[str, torch.Tensor]]:
        at = 0
        for part in piece.ranges:
            for index, entry in self._touched(part):
                whole = self._fill(index, entry, part, data[at : at + part.nbytes])
                if whole is not None:
                    yield entry.name, whole.view(getattr(torch, entry.dtype)).view(entry.shape)
            at += part.nbytes

    def _fill(self, index: int, entry: Entry, part: Range, data: torch.Tensor) -> torch.Tensor | None:
        """Take the bytes of `entry` out of a range; the whole tensor's bytes when none is missing any more."""
        begin = max(entry.offset_bytes, part.image_bytes)
        end = min(entry.offset_bytes + entry.nbytes, part.image_end)
        arrived = data[begin - part.image_bytes : end - part.image_bytes]
        if end - begin == entry.nbytes:
            return arrived
        if index not in self._open:
            self._open[index] = data.new_empty(entry.nbytes), entry.nbytes
        whole, missing = self._open.pop(index)
        whole[begin - entry.offset_bytes : end - entry.offset_bytes] = arrived
        if missing == end - begin:
            return whole
        self._open[index] = whole, missing - (end - begin)
        return None

    def _touched(self, part: Range) -> Iterator[tuple[int, Entry]]:
        for index, entry in enumerate(self._entries):
            if entry.offset_bytes < part.image_end and entry.offset_bytes + entry.nbytes > part.image_bytes:
                yield index, entry


def in_image_order(course: Course) -> list[tuple[int, tuple[int, Piece]]]:
    """(place, (trainer, piece)), so that the rows of a tensor follow each other closely and few are open at a time."""
    return sorted(enumerate(course.steps), key=lambda step: step[1][1].ranges[0].image_bytes)
