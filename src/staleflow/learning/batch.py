"""Packed micro-batches from trajectories, and what the loss divides by."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from staleflow.trajectories.packed import NO_VERSION, PackedBatch
from staleflow.trajectories.schema import Trajectory


@dataclass(frozen=True)
class BatchTotals:
    """Denominators, counted over the global batch of a training step: all ranks, all micro-batches.

    `tokens` response tokens, `sequences` those with at least one of them.
    """

    tokens: int
    sequences: int

    def __add__(self, other: BatchTotals) -> BatchTotals:
        return BatchTotals(self.tokens + other.tokens, self.sequences + other.sequences)


def totals_of(batches: Iterable[PackedBatch]) -> BatchTotals:
    """What these micro-batches add to the totals."""
    total = BatchTotals(0, 0)
    for batch in batches:
        counts = response_lengths(batch)
        total = total + BatchTotals(int(counts.sum()), int((counts > 0).sum()))
    return total


def response_lengths(batch: PackedBatch) -> Tensor:
    """float32 [S]: trained tokens of each sequence."""
    zeros = torch.zeros(batch.sequences, device=batch.loss_mask.device)
    return zeros.index_add(0, batch.sequence_ids(), batch.loss_mask.float())


def pack(trajectories: Sequence[Trajectory], advantages: Sequence[float]) -> PackedBatch:
    """Pack trajectories with one advantage each. Nothing to pack gives one masked token, so that collectives match."""
    if len(trajectories) != len(advantages):
        raise ValueError(f"{len(advantages)} advantages for {len(trajectories)} trajectories: one each is needed")
    if not trajectories:
        return PackedBatch.nothing()
    lengths = np.array([len(t.tokens) for t in trajectories])
    prompts = [t.prompt_tokens for t in trajectories]
    behind_prompt = [np.zeros(n, np.float32) for n in prompts]
    return PackedBatch(
        input_ids=_tensor([t.tokens for t in trajectories], np.int64),
        positions=_tensor([np.arange(n) for n in lengths], np.int64),
        cu_seqlens=torch.from_numpy(np.concatenate([[0], np.cumsum(lengths)]).astype(np.int32)),
        logprobs=_tensor([x for z, t in zip(behind_prompt, trajectories, strict=True) for x in (z, t.logprobs)]),
        versions=_tensor([_token_versions(t) for t in trajectories], np.int32),
        loss_mask=_tensor([np.arange(len(t.tokens)) >= t.prompt_tokens for t in trajectories]),
        advantages=_tensor([_token_advantages(t, a) for t, a in zip(trajectories, advantages, strict=True)]),
    )


def _tensor(parts: Sequence[np.ndarray], dtype: type = np.float32) -> Tensor:
    return torch.from_numpy(np.concatenate(parts).astype(dtype, copy=False))


def _token_versions(t: Trajectory) -> np.ndarray:
    versions = [v for v, _ in t.segments]
    counts = [n for _, n in t.segments]
    return np.concatenate([np.full(t.prompt_tokens, NO_VERSION), np.repeat(versions, counts)])


def _token_advantages(t: Trajectory, advantage: float) -> np.ndarray:
    return np.where(np.arange(len(t.tokens)) >= t.prompt_tokens, np.float32(advantage), np.float32(0))
