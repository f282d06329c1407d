"""Places where rings go wrong: the wrap, the last byte, the largest record, indices that cannot be."""

from __future__ import annotations

import os
import struct
import sys
from collections.abc import Callable

import pytest

from staleflow.trajectories.ring import Ring, RingClosed, RingCorrupt, RingError, RingFull, segment_name

from .conftest import RUN_ID, crc32c

Pair = Callable[..., tuple[Ring, Ring]]
HEADER = 64
CAPACITY = 4096


def poke(ring: Ring, offset: int, value: int) -> None:
    os.pwrite(ring.fileno(), struct.pack("<Q", value), offset)


def advance_to(producer: Ring, consumer: Ring, offset: int) -> None:
    """An empty ring whose head and tail are at this place."""
    while (at := int.from_bytes(producer.header[128:136], "little") % CAPACITY) != offset:
        producer.push(0, bytes(min(offset - at, 512) - HEADER))
        consumer.release(consumer.peek(1)[0].sequence)


def round_trip(producer: Ring, consumer: Ring, payload: bytes) -> None:
    assert producer.push(1, payload)
    (record,) = consumer.peek(2)
    assert bytes(record.payload) == payload
    consumer.release(record.sequence)
    assert producer.used == 0


@pytest.mark.parametrize("offset", [0, 64, 2048, CAPACITY - 512, CAPACITY - 128, CAPACITY - 64])
@pytest.mark.parametrize("nbytes", [0, 1, 63, 64, 65, 448, 511, 512])
def test_any_record_passes_anywhere(pair: Pair, offset: int, nbytes: int) -> None:
    producer, consumer = pair(CAPACITY)
    advance_to(producer, consumer, offset)
    round_trip(producer, consumer, os.urandom(nbytes))
    round_trip(producer, consumer, os.urandom(nbytes))


def test_a_record_that_ends_exactly_at_the_end_needs_no_padding(pair: Pair) -> None:
    producer, consumer = pair(CAPACITY)
    advance_to(producer, consumer, CAPACITY - 512)
    assert producer.push(1, bytes(512 - HEADER))
    assert producer.used == 512
    assert producer.push(2, b"next")
    assert [(r.kind, r.offset) for r in consumer.peek(3)] == [(1, CAPACITY - 512 + HEADER), (2, HEADER)]


def test_padding_of_one_header_exactly(pair: Pair) -> None:
    producer, consumer = pair(CAPACITY)
    advance_to(producer, consumer, CAPACITY - HEADER)
    assert producer.push(1, b"x")
    assert producer.used == HEADER + 128
    assert consumer.peek(1)[0].offset == HEADER


def test_an_empty_record_fits_the_last_header(pair: Pair) -> None:
    producer, consumer = pair(CAPACITY)
    advance_to(producer, consumer, CAPACITY - HEADER)
    assert producer.push(1, b"")
    assert producer.used == HEADER


def test_full_to_the_last_byte_is_a_value_and_loses_nothing(pair: Pair) -> None:
    producer, consumer = pair(CAPACITY)
    assert all(producer.push(1, bytes([n]) * (256 - HEADER)) for n in range(16))
    assert producer.used == CAPACITY
    assert not producer.push(1, b"")
    assert producer.reserve(0, 1) is None
    assert not producer.wait_writable(0, 0)
    with pytest.raises(RingFull, match="4096 of 4096 bytes used"):
        producer.put(1, b"", timeout_s=0.01)
    records = consumer.peek(100)
    assert [record.payload[0] for record in records] == list(range(16))
    consumer.release(records[0].sequence)
    assert producer.push(2, bytes(256 - HEADER))


def test_full_because_of_padding(pair: Pair) -> None:
    """Room in all, but not in one piece before the end: the padding counts as used."""
    producer, consumer = pair(CAPACITY)
    for _ in range(15):
        producer.push(1, bytes(256 - HEADER))
    consumer.peek(1)
    consumer.release(1)
    assert producer.used == CAPACITY - 512
    assert not producer.push(1, bytes(300)), "256 before the end and 256 at the start are not 384 in a row"
    assert producer.push(1, bytes(256 - HEADER))


def test_too_large_for_ever_is_an_error(pair: Pair) -> None:
    producer, _ = pair(CAPACITY)
    assert producer.max_record == CAPACITY // 8
    assert producer.push(1, bytes(512))
    for call in (lambda: producer.push(1, bytes(513)), lambda: producer.wait_writable(513, 1)):
        with pytest.raises(ValueError, match=r"513 bytes.*capacity / 8 = 512"):
            call()


