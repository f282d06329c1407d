"""The reward pool of a host: scores responses in killable child processes, beside generation.

consumes: samples given to `submit`      waits for: nothing (a loop waits on `fileno()` and calls `poll()`)
unblocked by: a worker's answer or death, or a deadline (a timer in the same descriptor)     produces: one result each

A worker scores one sample at a time. A crash or a time-out costs the worker its life and the sample one attempt; when
its attempts are used up the result carries the error. Terms that are cheap, total functions of ours (`is_trusted`) are
scored in `submit` itself, and need no process at all.

The kernel kills the children when the *thread* that made the pool dies: make it in a thread that lives as long.
"""

from __future__ import annotations

import contextlib
import os
import select
import time
from collections import deque
from dataclasses import dataclass

from staleflow.rewards.child import Child
from staleflow.rewards.kinds import is_trusted, make_scorer, weighted
from staleflow.rewards.spec import RewardError, RewardResult, RewardSample, RewardSpec, RewardTerm
from staleflow.rewards.timer import Timer
from staleflow.rewards.wire import Ready, Score

START_LIMIT_S = 120.0  # from fork to Ready: imports from a cold network file system are slow
START_ATTEMPTS = 3
KILL_LIMIT_S = 5.0

__all__ = ["RewardError", "RewardPool", "RewardResult", "RewardSample", "RewardSpec", "RewardTerm"]


@dataclass
class _Waiting:
    tid: int
    sample: RewardSample
    attempts: int = 0
    seconds: float = 0.0


