"""Run a Python program that nobody has read, with limits on time, memory, output and processes, and without a network.

Where the kernel allows user namespaces, the program is process 1 of its own process, network and IPC namespaces: it
reaches no network, sees no other process, and whatever it started dies with it. Elsewhere the limits alone hold.

It is not a jail for an attacker: the program may read every file that the user may read.
"""

from __future__ import annotations

import contextlib
import ctypes
import os
import resource
import select
import signal
import sys
import tempfile
from dataclasses import dataclass, replace
from pathlib import Path

import psutil

_PR_SET_PDEATHSIG = 1
_NAMESPACES = 0x10000000 | 0x20000000 | 0x40000000 | 0x08000000  # user, pid, net, ipc
_PROCESSES = 64
_COULD_NOT_START = 125

_libc = ctypes.CDLL(None, use_errno=True)


@dataclass(frozen=True)
class Limits:
    """`wall_s` of time (as much CPU time), `memory_bytes` of address space, `output_bytes` per file written.

    `isolate` is "auto" (namespaces where they can be had) or "must" (RuntimeError without).
    """

    wall_s: float = 4.0
    memory_bytes: int = 512 << 20
    output_bytes: int = 1 << 20
    isolate: str = "auto"

    def __post_init__(self) -> None:
        if self.isolate not in ("auto", "must"):
            raise ValueError(f"reward.options.isolate: {self.isolate!r}; one of auto, must")

    def within(self, seconds: float) -> Limits:
        return replace(self, wall_s=min(self.wall_s, seconds))


@dataclass(frozen=True)
class Outcome:
    """`ok` when the program ended by itself with exit code 0; `why` says what else happened."""

    ok: bool
    output: bytes
    why: str


def run_python(program: str, given: str, limits: Limits) -> Outcome:
    """Run `program` with `given` on its standard input. Single-threaded callers only: it forks.

    Raises RuntimeError when the process could not be set up (which says nothing about the program).
    """
    with tempfile.TemporaryDirectory(prefix="staleflow-code-", ignore_cleanup_errors=True) as folder:
        home = Path(folder)
        (home / "main.py").write_text(program, encoding="utf-8", errors="surrogateescape")
        (home / "in").write_text(given, encoding="utf-8", errors="surrogateescape")
        others = {process.pid for process in _below(os.getpid())}
        keeper = os.fork()
        if keeper == 0:
            _keep(home, limits)
        code = _wait(keeper, limits.wall_s)
        # What fled from its parent has come to us, where we are a subreaper, as a reward worker is.
        fled = [process for process in _below(os.getpid()) if process.pid not in others]
        _kill(fled)
        psutil.wait_procs(fled, timeout=2.0)
        if code == _COULD_NOT_START:
            raise RuntimeError(f"code sandbox: {(home / 'err').read_text(errors='replace')[-300:]}")
        output = (home / "out").read_bytes() if (home / "out").exists() else b""
        why = "timed out" if code is None else "" if code == 0 else f"exit code {code}"
        return Outcome(code == 0, output, why)


def _wait(keeper: int, wall_s: float) -> int | None:
    """The program's exit code, or None when it had to be killed."""
    handle = os.pidfd_open(keeper)
    try:
        ended = bool(select.select([handle], [], [], wall_s)[0])
    finally:
        os.close(handle)
        _kill([psutil.Process(keeper), *_below(keeper)])
    _, status = os.waitpid(keeper, 0)
    return os.waitstatus_to_exitcode(status) if ended else None


def _below(pid: int) -> list[psutil.Process]:
    found: list[psutil.Process] = psutil.Process(pid).children(recursive=True)
    return found


def _kill(processes: list[psutil.Process]) -> None:
    for process in processes:
        with contextlib.suppress(psutil.NoSuchProcess):
            process.kill()


def _keep(home: Path, limits: Limits) -> None:
    """In the forked child: isolate, start the program as a child of its own, and leave with its exit code."""
    try:
        _die_with_parent()
        os.setsid()
        _redirect(home)
        isolated = _libc.unshare(_NAMESPACES) == 0
        if not isolated and limits.isolate == "must":
            raise OSError(ctypes.get_errno(), "namespaces are not allowed here (reward.options.isolate = 'must')")
        program = os.fork()
        if program == 0:
            _become_program(home, limits, isolated)
        _, status = os.waitpid(program, 0)
        code = os.waitstatus_to_exitcode(status)
        os._exit(code if code >= 0 else 128 - code)
    except BaseException as error:
        os.write(2, f"{error}\n".encode())
        os._exit(_COULD_NOT_START)


def _become_program(home: Path, limits: Limits, isolated: bool) -> None:
    try:
        _die_with_parent()
        _limit(limits, isolated)
        environment = {
            "PATH": "/usr/local/bin:/usr/bin:/bin",
            "HOME": str(home),
            "LANG": "C.UTF-8",
            "OMP_NUM_THREADS": "1",
        }
        os.closerange(3, 1 << 16)
        os.execve(sys.executable, [sys.executable, "-I", "main.py"], environment)
    except BaseException as error:
        os.write(2, f"{error}\n".encode())
        os._exit(_COULD_NOT_START)


def _limit(limits: Limits, isolated: bool) -> None:
    cpu_s = max(1, round(limits.wall_s + 0.5))
    bounds = {
        resource.RLIMIT_CPU: cpu_s,
        resource.RLIMIT_AS: limits.memory_bytes,
        resource.RLIMIT_FSIZE: limits.output_bytes,
        resource.RLIMIT_NOFILE: 64,
        resource.RLIMIT_CORE: 0,
    }
    if isolated:  # else it would count the user's other processes too
        bounds[resource.RLIMIT_NPROC] = _PROCESSES
    for which, bound in bounds.items():
        resource.setrlimit(which, (bound, bound))


def _redirect(home: Path) -> None:
    os.chdir(home)
    for descriptor, name, flags in (
        (0, "in", os.O_RDONLY),
        (1, "out", os.O_WRONLY | os.O_CREAT),
        (2, "err", os.O_RDWR | os.O_CREAT),
    ):
        file = os.open(name, flags, 0o600)
        os.dup2(file, descriptor)
        os.close(file)


def _die_with_parent() -> None:
    if _libc.prctl(_PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0) != 0:
        raise OSError(ctypes.get_errno(), "prctl")
