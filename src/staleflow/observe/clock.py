"""How far this machine's wall clock is from rank 0's, by questions and answers between hosts (as NTP does it).

    asked_ns   here ----question----> there   seen_ns
    told_ns    here <----answer------ there

The answer with the shortest way there and back is the best: its error is at most half of that time.
"""

from __future__ import annotations


class ClockOffset:
    """`offset_ns`: this clock minus the other; None before the first answer."""

    def __init__(self) -> None:
        self.offset_ns: int | None = None
        self._shortest_ns = 0

    def answered(self, asked_ns: int, seen_ns: int, told_ns: int) -> bool:
        """Take an answer over; True when it is the best so far."""
        way_ns = told_ns - asked_ns
        if way_ns < 0 or (self.offset_ns is not None and way_ns >= self._shortest_ns):
            return False  # (a clock that was set back in between tells nothing)
        self._shortest_ns = way_ns
        self.offset_ns = (asked_ns + told_ns) // 2 - seen_ns
        return True
