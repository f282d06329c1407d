"""The doctor under srun on two nodes: sees both, and what differs between them."""

import sys
from pathlib import Path

from .conftest import ROOT


def doctor(cluster, folder, *flags):
    return cluster(
        *("run", "ctl", "env", "-C", str(folder), "srun", "-N2", "--ntasks-per-node=2", "--mpi=none", *flags),
        *(sys.executable, "-m", "staleflow", "doctor"),
        check=False,
        PYTHONPATH=str(ROOT / "src"),
        GLOO_SOCKET_IFNAME="eth0",
        TMPDIR="/run/tmp",
    )


def test_two_nodes_are_well(cluster, tmp_path):
    answer = doctor(cluster, tmp_path)
    assert "0 failed" in answer, answer
    for node, address in (("node1", "10.77.0.1"), ("node2", "10.77.0.2")):
        assert f"ok    interface on {node}: {address}" in answer
        assert f"ok    shared filesystem on {node}" in answer
        assert f"ok    leftovers on {node}: none" in answer
    assert "ok    link to rank 3 on node2" in answer


def test_what_a_dead_job_left_on_the_other_node_is_found(cluster, tmp_path):
    cluster("run", "node2", "sh", "-c", "echo left > /dev/shm/sf-left-behind")
    try:
        answer = doctor(cluster, tmp_path)
    finally:
        cluster("run", "node2", "rm", "/dev/shm/sf-left-behind")
    remedy = "staleflow doctor --reap (what dead jobs left), or rm /dev/shm/sf-left-behind"
    assert f"FAIL  leftovers on node2: 1 files of dead processes, 0 MiB; {remedy}\n" in answer, answer
    assert "1 failed" in answer


def test_a_run_directory_that_is_not_shared_is_found(cluster, tmp_path):
    """/run is each machine's own: the canary of node1 does not sing on node2."""
    for machine in ("ctl", "node1", "node2"):
        cluster("run", machine, "mkdir", "-p", "/run/tmp/mine")
    answer = doctor(cluster, Path("/run/tmp/mine"))
    assert "ok    shared filesystem on node1" in answer, answer
    assert "FAIL  shared filesystem on node2: /run/tmp/mine is not that of rank 0" in answer
