"""Micro-batch records of a ring as packed batches on the trainer's device."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from staleflow.trajectories import microbatch
from staleflow.trajectories.pack import pack
from staleflow.trajectories.packed import PackedBatch
from staleflow.trajectories.pinning import DeviceReader
from staleflow.trajectories.ring import Record, Ring

Unpack = Callable[[Record], PackedBatch]


def unpack_to(device: torch.device, ring: Ring) -> Unpack:
    """`unpack(record)`: the batch, on `device`, sharing no memory with `ring`: the record may be released at once."""
    if device.type == "cpu":
        return _unpack_here
    return DeviceUnpack(DeviceReader(ring, device), torch.cuda.Stream(device))


def _unpack_here(record: Record) -> PackedBatch:
    data, offsets, advantages = microbatch.decode(record.payload)
    if not len(offsets):
        return PackedBatch.nothing()
    return pack(_tensor(data), _tensor(offsets), _tensor(advantages))


def _tensor(array: Any) -> Tensor:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", UserWarning)  # read-only memory of the ring: `pack` only reads it
        return torch.from_numpy(array)


class DeviceUnpack:
    """Copies a record as it lies in the ring and packs it on the device, beside the training of the batch before it.

    `pack` must know how many tokens there are before it can allocate, so it waits for its stream: with one of its own
    it waits for the copy only, not for what is queued on the current one. The copy's event has fired by then, and the
    record goes back to the producer before the batch is trained on.
    """

    def __init__(self, reader: DeviceReader, stream: torch.cuda.Stream | None) -> None:
        self._reader, self._stream = reader, stream

    def __call__(self, record: Record) -> PackedBatch:
        raw = self._reader.copy_to_device(record, self._stream)
        _, offsets, _ = microbatch.decode(record.payload)
        if len(offsets):
            with torch.cuda.stream(self._stream):
                batch = pack(*_parts(raw, len(offsets)))
        else:
            batch = PackedBatch.nothing().to(raw.device)
        self._reader.drain()
        self._hand_over(batch)
        return batch

    def _hand_over(self, batch: PackedBatch) -> None:
        """The current stream sees what `stream` has made, and the allocator knows of both."""
        if self._stream is None:
            return
        current = torch.cuda.current_stream(batch.input_ids.device)
        current.wait_stream(self._stream)
        for tensor in batch:
            tensor.record_stream(current)


def _parts(raw: Tensor, n: int) -> tuple[Tensor, Tensor, Tensor]:
    """What `microbatch.decode` gives, of a record of `n` trajectories that lies on a device."""
    offsets, advantages = raw[8 : 8 + 8 * n], raw[8 + 8 * n : 8 + 12 * n]
    return raw, offsets.view(torch.int64), advantages.view(torch.float32)
