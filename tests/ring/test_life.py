"""What stays in /dev/shm (nothing), what a too small one is (a sentence), and how a restarted rank returns."""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from staleflow.trajectories import descriptors, reap
from staleflow.trajectories.arena import Arena
from staleflow.trajectories.ring import Ring, RingError, SegmentError

from .conftest import RUN_ID, unique_name

Peer = Callable[..., subprocess.Popen[str]]
SHM = Path("/dev/shm")


def mapped(process: subprocess.Popen[str]) -> None:
    assert process.stdout
    assert process.stdout.readline() in ("mapped\n", "created\n")


def test_a_name_is_taken_once(make_ring: Callable[..., Ring]) -> None:
    ring = make_ring(4096)
    with pytest.raises(SegmentError, match="exists: its job still runs, or was killed"):
        Ring.create(ring.name, 4096, run_id=RUN_ID)


@pytest.mark.parametrize("name", ["", "a/b", "x" * 300])
def test_names_that_are_none(name: str) -> None:
    with pytest.raises(ValueError, match="segment name"):
        Ring.create(name, 4096, run_id=RUN_ID)


@pytest.mark.parametrize("capacity", [0, 2048, 5000, 1 << 41])
def test_capacities_that_are_none(capacity: int) -> None:
    with pytest.raises(ValueError, match="power of two"):
        Ring.create(unique_name(), capacity, run_id=RUN_ID)


def test_unlinking_takes_away_only_the_own_name(make_ring: Callable[..., Ring]) -> None:
    first = make_ring(4096)
    attached = Ring.attach(first.name, run_id=RUN_ID)
    first.unlink()
    second = Ring.create(first.name, 4096, run_id=RUN_ID)
    attached.unlink()
    assert (SHM / second.name).exists()
    second.unlink()


@pytest.mark.dist
def test_after_both_have_mapped_no_kill_leaves_a_file(peer: Peer, make_ring: Callable[..., Ring]) -> None:
    ring = make_ring(4096)
    first, second = peer("hold", ring.name), peer("hold", ring.name)
    mapped(first), mapped(second)
    ring.unlink()
    for process in (first, second):
        process.send_signal(signal.SIGKILL)
        process.wait()
    assert not (SHM / ring.name).exists()


def test_too_large_for_the_machine_is_said_before() -> None:
    with pytest.raises(
        SegmentError, match=r"needs 1099511631872 bytes \(1048576 MiB\) in /dev/shm, which has \d+ MiB free"
    ):
        Ring.create(unique_name(), 1 << 40, run_id=RUN_ID)
    with pytest.raises(SegmentError, match="--shm-size"):
        Arena.create(unique_name("arena"), 1 << 40, run_id=RUN_ID)


def in_small_shm(size: str, script: str, folder: Path) -> str:
    """What a shell prints in its own mount namespace, where `folder` is a tmpfs of this size."""
    mount = f"mount -t tmpfs -o size={size} tmpfs {folder} && {script}"
    done = subprocess.run(["unshare", "--mount", "sh", "-c", mount], capture_output=True, text=True)
    if "not permitted" in done.stderr or "denied" in done.stderr:
        pytest.skip("needs the right to mount a tmpfs of its own")
    return done.stdout + done.stderr


@pytest.mark.dist
def test_64_mb_of_shared_memory_as_containers_have_it(tmp_path: Path) -> None:
    create = f"{sys.executable} {Path(__file__).with_name('peer.py')} create_in {tmp_path}"
    assert "created 33554432" in in_small_shm("64m", f"{create} {1 << 25}", tmp_path)
    text = in_small_shm("64m", f"{create} {1 << 26}", tmp_path)
    assert f"needs {(1 << 26) + 4096} bytes (64 MiB) in {tmp_path}, which has 64 MiB free of 64 MiB" in text


