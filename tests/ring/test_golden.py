"""The bytes in shared memory are a contract between processes that may have been built apart: they are frozen here."""

from __future__ import annotations

import os
import struct
from collections.abc import Callable

from staleflow.trajectories.arena import Arena
from staleflow.trajectories.ring import Ring

from .conftest import RUN_ID, crc32c, unique_name


def test_identity_of_a_ring(make_ring: Callable[..., Ring]) -> None:
    ring = make_ring(4096, schema_hash=0x1122334455667788)
    head = bytes(ring.header)
    assert len(head) == 4096
    assert head[:40] == b"SFWRING1" + struct.pack("<IIQQQ", 1, 4096, 4096, RUN_ID, 0x1122334455667788)
    assert not any(head[40:]), "tail, head, bells, stop word and both sides begin as zeros"


def test_words_of_both_sides(make_ring: Callable[..., Ring]) -> None:
    ring = make_ring(4096, label="trainer rank 1")
    ring.push(1, b"a")
    ring.push(1, b"b" * 65)
    ring.peek(1)
    ring.release(1)
    ring.set_stop(9)
    head = bytes(ring.header)
    assert struct.unpack_from("<QQ", head, 128) == (128 + 192, 128), "tail; start of the last record"
    assert struct.unpack_from("<Q", head, 256) == (128,), "head"
    assert struct.unpack_from("<I", head, 640) == (9,), "stop word"
    for side in (768, 1024):
        pid, closed, start_ticks, _ = struct.unpack_from("<IIQQ", head, side)
        assert (pid, closed) == (os.getpid(), 0)
        assert start_ticks > 0
        assert head[side + 24 : side + 88].rstrip(b"\0") == b"trainer rank 1"


def test_reason_of_closing(make_ring: Callable[..., Ring]) -> None:
    ring = make_ring(4096)
    ring.claim_producer()
    ring.close("out of prompts")
    head = bytes(ring.header)
    assert struct.unpack_from("<I", head, 772) == (1,)
    assert head[768 + 88 : 768 + 248].rstrip(b"\0") == b"out of prompts"


def test_a_record(make_ring: Callable[..., Ring]) -> None:
    ring = make_ring(4096)
    ring.push(0x01020304, b"payload", flags=0x0A0B0C0D, id0=0x1111, id1=0x2222)
    checked = struct.pack("<QIIQQQ", 7, 0x01020304, 0x0A0B0C0D, 1, 0x1111, 0x2222)
    expected = checked + struct.pack("<I", crc32c(checked)) + bytes(20) + b"payload"
    assert bytes(ring.data[: len(expected)]) == expected


def test_padding_at_the_end(make_ring: Callable[..., Ring]) -> None:
    ring = make_ring(4096)
    for _ in range(7):
        ring.push(1, bytes(512 - 64))  # 512 bytes with its header
        ring.release(ring.peek(1)[0].sequence)
    ring.push(1, bytes(64))
    ring.push(1, bytes(500))  # 384 bytes are left before the end
    checked = struct.pack("<QIIQQQ", 384 - 64, 0xFFFFFFFF, 0, 0, 0, 0)
    at = 7 * 512 + 128
    assert bytes(ring.data[at : at + 64]) == checked + struct.pack("<I", crc32c(checked)) + bytes(20)
    assert struct.unpack_from("<QII", ring.data, 0) == (500, 1, 0)


def test_identity_of_an_arena() -> None:
    arena = Arena.create(unique_name("arena"), 4096, run_id=RUN_ID)
    head = os.pread(arena.fileno(), 40, 0)
    arena.unlink()
    assert head == b"SFARENA1" + struct.pack("<IIQQQ", 1, 4096, 4096, RUN_ID, 0)


def test_crc_is_castagnoli() -> None:
    assert crc32c(b"123456789") == 0xE3069283  # the check value of CRC-32C