class RewardPool:
    """See the module. Not thread-safe: one loop owns it.

    Raises ValueError when a trusted term's options are wrong; other terms are checked by their workers, so call
    `wait_ready` before work depends on them.
    """

    def __init__(self, spec: RewardSpec) -> None:
        self.spec = spec
        self.restarts = 0
        self._here = make_scorer(spec.all_terms) if all(is_trusted(term) for term in spec.all_terms) else None
        self._queue: deque[_Waiting] = deque()
        self._running: dict[int, _Waiting] = {}
        self._done: list[RewardResult] = []
        self._children: dict[int, Child] = {}
        self._failed_starts: list[str] = []
        self._refused: str | None = None  # a set-up that no retry can repair
        self._epoll = select.epoll()
        self._timer = Timer()
        self._event = os.eventfd(0, os.EFD_NONBLOCK | os.EFD_CLOEXEC)
        for descriptor in (self._timer.fileno(), self._event):
            self._epoll.register(descriptor, select.EPOLLIN)
        for _ in range(0 if self._here else spec.workers):
            self._start_child()
        self._set_timer()

    def submit(self, tid: int, sample: RewardSample) -> None:
        """Have `sample` scored; never blocks. Its result comes out of `poll` exactly once."""
        waiting = _Waiting(tid, sample)
        if self._here is None:
            self._queue.append(waiting)
            self._dispatch()
            return
        begin = time.monotonic()
        try:
            parts, error = self._here(sample), None
        except RewardError as problem:
            parts, error = (), str(problem)
        waiting.seconds = time.monotonic() - begin
        self._finish(waiting, parts, error)

    def poll(self) -> list[RewardResult]:
        """Results since the last call; never blocks. Raises RuntimeError when no worker can be started."""
        self._advance()
        with contextlib.suppress(BlockingIOError):
            os.eventfd_read(self._event)
        done, self._done = self._done, []
        return done

    def fileno(self) -> int:
        """Readable when `poll` has something to do: results, answers of workers, deadlines."""
        return self._epoll.fileno()

    def pending(self) -> int:
        """Samples submitted whose result has not been taken with `poll`."""
        return len(self._queue) + len(self._running) + len(self._done)

    def wait_ready(self, timeout_s: float = START_LIMIT_S) -> None:
        """Wait until every worker has loaded its graders. Raises ValueError with the reason when one cannot."""
        end_s = time.monotonic() + timeout_s
        while not all(child.ready for child in self._children.values()):
            if time.monotonic() > end_s:
                raise TimeoutError(f"reward workers were not ready after {timeout_s} s")
            time.sleep(0.02)
            self._advance()

    def close(self, timeout_s: float = 5.0) -> None:
        """Kill all workers and forget what is unfinished; may be called twice.

        Raises subprocess.TimeoutExpired when a killed worker has not gone after `timeout_s` (stuck in the kernel).
        """
        children, self._children = list(self._children.values()), {}
        for child in children:
            child.kill()
        self._queue.clear()
        self._running.clear()
        if not self._epoll.closed:
            self._epoll.close()
            self._timer.close()
            os.close(self._event)
        end_s = time.monotonic() + timeout_s
        for child in children:
            child.reap(max(end_s - time.monotonic(), 0.01))

    def __enter__(self) -> RewardPool:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _advance(self) -> None:
        self._timer.clear()
        for child in list(self._children.values()):
            self._attend(child)
        self._kill_overdue()
        self._dispatch()

    def _start_child(self) -> None:
        child = Child(self.spec, time.monotonic() + START_LIMIT_S)
        self._children[child.socket.fileno()] = child
        self._epoll.register(child.socket.fileno(), _interest(child))

    def _dispatch(self) -> None:
        now_s = time.monotonic()
        for child in self._children.values():
            if not self._queue:
                break
            if child.idle:
                waiting = self._queue.popleft()
                waiting.attempts += 1
                self._running[waiting.tid] = waiting
                child.give(waiting.tid, waiting.sample, now_s, now_s + self.spec.timeout_s)
                self._epoll.modify(child.socket.fileno(), _interest(child))
        self._set_timer()

    def _attend(self, child: Child) -> None:
        child.flush()
        messages, alive = child.read()
        for message in messages:
            self._on_ready(child, message) if isinstance(message, Ready) else self._on_score(child, message)
        if alive:
            self._epoll.modify(child.socket.fileno(), _interest(child))
        else:
            self._lose(child, "reward worker ended")

    def _on_ready(self, child: Child, message: Ready) -> None:
        if message.error is not None:
            self._refused = message.error
            return
        child.ready = True
        self._failed_starts.clear()

    def _on_score(self, child: Child, message: Score) -> None:
        waiting = self._running.pop(message.tid)
        waiting.seconds += time.monotonic() - child.started_s
        child.tid = None
        if message.error is None:
            self._finish(waiting, message.parts, None)
        else:
            self._retry_or_fail(waiting, message.error)

    def _kill_overdue(self) -> None:
        now_s = time.monotonic()
        for child in list(self._children.values()):
            if not child.idle and now_s >= child.deadline_s:
                doing = f"took longer than {self.spec.timeout_s} s" if child.ready else "did not start in time"
                self._lose(child, f"reward worker {doing} and was killed")

    def _lose(self, child: Child, why: str) -> None:
        """A worker is gone, or has to go: replace it and give its sample another attempt."""
        self._epoll.unregister(child.socket.fileno())
        del self._children[child.socket.fileno()]
        child.kill()
        why = f"{why} ({_ended(child.reap(KILL_LIMIT_S))})"  # the kill does not change the code of one that has ended
        if not child.ready:
            self._failed_starts.append(why)
        if child.tid is not None:
            waiting = self._running.pop(child.tid)
            waiting.seconds += time.monotonic() - child.started_s
            self._retry_or_fail(waiting, why)
        self._check_starts()
        self.restarts += 1
        self._start_child()

    def _check_starts(self) -> None:
        if self._refused is not None:
            raise ValueError(f"reward: {self._refused}")
        if len(self._failed_starts) >= START_ATTEMPTS:
            raise RuntimeError(f"no reward worker can be started: {self._failed_starts[-1]}")

    def _retry_or_fail(self, waiting: _Waiting, why: str) -> None:
        if waiting.attempts > self.spec.retries:
            self._finish(waiting, (), why)
        else:
            self._queue.append(waiting)  # behind the others: a poisonous sample delays nobody twice in a row

    def _finish(self, waiting: _Waiting, parts: tuple[float, ...], error: str | None) -> None:
        reward = weighted(self.spec.all_terms, parts) if error is None else None
        self._done.append(RewardResult(waiting.tid, reward, error, waiting.seconds, parts))
        os.eventfd_write(self._event, 1)

    def _set_timer(self) -> None:
        busy = [child.deadline_s for child in self._children.values() if not child.idle]
        self._timer.set(min(busy, default=None))


def _interest(child: Child) -> int:
    return select.EPOLLIN | select.EPOLLOUT if child.wants_write else select.EPOLLIN


def _ended(code: int) -> str:
    return f"signal {-code}" if code < 0 else f"exit code {code}"
