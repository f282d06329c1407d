"""The node store: what a reader may see, and what a writer that fails leaves behind."""

from __future__ import annotations

import os
import subprocess
import sys
import uuid
from pathlib import Path

import numpy as np
import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from staleflow.parameters import shared
from staleflow.parameters.checksum import word_sum
from staleflow.parameters.manifest import Manifest
from staleflow.parameters.store import NodeStore, StoreError

MANIFEST = Manifest.from_shapes([("a", (8, 4)), ("b", (3,))], "bfloat16")


def fresh_name() -> str:
    return f"sftest-{os.getpid()}-{uuid.uuid4().hex[:8]}"


@pytest.fixture
def store():
    store = NodeStore.create(fresh_name(), MANIFEST)
    yield store
    store.close()


def write(store: NodeStore, version: int) -> None:
    with store.writing(version) as slot:
        fill(slot, version)


def fill(slot, version: int) -> None:
    view = slot.view(0, MANIFEST.nbytes)
    view[:] = version % 251
    slot.checksum = word_sum(view)


def test_what_is_written_is_read(store: NodeStore) -> None:
    reader = NodeStore.attach(store.name)
    assert reader.newest() is None
    write(store, 0)
    write(store, 7)
    with reader.read(3) as reading:
        assert reading.version == 7
        tensors = dict(reading.tensors())
        assert {name: tuple(tensor.shape) for name, tensor in tensors.items()} == {"a": (8, 4), "b": (3,)}
        assert (reading.image() == 7).all()
        assert reading.valid() and reading.checksum_ok()
    assert reader.manifest == MANIFEST
    assert reader.read(exactly=0).version == 0


def test_a_reader_cannot_write(store: NodeStore) -> None:
    reader = NodeStore.attach(store.name)
    write(store, 1)
    with pytest.raises(ValueError):
        reader.read().image()[0] = 9
    with pytest.raises(StoreError), reader.writing(2):
        pass


def test_a_version_that_raised_is_never_seen(store: NodeStore) -> None:
    write(store, 1)
    write(store, 2)
    with pytest.raises(RuntimeError, match="lost"), store.writing(3):
        raise RuntimeError("lost")
    assert store.newest() == 2
    with pytest.raises(StoreError):
        store.read(exactly=1)  # its slot was taken
    write(store, 3)
    assert store.read().version == 3


def test_the_newest_stays_readable_while_the_next_is_written(store: NodeStore) -> None:
    write(store, 1)
    with store.writing(2) as slot:
        reading = store.read()
        fill(slot, 2)
        assert reading.version == 1 and (reading.image() == 1).all() and reading.valid()
    assert reading.valid()
    with store.writing(3):
        assert not reading.valid()


def test_versions_only_grow_until_they_are_forgotten(store: NodeStore) -> None:
    write(store, 5)
    write(store, 6)
    with pytest.raises(StoreError, match="5 is not newer"):
        write(store, 5)
    store.forget(6)
    assert store.newest() == 5
    store.forget(0)
    assert store.newest() is None
    write(store, 2)
    assert store.newest() == 2


def test_asking_for_too_much_says_what_there_is(store: NodeStore) -> None:
    with pytest.raises(StoreError, match="its newest is None"):
        store.read()
    write(store, 4)
    with pytest.raises(StoreError, match=r"version >= 5.*newest is 4"):
        store.read(5)


def test_damage_is_found(store: NodeStore) -> None:
    write(store, 1)
    reading = store.read()
    assert reading.checksum_ok()
    reading.image()[100] ^= 1
    assert not reading.checksum_ok()


def test_unlinked_when_all_have_mapped_and_attachable_through_the_owner(store: NodeStore) -> None:
    write(store, 1)
    assert not store.all_mapped(2)
    first, second = NodeStore.attach(store.name, 0), NodeStore.attach(store.name, 1)
    assert store.all_mapped(2)
    store.unlink()
    assert not Path("/dev/shm", store.name).exists()
    late = NodeStore.attach(store.path)
    assert [s.read().version for s in (first, second, late)] == [1, 1, 1]


