"""From what a lost job left on disk to the state that the next attempt goes on from. Rank 0, before the hosts start.

The recovery point is the last durable checkpoint c0 (protocol.md, "Persistence and recovery"); without one it is the
beginning of the run. Weights newer than c0 are gone, so

- a finished trajectory that was begun at a version <= c0 is kept, also when the checkpoint does not know it;
- a partial one goes on from its tokens of versions <= c0, or from nothing;
- everything else is generated again: its prompts come first, in their order, and under new group ids.

Order on disk: the survivors are written into fresh spool segments first, then the journal is replaced, then the old
segments go. A crash in between finds either the old state or the new one, and recovers from it to the same result.
"""

from __future__ import annotations

import shutil
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import numpy as np

from staleflow.checkpoint import layout
from staleflow.checkpoint.layout import CheckpointError
from staleflow.config import Config
from staleflow.coordination.ledger import Ledger, load_ledger, make_ledger
from staleflow.protocol import StalenessProtocol
from staleflow.protocol.errors import JournalError
from staleflow.protocol.journal import Journal, read, sync_folder
from staleflow.protocol.records import Contents, operations_after
from staleflow.protocol.recovery import reconcile, recover
from staleflow.trajectories.schema import Finish, Trajectory, decode, encode, group_and_member, trajectory_id
from staleflow.trajectories.spool import (
    FrameKind,
    SegmentName,
    SegmentWriter,
    decode_reward,
    encode_frame,
    encode_reward,
    read_payload,
    read_segment,
    segments_in,
)

NO_PROMPT = -1


@dataclass(frozen=True)
class Kept:
    """What is known of an outstanding trajectory. `generated`: complete; `node` holds its payload in this attempt."""

    prompt: int
    node: int
    v_traj: int
    prompt_tokens: int
    tokens: int
    segments: tuple[tuple[int, int], ...]
    finish: int
    generated: bool
    reward: float | None = None


@dataclass(frozen=True)
class Resume:
    """Where an attempt begins. A fresh run is version 0 with nothing kept.

    trainer: folder of weights and optimizer, None: `model.path`. members: {group: {member: (V_traj, occupied)}} of what
    is outstanding, in the order of reservation. kept: payloads by tid. prompt_of: {group: prompt index}. prompts: state
    of the prompt source, None: its beginning. run: accounts of the run so far.
    """

    version: int
    ledger: Ledger
    journal: Journal | None
    trainer: Path | None = None
    members: dict[int, dict[int, tuple[int, bool]]] = field(default_factory=dict)
    kept: dict[int, Kept] = field(default_factory=dict)
    prompt_of: dict[int, int] = field(default_factory=dict)
    next_group: int = 0
    prompts: dict[str, Any] | None = None
    run: dict[str, Any] = field(default_factory=dict)
    notes: tuple[str, ...] = ()


def prepare(config: Config, attempt: int, nodes: int) -> Resume:
    """Decide where this attempt begins, by `checkpoint.resume`, and put the files in order for it.

    Raises CheckpointError (a ValueError): nothing to resume from, a damaged checkpoint, or settings that changed.
    """
    wanted = config.checkpoint.resume
    config.run_dir.mkdir(parents=True, exist_ok=True)
    if wanted == "never":
        return _begin(config)
    try:
        layout.remove_unfinished(config.run_dir)
        place = layout.latest(config.run_dir)
        if wanted == "must" and place is None:
            raise CheckpointError(
                f"checkpoint.resume = 'must': {layout.checkpoints_dir(config.run_dir)} holds no checkpoint; "
                "use 'auto' to begin where there is none"
            )
        if place is None and not layout.journal_path(config.run_dir).exists():
            return _begin(config)
        return _resume(config, place, attempt, nodes)
    except JournalError as error:
        raise CheckpointError(
            f"{error}; to go back to an older checkpoint, move the journal and spool/ away"
        ) from error


def durable(config: Config) -> bool:
    """Whether a loss of the whole job at any moment is provided for: checkpoints are written, the books journaled."""
    return config.checkpoint.every_steps > 0 and config.coordination.policy not in ("pace", "drop", "wait")


# ---- a fresh run -----------------------------------------------------------------------------------------------------


def _begin(config: Config) -> Resume:
    notes = _put_aside(config)
    ledger = _new_ledger(config)
    journal = _journal(config, ledger)
    return Resume(0, journal.protocol if journal else ledger, journal, notes=notes)


