"""When a job stops: by a file, a signal, or the end of its allocation."""

import time

import pytest

from staleflow.data import addition
from staleflow.jobs.stop import SPARE_S, STOPPED, StopWatch
from tests.job.harness import Task, start


def test_the_file_stops_the_job_and_the_answer_stays(tmp_path):
    watch = StopWatch(tmp_path, {})
    assert watch.asked(1000.0) is None
    (tmp_path / "STOP").touch()
    assert watch.asked(1000.5) is None  # looked less than a second ago
    assert "STOP" in watch.asked(1001.5)
    (tmp_path / "STOP").unlink()
    assert watch.asked(1100.0)


def test_the_walltime_guard_leaves_room_for_a_checkpoint(tmp_path):
    watch = StopWatch(tmp_path, {"SLURM_JOB_END_TIME": "2000"})
    assert watch.asked(2000.0 - SPARE_S - 1) is None
    watch.checkpoint_took(30.0)
    watch.checkpoint_took(10.0)
    assert watch.asked(2000.0 - SPARE_S - 61) is None
    assert "ends in 80 s" in watch.asked(2000.0 - SPARE_S - 60)


def test_no_limit_or_an_unreadable_one_is_no_limit(tmp_path):
    for value in ("0", "Unknown", ""):
        assert StopWatch(tmp_path, {"SLURM_JOB_END_TIME": value}).asked(1e12) is None


@pytest.mark.dist
@pytest.mark.slow
def test_a_job_stops_with_a_checkpoint_before_its_allocation_ends(tmp_path, monkeypatch):
    """A minute of allocation, of which the guard keeps the last third: 85, so that Slurm's script requeues it."""
    addition.main([str(tmp_path / "task")])
    monkeypatch.setenv("SLURM_JOB_END_TIME", str(int(time.time()) + 60))
    job = start(Task(tmp_path / "task"), tmp_path, run__steps=100000, rollout__step_ms=20.0)
    assert job.wait() == STOPPED, job.output
    assert job.summary["status"] == "stopped"
    assert "the allocation ends in" in job.summary["reason"]
    latest = (job.run_dir / "checkpoints" / "latest").read_text().strip()
    assert f"checkpoint {latest}" in job.summary["reason"]
    assert job.run_dir.stat().st_mode & 0o777 == 0o700, "private to the user"
