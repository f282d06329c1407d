"""The launch side on real Slurm daemons: three launchers, failures named, stop and requeue. No model is involved."""

import json
import time

import pytest

from .conftest import log_of

LAUNCHERS = ("srun", "torchrun", "mpirun")


def places(run_dir, start=0):
    """What the ranks wrote, in rank order."""
    return [json.loads((run_dir / f"probe_{start}_{rank}.json").read_text()) for rank in range(6)]


@pytest.mark.parametrize("launcher", LAUNCHERS)
def test_every_launcher_gives_the_same_ranks_on_the_same_nodes(cluster, submit, launcher):
    number, run_dir = submit({"do": "end"}, "--launcher", launcher)
    job = cluster.wait(number)
    assert (job["JobState"], job["ExitCode"]) == ("COMPLETED", "0:0"), log_of(run_dir)
    found = places(run_dir)
    assert [place["rank"] for place in found] == list(range(6))
    assert {place["world_size"] for place in found} == {6}
    assert [place["local_rank"] for place in found] == [0, 1, 2, 0, 1, 2]
    assert all(place["nodes"] == ["node1"] * 3 + ["node2"] * 3 for place in found)
    expected = {"srun": "slurm", "torchrun": "torchrun", "mpirun": "openmpi"}[launcher]
    assert {place["launcher"] for place in found} == {expected}


@pytest.mark.parametrize("launcher", LAUNCHERS)
def test_the_first_rank_that_fails_ends_the_job_and_is_named(cluster, submit, launcher):
    number, run_dir = submit({"do": "exit", "rank": 4, "code": 7}, "--launcher", launcher)
    job = cluster.wait(number)
    assert (job["JobState"], job["ExitCode"]) == ("FAILED", "7:0"), log_of(run_dir)
    assert "first to end: rank 4 on node2, exit code 7" in log_of(run_dir)


@pytest.mark.parametrize("launcher", LAUNCHERS)
def test_a_killed_rank_ends_the_job_and_is_named(cluster, submit, launcher):
    number, run_dir = submit({"do": "kill", "rank": 1}, "--launcher", launcher)
    job = cluster.wait(number)
    assert (job["JobState"], job["ExitCode"]) == ("FAILED", "137:0"), log_of(run_dir)
    assert "first to end: rank 1 on node1, exit code 137" in log_of(run_dir)


@pytest.mark.parametrize("launcher", LAUNCHERS)
def test_the_signal_before_the_limit_stops_requeues_and_resumes(cluster, submit, launcher):
    number, run_dir = submit({"do": "wait for STOP"}, "--launcher", launcher)
    wait_for(run_dir / "probe_0_5.json")
    cluster("scancel", "--batch", "--signal=USR1", number)
    job = cluster.wait(number)
    assert (job["JobState"], job["Restarts"]) == ("COMPLETED", "1"), log_of(run_dir)
    assert {place["resume"] for place in places(run_dir, 0)} == {"never"}
    assert {place["resume"] for place in places(run_dir, 1)} == {"auto"}
    assert "time is nearly up (USR1)" in log_of(run_dir)


def test_a_stop_file_stops_and_the_word_hold_keeps_the_job_from_starting_again(cluster, submit):
    number, run_dir = submit({"do": "wait for STOP"})
    wait_for(run_dir / "probe_0_5.json")
    (run_dir / "STOP").write_text("hold")
    end_s = time.monotonic() + 60
    while cluster.job(number)["Reason"] != "job_requeued_in_held_state":
        assert time.monotonic() < end_s, log_of(run_dir)
        time.sleep(0.5)
    cluster("scontrol", "release", number)
    assert cluster.wait(number)["JobState"] == "COMPLETED"


def test_the_number_of_requeues_is_bounded(cluster, submit):
    number, run_dir = submit({"do": "wait for STOP"}, "--max-requeues", "0")
    wait_for(run_dir / "probe_0_5.json")
    (run_dir / "STOP").touch()
    job = cluster.wait(number)
    assert (job["JobState"], job["ExitCode"]) == ("FAILED", "85:0")
    assert "not requeued" in log_of(run_dir)


def test_a_rank_started_in_the_batch_shell_is_refused_as_a_fragment(cluster, tmp_path):
    script = tmp_path / "alone.sbatch"
    script.write_text(
        "#!/bin/bash\n#SBATCH -N2 --ntasks-per-node=3\n"
        f"#SBATCH --output={tmp_path}/log\n"
        "python=$1; shift\n"
        '"$python" -c "import os; from staleflow.jobs.env import detect; detect(os.environ)"\n'
    )
    import sys

    number = cluster("sbatch", str(script), sys.executable).split()[-1]
    assert cluster.wait(number)["JobState"] == "FAILED"
    assert "this process is alone, but Slurm gave 2 node(s), 6 task(s)" in (tmp_path / "log").read_text()


def wait_for(path, limit_s=60):
    end_s = time.monotonic() + limit_s
    while not path.exists():
        assert time.monotonic() < end_s, f"{path} did not appear"
        time.sleep(0.2)
