"""Who trains on what: every sequence once, equal counts of micro-batches, nearly equal tokens."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from staleflow.trajectories.partition import Plan, balance

LENGTHS = st.lists(st.integers(1, 1000), max_size=200)


def long_tailed(n: int, longest: int = 20_000) -> np.ndarray:
    """Lengths as reasoning models have them."""
    drawn = np.random.default_rng(n).lognormal(7.5, 1.0, n)
    return np.clip(drawn, 1, longest).astype(np.int64)


def all_indices(plan: Plan) -> list[int]:
    return sorted(int(i) for rank in plan.microbatches for part in rank for i in part)


@given(LENGTHS, st.integers(1, 9), st.integers(1000, 5000))
def test_every_sequence_once_and_within_the_limit(lengths: list[int], n_ranks: int, limit: int) -> None:
    plan = balance(lengths, n_ranks, limit)
    assert all_indices(plan) == list(range(len(lengths)))
    assert len(plan.microbatches) == n_ranks
    assert {len(rank) for rank in plan.microbatches} == {plan.count}, "collectives would get out of step"
    for rank, sums in zip(plan.microbatches, plan.tokens, strict=True):
        assert [sum(lengths[i] for i in part) for part in rank] == sums.tolist()
        assert sums.max(initial=0) <= limit
        assert sorted(sums, reverse=True) == sums.tolist(), "like sizes meet at the same micro-batch"


@given(LENGTHS, st.integers(1, 9))
def test_the_same_lengths_give_the_same_plan(lengths: list[int], n_ranks: int) -> None:
    first, second = balance(lengths, n_ranks, 2000), balance(lengths, n_ranks, 2000)
    as_lists = [[[part.tolist() for part in rank] for rank in plan.microbatches] for plan in (first, second)]
    assert as_lists[0] == as_lists[1]


@pytest.mark.parametrize(("n", "n_ranks", "limit"), [(2048, 16, 40_000), (10_000, 64, 32_768), (100_000, 8, 25_000)])
def test_long_tailed_batches_are_balanced(n: int, n_ranks: int, limit: int) -> None:
    lengths = long_tailed(n)
    plan = balance(lengths, n_ranks, limit)
    per_rank = plan.tokens.sum(axis=1)
    assert per_rank.max() <= 1.001 * per_rank.mean()
    assert plan.efficiency > 0.99
    fewest = -(-int(lengths.sum()) // (n_ranks * limit))
    assert plan.count <= 1.03 * fewest + 1


def test_fewer_sequences_than_ranks() -> None:
    plan = balance([5, 3], 4, 10)
    assert plan.count == 1
    assert sorted(plan.tokens[:, 0].tolist()) == [0, 0, 3, 5]


def test_nothing_to_train_on() -> None:
    plan = balance([], 2, 10)
    assert plan.count == 1
    assert plan.efficiency == 1.0


@pytest.mark.parametrize(
    ("lengths", "n_ranks", "limit", "message"),
    [
        ([1, 0], 1, 10, "sequence 1 has 0 tokens"),
        ([4, 11, 5], 1, 10, "sequence 1 has 11 tokens, more than a micro-batch of 10"),
        ([1], 0, 10, "n_ranks = 0"),
    ],
)
def test_impossible_demands(lengths: list[int], n_ranks: int, limit: int, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        balance(lengths, n_ranks, limit)
