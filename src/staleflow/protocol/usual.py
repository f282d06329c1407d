"""The usual outstanding groups, in flat lists by id.

A group is usual while all its members have one version, none is a spare beside a complete group, and its id came after
those of all the usual groups before it; so are nearly all groups of a run. Any other is a `Group` in a dict. A million
groups as objects lie all over a quarter of a gigabyte, and an operation on one picked at random misses the cache a
dozen times: in the dict, in the object, in the numbers that it refers to. In here it misses two or three times.

Forgotten groups at the front give their room back once a step; a jump of the ids begins the lists anew (state.py), so
that they stay within a few times what is outstanding.
"""

from collections.abc import Iterable, Iterator
from itertools import count
from typing import Any


class NoGroup:
    """Stands where a version would: equal to nothing that a caller could pass as one."""


NO_GROUP: Any = NoGroup


class UsualGroups:
    """The group `base + place` has `versions[place]`, and the members `reserved[place]` and `running[place]`.

    versions: NO_GROUP where there is no usual group; nothing runs there.
    reserved, running: the members that are outstanding, and those of them that are unfinished, as bits.
    end: the id behind the last place.
    limit: the ids from `end` to below it may be entered at once: none was used, and the lists stay small enough.

    core.py reads and writes the lists where it is called a lot.
    """

    __slots__ = ("base", "end", "limit", "reserved", "running", "versions")

    def __init__(self) -> None:
        self.base = self.end = self.limit = 0
        self.versions: list[int] = []
        self.reserved: list[int] = []
        self.running: list[int] = []

    def holds(self, group_id: int) -> bool:
        """Whether this is a usual outstanding group; False for what is no id at all."""
        try:
            return self.base <= group_id < self.end and self.versions[group_id - self.base] is not NO_GROUP
        except TypeError:
            return False

    def open(self, group_id: int, version: int, reserved: int) -> None:
        """Enter a group with an id that is not below `end`; all its members run."""
        gap = group_id - self.end
        self.end = group_id + 1
        self.versions += [NO_GROUP] * gap + [version]
        self.reserved += [0] * gap + [reserved]
        self.running += [0] * gap + [reserved]

    def read(self, group_id: int) -> tuple[int, int, int]:
        """(version, reserved, running) of a group that is held."""
        place = group_id - self.base
        return self.versions[place], self.reserved[place], self.running[place]

    def forget(self, group_id: int) -> None:
        """The group is outstanding no more, or no usual one."""
        place = group_id - self.base
        self.versions[place] = NO_GROUP
        self.running[place] = 0

    def forget_complete(self, group_ids: Iterable[int]) -> list[int]:
        """Forget those that are held, all of them complete; the others."""
        base, end, versions, others = self.base, self.end, self.versions, []
        for group_id in group_ids:
            if base <= group_id < end and versions[group_id - base] is not NO_GROUP:
                versions[group_id - base] = NO_GROUP
            else:
                others.append(group_id)
        return others

    def rows(self) -> Iterator[tuple[int, int, int]]:
        """`(id, version, finished members)` of each, in the order of the ids, which is that of first reservation."""
        for group_id, version, reserved, running in zip(count(self.base), self.versions, self.reserved, self.running):
            if version is not NO_GROUP:
                yield group_id, version, (reserved ^ running).bit_count()

    def restart(self, group_id: int) -> None:
        """Empty: begin at `group_id`."""
        self.base = self.end = group_id
        self.versions.clear()
        self.reserved.clear()
        self.running.clear()

    def trim(self) -> None:
        """Begin at the oldest group."""
        gone = 0
        for version in self.versions:
            if version is not NO_GROUP:
                break
            gone += 1
        del self.versions[:gone]
        del self.reserved[:gone]
        del self.running[:gone]
        self.base += gone
