"""Real jobs on two nodes: three launchers, a killed rank, a cut cable. The scripted engine stands for vLLM.

Both nodes have a /dev/shm of their own, so that rings, arenas and stores of one cannot be seen by the other.
"""

import json
import sys
import time

import pytest

from staleflow.data import addition
from tests.job.harness import Task

from .conftest import HERE, PATH, ROOT, log_of

LAUNCHERS = ("srun", "torchrun", "mpirun")
NODES = ("node1", "node2")


@pytest.fixture(scope="session")
def task(tmp_path_factory):
    root = tmp_path_factory.mktemp("addition")
    addition.main([str(root)])
    return Task(root)


@pytest.fixture
def start(cluster, task, tmp_path):
    """start(*flags, **changes) -> (job number, run directory): configs/demo.toml on two nodes."""

    def call(*flags, **changes):
        overrides = task.overrides(tmp_path, **{"evaluation__max_prompts": 2, **changes})
        answer = cluster(
            *("run", "ctl", "env", "-C", str(ROOT), sys.executable, "-m", "staleflow", "submit", "configs/demo.toml"),
            *overrides,
            *("--nodes", "2", "--gpus-per-node", "0", "--time", "30", "--site", str(HERE / "site.env"), *flags),
            PATH=PATH,
        )
        return answer.split()[3], tmp_path / "test"

    return call


def shared_memory(cluster):
    return {node: cluster("run", node, "ls", "-A", "/dev/shm").split() for node in NODES}


def wait_for_step(run_dir, step, limit_s=300):
    end_s = time.monotonic() + limit_s
    while not steps_done(run_dir) or steps_done(run_dir)[-1] < step:
        assert time.monotonic() < end_s, log_of(run_dir)
        time.sleep(0.2)


def steps_done(run_dir):
    path = run_dir / "metrics.jsonl"
    return [json.loads(line)["step"] for line in path.read_text().splitlines()] if path.exists() else []


def kill(cluster, node, run_dir, rank):
    """SIGKILL the rank that has this log open."""
    log = next((run_dir / "attempt_0").glob(f"rank_{rank}.*.log"))
    find = f"for f in /proc/[0-9]*/fd/1; do [ $f -ef {log} ] && echo $f; done; true"
    cluster("run", node, "kill", "-KILL", cluster("run", node, "sh", "-c", find).split("/")[2])


@pytest.mark.parametrize("launcher", LAUNCHERS)
def test_a_job_over_two_nodes_completes_and_trains_on_what_the_other_node_generated(cluster, start, launcher):
    """Node 1 has the trainers only: every payload came from node 2, every version went there."""
    number, run_dir = start("--launcher", launcher, trainer__ranks=2, rollout__instances=2)
    job = cluster.wait(number)
    assert (job["JobState"], job["ExitCode"]) == ("COMPLETED", "0:0"), log_of(run_dir)
    roles = [(r["node"], r["role"]) for r in json.loads((run_dir / "plan.json").read_text())["ranks"]]
    assert roles == [(0, "host"), (0, "trainer"), (0, "trainer"), (1, "host"), (1, "rollout"), (1, "rollout")]
    summary = json.loads((run_dir / "summary.json").read_text())
    assert (summary["status"], summary["trained_trajectories"]) == ("completed", 48)
    assert summary["max_staleness"] <= summary["eta"]
    assert summary["protocol"]["trajectories"]["outstanding"] == 0
    assert shared_memory(cluster) == {"node1": [], "node2": []}


@pytest.mark.parametrize("launcher", LAUNCHERS)
def test_a_killed_rank_ends_the_job_soon_is_named_and_a_resume_continues(cluster, start, launcher):
    changes = {"rollout__instances": 3, "checkpoint__every_steps": 2}
    number, run_dir = start("--launcher", launcher, run__steps=100000, **changes)
    wait_for_step(run_dir, 4)
    began_s = time.monotonic()
    kill(cluster, "node2", run_dir, 5)
    job = cluster.wait(number)
    took_s = time.monotonic() - began_s
    print(f"{launcher}: the job was over {took_s:.1f} s after the kill")
    assert took_s < 90, "half a minute is promised; a loaded test machine explains no more"
    assert job["JobState"] == "FAILED"
    assert "rank 5" in log_of(run_dir)
    assert shared_memory(cluster) == {"node1": [], "node2": []}
    steps = steps_done(run_dir)[-1] + 3
    number, _ = start("--launcher", launcher, run__steps=steps, checkpoint__resume="must", **changes)
    assert cluster.wait(number)["JobState"] == "COMPLETED", log_of(run_dir)
    assert steps_done(run_dir) == list(range(steps))