def test_an_aborted_reservation_never_was(pair: Pair) -> None:
    producer, consumer = pair(CAPACITY)
    view = producer.reserve(100, 1)
    view[:] = b"\xff" * 100
    producer.abort()
    assert consumer.peek(1) == []
    assert producer.push(2, b"kept")
    assert [(r.sequence, r.kind, bytes(r.payload)) for r in consumer.peek(2)] == [(1, 2, b"kept")]


def test_misuse_is_refused(pair: Pair) -> None:
    producer, consumer = pair(CAPACITY)
    with pytest.raises(RuntimeError, match="without a reservation"):
        producer.commit()
    producer.reserve(1, 1)
    with pytest.raises(RuntimeError, match="neither committed nor aborted"):
        producer.reserve(1, 1)
    producer.commit()
    with pytest.raises(ValueError, match="0xFFFFFFFF"):
        producer.push(0xFFFFFFFF, b"")
    with pytest.raises(ValueError, match="at least 1"):
        consumer.peek(0)
    with pytest.raises(ValueError, match="release"):
        consumer.release(1)
    consumer.peek(1)
    consumer.release(1)
    consumer.release(1)  # what is released already stays released
    with pytest.raises(ValueError, match="timeout_s"):
        consumer.wait(-1)


def test_payload_views_are_read_only_and_outlive_the_ring(pair: Pair) -> None:
    producer, consumer = pair(CAPACITY)
    producer.push(1, b"abc")
    (record,) = consumer.peek(1)
    with pytest.raises(TypeError, match="read-only"):
        record.payload[0] = 0
    del producer, consumer
    assert bytes(record.payload) == b"abc"


def test_peek_moves_on_and_rewind_goes_back(pair: Pair) -> None:
    producer, consumer = pair()
    producer.push_batch([(n, b"x") for n in range(5)])
    assert [r.kind for r in consumer.peek(2)] == [0, 1]
    assert [r.kind for r in consumer.peek(9)] == [2, 3, 4]
    assert not consumer.wait(0)
    consumer.release(2)
    consumer.rewind()
    assert [(r.sequence, r.kind) for r in consumer.peek(9)] == [(3, 2), (4, 3), (5, 4)]


def test_batches(pair: Pair) -> None:
    producer, consumer = pair(CAPACITY)
    items = [(n, bytes([n]), n + 1, n + 2, n + 3) for n in range(50)]
    sent = producer.push_batch(items)
    assert sent == CAPACITY // 128, "as many as fit"
    popped = consumer.pop_batch(1000)
    assert [(r.kind, r.payload, r.flags, r.id0, r.id1) for r in popped] == items[:sent]
    assert producer.used == 0
    assert producer.push_batch(memory := [(1, memoryview(b"view")), (2, bytearray(b"array"))]) == len(memory)
    assert [r.payload for r in consumer.pop_batch(2)] == [b"view", b"array"]


def test_a_batch_with_a_bad_item_keeps_what_came_before(pair: Pair) -> None:
    producer, consumer = pair(CAPACITY)
    with pytest.raises(ValueError, match="capacity / 8"):
        producer.push_batch([(1, b"good"), (2, bytes(600))])
    with pytest.raises(ValueError, match="tuples"):
        producer.push_batch([(1, b"fine"), "nonsense"])
    assert [r.payload for r in consumer.pop_batch(9)] == [b"good", b"fine"]


def test_several_buffers_become_one_record(pair: Pair) -> None:
    producer, consumer = pair()
    producer.push(1, b"head", memoryview(b"--body--")[2:6], bytearray(b"tail"), id0=5, id1=6, flags=7)
    (record,) = consumer.peek(1)
    assert (bytes(record.payload), record.id0, record.id1, record.flags) == (b"headbodytail", 5, 6, 7)


def test_offset_names_the_payload_in_the_whole_memory(pair: Pair) -> None:
    producer, consumer = pair()
    producer.push(1, b"first")
    producer.push(1, b"second")
    for record in consumer.peek(2):
        assert consumer.data[record.offset : record.offset + len(record.payload)] == record.payload
        assert record.offset % 64 == 0


# What cannot be: the words in shared memory say something no sound ring says.


def test_more_used_than_there_is(pair: Pair) -> None:
    producer, consumer = pair(CAPACITY)
    producer.push(1, b"x")
    consumer.peek(1)
    poke(producer, 128, 10 * CAPACITY)
    with pytest.raises(RingCorrupt, match="corrupt: tail 40960"):
        consumer.wait(0)
    with pytest.raises(RingCorrupt, match="corrupt"):
        _ = producer.used


def test_a_head_that_overtook_the_tail(pair: Pair) -> None:
    producer, _ = pair(CAPACITY)
    for _ in range(16):
        producer.push(1, bytes(256 - HEADER))
    poke(producer, 256, 2 * CAPACITY)
    with pytest.raises(RingCorrupt, match="head 8192"):
        producer.push(1, b"x")


