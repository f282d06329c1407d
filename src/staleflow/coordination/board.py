"""The speculative state: what every trajectory and every instance will be once the commands already sent have applied.

The coordinator alone decides where a trajectory is, so the place of a trajectory changes only here:

    QUEUED --route--> RUNNING --interrupt--> LEAVING --returned--> QUEUED
                         |                      |
                         +------ finished ------+--> GENERATED --rewarded--> (left to the ledger)

An instance's load is its last accepted snapshot plus the commands that this snapshot does not cover yet.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from enum import IntEnum

from staleflow.coordination.types import (
    EVAL_TID_BASE,
    Abort,
    Command,
    InstanceInfo,
    InstanceSnapshot,
    Interrupt,
    Pull,
    Route,
    unpack_progress,
)
from staleflow.trajectories.schema import MEMBER_BITS


class Phase(IntEnum):
    QUEUED = 0  # in the trajectory server, may be routed
    RUNNING = 1  # on an instance (or its Route is under way)
    LEAVING = 2  # its Interrupt is under way
    GENERATED = 3  # complete, reward outstanding or group incomplete


@dataclass(slots=True, eq=False)
class Work:
    """One trajectory. `version` is the reserved V_traj; `floor` the oldest version that may go on with it.

    The floor is newer where the instance had pulled more than it was told when the trajectory began.
    """

    tid: int
    prompt_tokens: int
    tokens: int = 0
    version: int = -1
    floor: int = -1
    phase: Phase = Phase.QUEUED
    instance: int | None = None
    moved_at_tokens: int = 0
    interrupted_by: int = -1  # the Interrupt that it left by last

    @property
    def evaluation(self) -> bool:
        return self.tid >= EVAL_TID_BASE

    @property
    def context_tokens(self) -> int:
        return self.prompt_tokens + self.tokens

    @property
    def group_id(self) -> int:
        return self.tid >> MEMBER_BITS


@dataclass(slots=True, eq=False)
class Instance:
    """One rollout instance as it will be. `applied` is the last command its accepted snapshot covers."""

    info: InstanceInfo
    version: int = -1
    told: int = -1
    applied: int = -1
    running: int = 0
    waiting: int = 0
    kv_reported: int = 0
    pending: deque[tuple[int, int]] = field(default_factory=deque)  # (command id, change of kv tokens)
    pending_kv: int = 0
    held: dict[int, Work] = field(default_factory=dict)
    leaving: int = 0
    evaluations: int = 0
    ages: dict[int, int] = field(default_factory=dict)  # V_traj -> trajectories held
    reported: bytes | None = None  # progress not yet copied into `held`

    @property
    def spec_version(self) -> int:
        """The version it will have when the next command applies."""
        return self.told if self.told > self.version else self.version

    @property
    def pulling(self) -> bool:
        return self.told > self.version

    @property
    def n(self) -> int:
        """Trajectories it will hold."""
        return len(self.held) - self.leaving

    def due(self, version: int) -> int:
        """Trajectories held with a V_traj of at most `version`."""
        return sum(n for age, n in self.ages.items() if age <= version)

    @property
    def kv_tokens(self) -> int:
        kv = self.kv_reported + self.pending_kv
        return kv if kv > 0 else 0

    @property
    def spec_waiting(self) -> int:
        """Trajectories that wait for a place on it: as reported, or because more was routed than runs at once."""
        excess = len(self.held) - self.leaving - self.info.max_running
        return self.waiting if self.waiting > excess else excess


class Board:
    """All trajectories and instances, the queues between them, and the commands of this cycle."""

    def __init__(self, instances: Iterable[InstanceInfo]) -> None:
        self.instances: dict[int, Instance] = {}
        self.works: dict[int, Work] = {}
        self.levels: dict[int, dict[int, Work]] = {}  # floor -> waiting in the trajectory server, oldest first
        self.evaluations: dict[int, Work] = {}  # evaluation work waiting in the trajectory server
        self.last_command = 0
        self.interrupts = self.pulls = 0  # told so far
        self._outbox: list[tuple[type[Command], int, int, list[int]]] = []
        self._last: dict[int, int] = {}
        for info in instances:
            self.join(info)

    # ---- instances ------------------------------------------------------------------------------------------------

    def join(self, info: InstanceInfo) -> None:
        if info.index in self.instances:
            raise ValueError(f"instance {info.index} joined twice; report it lost before it joins again")
        self.instances[info.index] = Instance(info, applied=-1)

    def accept(self, s: InstanceSnapshot) -> bool:
        """Take a snapshot over, unless it is older than what is known (repeated or overtaken): then False."""
        instance = self.instances.get(s.instance)
        if instance is None or s.applied_command < instance.applied or s.version < instance.version:
            return False
        instance.applied, instance.version = s.applied_command, s.version
        instance.running, instance.waiting, instance.kv_reported = s.running, s.waiting, s.kv_tokens
        if s.progress:
            instance.reported = s.progress
        while instance.pending and instance.pending[0][0] <= s.applied_command:
            instance.pending_kv -= instance.pending.popleft()[1]
        return True

    def refresh(self, instance: Instance) -> None:
        """Copy the reported progress into the trajectories; on demand, since most cycles do not look at it."""
        if instance.reported is None:
            return
        held = instance.held
        for tid, tokens in unpack_progress(instance.reported):
            work = held.get(tid)
            if work is not None and tokens > work.tokens:
                work.tokens = tokens
        instance.reported = None

    # ---- trajectories ---------------------------------------------------------------------------------------------

    def enqueue(self, work: Work) -> None:
        work.phase, work.instance = Phase.QUEUED, None
        if work.evaluation:
            self.evaluations[work.tid] = work
        else:
            self.levels.setdefault(work.floor, {})[work.tid] = work

    def queued(self) -> int:
        return sum(map(len, self.levels.values())) + len(self.evaluations)

    def by_level(self) -> Iterator[tuple[int, dict[int, Work]]]:
        """Levels with something waiting, oldest version first."""
        for floor in sorted(self.levels):
            yield floor, self.levels[floor]

    def lift(self, work: Work) -> None:
        """Take a trajectory from wherever it is; what the instance still does with it no longer counts."""
        if work.phase is Phase.QUEUED:
            self.evaluations.pop(work.tid, None)
            level = self.levels.get(work.floor)
            if level is not None and level.pop(work.tid, None) is not None and not level:
                del self.levels[work.floor]
        elif work.instance is not None:
            instance = self.instances[work.instance]
            del instance.held[work.tid]
            instance.ages[work.version] -= 1
            if not instance.ages[work.version]:
                del instance.ages[work.version]
            instance.leaving -= work.phase is Phase.LEAVING
            instance.evaluations -= work.evaluation
            work.instance = None

    # ---- commands -------------------------------------------------------------------------------------------------

    def route(self, work: Work, instance: Instance) -> None:
        self.lift(work)
        work.phase, work.instance = Phase.RUNNING, instance.info.index
        instance.held[work.tid] = work
        instance.ages[work.version] = instance.ages.get(work.version, 0) + 1
        instance.evaluations += work.evaluation
        self._say(Route, instance, work.tid, work.context_tokens)

    def interrupt(self, work: Work, instance: Instance) -> None:
        work.phase = Phase.LEAVING
        instance.leaving += 1
        self.interrupts += 1
        self._say(Interrupt, instance, work.tid, -work.context_tokens)
        work.interrupted_by = instance.pending[-1][0]

    def abort(self, work: Work) -> None:
        """Stop what an instance still does for a trajectory that is given up; lifts it."""
        instance = None if work.instance is None else self.instances[work.instance]
        self.lift(work)
        if instance is not None:
            self._say(Abort, instance, work.tid, -work.context_tokens)

    def pull(self, instance: Instance, version: int) -> None:
        instance.told = version
        self.pulls += 1
        self._say(Pull, instance, version, 0)

    def _say(self, kind: type[Command], instance: Instance, value: int, kv_change: int) -> None:
        """Add to the instance's last command when that is of the same kind, otherwise begin one."""
        index = instance.info.index
        at = self._last.get(index, -1)
        if at >= 0 and self._outbox[at][0] is kind and kind is not Pull:
            command_id = self._outbox[at][2]
            self._outbox[at][3].append(value)
            instance.pending[-1] = (command_id, instance.pending[-1][1] + kv_change)
        else:
            self.last_command += 1
            self._last[index] = len(self._outbox)
            self._outbox.append((kind, index, self.last_command, [value]))
            instance.pending.append((self.last_command, kv_change))
        instance.pending_kv += kv_change

    def drain(self) -> list[Command]:
        """The commands said since the last call, in the order of their ids."""
        out: list[Command] = []
        for kind, index, command_id, values in self._outbox:
            if kind is Pull:
                out.append(Pull(command_id, index, values[0]))
            else:
                out.append(kind(command_id, index, tuple(values)))  # type: ignore[arg-type]  # not Pull: takes tids
        self._outbox, self._last = [], {}
        return out
