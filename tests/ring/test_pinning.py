"""Pinning, device copies and unpacking, with a CUDA runtime and events that the tests steer."""

from __future__ import annotations

import warnings

import numpy as np
import pytest

torch = pytest.importorskip("torch")

from staleflow.learning.batch import pack as pack_in_numpy  # noqa: E402
from staleflow.trajectories import microbatch  # noqa: E402
from staleflow.trajectories.pinning import DeviceReader, cuda_runtime, pin  # noqa: E402
from staleflow.trajectories.schema import Trajectory, encode  # noqa: E402
from staleflow.trajectories.unpacking import DeviceUnpack, unpack_to  # noqa: E402


class FakeRuntime:
    def __init__(self, fail_at: int = -1) -> None:
        self.registered: dict[int, int] = {}
        self.calls = 0
        self._fail_at = fail_at

    def host_register(self, address: int, nbytes: int) -> int:
        self.calls += 1
        if self.calls - 1 == self._fail_at:
            return 2
        self.registered[address] = nbytes
        return 0

    def host_unregister(self, address: int) -> int:
        return 0 if self.registered.pop(address, None) else 1

    def describe(self, code: int) -> str:
        return {1: "invalid value", 2: "out of memory"}[code]


class FakeEvent:
    def __init__(self) -> None:
        self.done = False

    def record(self, stream: object = None) -> None:
        self.done = False

    def query(self) -> bool:
        return self.done

    def synchronize(self) -> None:
        self.done = True


def test_chunks_cover_the_memory_and_nothing_else(make_ring) -> None:
    ring, runtime = make_ring(1 << 16), FakeRuntime()
    pinning = pin(ring.data, "ring", runtime, chunk_bytes=20_000)
    assert [nbytes for _, nbytes in pinning.chunks] == [20_000, 20_000, 20_000, 5_536]
    assert all(a + n == b for (a, n), (b, _) in zip(pinning.chunks, pinning.chunks[1:], strict=False))
    pinning.unpin()
    assert runtime.registered == {}


def test_a_refusal_leaves_everything_pageable_with_one_warning(make_ring) -> None:
    runtime = FakeRuntime(fail_at=2)
    with pytest.warns(RuntimeWarning, match=r"down ring: 65536 bytes stay pageable.*out of memory.*ulimit -l") as seen:
        pinning = pin(make_ring(1 << 16).data, "down ring", runtime, chunk_bytes=20_000)
    assert len(seen) == 1
    assert pinning.chunks == []
    assert runtime.registered == {}


def test_an_unpinning_that_fails_is_not_swallowed(make_ring) -> None:
    runtime = FakeRuntime()
    pinning = pin(make_ring(1 << 16).data, "ring", runtime)
    runtime.registered.clear()
    with pytest.raises(RuntimeError, match=r"cannot unpin.*invalid value"):
        pinning.unpin()


def test_without_a_gpu_nothing_is_pinned_and_nothing_said(make_ring) -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        pinning = pin(make_ring(4096).data, "ring", cuda_runtime() if not torch.cuda.is_available() else None)
    assert pinning.chunks == []
    pinning.unpin()


def test_a_record_is_released_when_its_copy_is_done_and_not_before(make_ring) -> None:
    ring = make_ring(4096)
    events: list[FakeEvent] = []

    def make_event() -> FakeEvent:
        events.append(FakeEvent())
        return events[-1]

    reader = DeviceReader(ring, torch.device("cpu"), make_event)
    ring.push_batch([(1, bytes([n]) * 100) for n in range(3)])
    copies = [reader.copy_to_device(record) for record in ring.peek(3)]
    assert [copy.tolist() for copy in copies] == [[n] * 100 for n in range(3)]
    assert reader.release_done() == 3
    assert ring.unreleased == 3
    events[1].done = True
    assert reader.release_done() == 3, "the first is still read by the device"
    events[0].done = True
    assert reader.release_done() == 1
    assert ring.unreleased == 1
    reader.drain()
    assert ring.used == 0
    assert [copy.tolist() for copy in copies] == [[n] * 100 for n in range(3)], "copies, not views"


def some(count: int) -> list[Trajectory]:
    rng = np.random.default_rng(count)
    made = []
    for member in range(count):
        prompt, response = (int(n) for n in rng.integers(1, 30, 2))
        tokens = rng.integers(0, 1000, prompt + response, dtype=np.int32)
        logprobs = rng.standard_normal(response).astype(np.float32)
        made.append(Trajectory(0, member, 2, prompt, tokens, logprobs, ((2, response),)))
    return made


@pytest.mark.parametrize("count", [0, 1, 7])
@pytest.mark.parametrize("on_device", [False, True])
def test_a_microbatch_comes_out_of_the_ring_as_it_was_sent(make_ring, count: int, on_device: bool) -> None:
    """The device's way with the CPU as device: the same batch, and the record released before it is trained on."""
    ring, trajectories = make_ring(1 << 16), some(count)
    records, advantages = [bytes(encode(one)) for one in trajectories], [float(n) - 0.5 for n in range(count)]
    view = ring.reserve(microbatch.encoded_bytes([len(one) for one in records]), 1)
    microbatch.encode_into(view, records, advantages)
    ring.commit()
    cpu = torch.device("cpu")
    unpack = DeviceUnpack(DeviceReader(ring, cpu, FakeEvent), None) if on_device else unpack_to(cpu, ring)
    (record,) = ring.peek(2)
    batch = unpack(record)
    assert ring.unreleased == (0 if on_device else 1)
    ring.release(record.sequence)
    ring.data[:] = bytes(len(ring.data))
    expected = pack_in_numpy(trajectories, advantages)
    for name, got, wanted in zip(batch._fields, batch, expected, strict=True):
        assert got.dtype == wanted.dtype, name
        assert torch.equal(got, wanted), name