SURVIVING = {"fault__survive_rollout": True, "checkpoint__every_steps": 8, "rollout__instances": 3}


def test_a_job_that_may_survive_goes_on_without_a_dead_rollout_rank(cluster, start):
    """srun --kill-on-bad-exit=0; the verdict is rank 0's, and the log names who was left out."""
    number, run_dir = start(run__steps=40, **SURVIVING)
    wait_for_step(run_dir, 4)
    kill(cluster, "node2", run_dir, 5)
    job = cluster.wait(number)
    assert (job["JobState"], job["ExitCode"]) == ("COMPLETED", "0:0"), log_of(run_dir)
    assert "instance 2 is left out: rank 5 (rollout)" in log_of(run_dir)
    assert "the job went on without: rank 5 on node2" in log_of(run_dir)
    assert steps_done(run_dir) == list(range(40))
    assert shared_memory(cluster) == {"node1": [], "node2": []}


def test_a_job_that_may_survive_goes_on_without_a_dead_node(cluster, start):
    """A power cut: nothing says goodbye, srun and Slurm leave the rest alone (--no-kill)."""
    number, run_dir = start(run__steps=400, **SURVIVING)
    wait_for_step(run_dir, 4)
    cluster("kill-node", "-p", "node2")
    try:
        job = cluster.wait(number)
    finally:
        cluster("boot", "node2")
    assert (job["JobState"], job["ExitCode"]) == ("COMPLETED", "0:0"), log_of(run_dir)
    assert "node node2 is left out: rank 3 (host of node2) has been silent" in log_of(run_dir)
    assert steps_done(run_dir) == list(range(400))


def test_a_job_that_may_survive_ends_itself_when_a_trainer_dies(cluster, start):
    number, run_dir = start(run__steps=100000, **SURVIVING)
    wait_for_step(run_dir, 2)
    kill(cluster, "node1", run_dir, 1)
    assert cluster.wait(number)["JobState"] == "FAILED"
    assert "rank 1 (trainer) is lost" in log_of(run_dir)


def test_a_cut_cable_is_named_and_hangs_nobody(cluster, start):
    number, run_dir = start("--sbatch=--no-requeue", run__steps=100000, rollout__instances=3)
    wait_for_step(run_dir, 2)
    cluster("partition", "node2")
    try:
        job = cluster.wait(number)
    finally:
        cluster("heal", "-w", "node2")
    assert job["JobState"] in ("FAILED", "NODE_FAIL")
    assert "rank 3 (host of node2) has been silent" in log_of(run_dir) + (run_dir / "summary.json").read_text()
    end_s = time.monotonic() + 60
    while shared_memory(cluster) != {"node1": [], "node2": []}:
        assert time.monotonic() < end_s, shared_memory(cluster)
        time.sleep(1)


@pytest.mark.parametrize("launcher", LAUNCHERS)
def test_the_signal_before_the_limit_checkpoints_requeues_and_continues(cluster, start, launcher):
    """Nothing is trained twice, nothing is left out: the steps of both starts are 0..N-1, once each."""
    steps = 40
    number, run_dir = start("--launcher", launcher, run__steps=steps, rollout__instances=3, rollout__step_ms=20.0)
    wait_for_step(run_dir, 3)
    cluster("scancel", "--batch", "--signal=USR1", number)
    job = cluster.wait(number)
    assert (job["JobState"], job["Restarts"]) == ("COMPLETED", "1"), log_of(run_dir)
    assert steps_done(run_dir) == list(range(steps))
    assert len(list(run_dir.glob("attempt_*"))) == 2
    assert shared_memory(cluster) == {"node1": [], "node2": []}
