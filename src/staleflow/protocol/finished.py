"""The finished groups of one deadline class."""

from array import array
from collections.abc import Iterator


class FinishedGroups:
    """Ids in the order of finishing, packed. `ids` is public so that occupy() can append without a call.

    gone: those of them that were released since. They are left out wherever one looks, and removed in bulk.
    """

    __slots__ = ("gone", "ids")

    def __init__(self) -> None:
        self.ids = array("q")
        self.gone: set[int] = set()

    def __len__(self) -> int:
        return len(self.ids) - len(self.gone)

    def __iter__(self) -> Iterator[int]:
        return (group_id for group_id in self.ids if group_id not in self.gone) if self.gone else iter(self.ids)

    def remove(self, group_id: int) -> None:
        """Take out one that is in: O(1) on average."""
        self.gone.add(group_id)
        if 2 * len(self.gone) > len(self.ids):
            self._purge()

    def take(self, count: int) -> list[int]:
        """Take out the first `count`, or as many as there are."""
        if self.gone:
            self._purge()
        taken = self.ids[:count].tolist()
        del self.ids[:count]
        return taken

    def _purge(self) -> None:
        self.ids = array("q", self)
        self.gone.clear()
