"""The doctor: each check finds what it is for, and says what to do."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

from staleflow.config import load
from staleflow.jobs import checks, doctor
from staleflow.jobs.checks import Finding
from staleflow.trajectories.ring import SEGMENT_PREFIX, segment_name


def only(findings):
    (finding,) = list(findings)
    return finding


def test_shared_memory_is_measured_against_the_plan(config_file, tmp_path):
    assert only(checks.check_shared_memory(load(config_file), 1, tmp_path)).ok
    huge = load(config_file, ["staleness.batch_groups=1000000000"])
    finding = only(checks.check_shared_memory(huge, 1, tmp_path))
    assert not finding.ok
    assert "remount" in finding.remedy


def test_an_installation_that_is_compiled_anew_at_every_start_is_found(tmp_path, monkeypatch):
    (tmp_path / "some_library").mkdir()
    (tmp_path / "some_library" / "__init__.py").write_text("")
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.setattr(sys, "dont_write_bytecode", True)
    finding = only(checks.check_byte_code("some_library"))
    assert not finding.ok
    assert finding.remedy == f"python -m compileall -q {tmp_path}"
    monkeypatch.setattr(sys, "dont_write_bytecode", False)
    assert only(checks.check_byte_code("some_library")).ok


def test_files_that_nobody_holds_are_leftovers_and_others_are_not(tmp_path):
    assert only(checks.check_leftovers(tmp_path)).ok
    (tmp_path / "dead").write_bytes(b"x" * 4096)
    with open(tmp_path / "held", "wb"):
        finding = only(checks.check_leftovers(tmp_path))
    assert not finding.ok
    assert finding.remedy.endswith(f"rm {tmp_path}/dead")


HOLD = """
import sys
from staleflow.trajectories.ring import Ring
ring = Ring.create(sys.argv[1], 4096, run_id=1)
print("created", flush=True)
sys.stdin.read()
"""


def test_reap_removes_what_is_dead_and_ours_and_nothing_else(capsys):
    """One ring of a killed process, one of a living one, one of another user's prefix, one that is no segment."""
    shm = Path("/dev/shm")
    names = {kind: segment_name(f"doctor-test-{kind}", os.getpid(), "ring") for kind in ("dead", "alive", "foreign")}
    other = f"{SEGMENT_PREFIX}-{os.getuid() + 1}-{os.getpid()}-ring"
    holders = {}
    for name in (names["dead"], names["alive"], other):
        holders[name] = subprocess.Popen(
            [sys.executable, "-c", HOLD, name], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
        )
        assert holders[name].stdout.readline() == "created\n"
    (shm / names["foreign"]).write_bytes(b"something else")
    for name in (names["dead"], other):
        holders[name].kill()
        holders[name].wait()
    try:
        doctor.main(["--reap"])
        told = capsys.readouterr().out
        assert f"{names['dead']} (ring)" in told
        assert not (shm / names["dead"]).exists()
        for spared in (names["alive"], names["foreign"], other):
            assert (shm / spared).exists(), spared
            assert f"{spared} (" not in told
    finally:
        holders[names["alive"]].kill()
        holders[names["alive"]].wait()
        for name in (*names.values(), other):
            (shm / name).unlink(missing_ok=True)


def test_gpus_per_task_is_reported_with_its_cost(monkeypatch, tmp_path):
    fake = tmp_path / "nvidia-smi"
    fake.write_text('#!/bin/sh\necho "0, NVIDIA H100, 81559 MiB, 00000000:1A:00.0"\n')
    fake.chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path}:{os.environ['PATH']}")
    findings = list(checks.check_gpus({"SLURM_GPUS_PER_TASK": "1", "CUDA_VISIBLE_DEVICES": "GPU-8f3a"}))
    assert [f.ok for f in findings] == [True, True, False]
    assert "GPU-8f3a" in findings[1].detail
    assert "--gpus-per-node" in findings[2].remedy


def test_the_numa_node_of_a_device(tmp_path):
    (tmp_path / "0000:1a:00.0").mkdir()
    (tmp_path / "0000:1a:00.0" / "numa_node").write_text("1\n")
    assert checks.numa_node("00000000:1A:00.0", tmp_path) == "1"
    assert checks.numa_node("00000000:1B:00.0", tmp_path) == "?"


def test_the_ring_check_passes_and_leaves_nothing():
    assert only(checks.check_ring()).ok
    assert not [name for name in os.listdir("/dev/shm") if f"doctor-{os.getpid():x}" in name]  # noqa: PTH208


def test_a_failure_is_one_line_with_the_remedy():
    line = Finding(False, "memlock", "at most 8 MiB", "raise it").line()
    assert line == "FAIL  memlock: at most 8 MiB; raise it"


def report(**changes):
    return {"node": "n1", "versions": {"torch": "2.13.0"}, "clock": 0.0, "links": [], "listening": []} | changes


def test_ranks_that_differ_are_named():
    reports = [report(), report(node="n2", versions={"torch": "2.12.0"}, clock=3.5)]
    findings = {f.name: f for f in doctor._compare(reports)}
    assert "rank 1 on n2 has torch 2.12.0 instead of 2.13.0" in findings["equal versions"].detail
    assert not findings["clocks"].ok
    assert "+3.500 s" in findings["clocks"].detail


def test_a_config_that_cannot_run_fails_the_doctor(config_file, capsys):
    assert doctor.main([str(config_file)]) == 1
    assert "model.path = 'models/tiny'" in capsys.readouterr().out


@pytest.mark.dist
def test_two_ranks_under_a_launcher_report_once(tmp_path):
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2", "--no-python"]
    result = subprocess.run(
        [*command, sys.executable, "-m", "staleflow", "doctor"],
        cwd=tmp_path,
        env=os.environ | {"OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
        timeout=120,
    )
    names = [line.split(":")[0][6:] for line in result.stdout.splitlines()]
    assert sum(name.startswith("shared filesystem") for name in names) == 1, result.stdout + result.stderr
    assert sum(name.startswith("link to rank 1") for name in names) == 1
    assert sum(name == "clocks" for name in names) == 1
    assert result.returncode in (0, 1)
    assert not list(tmp_path.glob(".canary*"))
