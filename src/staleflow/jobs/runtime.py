"""The process-wide state of a rank, in one place: launcher, store, plan, groups, signals, the order of leaving.

Everything across roles goes through `Job.group(name)`: an object made from the job's store, never the default group,
which belongs to the rank's own role instance (`Job.enter_role_world`).
"""

from __future__ import annotations

import contextlib
import ctypes
import json
import os
import signal
import socket
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass, field
from datetime import timedelta
from pathlib import Path
from typing import Any

from staleflow.config import Config, ConfigError, dumps
from staleflow.jobs.bootstrap import listen
from staleflow.jobs.env import LaunchInfo
from staleflow.jobs.plan import JobPlan, Node, RankPlan, plan
from staleflow.jobs.security import private_directory
from staleflow.observe.logs import attempt_dir, next_attempt

PR_SET_PDEATHSIG = 1


class StartError(RuntimeError):
    """The job could not be put together; the message names who was missing."""


@dataclass
class Job:
    """What a rank knows about the job it belongs to."""

    config: Config
    info: LaunchInfo
    store: Any  # torch.distributed.Store
    plan: JobPlan
    attempt: int
    job_id: str
    nodes_of: tuple[dict[str, Any], ...]  # per rank: {"host", "local_rank", "pid"}
    groups: dict[str, Any] = field(default_factory=dict)
    signal: int = 0
    left_out: set[int] = field(default_factory=set)  # ranks that the job goes on without

    @property
    def me(self) -> RankPlan:
        return self.plan.ranks[self.info.rank]

    @property
    def rank(self) -> int:
        return self.info.rank

    @property
    def run_dir(self) -> Path:
        return self.config.run_dir

    @property
    def timeout(self) -> timedelta:
        return timedelta(seconds=self.config.fault.collective_timeout_s)

    def group(self, name: str, ranks: tuple[int, ...]) -> Any:
        """A Gloo group over these global ranks, which all must call this; None on others. Made once."""
        import torch.distributed as dist

        if self.rank not in ranks:
            return None
        if name not in self.groups:
            # A connection of its own: whoever makes a group late, in a thread, must not block the others' calls.
            store = dist.PrefixStore(f"group/{name}", self.store.clone())
            self.groups[name] = dist.ProcessGroupGloo(store, ranks.index(self.rank), len(ranks), self.timeout)
        return self.groups[name]

    def device_group(self, name: str, ranks: tuple[int, ...]) -> Any:
        """An NCCL group over these global ranks, each on a GPU of its own. Who waits on it keeps the time itself."""
        import torch.distributed as dist

        options = dist.ProcessGroupNCCL.Options()
        options._timeout = self.timeout  # of `abort`
        store = dist.PrefixStore(f"lane/{name}", self.store.clone())
        # torch's watchdog ends the process a minute after a peer's connection broke, and tells all others of the job to
        # end too. A group that waits blockingly has none; torch reads that from the environment, when it makes a group.
        with _set("TORCH_NCCL_BLOCKING_WAIT", "1"):
            return dist.ProcessGroupNCCL(store, ranks.index(self.rank), len(ranks), options)

    def enter_role_world(self, ranks: tuple[int, ...], device: int) -> None:
        """Make `ranks` this process's default group: FSDP2 and vLLM both take the default group for their own world."""
        import torch
        import torch.distributed as dist

        place = ranks.index(self.rank)
        os.environ.update(RANK=str(place), LOCAL_RANK=str(device), WORLD_SIZE=str(len(ranks)))
        os.environ.setdefault("MASTER_ADDR", "127.0.0.1")
        os.environ.setdefault("MASTER_PORT", "0")
        store = dist.PrefixStore(f"world/{ranks[0]}", self.store)
        backend = "cpu:gloo,cuda:nccl" if torch.cuda.is_available() else "gloo"
        dist.init_process_group(backend, store=store, rank=place, world_size=len(ranks), timeout=self.timeout)

    # ---- the store as a notice board ---------------------------------------------------------------------------------

    def post(self, key: str, value: Any) -> None:
        self.store.set(key, json.dumps(value))

    def read(self, key: str, timeout_s: float, who: str) -> Any:
        """Wait for a key. Raises StartError naming `who` was to set it."""
        try:
            self.store.wait([key], timedelta(seconds=timeout_s))
        except Exception as error:  # torch raises DistStoreError, a RuntimeError on older versions
            raise StartError(f"rank {self.rank}: {who} did not answer within {timeout_s:.0f} s ({key})") from error
        return json.loads(self.store.get(key))

    def posted(self, key: str) -> bool:
        return bool(self.store.check([key]))

    # ---- signals -----------------------------------------------------------------------------------------------------

    def watch_signals(self) -> None:
        """From now on SIGINT, SIGTERM and SIGUSR1 only set `signal`; the loops look at it between two turns."""
        for number in (signal.SIGINT, signal.SIGTERM, signal.SIGUSR1):
            signal.signal(number, self._on_signal)

    def _on_signal(self, number: int, _frame: Any) -> None:
        self.signal = number

    # ---- leaving -----------------------------------------------------------------------------------------------------

    def leave(self) -> None:
        """Post that this rank has done. Rank 0, which may hold the store, waits for the others, for a limited time."""
        with contextlib.suppress(Exception):  # the store may be gone already: then there is nobody to tell
            self.post(f"left/{self.rank}", True)
            if self.rank == 0:
                self._wait_for_others(self.config.fault.stop_grace_s / 2)

    def _wait_for_others(self, timeout_s: float) -> None:
        deadline_s = time.monotonic() + timeout_s
        for rank in range(1, self.plan.world_size):
            while not self.posted(f"left/{rank}") and self.alive(rank) and time.monotonic() < deadline_s:
                time.sleep(0.05)

    def alive(self, rank: int) -> bool:
        """Whether a rank of this node still runs; True for ranks of other nodes (their host watches them)."""
        if rank in self.left_out:
            return False
        there = self.nodes_of[rank]
        if there["host"] != self.nodes_of[self.rank]["host"]:
            return True
        return process_alive(there["pid"], there["start"])


