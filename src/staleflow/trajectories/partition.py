"""Which rank trains on which sequences, in which micro-batch: from lengths alone.

FSDP ranks meet in collectives once per micro-batch, so all get the same number of them, and what costs time is, per
micro-batch, the fullest rank. Hence: ranks are balanced first, then each rank's micro-batches, and these are ordered
by size, so that the k-th micro-batches of all ranks are alike. Pure; needs no torch.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from staleflow._ring import partition

IntArray = npt.NDArray[np.int64]

# Largest differencing takes time and memory that grow with the number of groups; beyond this many, heaviest-first is
# as good, since then only whole sequences are left to distribute.
_MAX_DIFFERENCING_GROUPS = 512


@dataclass(frozen=True)
class Plan:
    """`microbatches[rank][k]`: int64 indices into the lengths, ascending. `tokens` int64 [ranks, micro-batches].

    A micro-batch is empty only where a rank has fewer sequences than there are micro-batches.
    """

    microbatches: tuple[tuple[IntArray, ...], ...]
    tokens: IntArray

    @property
    def count(self) -> int:
        """Micro-batches of each rank."""
        return int(self.tokens.shape[1])

    @property
    def efficiency(self) -> float:
        """Tokens over what the ranks could have done in the time of the fullest of each micro-batch; 1 is perfect."""
        slowest = int(self.tokens.max(axis=0, initial=0).sum()) * self.tokens.shape[0]
        return float(self.tokens.sum() / slowest) if slowest else 1.0


def balance(lengths: npt.ArrayLike, n_ranks: int, max_tokens_per_microbatch: int, *, min_count: int = 1) -> Plan:
    """Spread sequences of these lengths (tokens) over ranks and micro-batches, every sequence exactly once.

    Each rank gets at least `min_count` micro-batches (a step of several updates needs one for each).

    ValueError when a length is not positive or longer than a micro-batch, or there is no rank.
    """
    tokens = np.ascontiguousarray(lengths, dtype=np.int64).reshape(-1)
    _require_sound(tokens, n_ranks, max_tokens_per_microbatch)
    ranks, sums = _groups(np.arange(tokens.size), tokens, n_ranks)
    count = max(min_count, -(-int(sums.max()) // max_tokens_per_microbatch))
    while (plan := _microbatches(ranks, tokens, count, max_tokens_per_microbatch)) is None:
        count += max(1, count // 64)
    return plan


def _microbatches(ranks: list[IntArray], tokens: IntArray, count: int, limit: int) -> Plan | None:
    """Each rank's sequences in `count` micro-batches, or None when one of them is fuller than `limit`."""
    plan, sums = [], []
    for rank in ranks:
        parts, part_tokens = _groups(rank, tokens, count)
        if part_tokens[0] > limit:
            return None
        plan.append(tuple(parts))
        sums.append(part_tokens)
    return Plan(tuple(plan), np.array(sums, dtype=np.int64))


def _require_sound(tokens: IntArray, n_ranks: int, limit: int) -> None:
    if n_ranks < 1:
        raise ValueError(f"n_ranks = {n_ranks}: at least one rank is needed")
    if tokens.size and tokens.min() < 1:
        raise ValueError(f"sequence {int(tokens.argmin())} has {int(tokens.min())} tokens: lengths must be positive")
    if tokens.size and tokens.max() > limit:
        raise ValueError(
            f"sequence {int(tokens.argmax())} has {int(tokens.max())} tokens, more than a micro-batch of {limit}: "
            "raise max_tokens_per_microbatch or shorten prompts and responses"
        )


def _groups(items: IntArray, tokens: IntArray, n_groups: int) -> tuple[list[IntArray], IntArray]:
    """`items` in `n_groups` groups of nearly equal tokens, the fullest first, and the tokens of each."""
    weights = np.ascontiguousarray(tokens[items])
    group_of = np.frombuffer(partition(weights, n_groups, n_groups <= _MAX_DIFFERENCING_GROUPS), np.int32)
    sums = np.bincount(group_of, weights, n_groups).astype(np.int64)  # float64 in between: exact up to 2^53 tokens
    fullest_first = np.argsort(-sums, kind="stable")
    by_group = items[np.argsort(group_of, kind="stable")]
    ends = np.cumsum(np.bincount(group_of, minlength=n_groups)).tolist()
    begins = [0, *ends]
    return [by_group[begins[group] : ends[group]] for group in fullest_first.tolist()], sums[fullest_first]
