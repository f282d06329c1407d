"""The journal on disk: every operation is durable before its effect can be seen outside rank 0.

    journal = Journal.create(path, run_id, protocol)      # or Journal.reopen(path, run_id)
    journal.protocol.reserve(...) ...                     # decide a whole cycle
    journal.commit()                                      # one write, one fdatasync
    send(commands)                                        # only now

At a checkpoint: `mark = journal.mark()` when its state is taken, `mark.state` goes into the checkpoint, and
`journal.compact(mark)` follows when it is durable and `latest` has moved. A crash at any point in between is
recoverable: the journal's base is then older than the checkpoint, and the mark in it tells where the checkpoint is.
After the loss of a whole job see recovery.py.
"""

import fcntl
import os
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import Any

from staleflow.protocol.core import REASONS, StalenessProtocol
from staleflow.protocol.errors import JournalError
from staleflow.protocol.records import (
    CONSUME,
    MARK,
    OCCUPY,
    RELEASE,
    RESERVE,
    WHOLE_GROUP,
    Contents,
    Operation,
    decode,
    digest,
    encode_frame,
    encode_header,
    operations_after,
    replay,
)


class RecordedProtocol(StalenessProtocol):
    """The protocol, noting each change of its state until the journal takes the notes. Answers exactly as its base."""

    __slots__ = ("notes",)

    def __init__(self, *args: int, **settings: int) -> None:
        super().__init__(*args, **settings)
        self.notes: list[tuple[int, int, int, int]] = []

    def reserve(self, group_id: int, member: int, version: int) -> bool:
        before = self._reserved_trajectories
        admitted = StalenessProtocol.reserve(self, group_id, member, version)
        if self._reserved_trajectories != before:
            self.notes.append((RESERVE, group_id, member, version))
        return admitted

    def occupy(self, group_id: int, member: int) -> bool:
        completed = StalenessProtocol.occupy(self, group_id, member)
        self.notes.append((OCCUPY, group_id, member, 0))
        return completed

    def release(self, group_id: int, reason: str, member: int | None = None) -> None:
        StalenessProtocol.release(self, group_id, reason, member)
        self.notes.append((RELEASE, group_id, WHOLE_GROUP if member is None else member, REASONS.index(reason)))

    def consume(self) -> list[int]:
        batch = StalenessProtocol.consume(self)
        self.notes.append((CONSUME, 0, 0, self.version - 1))
        return batch


@dataclass(frozen=True)
class Mark:
    """A point of the journal: the protocol's state there, as it goes into a checkpoint."""

    state: dict[str, Any]


class Journal:
    """An append-only file beside a protocol. One process at a time; not safe to use from several threads.

    After an error of write or sync nothing further is accepted: what reached the disk is then unknown, so the run has
    to stop and recover.
    """

    def __init__(self, path: Path, file: int, contents: Contents, protocol: RecordedProtocol) -> None:
        self.path = path
        self.protocol = protocol
        self._file = file
        self._run_id = contents.run_id
        self._sequence = contents.sequence
        self._chain = contents.chain
        self._broken: OSError | None = None

    @classmethod
    def create(cls, path: Path, run_id: str, protocol: StalenessProtocol, replace: bool = False) -> "Journal":
        """Begin a journal at the state of `protocol`; the returned journal's own `protocol` is the one to use then.

        Raises:
            JournalError: there is one already and `replace` is False, or another process uses it.
        """
        if path.exists() and not replace:
            raise JournalError(f"{path} exists: reopen it, or replace it after reconciling it with a checkpoint")
        if path.exists():
            os.close(_open_locked(path, os.O_RDWR))  # nobody may be writing to what is replaced
        recorded = RecordedProtocol.load(protocol.dump())
        file, contents = _write_new(path, run_id, recorded.dump(), [])
        return cls(path, file, contents, recorded)

    @classmethod
    def reopen(cls, path: Path, run_id: str) -> "Journal":
        """Go on where the last process stopped: replay everything, cut off a torn tail.

        Raises:
            JournalError: see `read`; or another process uses the journal.
        """
        file = _open_locked(path, os.O_RDWR)
        try:
            contents = _read(file, path, run_id)
            protocol = RecordedProtocol.load(contents.base)
            replay(protocol, contents.operations)
            protocol.notes.clear()
            if contents.torn_bytes:
                os.ftruncate(file, contents.good_bytes)
                os.fsync(file)
            os.lseek(file, contents.good_bytes, os.SEEK_SET)
        except BaseException:
            os.close(file)
            raise
        return cls(path, file, contents, protocol)

    def commit(self) -> int:
        """Make every operation so far durable, with one write and one sync; how many were not yet.

        Raises:
            JournalError: the disk refused (now or before).
        """
        notes = self.protocol.notes
        if self._broken is not None:
            raise JournalError(f"{self.path} failed before, so nothing more can be acknowledged") from self._broken
        if not notes:
            return 0
        frame, chain = encode_frame(notes, self._sequence, self._chain)
        try:
            _write_all(self._file, frame)
            os.fdatasync(self._file)
        except OSError as error:
            self._broken = error
            raise JournalError(f"{self.path} cannot be written ({error}); stop, make room, and resume") from error
        self._sequence += 1
        self._chain = chain
        committed = len(notes)
        notes.clear()
        return committed

    def mark(self) -> Mark:
        """Note durably that a checkpoint holds the state of this moment, and return that state for it."""
        state = self.protocol.dump()
        self.protocol.notes.append((MARK, self.protocol.version, 0, digest(state)))
        self.commit()
        return Mark(state)

    def compact(self, mark: Mark) -> None:
        """The checkpoint of `mark` is durable: make its state the base, and forget the operations before it.

        Raises:
            JournalError: the mark is not in this journal (a later one was compacted already), or the disk refused.
        """
        self.commit()
        later = operations_after(_read(self._file, self.path, self._run_id), mark.state)
        try:
            file, contents = _write_new(self.path, self._run_id, mark.state, list(later))
        except OSError as error:
            self._broken = error  # whether the old journal or the new one is in place is not known
            raise JournalError(f"{self.path} cannot be compacted ({error}); stop, make room, and resume") from error
        os.close(self._file)
        self._file, self._sequence, self._chain = file, contents.sequence, contents.chain

    def close(self) -> None:
        """Release the file. Operations that were not committed are not durable: nobody may have seen their effect."""
        if self._file >= 0:
            os.close(self._file)
            self._file = -1

    def __enter__(self) -> "Journal":
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        self.close()


