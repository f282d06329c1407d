"""Transport `broadcast`, the trainer rank's end: pieces of the own shard down the chain of relays.

What `landing` says of the order of headers, payloads and checksums is said from the other end.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING

import numpy as np
import numpy.typing as npt
import torch

from staleflow.parameters.checksum import piece_sum
from staleflow.parameters.layout import Piece, Rows
from staleflow.parameters.manifest import Manifest
from staleflow.parameters.rounds import (
    Chain,
    Course,
    Header,
    Kind,
    Round,
    decide,
    end_row,
    handshake,
    header_tag,
    payload_tag,
    trainer_row,
)
from staleflow.parameters.staging import Staging
from staleflow.parameters.transports import Sent
from staleflow.parameters.wire import Message, PeerLostError, Wire

if TYPE_CHECKING:
    from torch.distributed import ProcessGroup

Bytes = npt.NDArray[np.uint8]
# Messages under way at a time. On the CPU whole pieces are views of the staging buffer; deltas are short, and a relay
# that is held up for a moment should not hold up who encodes them.
IN_FLIGHT, IN_FLIGHT_DELTAS = 8, 32
PINNED = 3  # from a GPU: pieces that lie in a pinned buffer meanwhile


class Broadcast:
    """See `transports.Transport`. `trainers` are the group ranks of the trainer ranks; the others are relays."""

    def __init__(
        self,
        group: ProcessGroup,
        manifest: Manifest,
        trainers: Sequence[int],
        bucket_bytes: int,
        *,
        delta: bool = False,
        names: Sequence[str] = (),
        timeout_s: float = 60.0,
        on_lost: Callable[[PeerLostError], None] = lambda error: None,
    ) -> None:
        self.manifest = manifest
        self.bucket_bytes = bucket_bytes
        self.chain = Chain.of(group.size(), trainers)
        self.wire = Wire(group, names, timeout_s, on_lost)
        self._number = self.chain.trainers.index(self.wire.rank)
        self._course: Course | None = None
        self._staging: Staging | None = None
        self._previous = Previous() if delta else None
        self._flying: deque[Message] = deque()
        self._limit = IN_FLIGHT

    def open(self, rows: tuple[Rows, ...], staging: Staging) -> None:
        self._staging = staging
        self._course = handshake(self.wire, self.chain, self.manifest, rows, self.bucket_bytes)

    def push(self, version: int, *, fresh: bool) -> Sent:
        assert self._course is not None and self._staging is not None, "open() comes first"
        base = self._previous.version if self._previous and not fresh else None
        round_ = decide(self.wire.agree(trainer_row(version, base, fresh)), self.chain, self.wire.names)
        assert round_ is not None
        begin = time.monotonic()
        if self._previous:
            self._previous.begin(self._staging)
        sent = self._send(self._course.mine(self._number), round_)
        if self._previous:
            self._previous.version = version
        return Sent(version, time.monotonic() - begin, sent, self._staging.shard.nbytes)

    def stop(self) -> None:
        self.wire.stop()

    def break_off(self) -> None:
        self.wire.break_off()

    def close(self) -> None:
        if self._course is not None:
            self.wire.agree(end_row())
        self.wire.stop()

    def _send(self, pieces: Sequence[tuple[int, Piece]], round_: Round) -> int:
        """All pieces in order; returns the bytes sent."""
        assert self._staging is not None
        whole = round_.base is None
        if self._staging.device.type == "cuda":
            self._limit = PINNED if whole else 2 * PINNED
        else:
            self._limit = IN_FLIGHT if whole else IN_FLIGHT_DELTAS
        sent = self._send_whole(pieces) if whole else self._send_deltas(pieces)
        while self._flying:
            self.wire.wait(self._flying.popleft())
        return sent

    def _send_whole(self, pieces: Sequence[tuple[int, Piece]]) -> int:
        """P0 P1 P2 …, then the checksums of all.

        On the CPU all pieces are summed first, right behind the snapshot: that takes a core little, and sending beside
        the snapshot would take its core away where there are few. From a GPU a piece is summed while it travels.
        """
        assert self._staging is not None and self._course is not None
        on_cpu = self._staging.device.type != "cuda"
        sums = [piece_sum(self._staging.read(piece), piece) for _, piece in pieces] if on_cpu else []
        sent = 0
        for place, piece in pieces:
            content = self._staging.read(piece)
            sent += self._put_payload(place, content)
            if self._previous:
                self._previous.replace(self._staging, piece, encode=False)
            if not on_cpu:
                sums.append(piece_sum(content, piece))
        if pieces:
            self._put(np.array(sums, np.uint64).view(np.uint8), self._course.sums_tag(self._number))
        return sent

    def _send_deltas(self, pieces: Sequence[tuple[int, Piece]]) -> int:
        """H0 P0 H1 H2 P1 H3 P2 …: a header goes one piece ahead of its payload, so that a buffer is posted in time."""
        ahead: deque[tuple[int, Bytes]] = deque()
        sent = 0
        for k, (place, piece) in enumerate(pieces):
            header, payload = self._encode(piece)
            self._put(header.pack(), header_tag(place))
            ahead.append((place, payload))
            if k != 1:  # the first at once
                sent += self._put_payload(*ahead.popleft())
        while ahead:
            sent += self._put_payload(*ahead.popleft())
        return sent

    def _put_payload(self, place: int, payload: Bytes) -> int:
        if payload.nbytes:
            self._put(payload, payload_tag(place))
        return payload.nbytes

    def _put(self, data: Bytes, tag: int) -> None:
        """Begin to send; wait for the oldest message when many are on their way."""
        self._flying.append(self.wire.send(data, self.chain.relays[0], tag))
        while len(self._flying) > self._limit:
            self.wire.wait(self._flying.popleft())

    def _encode(self, piece: Piece) -> tuple[Header, Bytes]:
        assert self._staging is not None and self._previous is not None
        content = self._staging.read(piece)
        checksum = piece_sum(content, piece)
        payload = self._previous.replace(self._staging, piece, encode=True)
        if payload is None:
            return Header(Kind.FULL, content.nbytes, checksum), content
        return Header(Kind.DELTA, payload.nbytes, checksum), payload


class Previous:
    """The shard as it was published last, which deltas are made against: one more shard of memory."""

    def __init__(self) -> None:
        from staleflow.parameters import delta  # only here: a job without deltas does not need csrc's ops

        self._delta = delta
        self.version: int | None = None  # None: not whole, or nothing published yet
        self._data: torch.Tensor | None = None

    def begin(self, staging: Staging) -> None:
        """A push begins: until it is through, this image is a mixture."""
        self.version = None
        if self._data is None:
            self._data = torch.empty_like(staging.data)

    def replace(self, staging: Staging, piece: Piece, *, encode: bool) -> Bytes | None:
        """Bring a piece to the staged version; the delta if one was wanted and pays."""
        assert self._data is not None, "begin() comes first"
        part = slice(piece.staging_bytes, piece.staging_bytes + piece.nbytes)
        new, old = staging.data[part], self._data[part]
        payload = self._delta.encode(new, old) if encode else None
        if payload is None or old.device.type != "cpu":
            old.copy_(new)
        else:
            self._delta.apply(old.numpy(), payload)  # touches a hundredth of the memory
        return payload