def _put_aside(config: Config) -> tuple[str, ...]:
    """A new run in the folder of an old one does not resume it, nor destroy its checkpoints."""
    run_dir = config.run_dir
    layout.journal_path(run_dir).unlink(missing_ok=True)
    shutil.rmtree(layout.spool_dir(run_dir), ignore_errors=True)
    old = layout.checkpoints_dir(run_dir)
    if not layout.complete(run_dir):
        shutil.rmtree(old, ignore_errors=True)
        return ()
    number = 1
    while (aside := old.with_name(f"{old.name}.old{number}")).exists():
        number += 1
    old.rename(aside)
    return (f"checkpoint.resume = 'never': beginning again; the checkpoints that were here are now in {aside}",)


def _new_ledger(config: Config) -> Ledger:
    s = config.staleness
    return make_ledger(
        config.coordination.policy,
        batch_groups=s.batch_groups,
        group_size=s.group_size,
        eta=s.eta,
        spare_groups=s.spare_groups,
        spare_members=s.spare_members,
    )


def _journal(config: Config, ledger: Ledger) -> Journal | None:
    if not durable(config) or not isinstance(ledger, StalenessProtocol):
        layout.journal_path(config.run_dir).unlink(missing_ok=True)
        return None
    return Journal.create(layout.journal_path(config.run_dir), config.run.name, ledger, replace=True)


# ---- a resume --------------------------------------------------------------------------------------------------------


def _resume(config: Config, place: Path | None, attempt: int, nodes: int) -> Resume:
    state = layout.read_state(place) if place else _initial(config)
    _require_same_settings(config, state)
    contents = _contents(config)
    folders = [place / layout.SPOOL] if place else []
    if contents is not None:
        folders.append(layout.spool_dir(config.run_dir))
    spooled = _Spooled(folders, state["version"], nodes)
    ledger, notes = _reconciled(state, contents, spooled)
    members = _complete_groups(ledger, config.members)
    prompt_of = {g: spooled.prompt_of.get(g, state["groups"].get(str(g), NO_PROMPT)) for g in members}
    kept = _kept(members, prompt_of, spooled, nodes)
    _require_known(members, prompt_of, kept)
    _write_survivors(config, attempt, kept, spooled, nodes)
    journal = _journal(config, ledger)
    if place is not None:
        notes += [
            f"{path.name} is of a history that is given up" for path in layout.set_aside_newer(config.run_dir, place)
        ]
    _remove_old_segments(layout.spool_dir(config.run_dir), attempt)
    return Resume(
        version=state["version"],
        ledger=journal.protocol if journal else ledger,
        journal=journal,
        trainer=place / layout.TRAINER if place else None,
        members=members,
        kept=kept,
        prompt_of=prompt_of,
        next_group=_next_group(ledger, state, members),
        prompts=_prompt_state(state["prompts"], prompt_of.values()),
        run=state["run"],
        notes=(f"resumed at version {state['version']} ({place or 'no checkpoint yet: the beginning'})", *notes),
    )


def _initial(config: Config) -> dict[str, Any]:
    """What a checkpoint before the first step would say: the run was lost before it had one."""
    ledger = _new_ledger(config)
    return {"version": 0, "ledger": ledger.dump(), "groups": {}, "prompts": None, "run": {}, "next_group": 0,
            "policy": config.coordination.policy, "settings": settings_of(config)}  # fmt: skip


def settings_of(config: Config) -> dict[str, Any]:
    """What has to stay as it is when a run goes on."""
    return {"coordination.policy": config.coordination.policy, "run.seed": config.run.seed} | {
        f"staleness.{name}": value for name, value in config.staleness.model_dump().items()
    }


def _require_same_settings(config: Config, state: Mapping[str, Any]) -> None:
    now = settings_of(config)
    changed = [f"{key} = {now.get(key)!r}: the checkpoint has {old!r}" for key, old in state["settings"].items()
               if now.get(key) != old]  # fmt: skip
    if changed:
        raise CheckpointError("; ".join(changed) + "; set it back, or start a new run from the exported model")


def _contents(config: Config) -> Contents | None:
    path = layout.journal_path(config.run_dir)
    return read(path, config.run.name) if path.exists() else None


