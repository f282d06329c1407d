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

    `kind` is a name of `KINDS`, or a tuple of `RewardTerm` whose weighted sum is the reward. A sample may take
    `timeout_s` in one attempt and is attempted `1 + retries` times, each time after a crash or time-out in a fresh
    process. `memory_bytes` bounds the address space of a worker (0: unbounded). Raises ValueError on what cannot work.
    """

    kind: str | tuple[RewardTerm, ...] = "exact_match"
    options: dict[str, Any] = field(default_factory=dict)
    workers: int = 2
    timeout_s: float = 10.0
    retries: int = 1
    memory_bytes: int = 4 * GIB

    def __post_init__(self) -> None:
        if not self.terms:
            raise ValueError("reward.kind: no reward given; name at least one")
        for term in self.terms:
            if term.kind not in KINDS:
                raise ValueError(f"reward.kind: {term.kind!r} is unknown; one of {', '.join(KINDS)}")
        for term in self.terms:
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
    def terms(self) -> tuple[RewardTerm, ...]:
        if isinstance(self.kind, str):
            return (RewardTerm(self.kind, 1.0, self.options),)
        return tuple(self.kind)


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
