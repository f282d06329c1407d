"""The pool's end of one worker process: start it, feed it, read it, kill it. Never blocks, except for the fork."""

from __future__ import annotations

import contextlib
import os
import signal
import socket
import subprocess
import sys
from pathlib import Path

import psutil

from staleflow.rewards.spec import RewardSample, RewardSpec
from staleflow.rewards.wire import Job, Ready, Score, Setup, frame, split, to_pool


class Child:
    """A worker and what it is doing: `ready` once its set-up is loaded, `tid` while it scores, until `deadline_s`."""

    def __init__(self, spec: RewardSpec, deadline_s: float) -> None:
        ours, theirs = socket.socketpair()
        with theirs:
            self.process: subprocess.Popen[bytes] = subprocess.Popen(
                [sys.executable, "-m", "staleflow.rewards.worker", str(os.getpid()), str(spec.memory_bytes)],
                stdin=theirs.fileno(),
                stdout=subprocess.DEVNULL,
                env=_environment(),
                start_new_session=True,  # Ctrl-C is for the job, which then closes the pool
            )
        ours.setblocking(False)
        self.socket = ours
        self.ready = False
        self.tid: int | None = None
        self.started_s = 0.0
        self.deadline_s = deadline_s
        self._out = bytearray(frame(Setup(spec.all_terms)))
        self._in = bytearray()
        self.flush()

    @property
    def idle(self) -> bool:
        return self.ready and self.tid is None

    @property
    def wants_write(self) -> bool:
        return bool(self._out)

    def give(self, tid: int, sample: RewardSample, now_s: float, deadline_s: float) -> None:
        self.tid, self.started_s, self.deadline_s = tid, now_s, deadline_s
        self._out += frame(Job(tid, sample))
        self.flush()

    def flush(self) -> None:
        """Send as much as the socket takes. A broken pipe shows up as the end of the stream in `read`."""
        with contextlib.suppress(BlockingIOError, BrokenPipeError, ConnectionResetError):
            while self._out:
                del self._out[: self.socket.send(self._out)]

    def read(self) -> tuple[list[Ready | Score], bool]:
        """Messages that have arrived, and whether the worker is still there."""
        alive = True
        try:
            while chunk := self.socket.recv(1 << 16):
                self._in += chunk
            alive = False
        except BlockingIOError:
            pass
        except ConnectionResetError:
            alive = False
        return [to_pool.decode(body) for body in split(self._in)], alive

    def kill(self) -> None:
        """Send SIGKILL to the worker and to everything that it or its graders have started."""
        with contextlib.suppress(ProcessLookupError):
            os.kill(self.process.pid, signal.SIGSTOP)  # it starts nothing more while we look
        with contextlib.suppress(psutil.NoSuchProcess):
            for process in psutil.Process(self.process.pid).children(recursive=True):
                with contextlib.suppress(psutil.NoSuchProcess):
                    process.kill()
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self.process.pid, signal.SIGKILL)
        self.process.kill()

    def reap(self, timeout_s: float) -> int:
        """The exit code of a worker that has ended or been killed. Raises subprocess.TimeoutExpired."""
        self.socket.close()
        return self.process.wait(timeout_s)


def _environment() -> dict[str, str]:
    """The worker sees the modules that we see, no device, and one thread: there are many of them on a host."""
    hidden = {"CUDA_VISIBLE_DEVICES": "", "OMP_NUM_THREADS": "1", "OPENBLAS_NUM_THREADS": "1", "MKL_NUM_THREADS": "1"}
    path = os.pathsep.join(entry or str(Path.cwd()) for entry in sys.path)
    return {**os.environ, **hidden, "PYTHONPATH": path}
