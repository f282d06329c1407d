"""One coordinator cycle at 1,024 instances and 100,000 trajectories in flight, and how it grows with both.

Measured in CPU time of the thread, since the question is what one core has to do, whatever else the machine does.
"""

from __future__ import annotations

import argparse
import random
import time
from statistics import median
from typing import Any

from staleflow.coordination.coordinator import Coordinator
from staleflow.coordination.cost_model import DEFAULT
from staleflow.coordination.ledger import make_ledger
from staleflow.coordination.settings import CoordinationSettings
from staleflow.coordination.types import Abort, InstanceInfo, InstanceSnapshot, Interrupt, Route, pack_progress

LIMIT_MS = 50.0


class _Fleet:
    """Instances that grow by a token a cycle and lose a few trajectories; a new group takes every place."""

    def __init__(self, instances: int, trajectories: int, settings: CoordinationSettings) -> None:
        groups = max(1, trajectories // 16 // 2)
        ledger = make_ledger(settings.policy, batch_groups=groups, group_size=16, eta=1)
        infos = [InstanceInfo(i, i // 8, 256, 1 << 22) for i in range(instances)]
        self.core = Coordinator(settings, ledger, DEFAULT, infos)
        self.held: list[dict[int, int]] = [{} for _ in infos]
        self.applied, self.offered, self.rng = [0] * instances, 0, random.Random(0)
        self.core.published(0)

    def fill(self) -> None:
        while True:
            for _ in range(self.core.wanted()):
                self.core.offer(self.offered, 512, 20_000)
                self.offered += 1
            if not self._cycle()[1]:
                return

    def _cycle(self) -> tuple[float, int]:
        begin = time.thread_time()
        commands = self.core.cycle(time.monotonic())
        spent = time.thread_time() - begin
        routed = 0
        for c in commands:
            self.applied[c.instance] = c.id
            if isinstance(c, Route):
                self.held[c.instance].update(dict.fromkeys(c.tids, 0))
                routed += len(c.tids)
            elif isinstance(c, Interrupt | Abort):
                for tid in c.tids:
                    tokens = self.held[c.instance].pop(tid, None)
                    if tokens is not None and isinstance(c, Interrupt):
                        self.core.returned(tid, tokens)
        return spent, routed

    def step(self, ended: int) -> tuple[float, float]:
        """Seconds of taking in one snapshot per instance and `ended` facts, and of the cycle."""
        snapshots = []
        for i, held in enumerate(self.held):
            for tid in held:
                held[tid] += 1
            kv = sum(held.values()) + 512 * len(held)
            progress = pack_progress(held.items())
            snapshots.append(InstanceSnapshot(i, 0, self.applied[i], len(held), 0, kv, 1 << 22, progress))
        done = []
        for _ in range(ended):
            held = self.held[self.rng.randrange(len(self.held))]
            if held:
                tid = next(iter(held))
                done.append((tid, held.pop(tid)))
        begin = time.thread_time()
        for s in snapshots:
            self.core.snapshot(s, 0.0)
        for tid, tokens in done:
            self.core.finished(tid, tokens, 0, 1)
            self.core.rewarded(tid, float(tid & 1))
        taken = time.thread_time() - begin
        return taken, self._cycle()[0]


def _measure(instances: int, trajectories: int, cycles: int) -> dict[str, float]:
    fleet = _Fleet(instances, trajectories, CoordinationSettings())
    fleet.fill()
    in_flight = sum(map(len, fleet.held))
    ended = max(1, trajectories // 500)
    measured = [fleet.step(ended) for _ in range(cycles)]
    return {
        "instances": instances,
        "trajectories": in_flight,
        "facts_ms": 1e3 * median(t for t, _ in measured),
        "cycle_ms": 1e3 * median(c for _, c in measured),
        "worst_ms": 1e3 * max(t + c for t, c in measured),
        "total_ms": 1e3 * median(t + c for t, c in measured),
    }


def run(args: list[str]) -> dict[str, Any]:
    """`ours` is the median of snapshots + facts + cycle in ms at full scale; `scaling` holds smaller fleets."""
    parser = argparse.ArgumentParser(prog="staleflow bench coordinator")
    parser.add_argument("--cycles", type=int, default=20)
    cycles = parser.parse_args(args).cycles
    sizes = [(64, 6_250), (256, 25_000), (1024, 100_000)]
    scaling = {f"{i}x{t}": _measure(i, t, cycles) for i, t in sizes}
    full = scaling["1024x100000"]
    return {
        "bench": "coordinator",
        "unit": "CPU ms per cycle, snapshots and facts included",
        "ours": full["total_ms"],
        "limit": LIMIT_MS,
        "peers": {},
        "scaling": scaling,
    }
