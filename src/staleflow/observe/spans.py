"""Always-on timing of one rank: spans, states and counters, a microsecond each, written by a thread of their own.

A rank notes what it does with the verbs below; `trace/rank_R.jsonl` gets a header line whenever a process begins, then
one array per note. Times are `perf_counter_ns` (CLOCK_MONOTONIC, equal for all processes of a machine); the header ties
them to the wall clock.

    {"rank", "role", "instance", "attempt", "host", "boot", "mono_ns", "wall_ns", "offset_ns"}
    ["x", name, track, start_ns, duration_ns, {args}]     a span
    ["c", name, time_ns, {series: value}]                 a counter
    ["i", name, track, time_ns, {args}]                   an instant
    ["d", count]                                          notes that were dropped because the disk was too slow

On the track "main" spans nest and tell what the rank's loop did; on "trajectories" and "rewards" they overlap freely.
"""

from __future__ import annotations

import os
import socket
import threading
import time
from collections import deque
from pathlib import Path
from typing import Any

import msgspec

from staleflow.observe.nvtx import open_ranges

GENERATE, REWARD, PACK, PUSH, PULL, WAIT = "generate", "reward", "pack", "push", "pull", "wait"
TRAIN, FORWARD_BACKWARD = "train", "forward/backward"  # a step, and in it each micro-batch
VERBS = (GENERATE, REWARD, PACK, TRAIN, FORWARD_BACKWARD, PUSH, PULL, WAIT)
MAIN, TRAJECTORIES, REWARDS = "main", "trajectories", "rewards"
OVERLAPPING = (TRAJECTORIES, REWARDS)

_FLUSH_S = 1.0
_CAPACITY = 1 << 16
_LIMIT_BYTES = 512 << 20


class Spans:
    """The notes of this process. Without a directory every call does nothing, at the cost of one test.

    `offset_ns` is this machine's wall clock minus rank 0's, where it was measured. Any thread may note spans on a track
    of its own; `state` belongs to the rank's loop.
    """

    def __init__(
        self,
        directory: Path | None,
        rank: int = 0,
        role: str = "",
        *,
        instance: int | None = None,
        attempt: int = 0,
        offset_ns: int = 0,
    ) -> None:
        self.on = directory is not None
        self._notes: deque[tuple[Any, ...] | dict[str, Any]] = deque(maxlen=_CAPACITY)
        self._state: tuple[str, int, dict[str, Any]] | None = None
        self.ranges = open_ranges()  # the same for a profiler, if one started this process
        self._state_range: Any = None
        self._dropped = 0
        self._written = 0
        self._stop = threading.Event()
        if directory is None:
            return
        directory.mkdir(parents=True, exist_ok=True, mode=0o700)
        self._file = (directory / f"rank_{rank}.jsonl").open("ab")
        self._header: dict[str, Any] = {
            "rank": rank, "role": role, "instance": instance, "attempt": attempt, "host": socket.gethostname(),
            "boot": _boot_id(), "offset_ns": offset_ns,
        }  # fmt: skip
        # A kill may have torn the line before.
        self._file.write(b"\n" + msgspec.json.encode(self._header | _clocks()) + b"\n")
        self._thread = threading.Thread(target=self._write_on, name="spans", daemon=True)
        self._thread.start()

    def span(self, name: str, track: str = MAIN, **args: Any) -> Block:
        """Time a block: `with spans.span("pull") as args`. What is put into that dict appears among the span's args."""
        return Block(self, name, track, args) if self.on else _UNTIMED

    def complete(self, name: str, start_ns: int, end_ns: int, track: str = MAIN, **args: Any) -> None:
        """A span that was timed by the caller, in `perf_counter_ns`."""
        if self.on:
            self._note(("x", name, track, start_ns, end_ns - start_ns, args))

    def state(self, name: str | None, **args: Any) -> None:
        """The rank's loop does `name` from now on (None: nothing to tell).

        Repeating the name costs almost nothing: the span (with its first args) goes on, however often the loop turns.
        """
        if not self.on or (self._state is not None and self._state[0] == name):
            return
        now_ns = time.perf_counter_ns()
        if self._state is not None:
            before, start_ns, with_args = self._state
            self._note(("x", before, MAIN, start_ns, now_ns - start_ns, with_args))
            self.ranges.end(self._state_range)
        if name is not None:
            self._state_range = self.ranges.start(name, args.get("version", 0))
        self._state = None if name is None else (name, now_ns, args)

    def counter(self, name: str, **series: float) -> None:
        if self.on:
            self._note(("c", name, time.perf_counter_ns(), series))

    def instant(self, name: str, track: str = MAIN, **args: Any) -> None:
        if self.on:
            self._note(("i", name, track, time.perf_counter_ns(), args))

    def align(self, offset_ns: int) -> None:
        """This machine's wall clock minus rank 0's has been measured (better): a new header says so."""
        if self.on:
            self._header["offset_ns"] = offset_ns
            self._notes.append(self._header | _clocks())

    def close(self) -> None:
        """Write what is left; may be called twice."""
        if not self.on:
            return
        self.state(None)
        self.on = False
        self._stop.set()
        self._thread.join()
        self._file.close()

    def _note(self, note: tuple[Any, ...]) -> None:
        if len(self._notes) == _CAPACITY:
            self._dropped += 1  # the oldest goes: the loop never waits for the disk
        self._notes.append(note)

    def _write_on(self) -> None:
        while not self._stop.wait(_FLUSH_S):
            self._write()
        self._write()

    def _write(self) -> None:
        lines = []
        while self._notes:
            lines.append(msgspec.json.encode(self._notes.popleft()))
        dropped, self._dropped = self._dropped, 0
        if self._written > _LIMIT_BYTES:
            return  # a trace that nobody could open any more is worth nothing
        if dropped:
            lines.append(msgspec.json.encode(("d", dropped)))
        if lines:
            data = b"\n".join(lines) + b"\n"
            self._file.write(data)
            self._file.flush()
            self._written += len(data)


class Block:
    """A `with` block that is timed, also when it fails. (A generator would take ten times as long.)"""

    __slots__ = ("_args", "_name", "_spans", "_start_ns", "_track")

    def __init__(self, spans: Spans, name: str, track: str, args: dict[str, Any]) -> None:
        self._spans, self._name, self._track, self._args = spans, name, track, args

    def __enter__(self) -> dict[str, Any]:
        self._spans.ranges.push(self._name, self._args.get("version", 0))
        self._start_ns = time.perf_counter_ns()
        return self._args

    def __exit__(self, *_: object) -> None:
        self._spans.ranges.pop()
        self._spans.complete(self._name, self._start_ns, time.perf_counter_ns(), self._track, **self._args)


class _Untimed(Block):
    """What `span` gives when nothing is noted: does not even look at the clock."""

    __slots__ = ()

    def __init__(self) -> None:
        pass

    def __enter__(self) -> dict[str, Any]:
        return {}

    def __exit__(self, *_: object) -> None:
        pass


_UNTIMED = _Untimed()


def _clocks() -> dict[str, int]:
    return {"mono_ns": time.perf_counter_ns(), "wall_ns": time.time_ns()}


def _boot_id() -> str:
    """Equal for processes that share a monotonic clock."""
    path = Path("/proc/sys/kernel/random/boot_id")
    return path.read_text().strip() if path.exists() else f"{socket.gethostname()}-{os.getppid()}"
