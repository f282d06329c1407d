"""An account of the protocol kept by the tests: naive, from the definitions, without looking into the implementation.

Feasibility is decided by laying the groups out in the steps, earliest deadline first, instead of by the inequality, and
READY by taking the batch away and laying out what is left.
"""

from collections import Counter
from dataclasses import dataclass, field
from itertools import combinations


@dataclass
class Ledger:
    """Predicts every answer of a StalenessProtocol with the same settings; O(n log n) a question."""

    batch_groups: int
    group_size: int
    eta: int
    spare_groups: int = 0
    spare_members: int = 0
    version: int = 0
    groups: dict[int, dict[int, list[int]]] = field(default_factory=dict)  # id -> member -> [V_traj, finished]
    finished: list[int] = field(default_factory=list)  # complete groups, in the order of their completion
    born: Counter = field(default_factory=Counter)
    consumed: Counter = field(default_factory=Counter)
    released: dict[str, Counter] = field(default_factory=lambda: {"groups": Counter(), "trajectories": Counter()})
    trained: list[int] = field(default_factory=list)
    used: set[int] = field(default_factory=set)

    # ---- what follows from the account ----

    @property
    def places(self) -> int:
        return self.batch_groups + self.spare_groups

    def group_version(self, group_id: int) -> int:
        members = self.groups[group_id].values()
        complete = group_id in self.finished
        return min(version for version, done in members if done or not complete)

    def deadlines(self) -> dict[int, int]:
        return {i: self.group_version(i) + self.eta for i in self.groups}

    def feasible(self, deadlines: list[int], first_step: int, places: int) -> bool:
        """Whether steps first_step, first_step+1, ... of so many places can take all groups in time."""
        return all(d >= first_step + place // places for place, d in enumerate(sorted(deadlines)))

    def batch(self) -> list[int]:
        """The finished groups with the earliest deadlines, ties by the order of completion."""
        due = self.deadlines()
        return sorted(self.finished, key=lambda i: due[i])[: self.batch_groups]

    def ready(self, due: dict[int, int] | None = None) -> bool:
        due = self.deadlines() if due is None else due
        batch = sorted(self.finished, key=lambda i: due[i])[: self.batch_groups]
        if len(batch) < self.batch_groups:
            return False
        rest = [d for i, d in due.items() if i not in batch]
        return self.spare_groups > 0 or self.feasible(rest, self.version + 1, self.places)

    def ready_by_search(self) -> bool:
        """READY by its meaning: some B finished groups can be trained now such that the rest is still in time."""
        due = self.deadlines()
        for batch in combinations(self.finished, self.batch_groups):
            rest = [d for i, d in due.items() if i not in batch]
            if self.feasible(rest, self.version + 1, self.places):
                return True
        return False

    def may_reserve(self, group_id: int, version: int) -> bool:
        """For a member that is not reserved yet."""
        if group_id in self.finished:
            return False
        due = self.deadlines()
        was_ready = self.ready(due)
        due[group_id] = min(due.get(group_id, version + self.eta), version + self.eta)
        if not self.feasible(list(due.values()), self.version, self.places):
            return False
        return self.ready(due) or not was_ready

    def waiting_for(self) -> set[int]:
        """The definition of protocol.md, sums written out."""
        if self.ready():
            return set()
        due = self.deadlines()
        running = {i for i in self.groups if i not in self.finished}
        for t in range(self.version, self.version + self.eta + 1):
            n = sum(d <= t for d in due.values())
            f = sum(due[i] <= t for i in self.finished)
            if not self.spare_groups and n - min(f, self.batch_groups) > self.batch_groups * (t - self.version):
                return {i for i in running if due[i] <= t}
        return running if len(self.groups) >= self.batch_groups else set()

    def counters(self) -> dict[str, dict[str, object]]:
        outstanding = {"groups": len(self.groups), "trajectories": sum(map(len, self.groups.values()))}
        return {
            unit: {
                "reserved": self.born[unit],
                "outstanding": outstanding[unit],
                "consumed": self.consumed[unit],
                "released": dict(self.released[unit]),
            }
            for unit in ("groups", "trajectories")
        }

    # ---- what happened ----

    def reserved(self, group_id: int, member: int, version: int) -> None:
        if group_id not in self.groups:
            assert group_id not in self.used
            self.used.add(group_id)
            self.groups[group_id] = {}
            self.born["groups"] += 1
        self.groups[group_id][member] = [version, 0]
        self.born["trajectories"] += 1

    def occupied(self, group_id: int, member: int) -> bool:
        """Enter that a reserved, unfinished member finished; whether that completes its group."""
        members = self.groups[group_id]
        if group_id in self.finished:
            del members[member]
            self.released["trajectories"]["redundant"] += 1
            return False
        members[member][1] = 1
        complete = sum(done for _, done in members.values()) == self.group_size
        if complete:
            self.finished.append(group_id)
        return complete

    def member_released(self, group_id: int, reason: str, member: int) -> None:
        if len(self.groups[group_id]) == 1:
            return self.group_released(group_id, reason)
        del self.groups[group_id][member]
        self.released["trajectories"][reason] += 1
        return None

    def group_released(self, group_id: int, reason: str) -> None:
        members = self.groups.pop(group_id)
        if group_id in self.finished:
            self.finished.remove(group_id)
        self.released["groups"][reason] += 1
        self.released["trajectories"][reason] += len(members)

    def step(self, batch: list[int]) -> None:
        """Enter that `batch` was trained; asserts the bound, exactly-once and that it is what the rule says."""
        assert batch == self.batch()
        for group_id in batch:
            assert self.group_version(group_id) <= self.version <= self.group_version(group_id) + self.eta
            assert group_id not in self.trained
            spares = len(self.groups[group_id]) - self.group_size
            if spares:
                self.released["trajectories"]["redundant"] += spares
            del self.groups[group_id]
            self.finished.remove(group_id)
        self.trained += batch
        self.consumed["groups"] += len(batch)
        self.consumed["trajectories"] += len(batch) * self.group_size
        self.version += 1

    def surplus(self, dropped: set[int]) -> None:
        """Enter what a step dropped; asserts that it was necessary, as little as possible, and the right ones."""
        due = self.deadlines()
        first = self.version  # the step after the one that was trained
        excess = [sum(d <= t for d in due.values()) - self.places * (t - first + 1) for t in self._window(first)]
        assert len(dropped) == max(0, *excess)
        rest = [d for i, d in due.items() if i not in dropped]
        assert self.feasible(rest, first, self.places)
        for finished_one in dropped & set(self.finished):
            for kept in set(due) - dropped - set(self.finished):
                instead = [d for i, d in due.items() if i == finished_one or i not in dropped | {kept}]
                assert not self.feasible(instead, first, self.places), "unfinished ones go first"
        for group_id in dropped:
            self.group_released(group_id, "surplus")

    def _window(self, first: int) -> range:
        return range(first - 1, first + self.eta)
