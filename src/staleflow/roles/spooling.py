"""A host's way to disk: nobody is told of a finished trajectory, or of a reward, before it is durable.

consumes      what the host spools (main thread)
waits for     (own thread) the next job; then the disk
unblocked by  the host, which never waits for this thread
produces      the messages that were waiting for durability, in their order; NodeSaved / SaveFailed; Failed when the
              disk refuses a payload (then nothing further may count, so the run ends)

Everything that has come together is made durable by one sync. Where checkpoints are only written at a requested stop
(`durable` False), messages pass at once, and a save writes everything that is held.
"""

from __future__ import annotations

import errno
import logging
import threading
import time
from collections.abc import Callable, Collection
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from queue import Empty, SimpleQueue

from staleflow.checkpoint import layout
from staleflow.coordination.types import is_evaluation
from staleflow.roles import messages as m
from staleflow.trajectories.schema import Finish, decode, group_and_member
from staleflow.trajectories.server import TrajectoryServer
from staleflow.trajectories.spool import (
    FrameKind,
    SegmentName,
    SegmentWriter,
    decode_reward,
    encode_frame,
    encode_reward,
    read_segment,
)

CLOSE_S = 10.0
DISK_FULL_S = 60.0
log = logging.getLogger(__name__)


@dataclass(frozen=True)
class _Append:
    frame: bytes
    group_id: int
    message: m.ToCoordinator | None


@dataclass(frozen=True)
class _Forget:
    groups: set[int]


@dataclass(frozen=True)
class _Save:
    version: int
    folder: Path
    began_s: float


@dataclass(frozen=True)
class _Tell:
    message: m.ToCoordinator


@dataclass(frozen=True)
class _Settle:
    """The last checkpoint is durable."""


_Job = _Append | _Forget | _Save | _Settle | _Tell | None


