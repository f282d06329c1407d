"""Which trainer rank sends which bytes: shards, and the pieces in which they travel. Pure: no torch, no network.

FSDP2 shards along dimension 0, so a trainer rank's part of a tensor is a run of rows and lands as one contiguous
range of the image. A rank's parts lie one behind the other in its staging buffer; a *piece* is a run of that buffer
that travels as one message.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass

from staleflow.parameters.manifest import Manifest, aligned

PIECES = 32
FINEST_BYTES = 8 << 20
PACKED_BYTES = 4 << 20  # at most, in one message of short ranges
DIRECT_BYTES = 1 << 20  # a range at least this long travels alone and lands without a copy; shorter ones are packed


@dataclass(frozen=True)
class Rows:
    """A trainer rank's part of the tensor `entry` (index in the manifest): `count` rows from `first`."""

    entry: int
    first: int
    count: int


@dataclass(frozen=True)
class Range:
    """`nbytes` that lie at `staging_bytes` of the staging buffer and belong at `image_bytes` of the image."""

    staging_bytes: int
    image_bytes: int
    nbytes: int

    @property
    def image_end(self) -> int:
        return self.image_bytes + self.nbytes


@dataclass(frozen=True)
class Piece:
    """One message: `nbytes` of the staging buffer from `staging_bytes`, made of `ranges` (in order, gapless)."""

    ranges: tuple[Range, ...]

    @property
    def staging_bytes(self) -> int:
        return self.ranges[0].staging_bytes

    @property
    def nbytes(self) -> int:
        return sum(r.nbytes for r in self.ranges)

    @property
    def direct(self) -> bool:
        """It is one range of the image: it lands without a copy."""
        return len(self.ranges) == 1


@dataclass(frozen=True)
class Shard:
    """All that one trainer rank sends, in the order of the image."""

    rows: tuple[Rows, ...]
    ranges: tuple[Range, ...]  # neighbours merged
    staging_offsets: tuple[int, ...]  # where each of `rows` lies in the staging buffer

    @property
    def nbytes(self) -> int:
        """Size of the staging buffer."""
        return self.ranges[-1].staging_bytes + self.ranges[-1].nbytes if self.ranges else 0


def shard_of(manifest: Manifest, rows: Iterable[Rows]) -> Shard:
    """Place rows in the image and in the staging buffer; runs that touch in the image become one range.

    The alignment gap between two tensors (always zero) counts as touching, so that with one trainer rank the whole
    image is one range.
    """
    ordered = tuple(
        sorted((r for r in rows if r.count), key=lambda r: (manifest.entries[r.entry].offset_bytes, r.first))
    )
    ranges: list[Range] = []
    offsets: list[int] = []
    staging = 0
    padded_end = -1  # where the next tensor begins, if the last part reached the end of its own
    for part in ordered:
        entry = manifest.entries[part.entry]
        begin = entry.offset_bytes + part.first * entry.row_bytes
        nbytes = part.count * entry.row_bytes
        if ranges and begin in (ranges[-1].image_end, padded_end):
            gap = begin - ranges[-1].image_end
            staging += gap
            last = ranges[-1]
            ranges[-1] = Range(last.staging_bytes, last.image_bytes, last.nbytes + gap + nbytes)
        else:
            ranges.append(Range(staging, begin, nbytes))
        offsets.append(staging)
        staging += nbytes
        padded_end = aligned(begin + nbytes) if part.first + part.count == entry.rows else -1
    return Shard(ordered, tuple(ranges), tuple(offsets))


def pieces_of(shard: Shard, bucket_bytes: int) -> tuple[Piece, ...]:
    """Cut a shard into messages of at most `bucket_bytes`: long ranges alone, runs of short ones packed together.

    A small shard is cut finer, into about `PIECES`, so that reading, sending and storing overlap there too.
    """
    finer = aligned(min(max(shard.nbytes // PIECES, FINEST_BYTES), bucket_bytes))
    bucket_bytes = min(finer, bucket_bytes)
    pieces: list[Piece] = []
    packed: list[Range] = []
    for part in _split(shard.ranges, bucket_bytes):
        alone = part.nbytes >= min(DIRECT_BYTES, bucket_bytes)
        if packed and (alone or sum(r.nbytes for r in packed) + part.nbytes > min(bucket_bytes, PACKED_BYTES)):
            pieces.append(Piece(tuple(packed)))
            packed = []
        if alone:
            pieces.append(Piece((part,)))
        else:
            packed.append(part)
    if packed:
        pieces.append(Piece(tuple(packed)))
    return tuple(pieces)


def schedule(pieces: Sequence[Sequence[Piece]]) -> tuple[tuple[int, Piece], ...]:
    """The order in which everybody handles all trainers' pieces: (trainer, piece), one of each trainer in turn."""
    longest = max((len(own) for own in pieces), default=0)
    return tuple((t, own[k]) for k in range(longest) for t, own in enumerate(pieces) if k < len(own))


def require_complete(manifest: Manifest, shards: Sequence[Shard]) -> None:
    """Raise ValueError unless the shards hold every row of every tensor exactly once."""
    held: dict[int, list[Rows]] = {}
    for shard in shards:
        for part in shard.rows:
            held.setdefault(part.entry, []).append(part)
    for index, entry in enumerate(manifest.entries):
        reached = 0
        for part in sorted(held.get(index, []), key=lambda r: r.first):
            if part.first != reached:
                raise ValueError(_problem(entry.name, reached, part.first))
            reached += part.count
        if reached != entry.rows:
            raise ValueError(_problem(entry.name, reached, entry.rows))


def _problem(name: str, reached: int, found: int) -> str:
    what = f"rows {reached}..{found - 1} are published by no" if found > reached else f"row {found} is published by two"
    return f"{name}: {what} trainer ranks; all trainer ranks must publish the same model, sharded along dimension 0"


def _split(ranges: Iterable[Range], bucket_bytes: int) -> Iterator[Range]:
    for r in ranges:
        for at in range(0, r.nbytes, bucket_bytes):
            yield Range(r.staging_bytes + at, r.image_bytes + at, min(bucket_bytes, r.nbytes - at))
