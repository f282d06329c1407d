"""`staleflow bench protocol`: the speed and size of the staleness protocol, with and without its journal.

An operation is one call of reserve(), occupy() or consume(); a consume() of a whole batch counts as one. Trajectories
finish in random order, so that with many of them outstanding the protocol's cache misses are in the measured time. The
load keeps its own trajectories packed and hands out new ids: a coordinator has them from a message it just decoded.

Rates are per second of CPU time of one thread, plus the wall time of the journal's commits (a write and an fdatasync).
"""

import os
import random
import subprocess
import sys
import tempfile
import time
from array import array
from collections.abc import Callable
from pathlib import Path
from typing import Any

from staleflow.protocol import StalenessProtocol
from staleflow.protocol.journal import Journal
from staleflow.protocol.slots import SlotProtocol

ETA = 3
PAPER_BATCH_GROUPS, PAPER_GROUP_SIZE = 128, 16
OPERATIONS = 50_000
REPEATS = 3


def run(args: list[str]) -> dict[str, Any]:
    """Measure everything; `--quick` uses 10^5 outstanding trajectories where 10^6 are meant."""
    many = 100_000 if "--quick" in args else 1_000_000
    paper = _best(lambda: _protocol_rate(PAPER_BATCH_GROUPS, PAPER_GROUP_SIZE))
    costs = {size: _cost_by_outstanding(many, size) for size in (PAPER_GROUP_SIZE, 1)}
    return {
        "bench": "protocol",
        "unit": "operations/s",
        "ours": {
            "plain": paper,
            "journal_commit_every_1000": _best(lambda: _journal_rate(1_000)),
            "journal_commit_every_10000": _best(lambda: _journal_rate(10_000)),
            "plain_groups_of_1": _best(lambda: _protocol_rate(256, 1)),
        },
        "limit": {"empty_python_method": _best(_empty_call_rate)},
        "peers": {"slots_groups_of_1": _best(lambda: _slot_rate(256))},
        "outstanding_in_rates": {"groups_of_16": PAPER_BATCH_GROUPS * PAPER_GROUP_SIZE * 4, "groups_of_1": 1024},
        "cost_ratio_many_to_1000_outstanding": {f"groups_of_{size}": cost for size, cost in costs.items()},
        "many": many,
        "bytes_per_outstanding_trajectory": {
            f"groups_of_{size}": _bytes_per_trajectory(many, size) for size in (PAPER_GROUP_SIZE, 1)
        },
        "commit_s": _commit_s(),
    }


def _best(measure: Callable[[], float], repeats: int = REPEATS) -> float:
    """The best of a few: what other programs on the machine take away is not ours."""
    return max(measure() for _ in range(repeats))


class Load:
    """A run in its steady state: all places are reserved, and whatever a step trains is replaced at once."""

    def __init__(self, protocol: StalenessProtocol) -> None:
        self.protocol = protocol
        self.random = random.Random(0)
        self.next_id = 0
        self.running = array("q")  # group id * group_size + member
        self.operations = 0
        self.busy_s = 0.0
        self.commit_s: Callable[[], float] = lambda: 0.0

    def fill(self, groups: int) -> None:
        """Reserve `groups` whole groups at the newest version."""
        size = self.protocol.group_size
        packed = range(self.next_id * size, (self.next_id + groups) * size)
        reserve, version = self.protocol.reserve, self.protocol.version
        for first in range(0, len(packed), 500):
            piece = [divmod(one, size) for one in packed[first : first + 500]]
            start = time.thread_time()
            for group_id, member in piece:
                reserve(group_id, member, version)
            self._took(start, len(piece))
        self.next_id += groups
        self.running.extend(packed)

    def step(self) -> None:
        """Finish trajectories picked at random until the step is ready, train it, and replace what it trained."""
        occupy, ready = self.protocol.occupy, self.protocol.ready
        while not ready():
            piece = self._pick(min(len(self.running), 500))
            start = time.thread_time()
            for group_id, member in piece:
                occupy(group_id, member)
            self._took(start, len(piece))
        start = time.thread_time()
        trained = self.protocol.consume()
        self._took(start, 1)
        self.fill(len(trained))

    def _pick(self, count: int) -> list[tuple[int, int]]:
        running, randrange, size = self.running, self.random.randrange, self.protocol.group_size
        picked = []
        for _ in range(count):
            place = randrange(len(running))
            running[place], running[-1] = running[-1], running[place]
            picked.append(divmod(running.pop(), size))
        return picked

    def _took(self, start: float, operations: int) -> None:
        self.busy_s += time.thread_time() - start
        self.operations += operations
        self.busy_s += self.commit_s()

    def rate(self, operations: int) -> float:
        """Operations per second over at least so many of them, from full."""
        self.fill(self.protocol.batch_groups * (self.protocol.eta + 1))
        self.operations, self.busy_s = 0, 0.0
        while self.operations < operations:
            self.step()
        return self.operations / self.busy_s


