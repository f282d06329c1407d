"""What the lane asks of torch's CUDA part, which stands here as it is built: no GPU takes part."""

from __future__ import annotations

import os
import uuid
from dataclasses import dataclass
from datetime import timedelta
from types import SimpleNamespace

import pytest
import torch.distributed as dist

from staleflow.jobs.runtime import Job
from staleflow.roles.plane import gpu_number

WAITS_BLOCKINGLY = "TORCH_NCCL_BLOCKING_WAIT"


@dataclass
class DeviceUuid:
    """torch's class for it has `bytes` and its text, and nothing of `uuid.UUID`."""

    bytes: list[int]

    def __str__(self) -> str:
        return str(uuid.UUID(bytes=bytes(self.bytes)))


def test_a_gpu_is_known_by_the_text_of_its_uuid() -> None:
    one, other, zero = DeviceUuid(list(range(16))), DeviceUuid(list(range(1, 17))), DeviceUuid([0] * 16)
    assert gpu_number(one) == gpu_number(DeviceUuid(list(range(16)))) != gpu_number(other)
    assert gpu_number(zero) == 1
    assert all(0 < gpu_number(one) < 2**63 for one in (one, other, DeviceUuid([255] * 16)))


@pytest.mark.parametrize("before", [None, "0"])
def test_only_the_lane_is_made_without_the_watchdog_that_ends_the_process(
    before: str | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    made = []

    class Nccl:
        Options = SimpleNamespace

        def __init__(self, store: dist.Store, rank: int, size: int, options: SimpleNamespace) -> None:
            made.append((rank, size, options._timeout, os.environ[WAITS_BLOCKINGLY]))

    monkeypatch.setattr(dist, "ProcessGroupNCCL", Nccl, raising=False)
    monkeypatch.delenv(WAITS_BLOCKINGLY, raising=False)
    if before is not None:
        monkeypatch.setenv(WAITS_BLOCKINGLY, before)
    limit = timedelta(seconds=7)
    job = SimpleNamespace(rank=5, timeout=limit, store=SimpleNamespace(clone=dist.HashStore))
    Job.device_group(job, "publish", (3, 5, 8))
    assert made == [(1, 3, limit, "1")]
    assert os.environ.get(WAITS_BLOCKINGLY) == before
