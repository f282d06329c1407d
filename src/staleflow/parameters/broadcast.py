"""Transport `broadcast`, the trainer rank's end: pieces of the own shard down the chain of relays.

What `landing` says of the order of headers, payloads and checksums is said from the other end.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Sequence
from typing import Any

import numpy as np
import numpy.typing as npt
import torch

from staleflow.parameters.checksum import piece_sum, tensor_sum
from staleflow.parameters.grouped import Grouped
from staleflow.parameters.lane import LANE_AHEAD, Lane
from staleflow.parameters.layout import Piece
from staleflow.parameters.rounds import (
    Header,
    Kind,
    Round,
    decide,
    header_tag,
    payload_tag,
    trainer_row,
)
from staleflow.parameters.staging import Staging, on_stream
from staleflow.parameters.transports import Sent
from staleflow.parameters.wire import InFlight

Bytes = npt.NDArray[np.uint8]
# Messages under way at a time. On the CPU whole pieces are views of the staging buffer; deltas are short, and a relay
# that is held up for a moment should not hold up who encodes them.
IN_FLIGHT, IN_FLIGHT_DELTAS = 8, 32
PINNED = 3  # from a GPU: pieces that lie in a pinned buffer meanwhile


class Broadcast(Grouped):
    """See `transports.Transport`; the members that are no trainer ranks are relays. Arguments as of `Grouped`."""

    def __init__(self, *args: Any, delta: bool = False, **settings: Any) -> None:
        super().__init__(*args, **settings)
        self._previous = Previous() if delta else None

    def push(self, version: int, *, fresh: bool) -> Sent:
        course, staging = self._opened()
        base = self._previous.version if self._previous and not fresh else None
        round_ = decide(self.wire.agree(trainer_row(version, base, fresh)), self.chain, self.wire.names)
        assert round_ is not None
        begin = time.monotonic()
        if self._previous:
            self._previous.begin(staging)
        sent = self._send(course.mine(self._number), round_)
        if self._previous:
            self._previous.version = version
        return Sent(version, time.monotonic() - begin, sent, staging.shard.nbytes)

    def _send(self, pieces: Sequence[tuple[int, Piece]], round_: Round) -> int:
        """All pieces in order; returns the bytes sent."""
        whole = round_.base is None
        flying = InFlight(self.wire, self._most_in_flight(whole))
        if not whole:
            sent = self._send_deltas(pieces, flying)
        elif self._lane is not None:
            sent = self._send_on_lane(self._lane, pieces, flying)
        else:
            sent = self._send_whole(pieces, flying)
        flying.finish()
        return sent

    def _most_in_flight(self, whole: bool) -> int:
        _, staging = self._opened()
        if whole and self._lane is not None:
            return LANE_AHEAD
        if staging.device.type == "cuda":
            return PINNED if whole else 2 * PINNED
        return IN_FLIGHT if whole else IN_FLIGHT_DELTAS

    def _send_whole(self, pieces: Sequence[tuple[int, Piece]], flying: InFlight) -> int:
        """P0 P1 P2 …, then the checksums of all.

        While the snapshot is being copied, pieces are only summed, right behind it: sending beside it would take its
        core away where there are few. Once it is complete all are sent, and those left are summed while they travel.
        """
        _, staging = self._opened()
        sums: list[int] = []
        while not staging.complete and len(sums) < len(pieces):
            piece = pieces[len(sums)][1]
            sums.append(piece_sum(staging.read(piece), piece))
        sent = 0
        for number, (place, piece) in enumerate(pieces):
            content = staging.read(piece)
            sent += self._put_payload(place, content, flying)
            if self._previous:
                self._previous.replace(staging, piece, encode=False)
            if number >= len(sums):
                sums.append(piece_sum(content, piece))
        self._put_sums(sums, flying)
        return sent

    def _send_on_lane(self, lane: Lane, pieces: Sequence[tuple[int, Piece]], flying: InFlight) -> int:
        """P0 P1 P2 … on the lane, then the checksums of all on the wire."""
        _, staging = self._opened()
        sums = []
        for place, piece in pieces:
            content = staging.part(piece)
            flying.add(lane.send(place, content, self.chain.relays[0]))
            with on_stream(staging.stream):
                sums.append(tensor_sum(content, piece))
            if self._previous:
                self._previous.replace(staging, piece, encode=False)
        self._put_sums(sums, flying)
        return sum(piece.nbytes for _, piece in pieces)

    def _put_sums(self, sums: Sequence[int], flying: InFlight) -> None:
        course, _ = self._opened()
        if sums:
            self._put(np.array(sums, np.uint64).view(np.uint8), course.sums_tag(self._number), flying)

    def _send_deltas(self, pieces: Sequence[tuple[int, Piece]], flying: InFlight) -> int:
        """H0 P0 H1 H2 P1 H3 P2 …: a header goes one piece ahead of its payload, so that a buffer is posted in time."""
        ahead: deque[tuple[int, Bytes]] = deque()
        sent = 0
        for k, (place, piece) in enumerate(pieces):
            header, payload = self._encode(piece)
            self._put(header.pack(), header_tag(place), flying)
            ahead.append((place, payload))
            if k != 1:  # the first at once
                sent += self._put_payload(*ahead.popleft(), flying)
        while ahead:
            sent += self._put_payload(*ahead.popleft(), flying)
        return sent

    def _put_payload(self, place: int, payload: Bytes, flying: InFlight) -> int:
        if payload.nbytes:
            self._put(payload, payload_tag(place), flying)
        return payload.nbytes

    def _put(self, data: Bytes, tag: int, flying: InFlight) -> None:
        flying.add(self.wire.send(data, self.chain.relays[0], tag), data)

    def _encode(self, piece: Piece) -> tuple[Header, Bytes]:
        _, staging = self._opened()
        assert self._previous is not None, "without it no round has a base"
        content = staging.read(piece)
        checksum = piece_sum(content, piece)
        payload = self._previous.replace(staging, piece, encode=True)
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
        with on_stream(staging.stream):
            payload = self._delta.encode(new, old) if encode else None
            if payload is None or old.device.type != "cpu":
                old.copy_(new)
            else:
                self._delta.apply(old.numpy(), payload)  # touches a hundredth of the memory
        return payload
