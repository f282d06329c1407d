"""The whole job with the scripted engine, as a user starts it."""

from __future__ import annotations

import json
import os
import signal
from pathlib import Path

import pytest

from tests.job.harness import INTERRUPT, MPIRUN, TERMINATE, TORCHRUN, Task, finished, start

pytestmark = pytest.mark.dist


@pytest.mark.parametrize("launcher", [(), TORCHRUN, MPIRUN], ids=["alone", "torchrun", "mpirun"])
def test_same_program_under_every_launcher(task: Task, tmp_path: Path, launcher: tuple[str, ...]) -> None:
    job = finished(task, tmp_path, launcher=launcher)
    summary = job.summary
    assert summary["status"] == "completed" and summary["steps"] == 3
    assert summary["trained_trajectories"] == 3 * 4 * 4
    assert summary["max_staleness"] <= summary["eta"] == 2
    groups = summary["protocol"]["groups"]
    assert groups["reserved"] == groups["consumed"] == 12 and groups["outstanding"] == 0
    assert [line["step"] for line in job.metrics()] == [0, 1, 2]
    for name in ("config.toml", "plan.json", "attempt_0/rank_0.host.log", "attempt_0/rank_3.rollout.log"):
        assert (job.run_dir / name).exists(), name
    assert not job.ranks_alive() and not job.shm_left()


def test_eta_zero_is_exactly_synchronous(task: Task, tmp_path: Path) -> None:
    """Same code path: every trajectory is trained at the version that started it, and is of one piece."""
    summary = finished(task, tmp_path, staleness__eta=0).summary
    assert set(summary["staleness_histogram"]) == {"0"}
    assert summary["segments_max"] == 1


def test_run_shorter_than_eta_ends(task: Task, tmp_path: Path) -> None:
    summary = finished(task, tmp_path, run__steps=1, staleness__eta=5).summary
    assert summary["status"] == "completed" and summary["steps"] == 1


def test_data_that_runs_out_ends_the_run(task: Task, tmp_path: Path) -> None:
    few = tmp_path / "few.jsonl"
    few.write_text("".join((task.root / "train.jsonl").read_text().splitlines(keepends=True)[:10]))
    changes = {"data__train": [{"path": str(few)}], "data__epochs": 1, "run__steps": 50}
    summary = finished(task, tmp_path, **changes).summary
    assert summary["status"] == "completed" and summary["reason"] == "the data set ended"
    assert summary["steps"] == 2  # ten prompts fill two batches of four


@pytest.mark.parametrize(("number", "code"), [(INTERRUPT, 130), (TERMINATE, 143)], ids=["ctrl-c", "sigterm"])
def test_signal_ends_in_order(task: Task, tmp_path: Path, number: int, code: int) -> None:
    job = start(task, tmp_path, run__steps=10_000)
    job.until_step(2)
    job.signal(number)
    assert job.wait(20) == code, job.output
    assert "Traceback" not in job.output
    assert job.summary["status"] == "stopped" and f"signal {number}" in job.summary["reason"]
    assert job.metrics()[-1]["step"] == job.summary["steps"] - 1
    assert not job.ranks_alive() and not job.shm_left()


@pytest.mark.parametrize(("rank", "role"), [(1, "trainer"), (2, "rollout")])
def test_killed_rank_is_named(task: Task, tmp_path: Path, rank: int, role: str) -> None:
    job = start(task, tmp_path, run__steps=10_000)
    job.until_step(2)
    os.kill(job.pid_of(rank), signal.SIGKILL)
    assert job.wait(20) == 1, job.output
    assert job.summary["status"] == "failed" and f"rank {rank} ({role})" in job.summary["reason"]
    assert not job.ranks_alive() and not job.shm_left()


def test_killed_coordinator_leaves_nothing(task: Task, tmp_path: Path) -> None:
    job = start(task, tmp_path, run__steps=10_000)
    job.until_step(2)
    os.kill(job.pid_of(0), signal.SIGKILL)
    assert job.wait(20) == 1, job.output
    assert not job.ranks_alive() and not job.shm_left()


def test_exception_in_a_rank_ends_the_job_and_names_it(task: Task, tmp_path: Path) -> None:
    """A model folder whose weights lack a tensor: the trainer finds out, and everybody ends."""
    from safetensors.numpy import load_file, save_file

    broken = tmp_path / "broken"
    broken.mkdir()
    for file in (task.root / "model").iterdir():
        (broken / file.name).write_bytes(file.read_bytes())
    tensors = load_file(broken / "model.safetensors")
    del tensors["model.norm.weight"]
    save_file(tensors, broken / "model.safetensors", {"format": "pt"})
    job = start(task, tmp_path, model__path=str(broken))
    assert job.wait(120) == 1
    assert "rank 1 (trainer)" in job.output and "model.norm.weight" in job.output
    assert json.loads((job.run_dir / "summary.json").read_text())["status"] == "failed"
    assert not job.ranks_alive() and not job.shm_left()
