"""Evaluation on held-out prompts, by the rollout instances themselves, beside training."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field

from staleflow.coordination.types import EVAL_GROUP_BASE
from staleflow.data.prompts import Prompt
from staleflow.trajectories.schema import group_and_member, trajectory_id

PASSES = 0.5  # a reward above it counts as solved


def pass_at(k: int, samples: int, solved: int) -> float:
    """Probability that k of the `samples` drawn without return hold one of the `solved`: the unbiased estimate of
    pass@k (Chen et al. 2021, arXiv 2107.03374, eq. 1)."""
    return 1.0 - math.comb(samples - solved, k) / math.comb(samples, k)


def _powers(samples: int) -> list[int]:
    """1, 2, 4, … and `samples` itself."""
    return sorted({1 << i for i in range(samples.bit_length())} | {samples})


def _mean(values: Sequence[float]) -> float:
    return sum(values) / len(values) if values else 0.0


@dataclass
class Round:
    """One evaluation: of version `version` (or newer on an instance that was ahead). None = scoring failed."""

    version: int
    first_group: int
    pending: set[int]
    rewards: dict[int, float | None] = field(default_factory=dict)
    versions: set[int] = field(default_factory=set)

    def result(self, samples: int) -> dict[str, float]:
        """`mean` (mean@`samples`) with its `stderr` over prompts, `pass@k` for k = 1, 2, 4, … `samples`, counts.

        `sample_0`, `sample_1`, … are the means of each member alone: as many independent evaluations, whose spread is
        the noise of one. `newest_version` is above `version` where an instance was ahead.
        """
        by_group: dict[int, list[float]] = {}
        by_member: dict[int, list[float]] = {}
        for tid, reward in self.rewards.items():
            if reward is not None:
                group_id, member = group_and_member(tid)
                by_group.setdefault(group_id, []).append(reward)
                by_member.setdefault(member, []).append(reward)
        means = [_mean(values) for values in by_group.values()]
        mean = _mean(means)
        variance = sum((value - mean) ** 2 for value in means) / max(1, len(means) - 1)
        passes = [(len(values), sum(value > PASSES for value in values)) for values in by_group.values()]
        return {
            "version": float(self.version),
            "newest_version": float(max(self.versions, default=self.version)),
            "mean": mean,
            "stderr": math.sqrt(variance / max(1, len(means))),
            **{f"pass@{k}": _mean([pass_at(k, n, c) for n, c in passes if n >= k]) for k in _powers(samples)},
            **{f"sample_{member}": _mean(values) for member, values in sorted(by_member.items())},
            "prompts": float(len(means)),
            "failed": float(sum(r is None for r in self.rewards.values())),
        }


class Evaluations:
    """Rounds in flight. Every round has its own group ids, so that a late answer cannot be taken for another's."""

    def __init__(self, prompts: Sequence[Prompt], samples: int) -> None:
        self.prompts, self.samples = tuple(prompts), samples
        self._rounds: list[Round] = []
        self._next_group = EVAL_GROUP_BASE

    def start(self, version: int) -> tuple[Round, list[tuple[int, Prompt]]]:
        """A new round: ((tid, prompt), …) to be generated."""
        first = self._next_group
        self._next_group += len(self.prompts)
        work = [
            (trajectory_id(first + i, member), prompt)
            for i, prompt in enumerate(self.prompts)
            for member in range(self.samples)
        ]
        new = Round(version, first, {tid for tid, _ in work})
        self._rounds.append(new)
        return new, work

    def generated(self, tid: int, versions: Sequence[int]) -> None:
        if (of := self._round_of(tid)) is not None:
            of.versions.update(versions)

    def scored(self, tid: int, reward: float | None) -> Round | None:
        """Returns the round when this was its last answer."""
        of = self._round_of(tid)
        if of is None or tid not in of.pending:
            return None
        of.pending.discard(tid)
        of.rewards[tid] = reward
        if of.pending:
            return None
        self._rounds.remove(of)
        return of

    def waits_for(self, group_id: int) -> bool:
        """Whether an answer to this prompt is still to come."""
        return any(self._round_of(trajectory_id(group_id, member)) for member in range(self.samples))

    def unanswered(self) -> list[tuple[int, Prompt, int]]:
        """(tid, prompt, version of its round) of every answer that is still to come."""
        return [
            (tid, self.prompts[group_and_member(tid)[0] - r.first_group], r.version)
            for r in self._rounds
            for tid in sorted(r.pending)
        ]

    def _round_of(self, tid: int) -> Round | None:
        return next((r for r in self._rounds if tid in r.pending), None)

    @property
    def busy(self) -> bool:
        return bool(self._rounds)
