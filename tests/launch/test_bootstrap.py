"""Meeting places: what is checked before anybody waits there, and MPI's part under a real mpirun."""

import os
import shutil
import socket
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest

from staleflow.jobs.bootstrap import check_rendezvous, free_port, listen, own_address, port_is_free
from staleflow.jobs.env import LaunchError, LaunchInfo
from tests.shm import lasting

ONE_NODE = LaunchInfo("slurm", 0, 4, 0, 4, 0, 1, ("127.0.0.1", 0), "7")


def at(host, port, **changes):
    return replace(ONE_NODE, rendezvous=(host, port), **changes)


def test_a_port_in_use_is_refused_and_a_free_one_is_not():
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        assert not port_is_free("127.0.0.1", port)
        with pytest.raises(LaunchError, match=f"MASTER_PORT={port}"):
            check_rendezvous(at("127.0.0.1", port))
        check_rendezvous(at("127.0.0.1", port, rank=1))  # others find rank 0 listening there
        check_rendezvous(at("127.0.0.1", port, agent_store=True))
    check_rendezvous(at("127.0.0.1", free_port("127.0.0.1")))


@pytest.mark.parametrize("host", ["no-such-host.invalid", "192.0.2.77"])
def test_an_address_that_is_nobodys_or_somebody_elses_is_refused(host):
    with pytest.raises(LaunchError, match=f"MASTER_ADDR={host}"):
        check_rendezvous(at(host, 29500))


def test_the_meeting_place_is_on_its_address_only():
    port = free_port("127.0.0.1")
    with socket.socket(fileno=listen(ONE_NODE, "127.0.0.1", port)) as server:
        assert server.getsockname() == ("127.0.0.1", port)
    with socket.socket(fileno=listen(replace(ONE_NODE, n_nodes=2), "127.0.0.1", port)) as server:
        assert server.getsockname()[0] == "0.0.0.0"


def test_the_interface_of_the_site_is_used(monkeypatch):
    monkeypatch.setenv("GLOO_SOCKET_IFNAME", "lo")
    assert own_address() == "127.0.0.1"
    with pytest.raises(LaunchError, match="interface=nonet7"):
        own_address("nonet7")


PROGRAM = """
import os, sys
from staleflow.jobs.bootstrap import bootstrap_mpi, check_rendezvous, detect_here
info = detect_here()
print("at", info.launcher, info.rank, info.world_size, *bootstrap_mpi(info), flush=True)
"""


def segments():
    return {path.name for path in Path("/dev/shm").glob("sm_segment.*")}


@pytest.mark.dist
@pytest.mark.parametrize("command", [["mpirun", "--oversubscribe"], ["prterun", "--map-by", ":OVERSUBSCRIBE"]])
def test_ranks_agree_through_mpi_and_leave_nothing(command, tmp_path):
    """prterun is a bare PMIx launcher: it tells the rank, and MPI the rest."""
    pytest.importorskip("mpi4py")
    launcher = shutil.which(command[0], path=f"{Path(sys.executable).parent}:{os.environ['PATH']}")
    if launcher is None:
        pytest.skip(f"no {command[0]}")
    (tmp_path / "program.py").write_text(PROGRAM)
    before = segments()
    root = ["--allow-run-as-root"] if os.geteuid() == 0 else []
    result = subprocess.run(
        [launcher, *root, *command[1:], "-n", "2", sys.executable, tmp_path / "program.py"],
        env=os.environ | {"TMPDIR": "/tmp"},  # Open MPI's sockets need a short path
        capture_output=True,
        text=True,
        timeout=120,
    )
    assert result.returncode == 0, result.stderr
    lines = sorted(line.split() for line in result.stdout.splitlines() if line.startswith("at "))
    name = {"mpirun": "openmpi", "prterun": "pmix"}[command[0]]
    assert [line[1:4] for line in lines] == [[name, "0", "2"], [name, "1", "2"]]
    assert lines[0][4:] == lines[1][4:]
    assert not lasting(lambda: segments() - before, 60.0)
