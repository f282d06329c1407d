"""A micro-batch as one ring record: trajectory records and their advantages, read by `pack` without another copy.

0   i64 n | 8  i64 offsets[n] (from the start of the payload) | f32 advantages[n], padded to 8 | trajectory records,
each starting at a multiple of 8
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import numpy.typing as npt


def _aligned(nbytes: int) -> int:
    return (nbytes + 7) & ~7


def _head_bytes(n: int) -> int:
    return 8 + 8 * n + _aligned(4 * n)


def encoded_bytes(record_sizes: Sequence[int]) -> int:
    """Bytes of the micro-batch that holds records of these sizes."""
    return _head_bytes(len(record_sizes)) + sum(_aligned(size) for size in record_sizes)


def encode_into(out: Any, records: Sequence[Any], advantages: Sequence[float]) -> None:
    """Fill `out` (a writable buffer of `encoded_bytes`): one copy of each record, straight to where it is read."""
    n = len(records)
    view = np.frombuffer(out, np.uint8)
    head = view[: _head_bytes(n)]
    head[:8].view("<i8")[0] = n
    offsets = head[8 : 8 + 8 * n].view("<i8")
    head[8 + 8 * n : 8 + 12 * n].view("<f4")[:] = advantages
    at = len(head)
    for i, record in enumerate(records):
        raw = np.frombuffer(record, np.uint8)
        offsets[i] = at
        view[at : at + raw.size] = raw
        at += _aligned(raw.size)


def decode(payload: Any) -> tuple[npt.NDArray[np.uint8], npt.NDArray[np.int64], npt.NDArray[np.float32]]:
    """(bytes, offsets into them, advantages): views into `payload`, valid as long as it is."""
    view = np.frombuffer(payload, np.uint8)
    n = int(view[:8].view("<i8")[0])
    offsets = view[8 : 8 + 8 * n].view("<i8")
    advantages = view[8 + 8 * n : 8 + 12 * n].view("<f4")
    return view, offsets, advantages
