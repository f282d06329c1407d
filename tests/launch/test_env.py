"""Launcher detection against environments recorded from the launchers themselves (tests/launch/environments)."""

import json
from pathlib import Path

import pytest

from staleflow.jobs.env import LaunchError, LaunchInfo, detect, port_of_job
from staleflow.jobs.nodelist import expand_counts, expand_node_list

RECORDS = Path(__file__).parent / "environments"


def recorded(name: str) -> list[dict[str, str]]:
    """The environments of all ranks of a recorded job, sorted by file order (which is rank order)."""
    record = json.loads((RECORDS / f"{name}.json").read_text())
    return [{**record["common"], **own} for own in record["ranks"]]


def two_by_two(launcher: str, rank: int, rendezvous: tuple[str, int] | None, job_id: str, **more: object) -> LaunchInfo:
    return LaunchInfo(launcher, rank, 4, rank % 2, 2, rank // 2, 2, rendezvous, job_id, **more)


@pytest.mark.parametrize(
    ("name", "job_id"), [("slurm_srun_direct", "1"), ("slurm_pmi2", "2"), ("slurm_pmix", "3"), ("sbatch_srun", "4")]
)
def test_every_kind_of_slurm_step_gives_the_same_place(name, job_id):
    for rank, environ in enumerate(recorded(name)):
        assert detect(environ) == two_by_two("slurm", rank, ("node1", port_of_job(job_id)), job_id)


@pytest.mark.parametrize("name", ["sbatch_torchrun", "sbatch_torchrun_static"])
def test_torchrun_inside_slurm_wins_over_the_step_that_carries_its_agents(name):
    for rank, environ in enumerate(recorded(name)):
        rendezvous = ("node1", int(environ["MASTER_PORT"]))
        assert detect(environ) == two_by_two("torchrun", rank, rendezvous, "5", agent_store=True)


@pytest.mark.parametrize(
    ("name", "launcher"), [("sbatch_mpirun", "openmpi"), ("sbatch_hydra", "mpich"), ("sbatch_mpich", "mpich")]
)
def test_mpi_inside_slurm_wins_over_the_step_of_its_daemons(name, launcher):
    for rank, environ in enumerate(recorded(name)):
        info = detect(environ)
        assert (info.launcher, info.rank, info.world_size) == (launcher, rank, 4)
        assert (info.local_rank, info.local_world_size, info.rendezvous) == (rank % 2, 2, None)


@pytest.mark.parametrize(
    ("name", "launcher"),
    [
        ("torchrun_laptop", "torchrun"),
        ("openmpi_laptop", "openmpi"),
        ("mpich_laptop", "mpich"),
        ("impi_laptop", "mpich"),
    ],
)
def test_one_node_without_a_scheduler(name, launcher):
    ranks = recorded(name)
    assert ranks
    for environ in ranks:
        info = detect(environ)
        assert (info.launcher, info.world_size, info.local_world_size, info.n_nodes) == (launcher, 2, 2, 1)
        assert info.rank == info.local_rank
    assert (detect(ranks[0]).rendezvous is not None) == (launcher == "torchrun")


def test_no_launcher_is_a_world_of_one_that_may_start_the_ranks_itself():
    assert detect({"PATH": "/bin"}).launcher == "none"


def test_an_interactive_step_of_one_task_is_no_rank():
    step = {**recorded("slurm_srun_direct")[0], "SLURM_STEP_NUM_TASKS": "1", "SLURM_STEP_TASKS_PER_NODE": "1"}
    step.update(SLURM_NTASKS="1", SLURM_NTASKS_PER_NODE="1", SLURM_JOB_NUM_NODES="1", SLURM_STEP_NODELIST="node1")
    assert detect(step).launcher == "none"


def changed(name: str, rank: int = 1, remove: str = "", **values: str) -> dict[str, str]:
    environ = {**recorded(name)[rank], **values}
    return {key: value for key, value in environ.items() if key != remove}


ALONE_IN_SLURM = {
    "SLURM_STEP_NUM_TASKS": "1",
    "SLURM_STEP_TASKS_PER_NODE": "1",
    "SLURM_STEP_NODELIST": "node1",
    "SLURM_NTASKS": "1",
}
ALONE_IN_MPI = {"OMPI_COMM_WORLD_SIZE": "1", "OMPI_COMM_WORLD_LOCAL_SIZE": "1"}
LOOPBACK = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "1234"}
FOREIGN = {"MASTER_ADDR": "gpu7", "MASTER_PORT": "1234"}

