"""A run that is lost again and again ends where the undisturbed run ends.

With η = 0, temperature 1 and a seed per request (by prompt and member) the scripted engine's tokens depend on weights
and seed alone, so the weights of every version must be equal bit by bit. For η > 0 what is trained together depends on
time; there every prompt must be trained on once, and no durable finished trajectory may be lost.
"""

from __future__ import annotations

import os
import random
import time
from pathlib import Path

import pytest

from tests.fault.checkpoint.lost import (
    attempts,
    equal,
    kill_everything,
    launch,
    metrics,
    rehearse,
    remains,
    settings,
    wait_until_training,
    weights,
)
from tests.job.harness import Task

pytestmark = [pytest.mark.dist, pytest.mark.slow]
KILLS = int(os.environ.get("STALEFLOW_KILLS", "2"))  # the long form, `make test-kills`: ten


def lose_and_resume(task: Task, root: Path, kills: int, seed: int, changes: dict[str, object]) -> Path:
    """Kill `kills` attempts at random moments, checking each time what survives; then let one come to its end."""
    rng = random.Random(seed)
    run_dir = root / "test"
    for kill in range(kills):
        job = launch(task, root, **changes)
        wait_until_training(job, kill)
        time.sleep(rng.uniform(0.0, 4.0))
        if job.process.poll() is not None:
            break  # it was faster
        kill_everything(job)
        left = remains(run_dir)
        resume, kept = rehearse(run_dir, root / "rehearsal")
        assert resume.version == left.version
        lost = {key for key in left.finished if kept.get(key) != left.finished[key]}
        assert not lost, f"kill {kill}: durable finished trajectories lost: {sorted(lost)}"
    job = launch(task, root, **changes)
    assert job.wait(280) == 0, job.output
    assert attempts(run_dir) > 1
    return run_dir


@pytest.mark.timeout(7200)
def test_lost_at_random_moments_it_ends_in_the_same_weights(task: Task, tmp_path: Path) -> None:
    steps = 6 + 2 * KILLS
    undisturbed = finished_run(task, tmp_path / "whole", settings(steps, eta=0, checkpoint__every_steps=0))
    lost = lose_and_resume(task, tmp_path / "lost", KILLS, 1, settings(steps, eta=0))
    a, b = metrics(undisturbed), metrics(lost)
    assert [line["step"] for line in b] == list(range(steps))
    assert [line["prompts"] for line in b] == [line["prompts"] for line in a]
    for version in range(steps + 1):
        assert equal(weights(undisturbed, version), weights(lost, version)), f"version {version}"
    assert all(line["train"]["grad_norm"] > 0 for line in b)
    assert not equal(weights(lost, 0), weights(lost, steps))


@pytest.mark.timeout(7200)
def test_with_staleness_nothing_is_trained_twice_and_nothing_durable_is_lost(task: Task, tmp_path: Path) -> None:
    steps = 6 + 2 * KILLS
    lost = lose_and_resume(task, tmp_path, KILLS, 2, settings(steps, eta=2))
    lines = metrics(lost)
    assert [line["step"] for line in lines] == list(range(steps))
    prompts = [prompt for line in lines for prompt in line["prompts"]]
    assert sorted(prompts) == list(range(4 * steps))
    groups = lines[-1]["protocol"]["groups"]
    assert groups["consumed"] == 4 * steps and groups["outstanding"] == 0
    assert groups["reserved"] == groups["consumed"] + sum(groups["released"].values())
    assert all(int(age) <= 2 for line in lines for age in line["staleness"])


def finished_run(task: Task, root: Path, changes: dict[str, object]) -> Path:
    job = launch(task, root, **changes)
    assert job.wait(280) == 0, job.output
    return job.run_dir
