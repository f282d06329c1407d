"""The rollout rank's end: take the newest version from the node's store into the engine (paper §4).

consumes      a Pull command, at the same engine step on all tp ranks, with no request running
waits for     a version >= `version_min` in the store, at most `timeout_s`; then the slowest tp rank
unblocked by  the relay (`direct`: the trainers' publishing threads and the other instances, all told to Pull alike)
produces      the engine with exactly that version and no cache block of an older one, on all tp ranks

It cannot deadlock: a Pull is told only of a version that is in the store already, or (`direct`) that all trainers hold
ready; the relay waits for no reader, and a tp rank enters the agreement at every turn, until its time is over too.

Copies go from the slot straight into the engine's parameters. Being overtaken by the writer is noticed only after
them; the engine then holds a mixture, and the pull starts again with the newest version before it steps.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Protocol

import torch

from staleflow.parameters.store import NO_VERSION, StoreError

POLL_S = 0.01
GAVE_UP = -2


class Engine(Protocol):
    """What a pull needs of an inference engine."""

    def load_weights(self, weights: Iterator[tuple[str, torch.Tensor]]) -> None:
        """Load checkpoint-named full tensors; a tensor is a view that may change after the call returns."""

    def reset_prefix_cache(self) -> bool:
        """Forget cached blocks; False when running requests hold some."""


class Reading(Protocol):
    """One version while it is read."""

    @property
    def version(self) -> int: ...

    def tensors(self) -> Iterator[tuple[str, torch.Tensor]]:
        """(checkpoint name, full tensor)."""

    def valid(self) -> bool:
        """Asked after the last copy: whether all of it was of this version."""


class Source(Protocol):
    """Where versions come from: `NodeStore`, `DirectSource` or `FileSource`."""

    def newest(self) -> int | None: ...

    def read(self, version_min: int = 0, *, exactly: int | None = None) -> Reading:
        """Begin to read; StoreError when that version is not to be had."""


class PullError(RuntimeError):
    """The pull failed. `torn`: the engine's weights are a mixture, so it must not step again."""

    def __init__(self, message: str, *, torn: bool) -> None:
        super().__init__(message)
        self.torn = torn


@dataclass(frozen=True)
class PullResult:
    """The version the engine now has; how long it took; how often it was overtaken and started again."""

    version: int
    seconds: float
    retries: int


class Puller:
    """One per rollout rank. `agree(n)` is the minimum of n over the tp ranks of the instance (a collective)."""

    def __init__(self, store: Source, engine: Engine, agree: Callable[[int], int] = lambda n: n) -> None:
        self.store = store
        self.engine = engine
        self._agree = agree

    def pull(self, version_min: int = 0, timeout_s: float = 60.0) -> PullResult:
        """Load the newest version, at least `version_min`, into the engine.

        All tp ranks call it with the same arguments and get the same version. Raises PullError: without effect when
        the version did not come in time; `torn` when it was overtaken until the time was over, or when the engine
        would not reset its prefix cache (interrupt its requests first).
        """
        begin = time.monotonic()
        retries = 0
        while True:
            version = self._await_version(version_min, begin + timeout_s, torn=retries > 0)
            if self._agree(int(self._load(version))):
                break
            retries += 1
        if not self._agree(int(self.engine.reset_prefix_cache())):
            raise PullError("the engine did not reset its prefix cache: requests still run in it", torn=True)
        return PullResult(version, time.monotonic() - begin, retries)

    def _await_version(self, version_min: int, deadline: float, *, torn: bool) -> int:
        """The newest version that every tp rank sees. All leave the loop at the same turn: the minimum decides."""
        while True:
            newest = self.store.newest()
            late = time.monotonic() > deadline
            version = self._agree(GAVE_UP if late else NO_VERSION if newest is None else newest)
            if version == GAVE_UP:
                what = (
                    "was overtaken again and again" if torn else f"found no version >= {version_min} (newest: {newest})"
                )
                raise PullError(f"the pull {what} until its time was over", torn=torn)
            if version >= max(version_min, 0):
                return version
            time.sleep(POLL_S)

    def _load(self, version: int) -> bool:
        """Copy one version into the engine; whether it stayed whole until the last copy was complete."""
        try:
            reading = self.store.read(exactly=version)
        except StoreError:
            return False
        try:
            self.engine.load_weights(reading.tensors())
        except Exception as error:
            raise PullError(f"version {version} was not loaded: {error}", torn=True) from error
        if torch.cuda.is_available() and torch.cuda.is_initialized():
            torch.cuda.synchronize()
        return reading.valid()
