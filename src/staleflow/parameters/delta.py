"""Deltas: only the 16-bit words of a piece that changed since the last version, found by csrc's `delta_encode`.

At RL learning rates about 99 % of bf16 weights are bit-identical between steps. Words are compared as bits, so that
NaN payloads and -0 travel too, and float32 images work as well (as pairs of words).

Payload of k changes: int32[k] places, ascending, in words from the piece's begin; then uint16[k] new words.
"""

from __future__ import annotations

import numpy as np
import numpy.typing as npt
import torch

from staleflow.trajectories import ops

Bytes = npt.NDArray[np.uint8]
CHANGE_BYTES = 6
FULL_ABOVE = 0.5  # a delta longer than this share of the piece does not pay: the piece is sent whole


def encode(new: torch.Tensor, old: torch.Tensor) -> Bytes | None:
    """What turns `old` into `new` (uint8 tensors of the same even length, on one device); None when it does not pay."""
    places, words = ops.delta_encode(new.view(torch.bfloat16), old.view(torch.bfloat16))
    if places.numel() * CHANGE_BYTES > FULL_ABOVE * new.numel():
        return None
    return torch.cat((places.view(torch.uint8), words.view(torch.uint8))).cpu().numpy()


def apply(target: Bytes, payload: Bytes) -> None:
    """Change `target` in place. RuntimeError, and nothing changed, when a place lies outside."""
    count = payload.nbytes // CHANGE_BYTES
    if count == 0:
        return
    changes = torch.from_numpy(payload)
    places, words = changes[: 4 * count].view(torch.int32), changes[4 * count :].view(torch.bfloat16)
    ops.delta_apply(torch.from_numpy(target).view(torch.bfloat16), places, words)
