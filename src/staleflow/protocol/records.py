"""The journal's format, pure: operations to bytes and back. journal.py does the I/O.

    file    MAGIC "SFLOWJNL" | format u16 | length u32 | crc u32 | header: JSON {"run_id", "base": a protocol state}
    frame   sequence u64 | length u32 | crc u32 | header crc u32 | operations           one frame per group commit
    record  code u8 | group id i64 | member u16 | value i64                             19 bytes, little-endian

Every crc continues from the one before it, from the file header on, so that a frame which is missing, repeated or taken
from another file does not fit. The frame's own header has a crc too: without it, a damaged length would look like the
end of the file, and everything after it would be lost in silence.

A *torn tail* is what a crash in the middle of a write leaves: the last frame is cut short, or blocks of it that the
file system had allocated but not written read as zeros. It was never acknowledged, and it is cut off. Anything else
that does not fit is damage, and an error.
"""

import hashlib
import json
import struct
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from itertools import starmap
from typing import Any, NamedTuple
from zlib import crc32

from staleflow.protocol.core import REASONS, StalenessProtocol
from staleflow.protocol.errors import JournalError, ProtocolError

FORMAT = 1
MAGIC = b"SFLOWJNL"
RESERVE, OCCUPY, RELEASE, CONSUME, MARK = range(1, 6)
WHOLE_GROUP = 2**16 - 1
SECTOR_BYTES = 512

_PROLOGUE = struct.Struct("<8sHII")
_FRAME = struct.Struct("<QIII")
_RECORD = struct.Struct("<BqHq")


class Operation(NamedTuple):
    """One change of the state. `value`: RESERVE's version, RELEASE's reason by index, CONSUME's step, MARK's digest."""

    code: int
    group_id: int
    member: int
    value: int


@dataclass(frozen=True)
class Contents:
    """What a journal holds: `operations` lead from the state `base` to the last acknowledged one (or a little further).

    sequence, chain: number and crc that the next frame continues from; good_bytes: where it begins in the file;
    torn_bytes: how much follows that was never acknowledged.
    """

    run_id: str
    base: dict[str, Any]
    operations: list[Operation]
    sequence: int
    chain: int
    good_bytes: int
    torn_bytes: int


def digest(state: dict[str, Any]) -> int:
    """A 63-bit fingerprint of a protocol state, equal for equal states, also after a round trip through JSON."""
    text = json.dumps(state, sort_keys=True, separators=(",", ":"))
    return int.from_bytes(hashlib.blake2b(text.encode(), digest_size=8).digest(), "little") >> 1


def encode_header(run_id: str, base: dict[str, Any]) -> tuple[bytes, int]:
    """The bytes a file begins with, and the crc that its first frame continues from."""
    text = json.dumps({"run_id": run_id, "base": base}, sort_keys=True, separators=(",", ":")).encode()
    prologue = _PROLOGUE.pack(MAGIC, FORMAT, len(text), 0)
    crc = crc32(text, crc32(prologue))
    return _PROLOGUE.pack(MAGIC, FORMAT, len(text), crc) + text, crc


def encode_frame(operations: Iterable[tuple[int, int, int, int]], sequence: int, chain: int) -> tuple[bytes, int]:
    """One group commit, and the crc that the next frame continues from."""
    payload = b"".join(starmap(_RECORD.pack, operations))
    crc = crc32(payload, chain)
    header_crc = crc32(struct.pack("<QII", sequence, len(payload), crc), chain)
    return _FRAME.pack(sequence, len(payload), crc, header_crc) + payload, crc


def decode(data: bytes, run_id: str) -> Contents:
    """Read a whole journal.

    Raises:
        JournalError: not a journal, another format, another run's, incomplete header, or damaged.
    """
    base, start, chain = _decode_header(data, run_id)
    operations: list[Operation] = []
    sequence, position = 0, start
    while (frame := _next_frame(data, position, sequence, chain)) is not None:
        payload, chain = frame
        operations += map(Operation._make, _RECORD.iter_unpack(payload))
        position += _FRAME.size + len(payload)
        sequence += 1
    return Contents(run_id, base, operations, sequence, chain, position, len(data) - position)