def test_a_name_in_use_is_refused_and_one_of_a_dead_owner_is_taken_over(store: NodeStore) -> None:
    with pytest.raises(FileExistsError):
        NodeStore.create(store.name, MANIFEST)
    name = fresh_name()
    script = f"import os; from staleflow.parameters import shared; shared.create({name!r}, 4096); os._exit(0)"
    subprocess.run([sys.executable, "-c", script], check=True)
    assert Path("/dev/shm", name).exists()
    NodeStore.create(name, MANIFEST).close()
    assert not Path("/dev/shm", name).exists()


def test_a_file_that_is_not_ours_is_left_alone() -> None:
    path = Path("/dev/shm", fresh_name())
    path.write_bytes(b"something else" * 100)
    try:
        with pytest.raises(FileExistsError):
            NodeStore.create(path.name, MANIFEST)
        assert path.exists()
    finally:
        path.unlink()


def test_too_little_shared_memory_says_how_much_is_needed(monkeypatch: pytest.MonkeyPatch) -> None:
    stat = os.statvfs("/dev/shm")
    tight = os.statvfs_result((4096, 4096, 16384, 16384, 16384, *tuple(stat)[5:]))  # 64 MiB, as in a container
    monkeypatch.setattr(shared.os, "statvfs", lambda path: tight)
    big = Manifest.from_shapes([("w", (1024, 1024, 64))], "bfloat16")
    with pytest.raises(OSError, match=r"needs 258 MiB.*64 MiB are free.*shm-size"):
        NodeStore.create(fresh_name(), big)


class StoreMachine(RuleBasedStateMachine):
    """Random writes, failures, returns to a checkpoint and readings, against a model of two slots."""

    def __init__(self) -> None:
        super().__init__()
        self.store = NodeStore.create(fresh_name(), MANIFEST)
        self.reader = NodeStore.attach(self.store.name)
        self.held: list[int] = []  # at most two, ascending
        self.readings: list[tuple] = []

    @rule(step=st.integers(1, 3), fails=st.booleans())
    def write(self, step: int, fails: bool) -> None:
        version = (self.held[-1] if self.held else -1) + step
        self.held = self.held[-1:]
        try:
            with self.store.writing(version) as slot:
                fill(slot, version)
                if fails:
                    raise InterruptedError
        except InterruptedError:
            return
        self.held.append(version)

    @rule(back=st.integers(0, 3))
    def forget(self, back: int) -> None:
        from_version = max(0, (self.held[-1] if self.held else 0) - back)
        self.store.forget(from_version)
        self.held = [v for v in self.held if v < from_version]

    @precondition(lambda self: self.held)
    @rule(which=st.integers(0, 1))
    def begin_reading(self, which: int) -> None:
        version = self.held[which % len(self.held)]
        self.readings.append((version, self.reader.read(exactly=version)))

    @invariant()
    def newest_is_the_last_complete_one(self) -> None:
        assert self.reader.newest() == (self.held[-1] if self.held else None)

    @invariant()
    def what_is_called_valid_is_whole(self) -> None:
        for version, reading in self.readings:
            whole = (reading.image() == version % 251).all()
            if reading.valid():
                assert version in self.held and whole

    def teardown(self) -> None:
        self.store.close()


StoreMachine.TestCase.settings = settings(max_examples=30, stateful_step_count=20, deadline=None)
TestStoreMachine = StoreMachine.TestCase


def test_head_of_the_segment_is_documented_bytes(store: NodeStore) -> None:
    """Golden: other programs (and the next version of this one) find these fields at these places."""
    write(store, 3)
    data = np.fromfile(Path("/dev/shm", store.name), np.uint8)
    assert data[:8].tobytes() == b"SFPARAM1"
    assert data[64:68].view("<u4")[0] == 1
    assert data[256:288].tobytes().decode() == MANIFEST.digest
    length = int(data[68:72].view("<u4")[0])
    assert data[4096 : 4096 + length].tobytes().decode() == MANIFEST.to_json()
    slots = [data[at : at + 32].view("<i8").tolist() for at in (512, 640)]
    assert [slot[1] for slot in slots] == [3, -1]
    assert [slot[0] % 2 for slot in slots] == [0, 1]
