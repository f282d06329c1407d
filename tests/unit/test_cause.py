"""Why a job ends: a death explains failures, a failure explains signals, in whatever order the news arrive."""

from __future__ import annotations

from staleflow.roles.cause import SETTLES_S, Cause, Signalled


def test_a_failure_is_the_reason_even_when_the_launchers_signal_comes_first() -> None:
    cause = Cause()
    cause.signalled(15, "signal 15 at rank 3", 10.0)
    cause.failed("rank 1 failed", 10.0 + SETTLES_S / 2)
    cause.failed("rank 2 failed", 10.0 + SETTLES_S / 2)
    assert cause.settled(10.0 + SETTLES_S) is None
    assert cause.settled(10.0 + 2 * SETTLES_S) == "rank 1 failed"


def test_signals_of_all_ranks_are_one_event_and_a_later_one_is_another() -> None:
    cause = Cause()
    for rank in range(3):
        cause.signalled(10, f"signal 10 at rank {rank}", 1.0)
    assert cause.settled(1.0) is None
    assert cause.settled(1.0 + SETTLES_S) == Signalled(10, "signal 10 at rank 0")
    assert cause.settled(2.0 + SETTLES_S) is None
    cause.signalled(15, "signal 15 at rank 0", 5.0)
    assert cause.settled(5.0 + SETTLES_S) == Signalled(15, "signal 15 at rank 0")
