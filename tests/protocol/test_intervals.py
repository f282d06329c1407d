"""The set of used ids against a plain set."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from staleflow.protocol.intervals import IdIntervals


@given(st.lists(st.integers(-12, 12), unique=True))
def test_it_is_a_set_in_the_fewest_intervals(values: list[int]) -> None:
    ids = IdIntervals()
    for value in values:
        ids.add(value)
    assert [value for value in range(-14, 15) if value in ids] == sorted(values)
    assert ids.count() == len(values)
    assert len(ids.dump()) == sum(value - 1 not in values for value in values)
    assert IdIntervals.load(ids.dump()).dump() == ids.dump()


@pytest.mark.parametrize("intervals", [[[3, 2]], [[0, 4], [5, 6]], [[0, 4], [2, 9]], [[5, 6], [0, 1]]])
def test_intervals_that_are_not_disjoint_and_rising_are_refused(intervals: list[list[int]]) -> None:
    with pytest.raises(ValueError, match="rising"):
        IdIntervals.load(intervals)
