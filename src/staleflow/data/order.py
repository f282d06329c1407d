"""Which row is the prompt with index i: a pure function of (sizes, weights, seed), so that a resume needs no replay.

An epoch holds `round(weight * rows)` prompts of each data set: weight 1 is every row once, 2 twice, 0.5 every other
epoch. Each data set is passed through in a new order, and the data sets are mixed anew, in each epoch.

The orders come from sorting hashes (splitmix64) rather than from a library's generator, whose stream may change between
its versions.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import lru_cache

import numpy as np
import numpy.typing as npt

Int64Array = npt.NDArray[np.int64]


class Order:
    """`sizes` are the rows of each data set. Raises ValueError when an epoch would be empty."""

    def __init__(self, sizes: Sequence[int], weights: Sequence[float], seed: int, shuffle: bool) -> None:
        self.sizes, self.seed, self.shuffle = tuple(sizes), seed, shuffle
        self.quotas = tuple(round(weight * size) for weight, size in zip(weights, sizes, strict=True))
        self.per_epoch = sum(self.quotas)
        if self.per_epoch == 0:
            raise ValueError(f"data.train: weights {tuple(weights)} leave no prompt of {tuple(sizes)} rows; raise them")
        self._bases = np.concatenate([[0], np.cumsum(self.sizes)])
        self._epoch_rows = lru_cache(maxsize=2)(self._make_epoch)

    def row(self, index: int) -> int:
        """Row of prompt `index` (from 0), counted over the data sets laid end to end."""
        epoch, at = divmod(index, self.per_epoch)
        return int(self._epoch_rows(epoch)[at])

    def _make_epoch(self, epoch: int) -> Int64Array:
        parts = [self._dataset_rows(which, epoch) for which in range(len(self.sizes))]
        rows = np.concatenate(parts)
        if self.shuffle:
            return rows[_permutation(len(rows), self.seed, 0, epoch)]
        if len(parts) == 1:
            return rows
        evenly = np.concatenate([(np.arange(len(part)) + 0.5) / max(len(part), 1) for part in parts])
        return rows[np.argsort(evenly, kind="stable")]

    def _dataset_rows(self, which: int, epoch: int) -> Int64Array:
        quota, size = self.quotas[which], self.sizes[which]
        places = np.arange(epoch * quota, (epoch + 1) * quota, dtype=np.int64)
        if quota == 0 or not self.shuffle:
            return np.asarray(self._bases[which] + places % max(size, 1))
        passes, within = np.divmod(places, size)
        rows = np.empty(quota, np.int64)
        for one in range(int(passes[0]), int(passes[-1]) + 1):
            here = passes == one
            rows[here] = _permutation(size, self.seed, which + 1, one)[within[here]]
        return np.asarray(self._bases[which] + rows)


def _permutation(count: int, *key: int) -> Int64Array:
    state = np.uint64(0)
    for part in key:
        state = _splitmix64(np.asarray([int(state) ^ (part & (2**64 - 1))], np.uint64))[0]
    with np.errstate(over="ignore"):
        hashes = _splitmix64(np.arange(count, dtype=np.uint64) + state)
    return np.argsort(hashes, kind="stable").astype(np.int64, copy=False)


def _splitmix64(x: npt.NDArray[np.uint64]) -> npt.NDArray[np.uint64]:
    """Steele, Lea and Flood (2014): a bijection of 64-bit words that leaves no pattern of its input."""
    with np.errstate(over="ignore"):
        x = x + np.uint64(0x9E3779B97F4A7C15)
        x = (x ^ (x >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
        x = (x ^ (x >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
        return x ^ (x >> np.uint64(31))
