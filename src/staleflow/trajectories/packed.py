"""A packed batch: whole sequences one after the other, no padding."""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

NO_VERSION = -1  # on prompt tokens: nobody's policy made them


class PackedBatch(NamedTuple):
    """T tokens of S sequences.

    Alignment, everywhere: the value at place t belongs to the token at place t (log-probability and version of *that*
    token), not to the one it predicts; the loss shifts.

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

    @classmethod
    def nothing(cls) -> PackedBatch:
        """One masked token: what a rank with no sequence runs, so that collectives match."""
        zero = torch.zeros(1)
        token = torch.zeros(1, dtype=torch.int64)
        cu_seqlens = torch.tensor([0, 1], dtype=torch.int32)
        return cls(token, token, cu_seqlens, zero, torch.full((1,), NO_VERSION, dtype=torch.int32), zero, zero)

    @property
    def tokens(self) -> int:
        return self.input_ids.numel()

    @property
    def sequences(self) -> int:
        return self.cu_seqlens.numel() - 1

    def sequence_ids(self) -> Tensor:
        """int64 [T]: which sequence each token belongs to."""
        lengths = self.cu_seqlens.diff().long()
        return torch.repeat_interleave(torch.arange(self.sequences, device=lengths.device), lengths)

    def to(self, device: torch.device | str) -> PackedBatch:
        return PackedBatch(*(tensor.to(device, non_blocking=True) for tensor in self))

    def clone(self) -> PackedBatch:
        """A copy that shares no memory with this one."""
        return PackedBatch(*(tensor.clone() for tensor in self))