def _decode_header(data: bytes, run_id: str) -> tuple[dict[str, Any], int, int]:
    """The base state, where the frames begin, and the crc they continue from."""
    if not data.startswith(MAGIC):
        raise JournalError(f"not a journal of this program: it begins with {data[:8]!r}, not {MAGIC!r}")
    if len(data) < _PROLOGUE.size:
        raise JournalError("the journal's header is incomplete, which no crash can cause; take it from a backup")
    _, version, length, crc = _PROLOGUE.unpack_from(data)
    if version != FORMAT:
        raise JournalError(
            f"the journal has format {version}, this program reads {FORMAT}: resume with its own version"
        )
    text = data[_PROLOGUE.size : _PROLOGUE.size + length]
    if len(text) < length or crc32(text, crc32(_PROLOGUE.pack(MAGIC, version, length, 0))) != crc:
        raise JournalError("the journal's header is damaged or incomplete, which no crash can cause")
    header = json.loads(text)
    if header["run_id"] != run_id:
        raise JournalError(f"the journal belongs to run {header['run_id']!r}, not to {run_id!r}")
    return header["base"], _PROLOGUE.size + length, crc


def _next_frame(data: bytes, position: int, sequence: int, chain: int) -> tuple[bytes, int] | None:
    """The frame's payload and crc; None at the end of the file or at a torn tail."""
    if len(data) - position < _FRAME.size:
        return None
    number, length, crc, header_crc = _FRAME.unpack_from(data, position)
    if crc32(struct.pack("<QII", number, length, crc), chain) != header_crc or number != sequence:
        if _unwritten_from(data, position) < position + _FRAME.size:
            return None
        raise JournalError(f"the journal is damaged at byte {position}: no frame {sequence} of this file begins there")
    start = position + _FRAME.size
    payload = data[start : start + length]
    if len(payload) < length:
        return None
    if crc32(payload, chain) != crc or length % _RECORD.size:
        if start + length == len(data) > _unwritten_from(data, position):
            return None
        raise JournalError(f"the journal is damaged between the bytes {start} and {start + length} (frame {sequence})")
    return payload, crc


def _unwritten_from(data: bytes, position: int) -> int:
    """Where in a frame that begins at `position` a write can have stopped, all zeros up to the end of the file.

    Writes stop at sectors, and a run of a few zeros may also be data: then the answer is the end of the file.
    """
    written = len(data.rstrip(b"\0"))
    if written <= position:
        return position
    sector = -(-written // SECTOR_BYTES) * SECTOR_BYTES
    return sector if len(data) - sector >= _FRAME.size else len(data)


def apply(protocol: StalenessProtocol, operation: Operation) -> list[int]:
    """Do one journaled operation again; the groups that it trained, if it is a CONSUME.

    Raises:
        JournalError: the protocol does not answer as it did then.
    """
    try:
        if operation.code == CONSUME and protocol.version == operation.value:
            return protocol.consume()
        fits = _do_again(protocol, operation)
    except (ProtocolError, IndexError) as error:
        raise JournalError(f"the journal does not fit its base state at {operation}: {error}") from error
    if not fits:
        raise JournalError(f"the journal does not fit its base state at {operation}: it was refused")
    return []


def _do_again(protocol: StalenessProtocol, operation: Operation) -> bool:
    """Any operation but CONSUME; False if it is refused."""
    code, group_id, member, value = operation
    if code == RESERVE:
        return protocol.reserve(group_id, member, value)
    if code == OCCUPY:
        protocol.occupy(group_id, member)
        return True
    if code == RELEASE:
        protocol.release(group_id, REASONS[value], None if member == WHOLE_GROUP else member)
        return True
    return code == MARK and protocol.version == group_id


def replay(protocol: StalenessProtocol, operations: Iterable[Operation]) -> None:
    """Do journaled operations again, in order."""
    for operation in operations:
        apply(protocol, operation)


def operations_after(contents: Contents, state: dict[str, Any]) -> Sequence[Operation]:
    """The operations since `state` was marked (or was the base); JournalError if it never was."""
    fingerprint = digest(state)
    for place in range(len(contents.operations) - 1, -1, -1):
        operation = contents.operations[place]
        if operation.code == MARK and operation.value == fingerprint:
            return contents.operations[place + 1 :]
    if digest(contents.base) == fingerprint:
        return contents.operations
    raise JournalError(f"the journal knows nothing of this checkpoint (version {state.get('version')}): not one run's")
