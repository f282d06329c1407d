"""The event loop of virtual time: the real coordinator and books over simulated engines and a simulated trainer.

consumes     events by time: an engine's next end, a command's arrival, a reward, a trained step, a published version
produces     an `Outcome`: what was trained, when, how old, how long, and what was wasted
waits for    nothing: a run that makes no progress ends with an error that names what the trainer waits for
"""

from __future__ import annotations

import heapq
from collections.abc import Callable
from dataclasses import replace
from typing import Any

from staleflow.coordination.coordinator import Coordinator
from staleflow.coordination.cost_model import CostModel
from staleflow.coordination.ledger import make_ledger
from staleflow.coordination.types import Abort, Batch, Command, InstanceInfo, Interrupt, Pull, Route
from staleflow.simulation.config import Study, Variant
from staleflow.simulation.engine import NEVER, Engine, Sample
from staleflow.simulation.fluid import fluid_bound, train_s
from staleflow.simulation.outcome import Outcome, Recorder
from staleflow.simulation.workload import IntArray, Lengths
from staleflow.trajectories.schema import group_and_member

_STALLED_S = 200_000.0  # virtual seconds without a trained step


class World:
    """One run of one variant at one eta and seed. `run()` may be called once.

    `lengths(group)`: response tokens of each member; None draws them as the study's workload says.
    """

    def __init__(
        self,
        study: Study,
        cost: CostModel,
        variant: Variant,
        eta: int,
        seed: int,
        gantt: bool = False,
        lengths: Callable[[int], IntArray] | None = None,
    ) -> None:
        s = study.staleness
        self._study, self._costs = study, study.costs
        self._fluid = fluid_bound(study, cost)
        self.ledger = make_ledger(
            variant.policy,
            batch_groups=s.batch_groups,
            group_size=s.group_size,
            eta=eta,
            spare_groups=s.spare_groups + variant.spare_groups,
            spare_members=s.spare_members + variant.spare_members,
        )
        fleet = study.fleet
        infos = [InstanceInfo(i, i // 8, fleet.max_running, fleet.kv_capacity_tokens) for i in range(fleet.instances)]
        planned = cost if fleet.prefill else CostModel(cost.k1, cost.k2, cost.k3, cost.k4)
        self.coordinator = Coordinator(
            replace(study.settings(variant), pull_s=study.costs.pull_s), self.ledger, planned, infos
        )
        self.engines = [Engine(i, cost, prefill=fleet.prefill, pull_s=study.costs.pull_s) for i in infos]
        self._lengths = lengths or Lengths(study.workload, s.group_size + s.spare_members + variant.spare_members, seed)
        self._kept: dict[int, Sample] = {}  # the trajectory server: what is on no engine
        self._recorder = Recorder(study, self.engines, gantt)
        self._events: list[tuple[float, int, Callable[..., None], tuple[Any, ...]]] = []
        self._epochs = [0] * fleet.instances
        self._dirty: set[int] = set(range(fleet.instances))
        self._now_s = self._last_cycle_s = self._last_snapshot_s = self._last_batch_s = 0.0
        self._number = self._offered = 0
        self._published = 0
        self._cycle_at = NEVER
        self._training = False

    # ---- the loop -------------------------------------------------------------------------------------------------

    def run(self, progress: Callable[[int], None] = lambda steps: None) -> Outcome:
        """Run to the last step; `progress` is told the steps trained so far."""
        self.coordinator.published(0)
        self._want_cycle()
        self._at(self._study.run.snapshot_s, self._tick)
        told = 0
        while self._recorder.steps < self._study.run.steps:
            self._now_s, _, act, arguments = heapq.heappop(self._events)
            act(*arguments)
            if self._now_s - self._last_batch_s > _STALLED_S:
                raise RuntimeError(f"no step for {_STALLED_S:.0f} s; waiting for {self.coordinator.waiting_for()[:4]}")
            if self._recorder.steps > told:
                told = self._recorder.steps
                progress(told)
        self.ledger.check()
        return self._recorder.outcome(self._now_s, self.coordinator, self.ledger, self._lengths)

    def _at(self, time_s: float, act: Callable[..., None], *arguments: Any) -> None:
        self._number += 1
        heapq.heappush(self._events, (time_s, self._number, act, arguments))

    def _tick(self) -> None:
        """Snapshots come even when nothing happens."""
        self._want_cycle()
        self._at(self._now_s + self._study.run.snapshot_s, self._tick)

    # ---- coordinator ----------------------------------------------------------------------------------------------

    def _want_cycle(self) -> None:
        if self._cycle_at == NEVER:
            self._cycle_at = max(self._now_s, self._last_cycle_s + self._study.run.cycle_s)
            self._at(self._cycle_at, self._cycle)

    def _cycle(self) -> None:
        self._cycle_at, self._last_cycle_s = NEVER, self._now_s
        whole = self._now_s - self._last_snapshot_s >= self._study.run.snapshot_s
        if whole:
            self._last_snapshot_s = self._now_s
        for index in range(len(self.engines)) if whole else sorted(self._dirty):
            engine = self.engines[index]
            engine.advance(self._now_s)
            self.coordinator.snapshot(engine.snapshot(progress=whole), self._now_s)
        self._dirty.clear()
        size = self._study.workload.prompt_tokens
        for _ in range(self.coordinator.wanted()):
            self.coordinator.offer(self._offered, size, self._study.workload.clip)
            self._offered += 1
        for command in self.coordinator.cycle(self._now_s):
            self._at(self._now_s + self._costs.command_s, self._apply, command)
        for released in self.coordinator.drain_released():
            self._kept.pop(released.tid, None)
        if whole:
            self._recorder.sample(self._now_s)

    def _apply(self, command: Command) -> None:
        engine = self.engines[command.instance]
        engine.advance(self._now_s)
        engine.applied = command.id
        if isinstance(command, Route):
            engine.route([self._sample(tid) for tid in command.tids])
        elif isinstance(command, Pull):
            engine.pull(self._published)
        elif isinstance(command, Interrupt):
            gone = engine.take(command.tids)
            self._at(self._now_s + self._costs.command_s, self._return, gone)
        elif isinstance(command, Abort):
            engine.take(command.tids)
        self._settle(command.instance)

    def _sample(self, tid: int) -> Sample:
        kept = self._kept.pop(tid, None)
        if kept is not None:
            return kept
        group, member = group_and_member(tid)
        return Sample(tid, self._study.workload.prompt_tokens, int(self._lengths(group)[member]))

    def _return(self, samples: list[Sample]) -> None:
        for sample in samples:
            self._kept[sample.tid] = sample
            self.coordinator.returned(sample.tid, int(sample.tokens), sample.v_traj if sample.v_traj >= 0 else None)
        self._want_cycle()

    # ---- engines and rewards --------------------------------------------------------------------------------------

    def _settle(self, index: int) -> None:
        """Something changed on an engine: report what ended, and find its next event."""
        engine = self.engines[index]
        for sample in engine.settle():
            self._kept[sample.tid] = sample
            self.coordinator.finished(sample.tid, sample.target_tokens, sample.v_traj, sample.segments)
            self._at(self._now_s + self._costs.reward_s, self._reward, sample.tid)
        self._dirty.add(index)
        self._epochs[index] += 1
        if (at := engine.next_event_s()) != NEVER:
            self._at(at, self._engine_event, index, self._epochs[index])
        self._want_cycle()

    def _engine_event(self, index: int, epoch: int) -> None:
        if epoch == self._epochs[index]:
            self.engines[index].advance(self._now_s)
            self._settle(index)

    def _reward(self, tid: int) -> None:
        self.coordinator.rewarded(tid, float(tid))
        self._train()
        self._want_cycle()

    # ---- the trainer ----------------------------------------------------------------------------------------------

    def _train(self) -> None:
        if self._training or (batch := self.coordinator.next_batch()) is None:
            return
        samples = [[self._kept.pop(tid) for tid in tids] for _, tids in batch.groups]
        tokens = sum(s.target_tokens for group in samples for s in group)
        seconds = train_s(self._study, self._fluid.rollout_tokens_per_s, tokens)
        self._training, self._last_batch_s = True, self._now_s
        self._recorder.begin_step(self._now_s, batch.step, samples, seconds)
        self._at(self._now_s + seconds, self._trained, batch)

    def _trained(self, batch: Batch) -> None:
        self._training = False
        self._recorder.end_step(self._now_s)
        self._at(self._now_s + self._costs.push_s, self._publish, batch.step + 1)
        self._train()

    def _publish(self, version: int) -> None:
        self._published = version
        self.coordinator.published(version)
        self._want_cycle()
