"""`fault.survive_rollout`: ranks started one by one, as srun --kill-on-bad-exit=0 does, so that only the job decides.

Two "nodes" share this machine: each begins with a rank of local rank 0. Shared memory does not cross them, since rings
and stores are found through their own host only.
"""

from __future__ import annotations

import json
import os
import socket
import subprocess
import sys
import time
from pathlib import Path
from types import SimpleNamespace

import pytest

from staleflow.config import load
from staleflow.data import addition
from staleflow.jobs.plan import plan, spread
from staleflow.observe.spans import REWARDS
from staleflow.observe.trace import read_traces
from staleflow.roles import messages as m
from staleflow.roles.survival import SETTLES_S, Holdings, Survival
from tests.job.harness import REPOSITORY, Task

NODES = (3, 3)  # host, trainer, rollout; host, rollout, rollout
ETA, BATCH = 2, 16


class Ranks:
    """All ranks of a job, and what rank 0 says."""

    def __init__(self, task: Task, root: Path, **changes: object) -> None:
        self.run_dir = root / "test"
        settings = {
            "rollout__instances": 3, "rollout__step_ms": 4.0, "checkpoint__every_steps": 8, "parameters__delta": True,
            "fault__survive_rollout": True, "evaluation__max_prompts": 2, "staleness__eta": ETA,
        }  # fmt: skip
        command = [sys.executable, "-m", "staleflow", "run", "configs/demo.toml"]
        command += task.overrides(root, **{**settings, **changes})
        self.said = root / "said"
        with self.said.open("w") as out, socket.create_server(("127.0.0.1", 0)) as probe:
            port = probe.getsockname()[1]
            environments = [_environment(node, place, port) for node, n in enumerate(NODES) for place in range(n)]
        with self.said.open("w") as out:
            self.processes = [
                subprocess.Popen(command, cwd=REPOSITORY, env=os.environ | env, stdout=out, stderr=out)
                for env in environments
            ]

    def until_step(self, step: int, limit_s: float = 200) -> None:
        path, end_s = self.run_dir / "metrics.jsonl", time.monotonic() + limit_s
        while not path.exists() or len(path.read_text().splitlines()) <= step:
            assert time.monotonic() < end_s and self.processes[0].poll() is None, self.said.read_text()
            time.sleep(0.05)

    def kill(self, rank: int) -> None:
        self.processes[rank].kill()

    def codes(self, limit_s: float = 80) -> list[int]:
        end_s = time.monotonic() + limit_s
        return [process.wait(max(0.1, end_s - time.monotonic())) for process in self.processes]

    def end(self) -> None:
        for process in self.processes:
            process.kill()
            process.wait()


def _environment(node: int, place: int, port: int) -> dict[str, str]:
    return {
        "RANK": str(sum(NODES[:node]) + place), "WORLD_SIZE": str(sum(NODES)), "LOCAL_RANK": str(place),
        "LOCAL_WORLD_SIZE": str(NODES[node]), "GROUP_WORLD_SIZE": "1", "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": str(port), "GLOO_SOCKET_IFNAME": "lo", "OMP_NUM_THREADS": "1",
    }  # fmt: skip


@pytest.fixture(scope="module")
def task(tmp_path_factory: pytest.TempPathFactory) -> Task:
    root = tmp_path_factory.mktemp("addition")
    addition.main([str(root)])
    return Task(root)


@pytest.fixture
def start(task: Task, tmp_path: Path):
    started = []

    def call(**changes: object) -> Ranks:
        started.append(Ranks(task, tmp_path, **changes))
        return started[-1]

    yield call
    for ranks in started:
        ranks.end()


@pytest.mark.dist
@pytest.mark.slow
def test_the_job_goes_on_without_a_dead_instance_and_then_without_its_node(start) -> None:
    steps = 60
    job = start(run__steps=steps)
    job.until_step(6)
    job.kill(5)  # an instance of node 1
    job.until_step(20)
    job.kill(3)  # the host of node 1: its payloads, its relay and its other instance are gone
    codes = job.codes()
    said = job.said.read_text()
    assert codes[:3] == [0, 0, 0], said
    assert "instance 2 is left out: rank 5 (rollout): its process has died" in said
    assert "is left out: rank 3 (host of" in said
    summary = json.loads((job.run_dir / "summary.json").read_text())
    assert (summary["status"], summary["steps"]) == ("completed", steps)
    assert summary["trained_trajectories"] == steps * BATCH
    assert summary["max_staleness"] <= ETA
    assert summary["protocol"]["trajectories"]["outstanding"] == 0
    assert summary["protocol"]["groups"]["released"] == {}, "nothing was given up: all was routed or read again"
    traces = read_traces(job.run_dir)
    assert {trace.rank for trace in traces if trace.on(REWARDS)} == {0, 3}
    assert {name for trace in traces for _, name, _ in trace.counters} == {"kv", "staleness"}
    done = [json.loads(line)["step"] for line in (job.run_dir / "metrics.jsonl").read_text().splitlines()]
    assert done == list(range(steps))


RULES = {
    "an instance": ({"rank": 5}, {}, True),
    "before all are ready": ({"rank": 5, "starting": True}, {}, False),
    "a trainer": ({"rank": 1}, {}, False),
    "not asked for": ({"rank": 5}, {"fault.survive_rollout": "false"}, False),
    "the last instance": ({"rank": 2}, {"trainer.ranks": "3", "rollout.instances": "1"}, False),
    "a node": ({"node": 1}, {}, True),
    "the node of rank 0": ({"node": 0}, {}, False),
    "a node with a trainer": ({"node": 1}, {"trainer.ranks": "3", "rollout.instances": "1"}, False),
    "the node of all instances": ({"node": 1}, {"trainer.ranks": "2", "rollout.instances": "2"}, False),
}


@pytest.mark.parametrize("case", RULES)
def test_what_a_job_goes_on_without(config_file: Path, case: str) -> None:
    loss, changes, survives = RULES[case]
    settings = {"fault.survive_rollout": "true", "checkpoint.every_steps": "1"} | changes
    config = load(config_file, [f"{key}={value}" for key, value in settings.items()])
    lost, sent = [], []
    core = SimpleNamespace(lost=lambda instance, tokens: lost.append(instance))
    checkpoints = SimpleNamespace(leave_out=lambda node: None)
    survival = Survival(
        config, plan(config, spread(config, 2)), core, Holdings({}, {}, {}, {}, {}, {0, 1}), checkpoints, None,
        lambda node, message: sent.append((node, message)), lambda group: None, lambda text: None,
    )  # fmt: skip
    starting = loss.get("starting", False)
    if "rank" in loss:
        assert survival.rank_lost(loss["rank"], "why", starting) is survives
        assert sent == ([(1, m.LeaveOut(2))] if survives else [])
    else:
        assert survival.node_lost(loss["node"], "why", 0.0, starting) is survives
        survival.turn(SETTLES_S)
        expected = [(0, m.Adopt(1, [], [])), (1, m.Gone()), (0, m.Regroup(1, [1, 0]))]
        assert sent == (expected if survives else [])
    assert lost == (([2] if "rank" in loss else [1, 2]) if survives else [])


@pytest.mark.dist
@pytest.mark.slow
def test_the_job_ends_itself_when_a_trainer_dies(start) -> None:
    """Nobody kills the others: those that are told to leave do so with 0, the hosts say that it has failed."""
    job = start(run__steps=100000)
    job.until_step(2)
    job.kill(1)
    codes = job.codes()
    assert (codes[0], codes[3]) == (1, 1)
    assert "rank 1 (trainer) is lost: its process has died" in job.said.read_text()