@pytest.mark.dist
def test_a_full_tmpfs_is_an_error_not_a_sigbus(tmp_path: Path) -> None:
    create = f"{sys.executable} {Path(__file__).with_name('peer.py')} create_in {tmp_path} {1 << 20}"
    text = in_small_shm("2m", f"head -c 1500000 /dev/zero > {tmp_path}/other; {create}", tmp_path)
    assert "free of 2 MiB" in text


# Reaping


@pytest.mark.dist
def test_reap_removes_what_a_killed_job_left_and_nothing_else(peer: Peer, make_ring: Callable[..., Ring]) -> None:
    alive = make_ring(4096)
    dead_name, foreign = unique_name("dead"), SHM / unique_name("foreign")
    foreign.write_bytes(b"not a segment of ours")
    killed = peer("create_and_hold", dead_name, 4096)
    mapped(killed)
    assert SHM / dead_name not in [leftover.path for leftover in reap.reap()], "its process lives"
    killed.kill()
    killed.wait()
    removed = [leftover for leftover in reap.reap() if leftover.path == SHM / dead_name]
    assert [(leftover.kind, leftover.nbytes) for leftover in removed] == [("ring", 8192)]
    assert (SHM / alive.name).exists()
    assert foreign.exists()
    foreign.unlink()


@pytest.mark.dist
def test_reap_spares_a_segment_of_which_any_process_lives(peer: Peer) -> None:
    name = unique_name("shared")
    creator = peer("create_and_hold", name, 4096)
    mapped(creator)
    user = peer("hold", name)
    mapped(user)
    creator.kill()
    creator.wait()
    assert SHM / name not in [leftover.path for leftover in reap.reap()]
    user.kill()
    user.wait()
    assert SHM / name in [leftover.path for leftover in reap.reap()]


def test_links_are_not_followed(tmp_path: Path) -> None:
    target = tmp_path / "precious"
    target.write_bytes(b"SFWRING1" + bytes(100))
    link = tmp_path / unique_name("link")
    link.symlink_to(target)
    assert reap.reap(tmp_path) == []
    with pytest.raises(RingError, match="cannot open"):
        Ring.attach(link.name, run_id=RUN_ID, directory=str(tmp_path))


# Descriptors


@pytest.fixture
def server() -> tuple[str, descriptors.DescriptorServer]:
    address = descriptors.socket_address(unique_name("socket"))
    made = descriptors.DescriptorServer(address)
    yield address, made
    made.close()


@pytest.mark.dist
def test_a_restarted_rank_gets_its_nameless_ring_back(peer: Peer, make_ring, server) -> None:
    address, host = server
    ring = make_ring(1 << 16)
    peer("push_and_die", ring.name, 5, "mid_payload").wait()
    ring.unlink()
    host.offer("rank3-up", ring.fileno())
    restarted = peer("fetch_and_continue", address.replace("\0", "@"), "rank3-up", 6, 9)
    assert restarted.wait() == 0
    records = ring.peek(100)
    assert [int.from_bytes(record.payload, "little") for record in records] == list(range(1, 10))
    assert [record.sequence for record in records] == list(range(1, 10))


def test_names_that_are_not_offered(server) -> None:
    address, _ = server
    with pytest.raises(KeyError, match="offers no segment 'rank9-up'"):
        descriptors.fetch(address, "rank9-up", timeout_s=5)


def test_a_silent_asker_does_not_hold_up_the_others(server, make_ring, monkeypatch) -> None:
    monkeypatch.setattr(descriptors, "_REQUEST_TIMEOUT_S", 0.05)
    address, host = server
    ring = make_ring(4096)
    host.offer("ring", ring.fileno())
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as silent:
        silent.connect(address)
        fd = descriptors.fetch(address, "ring", timeout_s=5)
    assert os.fstat(fd).st_ino == os.fstat(ring.fileno()).st_ino
    os.close(fd)


def test_nobody_serves() -> None:
    with pytest.raises(ConnectionError):
        descriptors.fetch(descriptors.socket_address(unique_name("none")), "ring", timeout_s=1)
