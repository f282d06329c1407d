"""What a rollout rank needs of an inference engine: add, step, abort, load weights. Two implementations, one shape."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

from staleflow.trajectories.schema import Finish


@dataclass(frozen=True, slots=True)
class Request:
    """Generate on: `tokens` is prompt plus what has been generated so far, `max_new` what may still come."""

    tid: int
    tokens: Sequence[int]
    max_new: int
    temperature: float  # 0: greedy
    seed: int | None = None
    ignore_eos: bool = False  # calibration: go on to `max_new` whatever is sampled


@dataclass(frozen=True, slots=True)
class Delta:
    """What one step added to one trajectory. `logprobs` under the full distribution at the sampling temperature."""

    tid: int
    tokens: Sequence[int]
    logprobs: Sequence[float]
    finish: Finish


@dataclass(frozen=True, slots=True)
class Load:
    running: int
    waiting: int
    kv_tokens: int
    kv_capacity_tokens: int


class Engine(Protocol):
    """Not thread-safe; everything happens on the rollout rank's main thread."""

    def add(self, request: Request) -> None: ...

    def step(self) -> list[Delta]:
        """One decode step over everything running."""
        ...

    def abort(self, tids: Iterable[int]) -> None:
        """Forget these; unknown ids are ignored."""
        ...

    def busy(self) -> bool: ...

    def load(self) -> Load: ...

    def load_weights(self, weights: Iterable[tuple[str, Any]]) -> None:
        """Replace all parameters, in place. `weights`: (name as in the checkpoint, tensor), streamed."""
        ...

    def reset_prefix_cache(self) -> bool:
        """Forget cached blocks. False when requests still hold some: then nothing may be generated on."""
        ...

    def score(self, tokens: Sequence[int]) -> list[float]:
        """Log-probabilities of tokens[1:], each given all before it. Only while nothing else runs."""
        ...

    def close(self) -> None: ...
