"""The set of ids ever used, kept as closed intervals so that its size does not grow with the length of a run."""

from bisect import bisect_right


class IdIntervals:
    """A set of ints that only grows. Ids in rising order cost O(1) each; any other order O(log k + k) for k gaps."""

    # `firsts[i]` and `lasts[i]` bound interval i. Public, so that a caller can extend the last one without a call.
    __slots__ = ("firsts", "lasts")

    def __init__(self) -> None:
        self.firsts: list[int] = []
        self.lasts: list[int] = []

    def __contains__(self, value: int) -> bool:
        place = bisect_right(self.firsts, value) - 1
        return place >= 0 and value <= self.lasts[place]

    def add(self, value: int) -> None:
        """Add a value that is not in the set yet, merging the intervals that it connects."""
        firsts, lasts = self.firsts, self.lasts
        place = bisect_right(firsts, value)
        joins_left = place > 0 and lasts[place - 1] == value - 1
        joins_right = place < len(firsts) and firsts[place] == value + 1
        if joins_left and joins_right:
            lasts[place - 1] = lasts.pop(place)
            firsts.pop(place)
        elif joins_left:
            lasts[place - 1] = value
        elif joins_right:
            firsts[place] = value
        else:
            firsts.insert(place, value)
            lasts.insert(place, value)

    def count(self) -> int:
        """How many ids are in the set."""
        return sum(self.lasts) - sum(self.firsts) + len(self.firsts)

    def dump(self) -> list[list[int]]:
        """The intervals as `[[first, last], ...]`, rising."""
        return [[first, last] for first, last in zip(self.firsts, self.lasts, strict=True)]

    @classmethod
    def load(cls, intervals: list[list[int]]) -> "IdIntervals":
        """The inverse of `dump`; ValueError when they overlap, touch or fall."""
        ids = cls()
        for first, last in intervals:
            if first > last or (ids.lasts and first <= ids.lasts[-1] + 1):
                raise ValueError(f"used ids are not disjoint rising intervals at [{first}, {last}]")
            ids.firsts.append(first)
            ids.lasts.append(last)
        return ids
