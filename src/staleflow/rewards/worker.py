"""A reward worker: one small process that scores one sample at a time, started as `python -m staleflow.rewards.worker`.

consumes: Setup, then Jobs, from the socket that is its standard input     waits for: the pool's next Job
unblocked by: a Job, or the end of the stream (the pool is gone), which ends it   produces: Ready once, a Score per Job

It imports neither torch nor anything else of the job that started it. The pool kills it when a Job takes too long, and
the kernel when its parent dies, so nothing here needs a time limit or a signal handler.
"""

from __future__ import annotations

import ctypes
import os
import resource
import signal
import socket
import sys
from collections.abc import Callable, Iterator

from staleflow.rewards.kinds import make_scorer
from staleflow.rewards.spec import RewardSample
from staleflow.rewards.wire import Job, Ready, Score, Setup, frame, split, to_worker

PR_SET_PDEATHSIG = 1
PR_SET_CHILD_SUBREAPER = 36


def main(argv: list[str]) -> int:
    """argv: the pid of the pool's process, the address-space limit in bytes (0: none)."""
    parent, memory_bytes = int(argv[0]), int(argv[1])
    _tie_to(parent)
    if memory_bytes:
        resource.setrlimit(resource.RLIMIT_AS, (memory_bytes, memory_bytes))
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    channel = socket.socket(fileno=_take_stdio())
    messages = _receive(channel)
    setup = next(messages, None)
    if not isinstance(setup, Setup):
        return 0  # the pool left before it said anything
    try:
        score = make_scorer(setup.terms)
    except Exception as error:  # whatever a user's module raises at import: told, not lost
        channel.sendall(frame(Ready(_said(error))))
        return 1
    channel.sendall(frame(Ready()))
    for job in messages:
        if isinstance(job, Job):
            channel.sendall(frame(_scored(score, job)))
    return 0


def _scored(score: Callable[[RewardSample], tuple[float, ...]], job: Job) -> Score:
    try:
        return Score(job.tid, score(job.sample))
    except Exception as error:  # any failure of a grader is a failed attempt
        return Score(job.tid, error=_said(error))


def _said(error: Exception) -> str:
    return f"{type(error).__name__}: {error}"[:500]


def _tie_to(parent: int) -> None:
    """Die with the parent, and inherit what a grader starts and forgets, so that it can be ended too."""
    libc = ctypes.CDLL(None, use_errno=True)
    for option, value in ((PR_SET_PDEATHSIG, signal.SIGKILL), (PR_SET_CHILD_SUBREAPER, 1)):
        if libc.prctl(option, value, 0, 0, 0) != 0:
            raise OSError(ctypes.get_errno(), f"prctl({option})")
    if os.getppid() != parent:
        sys.exit(0)


def _take_stdio() -> int:
    """Move the channel off descriptor 0 and send prints to the log, so that a grader cannot talk into the channel."""
    channel = os.dup(0)
    null = os.open(os.devnull, os.O_RDONLY)
    os.dup2(null, 0)
    os.close(null)
    os.dup2(2, 1)
    return channel


def _receive(channel: socket.socket) -> Iterator[Setup | Job]:
    buffer = bytearray()
    while chunk := channel.recv(1 << 16):
        buffer += chunk
        for body in split(buffer):
            yield to_worker.decode(body)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
