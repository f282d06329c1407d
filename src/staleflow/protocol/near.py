"""Outstanding groups in a list by id, beside the dict that holds them all: the hot path's short cut to a group.

In a dict of a million groups, a lookup in random order misses the cache three times before it reaches the group; here
it misses once. Runs hand out their ids in rising order, so that nearly every group is found here. A short cut only:
what it does not have is looked up in the dict.
"""

from staleflow.protocol.group import Group


class NearGroups:
    """`groups[group_id - base]` is that outstanding group, or None where it has to be looked up."""

    __slots__ = ("base", "groups")

    def __init__(self) -> None:
        self.base = 0
        self.groups: list[Group | None] = []

    def add(self, group_id: int, group: Group, outstanding: int) -> None:
        """Enter a new group, unless its id is out of reach; the list stays within a few times `outstanding`."""
        groups, place = self.groups, group_id - self.base
        if 0 <= place < len(groups):
            groups[place] = group
        elif len(groups) <= place <= 4 * outstanding + 64:
            groups += [None] * (place - len(groups))
            groups.append(group)
        elif place > 0 or not groups:
            self.base = group_id
            groups[:] = [group]

    def find(self, group_id: int) -> Group | None:
        """What reserve() and occupy() find; they spell it out, for speed."""
        place = group_id - self.base
        return self.groups[place] if 0 <= place < len(self.groups) else None

    def remove(self, group_id: int) -> None:
        """Forget a group that is outstanding no more."""
        place = group_id - self.base
        if 0 <= place < len(self.groups):
            self.groups[place] = None

    def trim(self) -> None:
        """Begin the list at its oldest group."""
        gone = 0
        for group in self.groups:
            if group is not None:
                break
            gone += 1
        del self.groups[:gone]
        self.base += gone
