"""From trajectory records, where they lie in a ring or an arena, to one packed batch, and back.

Alignment, everywhere: the value at place t belongs to the token at place t (log-probability and version of *that*
token), not to the one it predicts; the loss shifts.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise
from typing import NamedTuple

import torch
from torch import Tensor

from staleflow.trajectories import ops  # noqa: F401  (loads torch.ops.staleflow)


class Packed(NamedTuple):
    """T tokens of S trajectories, one after the other, no padding.

    `input_ids`, `positions` int64 [T], positions from 0 in each; `cu_seqlens` int32 [S+1]; on response tokens
    `logprobs` float32 [T] the engine's, `versions` int32 [T] who made the token, `loss_mask` float32 [T] 1,
    `advantages` float32 [T] the trajectory's; on prompt tokens 0, -1, 0 and 0.
    """

    input_ids: Tensor
    positions: Tensor
    cu_seqlens: Tensor
    logprobs: Tensor
    versions: Tensor
    loss_mask: Tensor
    advantages: Tensor


def pack(buffer: Tensor, offsets: Tensor, advantages: Tensor) -> Packed:
    """One pass over the records at `offsets` int64 [S] (multiples of 8) in `buffer` uint8 [n], 8-byte aligned.

    `advantages` float32 [S] replaces what the records say. All on one device; the result is there too, and shares no
    memory with `buffer`. RuntimeError names the first broken record (CUDA: the kind of fault and its trajectory).
    """
    return Packed(*torch.ops.staleflow.pack(buffer, offsets, advantages))


def pack_records(buffer: memoryview, offsets: Sequence[int], advantages: Sequence[float]) -> Packed:
    """`pack` over writable shared memory: ``ring.data`` with record offsets, or ``arena.data`` with block offsets."""
    data = torch.frombuffer(buffer, dtype=torch.uint8)
    return pack(data, torch.tensor(offsets, dtype=torch.int64), torch.tensor(advantages, dtype=torch.float32))


def unpack(packed: Packed) -> list[Packed]:
    """The trajectories apart again, as views: one `Packed` of one trajectory each, with its own `cu_seqlens`."""
    ends = packed.cu_seqlens.tolist()
    return [_slice(packed, begin, end) for begin, end in pairwise(ends)]


def _slice(packed: Packed, begin: int, end: int) -> Packed:
    parts = {name: getattr(packed, name)[begin:end] for name in Packed._fields if name != "cu_seqlens"}
    return Packed(**parts, cu_seqlens=packed.cu_seqlens.new_tensor([0, end - begin]))