def _reconciled(state: Mapping[str, Any], contents: Contents | None, spooled: _Spooled) -> tuple[Ledger, list[str]]:
    """The books at c0, with what was finished after it."""
    ledger = load_ledger(state["policy"], state["ledger"])
    if not isinstance(ledger, StalenessProtocol):
        return ledger, []
    if contents is None:
        found = reconcile(state["ledger"], [], spooled.durable)
    elif contents.base["version"] == state["version"] and not _knows(contents, state["ledger"]):
        # A resume from this very checkpoint was lost before it wrote one of its own: its reconciled state is the base.
        found = recover(contents, contents.base, spooled.durable)
    else:
        found = recover(contents, state["ledger"], spooled.durable)
    notes = [f"{len(found.undone)} groups trained after it are trained again, {len(found.aborted)} trajectories redone"]
    return found.protocol, notes if contents is not None else []


def _knows(contents: Contents, ledger: dict[str, Any]) -> bool:
    try:
        operations_after(contents, ledger)
    except JournalError:
        return False
    return True


def _complete_groups(ledger: Ledger, size: int) -> dict[int, dict[int, tuple[int, bool]]]:
    """All outstanding members; those that a surviving group lost reserved again, at c0, which cannot make it older."""
    members = _members(ledger)
    target = ledger.group_size
    for group_id, there in members.items():
        if sum(done for _, done in there.values()) < target:
            for member in range(size):
                if member not in there and ledger.reserve(group_id, member, ledger.version):
                    there[member] = (ledger.version, False)
    return members


def _members(ledger: Ledger) -> dict[int, dict[int, tuple[int, bool]]]:
    if isinstance(ledger, StalenessProtocol):
        return {g: dict(ledger.members(g)) for g in ledger.outstanding()}
    return {g: {m: (v, m in occupied) for m, v in members} for g, _, members, occupied in ledger.dump()["groups"]}


def _kept(
    members: Mapping[int, Mapping[int, tuple[int, bool]]],
    prompt_of: Mapping[int, int],
    spooled: _Spooled,
    nodes: int,
) -> dict[int, Kept]:
    """One entry per outstanding trajectory, those without a payload at zero tokens."""
    kept = {}
    for group_id, there in members.items():
        for member, (version, _) in there.items():
            tid = trajectory_id(group_id, member)
            nothing = Kept(prompt_of[group_id], group_id % nodes, version, 0, 0, (), int(Finish.PARTIAL), False)
            found = spooled.kept.get(tid, nothing)
            # What is from weights that are gone, or older than reserved, is of another trajectory in the same place.
            of_use = (found.generated or found.tokens > 0) and version <= found.v_traj <= spooled.version
            kept[tid] = found if of_use else replace(nothing, node=found.node)
    return kept


def _require_known(
    members: Mapping[int, Mapping[int, tuple[int, bool]]], prompt_of: Mapping[int, int], kept: Mapping[int, Kept]
) -> None:
    for group_id, there in members.items():
        if prompt_of[group_id] == NO_PROMPT:
            raise CheckpointError(f"group {group_id} is outstanding, but neither checkpoint nor spool knows its prompt")
        for member, (_, done) in there.items():
            one = kept[trajectory_id(group_id, member)]
            if done and (not one.generated or one.reward is None):
                raise CheckpointError(
                    f"trajectory {member} of group {group_id} counts as finished, but the spool has lost its "
                    f"{'reward' if one.generated else 'payload'}; to use the checkpoint alone, move the journal and "
                    "spool/ away"
                )


def _next_group(ledger: Ledger, state: Mapping[str, Any], members: Mapping[int, Any]) -> int:
    used = [last for _, last in ledger.dump()["used"]] if isinstance(ledger, StalenessProtocol) else []
    return int(max([state["next_group"], *(1 + last for last in used), *(1 + g for g in members)]))


def _prompt_state(state: dict[str, Any] | None, held: Iterable[int]) -> dict[str, Any] | None:
    """Prompts that were drawn after the checkpoint and are held count as drawn."""
    if state is None:
        return None
    return state | {"next": max([state["next"], *(1 + index for index in held)])}


def _write_survivors(config: Config, attempt: int, kept: Mapping[int, Kept], spooled: _Spooled, nodes: int) -> None:
    """Every outstanding trajectory into a first segment of this attempt, on the node that will hold it."""
    folder = layout.spool_dir(config.run_dir)
    for node in range(nodes):
        writer = SegmentWriter(folder, attempt, node)
        for tid, one in kept.items():
            if one.node == node:
                writer.write(_survivor(tid, one, spooled), {group_and_member(tid)[0]})
        writer.close_segment()
    folder.mkdir(parents=True, exist_ok=True)
    sync_folder(folder)


