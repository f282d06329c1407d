"""How a host and its device ranks come to share rings and parameter store: named, mapped by both, unlinked at once."""

from __future__ import annotations

import time
import zlib
from collections.abc import Sequence
from typing import Any

from staleflow.jobs.numa import nodes_of_devices
from staleflow.jobs.plan import RankPlan
from staleflow.jobs.runtime import Job
from staleflow.trajectories.ring import Ring, segment_name


def run_id_of(job: Job) -> int:
    """A number that tells this attempt's segments from every other's."""
    return zlib.crc32(job.job_id.encode())


def store_name(job: Job) -> str:
    return segment_name(job.config.run.name, run_id_of(job), f"node{job.me.node}-parameters")


def names_of(job: Job, ranks: Sequence[int]) -> list[str]:
    """What to call these ranks in an error."""
    return [f"rank {r} ({job.plan.ranks[r].role} on {job.nodes_of[r]['host']})" for r in ranks]


def create_rings(job: Job) -> dict[int, tuple[Ring, Ring]]:
    """Host: make the two rings of every device rank of this node and tell the ranks. {rank: (down, up)}"""
    rings = {}
    devices = job.plan.devices_of(job.me.node)
    for device, numa_node in zip(devices, nodes_of_devices(len(devices)), strict=True):
        sizes = job.plan.rings_of(device.rank)
        label = f"host of node {job.me.node}"
        options: Any = {"run_id": run_id_of(job), "label": label, "numa_node": numa_node}
        down = Ring.create(_name(job, device, "down"), sizes.down_bytes, **options)
        up = Ring.create(_name(job, device, "up"), sizes.up_bytes, **options)
        down.claim_producer()
        up.claim_consumer()
        rings[device.rank] = (down, up)
        job.post(f"rings/{device.rank}", [down.name, up.name])
    return rings


def attach_rings(job: Job) -> tuple[Ring, Ring]:
    """Device rank: map its rings; `tell_mapped` comes after what else it maps. (down, up)"""
    host = f"rank {job.plan.host_of(job.rank)} (host)"
    names = job.read(f"rings/{job.rank}", job.config.fault.start_timeout_s, host)
    label = f"rank {job.rank} ({job.me.role})"
    down, up = (Ring.attach(name, run_id=run_id_of(job), label=label) for name in names)
    down.claim_consumer()
    up.claim_producer()
    return down, up


def tell_mapped(job: Job) -> None:
    """Device rank: all that its host shares with it is mapped; the names may go."""
    job.post(f"mapped/{job.rank}", True)


class Unmapped:
    """Host: the device ranks of the node that have not mapped yet what it shares with them."""

    def __init__(self, job: Job) -> None:
        self._job = job
        self.waiting = {device.rank for device in job.plan.devices_of(job.me.node)}
        self._looked_s = 0.0

    def look(self) -> set[int]:
        """Who is still missing; asks the store at most every 0.1 s. Empty: the names can be removed."""
        now_s = time.monotonic()
        if now_s - self._looked_s > 0.1:
            self._looked_s = now_s
            self.waiting = {rank for rank in self.waiting if not self._job.posted(f"mapped/{rank}")}
        return self.waiting


def _name(job: Job, device: RankPlan, way: str) -> str:
    return segment_name(job.config.run.name, run_id_of(job), f"rank{device.rank}-{way}")
