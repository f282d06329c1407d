"""What the protocol remembers, and how it is looked up. `core.StalenessProtocol` decides on it; nothing here does."""

from collections import Counter
from typing import Any

from staleflow.protocol.errors import ProtocolError
from staleflow.protocol.finished import FinishedGroups
from staleflow.protocol.group import Group
from staleflow.protocol.intervals import IdIntervals
from staleflow.protocol.usual import UsualGroups

MAX_MEMBERS = 2**16 - 1
MAX_ID = 2**63 - 1


class State:
    """The books of a StalenessProtocol: its outstanding groups, the slack of every deadline class, the counters."""

    __slots__ = (
        "_bits",
        "_consumed_groups",
        "_consumed_trajectories",
        "_finished",
        "_finished_count",
        "_floor",
        "_full",
        "_groups",
        "_released_groups",
        "_released_trajectories",
        "_reserved_groups",
        "_reserved_trajectories",
        "_slack",
        "_used",
        "_usual",
        "_version",
        "batch_groups",
        "dropped",
        "eta",
        "group_size",
        "spare_groups",
        "spare_members",
    )

    def __init__(
        self,
        batch_groups: int,
        group_size: int,
        eta: int,
        spare_groups: int = 0,
        spare_members: int = 0,
        start_version: int = 0,
    ) -> None:
        _require(batch_groups, 1, "batch_groups")
        _require(group_size, 1, "group_size")
        _require(eta, 0, "eta")
        _require(spare_groups, 0, "spare_groups")
        _require(spare_members, 0, "spare_members")
        _require(start_version, 0, "start_version")
        if group_size + spare_members > MAX_MEMBERS:
            raise ProtocolError(f"a group has at most {MAX_MEMBERS} members, got {group_size} + {spare_members}")
        self.batch_groups = batch_groups
        self.group_size = group_size
        self.eta = eta
        self.spare_groups = spare_groups
        self.spare_members = spare_members
        self.dropped: list[tuple[int, int, str]] = []
        """`(group_id, member, reason)` of what the last consume() released: the caller aborts it on its instance."""
        self._version = start_version
        self._bits = {member: 1 << member for member in range(group_size + spare_members)}
        self._full = (1 << group_size) - 1  # the members of a complete group, where there are no spare ones
        self._usual = UsualGroups()  # most outstanding groups
        self._groups: dict[int, Group] = {}  # the others
        self._used = IdIntervals()
        # Per deadline class i (deadline c+i): finished group ids, earliest finished first, and the slack at t = c+i.
        self._finished = [FinishedGroups() for _ in range(eta + 1)]
        self._finished_count = 0
        self._slack = [(batch_groups + spare_groups) * (i + 1) for i in range(eta + 1)]
        self._floor: list[int] | None = None  # what the slack must stay above, until something ends; see _floors
        self._reserved_groups = 0
        self._reserved_trajectories = 0
        self._consumed_groups = 0
        self._consumed_trajectories = 0
        self._released_groups: Counter[str] = Counter()
        self._released_trajectories: Counter[str] = Counter()

    @property
    def version(self) -> int:
        """c: the version the trainer holds, and the buffer it consumes next."""
        return self._version

    def counters(self) -> dict[str, dict[str, Any]]:
        """`{"groups": {"reserved", "outstanding", "consumed", "released": {reason: n}}, "trajectories": {the same}}`.

        Reasons that never happened are absent (reading one gives 0).
        """
        return {
            "groups": {
                "reserved": self._reserved_groups,
                "outstanding": self._outstanding_groups(),
                "consumed": self._consumed_groups,
                "released": Counter(self._released_groups),
            },
            "trajectories": {
                "reserved": self._reserved_trajectories,
                "outstanding": self._outstanding_trajectories(),
                "consumed": self._consumed_trajectories,
                "released": Counter(self._released_trajectories),
            },
        }

    def _outstanding_groups(self) -> int:
        """By difference, as the trajectories; check() recounts both."""
        return self._reserved_groups - self._consumed_groups - self._released_groups.total()

    def _outstanding_trajectories(self) -> int:
        """By difference, because counting them costs O(outstanding)."""
        ended = self._consumed_trajectories + self._released_trajectories.total()
        return self._reserved_trajectories - ended

    def holds(self, group_id: int, member: int | None = None) -> bool:
        """Whether this group, or this member of it, is outstanding."""
        if member is None:
            return group_id in self._groups or self._usual.holds(group_id)
        group = self._find(group_id)
        return group is not None and bool(self._bits.get(member, 0) & group.reserved)

    def version_of(self, group_id: int, member: int | None = None) -> int:
        """The version of an outstanding group, or V_traj of one of its members; ProtocolError if not outstanding."""
        group = self._find(group_id)
        if group is None or (member is not None and not self._bits.get(member, 0) & group.reserved):
            raise ProtocolError(f"group {group_id}, member {member} is not outstanding")
        return group.version if member is None else group.version_of(member)

    def outstanding(self) -> list[int]:
        """The outstanding group ids, in the order of their first reservation."""
        return [group_id for group_id, _, _ in self._rows()]

    def members(self, group_id: int) -> dict[int, tuple[int, bool]]:
        """`{member: (V_traj, finished)}` of the outstanding trajectories of a group; empty if it is not outstanding."""
        group = self._find(group_id)
        if group is None:
            return {}
        pairs = ((member, bit) for member, bit in self._bits.items() if bit & group.reserved)
        return {member: (group.version_of(member), not bit & group.running) for member, bit in pairs}

    def _rows(self) -> list[tuple[int, int, int]]:
        """`(id, version, missing)` of every outstanding group, in the order of their first reservation."""
        usual = [(i, version, self.group_size - done) for i, version, done in self._usual.rows()]
        if not self._groups:
            return usual
        rows = [((row[0], 0), row) for row in usual]
        rows += [(group.order, (i, group.version, group.missing)) for i, group in self._groups.items()]
        return [row for _, row in sorted(rows)]

    def _find(self, group_id: int) -> Group | None:
        """An outstanding group, to read: of a usual one this is a copy."""
        group = self._groups.get(group_id)
        return self._copy_usual(group_id) if group is None and self._usual.holds(group_id) else group

    def _take(self, group_id: int) -> Group:
        """An outstanding group, to change in a way that only a `Group` can hold: from now on it is no usual one."""
        group = self._groups.get(group_id)
        if group is None:
            group = self._groups[group_id] = self._copy_usual(group_id)
            self._usual.forget(group_id)
        return group

    def _copy_usual(self, group_id: int) -> Group:
        version, reserved, running = self._usual.read(group_id)
        group = Group((group_id, 0), version, reserved, self.group_size - (reserved ^ running).bit_count())
        group.running = running
        return group

    def _enter(self, group_id: int, version: int, reserved: int) -> bool:
        """Make a new group of this id, whose members all run, a usual one; False if it cannot be one."""
        usual = self._usual
        if group_id < usual.end:
            return False
        places = 4 * self._outstanding_groups() + 64
        if group_id - usual.base >= places:  # the ids have jumped
            for i, _, _ in list(usual.rows()):
                self._take(i)
            usual.restart(group_id)
        usual.open(group_id, version, reserved)
        usual.limit = min(usual.base + places, MAX_ID + 1) if group_id == self._used.lasts[-1] else 0
        return True

    def _new_order(self) -> tuple[int, int]:
        """The `order` of a group reserved now that is no usual one: after all usual groups so far, whose is (id, 0)."""
        return self._usual.end - 1, self._reserved_groups + 1

    def _used_ids(self) -> IdIntervals:
        """The ids used ever. Usual groups that were entered at once are noted only here."""
        if self._usual.limit:
            self._used.lasts[-1] = self._usual.end - 1
        return self._used

    def _trim_usual(self) -> None:
        """Give back room, and have a look at what is outstanding before the next group is entered."""
        self._used_ids()
        self._usual.trim()
        self._usual.limit = 0

    def _adopt(self, group_id: int, group: Group) -> None:
        """Enter a group from a dump, in the order of the first reservations."""
        if group.versions is None and self._enter(group_id, group.version, group.reserved):
            self._usual.running[-1] = group.running
        else:
            group.order = self._usual.end - 1, len(self._groups) + 1
            self._groups[group_id] = group

    def _class_of(self, group: Group) -> int:
        """i such that the deadline of `group` is c+i."""
        return group.version + self.eta - self._version

    def _shift_slack(self, first: int, stop: int, places: int) -> None:
        slack = self._slack
        for i in range(first, stop):
            slack[i] += places


def _require(value: int, least: int, name: str) -> None:
    if type(value) is not int or value < least:
        raise ProtocolError(f"{name} must be an int >= {least}, got {value!r}")