# what is wrong: (the key that the error must name, the environment)
REFUSED = {
    "leaked RANK in a step": ("RANK", changed("slurm_srun_direct", RANK="0", WORLD_SIZE="1")),
    "leaked WORLD_SIZE under mpirun": ("WORLD_SIZE", changed("openmpi_laptop", WORLD_SIZE="8")),
    "pmi2 against Slurm": ("PMI_RANK", changed("slurm_pmi2", PMI_RANK="0")),
    "mpirun torchrun": ("OMPI_COMM_WORLD_SIZE", changed("torchrun_laptop", OMPI_COMM_WORLD_SIZE="4")),
    "run in the batch shell": ("world size", recorded("sbatch_shell")[0]),
    "srun -n1 in a larger job": ("world size", changed("slurm_srun_direct", 0, SLURM_NODEID="0", **ALONE_IN_SLURM)),
    "mpirun -n 1 in a larger job": ("world size", changed("sbatch_mpirun", 0, **ALONE_IN_MPI)),
    "a torchrun world per node": ("GROUP_WORLD_SIZE", changed("sbatch_torchrun", GROUP_WORLD_SIZE="1")),
    "localhost for two nodes": ("MASTER_ADDR", changed("sbatch_torchrun", MASTER_ADDR="localhost")),
    "loopback for two nodes": ("MASTER_ADDR", changed("slurm_srun_direct", **LOOPBACK)),
    "a node of another job": ("MASTER_ADDR", changed("slurm_srun_direct", **FOREIGN)),
    "port that is no number": ("MASTER_PORT", changed("torchrun_laptop", MASTER_PORT="http")),
    "port out of range": ("MASTER_PORT", changed("torchrun_laptop", MASTER_PORT="70000")),
    "address without port": ("MASTER_PORT", changed("torchrun_laptop", remove="MASTER_PORT")),
    "no local rank, torchrun": ("LOCAL_RANK", changed("torchrun_laptop", remove="LOCAL_RANK")),
    "no local rank, Slurm": ("SLURM_LOCALID", changed("slurm_srun_direct", remove="SLURM_LOCALID")),
    "no local rank, mpirun": (
        "OMPI_COMM_WORLD_LOCAL_RANK",
        changed("openmpi_laptop", remove="OMPI_COMM_WORLD_LOCAL_RANK"),
    ),
    "no local rank, mpiexec": ("MPI_LOCALRANKID", changed("mpich_laptop", 0, remove="MPI_LOCALRANKID")),
    "bare PMIx tells no size": ("WORLD_SIZE", {"PMIX_RANK": "1", "PRTE_LAUNCHED": "1"}),
    "RANK alone": ("WORLD_SIZE", {"RANK": "0"}),
    "rank outside the world": ("RANK", changed("torchrun_laptop", RANK="2")),
}


@pytest.mark.parametrize(("key", "environ"), REFUSED.values(), ids=REFUSED.keys())
def test_an_environment_that_cannot_be_right_is_refused_with_key_value_and_remedy(key, environ):
    with pytest.raises(LaunchError) as caught:
        detect(environ)
    assert caught.value.key == key
    assert caught.value.remedy
    assert "\n" not in str(caught.value)


def test_values_that_agree_are_no_conflict():
    exported = changed(
        "slurm_srun_direct", 3, RANK="3", WORLD_SIZE="4", LOCAL_RANK="1", MASTER_ADDR="node1-ib0", MASTER_PORT="29500"
    )
    assert detect(exported) == two_by_two("slurm", 3, ("node1-ib0", 29500), "1")


@pytest.mark.parametrize(
    ("text", "names"),
    [
        ("node1", ["node1"]),
        ("node[01-03,7]", ["node01", "node02", "node03", "node7"]),
        ("a[1-2]-ib,login", ["a1-ib", "a2-ib", "login"]),
        ("r[1-2]n[08-10]", ["r1n08", "r1n09", "r1n10", "r2n08", "r2n09", "r2n10"]),
        ("", []),
    ],
)
def test_node_lists(text, names):
    assert expand_node_list(text) == names


@pytest.mark.parametrize("text", ["node[1-", "node[a-b]", "node[1-2]x[-]"])
def test_broken_node_lists_are_refused(text):
    with pytest.raises(LaunchError):
        expand_node_list(text)


def test_task_counts():
    assert expand_counts("2(x3),1") == [2, 2, 2, 1]
    with pytest.raises(LaunchError):
        expand_counts("two")


def test_ports_of_jobs_stay_below_the_ephemeral_range():
    assert all(20000 <= port_of_job(str(job)) < 30000 for job in (0, 1, 9999, 10000, 123456789))
    assert port_of_job("41") != port_of_job("42")
