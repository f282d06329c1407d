"""The parameter plane of a job: its ends on each rank, for the transport in its config (`parameters.transports`).

| transport   | members of the group `publish` | who says that a version can be pulled | pulled from           |
|-------------|--------------------------------|---------------------------------------|-----------------------|
| `broadcast` | trainers, relays               | each relay: `Stored`                  | the node's `NodeStore`|
| `file`      | no such group                  | a watcher on each such node: `Stored` | `FileSource`          |
| `direct`    | trainers, rollout ranks        | the first trainer rank: `Offered`     | `DirectSource`        |
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any
from uuid import UUID

from staleflow.jobs import rings
from staleflow.jobs.devices import cuda_index
from staleflow.jobs.runtime import Job
from staleflow.parameters.manifest import Manifest

if TYPE_CHECKING:
    import torch

    from staleflow.parameters.file import FileWatch
    from staleflow.parameters.lane import LaneOffer
    from staleflow.parameters.publish import Publisher
    from staleflow.parameters.pull import Source
    from staleflow.parameters.transports import Transport


def manifest_of(job: Job) -> Manifest:
    return Manifest.from_model_dir(job.config.model.path, job.config.parameters.wire_dtype)


def has_stores(job: Job) -> bool:
    """Whether nodes with rollout ranks hold versions in shared memory."""
    return job.config.parameters.transport == "broadcast"


def publish_group(job: Job) -> Any:
    """Trainer and rollout ranks, before they enter their role's world; None where this rank is in no such group."""
    members = job.plan.publish
    return job.group("publish", members) if job.rank in members else None


def publisher_of(job: Job, group: Any, parameters: Iterable[tuple[str, torch.Tensor]]) -> Publisher:
    """A trainer rank's end."""
    from staleflow.parameters.publish import Publisher

    manifest = manifest_of(job)
    return Publisher(
        parameters,
        manifest,
        group,
        trainer_ranks_in_group=range(len(job.plan.trainers)),
        bucket_bytes=_bucket_bytes(job),
        delta=job.config.parameters.delta,
        names=rings.names_of(job, job.plan.publish),
        timeout_s=job.config.fault.collective_timeout_s,
        transport=_transport(job, group, manifest),
        trainer=job.plan.trainers.index(job.rank),
        offer=lane_offer(job, 0, job.plan.publish) if has_stores(job) else None,  # `direct` gets its own below
    )


def source_of(job: Job, group: Any) -> Source:
    """A rollout rank's end: what it pulls from."""
    if has_stores(job):
        return _attach_store(job)
    if job.config.parameters.transport == "file":
        from staleflow.parameters.file import FileSource

        return FileSource(_versions_dir(job), manifest_of(job))
    from staleflow.parameters.direct import DirectSource

    timeout_s, names = job.config.fault.collective_timeout_s, rings.names_of(job, job.plan.publish)
    trainers = range(len(job.plan.trainers))
    offer = lane_offer(job, 0, job.plan.publish)
    return DirectSource(group, manifest_of(job), trainers, names=names, timeout_s=timeout_s, offer=offer)


def publish_name(generation: int) -> str:
    """The publish group's name; a loss begins another generation."""
    return f"publish-{generation}" if generation else "publish"


def lane_offer(job: Job, generation: int, ranks: tuple[int, ...]) -> LaneOffer | None:
    """What this rank offers the publish group of these `ranks`; None without a GPU.

    A host has no GPU of its own: its relay uses that of the first rollout rank on its node, and a little memory.
    """
    import torch

    from staleflow.parameters.lane import LaneOffer

    if job.config.parameters.backend == "gloo" or not torch.cuda.is_available():
        return None
    there = job.plan.devices_of(job.me.node)
    planned = job.me if job.me.role != "host" else next(rank for rank in there if rank.role == "rollout")
    index = cuda_index(planned.device or 0, len(there), os.environ) % torch.cuda.device_count()
    device_id = gpu_number(torch.cuda.get_device_properties(index).uuid)
    group = partial(job.device_group, publish_name(generation), ranks)
    return LaneOffer(torch.device("cuda", index), device_id, group)


def gpu_number(uuid: Any) -> int:
    """A GPU's UUID as an int64 that is not 0. torch's own class for it has no numeric form, only its text."""
    return UUID(str(uuid)).int % (1 << 63) or 1


def pin(source: Source) -> None:
    """Where versions lie in shared memory: let the device copy straight from there."""
    from staleflow.parameters.store import NodeStore

    if isinstance(source, NodeStore):
        source.register_cuda()


def watch_of(
    job: Job, on_stored: Callable[[int, float], None], on_error: Callable[[BaseException], None]
) -> FileWatch | None:
    """A host's end with `file`: it sees to it that the coordinator hears of versions."""
    if job.config.parameters.transport != "file" or job.rank not in job.plan.relays:
        return None
    from staleflow.parameters.file import FileSource, FileWatch

    return FileWatch(FileSource(_versions_dir(job), manifest_of(job)), on_stored, on_error)


def _transport(job: Job, group: Any, manifest: Manifest) -> Transport | None:
    """None: the publisher's own, `broadcast`, which can also make a new group after a loss."""
    match job.config.parameters.transport:
        case "file":
            from staleflow.parameters.file import File

            number, count = job.plan.trainers.index(job.rank), len(job.plan.trainers)
            return File(_versions_dir(job), manifest, number, count)
        case "direct":
            from staleflow.parameters.direct import Direct

            names, timeout_s = rings.names_of(job, job.plan.publish), job.config.fault.collective_timeout_s
            trainers = range(len(job.plan.trainers))
            offer = lane_offer(job, 0, job.plan.publish)
            bucket_bytes = _bucket_bytes(job)
            return Direct(group, manifest, trainers, bucket_bytes, names=names, timeout_s=timeout_s, offer=offer)
        case _:
            return None


def _bucket_bytes(job: Job) -> int:
    return int(job.config.parameters.bucket_mib * (1 << 20))


def _versions_dir(job: Job) -> Path:
    """Each attempt publishes anew from its checkpoint on."""
    return job.run_dir / f"attempt_{job.attempt}" / "parameters"


def _attach_store(job: Job) -> Source:
    from staleflow.parameters.store import NodeStore

    host = f"rank {job.plan.host_of(job.rank)} (host)"
    name = job.read(f"store/{job.me.node}", job.config.fault.start_timeout_s, host)
    return NodeStore.attach(name)
