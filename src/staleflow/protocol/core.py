"""The global consistency protocol (section 4 of the paper), in its deadline formulation. Pure: no I/O, clock, threads.

A group of version `V` (the oldest version that began one of its trajectories) may be trained on by the steps
`V .. V+eta`, so its deadline is `d = V+eta`. Each step trains exactly `B` groups. With `c` the next step, the steps
`c .. t` have `B*(t-c+1)` places, and every outstanding group with deadline <= t must sit in one of them. By Hall's
theorem that necessary condition is sufficient too (docs/protocol.md has the proof): all deadlines can be met iff

    n(t) <= B*(t-c+1)    for every t in [c, c+eta],    n(t) = outstanding groups with deadline <= t.

The state that decides is one number per deadline class, at most eta+1 of them: the *slack* `B*(t-c+1) - n(t)`. Every
operation therefore costs O(eta), whatever the number of trajectories:

- reserve: the new group lowers the slack of every t >= d by one; it must be >= 1 before.
- ready:   training the B finished groups with the earliest deadlines now leaves `n(t) - min(f(t), B)` groups for the
  `B*(t-c)` places of the steps c+1 .. t, where f(t) counts finished groups with deadline <= t. Rearranged: the slack
  must be >= `max(0, B - f(t))`, which this file calls the *shortfall*.
- A READY step stays READY: while READY, reserve asks for a slack above the shortfall instead of above zero.

With spare groups the places are `B' = B + spare_groups` per step, B of them are trained, and the surplus is dropped.
"""

from collections.abc import Iterator
from operator import ge
from typing import Any, Self

from staleflow.protocol import snapshot, view
from staleflow.protocol.errors import NotReady, ProtocolError
from staleflow.protocol.group import Group
from staleflow.protocol.state import MAX_ID, State

REASONS = ("redundant", "surplus", "filtered", "failed", "aborted", "stale")


