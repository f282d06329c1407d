"""The spool: finished payloads and rewards on disk, before anybody is told of them.

A host appends to one file (a *segment*) at a time and never to a file of an earlier process; a checkpoint closes the
segment and keeps those that it needs by hard links, so that a trajectory is written once however long it waits.

    frame   MAGIC "SFSP" | kind u8 | 3 bytes 0 | length u32 | crc u32 | tid i64 | prompt i64 | payload

little-endian; the crc covers the frame without the crc field itself. `prompt` is the index of the prompt in the data.
What a crash leaves of the last write is no whole frame: reading stops there. It was never acknowledged.
"""

from __future__ import annotations

import os
import re
import struct
import zlib
from collections.abc import Iterator
from dataclasses import dataclass
from enum import IntEnum
from pathlib import Path
from typing import Any, NamedTuple

MAGIC = b"SFSP"
SUFFIX = ".spool"
_HEADER = struct.Struct("<4sBxxxIIqq")
_CRC = struct.Struct("<I")
_CRC_AT = 12
_REWARD = struct.Struct("<d")
_NAME = re.compile(r"attempt(\d+)-node(\d+)-(\d+)\.spool")


class FrameKind(IntEnum):
    FINISHED = 1  # a trajectory record, generation has ended
    PARTIAL = 2  # a trajectory record to go on from
    REWARD = 3  # f64, of the finished trajectory of that id


class Frame(NamedTuple):
    """`offset`: where in the file the payload begins."""

    kind: FrameKind
    tid: int
    prompt: int
    payload: bytes
    offset: int


@dataclass(frozen=True, order=True)
class SegmentName:
    """Order: attempts in their order, then nodes, then the node's segments."""

    attempt: int
    node: int
    number: int

    def __str__(self) -> str:
        return f"attempt{self.attempt}-node{self.node}-{self.number:06d}{SUFFIX}"

    @classmethod
    def of(cls, path: Path) -> SegmentName:
        """Raises ValueError for a file that is no segment."""
        found = _NAME.fullmatch(path.name)
        if found is None:
            raise ValueError(f"{path}: not a spool segment; remove it from there")
        attempt, node, number = map(int, found.groups())
        return cls(attempt, node, number)


def encode_frame(kind: FrameKind, tid: int, prompt: int, payload: Any) -> bytes:
    header = _HEADER.pack(MAGIC, kind, len(payload), 0, tid, prompt)
    crc = zlib.crc32(payload, zlib.crc32(header))
    return b"".join((header[:_CRC_AT], _CRC.pack(crc), header[_CRC_AT + _CRC.size :], payload))


def encode_reward(tid: int, prompt: int, reward: float) -> bytes:
    return encode_frame(FrameKind.REWARD, tid, prompt, _REWARD.pack(reward))


def decode_reward(frame: Frame) -> float:
    return float(_REWARD.unpack(frame.payload)[0])


def read_segment(path: Path) -> Iterator[Frame]:
    """The whole frames of a segment, oldest first."""
    with path.open("rb") as file:
        while (frame := _read_frame(file)) is not None:
            yield frame


def _read_frame(file: Any) -> Frame | None:
    header = file.read(_HEADER.size)
    if len(header) < _HEADER.size:
        return None
    magic, kind, length, crc, tid, prompt = _HEADER.unpack(header)
    if magic != MAGIC:
        return None
    payload = file.read(length)
    plain = header[:_CRC_AT] + bytes(_CRC.size) + header[_CRC_AT + _CRC.size :]
    if len(payload) < length or zlib.crc32(payload, zlib.crc32(plain)) != crc:
        return None
    return Frame(FrameKind(kind), tid, prompt, payload, file.tell() - length)


def read_payload(path: Path, offset: int, nbytes: int) -> bytes:
    """The payload of a frame that was read before."""
    with path.open("rb") as file:
        file.seek(offset)
        return file.read(nbytes)


def segments_in(folder: Path) -> dict[SegmentName, Path]:
    """All segments of a folder, in order; empty when there is no such folder."""
    return dict(sorted((SegmentName.of(path), path) for path in folder.glob(f"*{SUFFIX}")))


class SegmentWriter:
    """The segments that one host writes in one attempt. Remembers which groups each of them holds."""

    def __init__(self, folder: Path, attempt: int, node: int, first: int = 0) -> None:
        folder.mkdir(parents=True, exist_ok=True)
        self._folder, self._attempt, self._node, self._next = folder, attempt, node, first
        self._file: int | None = None
        self._size = 0
        self._path: Path | None = None
        self._groups: dict[Path, set[int]] = {}  # segment -> groups that are not done with

    def adopt(self, path: Path, groups: set[int]) -> None:
        """A segment of this node that somebody else has written (a resume): it ages like the own ones."""
        self._groups[path] = set(groups)

    def write(self, frames: list[bytes], groups: set[int]) -> None:
        """Append; durable after `sync`. Raises OSError when the disk refuses; it may be tried again then."""
        if self._file is None:
            self._path = self._folder / str(SegmentName(self._attempt, self._node, self._next))
            self._next += 1
            self._file = os.open(self._path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600)
            self._groups[self._path], self._size = set(), 0
        assert self._path is not None
        self._groups[self._path] |= groups
        data = b"".join(frames)
        try:
            _write_all(self._file, data)
        except OSError:
            os.ftruncate(self._file, self._size)  # nothing may follow a torn frame
            os.lseek(self._file, self._size, os.SEEK_SET)
            raise
        self._size += len(data)

    def sync(self) -> None:
        if self._file is not None:
            os.fdatasync(self._file)

    def close_segment(self) -> None:
        """What follows goes into a new segment."""
        if self._file is not None:
            os.fsync(self._file)
            os.close(self._file)
            self._file = self._path = None

    def forget(self, groups: set[int]) -> None:
        """These groups are trained on or given up."""
        for held in self._groups.values():
            held -= groups

    def needed(self) -> list[Path]:
        """Segments with a group that is not done with."""
        return [path for path, groups in self._groups.items() if groups]

    def unneeded(self) -> list[Path]:
        """Closed segments without one."""
        return [path for path, groups in self._groups.items() if not groups and path != self._path]

    def remove(self, paths: list[Path]) -> None:
        for path in paths:
            self._groups.pop(path, None)
            path.unlink(missing_ok=True)


def _write_all(file: int, data: bytes) -> None:
    view = memoryview(data)
    while view:
        view = view[os.write(file, view) :]
