"""The journal on a real file system: what was acknowledged survives every crash, and damage is never loaded."""

import os
import random
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
from protocol_driver import Pair, random_operation, random_pair

from staleflow.protocol import JournalError, ProtocolError, StalenessProtocol
from staleflow.protocol.journal import Journal, read
from staleflow.protocol.records import FORMAT, MAGIC, decode, replay

RUN = "run-7"


class Written:
    """A journal written by a random run, with the state after every operation and what was acknowledged when."""

    def __init__(self, path: Path, seed: int, operations: int) -> None:
        rng = random.Random(seed)
        self.path = path
        pair = Pair(StalenessProtocol(2, 2, 2, rng.choice((0, 1)), rng.choice((0, 1))))
        journal = Journal.create(path, RUN, pair.protocol)
        pair.protocol = journal.protocol
        self.header_bytes = path.stat().st_size
        self.states = [journal.protocol.dump()]
        self.acknowledged = [(self.header_bytes, 0)]  # (file size, operations that are durable with it)
        for _ in range(operations):
            before = len(journal.protocol.notes)
            random_operation(pair, rng)
            if len(journal.protocol.notes) > before:
                self.states.append(journal.protocol.dump())
            if rng.random() < 0.25:
                self._commit(journal)
        self._commit(journal)
        journal.close()
        self.data = path.read_bytes()

    def _commit(self, journal: Journal) -> None:
        journal.commit()
        self.acknowledged.append((self.path.stat().st_size, len(self.states) - 1))

    def durable_at(self, size: int) -> int:
        """How many operations had been acknowledged while the file was not larger than `size`."""
        return max(count for end, count in self.acknowledged if end <= size)


def recovered_state(path: Path) -> dict[str, Any]:
    with Journal.reopen(path, RUN) as journal:
        journal.protocol.check()
        return journal.protocol.dump()


@pytest.mark.parametrize("seed", [3, 9])
def test_cut_at_every_byte_it_recovers_a_prefix_with_everything_acknowledged(tmp_path: Path, seed: int) -> None:
    written = Written(tmp_path / "journal", seed, operations=160)
    copy = tmp_path / "copy"
    assert len(written.states) > 60
    for cut in range(written.header_bytes, len(written.data) + 1):
        contents = decode(written.data[:cut], RUN)
        # Which prefix it is follows from the number of operations; the state must be exactly that one's.
        operations = len(contents.operations)
        assert operations >= written.durable_at(cut)
        protocol = StalenessProtocol.load(contents.base)
        replay(protocol, contents.operations)
        assert protocol.dump() == written.states[operations]
        if cut % 23 == 0:  # the same through the file system, which takes longer
            copy.write_bytes(written.data[:cut])
            assert recovered_state(copy) == written.states[operations]
            assert copy.stat().st_size == contents.good_bytes, "the torn tail is cut off"
    assert operations == len(written.states) - 1


def test_a_header_that_is_cut_is_an_error_because_it_is_written_at_once(tmp_path: Path) -> None:
    written = Written(tmp_path / "journal", seed=2, operations=5)
    copy = tmp_path / "copy"
    for cut in range(written.header_bytes):
        copy.write_bytes(written.data[:cut])
        with pytest.raises(JournalError):
            read(copy, RUN)


def test_a_damaged_byte_anywhere_is_an_error(tmp_path: Path) -> None:
    written = Written(tmp_path / "journal", seed=3, operations=60)
    copy, rng = tmp_path / "copy", random.Random(0)
    for place in range(len(written.data)):
        damaged = bytearray(written.data)
        damaged[place] ^= rng.randrange(1, 256)
        copy.write_bytes(damaged)
        with pytest.raises(JournalError):
            read(copy, RUN)


def test_a_frame_that_is_missing_repeated_or_moved_is_an_error(tmp_path: Path) -> None:
    written = Written(tmp_path / "journal", seed=4, operations=60)
    ends = sorted({end for end, _ in written.acknowledged})
    head, frames = written.data[: ends[0]], [written.data[a:b] for a, b in pairwise(ends)]
    assert len(frames) > 5
    for wrong in (
        [*frames[:2], *frames[3:]],
        [*frames[:2], frames[1], *frames[2:]],
        [frames[1], frames[0], *frames[2:]],
    ):
        (tmp_path / "copy").write_bytes(head + b"".join(wrong))
        with pytest.raises(JournalError, match="damaged at byte"):
            read(tmp_path / "copy", RUN)


