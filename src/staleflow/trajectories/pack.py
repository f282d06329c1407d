"""From trajectory records, where they lie in a ring or an arena, to one packed batch, and back."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise

import torch
from torch import Tensor

from staleflow.trajectories import ops  # noqa: F401  (loads torch.ops.staleflow)
from staleflow.trajectories.packed import PackedBatch


def pack(buffer: Tensor, offsets: Tensor, advantages: Tensor) -> PackedBatch:
    """One pass over the records at `offsets` int64 [S] (multiples of 8) in `buffer` uint8 [n], 8-byte aligned.

    `advantages` float32 [S] replaces what the records say. All on one device; the result is there too, and shares no
    memory with `buffer`. RuntimeError names the first broken record (CUDA: the kind of fault and its trajectory).
    """
    return PackedBatch(*torch.ops.staleflow.pack(buffer, offsets, advantages))


def pack_records(buffer: memoryview, offsets: Sequence[int], advantages: Sequence[float]) -> PackedBatch:
    """`pack` over writable shared memory: ``ring.data`` with record offsets, or ``arena.data`` with block offsets."""
    data = torch.frombuffer(buffer, dtype=torch.uint8)
    return pack(data, torch.tensor(offsets, dtype=torch.int64), torch.tensor(advantages, dtype=torch.float32))


def unpack(packed: PackedBatch) -> list[PackedBatch]:
    """The trajectories apart again, as views: a batch of one trajectory each, with its own `cu_seqlens`."""
    ends = packed.cu_seqlens.tolist()
    return [_slice(packed, begin, end) for begin, end in pairwise(ends)]


def _slice(packed: PackedBatch, begin: int, end: int) -> PackedBatch:
    parts = {name: tensor[begin:end] for name, tensor in packed._asdict().items() if name != "cu_seqlens"}
    return PackedBatch(**parts, cu_seqlens=packed.cu_seqlens.new_tensor([0, end - begin]))
