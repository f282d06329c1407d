"""Transport `direct`: trainers and the instances that pull together in one group, with nothing stored in between.

Every version is pulled by every instance of the group, in order: a push lasts until all have taken it, and nothing is
stored. All pieces are broadcast in the order of the image, each by the trainer rank that holds it, from and into host
memory: from a GPU they come through pinned buffers, into one they go tensor by tensor as the engine loads them.
"""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING

import numpy as np
import torch

from staleflow.parameters.layout import Piece, Range, Rows
from staleflow.parameters.manifest import Entry, Manifest
from staleflow.parameters.rounds import Chain, Course, decide, end_row, handshake, relay_row, trainer_row
from staleflow.parameters.staging import Staging
from staleflow.parameters.store import StoreError
from staleflow.parameters.transports import Sent
from staleflow.parameters.wire import Agreement, Wire

if TYPE_CHECKING:
    from torch.distributed import ProcessGroup


class Direct:
    """The trainer rank's end (`transports.Transport`). `trainers` are group ranks; all others are rollout ranks."""

    def __init__(
        self,
        group: ProcessGroup,
        manifest: Manifest,
        trainers: Sequence[int],
        bucket_bytes: int,
        *,
        names: Sequence[str] = (),
        timeout_s: float = 60.0,
    ) -> None:
        self.manifest, self.bucket_bytes = manifest, bucket_bytes
        self.chain = Chain.of(group.size(), trainers)
        self.wire = Wire(group, names, timeout_s)
        self._course: Course | None = None
        self._staging: Staging | None = None

    def open(self, rows: tuple[Rows, ...], staging: Staging) -> None:
        self._staging = staging
        self._course = handshake(self.wire, self.chain, self.manifest, rows, self.bucket_bytes)

    def push(self, version: int, *, fresh: bool) -> Sent:
        assert self._course is not None and self._staging is not None, "open() comes first"
        decide(self.wire.agree(trainer_row(version, None, fresh)), self.chain, self.wire.names)
        begin, sent = time.monotonic(), 0
        for trainer, piece in in_image_order(self._course):
            root = self.chain.trainers[trainer]
            if root == self.wire.rank:
                data = self._staging.read(piece)
                sent += piece.nbytes
            else:
                data = np.empty(piece.nbytes, np.uint8)
            self.wire.broadcast(data, root)
        return Sent(version, time.monotonic() - begin, sent, self._staging.shard.nbytes)

    def stop(self) -> None:
        self.wire.stop()

    def break_off(self) -> None:
        self.wire.break_off()

    def close(self) -> None:
        if self._course is not None:
            self.wire.agree(end_row())
        self.wire.stop()


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
    ) -> None:
        self.manifest = manifest
        self._chain = Chain.of(group.size(), trainers)
        self._wire = Wire(group, names, timeout_s)
        self._course: Course | None = None
        self._agreement: Agreement | None = None
        self._offered: int | None = None
        self._last: int | None = None

    def newest(self) -> int | None:
        """The version that the trainers offer now; None while they have none (waits a moment for one)."""
        if self._course is None:
            self._course = handshake(self._wire, self._chain, self.manifest, None, 0)
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
        for trainer, piece in in_image_order(self._course):
            data = np.empty(piece.nbytes, np.uint8)
            self._wire.broadcast(data, self._chain.trainers[trainer])
            yield from assembly.add(piece, torch.from_numpy(data))
        self._last, self._offered = self._offered, None


class DirectReading:
    """One offered version. `tensors` must be consumed to its end: all members of the group take part in it."""

    def __init__(self, source: DirectSource, version: int) -> None:
        self._source = source
        self.version = version

    def tensors(self) -> Iterator[tuple[str, torch.Tensor]]:
        """(name, CPU tensor), each as soon as all its rows are there; memory of its own."""
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
            self._open[index] = torch.empty(entry.nbytes, dtype=torch.uint8), entry.nbytes
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


def in_image_order(course: Course) -> list[tuple[int, Piece]]:
    """(trainer, piece), so that the rows of a tensor follow each other closely and few tensors are open at a time."""
    return sorted(course.steps, key=lambda step: step[1].ranges[0].image_bytes)