def _protocol_rate(batch_groups: int, group_size: int) -> float:
    return Load(StalenessProtocol(batch_groups, group_size, ETA)).rate(OPERATIONS)


def _journal_rate(commit_every: int) -> float:
    """The same load with a journal beside it, which makes every `commit_every` operations durable at once."""
    with tempfile.TemporaryDirectory(dir=Path.cwd()) as folder:
        plain = StalenessProtocol(PAPER_BATCH_GROUPS, PAPER_GROUP_SIZE, ETA)
        with Journal.create(Path(folder) / "journal", "bench", plain) as journal:
            load = Load(journal.protocol)

            def commit_when_due() -> float:
                return _commit_wall_s(journal) if len(journal.protocol.notes) >= commit_every else 0.0

            load.commit_s = commit_when_due
            return load.rate(OPERATIONS)


def _commit_s() -> dict[str, float]:
    """Seconds of one commit: what a coordinator's cycle pays for durability."""
    costs = {}
    for operations in (1, 1_000, 10_000):
        with tempfile.TemporaryDirectory(dir=Path.cwd()) as folder:
            plain = StalenessProtocol(12_000, 1, ETA)
            with Journal.create(Path(folder) / "journal", "bench", plain) as journal:
                costs[f"{operations}_operations"] = min(_one_commit_s(journal, operations) for _ in range(4))
    return costs


def _one_commit_s(journal: Journal, operations: int) -> float:
    first = len(journal.protocol.outstanding())
    for group_id in range(first, first + operations):
        journal.protocol.reserve(group_id, 0, 0)
    return _commit_wall_s(journal)


def _commit_wall_s(journal: Journal) -> float:
    start = time.perf_counter()
    journal.commit()
    return time.perf_counter() - start


def _cost_by_outstanding(many: int, group_size: int) -> float:
    """Cost per operation with `many` outstanding trajectories, over that with 1,000."""

    def cost(outstanding: int) -> float:
        batch_groups = max(1, outstanding // (group_size * (ETA + 1)))
        return 1 / _best(lambda: _protocol_rate(batch_groups, group_size), 2 if outstanding > 10_000 else 10)

    return cost(many) / cost(1_000)


def _bytes_per_trajectory(outstanding: int, group_size: int) -> float:
    """Resident memory that a full protocol takes in a process of its own; ids are counted, as it keeps them."""
    code = f"from staleflow.benches import protocol; print(protocol.resident_growth({outstanding}, {group_size}))"
    done = subprocess.run([sys.executable, "-c", code], check=True, capture_output=True, text=True)
    return float(done.stdout) / outstanding


def resident_growth(outstanding: int, group_size: int) -> int:
    """Bytes by which this process grows when so many trajectories are reserved, and then finished."""
    before = _resident_bytes()
    protocol = StalenessProtocol(outstanding // (group_size * (ETA + 1)), group_size, ETA)
    for act in (lambda *one: protocol.reserve(*one, protocol.version), protocol.occupy):
        for packed in range(protocol.batch_groups * (ETA + 1) * group_size):
            act(*divmod(packed, group_size))
    return _resident_bytes() - before


def _resident_bytes() -> int:
    return int(Path("/proc/self/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")


def _slot_rate(batch_groups: int) -> float:
    """The same load on the published slot rule, which looks through its reservations at every operation."""
    slots, order = SlotProtocol(batch_groups, ETA), random.Random(0)
    ids = range(batch_groups * (ETA + 1))
    running, next_id, operations = list(ids), len(ids), 0
    for group_id in ids:
        slots.reserve(group_id, 0)
    start = time.thread_time()
    while operations < 600:
        while not slots.ready():
            slots.occupy(running.pop(order.randrange(len(running))))
            operations += 1
        trained = len(slots.consume())
        for group_id in range(next_id, next_id + trained):
            slots.reserve(group_id, slots.version)
        running += range(next_id, next_id + trained)
        next_id += trained
        operations += 1 + trained
    return operations / (time.thread_time() - start)


class _Empty:
    __slots__ = ()

    def call(self, group_id: int, member: int, version: int) -> bool:
        return True


def _empty_call_rate() -> float:
    call = _Empty().call
    start = time.thread_time()
    for group_id in range(200_000):
        call(group_id, 0, 0)
    return 200_000 / (time.thread_time() - start)
