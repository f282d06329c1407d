"""From a batch that the protocol released to what each trainer rank gets. Pure: metadata in, plan out."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from staleflow.coordination.types import Batch
from staleflow.learning.advantages import ADVANTAGES, overlong_penalties
from staleflow.learning.settings import AlgorithmSettings
from staleflow.trajectories.partition import balance


@dataclass(frozen=True, slots=True)
class Generated:
    """What the coordinator knows of a finished trajectory. `node` holds its payload."""

    prompt_tokens: int
    tokens: int
    segments: tuple[tuple[int, int], ...]
    finish: int
    node: int

    @property
    def v_traj(self) -> int:
        return self.segments[0][0]

    @property
    def total_tokens(self) -> int:
        return self.prompt_tokens + self.tokens


def canonical(batch: Batch, prompt_index: Mapping[int, int]) -> Batch:
    """The batch in the order of its prompts and members, so that a sum over it depends on what it holds alone."""
    groups = sorted(batch.groups, key=lambda group: prompt_index[group[0]])
    return Batch(batch.step, tuple((group_id, tuple(sorted(tids))) for group_id, tids in groups))


@dataclass(frozen=True)
class StepPlan:
    """`ranks[r]` = the micro-batches of the r-th trainer rank, each a list of tids; equally many on all ranks."""

    step: int
    ranks: tuple[tuple[tuple[int, ...], ...], ...]
    advantages: dict[int, float]
    total_tokens: int
    response_tokens: int
    groups: int

    @property
    def tids(self) -> tuple[int, ...]:
        return tuple(self.advantages)

    @property
    def microbatches(self) -> int:
        return len(self.ranks[0])


def advantages_of(
    batch: Batch,
    rewards: Mapping[int, float],
    generated: Mapping[int, Generated],
    algorithm: AlgorithmSettings,
    max_tokens: int,
) -> dict[int, float]:
    """One advantage per tid, compared within its group (or over the batch: REINFORCE++)."""
    tids = [members for _, members in batch.groups]
    table = [[rewards[tid] for tid in members] for members in tids]
    if algorithm.overlong_buffer_tokens:
        for row, members in zip(table, tids, strict=True):
            penalties = overlong_penalties(
                [generated[tid].tokens for tid in members],
                max_tokens=max_tokens,
                buffer_tokens=algorithm.overlong_buffer_tokens,
                penalty=algorithm.overlong_penalty,
            )
            row[:] = [reward + float(p) for reward, p in zip(row, penalties, strict=True)]
    values = ADVANTAGES[algorithm.advantage](table)
    flat = [tid for members in tids for tid in members]
    return {tid: float(value) for tid, value in zip(flat, values.reshape(-1), strict=True)}


def plan_step(
    batch: Batch,
    advantages: Mapping[int, float],
    generated: Mapping[int, Generated],
    *,
    trainers: int,
    microbatch_tokens: int,
    updates: int = 1,
) -> StepPlan:
    """Balance the batch over trainer ranks and micro-batches by token count, at least one micro-batch per update."""
    tids = [tid for _, members in batch.groups for tid in members]
    lengths = [generated[tid].total_tokens for tid in tids]
    cut = balance(lengths, trainers, microbatch_tokens, min_count=updates)
    ranks = tuple(tuple(tuple(tids[i] for i in part) for part in rank) for rank in cut.microbatches)
    return StepPlan(
        batch.step,
        ranks,
        {tid: advantages[tid] for tid in tids},
        sum(lengths),
        sum(generated[tid].tokens for tid in tids),
        len(batch.groups),
    )


def ages_of(tids: Sequence[int], generated: Mapping[int, Generated], step: int) -> Counter[int]:
    """{age in versions at consumption: trajectories}."""
    return Counter(step - generated[tid].v_traj for tid in tids)
