"""What the protocol remembers, and how it is looked up. `core.StalenessProtocol` decides on it; nothing here does."""

from collections import Counter
from typing import Any

from staleflow.protocol.errors import ProtocolError
from staleflow.protocol.group import Group
from staleflow.protocol.intervals import IdIntervals
from staleflow.protocol.near import NearGroups

MAX_MEMBERS = 2**16 - 1


class State:
    """The books of a StalenessProtocol: its outstanding groups, the slack of every deadline class, the counters."""

    __slots__ = (
        "_ahead",
        "_bits",
        "_consumed_groups",
        "_consumed_trajectories",
        "_finished",
        "_finished_count",
        "_floor",
        "_groups",
        "_near",
        "_released_groups",
        "_released_trajectories",
        "_reserved_groups",
        "_reserved_trajectories",
        "_slack",
        "_used",
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
        self._groups: dict[int, Group] = {}  # outstanding groups, in the order of their first reservation
        self._near = NearGroups()  # a short cut to most of them
        self._used = IdIntervals()
        # Per deadline class i (deadline c+i): finished group ids, earliest finished first, and the slack at t = c+i.
        self._finished: list[dict[int, None]] = [{} for _ in range(eta + 1)]
        self._finished_count = 0
        self._ahead = [range(i, eta + 1) for i in range(eta + 1)]  # made once: reserve() is called a lot
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
                "outstanding": len(self._groups),
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

    def _outstanding_trajectories(self) -> int:
        """By difference, because counting them costs O(outstanding); check() recounts them."""
        ended = self._consumed_trajectories + self._released_trajectories.total()
        return self._reserved_trajectories - ended

    def holds(self, group_id: int, member: int | None = None) -> bool:
        """Whether this group, or this member of it, is outstanding."""
        group = self._groups.get(group_id)
        if group is None or member is None:
            return group is not None
        return bool(self._bits.get(member, 0) & group.reserved)

    def version_of(self, group_id: int, member: int | None = None) -> int:
        """The version of an outstanding group, or V_traj of one of its members; ProtocolError if not outstanding."""
        if not self.holds(group_id, member):
            raise ProtocolError(f"group {group_id}, member {member} is not outstanding")
        group = self._groups[group_id]
        return group.version if member is None else group.version_of(member)

    def outstanding(self) -> list[int]:
        """The outstanding group ids, in the order of their first reservation."""
        return list(self._groups)

    def members(self, group_id: int) -> dict[int, tuple[int, bool]]:
        """`{member: (V_traj, finished)}` of the outstanding trajectories of a group; empty if it is not outstanding."""
        group = self._groups.get(group_id)
        if group is None:
            return {}
        pairs = ((member, bit) for member, bit in self._bits.items() if bit & group.reserved)
        return {member: (group.version_of(member), not bit & group.running) for member, bit in pairs}

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