def _survivor(tid: int, one: Kept, spooled: _Spooled) -> list[bytes]:
    if one.generated:
        frames = [encode_frame(FrameKind.FINISHED, tid, one.prompt, spooled.record(tid))]
        return frames if one.reward is None else [*frames, encode_reward(tid, one.prompt, one.reward)]
    record = spooled.record(tid) if one.tokens else _nothing(tid)
    return [encode_frame(FrameKind.PARTIAL, tid, one.prompt, record)]


def _nothing(tid: int) -> bytes:
    """Says that whatever older segments hold of this trajectory is void: it begins again."""
    group_id, member = group_and_member(tid)
    return bytes(encode(Trajectory(group_id, member, 0, 0, np.zeros(0, np.int32), np.zeros(0, np.float32), ())))


def _remove_old_segments(folder: Path, attempt: int) -> None:
    for name, path in segments_in(folder).items():
        if name.attempt < attempt:
            path.unlink()


# ---- payloads --------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class _Place:
    """Where a record lies on disk."""

    name: SegmentName
    path: Path
    offset: int
    nbytes: int


class _Spooled:
    """What the segments say. The last attempt that wrote about a trajectory is right; within one, finished is."""

    def __init__(self, folders: Iterable[Path], version: int, nodes: int) -> None:
        self.version = version
        self.kept: dict[int, Kept] = {}
        self.prompt_of: dict[int, int] = {}
        self._where: dict[int, _Place] = {}
        paths: dict[SegmentName, Path] = {}
        for folder in folders:
            paths |= segments_in(folder)
        for name in sorted(paths):
            self._read(name, paths[name], nodes)

    def durable(self, group_id: int, member: int, version: int) -> bool:
        """Whether a finished payload of the member that was reserved at `version` is at hand.

        An instance may have pulled more than it was told, and begun newer than was reserved; never older: that is left
        from a member that was given up before this one was begun in its place.
        """
        one = self.kept.get(trajectory_id(group_id, member))
        return one is not None and one.generated and version <= one.v_traj

    def record(self, tid: int) -> bytes:
        """The record of a trajectory, read from disk again; partial ones without what versions after c0 have added."""
        place = self._where[tid]
        raw = read_payload(place.path, place.offset, place.nbytes)
        return raw if self.kept[tid].generated else bytes(encode(cut(decode(raw), self.version)))

    def _read(self, name: SegmentName, path: Path, nodes: int) -> None:
        for frame in read_segment(path):
            self.prompt_of[group_and_member(frame.tid)[0]] = frame.prompt
            if frame.kind is FrameKind.REWARD:
                self._rewarded(frame.tid, decode_reward(frame))
            else:
                place = _Place(name, path, frame.offset, len(frame.payload))
                self._record(place, frame.tid, frame.prompt, decode(frame.payload, copy=False), nodes)

    def _rewarded(self, tid: int, reward: float) -> None:
        if tid in self.kept and self.kept[tid].generated:
            self.kept[tid] = replace(self.kept[tid], reward=reward)

    def _record(self, place: _Place, tid: int, prompt: int, t: Trajectory, nodes: int) -> None:
        before, generated = self._where.get(tid), t.finish is not Finish.PARTIAL
        if before is not None and before.name.attempt == place.name.attempt:
            known = self.kept[tid]
            if known.generated or (not generated and known.tokens > t.response_tokens):
                return
        if not generated:
            t = cut(t, self.version)
        self._where[tid] = place
        node = place.name.node % nodes
        self.kept[tid] = Kept(
            prompt, node, t.v_traj, t.prompt_tokens, t.response_tokens, t.segments, int(t.finish), generated
        )


def cut(t: Trajectory, version: int) -> Trajectory:
    """A partial trajectory without the tokens of versions after `version`: those weights are gone."""
    segments = tuple((v, n) for v, n in t.segments if v <= version)
    tokens = sum(n for _, n in segments)
    return replace(
        t,
        v_traj=segments[0][0] if segments else 0,
        tokens=t.tokens[: t.prompt_tokens + tokens],
        logprobs=t.logprobs[:tokens],
        segments=segments,
    )
