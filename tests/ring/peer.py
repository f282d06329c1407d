"""The other process of the ring tests: `python peer.py ACTION ARGS…`. Imports neither torch nor pytest."""

from __future__ import annotations

import os
import signal
import sys
import time

from staleflow import _ring
from staleflow.trajectories.descriptors import fetch
from staleflow.trajectories.ring import Ring, RingClosed

RUN_ID = 7
LABEL = "rollout rank 3"


def attach(target: str) -> Ring:
    return Ring.attach(int(target) if target.isdigit() else target, run_id=RUN_ID, label=LABEL)


def die() -> None:
    os.kill(os.getpid(), signal.SIGKILL)


def produce(target: str, count: str, nbytes: str) -> None:
    _ring.produce(attach(target), int(count), int(nbytes))


def consume(target: str, count: str) -> None:
    _ring.consume(attach(target), int(count))


def push_and_die(target: str, count: str, point: str) -> None:
    """Push `count` records, then die in the middle of the next at the labelled point."""
    ring = attach(target)
    for number in range(1, int(count) + 1):
        ring.put(1, number.to_bytes(8, "little"), timeout_s=10)
    view = ring.reserve(1000, 1)
    if point == "after_reserve":
        die()
    view[:500] = b"\xff" * 500
    if point == "mid_payload":
        die()
    view[500:] = b"\xff" * 500
    if point == "before_commit":
        die()
    ring.commit()
    die()


def read_and_die(target: str, count: str, released: str) -> None:
    """Read `count` records, release the first `released` of them, die with the rest in hand."""
    ring = attach(target)
    seen = 0
    while seen < int(count):
        assert ring.wait(10)
        for record in ring.peek(int(count) - seen):
            seen = record.sequence
            if seen <= int(released):
                ring.release(seen)
    die()


def close_with_reason(target: str, reason: str) -> None:
    ring = attach(target)
    ring.push(1, b"last words")
    ring.close(reason)


def wait_for_stop(target: str) -> None:
    """Sleep on the ring until a stop overtakes what is queued; print the code."""
    ring = attach(target)
    ring.claim_consumer()
    print("waiting", flush=True)
    while not ring.stop_code:
        ring.wait(10)
        if not ring.stop_code:
            ring.peek(1)
    print(ring.stop_code, flush=True)


def echo(down: str, up: str) -> None:
    """Send back what comes, until the other side closes."""
    source, target = attach(down), attach(up)
    try:
        while source.wait(None):
            for record in source.peek(16):
                target.put(record.kind, record.payload, timeout_s=10, id0=record.id0)
                source.release(record.sequence)
    except RingClosed as closed:
        print(closed, flush=True)


def hold(target: str) -> None:
    """Have the ring mapped, nothing more."""
    ring = attach(target)
    print("mapped", flush=True)
    time.sleep(60)
    ring.close()


def create_and_hold(name: str, capacity: str) -> None:
    ring = Ring.create(name, int(capacity), run_id=RUN_ID)
    print("created", flush=True)
    time.sleep(60)
    ring.close()


def create_in(directory: str, capacity: str) -> None:
    """Create a ring in another directory; print the error or the room it took."""
    try:
        ring = Ring.create("ring", int(capacity), run_id=RUN_ID, directory=directory)
        ring.push(1, b"x" * 100)
        print("created", ring.capacity)
    except RuntimeError as error:
        print(error)


def fetch_and_continue(address: str, name: str, first: str, last: str) -> None:
    """A restarted producer: gets the ring's descriptor from the host and goes on."""
    fd = fetch(address.replace("@", "\0"), name, timeout_s=10)  # a NUL does not go through argv
    ring = attach(str(fd))
    os.close(fd)
    for number in range(int(first), int(last) + 1):
        ring.put(1, number.to_bytes(8, "little"), timeout_s=10)


if __name__ == "__main__":
    globals()[sys.argv[1]](*sys.argv[2:])
