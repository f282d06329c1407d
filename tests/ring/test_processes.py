"""Two processes: every record once, deaths at every moment, stops, sleeps and signals."""

from __future__ import annotations

import os
import signal
import struct
import subprocess
import threading
import time
from collections.abc import Callable

import pytest

from staleflow import _ring
from staleflow.trajectories.ring import Ring, RingClosed, wait_any

from .conftest import RUN_ID

Peer = Callable[..., subprocess.Popen[str]]
MakeRing = Callable[..., Ring]

pytestmark = pytest.mark.dist


def numbers(ring: Ring, *, until: int | None = None) -> list[int]:
    """The numbers in the records that come, releasing each, until `until` or until the producer is gone."""
    seen: list[int] = []
    try:
        while until is None or not seen or seen[-1] < until:
            assert ring.wait(10), "nothing came"
            for record in ring.peek(64):
                seen.append(int.from_bytes(record.payload, "little"))
                ring.release(record.sequence)
    except RingClosed:
        assert until is None
    return seen


@pytest.mark.parametrize(("count", "nbytes", "capacity"), [(10_000_000, 64, 1 << 20), (20_000, 8000, 1 << 16)])
def test_nothing_is_lost_or_doubled(make_ring: MakeRing, peer: Peer, count: int, nbytes: int, capacity: int) -> None:
    ring = make_ring(capacity)
    producer = peer("produce", ring.name, count, nbytes)
    _ring.consume(ring, count)  # raises unless the numbers come 1, 2, 3, …
    assert producer.wait() == 0
    assert ring.used == 0


def test_there_and_back_between_sleeping_processes(make_ring: MakeRing, peer: Peer) -> None:
    down, up = make_ring(1 << 16), make_ring(1 << 16)
    echo = peer("echo", down.name, up.name)
    for number in range(200):
        down.push(1, struct.pack("<q", number), id0=number)
        assert up.wait(10)
        (record,) = up.peek(2)
        assert (record.id0, record.payload) == (number, struct.pack("<q", number))
        up.release(record.sequence)
    down.close("no more")
    assert "closed: no more" in echo.communicate(timeout=10)[0]


@pytest.mark.parametrize("point", ["after_reserve", "mid_payload", "before_commit", "after_commit"])
def test_a_killed_producer_leaves_whole_records_only(make_ring: MakeRing, peer: Peer, point: str) -> None:
    ring = make_ring(1 << 16)
    producer = peer("push_and_die", ring.name, 20, point)
    assert producer.wait() == -signal.SIGKILL
    expected = list(range(1, 21))
    if point == "after_commit":
        expected.append(int.from_bytes(b"\xff" * 1000, "little"))
    assert numbers(ring) == expected
    with pytest.raises(RingClosed, match=rf"producer \(rollout rank 3, pid {producer.pid}\) died"):
        ring.wait(10)
    assert "died" in ring.closed


@pytest.mark.parametrize("point", ["after_reserve", "mid_payload", "before_commit"])
def test_a_restarted_producer_goes_on_where_the_dead_one_stopped(make_ring: MakeRing, peer: Peer, point: str) -> None:
    ring = make_ring(1 << 16)
    peer("push_and_die", ring.name, 20, point).wait()
    assert numbers(ring) == list(range(1, 21))
    successor = Ring.attach(ring.name, run_id=RUN_ID)
    successor.push(1, (21).to_bytes(8, "little"))
    (record,) = ring.peek(2)
    assert (record.sequence, record.payload[0]) == (21, 21)
    assert ring.closed is None


def test_a_restarted_consumer_begins_at_the_last_released_record(make_ring: MakeRing, peer: Peer) -> None:
    ring = make_ring(1 << 16)
    ring.push_batch([(1, number.to_bytes(8, "little")) for number in range(1, 31)])
    assert peer("read_and_die", ring.name, 20, 12).wait() == -signal.SIGKILL
    with pytest.raises(RingClosed, match=r"consumer .*died"):
        ring.check_peer()
    successor = Ring.attach(ring.name, run_id=RUN_ID)
    assert numbers(successor, until=30) == list(range(13, 31)), "13 to 20 again: at least once"


def test_a_writer_waiting_for_room_learns_of_the_readers_death(make_ring: MakeRing, peer: Peer) -> None:
    ring = make_ring(4096)
    while ring.push(1, bytes(64)):
        pass
    assert peer("read_and_die", ring.name, 3, 0).wait() == -signal.SIGKILL
    with pytest.raises(RingClosed, match="rollout rank 3"):
        ring.wait_writable(64, 10)


def test_what_was_sent_before_closing_is_read_first(make_ring: MakeRing, peer: Peer) -> None:
    ring = make_ring(1 << 16)
    assert peer("close_with_reason", ring.name, "out of work").wait() == 0
    assert ring.wait(10)
    assert bytes(ring.peek(1)[0].payload) == b"last words"
    with pytest.raises(RingClosed, match="out of work"):
        ring.wait(10)


def test_a_stop_overtakes_what_is_queued_and_wakes(make_ring: MakeRing, peer: Peer) -> None:
    ring = make_ring(1 << 16)
    sleeper = peer("wait_for_stop", ring.name)
    assert sleeper.stdout and sleeper.stdout.readline() == "waiting\n"
    ring.push(1, b"queued")
    ring.set_stop(42)
    assert sleeper.stdout.readline() == "42\n"
    assert sleeper.wait() == 0
    assert ring.used, "what was queued was not taken"


def test_one_waiter_for_many_rings(make_ring: MakeRing, peer: Peer) -> None:
    rings = [make_ring(1 << 16) for _ in range(16)]
    assert wait_any(rings, 0) == []
    for index in (3, 11):
        peer("produce", rings[index].name, 100, 8)
    left = {3: 100, 11: 100}
    while any(left.values()):
        for ring in wait_any(rings, 10):
            index = rings.index(ring)
            left[index] -= len(ring.pop_batch(100))
    assert left == {3: 0, 11: 0}


def test_many_rings_report_the_dead_one(make_ring: MakeRing, peer: Peer) -> None:
    rings = [make_ring(1 << 16) for _ in range(3)]
    peer("push_and_die", rings[1].name, 0, "after_reserve").wait()
    assert wait_any(rings, 10) == [rings[1]]
    assert "died" in rings[1].closed
    with pytest.raises(RingClosed, match="died"):
        rings[1].wait(1)


def test_waiting_lets_other_threads_run(make_ring: MakeRing) -> None:
    ring = make_ring(1 << 16)
    other = Ring.attach(ring.name, run_id=RUN_ID)
    threading.Timer(0.05, other.push, (1, b"x")).start()
    assert ring.wait(10), "the thread that pushes needs the GIL that the waiter gave up"


def test_a_signal_interrupts_a_wait(make_ring: MakeRing) -> None:
    class Interrupted(Exception):
        pass

    def interrupt(*_: object) -> None:
        raise Interrupted

    ring = make_ring(1 << 16)
    before = signal.signal(signal.SIGUSR1, interrupt)
    try:
        threading.Timer(0.05, os.kill, (os.getpid(), signal.SIGUSR1)).start()
        with pytest.raises(Interrupted):
            ring.wait(60)
    finally:
        signal.signal(signal.SIGUSR1, before)


def test_a_wait_ends_in_time_without_a_producer(make_ring: MakeRing) -> None:
    start = time.monotonic()
    assert not make_ring(1 << 16).wait(0.2)
    assert time.monotonic() - start >= 0.2