@pytest.mark.parametrize("offset", [0, 8, 16, 40])
def test_a_damaged_record_header(pair: Pair, offset: int) -> None:
    producer, consumer = pair(CAPACITY)
    producer.push(1, b"x")
    poke(producer, 4096 + offset, 0xDEADBEEF)
    with pytest.raises(RingCorrupt, match="broken record header at 0"):
        consumer.peek(1)


def test_a_record_out_of_turn(pair: Pair) -> None:
    producer, consumer = pair(CAPACITY)
    for _ in range(3):
        producer.push(1, b"x")
    consumer.peek(1)
    os.pwrite(producer.fileno(), bytes(producer.data[256:320]), 4096 + 128)  # the third where the second belongs
    with pytest.raises(RingCorrupt, match="record 3 where 2 belongs"):
        consumer.peek(1)


def test_a_record_numbered_beyond_all_is_corruption_not_misuse(pair: Pair) -> None:
    """Its successor would be number 0, which `release` would have taken for the caller's mistake."""
    producer, consumer = pair(CAPACITY)
    producer.push(1, b"payload")
    checked = struct.pack("<QIIQQQ", 7, 1, 0, 2**64 - 1, 0, 0)
    os.pwrite(producer.fileno(), checked + struct.pack("<I", crc32c(checked)), len(producer.header))
    with pytest.raises(RingCorrupt, match="record 18446744073709551615"):
        consumer.peek(1)


@pytest.mark.parametrize(
    ("offset", "value", "message"),
    [
        (0, 1, "wrong magic"),
        (8, 2, "ABI 2, this build speaks 1"),
        (16, 4096 * 3, "capacity 12288"),
        (16, 1 << 30, "capacity 1073741824"),
        (24, 8, "belongs to run 8, not 7"),
        (32, 5, "schema hash 5"),
    ],
)
def test_another_segment_is_not_attached(make_ring: Callable[..., Ring], offset: int, value: int, message: str) -> None:
    ring = make_ring(CAPACITY)
    poke(ring, offset, value if offset != 8 else value | 4096 << 32)
    with pytest.raises(RingError, match=message):
        Ring.attach(ring.name, run_id=RUN_ID)


def test_a_file_cut_short(make_ring: Callable[..., Ring]) -> None:
    ring = make_ring(CAPACITY)
    name, fd = ring.name, os.dup(ring.fileno())
    os.ftruncate(fd, 5000)
    with pytest.raises(RingCorrupt, match="too small"):
        Ring.attach(name, run_id=RUN_ID)
    os.ftruncate(fd, 8192)
    os.close(fd)


def test_two_claimants_of_one_side(pair: Pair) -> None:
    producer, _ = pair()
    producer.claim_producer()
    second = Ring.attach(producer.name, run_id=RUN_ID)
    with pytest.raises(RingError, match=f"already has a producer.*the producer, pid {os.getpid()}"):
        second.push(1, b"x")
    producer.close()  # the side is free
    assert second.push(1, b"x")


def test_after_close(pair: Pair) -> None:
    producer, consumer = pair()
    consumer.claim_consumer()
    producer.push(1, b"x")
    assert producer.closed is None
    consumer.close("training is over")
    assert "training is over" in producer.closed
    for call in (lambda: producer.push(1, b"y"), lambda: producer.reserve(1, 1), producer.check_peer):
        with pytest.raises(RingClosed, match=r"consumer \(the consumer, pid \d+\) closed: training is over"):
            call()
    with pytest.raises(RingClosed, match="closed here"):
        consumer.peek(1)


def test_names_carry_user_job_and_run() -> None:
    assert segment_name("my job/ü", 255, "rank3-up") == f"staleflow-{os.getuid()}-my_job__-ff-rank3-up"


def test_the_ring_needs_neither_torch_nor_numpy() -> None:
    code = "import sys, staleflow.trajectories.ring; sys.exit(bool({'torch', 'numpy'} & set(sys.modules)))"
    assert os.spawnv(os.P_WAIT, sys.executable, [sys.executable, "-c", code]) == 0


@pytest.mark.parametrize("capacity", [1 << 21, 1 << 29])
@pytest.mark.parametrize("sizes", [(7, 100_003), (64, 16_384), (1, 40_000, 0, 70_001), (200_000,)])
def test_large_payloads_of_several_parts(make_ring: Callable[..., Ring], sizes: tuple[int, ...], capacity: int) -> None:
    """Into a ring larger than the cache they are copied by whole lines: every byte arrives wherever a part begins."""
    ring, parts = make_ring(capacity), [os.urandom(size) for size in sizes]
    ring.push(1, *parts)
    ring.push(1, b"next")
    first, second = ring.peek(2)
    assert bytes(first.payload) == b"".join(parts)
    assert bytes(second.payload) == b"next"
