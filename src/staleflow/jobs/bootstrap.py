"""From a place in the job to a meeting place: an address and a port that rank 0 owns and that all ranks know.

torchrun and Slurm give (or imply) it; MPI launchers do not, so there rank 0 chooses and MPI itself tells the others.
MPI is used for nothing else and is finalised at once: it then leaves no shared memory or progress thread behind.
"""

from __future__ import annotations

import json
import os
import random
import socket
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import psutil

from staleflow.jobs.env import FIRST_PORT, LOOPBACK, N_PORTS, LaunchError, LaunchInfo, detect


def detect_here(environ: Mapping[str, str] = os.environ) -> LaunchInfo:
    """`detect` for this process; a bare PMIx server, which tells only the rank, is asked through MPI."""
    bare_pmix = "PMIX_RANK" in environ and not {"OMPI_COMM_WORLD_SIZE", "SLURM_STEP_NUM_TASKS", "WORLD_SIZE"} & set(
        environ
    )
    return detect({**environ, **_ask_mpi()} if bare_pmix else environ)


def _ask_mpi() -> dict[str, str]:
    mpi = _mpi()
    world = mpi.COMM_WORLD
    node = world.Split_type(mpi.COMM_TYPE_SHARED)
    return {
        "WORLD_SIZE": str(world.size),
        "LOCAL_RANK": str(node.rank),
        "LOCAL_WORLD_SIZE": str(node.size),
    }


def bootstrap_mpi(info: LaunchInfo, interface: str | None = None) -> tuple[str, int]:
    """Agree on rank 0's address and a free port of it, through MPI. A collective of all ranks.

    Raises:
        LaunchError: mpi4py is missing, or MPI sees another world than the launcher announced (a silent singleton).
    """
    host, port = json.loads(broadcast_mpi(info, lambda: json.dumps(_choose(info, interface)).encode()))
    return host, port


def broadcast_mpi(info: LaunchInfo, payload: Any) -> bytes:
    """Bytes that rank 0 computes by `payload()`, on every rank; then MPI is over for this process."""
    mpi = _mpi()
    world = mpi.COMM_WORLD
    if (world.rank, world.size) != (info.rank, info.world_size):
        seen = f"rank {world.rank} of {world.size}"
        mpi.Finalize()
        raise LaunchError(
            "MPI world",
            seen,
            f"{info.launcher} started rank {info.rank} of {info.world_size}, but the MPI library sees another world",
            "mpi4py must use the MPI whose mpirun started the job (`python -m mpi4py --mpi-lib-version` names it)",
        )
    answer: bytes = world.bcast(payload() if info.rank == 0 else None, root=0)
    mpi.Finalize()
    return answer


def _mpi() -> Any:
    if "OMPI_FILE_LOCATION" in os.environ:  # Open MPI's segments: where mpirun cleans up after a kill, not in /dev/shm
        session = str(Path(os.environ["OMPI_FILE_LOCATION"]).parent)
        os.environ.setdefault("OMPI_MCA_btl_sm_backing_directory", session)
    try:
        from mpi4py import MPI
    except (ImportError, RuntimeError) as error:
        raise LaunchError(
            "mpi4py",
            "(not usable)",
            f"the job was started by an MPI launcher, and `from mpi4py import MPI` says: {error}",
            "install it (`pip install 'staleflow[mpi]'`, or build it against the site's MPI), or start with torchrun",
        ) from error
    return MPI


def _choose(info: LaunchInfo, interface: str | None) -> tuple[str, int]:
    host = "127.0.0.1" if info.n_nodes == 1 else own_address(interface)
    return host, free_port(host)


def own_address(interface: str | None = None) -> str:
    """An IPv4 address of this node that other nodes reach: the interface's (GLOO_SOCKET_IFNAME) or the host name's.

    Raises:
        LaunchError: no such interface, or the host name resolves to the loopback interface only.
    """
    interface = interface or os.environ.get("GLOO_SOCKET_IFNAME")  # a site names it once, for Gloo and for us
    if interface:
        return address_of_interface(interface.split(",")[0])
    name = socket.gethostname()
    try:
        found = [entry[4][0] for entry in socket.getaddrinfo(name, None, socket.AF_INET)]
    except socket.gaierror:
        found = []
    reachable = [str(address) for address in found if not LOOPBACK.match(str(address))]
    candidates = reachable or [a for i in sorted(psutil.net_if_addrs()) if (a := _ipv4(i)) and not LOOPBACK.match(a)]
    if not candidates:
        raise LaunchError(
            "host name",
            name,
            "has no address that another node could reach",
            "name the network interface of the job (job.interface, or launch/sites/*.env)",
        )
    return candidates[0]


def address_of_interface(interface: str) -> str:
    """The IPv4 address of a network interface of this node."""
    address = _ipv4(interface)
    if address is None:
        known = ", ".join(sorted(psutil.net_if_addrs()))
        raise LaunchError("interface", interface, "has no IPv4 address here", f"choose one of: {known}")
    return address


def _ipv4(interface: str) -> str | None:
    entries = psutil.net_if_addrs().get(interface, [])
    return next((entry.address for entry in entries if entry.family == socket.AF_INET), None)


def free_port(host: str, tries: int = 64) -> int:
    """A port of ours (below the ephemeral ones) on which nobody listens at `host` now."""
    for port in random.SystemRandom().sample(range(FIRST_PORT, FIRST_PORT + N_PORTS), tries):
        if port_is_free(host, port):
            return port
    raise LaunchError(
        "port", f"{FIRST_PORT}..{FIRST_PORT + N_PORTS - 1}", f"{tries} of them are in use on {host}", "see `ss -tlnp`"
    )


def port_is_free(host: str, port: int) -> bool:
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    with socket.socket(family, socket.SOCK_STREAM) as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)  # a port in TIME_WAIT will do
        try:
            probe.bind((host, port))
            probe.listen()  # SO_REUSEADDR lets two sockets bind, but only one listen
        except OSError:
            return False
    return True


def listen(info: LaunchInfo, host: str, port: int) -> int:
    """Rank 0: a descriptor that listens at the meeting place, on that address only; for the store to take over.

    Where the node's own name is its loopback address (as /etc/hosts of some distributions has it), on all addresses.
    """
    family, _, _, _, address = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0]
    if LOOPBACK.match(str(address[0])) and info.n_nodes != 1:
        return socket.create_server(("", port), family=family).detach()
    return socket.create_server(address[:2], family=family).detach()


def check_rendezvous(info: LaunchInfo) -> None:
    """At every rank, before anything waits there: the meeting place resolves, and is rank 0's own and free.

    Raises:
        LaunchError: MASTER_ADDR does not resolve, is not an address of rank 0's node, or the port is taken.
    """
    if info.rendezvous is None:
        return
    host, port = info.rendezvous
    try:
        address = str(socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0][4][0])
    except socket.gaierror as error:
        raise LaunchError(
            "MASTER_ADDR", host, f"does not resolve ({error.strerror})", "use an IP address of rank 0's node"
        ) from error
    if info.rank != 0 or info.agent_store:
        return
    own = {entry.address for entries in psutil.net_if_addrs().values() for entry in entries}
    if address not in own and not address.startswith("127."):
        raise LaunchError(
            "MASTER_ADDR",
            host,
            f"is {address}, which is no address of rank 0's node {socket.gethostname()}",
            "set it to that node, or `unset MASTER_ADDR`",
        )
    if not port_is_free(address, port):
        raise LaunchError(
            "MASTER_PORT",
            port,
            f"is in use on {host}",
            "end the program that holds it (`ss -tlnp`), or set another MASTER_PORT",
        )
