"""The published slot formulation, plain and slow: the oracle of the tests and the peer of the bench, not for runs.

Every buffer `c .. c+eta` has B places, and every group sits in one of them:

- reserve takes the latest admissible buffer with an empty place;
- occupy frees the group's place, moves the earliest-buffered reservation that may legally live there into the hole
  (entry exchange), and puts the finished group into the earliest buffer with room;
- buffer c is READY when its B places are all occupied.

It knows groups only. Members that begin later with an older version call `lower`.
"""


class SlotProtocol:
    """The slot rule for groups of one trajectory or more; every operation costs O(outstanding)."""

    def __init__(self, batch_groups: int, eta: int, start_version: int = 0) -> None:
        self.batch_groups = batch_groups
        self.eta = eta
        self.version = start_version
        self.versions: dict[int, int] = {}  # outstanding group -> its version
        self.buffer_of: dict[int, int] = {}  # outstanding group -> the buffer that it sits in
        self.occupied: dict[int, None] = {}  # finished groups, earliest finished first

    def reserve(self, group_id: int, version: int) -> bool:
        """Take the latest admissible place for a new group; False, changing nothing, if there is none."""
        buffer = self._latest_with_room(version)
        if buffer is None:
            return False
        self.versions[group_id] = version
        self.buffer_of[group_id] = buffer
        return True

    def can_reserve(self, version: int) -> bool:
        """Whether a new group of this version would find a place."""
        return self._latest_with_room(version) is not None

    def lower(self, group_id: int, version: int) -> bool:
        """A member older than the rest: the group stays if it may, else takes the latest admissible place, if any."""
        if self.buffer_of[group_id] > version + self.eta:
            buffer = self._latest_with_room(version)
            if buffer is None:
                return False
            self.buffer_of[group_id] = buffer
        self.versions[group_id] = version
        return True

    def occupy(self, group_id: int) -> None:
        """The group is finished: entry exchange, then the earliest buffer with room."""
        hole = self.buffer_of.pop(group_id)
        movable = [i for i in self._reservations() if self.buffer_of[i] < hole <= self.versions[i] + self.eta]
        if movable:
            moved = min(movable, key=lambda i: self.buffer_of[i])
            self.buffer_of[moved] = hole
        self.buffer_of[group_id] = next(b for b in self._window(self.versions[group_id]) if self._room(b))
        self.occupied[group_id] = None

    def release(self, group_id: int) -> None:
        """Give up the group's place."""
        del self.versions[group_id], self.buffer_of[group_id]
        self.occupied.pop(group_id, None)

    def ready(self) -> bool:
        """Whether buffer c is full of finished groups."""
        return len(self._batch()) == self.batch_groups

    def consume(self) -> list[int]:
        """The groups of buffer c; the caller has seen that it is READY."""
        batch = self._batch()
        for group_id in batch:
            self.release(group_id)
        self.version += 1
        return batch

    def _batch(self) -> list[int]:
        return [i for i in self.occupied if self.buffer_of[i] == self.version]

    def _reservations(self) -> list[int]:
        return [i for i in self.buffer_of if i not in self.occupied]

    def _window(self, version: int) -> range:
        return range(max(version, self.version), version + self.eta + 1)

    def _latest_with_room(self, version: int) -> int | None:
        return next((b for b in reversed(self._window(version)) if self._room(b)), None)

    def _room(self, buffer: int) -> bool:
        return sum(b == buffer for b in self.buffer_of.values()) < self.batch_groups