class StalenessProtocol(State):
    """Decides which groups may start, when a step may train, and on what; counts what became of every one of them.

    Args:
        batch_groups: B, the groups that one step trains on.
        group_size: trajectories per group.
        eta: the staleness bound in versions; 0 is exactly synchronous.
        spare_groups: groups beyond B that may be outstanding per step; the surplus is dropped at consume.
        spare_members: trajectories beyond `group_size` that may run per group; the last ones are not trained on.
        start_version: the version at which the run starts.

    Misuse raises ProtocolError (a ValueError) and leaves the state unchanged.
    """

    __slots__ = ()

    # ---- reserve -------------------------------------------------------------------------------------------------

    def can_reserve(self, version: int, group_id: int | None = None) -> bool:
        """Whether reserve() would admit a trajectory begun at `version`, of a new group or of the group `group_id`."""
        if version > self._version:
            return False
        group = None if group_id is None else self._find(group_id)
        if group is not None:
            return group.missing > 0 and self._can_lower(group, version)
        if group_id is not None and group_id in self._used_ids():
            return False
        first = version + self.eta - self._version
        return first >= 0 and self._has_room(first, self.eta + 1)

    def reserve(self, group_id: int, member: int, version: int) -> bool:
        """Hold a place for a trajectory that an instance at `version` is about to begin.

        Returns False, changing nothing, when the bound could not be kept or the group needs no further member: the
        prompt waits. Reserving again what is reserved changes nothing: its version stays that of the first time.

        Raises:
            ProtocolError: `version` is ahead of the trainer, `member` is out of range, or `group_id` was used before.
        """
        usual = self._usual
        try:
            bit = self._bits[member]
            place = group_id - usual.base
            if place >= 0 and group_id < usual.end and usual.versions[place] == version:
                reserved = usual.reserved[place]
                if not reserved & bit:
                    usual.reserved[place] = reserved | bit
                    usual.running[place] |= bit
                    self._reserved_trajectories += 1
                return True
        except (KeyError, TypeError):
            raise self._bad_reservation(group_id, member, version) from None
        if version > self._version:
            raise self._bad_reservation(group_id, member, version)
        if group_id == usual.end < usual.limit and version == self._version and self._open_next(group_id, bit):
            return True
        return self._reserve_other(group_id, member, version)

    def _bad_reservation(self, group_id: int, member: int, version: int) -> ProtocolError:
        if not isinstance(group_id, int):
            return ProtocolError(f"a group id is a 64-bit int, got {group_id!r}")
        if member not in self._bits:
            return ProtocolError(
                f"member {member} of group {group_id} is not in [0, {len(self._bits)}): group_size + spare_members"
            )
        return ProtocolError(
            f"version {version} of group {group_id} is ahead of the trainer's {self._version}: no instance can hold it"
        )

    def _reserve_other(self, group_id: int, member: int, version: int) -> bool:
        """A member of a group that is no usual one, or will be none with it; or one that is reserved already."""
        group, bit = self._find(group_id), self._bits[member]
        if group is None:
            return self._open(group_id, bit, version)
        if group.reserved & bit:
            return True
        if version != group.version or group.versions is not None:
            return self._join(group_id, group, member, version)
        group.add(member, bit, version)
        self._reserved_trajectories += 1
        return True

    def _open_next(self, group_id: int, bit: int) -> bool:
        """The first member of a new group in the usual case: at the trainer's version, with the next id.

        False, changing nothing, when it has to be looked at closely.
        """
        usual, slack, floor, newest = self._usual, self._slack, self._floor, self.eta
        if floor is None or slack[newest] <= floor[newest] or type(group_id) is not int:
            return False
        usual.end = group_id + 1
        usual.versions.append(self._version)
        usual.reserved.append(bit)
        usual.running.append(bit)
        slack[newest] -= 1
        self._reserved_groups += 1
        self._reserved_trajectories += 1
        return True

    def _open(self, group_id: int, bit: int, version: int) -> bool:
        """The first member of a new group."""
        if type(group_id) is not int or type(version) is not int or not -MAX_ID <= group_id <= MAX_ID or version < 0:
            raise ProtocolError(f"a group id is a 64-bit int and a version an int >= 0, got {group_id!r}, {version!r}")
        used = self._used_ids()
        if group_id in used:
            raise ProtocolError(f"group id {group_id} was used before; give every prompt drawn an id of its own")
        first = version + self.eta - self._version
        if first < 0 or not self._has_room(first, self.eta + 1):
            return False
        used.add(group_id)
        if not self._enter(group_id, version, bit):
            self._groups[group_id] = Group(self._new_order(), version, bit, self.group_size)
        self._shift_slack(first, self.eta + 1, -1)
        self._reserved_groups += 1
        self._reserved_trajectories += 1
        return True

    def _join(self, group_id: int, group: Group, member: int, version: int) -> bool:
        """A further member whose version differs from the others' (or did for some member before)."""
        if type(version) is not int or version < 0:
            raise ProtocolError(f"a version is an int >= 0, got {version!r}")
        if not group.missing or not self._can_lower(group, version):
            return False
        if version < group.version:
            self._shift_slack(version + self.eta - self._version, self._class_of(group), -1)
        self._take(group_id).add(member, self._bits[member], version)
        self._reserved_trajectories += 1
        return True

    def _can_lower(self, group: Group, version: int) -> bool:
        """Whether the deadline of `group` may move to that of `version` (always, when it is not older)."""
        if version >= group.version:
            return True
        first = version + self.eta - self._version
        return first >= 0 and self._has_room(first, self._class_of(group))

    def _has_room(self, first: int, stop: int) -> bool:
        """Whether n(t) may grow by one for the classes [first, stop) without losing feasibility or a READY step."""
        floors = self._floors()
        return all(self._slack[i] > floors[i] for i in range(first, stop))

    def _floors(self) -> list[int]:
        """Per class, the slack that an admission must find more than: the shortfall while READY, else zero.

        Reservations change neither it nor READY, so it is computed again only after something was finished or given up.
        """
        if self._floor is None:
            self._floor = [0] * (self.eta + 1)
            if self._finished_count >= self.batch_groups and not self.spare_groups:
                shortfalls = list(self._shortfalls())
                if all(map(ge, self._slack, shortfalls)):  # READY
                    self._floor = shortfalls
        return self._floor

    # ---- occupy --------------------------------------------------------------------------------------------------

    def occupy(self, group_id: int, member: int) -> bool:
        """A trajectory is generated and rewarded. True when it made its group complete, which makes it trainable.

        A spare member that comes after its group was complete is released as "redundant", and the result is False.

        Raises:
            ProtocolError: the trajectory is not reserved, or was occupied before.
        """
        usual = self._usual
        try:
            bit = self._bits[member]
            place = group_id - usual.base
            running = usual.running[place] if place >= 0 else 0
        except (KeyError, IndexError, TypeError):
            return self._occupy_other(group_id, member)
        if not running & bit:
            return self._occupy_other(group_id, member)
        usual.running[place] = running = running ^ bit
        if self.spare_members:
            return self._occupied_beside_spares(group_id)
        if running or usual.reserved[place] != self._full:
            return False
        return self._complete(group_id, usual.versions[place])

    def _occupied_beside_spares(self, group_id: int) -> bool:
        """A member of a usual group has finished, and it need not be the last that runs."""
        _, reserved, running = self._usual.read(group_id)
        if (reserved ^ running).bit_count() < self.group_size:
            return False
        return self._complete_with_spares(group_id, self._take(group_id))

    def _occupy_other(self, group_id: int, member: int) -> bool:
        """A member of a group that is no usual one; a spare member that its group no longer needs; or misuse."""
        group, bit = self._groups.get(group_id), self._bits.get(member, 0)
        if group is None or not bit & group.running or not group.missing:
            return self._occupied_late(group_id, member)
        group.running ^= bit
        group.missing -= 1
        if group.missing:
            return False
        if self.spare_members:
            return self._complete_with_spares(group_id, group)
        return self._complete(group_id, group.version)

    def _complete(self, group_id: int, version: int) -> bool:
        """The last member that a group needs is finished."""
        self._finished[version + self.eta - self._version].ids.append(group_id)
        self._finished_count += 1
        if self._finished_count >= self.batch_groups:  # with fewer it is not READY, as before
            self._floor = None
        return True

    def _complete_with_spares(self, group_id: int, group: Group) -> bool:
        """The members that finished first make the group; without the others its version, and deadline, may rise."""
        before = self._class_of(group)
        group.keep_done()
        self._shift_slack(before, self._class_of(group), 1)
        return self._complete(group_id, group.version)

    def _occupied_late(self, group_id: int, member: int) -> bool:
        """A spare member that its group no longer needs, or misuse."""
        group = self._find(group_id)
        bit = self._bits.get(member, 0)
        if group is None and self.spare_members and bit and group_id in self._used_ids():
            return False  # it finished while the abort that followed its group's end was on its way
        if group is None or not bit & group.reserved:
            raise ProtocolError(f"member {member} of group {group_id} is not reserved, so it cannot be occupied")
        if not bit & group.running:
            raise ProtocolError(f"member {member} of group {group_id} was occupied before")
        group.remove(member, bit)
        self._released_trajectories["redundant"] += 1
        return False

    # ---- release -------------------------------------------------------------------------------------------------

    def release(self, group_id: int, reason: str, member: int | None = None) -> None:
        """Give up one member, or the whole group; releasing the last member releases the group.

        A released member of an incomplete group may be reserved again (a new trajectory with a new version).

        Raises:
            ProtocolError: nothing such is outstanding, the reason is none of REASONS, or `member` belongs to a
                complete group that is made of it (release the group then).
        """
        if reason not in REASONS:
            raise ProtocolError(f"unknown reason {reason!r} to release group {group_id}: one of {', '.join(REASONS)}")
        group = self._find(group_id)
        if group is None:
            raise ProtocolError(f"group {group_id} is not outstanding, so it cannot be released ({reason})")
        if member is None:
            self._drop(group_id, group, reason)
        else:
            self._release_member(group_id, self._take(group_id), reason, member)

    def _release_member(self, group_id: int, group: Group, reason: str, member: int) -> None:
        bit = self._bits.get(member, 0)
        if not bit & group.reserved:
            raise ProtocolError(f"member {member} of group {group_id} is not reserved, so it cannot be released")
        if not group.missing and not bit & group.running:
            raise ProtocolError(f"member {member} is part of the complete group {group_id}; release the whole group")
        if group.reserved == bit:
            self._drop(group_id, group, reason)
            return
        before = self._class_of(group)
        group.remove(member, bit)
        if group.missing:
            group.refresh_version()
            self._shift_slack(before, self._class_of(group), 1)
            self._floor = None
        self._released_trajectories[reason] += 1

    def _drop(self, group_id: int, group: Group, reason: str) -> None:
        """Release a whole group."""
        place = self._class_of(group)
        if not group.missing:
            self._finished[place].remove(group_id)
            self._finished_count -= 1
        if self._groups.pop(group_id, None) is None:
            self._usual.forget(group_id)
        self._floor = None
        self._shift_slack(place, self.eta + 1, 1)
        self._released_groups[reason] += 1
        self._released_trajectories[reason] += group.reserved.bit_count()

    # ---- consume -------------------------------------------------------------------------------------------------

    def ready(self) -> bool:
        """Whether the trainer may take its batch: B groups are finished, and the rest can still meet its deadlines."""
        if self._finished_count < self.batch_groups:
            return False
        if self.spare_groups:
            return True
        return self._first_violated() is None

    def _shortfalls(self) -> Iterator[int]:
        """Per deadline class, how many of the B places that a step trains are not filled from it or earlier ones."""
        missing = self.batch_groups
        for finished in self._finished:
            missing -= len(finished)
            yield missing if missing > 0 else 0

    def _first_violated(self) -> int | None:
        """The smallest class whose outstanding groups no longer fit, if the trainer took its batch now."""
        for i, shortfall in enumerate(self._shortfalls()):
            if self._slack[i] < shortfall:
                return i
        return None

    def waiting_for(self) -> list[int]:
        """The groups that a STUCK step waits for, earliest deadline first; empty when READY or PENDING."""
        if self.ready():
            return []
        violated = None if self.spare_groups else self._first_violated()
        if violated is not None:
            return view.unfinished(self, self._version + violated)
        if self._outstanding_groups() >= self.batch_groups:
            return view.unfinished(self, self._version + self.eta)
        return []

    def consume(self) -> list[int]:
        """Take the batch of this step, earliest deadline first, and move on to the next version.

        What had to be released on the way (spare members, surplus groups) is in `dropped`.

        Raises:
            NotReady: the buffer is PENDING or STUCK.
        """
        if not self.ready():
            raise NotReady(f"step {self._version} is not ready: {view.describe(self)}")
        self.dropped = []
        batch = self._take_batch()
        self._consumed_groups += len(batch)
        self._consumed_trajectories += len(batch) * self.group_size
        if self.spare_groups:
            self._release_surplus()
        self._advance()
        return batch

    def _take_batch(self) -> list[int]:
        batch: list[int] = []
        for place, finished in enumerate(self._finished):
            taken = finished.take(self.batch_groups - len(batch))
            for group_id in self._usual.forget_complete(taken):
                group = self._groups.pop(group_id)
                if group.running:
                    self._release_spares(group_id, group)
            self._shift_slack(place, self.eta + 1, len(taken))
            batch += taken
        self._finished_count -= len(batch)
        return batch

    def _release_spares(self, group_id: int, group: Group) -> None:
        """The group is consumed while spare members still run: nobody needs them any more."""
        spares = group.running
        self.dropped += [(group_id, member, "redundant") for member, bit in self._bits.items() if bit & spares]
        self._released_trajectories["redundant"] += spares.bit_count()

    def _release_surplus(self) -> None:
        """Release the fewest groups that let the rest fit the steps after this one: unfinished first, newest first."""
        places = self.batch_groups + self.spare_groups
        for i in range(self.eta + 1):
            excess = places - self._slack[i]
            if excess > 0:
                for group_id in view.dispensable(self, self._version + i)[:excess]:
                    group = self._take(group_id)
                    self.dropped += [(group_id, m, "surplus") for m, bit in self._bits.items() if bit & group.reserved]
                    self._drop(group_id, group, "surplus")

    def _advance(self) -> None:
        """c += 1: every class comes one step nearer, and the places of the step just taken are gone."""
        places = self.batch_groups + self.spare_groups
        self._version += 1
        self._floor = None
        self._trim_usual()
        self._finished.append(self._finished.pop(0))
        self._slack = [slack - places for slack in self._slack[1:]]
        self._slack.append(places * (self.eta + 1) - self._outstanding_groups())

    # ---- derived view, persistence, self-check -------------------------------------------------------------------

    def buffers(self) -> list[tuple[int, int, int, int, str]]:
        """The virtual staleness buffers c .. c+eta as `(version, reserved, occupied, empty, state)`.

        Derived, O(outstanding): if READY, buffer c is exactly what consume() would return; the rest is laid out by
        earliest deadline, finished first on ties. `reserved` counts unfinished groups, `occupied` finished ones.
        """
        return view.buffers(self)

    def dump(self) -> dict[str, Any]:
        """The state as JSON-able values, of a size that depends on what is outstanding only; see snapshot.py."""
        return snapshot.dump(self)

    @classmethod
    def load(cls, state: dict[str, Any]) -> Self:
        """The inverse of dump(): equal answers to equal calls from here on. ProtocolError if it is not a state."""
        return snapshot.load(cls, state)

    def check(self) -> None:
        """Recount everything from the groups; ProtocolError names the invariant that does not hold."""
        snapshot.check(self)
