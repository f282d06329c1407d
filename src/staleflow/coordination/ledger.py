"""Who may start, and what is trained when: the books of every policy behind one face.

`staleflow`, `sync` and `one_step` keep the books of `StalenessProtocol`. The baselines that do not promise its bound
(`pace`, `drop`) or promise it by fixed stamps (`wait`) keep their own, with the same names, the same exactly-once and
the same conservation.
"""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, field
from typing import Any, Protocol

from staleflow.protocol import NotReady, ProtocolError, StalenessProtocol


class Ledger(Protocol):
    """What the coordinator needs of the books (protocol.md tells the meaning)."""

    @property
    def version(self) -> int: ...
    @property
    def batch_groups(self) -> int: ...
    @property
    def group_size(self) -> int: ...
    @property
    def eta(self) -> int: ...
    @property
    def spare_groups(self) -> int: ...
    @property
    def spare_members(self) -> int: ...
    @property
    def dropped(self) -> list[tuple[int, int, str]]: ...
    def can_reserve(self, version: int, group_id: int | None = None) -> bool: ...
    def reserve(self, group_id: int, member: int, version: int) -> bool: ...
    def occupy(self, group_id: int, member: int) -> bool: ...
    def release(self, group_id: int, reason: str, member: int | None = None) -> None: ...
    def ready(self) -> bool: ...
    def waiting_for(self) -> Any: ...
    def consume(self) -> list[int]: ...
    def buffers(self) -> Any: ...
    def counters(self) -> Any: ...
    def dump(self) -> Any: ...
    def check(self) -> None: ...


@dataclass(slots=True)
class _Entry:
    """An outstanding group of a baseline's books."""

    step: int  # stamped at dispatch (`wait`)
    members: dict[int, int] = field(default_factory=dict)  # member -> V_traj
    occupied: set[int] = field(default_factory=set)

    @property
    def version(self) -> int:
        return min(self.members.values())