@pytest.mark.parametrize("zeros", [20, 512, 4096])
def test_allocated_but_unwritten_blocks_are_a_torn_tail(tmp_path: Path, zeros: int) -> None:
    written = Written(tmp_path / "journal", seed=5, operations=60)
    (tmp_path / "copy").write_bytes(written.data + bytes(zeros))
    assert recovered_state(tmp_path / "copy") == written.states[-1]


def test_a_frame_whose_later_sectors_were_not_written_is_a_torn_tail(tmp_path: Path) -> None:
    path = tmp_path / "journal"
    with Journal.create(path, RUN, StalenessProtocol(100, 1, 3)) as journal:
        journal.protocol.reserve(0, 0, 0)
        journal.commit()
        state = journal.protocol.dump()
        for group_id in range(1, 200):
            journal.protocol.reserve(group_id, 0, 0)
        journal.commit()
    data = path.read_bytes()
    for sector in range(len(data) // 512 * 512, len(data) - 199 * 19, -512):
        path.write_bytes(data[:sector] + bytes(len(data) - sector))
        if len(data) - sector >= 20:
            assert recovered_state(path) == state


def test_after_a_torn_tail_the_journal_goes_on(tmp_path: Path) -> None:
    written = Written(tmp_path / "journal", seed=6, operations=80)
    path, rng = tmp_path / "journal", random.Random(1)
    path.write_bytes(written.data[:-7])
    with Journal.reopen(path, RUN) as journal:
        for group_id in range(1_000, 1_050):
            if journal.protocol.reserve(group_id, 0, journal.protocol.version):
                journal.protocol.occupy(group_id, 0)
            if rng.random() < 0.3:
                journal.commit()
        journal.protocol.release(journal.protocol.outstanding()[0], "aborted")
        assert journal.commit() > 0 and journal.commit() == 0
        state = journal.protocol.dump()
    assert recovered_state(path) == state


def test_the_recorded_protocol_answers_as_the_plain_one_and_notes_changes_only(tmp_path: Path) -> None:
    for seed in range(20):
        pair = random_pair(random.Random(seed))
        base = pair.protocol.dump()
        journal = Journal.create(tmp_path / f"journal{seed}", RUN, pair.protocol)
        pair.protocol = journal.protocol
        for _ in range(300):
            random_operation(pair, random.Random(seed * 1_000 + _))
        pair.compare()
        journal.commit()
        journal.close()
        twin = StalenessProtocol.load(base)
        replay(twin, read(journal.path, RUN).operations)
        assert twin.dump() == journal.protocol.dump()


def test_refused_and_repeated_requests_leave_no_trace(tmp_path: Path) -> None:
    with Journal.create(tmp_path / "journal", RUN, StalenessProtocol(1, 1, 0)) as journal:
        protocol = journal.protocol
        assert protocol.reserve(0, 0, 0) and protocol.reserve(0, 0, 0) and not protocol.reserve(1, 0, 0)
        with pytest.raises(ProtocolError):
            protocol.occupy(5, 0)
        assert journal.commit() == 1


def test_compaction_keeps_the_state_and_drops_what_is_older_than_the_checkpoint(tmp_path: Path) -> None:
    path, rng = tmp_path / "journal", random.Random(3)
    pair = Pair(StalenessProtocol(2, 2, 2))
    journal = Journal.create(path, RUN, pair.protocol)
    pair.protocol = journal.protocol
    for round_ in range(5):
        for _ in range(400):
            random_operation(pair, rng)
        mark = journal.mark()
        for _ in range(50):
            random_operation(pair, rng)
        older = journal.mark() if round_ % 2 else None  # a second checkpoint, taken before the first was durable
        size = path.stat().st_size
        journal.compact(mark)
        assert path.stat().st_size < size
        assert read_while_open(path, tmp_path).base == mark.state
        if older is not None:
            journal.compact(older)
            with pytest.raises(JournalError, match="knows nothing"):
                journal.compact(mark)
        pair.compare()
        journal.close()
        journal = Journal.reopen(path, RUN)
        assert journal.protocol.dump() == pair.protocol.dump()
        pair.protocol = journal.protocol
    assert not list(tmp_path.glob("*.new"))


def read_while_open(path: Path, folder: Path) -> Any:
    """A copy, because a journal in use is locked."""
    (folder / "copy").write_bytes(path.read_bytes())
    return read(folder / "copy", RUN)


def test_a_crash_during_compaction_leaves_the_old_journal_good(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "journal"
    journal = Journal.create(path, RUN, StalenessProtocol(2, 1, 1))
    for group_id in range(3):
        journal.protocol.reserve(group_id, 0, 0)
    mark = journal.mark()
    journal.protocol.occupy(1, 0)
    journal.commit()
    state = journal.protocol.dump()
    monkeypatch.setattr(Path, "rename", lambda *_: (_ for _ in ()).throw(OSError(28, "No space left on device")))
    with pytest.raises(JournalError, match="No space left"):
        journal.compact(mark)
    with pytest.raises(JournalError, match="failed before"):
        journal.commit()
    journal.close()
    monkeypatch.undo()
    assert recovered_state(path) == state


def test_a_full_disk_stops_the_run_and_loses_nothing_acknowledged(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "journal"
    journal = Journal.create(path, RUN, StalenessProtocol(2, 1, 1))
    journal.protocol.reserve(0, 0, 0)
    journal.commit()
    state = journal.protocol.dump()
    journal.protocol.reserve(1, 0, 0)
    real_write = os.write

    def half_a_write(file: int, data: Any) -> int:
        real_write(file, bytes(data)[:9])
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(os, "write", half_a_write)
    with pytest.raises(JournalError, match="No space left"):
        journal.commit()
    monkeypatch.undo()
    with pytest.raises(JournalError, match="failed before"):
        journal.commit()
    journal.close()
    assert recovered_state(path) == state


def test_commit_returns_after_the_sync_and_the_sync_follows_the_write(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    order: list[str] = []
    write, sync = os.write, os.fdatasync
    monkeypatch.setattr(os, "write", lambda file, data: order.append("write") or write(file, data))
    monkeypatch.setattr(os, "fdatasync", lambda file: order.append("sync") or sync(file))
    with Journal.create(tmp_path / "journal", RUN, StalenessProtocol(4, 1, 1)) as journal:
        for group_id in range(5):
            journal.protocol.reserve(group_id, 0, 0)
        order.clear()
        assert journal.commit() == 5
    assert order == ["write", "sync"], "five operations, one write, one sync"


def test_wrong_files_are_refused_with_a_reason(tmp_path: Path) -> None:
    written = Written(tmp_path / "journal", seed=8, operations=10)
    path = tmp_path / "journal"
    with pytest.raises(JournalError, match="belongs to run 'run-7', not to 'run-8'"):
        Journal.reopen(path, "run-8")
    with pytest.raises(JournalError, match="there is no journal"):
        Journal.reopen(tmp_path / "nothing", RUN)
    with pytest.raises(JournalError, match="exists"):
        Journal.create(path, RUN, StalenessProtocol(1, 1, 0))
    path.write_bytes(MAGIC + (FORMAT + 1).to_bytes(2, "little") + written.data[10:])
    with pytest.raises(JournalError, match=f"has format {FORMAT + 1}"):
        Journal.reopen(path, RUN)
    path.write_bytes(b"#!/bin/sh\n" * 9)
    with pytest.raises(JournalError, match="not a journal"):
        Journal.reopen(path, RUN)


def test_operations_that_do_not_fit_their_base_are_refused(tmp_path: Path) -> None:
    path = tmp_path / "journal"
    with Journal.create(path, RUN, StalenessProtocol(1, 1, 0)) as journal:
        journal.protocol.notes.append((2, 5, 0, 0))  # an occupy of what was never reserved
        journal.commit()
    with pytest.raises(JournalError, match="does not fit its base state"):
        Journal.reopen(path, RUN)


def test_one_process_at_a_time(tmp_path: Path) -> None:
    with Journal.create(tmp_path / "journal", RUN, StalenessProtocol(1, 1, 0)) as journal:
        for attempt in (
            lambda: Journal.reopen(journal.path, RUN),
            lambda: read(journal.path, RUN),
            lambda: Journal.create(journal.path, RUN, StalenessProtocol(1, 1, 0), replace=True),
        ):
            with pytest.raises(JournalError, match="locked"):
                attempt()
    Journal.reopen(tmp_path / "journal", RUN).close()
