"""rank.sh and nsys.sh, run for real around small commands."""

import json
import os
import signal
import subprocess
import time

import pytest

from staleflow.jobs.slurm import LAUNCH

LAUNCHER_KEYS = ("SLURM_", "OMPI_", "PMI", "TORCHELASTIC", "RANK", "LOCAL_RANK")


def environment(tmp_path, **values):
    clean = {key: value for key, value in os.environ.items() if not key.startswith(LAUNCHER_KEYS)}
    return clean | {"STALEFLOW_ATTEMPT": str(tmp_path), "STALEFLOW_NODE_CACHE": str(tmp_path / "cache")} | values


def rank_sh(tmp_path, *command, **values):
    result = subprocess.run(
        [LAUNCH / "rank.sh", *command], env=environment(tmp_path, **values), capture_output=True, text=True, timeout=30
    )
    return result.returncode, result.stdout


@pytest.mark.parametrize("code", [0, 1, 2, 7])
def test_the_ranks_exit_code_is_passed_on(tmp_path, code):
    assert rank_sh(tmp_path, "sh", "-c", f"exit {code}")[0] == code
    assert (tmp_path / "first_failure").exists() == (code != 0)


def test_only_the_first_failure_is_noted(tmp_path):
    rank_sh(tmp_path, "sh", "-c", "kill -KILL $$", SLURM_PROCID="4")
    rank_sh(tmp_path, "sh", "-c", "exit 1", SLURM_PROCID="5")
    assert (tmp_path / "first_failure").read_text().startswith("137 rank 4 on ")


def test_a_stop_with_a_checkpoint_is_no_failure_for_the_launcher(tmp_path):
    assert rank_sh(tmp_path, "sh", "-c", "exit 85")[0] == 0
    assert (tmp_path / "stopped").exists()
    assert not (tmp_path / "first_failure").exists()


def test_outside_an_attempt_the_code_is_kept(tmp_path):
    assert rank_sh(tmp_path, "sh", "-c", "exit 85", STALEFLOW_ATTEMPT="")[0] == 85


def test_kernels_are_cached_on_the_node_in_a_private_folder(tmp_path):
    _, output = rank_sh(tmp_path, "sh", "-c", "echo $TRITON_CACHE_DIR $HF_HUB_OFFLINE")
    assert output.split() == [str(tmp_path / "cache" / "triton"), "1"]
    assert (tmp_path / "cache").stat().st_mode & 0o777 == 0o700
    assert rank_sh(tmp_path, "sh", "-c", "echo $HF_HUB_OFFLINE", HF_HUB_OFFLINE="0")[1].strip() == "0"


@pytest.mark.parametrize(("name", "code"), [("TERM", 3), ("USR1", 4)])
def test_signals_reach_the_rank_and_its_end_is_waited_for(tmp_path, name, code):
    program = f"trap 'sleep 0.3; exit {code}' {name}; echo ready; while :; do sleep 0.05; done"
    process = subprocess.Popen(
        [LAUNCH / "rank.sh", "bash", "-c", program], env=environment(tmp_path), stdout=subprocess.PIPE, text=True
    )
    assert process.stdout.readline() == "ready\n"
    process.send_signal(getattr(signal, f"SIG{name}"))
    assert process.wait(timeout=30) == code
    process.stdout.close()


def test_under_srun_signals_are_not_doubled(tmp_path):
    """srun signals the rank itself; rank.sh must neither die of it nor pass it on again."""
    program = "trap 'echo got' USR1; echo ready; for i in $(seq 20); do sleep 0.05; done"
    process = subprocess.Popen(
        [LAUNCH / "rank.sh", "bash", "-c", program],
        env=environment(tmp_path, SLURM_STEP_ID="0"),
        stdout=subprocess.PIPE,
        text=True,
    )
    assert process.stdout.readline() == "ready\n"
    process.send_signal(signal.SIGUSR1)
    time.sleep(0.2)
    assert process.communicate(timeout=30)[0] == ""
    assert process.returncode == 0


@pytest.mark.parametrize("rank", [0, 3])
def test_only_the_wanted_ranks_are_recorded_with_their_role_in_the_name(tmp_path, rank):
    fake = tmp_path / "bin" / "nsys"
    fake.parent.mkdir()
    fake.write_text('#!/bin/sh\necho "$@"\n')
    fake.chmod(0o755)
    (tmp_path / "plan.json").write_text(json.dumps({"ranks": [{"role": "host"}] * 3 + [{"role": "rollout"}]}))
    _, output = rank_sh(
        tmp_path,
        "echo",
        "the rank",
        PATH=f"{fake.parent}:{os.environ['PATH']}",
        NSYS_RANKS="1,3",
        NSYS_DIR=str(tmp_path / "trace"),
        NSYS_PLAN=str(tmp_path / "plan.json"),
        SLURM_PROCID=str(rank),
    )
    if rank == 0:
        assert output == "the rank\n"
    else:
        assert f"--output={tmp_path}/trace/rank_3.rollout" in output
        assert output.endswith("echo the rank\n")