class BaselineLedger:
    """Books without the protocol: `pace`, and the base of `drop` and `wait`.

    `pace`: admit while consumed + outstanding < (eta + c + 1) * B, train the oldest finished. What it trains too late
    is counted in `excess` {versions beyond eta: groups}.
    """

    name = "pace"

    def __init__(
        self, batch_groups: int, group_size: int, eta: int, spare_members: int = 0, start_version: int = 0
    ) -> None:
        if batch_groups < 1 or group_size < 1 or eta < 0 or spare_members < 0:
            raise ValueError(
                f"{self.name}: batch_groups = {batch_groups}, group_size = {group_size}, eta = {eta}, spare_members = "
                f"{spare_members}; the first two must be >= 1, the others >= 0"
            )
        self.batch_groups, self.group_size, self.eta = batch_groups, group_size, eta
        self.spare_groups, self.spare_members = 0, spare_members
        self.version = start_version
        self.dropped: list[tuple[int, int, str]] = []  # (group, member, reason) that the last consume() released
        self.excess: Counter[int] = Counter()
        self._groups: dict[int, _Entry] = {}
        self._finished: dict[int, None] = {}  # in order of finishing
        self._places: Counter[int] = Counter()  # step -> outstanding groups stamped with it
        self._counts = {kind: {"reserved": 0, "consumed": 0} for kind in ("groups", "trajectories")}
        self._released: dict[str, Counter[str]] = {"groups": Counter(), "trajectories": Counter()}

    # ---- admission ------------------------------------------------------------------------------------------------

    def can_reserve(self, version: int, group_id: int | None = None) -> bool:
        if version > self.version:
            raise ProtocolError(f"reserve at version {version}: the trainer is at {self.version}")
        return group_id in self._groups or self._admits(version)

    def _admits(self, version: int) -> bool:
        return len(self._groups) < (self.eta + 1) * self.batch_groups

    def reserve(self, group_id: int, member: int, version: int) -> bool:
        if not self.can_reserve(version, group_id):
            return False
        entry = self._groups.get(group_id)
        if entry is None:
            entry = self._open(group_id)
        if member not in entry.members:
            entry.members[member] = version
            self._counts["trajectories"]["reserved"] += 1
        return True

    def _open(self, group_id: int) -> _Entry:
        entry = self._groups[group_id] = _Entry(self._stamp())
        self._counts["groups"]["reserved"] += 1
        return entry

    def _stamp(self) -> int:
        return -1

    # ---- the end of a group ---------------------------------------------------------------------------------------

    def occupy(self, group_id: int, member: int) -> bool:
        entry = self._entry(group_id, member)
        if member in entry.occupied:
            raise ProtocolError(f"group {group_id}: member {member} occupied twice")
        if group_id in self._finished:  # a spare member that came late
            self.release(group_id, "redundant", member)
            return False
        entry.occupied.add(member)
        if len(entry.occupied) < self.group_size:
            return False
        self._finished[group_id] = None
        return True

    def release(self, group_id: int, reason: str, member: int | None = None) -> None:
        entry = self._entry(group_id, member)
        gone = list(entry.members) if member is None else [member]
        for m in gone:
            del entry.members[m]
            entry.occupied.discard(m)
        self._released["trajectories"][reason] += len(gone)
        if not entry.members:
            self._forget(group_id)
            self._released["groups"][reason] += 1

    def _entry(self, group_id: int, member: int | None) -> _Entry:
        entry = self._groups.get(group_id)
        if entry is None or (member is not None and member not in entry.members):
            raise ProtocolError(f"group {group_id}, member {member}: not reserved")
        return entry

    def _forget(self, group_id: int) -> _Entry:
        self._finished.pop(group_id, None)
        return self._groups.pop(group_id)

    # ---- the trainer ----------------------------------------------------------------------------------------------

    def _next(self) -> list[int] | None:
        """The groups of the next step, or None."""
        first = [group_id for group_id, _ in zip(self._finished, range(self.batch_groups), strict=False)]
        return first if len(first) == self.batch_groups else None

    def ready(self) -> bool:
        return self._next() is not None

    def consume(self) -> list[int]:
        batch = self._next()
        if batch is None:
            raise NotReady(f"{self.name}: step {self.version} has {len(self._finished)} finished groups")
        self.dropped = []
        for group_id in batch:
            entry = self._forget(group_id)
            if (excess := self.version - entry.version - self.eta) > 0:
                self.excess[excess] += 1
            self._counts["trajectories"]["consumed"] += len(entry.members)
        self._counts["groups"]["consumed"] += len(batch)
        self.version += 1
        self._advanced()
        return batch

    def _advanced(self) -> None:
        """Called when the version has risen."""

    def waiting_for(self) -> set[int]:
        return set() if self.ready() else {g for g in self._groups if g not in self._finished}

    # ---- what people and checkpoints see --------------------------------------------------------------------------

    def buffers(self) -> list[tuple[int, int, int, int, str]]:
        done, open_ = len(self._finished), len(self._groups) - len(self._finished)
        out = []
        for step in range(self.version, self.version + self.eta + 1):
            occupied = min(done, self.batch_groups)
            reserved = min(open_, self.batch_groups - occupied)
            done, open_ = done - occupied, open_ - reserved
            empty = self.batch_groups - occupied - reserved
            state = "PENDING" if empty else "STUCK" if reserved else "READY"
            out.append((step, reserved, occupied, empty, state))
        return out

    def counters(self) -> dict[str, dict[str, Any]]:
        outstanding = {"groups": len(self._groups), "trajectories": sum(len(e.members) for e in self._groups.values())}
        return {
            kind: {**self._counts[kind], "outstanding": outstanding[kind], "released": dict(self._released[kind])}
            for kind in self._counts
        }

    def check(self) -> None:
        for kind, c in self.counters().items():
            if c["reserved"] != c["outstanding"] + c["consumed"] + sum(c["released"].values()):
                raise ProtocolError(f"conservation of {kind}: {c}")

    def dump(self) -> dict[str, Any]:
        """JSON-able state; `load_ledger` restores it."""
        return {
            "name": self.name,
            "settings": [self.batch_groups, self.group_size, self.eta, self.spare_members, self.version],
            "groups": [
                [g, e.step, sorted(e.members.items()), sorted(e.occupied)] for g, e in sorted(self._groups.items())
            ],
            "finished": list(self._finished),
            "counts": self._counts,
            "released": {kind: dict(counter) for kind, counter in self._released.items()},
            "excess": sorted(self.excess.items()),
        }

    @classmethod
    def load(cls, state: dict[str, Any]) -> BaselineLedger:
        ledger = cls(*state["settings"])
        for group_id, step, members, occupied in state["groups"]:
            ledger._groups[group_id] = _Entry(step, dict(members), set(occupied))
            ledger._places[step] += 1
        ledger._finished = dict.fromkeys(state["finished"])
        ledger._counts = {kind: dict(counts) for kind, counts in state["counts"].items()}
        ledger._released = {kind: Counter(counter) for kind, counter in state["released"].items()}
        ledger.excess = Counter(dict(state["excess"]))
        return ledger