@contextlib.contextmanager
def _set(name: str, value: str) -> Iterator[None]:
    """An environment variable for a moment."""
    before = os.environ.get(name)
    os.environ[name] = value
    try:
        yield
    finally:
        if before is None:
            del os.environ[name]
        else:
            os.environ[name] = before


def process_alive(pid: int, start: str) -> bool:
    """Whether the process with this pid *and* start time runs (a zombie does not)."""
    return _process_state(pid) == start


def process_start(pid: int) -> str:
    """The start time of a process in clock ticks, which tells it from a later one with the same pid."""
    return _process_state(pid)


def _process_state(pid: int) -> str:
    try:
        fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    except OSError:
        return "gone"
    return "zombie" if fields[0] in "ZX" else fields[19]


def die_with_parent() -> None:
    """SIGTERM when the launcher that started this process dies: no rank outlives its job."""
    ctypes.CDLL(None, use_errno=True).prctl(PR_SET_PDEATHSIG, signal.SIGTERM)


def start(config: Config, info: LaunchInfo, rendezvous: tuple[str, int], *, serves_store: bool) -> Job:
    """Meet the other ranks and agree on the plan. Raises ConfigError (wrong size) or StartError (somebody missing)."""
    import torch.distributed as dist

    timeout = timedelta(seconds=config.fault.start_timeout_s)
    host, port = rendezvous
    try:
        fd = listen(info, host, port) if serves_store else None
        raw = dist.TCPStore(
            host, port, info.world_size, serves_store, timeout, wait_for_workers=False, master_listen_fd=fd
        )
    except Exception as error:
        limit = f"{timeout.total_seconds():.0f} s"
        raise StartError(f"rank {info.rank}: no store at {host}:{port} within {limit}") from error
    os.environ.setdefault("MASTER_ADDR", host)
    os.environ.setdefault("MASTER_PORT", str(port))
    store = dist.PrefixStore(f"staleflow/{os.environ.get('TORCHELASTIC_RESTART_COUNT', '0')}", raw)
    mine = {"host": socket.gethostname(), "local_rank": info.local_rank, "pid": os.getpid()}
    store.set(f"rank/{info.rank}", json.dumps(mine | {"start": process_start(os.getpid())}))
    if info.rank == 0:
        _gather_world(store, info.world_size, config)
    world = _read_world(store, timeout, info.rank)
    job_plan = plan(config, tuple(Node(**node) for node in world["nodes"]))
    return Job(config, info, store, job_plan, world["attempt"], world["job_id"], tuple(world["ranks"]))


