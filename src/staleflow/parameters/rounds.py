"""The words of the publish protocol that trainers and relays share.

handshake, once      every member says its manifest's digest and its GPU, and trainers how they cut the model; each
                     trainer's rows are then broadcast. Relays refuse to start unless the rows make up the whole model.
round, per version   agreement: trainers say (PUSH, version), relays (READY, the version they hold). Everybody decides
                     the same from the same rows. Then the pieces, in the order of `layout.schedule`, run down the
                     chain: trainer -> first relay -> second relay -> …  In a round of whole pieces each is one message,
                     and one last message of each trainer carries the checksums of all its pieces; in a round of deltas
                     each has a header, with its length and checksum, and a payload unless that is empty.
end                  trainers say END in an agreement.

A chain, not a tree: with pieces under way on every link at once each link carries the model once, and the trainer's
link too, however many nodes there are.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass
from enum import IntEnum

import numpy as np

from staleflow.parameters.lane import LaneOffer, agreed_on
from staleflow.parameters.layout import Piece, Rows, Shard, pieces_of, require_complete, schedule, shard_of
from staleflow.parameters.manifest import Manifest
from staleflow.parameters.wire import ROW_WORDS, Wire

NONE = -1


class Say(IntEnum):
    """First word of a member's row in an agreement."""

    PUSH = 1
    READY = 2
    END = 3


class Kind(IntEnum):
    """First word of a piece's header."""

    FULL = 0
    DELTA = 1


@dataclass(frozen=True)
class Header:
    """Precedes a payload in a round of deltas. `checksum`: the piece's content summed where it lies in the image."""

    kind: Kind
    nbytes: int
    checksum: int

    def pack(self) -> np.ndarray:
        return np.array([self.kind, self.nbytes, self.checksum, 0], dtype=np.uint64).view(np.uint8)

    @classmethod
    def unpack(cls, data: np.ndarray) -> Header:
        kind, nbytes, checksum, _ = (int(word) for word in data.view(np.uint64))
        return cls(Kind(kind), nbytes, checksum)

    NBYTES = 32


@dataclass(frozen=True)
class Chain:
    """Who sends to whom, in group ranks."""

    trainers: tuple[int, ...]
    relays: tuple[int, ...]

    @classmethod
    def of(cls, size: int, trainers: Sequence[int]) -> Chain:
        relays = tuple(rank for rank in range(size) if rank not in trainers)
        if not trainers or not relays or any(not 0 <= rank < size for rank in trainers):
            raise ValueError(f"publish group of {size} with trainers {list(trainers)}: it needs a trainer and a relay")
        return cls(tuple(trainers), relays)

    def before(self, relay: int, trainer: int) -> int:
        """From whom `relay` gets the pieces of trainer number `trainer`."""
        place = self.relays.index(relay)
        return self.relays[place - 1] if place else self.trainers[trainer]

    def after(self, relay: int) -> int | None:
        """To whom `relay` passes them on; None for the last."""
        place = self.relays.index(relay) + 1
        return self.relays[place] if place < len(self.relays) else None


@dataclass(frozen=True)
class Course:
    """What the handshake fixed: the pieces of a version, in order, each with its trainer's number.

    `lane`: whether whole pieces go from GPU to GPU (`lane`).
    """

    shards: tuple[Shard, ...]
    steps: tuple[tuple[int, Piece], ...]
    lane: bool = False

    def mine(self, trainer: int) -> list[tuple[int, Piece]]:
        """(place in the order, piece) of one trainer."""
        return [(place, piece) for place, (t, piece) in enumerate(self.steps) if t == trainer]

    def sums_tag(self, trainer: int) -> int:
        """Tag of the message with the checksums of trainer number `trainer` (uint64, one a piece, in order)."""
        return 2 * len(self.steps) + trainer

    def word_tag(self, place: int) -> int:
        """Tag of a receiver's word that it has begun to receive a piece on the lane."""
        return 2 * len(self.steps) + len(self.shards) + place


def header_tag(place: int) -> int:
    return 2 * place


def payload_tag(place: int) -> int:
    return 2 * place + 1


def handshake(
    wire: Wire,
    chain: Chain,
    manifest: Manifest,
    rows: Sequence[Rows] | None,
    bucket_bytes: int,
    offer: LaneOffer | None = None,
) -> Course:
    """Exchange the cut of the model (`rows` of a trainer, None from a relay). The first collective of the group."""
    text = json.dumps([[r.entry, r.first, r.count] for r in rows or ()]).encode()
    digest = int(manifest.digest[:15], 16)
    said = wire.agree([digest, len(text), bucket_bytes, offer.device_id if offer else 0])
    for name, row in zip(wire.names, said, strict=True):
        if row[0] != digest:
            raise ValueError(f"{name} has another model (names, shapes or dtype) than {wire.names[wire.rank]}")
    shards = []
    for rank in chain.trainers:
        data = np.frombuffer(text, np.uint8).copy() if rank == wire.rank else np.zeros(said[rank][1], np.uint8)
        wire.broadcast(data, rank)
        shards.append(shard_of(manifest, [Rows(*part) for part in json.loads(data.tobytes())]))
    require_complete(manifest, shards)
    bucket = said[chain.trainers[0]][2]
    steps = schedule([pieces_of(shard, bucket) for shard in shards])
    return Course(tuple(shards), steps, agreed_on([row[3] for row in said]))


@dataclass(frozen=True)
class Round:
    """What an agreement decided: push `version`, as a difference to `base` if every member has it."""

    version: int
    base: int | None
    fresh: bool  # the first push of these trainers: versions >= it, made by earlier ones, are void


def trainer_row(version: int, base: int | None, fresh: bool) -> list[int]:
    return [Say.PUSH, version, NONE if base is None else base, int(fresh)]


def relay_row(holds: int | None) -> list[int]:
    return [Say.READY, NONE if holds is None else holds]


def end_row() -> list[int]:
    return [Say.END]


def decide(rows: Sequence[Sequence[int]], chain: Chain, names: Sequence[str]) -> Round | None:
    """The same decision on all members from the same rows; None: the trainers end. ValueError when they disagree."""
    assert all(len(row) == ROW_WORDS for row in rows)
    said = [rows[rank] for rank in chain.trainers]
    if all(row[0] == Say.END for row in said):
        return None
    if any(row[:4] != said[0][:4] for row in said):
        told = ", ".join(f"{names[r]}: {Say(rows[r][0]).name} {rows[r][1]}" for r in chain.trainers)
        raise ValueError(f"the trainer ranks do not publish the same version ({told})")
    version, base, fresh = said[0][1], said[0][2], bool(said[0][3])
    shared = base != NONE and all(rows[rank][1] == base for rank in chain.relays)
    return Round(version, base if shared else None, fresh)
