"""Shared memory registered with CUDA, and copies that go from a ring straight to the device.

A record is released only when the event behind its copy has fired: until then the device may still read it.
"""

from __future__ import annotations

import warnings
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Protocol

import torch
from torch import Tensor

from staleflow.trajectories.ring import Record, Ring

MAX_CHUNK_BYTES = 64 << 30  # some drivers refuse to register 512 GiB in one call


class CudaRuntime(Protocol):
    """The three calls that pinning needs; codes are cudaError_t, 0 is success."""

    def host_register(self, address: int, nbytes: int) -> int: ...
    def host_unregister(self, address: int) -> int: ...
    def describe(self, code: int) -> str: ...


class TorchCudaRuntime:
    """The CUDA runtime that torch has loaded."""

    def __init__(self) -> None:
        self._cudart = torch.cuda.cudart()

    def host_register(self, address: int, nbytes: int) -> int:
        return int(self._cudart.cudaHostRegister(address, nbytes, 0))

    def host_unregister(self, address: int) -> int:
        return int(self._cudart.cudaHostUnregister(address))

    def describe(self, code: int) -> str:
        return f"cudaError {code}: {self._cudart.cudaGetErrorString(self._cudart.cudaError(code))}"


def cuda_runtime() -> CudaRuntime | None:
    """The runtime, or None on a machine without a GPU."""
    return TorchCudaRuntime() if torch.cuda.is_available() else None


@dataclass
class Pinning:
    """What was registered: (address, bytes) per chunk; empty when the memory stayed pageable."""

    runtime: CudaRuntime | None
    chunks: list[tuple[int, int]] = field(default_factory=list)

    def unpin(self) -> None:
        """Undo the registration, before the memory is unmapped. RuntimeError when CUDA refuses."""
        while self.chunks and self.runtime:
            address, _ = self.chunks.pop()
            code = self.runtime.host_unregister(address)
            if code:
                raise RuntimeError(f"cannot unpin memory at {address:#x}: {self.runtime.describe(code)}")


def pin(memory: memoryview, what: str, runtime: CudaRuntime | None, *, chunk_bytes: int = MAX_CHUNK_BYTES) -> Pinning:
    """Register writable, page-aligned `memory` (``ring.data``, ``arena.data``) in chunks.

    Where CUDA refuses (locked-memory limit, say) everything stays pageable: slower, and one warning names `what`.
    """
    pinning = Pinning(runtime)
    if runtime is None:
        return pinning
    start = torch.frombuffer(memory, dtype=torch.uint8).data_ptr()
    for offset in range(0, memory.nbytes, chunk_bytes):
        address, nbytes = start + offset, min(chunk_bytes, memory.nbytes - offset)
        code = runtime.host_register(address, nbytes)
        if code:
            pinning.unpin()
            text = f"{what}: {memory.nbytes} bytes stay pageable, copies to the device will be slower"
            warnings.warn(f"{text} ({runtime.describe(code)}; check `ulimit -l`)", RuntimeWarning, stacklevel=2)
            return pinning
        pinning.chunks.append((address, nbytes))
    return pinning


class Event(Protocol):
    """What is asked of torch.cuda.Event."""

    def record(self, stream: torch.cuda.Stream | None = None) -> None: ...
    def query(self) -> bool: ...
    def synchronize(self) -> None: ...


class DeviceReader:
    """Consumer of a ring whose records go to a device.

    Consumes: the ring. Waits for: nothing but, in `drain`, the device. Unblocks: the producer, by releasing.
    """

    def __init__(self, ring: Ring, device: torch.device, event: Callable[[], Event] = torch.cuda.Event) -> None:
        self._ring = ring
        self._device = device
        self._event = event
        self._memory = torch.frombuffer(ring.data, dtype=torch.uint8)
        self._in_flight: deque[tuple[int, Event]] = deque()

    def copy_to_device(self, record: Record, stream: torch.cuda.Stream | None = None) -> Tensor:
        """uint8 tensor on the device; the copy is queued on `stream` (None: the current one), whose work sees it."""
        source = self._memory[record.offset : record.offset + len(record.payload)]
        event = self._event()
        with torch.cuda.stream(stream):
            copied = source.to(self._device, non_blocking=True, copy=True)
            event.record(stream)
        self._in_flight.append((record.sequence, event))
        return copied

    def release_done(self) -> int:
        """Release the records whose copies have completed, oldest first; returns how many are still in flight."""
        done = None
        while self._in_flight and self._in_flight[0][1].query():
            done, _ = self._in_flight.popleft()
        if done is not None:
            self._ring.release(done)
        return len(self._in_flight)

    def drain(self) -> None:
        """Wait for the device and release everything copied."""
        if self._in_flight:
            self._in_flight[-1][1].synchronize()
        self.release_done()
