"""Whole jobs with the other transports, and what they refuse. `broadcast` is what every other test of a job uses."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from staleflow.config import ConfigError, load
from staleflow.jobs.plan import Node, plan
from tests.job.harness import TERMINATE, Job, Task, finished, start

GREEDY = {"coordination__synchronization": "greedy"}


def complete(job: Job, steps: int) -> None:
    summary = job.summary
    assert summary["status"] == "completed" and summary["steps"] == steps
    assert summary["max_staleness"] <= summary["eta"]
    assert summary["publish_s"] > 0 and summary["pull_s"] > 0 and 0 <= summary["publish_overlap"] <= 1
    lines = job.metrics()
    assert all(line["publish_s"] > 0 and "publish_overlap" in line and line["versions"] for line in lines[1:])
    assert not job.ranks_alive() and not job.shm_left()


@pytest.mark.dist
@pytest.mark.parametrize("transport", ["file", "direct"])
def test_a_job_with_two_trainers_and_an_instance_of_two_ranks(task: Task, tmp_path: Path, transport: str) -> None:
    shape = {"trainer__ranks": 2, "rollout__instances": 1, "rollout__tensor_parallel": 2}
    complete(finished(task, tmp_path, parameters__transport=transport, **GREEDY, **shape), 3)


@pytest.mark.dist
@pytest.mark.parametrize("transport", ["file", "direct"])
def test_eta_zero_and_the_last_step_do_not_wait_for_each_other(task: Task, tmp_path: Path, transport: str) -> None:
    """Nobody pulls the last version, and at eta = 0 each side waits for the other all the time."""
    job = finished(task, tmp_path, parameters__transport=transport, staleness__eta=0, **GREEDY)
    complete(job, 3)
    assert set(job.summary["staleness_histogram"]) == {"0"}


@pytest.mark.dist
def test_direct_ends_in_order_in_the_middle_of_a_run(task: Task, tmp_path: Path) -> None:
    job = start(task, tmp_path, parameters__transport="direct", coordination__policy="sync", run__steps=10_000)
    job.until_step(2)
    job.signal(TERMINATE)
    assert job.wait(20) == 143, job.output
    assert not job.ranks_alive() and not job.shm_left()


@pytest.mark.parametrize(
    ("changes", "why"),
    [
        ({"parameters.transport": "direct"}, "coordination.policy"),
        (
            {"parameters.transport": "direct", "coordination.policy": "pace", "coordination.partial_rollout": False},
            "own",
        ),
        ({"parameters.transport": "file", "parameters.delta": True}, "parameters.delta"),
        ({"parameters.transport": "file", "fault.survive_rollout": True, "checkpoint.every_steps": 1}, "survive"),
    ],
)
def test_what_a_transport_cannot_do_is_refused(changes: dict[str, Any], why: str) -> None:
    with pytest.raises(ConfigError, match=why) as refused:
        load("configs/demo.toml", [f"{key}={str(value).lower()}" for key, value in changes.items()])
    assert "use 'broadcast'" in str(refused.value)


def test_the_plan_names_who_meets() -> None:
    shape = ["trainer.ranks=2", "rollout.instances=3", "rollout.tensor_parallel=2"]
    greedy = "coordination.synchronization=greedy"
    world = (Node("a", 5), Node("b", 5))
    members = {
        name: plan(load("configs/demo.toml", [*shape, greedy, f"parameters.transport={name}"]), world).publish
        for name in ("broadcast", "direct", "file")
    }
    assert members == {"broadcast": (1, 2, 0, 5), "direct": (1, 2, 3, 4, 6, 7, 8, 9), "file": ()}