class DropLedger(BaselineLedger):
    """Like `pace`, but a group older than eta is thrown away, finished or not."""

    name = "drop"

    def can_reserve(self, version: int, group_id: int | None = None) -> bool:
        """What would be thrown away at the next step is not begun."""
        return version + self.eta >= self.version and super().can_reserve(version, group_id)

    def _advanced(self) -> None:
        for group_id in [g for g, e in self._groups.items() if e.version + self.eta < self.version]:
            self.dropped += [(group_id, member, "stale") for member in self._groups[group_id].members]
            self.release(group_id, "stale")


class WaitLedger(BaselineLedger):
    """A group is stamped with its step when it is dispatched; the trainer waits for exactly those."""

    name = "wait"

    def _stamp(self) -> int:
        """The earliest step with a free place."""
        step = self.version
        while self._places[step] >= self.batch_groups:
            step += 1
        return step

    def _open(self, group_id: int) -> _Entry:
        entry = super()._open(group_id)
        self._places[entry.step] += 1
        return entry

    def _forget(self, group_id: int) -> _Entry:
        entry = super()._forget(group_id)
        self._places[entry.step] -= 1
        return entry

    def _admits(self, version: int) -> bool:
        return self.version <= version + self.eta and self._stamp() <= version + self.eta

    def reserve(self, group_id: int, member: int, version: int) -> bool:
        entry = self._groups.get(group_id)
        if entry is not None and entry.step > version + self.eta:
            return False  # this member would be too old at the step of its group
        return super().reserve(group_id, member, version)

    def _next(self) -> list[int] | None:
        if self._places[self.version] < self.batch_groups:
            return None
        due = [group_id for group_id in self._finished if self._groups[group_id].step == self.version]
        return due if len(due) == self.batch_groups else None

    def consume(self) -> list[int]:
        batch = super().consume()
        if self.excess:
            raise ProtocolError(f"wait: the bound eta = {self.eta} was exceeded: {dict(self.excess)}")
        return batch

    def waiting_for(self) -> set[int]:
        due = {group_id for group_id, entry in self._groups.items() if entry.step == self.version}
        return due - set(self._finished) if len(due) == self.batch_groups else set()


_BASELINES: dict[str, type[BaselineLedger]] = {c.name: c for c in (BaselineLedger, DropLedger, WaitLedger)}
_ETA = {"sync": 0, "one_step": 1}  # these policies are their eta


def make_ledger(
    policy: str,
    *,
    batch_groups: int,
    group_size: int,
    eta: int,
    spare_groups: int = 0,
    spare_members: int = 0,
    start_version: int = 0,
) -> Ledger:
    """The books of a policy. `sync` and `one_step` have an eta of their own (0 and 1)."""
    if policy in _BASELINES:
        if spare_groups:
            raise ValueError(
                f"staleness.spare_groups = {spare_groups}: policy {policy!r} has no spare groups; set it to 0"
            )
        return _BASELINES[policy](batch_groups, group_size, eta, spare_members, start_version)
    return StalenessProtocol(
        batch_groups=batch_groups,
        group_size=group_size,
        eta=_ETA.get(policy, eta),
        spare_groups=spare_groups,
        spare_members=spare_members,
        start_version=start_version,
    )


def load_ledger(policy: str, state: Any) -> Ledger:
    """What `make_ledger` made, from its `dump()`."""
    return _BASELINES[policy].load(state) if policy in _BASELINES else StalenessProtocol.load(state)
