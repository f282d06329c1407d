"""From pinned shared memory to the device: as fast as from torch's own pinned memory, and right."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator

import numpy as np
import pytest

torch = pytest.importorskip("torch")

from staleflow.trajectories import microbatch, ops  # noqa: E402
from staleflow.trajectories.arena import Arena  # noqa: E402
from staleflow.trajectories.pinning import DeviceReader, cuda_runtime, pin  # noqa: E402
from staleflow.trajectories.ring import Ring, segment_name  # noqa: E402
from staleflow.trajectories.schema import Trajectory, encode  # noqa: E402
from staleflow.trajectories.unpacking import unpack_to  # noqa: E402

RECORD_BYTES = 64 << 20
RUN_ID = 7


@pytest.fixture
def pinned_ring() -> Iterator[Ring]:
    ring = Ring.create(segment_name("gpu", RUN_ID, f"ring{os.getpid()}"), 1 << 30, run_id=RUN_ID)
    ring.unlink()
    pinning = pin(ring.data, "ring", cuda_runtime())
    assert pinning.chunks, "the driver refused to pin; see the warning"
    yield ring
    pinning.unpin()


def test_pinned_memory_is_known_to_torch_as_pinned(pinned_ring: Ring) -> None:
    assert torch.frombuffer(pinned_ring.data, dtype=torch.uint8).is_pinned()


def test_records_arrive_and_are_released_when_copied(pinned_ring: Ring) -> None:
    sent = [os.urandom(100_000) for _ in range(8)]
    for payload in sent:
        pinned_ring.push(1, payload)
    reader, stream = DeviceReader(pinned_ring, torch.device("cuda")), torch.cuda.Stream()
    copies = [reader.copy_to_device(record, stream) for record in pinned_ring.peek(8)]
    reader.drain()
    assert pinned_ring.used == 0
    assert [bytes(copy.cpu().numpy()) for copy in copies] == sent


def test_a_microbatch_is_unpacked_on_the_device_as_on_the_cpu(pinned_ring: Ring) -> None:
    tokens, logprobs = np.arange(1000, dtype=np.int32), np.linspace(-1, 0, 700, dtype=np.float32)
    records = [bytes(encode(Trajectory(0, n, 3, 300, tokens + n, logprobs, ((3, 500), (4, 200))))) for n in range(5)]
    for _ in range(2):
        view = pinned_ring.reserve(microbatch.encoded_bytes([len(one) for one in records]), 1)
        microbatch.encode_into(view, records, [0.5] * 5)
        pinned_ring.commit()
    first, second = pinned_ring.peek(2)
    on_device = unpack_to(torch.device("cuda"), pinned_ring)(first)
    assert pinned_ring.unreleased == 1, "the copy is done, the record is given back"
    here = unpack_to(torch.device("cpu"), pinned_ring)(second)
    pinned_ring.release(second.sequence)
    assert all(torch.equal(a.cpu(), b) for a, b in zip(on_device, here, strict=True))


def seconds(copy: Callable[[], object], repeats: int = 10) -> float:
    """Device time of one copy, the best of several."""
    times = []
    for _ in range(repeats):
        begin, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        begin.record()
        copy()
        end.record()
        end.synchronize()
        times.append(begin.elapsed_time(end) / 1000)
    return min(times)


def test_bandwidth_from_the_ring_is_that_of_pinned_memory(pinned_ring: Ring) -> None:
    """At least 90 % of cudaMemcpyAsync from torch's pinned memory: the ring adds nothing to a copy."""
    pinned_ring.push(1, bytes(RECORD_BYTES))
    (record,) = pinned_ring.peek(1)
    memory = torch.frombuffer(pinned_ring.data, dtype=torch.uint8)
    from_ring = memory[record.offset : record.offset + RECORD_BYTES]
    plain = torch.zeros(RECORD_BYTES, dtype=torch.uint8).pin_memory()
    target = torch.empty(RECORD_BYTES, dtype=torch.uint8, device="cuda")
    ours = seconds(lambda: target.copy_(from_ring, non_blocking=True))
    best = seconds(lambda: target.copy_(plain, non_blocking=True))
    print(f"H2D from the ring {RECORD_BYTES / ours / 1e9:.1f} GB/s, from pinned memory {RECORD_BYTES / best / 1e9:.1f}")
    assert best / ours >= 0.9


def test_a_pull_from_a_pinned_slot_is_whole() -> None:
    """Weights written into shared memory by the CPU, copied to the device, judged there by their checksum."""
    arena = Arena.create(segment_name("gpu", RUN_ID, f"slot{os.getpid()}"), 256 << 20, run_id=RUN_ID)
    arena.unlink()
    pinning = pin(arena.data, "slot", cuda_runtime())
    weights = torch.randn(32 << 20).bfloat16()
    slot = torch.frombuffer(arena.data, dtype=torch.bfloat16)[: weights.numel()]
    slot.copy_(weights)
    pulled = slot.to("cuda", non_blocking=True)
    torch.cuda.synchronize()
    assert ops.checksum(pulled) == ops.checksum(weights)
    pinning.unpin()
