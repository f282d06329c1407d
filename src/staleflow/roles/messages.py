"""What roles say to each other. Two layers, one encoding (MessagePack through msgspec).

Ring records (host <-> its device ranks) are told apart by `Kind`; trajectory records travel as they are
(trajectories.schema). Between hosts and the coordinator go the tagged structs below: in process on rank 0's node, over
an authenticated socket from the others.
"""

from __future__ import annotations

from enum import IntEnum
from typing import Any

import msgspec

from staleflow.coordination.types import Abort, Command, InstanceSnapshot, Interrupt, Pull, Route


class Kind(IntEnum):
    """Record kinds in the rings. Down: host to device rank. Up: device rank to host."""

    PAYLOAD = 1  # down: a trajectory record, before the Route that names it; id0 = tid
    COMMAND = 2  # down: one Command; id0 = its id
    STEP = 3  # down: StepHeader; its micro-batches follow
    MICROBATCH = 4  # down: see trajectories.microbatch
    SAVE = 5  # down: SaveRequest; an instance answers with a COPY of each trajectory it holds, and Copied
    REGROUP = 6  # down, to trainer ranks: Regroup
    FINISHED = 11  # up: a trajectory record whose generation has ended; id0 = tid
    RETURNED = 12  # up: a trajectory record that came back after Interrupt; id0 = tid
    REPORT = 13  # up: one of the structs of `Report`
    COPY = 14  # up: a trajectory record as it is now; its generation goes on; id0 = tid


class Wire(msgspec.Struct, frozen=True, tag=True, array_like=True):
    """Base of everything below."""


# ---- host -> device rank ---------------------------------------------------------------------------------------------


class StepHeader(Wire):
    """Totals are over all trainer ranks: losses divide by them."""

    step: int
    microbatches: int
    total_tokens: int
    total_response_tokens: int
    total_sequences: int
    total_groups: int


class SaveRequest(Wire):
    """Write a checkpoint of what this rank holds, now (before the next step)."""

    version: int
    directory: str


# ---- device rank -> host (-> coordinator) ----------------------------------------------------------------------------


class Ready(Wire):
    """The rank has loaded what it needs and is in its loop."""

    rank: int
    seconds: float


class Snapshot(Wire):
    """An instance's own view, and cumulative figures of its engine; `progress` as in coordination's snapshots."""

    instance: int
    version: int
    applied_command: int
    running: int
    waiting: int
    kv_tokens: int
    kv_capacity_tokens: int
    progress: bytes
    generated_tokens: int
    busy_s: float
    time_s: float


class Pulled(Wire):
    """`interrupted`: trajectories that were in flight, and go on under the new version."""

    instance: int
    version: int
    seconds: float
    retries: int
    interrupted: int


class Probe(Wire):
    """Log-probabilities of the fixed probe at a version: float32 bytes. `rank` tells trainer from engine."""

    rank: int
    version: int
    logprobs: bytes


class StepDone(Wire):
    """One trainer rank has finished a step; `metrics` are already reduced over the trainers where that matters."""

    rank: int
    step: int
    metrics: dict[str, float]
    busy_s: float
    snapshot_wait_s: float
    publish_overlap: float = 1.0  # share of all publishing time so far for which training did not wait


class Saved(Wire):
    """One trainer rank's part of a checkpoint is durable, and so are the other trainer ranks'."""

    rank: int
    version: int
    seconds: float


class SaveFailed(Wire):
    """A rank could not write its part of a checkpoint; the run goes on without it."""

    rank: int
    version: int
    error: str


class Copied(Wire):
    """An instance has handed over, for a checkpoint, what it has of the trajectories it holds."""

    rank: int
    version: int


class Offered(Wire):
    """Transport `direct`: the trainers hold this version ready for all instances. `last_s`: what the last push took."""

    rank: int
    version: int
    last_s: float


class StopRequested(Wire):
    """A rank got a signal and asks for the ordered stop."""

    rank: int
    signal: int


class Failed(Wire):
    """A rank is about to leave with this error."""

    rank: int
    error: str


Report = Ready | Snapshot | Pulled | Probe | StepDone | Saved | SaveFailed | Copied | Offered | StopRequested | Failed


# ---- host -> coordinator ---------------------------------------------------------------------------------------------


class Finished(Wire):
    """Generation ended; the payload is durable on `node`."""

    tid: int
    prompt_tokens: int
    tokens: int
    segments: list[tuple[int, int]]
    finish: int
    node: int


class Returned(Wire):
    """Interrupted, and back on `node`. `v_traj` is the version that began it, -1 while it has no tokens."""

    tid: int
    tokens: int
    node: int
    v_traj: int


class Rewarded(Wire):
    tid: int
    reward: float


class RewardFailed(Wire):
    tid: int
    why: str


class Stored(Wire):
    """The node's store holds this version."""

    node: int
    version: int
    seconds: float


class Account(Wire):
    """A host's own count since its start: what it has told as finished, rewarded and failed, evaluation included, and
    how many records it has handed to its trainers in how many steps.
    """

    node: int
    finished: int
    rewarded: int
    failed: int
    steps: int
    trained: int


