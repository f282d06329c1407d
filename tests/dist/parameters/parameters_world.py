"""Small worlds of real processes for the parameter plane: each rank is a function, groups are explicit Gloo objects."""

from __future__ import annotations

import multiprocessing
import os
import queue
import signal
import time
import traceback
from collections.abc import Callable, Sequence
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from staleflow.parameters.manifest import Manifest

TIMEOUT = timedelta(seconds=60)
SHAPES = [("embed", (37, 16)), ("layer.weight", (64, 96)), ("layer.bias", (5,)), ("scale", ()), ("head", (301, 40))]
MANIFEST = Manifest.from_shapes(SHAPES, "bfloat16")


class Context:
    """What a rank function gets: its rank, groups by name, and a way to report to the test."""

    def __init__(self, rank: int, size: int, port: int, results: Any, token: str) -> None:
        self.rank, self.size, self.token = rank, size, token
        self.store = dist.TCPStore("127.0.0.1", port, size, False, TIMEOUT)
        self._results = results

    def group(self, name: str, ranks: Sequence[int]) -> dist.ProcessGroup:
        return dist.ProcessGroupGloo(dist.PrefixStore(name, self.store), ranks.index(self.rank), len(ranks), TIMEOUT)

    def tell(self, value: Any) -> None:
        self._results.put((self.rank, value))

    def signal(self, what: str) -> None:
        self.store.set(what, b"1")

    def await_signal(self, what: str, seconds: float = 60) -> None:
        self.store.wait([what], timedelta(seconds=seconds))


class World:
    """Runs one process per function; collects what they tell; kills whatever is left at the end."""

    def __init__(self, functions: Sequence[Callable[[Context], None]]) -> None:
        self._store = dist.TCPStore("127.0.0.1", 0, len(functions), True, TIMEOUT, wait_for_workers=False)
        # The server imports torch once and forks the ranks: an import in each would cost more than the tests.
        fork = multiprocessing.get_context("forkserver")
        fork.set_forkserver_preload(
            ["torch.distributed.fsdp", "torch.distributed.tensor", "staleflow.parameters.publish"]
        )
        self.results = fork.Queue()
        self.token = f"sftest-{os.getpid()}-{self._store.port}"
        self.processes = [
            fork.Process(target=_main, args=(f, rank, len(functions), self._store.port, self.results, self.token))
            for rank, f in enumerate(functions)
        ]

    def __enter__(self) -> World:
        for process in self.processes:
            process.start()
        return self

    def __exit__(self, *_: object) -> None:
        for process in self.processes:
            process.kill()
            process.join()
        for left in Path("/dev/shm").glob(f"{self.token}-*"):  # of ranks that the test has killed
            left.unlink()

    def kill(self, rank: int) -> None:
        os.kill(self.processes[rank].pid, signal.SIGKILL)

    def await_signal(self, what: str, seconds: float = 60) -> None:
        self._store.wait([what], timedelta(seconds=seconds))

    def signal(self, what: str) -> None:
        self._store.set(what, b"1")

    def told(self, count: int, seconds: float = 90, ends: bool = False) -> list[tuple[int, Any]]:
        """The next `count` reports (with `ends`, a rank's end is one); a rank's exception fails the test."""
        reports: list[tuple[int, Any]] = []
        deadline = time.monotonic() + seconds
        while len(reports) < count:
            try:
                rank, value = self.results.get(timeout=max(0.0, deadline - time.monotonic()))
            except queue.Empty:
                raise AssertionError(f"{len(reports)} of {count} reports after {seconds} s: {reports}") from None
            if isinstance(value, BaseException | _Failure):
                raise AssertionError(f"rank {rank} failed:\n{value}")
            if ends or value != _END:
                reports.append((rank, value))
        return reports

    def finish(self, seconds: float = 90) -> dict[int, list[Any]]:
        """Wait for all ranks to end; everything they told, by rank."""
        found: dict[int, list[Any]] = {rank: [] for rank in range(len(self.processes))}
        ended = 0
        while ended < len(self.processes):
            rank, value = self.told(1, seconds, ends=True)[0]
            if value == _END:
                ended += 1
            else:
                found[rank].append(value)
        return found


class _Failure(str):
    pass


_END = "__end__"


def _main(function: Callable[[Context], None], rank: int, size: int, port: int, results: Any, token: str) -> None:
    torch.set_num_threads(1)
    try:
        function(Context(rank, size, port, results, token))
        results.put((rank, _END))
    except BaseException:
        results.put((rank, _Failure(traceback.format_exc())))


def weights(version: int, dtype: torch.dtype = torch.bfloat16) -> dict[str, torch.Tensor]:
    """The weights of a version: different in every element, from everybody's same formula."""
    generator = torch.Generator().manual_seed(version)
    return {name: torch.randn(shape, generator=generator).to(dtype) for name, shape in SHAPES}


class DictEngine:
    """Stands for an inference engine: keeps copies of what it is given."""

    def __init__(self) -> None:
        self.weights: dict[str, torch.Tensor] = {}

    def load_weights(self, tensors: Any) -> None:
        self.weights = {name: tensor.clone() for name, tensor in tensors}

    def reset_prefix_cache(self) -> bool:
        return True

    def has(self, version: int) -> bool:
        wanted = weights(version)
        return all(torch.equal(self.weights[name], tensor) for name, tensor in wanted.items())