def _gather_world(store: Any, size: int, config: Config) -> None:
    """Rank 0: who runs where; tells everybody, with the attempt's number."""
    ranks = []
    for rank in range(size):
        try:
            store.wait([f"rank/{rank}"], timedelta(seconds=config.fault.start_timeout_s))
        except Exception as error:
            raise StartError(f"rank 0: rank {rank} of {size} did not appear") from error
        ranks.append(json.loads(store.get(f"rank/{rank}")))
    nodes: list[Node] = []
    for there in ranks:
        if there["local_rank"] == 0:
            nodes.append(Node(there["host"], 0))
        nodes[-1] = Node(nodes[-1].name, nodes[-1].ranks + 1)
    attempt = _open_attempt(config.run_dir)
    job_id = f"{os.getpid():x}{time.time_ns() & 0xFFFFFF:06x}"
    world = {"nodes": [asdict(n) for n in nodes], "ranks": ranks, "attempt": attempt, "job_id": job_id}
    store.set("world", json.dumps(world))


def _read_world(store: Any, timeout: timedelta, rank: int) -> dict[str, Any]:
    try:
        store.wait(["world"], timeout)
    except Exception as error:
        limit = f"{timeout.total_seconds():.0f} s"
        raise StartError(f"rank {rank}: rank 0 did not publish the world within {limit}") from error
    return dict(json.loads(store.get("world")))


def _open_attempt(run_dir: Path) -> int:
    """Number and folder of this attempt at the run: the first free one."""
    private_directory(run_dir)
    attempt = next_attempt(run_dir)
    attempt_dir(run_dir, attempt).mkdir()
    return attempt


def write_run_files(job: Job) -> None:
    """Rank 0: the resolved config and the plan, for people and tools."""
    (job.run_dir / "config.toml").write_text(dumps(job.config))
    (job.run_dir / "plan.json").write_text(json.dumps(job.plan.to_json(), indent=1))


def check_shared_memory(job_plan: JobPlan, node: int, store_bytes: int, shm: Path = Path("/dev/shm")) -> None:
    """Refuse before a model is loaded when /dev/shm of this node is too small. Raises ConfigError."""
    needed = job_plan.shm_bytes(node) + store_bytes
    stat = os.statvfs(shm)
    free = stat.f_bavail * stat.f_frsize
    if free < needed:
        raise ConfigError(
            f"{shm} on {job_plan.nodes[node].name}: {free >> 20} MiB free, {(needed >> 20) + 1} MiB needed for rings, "
            "arena and parameter store; enlarge it (docker: --shm-size, mount -o remount,size=…) or lower "
            "staleflow's rollout.max_tokens, staleness.batch_groups or staleness.eta"
        )


def excepthook(job: Job, tell: Callable[[str], None]) -> Callable[..., None]:
    """An exception that ends this rank is told to its host first."""

    def hook(kind: type[BaseException], value: BaseException, trace: Any) -> None:
        tell(f"{kind.__name__}: {value}")
        sys.__excepthook__(kind, value, trace)

    return hook
