"""What the coordinator sees and says: snapshots, events, commands. Plain frozen data, no torch, no I/O.

The coordinator core never touches payload. A trajectory is a `tid` (see `trajectories.schema.trajectory_id`), a group
is a `group_id`. Commands are idempotent and carry rising ids; an instance applies them in order and reports the last
id it has applied, which is how the speculative state knows what a snapshot already covers (paper: snapshot-command
cycle).
"""

from __future__ import annotations

from array import array
from collections.abc import Iterable
from dataclasses import dataclass
from itertools import chain

from staleflow.trajectories.schema import MEMBER_BITS


@dataclass(frozen=True, slots=True)
class InstanceSnapshot:
    """One rollout instance, as it saw itself between two engine steps.

    `progress` of every trajectory that the instance holds: see `pack_progress`. `version` is -1 before the first Pull.
    `time_s` is the reporter's monotonic clock, for display only.
    """

    instance: int
    version: int
    applied_command: int
    running: int
    waiting: int
    kv_tokens: int
    kv_capacity_tokens: int
    progress: bytes = b""
    time_s: float = 0.0


def pack_progress(pairs: Iterable[tuple[int, int]]) -> bytes:
    """(tid, response tokens) of each, in any order, as 64-bit integers of this machine.

    Packed, because pairs of 100,000 trajectories cost more to take apart and to free than all that a cycle decides.
    """
    return array("q", chain.from_iterable(pairs)).tobytes()


def unpack_progress(packed: bytes) -> Iterable[tuple[int, int]]:
    """The inverse of `pack_progress`."""
    numbers = memoryview(packed).cast("q").tolist()
    return zip(numbers[::2], numbers[1::2], strict=True)


@dataclass(frozen=True, slots=True)
class Route:
    """Trajectory server -> instance: generate (or go on generating) these. For a tid already there: no effect."""

    id: int
    instance: int
    tids: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class Interrupt:
    """Instance -> trajectory server, with the tokens kept. The instance answers with one `returned` per tid it held."""

    id: int
    instance: int
    tids: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class Abort:
    """Drop these, wherever they are on the instance; nothing is returned."""

    id: int
    instance: int
    tids: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class Pull:
    """Load the newest parameters of the node's store, at least `version`.

    Trajectories on the instance are interrupted, keep their tokens, stay with the instance, and go on afterwards.
    """

    id: int
    instance: int
    version: int


Command = Route | Interrupt | Abort | Pull

EVAL_GROUP_BASE = 1 << 40  # group ids from here up are evaluation work: routed, never reserved, never trained on
EVAL_TID_BASE = EVAL_GROUP_BASE << MEMBER_BITS


def is_evaluation(tid: int) -> bool:
    """Whether a trajectory answers a held-out prompt."""
    return tid >= EVAL_TID_BASE


@dataclass(frozen=True, slots=True)
class InstanceInfo:
    """What is fixed about one rollout instance: where it lives and how much it holds."""

    index: int
    node: int
    max_running: int
    kv_capacity_tokens: int


@dataclass(frozen=True, slots=True)
class Released:
    """A trajectory that will not be trained on: its payload may be forgotten. `tokens` = response tokens wasted."""

    tid: int
    reason: str
    tokens: int


@dataclass(frozen=True, slots=True)
class Batch:
    """What step `step` trains on: group ids in the protocol's order, with the kept members' tids of each group."""

    step: int
    groups: tuple[tuple[int, tuple[int, ...]], ...]


@dataclass(frozen=True, slots=True)
class InstanceView:
    """One instance in the live view, commands in flight counted as applied."""

    index: int
    version: int
    pulling: bool
    running: int
    waiting: int
    kv_tokens: int
    kv_capacity_tokens: int


@dataclass(frozen=True, slots=True)
class CoordinatorView:
    """Numbers for people. `buffers` as `StalenessProtocol.buffers()`; `discarded_tokens` by reason."""

    version: int
    published: int
    instances: tuple[InstanceView, ...]
    buffers: tuple[tuple[int, int, int, int, str], ...]
    queued: int
    offered_groups: int
    awaiting_reward: int
    interrupts: int
    migrations: int
    pulls: int
    discarded_tokens: dict[str, int]


@dataclass(frozen=True, slots=True)
class Waited:
    """A trajectory that the trainer waits for; `instance`: None in the trajectory server or at its reward."""

    group_id: int
    tid: int
    instance: int | None
