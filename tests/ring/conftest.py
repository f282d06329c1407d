"""Rings that leave no name behind, and a second process to talk to."""

from __future__ import annotations

import itertools
import os
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from staleflow.trajectories.arena import Arena
from staleflow.trajectories.ring import Ring, segment_name

RUN_ID = 7
_count = itertools.count()


def unique_name(what: str = "ring") -> str:
    return segment_name("test", RUN_ID, f"{os.getpid()}.{next(_count)}-{what}")


@pytest.fixture
def make_ring() -> Iterator[Callable[..., Ring]]:
    """`make_ring(capacity)`: a ring that still has its name, unlinked at the end of the test."""
    made: list[Ring] = []

    def make(capacity: int = 1 << 16, **options: object) -> Ring:
        made.append(Ring.create(unique_name(), capacity, run_id=RUN_ID, **options))
        return made[-1]

    yield make
    for ring in made:
        ring.unlink()


@pytest.fixture
def pair(make_ring: Callable[..., Ring]) -> Callable[..., tuple[Ring, Ring]]:
    """`pair(capacity)`: (producer's handle, consumer's handle) of one ring."""

    def make(capacity: int = 1 << 16) -> tuple[Ring, Ring]:
        producer = make_ring(capacity, label="the producer")
        return producer, Ring.attach(producer.name, run_id=RUN_ID, label="the consumer")

    return make


@pytest.fixture
def arena() -> Iterator[Arena]:
    made = Arena.create(unique_name("arena"), 1 << 16, run_id=RUN_ID)
    made.unlink()
    return made


@pytest.fixture
def peer() -> Iterator[Callable[..., subprocess.Popen[str]]]:
    """`peer(action, ring name, …)`: a process running that function of peer.py; killed at the end if it still runs."""
    started: list[subprocess.Popen[str]] = []

    def start(action: str, *args: object, pass_fds: tuple[int, ...] = ()) -> subprocess.Popen[str]:
        command = [sys.executable, str(Path(__file__).with_name("peer.py")), action, *map(str, args)]
        process = subprocess.Popen(command, stdout=subprocess.PIPE, text=True, pass_fds=pass_fds)
        started.append(process)
        return process

    yield start
    for process in started:
        process.kill()
        process.communicate()


def crc32c(data: bytes) -> int:
    crc = 0xFFFFFFFF
    for byte in data:
        crc ^= byte
        for _ in range(8):
            crc = crc >> 1 ^ (0x82F63B78 if crc & 1 else 0)
    return crc ^ 0xFFFFFFFF