def read(path: Path, run_id: str) -> Contents:
    """What a journal holds, without changing it or keeping it open.

    Raises:
        JournalError: there is none, it is another run's, of another format, damaged, or in use by a living process.
    """
    file = _open_locked(path, os.O_RDONLY)  # shared, but no living process shares its journal
    try:
        return _read(file, path, run_id)
    finally:
        os.close(file)


def _open_locked(path: Path, flags: int) -> int:
    try:
        file = os.open(path, flags | os.O_CLOEXEC, 0o600)
    except FileNotFoundError as error:
        raise JournalError(f"there is no journal {path}: start a new run, or give the right run directory") from error
    kind = fcntl.LOCK_SH if flags == os.O_RDONLY else fcntl.LOCK_EX
    try:
        fcntl.flock(file, kind | fcntl.LOCK_NB)
    except OSError as error:
        os.close(file)
        raise JournalError(f"{path} cannot be locked ({error}); if another run uses it, stop that first") from error
    return file


def _read(file: int, path: Path, run_id: str) -> Contents:
    size = os.fstat(file).st_size
    pieces = []
    position = 0
    while position < size and (piece := os.pread(file, size - position, position)):
        pieces.append(piece)
        position += len(piece)
    try:
        return decode(b"".join(pieces), run_id)
    except JournalError as error:
        raise JournalError(f"{path}: {error}") from error


def _write_new(path: Path, run_id: str, base: dict[str, Any], operations: list[Operation]) -> tuple[int, Contents]:
    """Put a new journal in the place of `path`, atomically and durably; open, locked, positioned at its end."""
    header, chain = encode_header(run_id, base)
    frame, frame_chain = encode_frame(operations, 0, chain) if operations else (b"", chain)
    draft = path.with_name(path.name + ".new")
    file = _open_locked(draft, os.O_RDWR | os.O_CREAT)
    try:
        os.ftruncate(file, 0)
        _write_all(file, header + frame)
        os.fsync(file)
        draft.rename(path)
        sync_folder(path.parent)
    except BaseException:
        os.close(file)
        raise
    return file, Contents(run_id, base, operations, int(bool(operations)), frame_chain, len(header) + len(frame), 0)


def _write_all(file: int, data: bytes) -> None:
    view = memoryview(data)
    while view:
        view = view[os.write(file, view) :]


def sync_folder(path: Path) -> None:
    """Make what was created, renamed or removed in a folder durable."""
    folder = os.open(path, os.O_RDONLY | os.O_DIRECTORY)
    try:
        os.fsync(folder)
    finally:
        os.close(folder)
