"""`staleflow bench delta`: finding what changed between two versions of bf16 weights, against torch and the memory.

Unit: bytes of weights (both versions) read per second. `limit` is a copy's bytes read and written per second. One
percent of the values differ, scattered: what a step at RL learning rates leaves in bf16.
"""

from __future__ import annotations

import os
from typing import Any

from staleflow.benches.pack import best_s, memcpy_bytes_per_s

VALUES = 64 << 20
CHANGED = 0.01


def run(args: list[str]) -> dict[str, Any]:
    """`--quick` compares an eighth of the values."""
    import torch

    from staleflow.trajectories import ops

    count = VALUES // (8 if "--quick" in args else 1)
    new, old = _versions(count)
    indices, values = ops.delta_encode(new, old)
    assert torch.equal(indices.long(), _encode_in_torch(new, old)[0]), "the two do not find the same"
    read, slot = 4 * count, old.clone()
    return {
        "bench": "delta",
        "unit": "bytes/s",
        "ours": read / best_s(lambda: ops.delta_encode(new, old)),
        "limit": memcpy_bytes_per_s(),
        "peers": {"torch": read / best_s(lambda: _encode_in_torch(new, old))},
        "apply_values_per_s": len(indices) / best_s(lambda: ops.delta_apply(slot, indices, values)),
        "torch_apply_values_per_s": len(indices) / best_s(lambda: _apply_in_torch(slot, indices, values)),
        "checksum_bytes_per_s": 2 * count / best_s(lambda: ops.checksum(new)),
        "changed": len(indices) / count,
        "threads": torch.get_num_threads(),
        "load_1m": os.getloadavg()[0],
    }


def _versions(count: int) -> tuple[Any, Any]:
    import torch

    torch.manual_seed(0)
    old = torch.randn(count).bfloat16()
    places = torch.randint(0, count, (int(CHANGED * count),))
    bits = old.view(torch.int16).clone()
    bits[places] ^= 1
    return bits.view(torch.bfloat16), old


def _encode_in_torch(new: Any, old: Any) -> tuple[Any, Any]:
    import torch

    indices = (new.view(torch.int16) != old.view(torch.int16)).nonzero().flatten()
    return indices, new[indices]


def _apply_in_torch(target: Any, indices: Any, values: Any) -> None:
    target.index_copy_(0, indices.long(), values)
