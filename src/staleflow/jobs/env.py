"""Who am I? Rank, size and meeting place of this process, read from the environment of whatever launcher started it.

`detect` is a pure function of the environment: no torch, no network, no Slurm command. Launchers nest (torchrun in a
Slurm step, mpirun in an allocation), so the *innermost* one names the rank; the outer one is only used to see that the
inner world is not a silent fragment of a larger job, which would otherwise train N separate models without an error.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Literal

from staleflow.jobs.nodelist import LaunchError, expand_counts, expand_node_list

__all__ = ["LaunchError", "LaunchInfo", "Launcher", "detect", "port_of_job"]

Launcher = Literal["torchrun", "slurm", "openmpi", "mpich", "pmix", "none"]

# Below Linux's ephemeral ports (32768 and up), so that no outgoing connection can sit on a port derived from a job id.
FIRST_PORT = 20000
N_PORTS = 10000

LOOPBACK = re.compile(r"^(localhost(\..*)?|127\.\d+\.\d+\.\d+|::1|0\.0\.0\.0|::)$", re.IGNORECASE)
ADDRESS = re.compile(r"^(\d+\.\d+\.\d+\.\d+|\[?[0-9a-fA-F]*:[0-9a-fA-F:.]*\]?)$")


@dataclass(frozen=True)
class LaunchInfo:
    """This process's place in the job. `rendezvous` is None where it has yet to be agreed on (`bootstrap_mpi`)."""

    launcher: Launcher
    rank: int
    world_size: int
    local_rank: int
    local_world_size: int
    node_rank: int | None
    n_nodes: int | None
    rendezvous: tuple[str, int] | None
    job_id: str | None
    agent_store: bool = False  # torchrun's agent already serves a TCPStore at `rendezvous`


def detect(environ: Mapping[str, str]) -> LaunchInfo:
    """Read this process's place from a launcher's environment variables.

    Raises:
        LaunchError: two launchers disagree, the world is a fragment of a larger allocation, a variable is missing or
            not a number, or MASTER_ADDR cannot be the address of rank 0.
    """
    for names, read in READERS:
        if names(environ):
            info = read(environ)
            _check_agreement(info, environ)
            _check_fragment(info, environ)
            _check_master(info, environ)
            return info
    _check_fragment(ALONE, environ)
    return ALONE


ALONE = LaunchInfo("none", 0, 1, 0, 1, 0, 1, None, None)


# ---- one reader per launcher, innermost first --------------------------------------------------------------------