class NodeSaved(Wire):
    """The payloads that a node holds are in the checkpoint, durable."""

    node: int
    version: int
    seconds: float


class Lost(Wire):
    """A rank of this node is gone. Everything that it had reported has been told before."""

    rank: int
    reason: str


class ClockAsked(Wire):
    """What time is it at rank 0? Answered by the link itself."""

    asked_ns: int


class RelayStopped(Wire):
    """The node's relay cannot go on: maybe because another node is gone, of which news will come.

    `generation`: of the publish group that it was in (`Regroup`), 0 for the first.
    """

    node: int
    why: str
    generation: int = 0


# ---- coordinator -> host ---------------------------------------------------------------------------------------------


class PromptMessage(Wire):
    """What a host needs to start and to score a group."""

    group_id: int
    tokens: bytes  # int32
    text: str
    reference: dict[str, Any]
    index: int  # of the prompt in the data


class Commands(Wire):
    """Commands for instances of this node (a tensor-parallel instance: the host tells all its ranks)."""

    commands: list[tuple[str, int, int, list[int], int]]
    prompts: list[PromptMessage]


class TrainStep(Wire):
    """The node's share of a step: per trainer rank the micro-batches in the order in which they are consumed."""

    header: StepHeader
    ranks: list[tuple[int, list[list[int]]]]
    advantages: dict[int, float]


class Forward(Wire):
    """Hand these payloads to another node (they stay here until Forget)."""

    tids: list[int]
    node: int


class Payload(Wire):
    """A forwarded trajectory record; empty when the node that was asked does not hold it."""

    tid: int
    node: int
    record: bytes


class Forget(Wire):
    """Payloads that are not needed any more; `groups`: those that are over, with their prompts."""

    tids: list[int]
    groups: list[int]


class Reload(Wire):
    """After a resume: the prompts of what this node has restored, and the trajectories that wait for their reward."""

    prompts: list[PromptMessage]
    score: list[int]


class Save(Wire):
    """Write a checkpoint: trainer ranks theirs, instances and host the trajectories."""

    version: int
    directory: str


class Settle(Wire):
    """The checkpoint of this version is durable: what is not needed to resume from it may go."""

    version: int


class ClockTold(Wire):
    """Answer to ClockAsked: rank 0's wall clock when it saw the question."""

    asked_ns: int
    seen_ns: int


class LeaveOut(Wire):
    """The job goes on without this instance: end what is left of it."""

    instance: int


class Adopt(Wire):
    """A node is gone: take these finished trajectories of it from its spool, and score them."""

    node: int
    tids: list[int]
    prompts: list[PromptMessage]


class Regroup(Wire):
    """Publish versions over a new group of these ranks from now on. `generation` counts the groups of this job."""

    generation: int
    ranks: list[int]


class Gone(Wire):
    """To nobody: from here on nothing goes to this node, and nothing is waited for from it."""


class Stop(Wire):
    """Leave, in order. `code` is the process's exit code."""

    code: int
    reason: str


ToHost = (
    Commands
    | TrainStep
    | Forward
    | Payload
    | Forget
    | Reload
    | Save
    | Settle
    | LeaveOut
    | Adopt
    | Regroup
    | Gone
    | ClockTold
    | Stop
)
ToCoordinator = (
    Report
    | Finished
    | Returned
    | Rewarded
    | RewardFailed
    | Stored
    | Account
    | NodeSaved
    | Lost
    | RelayStopped
    | ClockAsked
    | Payload
)

encode = msgspec.msgpack.Encoder().encode
decode_report = msgspec.msgpack.Decoder(Report).decode
decode_to_host = msgspec.msgpack.Decoder(ToHost).decode
decode_to_coordinator = msgspec.msgpack.Decoder(ToCoordinator).decode
decode_step_header = msgspec.msgpack.Decoder(StepHeader).decode
decode_save_request = msgspec.msgpack.Decoder(SaveRequest).decode
decode_regroup = msgspec.msgpack.Decoder(Regroup).decode
_decode_plain_command = msgspec.msgpack.Decoder(tuple[str, int, int, list[int], int]).decode


def plain_command(command: Command) -> tuple[str, int, int, list[int], int]:
    """(name, id, instance, tids, version): what a command is on the wire."""
    if isinstance(command, Pull):
        return "Pull", command.id, command.instance, [], command.version
    return type(command).__name__, command.id, command.instance, list(command.tids), 0


def command_of(plain: tuple[str, int, int, list[int], int]) -> Command:
    name, id_, instance, tids, version = plain
    if name == "Pull":
        return Pull(id_, instance, version)
    return {"Route": Route, "Interrupt": Interrupt, "Abort": Abort}[name](id_, instance, tuple(tids))


def decode_command(record: Any) -> Command:
    return command_of(_decode_plain_command(record))


def instance_snapshot(s: Snapshot) -> InstanceSnapshot:
    return InstanceSnapshot(
        s.instance, s.version, s.applied_command, s.running, s.waiting, s.kv_tokens, s.kv_capacity_tokens,
        s.progress, s.time_s,
    )  # fmt: skip
