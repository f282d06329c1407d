"""After the loss of the whole job: what is left of the protocol's state at the last durable checkpoint c0. Pure.

Weights newer than c0 are gone, so consumption after c0 is undone. Of what is journaled after c0:

- a trajectory begun at a version <= c0 and finished, with a durable payload, is kept: it is not generated twice;
- one that the checkpoint itself holds (reserved before c0) is kept, unfinished if its payload is not durable;
- one that is generated but was not rewarded yet, with a durable payload, is kept as running;
- what was released stays released: its payload may be deleted, and its prompt has been given up. A member begun anew
  since then is another trajectory, and a payload of the old one says nothing about it;
- everything else is released as "aborted", and counted: begun by weights that are gone, or unfinished and unknown to
  the checkpoint.

The result is feasible. The groups that are left were, before the loss, either trained at a step between c0 and their
deadlines, at most B a step, or outstanding with a place in time; undoing the steps gives all of them those very places
back. Their deadlines can only have moved later, since members were only removed. So admission cannot burst either.
"""

from collections import Counter
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any

from staleflow.protocol.core import StalenessProtocol
from staleflow.protocol.records import CONSUME, RELEASE, WHOLE_GROUP, Contents, Operation, apply, operations_after

Members = dict[int, tuple[int, bool]]
Trajectory = tuple[int, int]
Durable = Callable[[int, int, int], bool]


@dataclass(frozen=True)
class Recovered:
    """The state to go on from, and what the caller has to do about it.

    protocol: at the version of the checkpoint; begin a new journal with it (`Journal.create(..., replace=True)`).
    undone: groups whose training is undone, and which will be trained again.
    new: groups kept that the checkpoint does not know: their prompts and payloads come from the spool alone.
    restarted: trajectories kept as running: from their durable payload, if `durable` said that there is one, else from
        what the checkpoint has of them.
    aborted: trajectories released as "aborted": drop what the spool has of them, and draw their prompts again.
    """

    protocol: StalenessProtocol
    undone: list[int]
    new: list[int]
    restarted: list[Trajectory]
    aborted: list[Trajectory]


def recover(contents: Contents, checkpoint: dict[str, Any], durable: Durable) -> Recovered:
    """Reconcile a journal with the checkpoint that the run resumes from.

    Args:
        contents: of the journal, see `journal.read`.
        checkpoint: the protocol state in the checkpoint (for a run without one: the journal's base).
        durable: whether the finished payload of the trajectory (group, member, reserved V_traj) can be read, from the
            spool or from the checkpoint; also asked of those that may be generated but were not rewarded. It must be
            the payload of this reservation: of a member that was released and begun anew, an older one does not count.

    Raises:
        JournalError: journal and checkpoint are not of one run, or the journal does not fit its base.
    """
    return reconcile(checkpoint, operations_after(contents, checkpoint), durable)


def reconcile(checkpoint: dict[str, Any], later: Iterable[Operation], durable: Durable) -> Recovered:
    """See `recover`; `later` are the operations journaled after the checkpoint."""
    start = StalenessProtocol.load(checkpoint)
    held = {(i, member) for i in start.outstanding() for member in start.members(i)}
    living = StalenessProtocol.load(checkpoint)
    released: set[Trajectory] = set()
    trained = _play(living, later, released)
    held -= released
    candidates = trained | {i: living.members(i) for i in living.outstanding()}
    kept = {i: _keep(start, i, members, held, released, durable) for i, members in candidates.items()}
    aborted = [(i, m) for i, members in candidates.items() for m in members if m not in kept[i]]
    left = {i: members for i, members in kept.items() if members}
    state = _state(start, living, left, list(trained) + living.dump()["finished"])
    state["counters"] = _counters(start, living, left, len(candidates) - len(left), len(aborted))
    return Recovered(
        protocol=StalenessProtocol.load(state),
        undone=[i for i in trained if i in left],
        new=[i for i in left if not start.holds(i)],
        restarted=[(i, m) for i, members in left.items() for m, (_, done) in members.items() if not done],
        aborted=aborted,
    )


def _play(living: StalenessProtocol, later: Iterable[Operation], released: set[Trajectory]) -> dict[int, Members]:
    """Replay; the groups trained on the way, in order. Adds to `released` what was released."""
    trained: dict[int, Members] = {}
    for operation in later:
        before = {}
        if operation.code == RELEASE:
            released |= _released(living, operation)
        elif operation.code == CONSUME:
            before = {i: living.members(i) for i in living.outstanding()}
        for group_id in apply(living, operation):
            trained[group_id] = {member: state for member, state in before[group_id].items() if state[1]}
    return trained


def _released(living: StalenessProtocol, operation: Operation) -> set[Trajectory]:
    members = living.members(operation.group_id) if operation.member == WHOLE_GROUP else (operation.member,)
    return {(operation.group_id, member) for member in members}


def _keep(
    start: StalenessProtocol,
    group_id: int,
    members: Members,
    held: set[Trajectory],
    released: set[Trajectory],
    durable: Durable,
) -> Members:
    """The members of a group that survive, with their state."""
    complete = sum(done for _, done in members.values()) == start.group_size
    kept = {}
    for member, (version, done) in members.items():
        if version > start.version or (complete and not done):
            continue  # from weights that are gone, or a spare that its group no longer needs
        if (done or (group_id, member) not in released) and durable(group_id, member, version):
            kept[member] = (version, done)
        elif (group_id, member) in held and not start.members(group_id)[member][1]:
            kept[member] = (version, False)
    return kept


def _state(
    start: StalenessProtocol, living: StalenessProtocol, left: dict[int, Members], finished: list[int]
) -> dict[str, Any]:
    complete = {i for i, members in left.items() if sum(done for _, done in members.values()) == start.group_size}
    return {
        **living.dump(),
        "version": start.version,
        "groups": [[i, [[m, v, int(done)] for m, (v, done) in members.items()]] for i, members in left.items()],
        "finished": [i for i in finished if i in complete],
    }


def _counters(
    start: StalenessProtocol, living: StalenessProtocol, left: dict[int, Members], groups: int, trajectories: int
) -> dict[str, dict[str, Any]]:
    """Everything reserved and released counts on; what was trained after the checkpoint does not."""
    counters = {}
    outstanding = {"groups": len(left), "trajectories": sum(map(len, left.values()))}
    for unit, aborted in (("groups", groups), ("trajectories", trajectories)):
        before, now = start.counters()[unit], living.counters()[unit]
        released = Counter(now["released"])
        released["aborted"] += aborted
        counters[unit] = {
            "reserved": now["reserved"],
            "outstanding": outstanding[unit],
            "consumed": before["consumed"],
            "released": {reason: n for reason, n in released.items() if n},
        }
    return counters