def _torchrun(env: Mapping[str, str]) -> LaunchInfo:
    rank, size, local_rank, local_size = _place(env, "RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "torchrun")
    n_nodes = _optional_number(env, "GROUP_WORLD_SIZE")
    if n_nodes is None and local_size == size:
        n_nodes = 1
    node_rank = _optional_number(env, "GROUP_RANK")
    return LaunchInfo(
        "torchrun",
        rank,
        size,
        local_rank,
        local_size,
        node_rank,
        n_nodes,
        rendezvous=_master(env, None),
        job_id=env.get("SLURM_JOB_ID") or env.get("TORCHELASTIC_RUN_ID"),
        agent_store=env.get("TORCHELASTIC_USE_AGENT_STORE") == "True",
    )


def _openmpi(env: Mapping[str, str]) -> LaunchInfo:
    world = "OMPI_COMM_WORLD"
    place = _place(env, f"{world}_RANK", f"{world}_SIZE", f"{world}_LOCAL_RANK", f"{world}_LOCAL_SIZE", "mpirun")
    return _mpi("openmpi", place, env)


def _mpich(env: Mapping[str, str]) -> LaunchInfo:
    return _mpi("mpich", _place(env, "PMI_RANK", "PMI_SIZE", "MPI_LOCALRANKID", "MPI_LOCALNRANKS", "mpiexec"), env)


def _pmix(env: Mapping[str, str]) -> LaunchInfo:
    # A bare PMIx server tells the rank only; the rest is asked from MPI (`ask_mpi`) or set by the site.
    return _mpi("pmix", _place(env, "PMIX_RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "mpirun"), env)


def _mpi(launcher: Launcher, place: tuple[int, int, int, int], env: Mapping[str, str]) -> LaunchInfo:
    rank, size, local_rank, local_size = place
    one_node = local_size == size
    return LaunchInfo(
        launcher,
        rank,
        size,
        local_rank,
        local_size,
        0 if one_node else None,
        1 if one_node else None,
        rendezvous=_master(env, None),
        job_id=env.get("SLURM_JOB_ID") or env.get("PMIX_NAMESPACE"),
    )


def _slurm(env: Mapping[str, str]) -> LaunchInfo:
    """A task of a Slurm step. Sizes come from the step: a job may have more tasks than the step has."""
    job_id = _required(env, "SLURM_JOB_ID", "srun")
    size = _number(env, "SLURM_STEP_NUM_TASKS", "srun")
    if size == 1 and _slurm_tasks(env) <= 1:  # `srun --pty bash`: a place to start a job from, not a rank of one
        return ALONE
    nodes = expand_node_list(_required(env, "SLURM_STEP_NODELIST", "srun"))
    node_rank = _number(env, "SLURM_NODEID", "srun")
    tasks = expand_counts(_required(env, "SLURM_STEP_TASKS_PER_NODE", "srun"))
    if len(tasks) != len(nodes) or not 0 <= node_rank < len(tasks):
        raise LaunchError(
            "SLURM_STEP_TASKS_PER_NODE",
            env["SLURM_STEP_TASKS_PER_NODE"],
            f"does not fit the {len(nodes)} nodes of the step or node {node_rank}",
            "start the ranks with srun and leave its variables alone",
        )
    rank, local_rank = _number(env, "SLURM_PROCID", "srun"), _number(env, "SLURM_LOCALID", "srun")
    return LaunchInfo(
        "slurm",
        rank,
        size,
        local_rank,
        tasks[node_rank],
        node_rank,
        len(nodes),
        rendezvous=_master(env, (nodes[0], port_of_job(job_id))),
        job_id=job_id,
    )


def _is_torchrun(env: Mapping[str, str]) -> bool:
    if "OMPI_COMM_WORLD_RANK" in env or "PMIX_RANK" in env or _slurm_step(env) or "PMI_RANK" in env:
        return "TORCHELASTIC_RUN_ID" in env  # else RANK is an export on top of the real launcher: see _check_agreement
    return "RANK" in env or "WORLD_SIZE" in env


def _slurm_step(env: Mapping[str, str]) -> bool:
    """Whether this process is a task of a step, not the batch shell (which has a SLURM_PROCID of 0, but no step)."""
    return "SLURM_PROCID" in env and env.get("SLURM_STEP_ID", "batch").isdigit() and "SLURM_STEP_NUM_TASKS" in env


def _is_mpich(env: Mapping[str, str]) -> bool:
    # Slurm's own pmi2 plugin sets PMI_RANK too: that is the step's rank, not a world inside it.
    return "PMI_RANK" in env and not (_slurm_step(env) and env.get("SLURM_MPI_TYPE", "none") != "none")


def _is_pmix(env: Mapping[str, str]) -> bool:
    return "PMIX_RANK" in env and (not _slurm_step(env) or "PRTE_LAUNCHED" in env)


READERS = (
    (_is_torchrun, _torchrun),
    (lambda env: "OMPI_COMM_WORLD_RANK" in env or "OMPI_COMM_WORLD_SIZE" in env, _openmpi),
    (_is_mpich, _mpich),
    (_is_pmix, _pmix),
    (_slurm_step, _slurm),
)


# ---- checks ------------------------------------------------------------------------------------------------------


def _check_agreement(info: LaunchInfo, env: Mapping[str, str]) -> None:
    """Variables of another launcher that claim to describe this very process must say the same."""
    claims = [("RANK", info.rank), ("WORLD_SIZE", info.world_size), ("LOCAL_RANK", info.local_rank)]
    if info.launcher == "torchrun":
        claims = [("OMPI_COMM_WORLD_RANK", info.rank), ("OMPI_COMM_WORLD_SIZE", info.world_size)]
        if "OMPI_COMM_WORLD_SIZE" not in env:
            claims = [("PMI_RANK", info.rank), ("PMI_SIZE", info.world_size)] if _is_mpich(env) else []
    elif info.launcher == "slurm":
        claims += [("PMI_RANK", info.rank), ("PMI_SIZE", info.world_size), ("PMIX_RANK", info.rank)]
    elif info.launcher == "openmpi":
        claims += [("PMIX_RANK", info.rank)]
    for key, expected in claims:
        if key in env and env[key] != str(expected):
            raise LaunchError(
                key,
                env[key],
                f"{info.launcher} says {expected} (rank {info.rank} of {info.world_size}): they disagree",
                f"start the ranks with one launcher only, and `unset {key}` in the script around it",
            )


def _check_fragment(info: LaunchInfo, env: Mapping[str, str]) -> None:
    """A world of one in a larger allocation, or one world per node, is N separate jobs that nobody asked for."""
    agents = int(env.get("GROUP_WORLD_SIZE", "1")) if info.launcher == "torchrun" else None
    if "SLURM_JOB_ID" not in env or (info.launcher == "slurm" and info.world_size > 1):
        return
    tasks, nodes = _slurm_tasks(env), int(env.get("SLURM_JOB_NUM_NODES") or 1)
    if agents is not None and (agents < nodes or (_slurm_step(env) and agents != int(env["SLURM_STEP_NUM_TASKS"]))):
        raise LaunchError(
            "GROUP_WORLD_SIZE",
            agents,
            f"torchrun joined {agents} node(s), Slurm gave {nodes} with {tasks} task(s)",
            "use `srun --nodes=N --ntasks=N --ntasks-per-node=1 torchrun --nnodes=N --rdzv-backend=c10d "
            "--rdzv-endpoint=FIRST_NODE:PORT` (launch/slurm/torchrun.sbatch does)",
        )
    if info.world_size == 1 and agents is None and max(tasks, nodes) > 1:
        raise LaunchError(
            "world size",
            1,
            f"this process is alone, but Slurm gave {nodes} node(s), {tasks} task(s)",
            "start it with `srun` (one task per rank), or `unset SLURM_JOB_ID` if it is meant to be alone",
        )


def _slurm_tasks(env: Mapping[str, str]) -> int:
    """Tasks of the allocation as far as this environment tells (a step overwrites SLURM_NTASKS with its own)."""
    per_node = env.get("SLURM_NTASKS_PER_NODE", "1")
    nodes = int(env.get("SLURM_JOB_NUM_NODES") or 1)
    return max(int(env.get("SLURM_NTASKS") or 1), nodes * (int(per_node) if per_node.isdigit() else 1))


def _check_master(info: LaunchInfo, env: Mapping[str, str]) -> None:
    if info.rendezvous is None or info.n_nodes == 1:
        return
    host = info.rendezvous[0]
    if LOOPBACK.match(host):
        raise LaunchError(
            "MASTER_ADDR",
            host,
            f"each of the {info.n_nodes or 'several'} nodes would meet only itself there",
            "set it to the name of the first node, or `unset MASTER_ADDR`",
        )
    nodes = expand_node_list(env.get("SLURM_JOB_NODELIST", ""))
    if nodes and not ADDRESS.match(host) and not any(_same_host(host, node) for node in nodes):
        raise LaunchError(
            "MASTER_ADDR",
            host,
            f"is none of this job's {len(nodes)} nodes ({nodes[0]} … {nodes[-1]})",
            f"set it to {nodes[0]}, or `unset MASTER_ADDR`",
        )


def _same_host(name: str, node: str) -> bool:
    """`node1.cluster` and the high-speed alias `node1-ib0` are node1."""
    return re.match(rf"{re.escape(node.split('.')[0])}($|[.-])", name) is not None


# ---- values ------------------------------------------------------------------------------------------------------


def _required(env: Mapping[str, str], key: str, launcher: str) -> str:
    value = env.get(key, "")
    if not value:
        raise LaunchError(key, "(missing)", f"{launcher} sets it, and this process has not got it", _pass_on(launcher))
    return value


def _pass_on(launcher: str) -> str:
    return f"start the ranks directly with {launcher}, and let no wrapper drop its variables"


def _number(env: Mapping[str, str], key: str, launcher: str) -> int:
    value = _required(env, key, launcher)
    if not value.isdigit():
        raise LaunchError(key, value, "is not a whole number", _pass_on(launcher))
    return int(value)


def _optional_number(env: Mapping[str, str], key: str) -> int | None:
    return _number(env, key, "torchrun") if key in env else None


def _place(
    env: Mapping[str, str], rank_key: str, size_key: str, local_rank_key: str, local_size_key: str, launcher: str
) -> tuple[int, int, int, int]:
    rank, size = _number(env, rank_key, launcher), _number(env, size_key, launcher)
    local_rank, local_size = _number(env, local_rank_key, launcher), _number(env, local_size_key, launcher)
    limits = ((rank_key, rank, size_key, size), (local_rank_key, local_rank, local_size_key, local_size))
    for key, value, end_key, end in limits:
        if value >= end:
            raise LaunchError(key, value, f"must be smaller than {end_key}={end}", _pass_on(launcher))
    return rank, size, local_rank, local_size


def _master(env: Mapping[str, str], default: tuple[str, int] | None) -> tuple[str, int] | None:
    """MASTER_ADDR and MASTER_PORT where given, each replacing its half of the default."""
    host = env.get("MASTER_ADDR") or (default and default[0])
    port = _number(env, "MASTER_PORT", "the launcher") if env.get("MASTER_PORT") else default and default[1]
    if host and not port:
        raise LaunchError("MASTER_PORT", "(missing)", f"MASTER_ADDR={host} is given without it", "set both or neither")
    if port and not 0 < port < 65536:
        raise LaunchError("MASTER_PORT", port, "is no TCP port", "choose one in 1024..65535, or `unset MASTER_PORT`")
    return (host, port) if host and port else None


def port_of_job(job_id: str) -> int:
    """A port that all ranks can compute. Two jobs on a node differ unless their ids are a multiple of N_PORTS apart."""
    digits = re.sub(r"\D", "", job_id) or "0"
    return FIRST_PORT + int(digits) % N_PORTS