class Spooling:
    """`emit` is called from `collect` only, on the host's thread."""

    def __init__(
        self,
        folder: Path,
        attempt: int,
        node: int,
        rank: int,
        server: TrajectoryServer,
        emit: Callable[[m.ToCoordinator], None],
        *,
        durable: bool,
    ) -> None:
        self._rank, self._node, self._server, self._emit, self._durable = rank, node, server, emit, durable
        self._first = folder / str(SegmentName(attempt, node, 0))  # what a resume has left for this node
        self._writer = SegmentWriter(folder, attempt, node, first=1)
        self._rewards: dict[int, float] = {}  # of what is held, where nothing is spooled before a save
        self._dead: list[Path] = []
        self._jobs: SimpleQueue[_Job] = SimpleQueue()
        self._done: SimpleQueue[m.ToCoordinator] = SimpleQueue()
        self._thread = threading.Thread(target=self._run, name="spool", daemon=True)
        self._thread.start()

    # ---- the host's thread -------------------------------------------------------------------------------------------

    def restore(self) -> int:
        """Take what a resume has left for this node into the trajectory server; how many trajectories."""
        if not self._first.exists():
            return 0
        groups, count = set(), 0
        for frame in read_segment(self._first):
            if frame.kind is FrameKind.REWARD:
                self._rewards[frame.tid] = decode_reward(frame)
                continue
            groups.add(group_and_member(frame.tid)[0])
            if decode(frame.payload, copy=False).response_tokens or frame.kind is FrameKind.FINISHED:
                self._server.put(frame.tid, frame.payload)
                count += 1
        if self._durable:
            self._writer.adopt(self._first, groups)
        else:
            self._first.unlink()
        return count

    def finished(self, tid: int, payload: bytes | memoryview, message: m.Finished) -> None:
        self._append(FrameKind.FINISHED, tid, payload, message)

    def rewarded(self, message: m.Rewarded) -> None:
        tid = message.tid
        if not self._durable or not self._counts(tid):
            self._rewards[tid] = message.reward
            self._emit(message)
            return
        index = self._server.prompt_index(tid)
        self._jobs.put(_Append(encode_reward(tid, index, message.reward), group_and_member(tid)[0], message))

    def copied(self, tid: int, payload: bytes | memoryview) -> None:
        """What an instance has of a trajectory that goes on, for a checkpoint."""
        if self._durable:
            self._append(FrameKind.PARTIAL, tid, payload, None)
        elif self._counts(tid):
            self._server.put(tid, payload)

    def _append(self, kind: FrameKind, tid: int, payload: bytes | memoryview, message: m.ToCoordinator | None) -> None:
        if self._durable and self._counts(tid):
            frame = encode_frame(kind, tid, self._server.prompt_index(tid), payload)
            self._jobs.put(_Append(frame, group_and_member(tid)[0], message))
        elif message is not None:
            self._emit(message)

    def _counts(self, tid: int) -> bool:
        """Whether it is to be trained on: neither evaluation nor given up."""
        return not is_evaluation(tid) and self._server.knows(tid)

    def forget(self, groups: Collection[int]) -> None:
        """These groups are trained on or given up."""
        gone = set(groups)
        for tid in [tid for tid in self._rewards if group_and_member(tid)[0] in gone]:
            del self._rewards[tid]
        self._jobs.put(_Forget(gone))

    def save(self, version: int, folder: Path) -> None:
        """Put into the checkpoint what is held: what is spooled already by reference, the rest now."""
        for tid in self._server.tids:
            record = self._server.get(tid)
            if record is None or not self._counts(tid):
                continue
            partial = decode(record, copy=False).finish is Finish.PARTIAL
            index, group_id = self._server.prompt_index(tid), group_and_member(tid)[0]
            if partial or not self._durable:
                kind = FrameKind.PARTIAL if partial else FrameKind.FINISHED
                self._jobs.put(_Append(encode_frame(kind, tid, index, record), group_id, None))
            if not self._durable and not partial and tid in self._rewards:
                self._jobs.put(_Append(encode_reward(tid, index, self._rewards[tid]), group_id, None))
            del record
        self._jobs.put(_Save(version, folder, time.monotonic()))

    def tell_after(self, message: m.ToCoordinator) -> None:
        """Emit it after everything that waits for the disk now."""
        if self._durable:
            self._jobs.put(_Tell(message))
        else:
            self._emit(message)

    def settle(self) -> None:
        """The checkpoint saved last is durable: what it does not need may go."""
        self._jobs.put(_Settle())

    def collect(self) -> None:
        """Emit what has become durable."""
        with suppress(Empty):
            while True:
                self._emit(self._done.get_nowait())

    def close(self) -> None:
        self._jobs.put(None)
        self._thread.join(CLOSE_S)

    # ---- the own thread ----------------------------------------------------------------------------------------------

    def _run(self) -> None:
        while (batch := self._next_batch()) is not None:
            try:
                self._write(batch)
            except OSError as error:
                why = f"the spool of node {self._node} cannot be written ({error}): make room and resume"
                self._done.put(m.Failed(self._rank, why))
                return

    def _next_batch(self) -> list[_Job] | None:
        """All jobs that are there, at least one; None at the end."""
        batch = [self._jobs.get()]
        with suppress(Empty):
            while batch[-1] is not None:
                batch.append(self._jobs.get_nowait())
        return None if batch == [None] else batch

    def _write(self, batch: list[_Job]) -> None:
        waiting: list[_Append] = []
        for job in batch:
            if isinstance(job, _Append):
                waiting.append(job)
                continue
            self._make_durable(waiting)
            waiting = []
            match job:
                case _Forget(groups=groups):
                    self._writer.forget(groups)
                case _Save():
                    self._save(job)
                case _Tell(message=message):
                    self._done.put(message)
                case _Settle():
                    self._writer.remove(self._dead if self._durable else self._writer.needed())
                    self._dead = []
                case None:
                    self._jobs.put(None)
        self._make_durable(waiting)

    def _make_durable(self, appends: list[_Append]) -> None:
        if not appends:
            return
        self._write_patiently([a.frame for a in appends], {a.group_id for a in appends})
        self._writer.sync()
        for append in appends:
            if append.message is not None:
                self._done.put(append.message)

    def _write_patiently(self, frames: list[bytes], groups: set[int]) -> None:
        """A checkpoint that fills the disk fails, is removed, and makes room again."""
        deadline_s = time.monotonic() + DISK_FULL_S
        while True:
            try:
                return self._writer.write(frames, groups)
            except OSError as error:
                if error.errno not in (errno.ENOSPC, errno.EDQUOT) or time.monotonic() > deadline_s:
                    raise
                log.warning("no room for the spool of node %d (%s); trying again", self._node, error)
                time.sleep(1.0)

    def _save(self, job: _Save) -> None:
        try:
            self._writer.close_segment()
            folder = job.folder / layout.SPOOL
            folder.mkdir(exist_ok=True)
            for path in self._writer.needed():
                layout.link(path, folder)
            self._dead = self._writer.unneeded()
        except OSError as error:
            self._done.put(m.SaveFailed(self._rank, job.version, f"node {self._node}: {error}"))
            return
        self._done.put(m.NodeSaved(self._node, job.version, time.monotonic() - job.began_s))
