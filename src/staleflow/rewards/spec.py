"""What a reward is made of: plain frozen data, shared by the pool (in a host) and its workers (in child processes)."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

KINDS = ("exact_match", "math", "python", "reasoning_gym", "code")
GIB = 1 << 30
CODE_TOTAL_S = 8.0  # default time for all tests of one solution


class RewardError(Exception):
    """A response could not be scored. It becomes a failed result, never a reward of 0."""


@dataclass(frozen=True)
class RewardTerm:
    """One reward of a weighted sum. `options` as documented in `rewards.kinds`."""

    kind: str
    weight: float = 1.0
    options: dict[str, Any] = field(default_factory=dict)


@dataclass(frozen=True)
class RewardSpec:
    """Which rewards, and how hard they are tried.

    The reward is that of `kind` (a name of `KINDS`) with its `options`, or the weighted sum of `terms` where there are
    any. A sample may take `timeout_s` in one attempt and is attempted `1 + retries` times, after a crash or time-out in
    a fresh process. `memory_bytes` bounds the address space of a worker (0: unbounded).
    Raises ValueError on what cannot work.
    """

    kind: str = "exact_match"
    options: dict[str, Any] = field(default_factory=dict)
    terms: tuple[RewardTerm, ...] = ()
    workers: int = 2
    timeout_s: float = 10.0
    retries: int = 1
    memory_bytes: int = 4 * GIB

    def __post_init__(self) -> None:
        if self.terms and self.options:
            raise ValueError("reward.options: not read beside reward.terms; move them into the terms")
        for term in self.all_terms:
            if term.kind not in KINDS:
                raise ValueError(f"reward.kind: {term.kind!r} is unknown; one of {', '.join(KINDS)}")
        for term in self.all_terms:
            total_s = term.options.get("total_s", CODE_TOTAL_S)
            if term.kind == "code" and total_s >= self.timeout_s:
                raise ValueError(
                    f"reward.timeout_s: {self.timeout_s}; must exceed total_s = {total_s} of kind 'code', so that a "
                    "solution that hangs is scored and not taken for a failure"
                )
        if self.workers < 1:
            raise ValueError(f"reward.workers: {self.workers}; at least 1 is needed")
        if not self.timeout_s > 0:
            raise ValueError(f"reward.timeout_s: {self.timeout_s}; must be above 0")
        if self.retries < 0:
            raise ValueError(f"reward.retries: {self.retries}; must be 0 or more")

    @property
    def all_terms(self) -> tuple[RewardTerm, ...]:
        return self.terms or (RewardTerm(self.kind, 1.0, self.options),)


@dataclass(frozen=True)
class RewardSample:
    """What is scored. `reference` comes from the data set (`answer` and the fields asked for) and is JSON-able."""

    prompt: str
    response: str
    truncated: bool
    reference: dict[str, Any]


@dataclass(frozen=True)
class RewardResult:
    """The outcome for trajectory `tid`: a finite `reward`, or None and the `error` of the last attempt.

    `seconds` is the time spent over all attempts, waiting for a free worker left out. `parts` are the unweighted
    rewards of the terms, in their order.
    """

    tid: int
    reward: float | None
    error: str | None
    seconds: float
    parts: tuple[float, ...] = ()
