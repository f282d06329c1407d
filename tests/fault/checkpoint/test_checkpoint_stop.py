"""Stopping with a checkpoint, and a disk that has no room for one."""

from __future__ import annotations

import os
import signal
import subprocess
from pathlib import Path

import pytest

from staleflow.checkpoint import layout
from staleflow.trajectories.schema import decode
from staleflow.trajectories.spool import FrameKind, read_segment, segments_in
from tests.fault.checkpoint.lost import equal, launch, metrics, settings, weights
from tests.job.harness import TERMINATE, Task

pytestmark = [pytest.mark.dist, pytest.mark.slow]


@pytest.mark.timeout(900)
def test_usr1_stops_with_partial_trajectories_and_the_next_start_goes_on_exactly(task: Task, tmp_path: Path) -> None:
    slow = settings(4, eta=0, rollout__step_ms=150.0, checkpoint__every_steps=0, evaluation__max_prompts=1)
    whole = launch(task, tmp_path / "whole", **slow)
    assert whole.wait() == 0, whole.output

    job = launch(task, tmp_path / "stopped", **slow)
    job.until_step(1)
    job.signal(signal.SIGUSR1)
    assert job.wait(60) == 85, job.output
    assert job.summary["status"] == "stopped" and job.summary["exit_code"] == 85
    place = layout.latest(job.run_dir)
    assert place is not None and layout.version_of(place) == job.summary["steps"] < 4
    frames = [f for path in segments_in(place / layout.SPOOL).values() for f in read_segment(path)]
    partial = [decode(f.payload) for f in frames if f.kind is FrameKind.PARTIAL]
    assert any(t.response_tokens for t in partial), "nothing was called back"
    assert not any("-test-" in name for name in job.shm_left())

    again = launch(task, tmp_path / "stopped", **slow | {"checkpoint__resume": "must"})
    assert again.wait() == 0, again.output
    assert [line["prompts"] for line in metrics(again.run_dir)] == [line["prompts"] for line in metrics(whole.run_dir)]
    assert equal(weights(again.run_dir, 4), weights(whole.run_dir, 4))
    before, after = (job.summary["accuracy_before"], job.summary["accuracy_after"])
    assert before is not None and after is not None


@pytest.mark.timeout(300)
def test_usr1_at_a_rank_does_the_same(task: Task, tmp_path: Path) -> None:
    job = launch(task, tmp_path, **settings(1000, eta=1, checkpoint__every_steps=0))
    job.until_step(1)
    os.kill(job.pid_of(2), signal.SIGUSR1)
    assert job.wait(60) == 85, job.output
    assert "signal 10 at rank 2" in job.summary["reason"]
    assert layout.latest(job.run_dir) is not None


@pytest.mark.timeout(300)
def test_sigterm_keeps_its_code_but_saves_first(task: Task, tmp_path: Path) -> None:
    job = launch(task, tmp_path, **settings(1000, eta=1, checkpoint__every_steps=500))
    job.until_step(1)
    job.signal(TERMINATE)
    assert job.wait(40) == 143, job.output
    place = layout.latest(job.run_dir)
    assert place is not None and layout.version_of(place) == job.summary["steps"]
    assert "checkpoint step_" in job.summary["reason"]


@pytest.mark.timeout(300)
@pytest.mark.skipif(os.geteuid() != 0, reason="needs root, for a file system that is too small")
def test_a_full_disk_keeps_the_run_going_and_says_so(task: Task, tmp_path: Path) -> None:
    folder = layout.checkpoints_dir(tmp_path / "test")
    folder.mkdir(parents=True)
    subprocess.run(["mount", "-t", "tmpfs", "-o", "size=2m", "tmpfs", str(folder)], check=True)
    try:
        job = launch(task, tmp_path, **settings(3, eta=1, checkpoint__every_steps=1))
        assert job.wait() == 0, job.output
        said = [line for line in job.output.splitlines() if "could not be written" in line]
        assert said and all("no space left on device" in line for line in said), job.output
        place = layout.latest(job.run_dir)  # the first one may have had room
        assert said[-1].endswith(f"; {place.name} stays" if place else "; there is none yet")
        assert job.summary["steps"] == 3 and job.summary["status"] == "completed"
    finally:
        subprocess.run(["umount", str(folder)], check=True)
