"""What a simulated run tells: throughput, idleness, staleness, waste and length bias, after the warm-up."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field

import numpy as np

from staleflow.coordination.coordinator import Coordinator
from staleflow.coordination.ledger import Ledger
from staleflow.simulation.config import Study
from staleflow.simulation.engine import Engine, Sample
from staleflow.simulation.workload import IntArray


@dataclass(frozen=True, slots=True)
class Outcome:
    """One run. Tokens are response tokens; staleness is step - V_traj of each trained trajectory.

    `length_bias`: mean trained length / mean length of as many prompts in the order in which they were offered.
    `wasted`: discarded tokens / generated tokens.
    """

    step_s: float
    tokens_per_s: float
    trainer_idle: float
    rollout_busy: float
    staleness: dict[int, int]
    wasted: float
    discarded_tokens: dict[str, int]
    length_bias: float
    interrupts: int
    migrations: int
    pulls: int
    preemptions: int
    prefilled_tokens: int
    segments_mean: float
    excess_groups: int
    steps: tuple[tuple[float, float], ...] = ()  # (begin, end) of every step
    gantt: tuple[tuple[float, tuple[tuple[int, int, int], ...]], ...] = ()  # (time, (running, waiting, version) each)

    @property
    def staleness_max(self) -> int:
        return max(self.staleness, default=0)

    @property
    def staleness_mean(self) -> float:
        total = sum(self.staleness.values())
        return sum(age * n for age, n in self.staleness.items()) / total if total else 0.0


@dataclass(slots=True)
class Recorder:
    study: Study
    engines: list[Engine]
    keep_gantt: bool
    steps: int = 0
    current: tuple[int, float, list[Sample]] = (0, 0.0, [])  # the step in training: number, seconds, trajectories
    begun: list[float] = field(default_factory=list)
    ended: list[float] = field(default_factory=list)
    busy_s: float = 0.0
    tokens: int = 0
    trajectories: int = 0
    segments: int = 0
    all_tokens: int = 0
    all_trajectories: int = 0
    ages: Counter[int] = field(default_factory=Counter)
    gantt: list[tuple[float, tuple[tuple[int, int, int], ...]]] = field(default_factory=list)

    def begin_step(self, now_s: float, step: int, samples: list[list[Sample]], seconds: float) -> None:
        self.begun.append(now_s)
        self.current = (step, seconds, [s for group in samples for s in group])

    def end_step(self, now_s: float) -> None:
        self.ended.append(now_s)
        self.steps += 1
        step, seconds, flat = self.current
        tokens = sum(s.target_tokens for s in flat)
        self.all_tokens, self.all_trajectories = self.all_tokens + tokens, self.all_trajectories + len(flat)
        if self.steps > self.study.run.warmup:
            self.tokens, self.trajectories = self.tokens + tokens, self.trajectories + len(flat)
            self.segments += sum(s.segments for s in flat)
            self.busy_s += seconds
            self.ages.update(step - s.v_traj for s in flat)

    def sample(self, now_s: float) -> None:
        if self.keep_gantt:
            self.gantt.append((now_s, tuple((len(e.running), len(e.waiting), e.version) for e in self.engines)))

    def outcome(
        self, now_s: float, coordinator: Coordinator, ledger: Ledger, lengths: Callable[[int], IntArray]
    ) -> Outcome:
        warmup, steps = self.study.run.warmup, self.steps - self.study.run.warmup
        start_s = self.ended[warmup - 1] if warmup else 0.0
        measured_s = self.ended[-1] - start_s
        size = ledger.group_size
        offered = float(np.mean([lengths(g)[:size].mean() for g in range(self.all_trajectories // size)]))
        discarded = coordinator.view().discarded_tokens
        generated = self.all_tokens + sum(discarded.values())
        return Outcome(
            step_s=measured_s / steps,
            tokens_per_s=self.tokens / measured_s,
            trainer_idle=max(0.0, 1.0 - self.busy_s / measured_s),
            rollout_busy=sum(e.busy_s for e in self.engines) / (now_s * len(self.engines)),
            staleness=dict(sorted(self.ages.items())),
            wasted=sum(discarded.values()) / generated,
            discarded_tokens=discarded,
            length_bias=self.all_tokens / self.all_trajectories / offered,
            interrupts=coordinator.view().interrupts,
            migrations=coordinator.view().migrations,
            pulls=coordinator.view().pulls,
            preemptions=sum(e.preemptions for e in self.engines),
            prefilled_tokens=int(sum(e.prefilled_tokens for e in self.engines)),
            segments_mean=self.segments / max(1, self.trajectories),
            excess_groups=sum(getattr(ledger, "excess", Counter()).values()),
            steps=tuple(zip(self.begun, self.ended, strict=False)),
            gantt=tuple(self.gantt),
        )
