"""Frames between a pool and its workers: u32 length, then a msgpack message. Both ends are on one machine."""

from __future__ import annotations

import struct

import msgspec

from staleflow.rewards.spec import RewardSample, RewardTerm

_LENGTH = struct.Struct("<I")


class Setup(msgspec.Struct, tag=True):
    """Pool -> worker, first: what to score with."""

    terms: tuple[RewardTerm, ...]


class Job(msgspec.Struct, tag=True):
    """Pool -> worker: score this."""

    tid: int
    sample: RewardSample


class Ready(msgspec.Struct, tag=True):
    """Worker -> pool, once: everything is loaded. With an `error` the set-up is impossible and the worker leaves."""

    error: str | None = None


class Score(msgspec.Struct, tag=True):
    """Worker -> pool: the rewards of the terms, or why there are none."""

    tid: int
    parts: tuple[float, ...] = ()
    error: str | None = None


_encoder = msgspec.msgpack.Encoder()
to_worker = msgspec.msgpack.Decoder(Setup | Job)
to_pool = msgspec.msgpack.Decoder(Ready | Score)


def frame(message: Setup | Job | Ready | Score) -> bytes:
    body = _encoder.encode(message)
    return _LENGTH.pack(len(body)) + body


def split(buffer: bytearray) -> list[bytes]:
    """Take all whole frames out of `buffer` (a beginning of one stays) and return their bodies."""
    bodies, at = [], 0
    while len(buffer) - at >= _LENGTH.size:
        (size,) = _LENGTH.unpack_from(buffer, at)
        end = at + _LENGTH.size + size
        if len(buffer) < end:
            break
        bodies.append(bytes(buffer[at + _LENGTH.size : end]))
        at = end
    del buffer[:at]
    return bodies
