"""The tensor ops of csrc under ``torch.ops.staleflow``: packing, parameter deltas, checksum.

Importing this module loads the library (torch's stable ABI, so one build serves torch 2.10 and later; ``_ops_cuda``
only where torch sees a GPU) and registers the fake kernels that torch.compile and export ask for.

Misuse (wrong dtype, broken record, index out of range) is a RuntimeError that says what was wrong; nothing is written.
"""

from __future__ import annotations

from functools import cache
from pathlib import Path

import torch
from torch import Tensor

_PACKAGE = Path(__file__).resolve().parent.parent


@cache
def load() -> None:
    """Load the libraries. ImportError when they were not built."""
    library = _PACKAGE / "_ops.so"
    if not library.exists():
        raise ImportError(
            f"{library} is missing: the tensor ops are built where torch is; with torch installed run "
            "`pip install --no-build-isolation -e .`"
        )
    torch.ops.load_library(str(library))
    cuda_library = _PACKAGE / "_ops_cuda.so"
    if torch.version.cuda and torch.cuda.is_available() and cuda_library.exists():
        torch.ops.load_library(str(cuda_library))
    _register_fakes()


def delta_encode(new: Tensor, old: Tensor) -> tuple[Tensor, Tensor]:
    """What changed from `old` to `new`, bit for bit (NaN payloads and -0 included).

    `new`, `old`: bfloat16, contiguous, any shape, equally many values (at most 2^31 - 1: encode per bucket).
    Returns `indices` int32 [k], ascending places in the flattened tensor, and `values` bfloat16 [k] = new[indices].
    Reads both once; scratch memory grows with what changed, 6 bytes a value.
    """
    return torch.ops.staleflow.delta_encode(new, old)


def delta_apply(target: Tensor, indices: Tensor, values: Tensor) -> None:
    """Write `values` bfloat16 [k] at places `indices` int32 [k] of the flattened, contiguous bfloat16 `target`.

    Every index is checked before the first is written.
    """
    torch.ops.staleflow.delta_apply(target, indices, values)


def checksum(data: Tensor) -> int:
    """64-bit checksum of a contiguous tensor's bytes, any dtype; the same number on CPU and CUDA.

    Every change within one 8-byte word changes it; others go unseen with probability 2^-64. Not cryptographic.
    Waits for the device, since it returns a Python int.
    """
    return int(torch.ops.staleflow.checksum(data.reshape(-1).view(torch.uint8)))


def _register_fakes() -> None:
    @torch.library.register_fake("staleflow::delta_encode")
    def _(new: Tensor, old: Tensor) -> tuple[Tensor, Tensor]:
        changed = torch.library.get_ctx().new_dynamic_size()
        return new.new_empty(changed, dtype=torch.int32), new.new_empty(changed)

    @torch.library.register_fake("staleflow::delta_apply")
    def _(target: Tensor, indices: Tensor, values: Tensor) -> None:
        return None

    @torch.library.register_fake("staleflow::checksum")
    def _(data: Tensor) -> Tensor:
        return data.new_empty((), dtype=torch.int64)

    @torch.library.register_fake("staleflow::pack")
    def _(data: Tensor, offsets: Tensor, advantages: Tensor) -> tuple[Tensor, ...]:
        tokens = torch.library.get_ctx().new_dynamic_size()
        ints, floats = data.new_empty(tokens, dtype=torch.int64), data.new_empty(tokens, dtype=torch.float32)
        cu_seqlens = data.new_empty(offsets.numel() + 1, dtype=torch.int32)
        versions = data.new_empty(tokens, dtype=torch.int32)
        empty = torch.empty_like
        return ints, empty(ints), cu_seqlens, floats, versions, empty(floats), empty(floats)


load()
