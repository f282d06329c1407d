"""Transport `broadcast`, the trainer rank's end: pieces of the own shard down the chain of relays.

Order of messages: H0 H1 P0 H2 P1 H3 … A header is always one piece ahead of its payload, so that the receiver has
posted its buffer before the payload is offered, and the next piece is read and summed while this one travels.
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
from staleflow.parameters.rounds import Chain, Course, Header, Kind, Round, decide, end_row, handshake, trainer_row
from staleflow.parameters.staging import Staging
from staleflow.parameters.transports import Sent
from staleflow.parameters.wire import Message, PeerLostError, Wire

if TYPE_CHECKING:
    from torch.distributed import ProcessGroup

Bytes = npt.NDArray[np.uint8]
IN_FLIGHT = 2


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
        first = self.chain.relays[0]
        ahead: deque[tuple[int, Bytes]] = deque()
        flying: deque[Message] = deque()
        sent = 0
        for k in range(len(pieces) + 1):
            if k < len(pieces):
                place, piece = pieces[k]
                header, payload = self._prepare(piece, delta=round_.base is not None)
                flying.append(self.wire.send(header.pack(), first, 2 * place))
                ahead.append((place, payload))
            if k >= 1:
                place, payload = ahead.popleft()
            if k >= 1 and payload.nbytes:
                flying.append(self.wire.send(payload, first, 2 * place + 1))
                sent += payload.nbytes
            while len(flying) > 2 * IN_FLIGHT:
                self.wire.wait(flying.popleft())
        for message in flying:
            self.wire.wait(message)
        return sent

    def _prepare(self, piece: Piece, *, delta: bool) -> tuple[Header, Bytes]:
        assert self._staging is not None
        content = self._staging.read(piece)
        checksum = piece_sum(content, piece)
        payload = self._previous.replace(self._staging, piece, encode=delta) if self._previous else None
        if payload is None:
            return Header(Kind.FULL, content.nbytes, checksum), content
        return Header(Kind.DELTA, payload.nbytes, checksum), payload


class Previous:
    """The shard as it was published last, which deltas are made against: one more shard of memory."""

    def __init__(self) -> None:
        self.version: int | None = None  # None: not whole, or nothing published yet
        self._data: torch.Tensor | None = None

    def begin(self, staging: Staging) -> None:
        """A push begins: until it is through, this image is a mixture."""
        self.version = None
        if self._data is None:
            self._data = torch.empty_like(staging.data)

    def replace(self, staging: Staging, piece: Piece, *, encode: bool) -> Bytes | None:
        """Bring a piece to the staged version; the delta if one was wanted and pays."""
        from staleflow.parameters import delta

        assert self._data is not None, "begin() comes first"
        part = slice(piece.staging_bytes, piece.staging_bytes + piece.nbytes)
        payload = delta.encode(staging.data[part], self._data[part]) if encode else None
        if payload is None or self._data.device.type != "cpu":
            self._data[part].copy_(staging.data[part])
        else:
            delta.apply(self._data[part].numpy(), payload)  # touches a hundredth of the memory
        return payload
