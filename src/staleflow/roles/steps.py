"""The step in training, from the coordinator's side: planned from lengths alone, sent to the trainers' hosts, counted.

One step at a time; its payloads come to the nodes of the trainers first (`Payloads.collect`).
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from staleflow.config import Config
from staleflow.coordination.types import Batch
from staleflow.jobs.plan import JobPlan
from staleflow.roles import messages as m
from staleflow.roles.accounts import Accounts
from staleflow.roles.auditing import Audit
from staleflow.roles.batching import StepPlan, advantages_of, ages_of, canonical, plan_step
from staleflow.roles.payloads import Payloads
from staleflow.trajectories.schema import group_and_member


class Steps:
    """`running`: the step that the trainers are at, or None."""

    def __init__(
        self,
        config: Config,
        job_plan: JobPlan,
        payloads: Payloads,
        accounts: Accounts,
        audit: Audit,
        observer: Any,
        send: Callable[[int, m.ToHost], None],
    ) -> None:
        self._c, self._plan, self._payloads, self._send = config, job_plan, payloads, send
        self._accounts, self._audit, self._observer = accounts, audit, observer
        self.running: StepPlan | None = None
        self._done: dict[int, m.StepDone] = {}

    def begin(self, batch: Batch, now_s: float) -> None:
        p = self._payloads
        batch = canonical(batch, {group_id: p.prompt_of[group_id].index for group_id, _ in batch.groups})
        advantages = advantages_of(batch, p.rewards, p.generated, self._c.algorithm, self._c.rollout.max_tokens)
        plan = plan_step(
            batch,
            advantages,
            p.generated,
            trainers=len(self._plan.trainers),
            microbatch_tokens=self._c.trainer.microbatch_tokens,
            updates=self._c.algorithm.updates_per_step,
        )
        self.running, self._done = plan, {}
        self._send_step(plan)
        self._account(plan, now_s)

    def _send_step(self, plan: StepPlan) -> None:
        header = m.StepHeader(
            plan.step, plan.microbatches, plan.total_tokens, plan.response_tokens, len(plan.tids), plan.groups
        )
        by_node: dict[int, list[tuple[int, list[list[int]]]]] = {}
        for rank, microbatches in zip(self._plan.trainers, plan.ranks, strict=True):
            node = self._plan.ranks[rank].node
            by_node.setdefault(node, []).append((rank, [list(part) for part in microbatches]))
            self._payloads.collect(node, [tid for part in microbatches for tid in part])
        tids = {node: [tid for _, parts in ranks for part in parts for tid in part] for node, ranks in by_node.items()}
        self._audit.sent_step(tids)
        for node, ranks in by_node.items():
            self._send(node, m.TrainStep(header, ranks, {tid: plan.advantages[tid] for tid in tids[node]}))

    def _account(self, plan: StepPlan, now_s: float) -> None:
        p = self._payloads
        ages = ages_of(plan.tids, p.generated, plan.step)
        segments = [len(p.generated[tid].segments) for tid in plan.tids]
        reward = sum(p.rewards[tid] for tid in plan.tids) / len(plan.tids)
        self._accounts.trained(ages, plan.response_tokens, segments, reward)
        prompts = [p.prompt_of[group].index for group in dict.fromkeys(group_and_member(t)[0] for t in plan.tids)]
        self._observer.step_started(ages, reward, now_s, prompts)

    def done(self, done: m.StepDone, now_s: float) -> StepPlan | None:
        """A trainer rank has finished; the step, when it was the last one."""
        self._done[done.rank] = done
        plan = self.running
        if plan is None or len(self._done) < len(self._plan.trainers):
            return None
        slowest = max(self._done.values(), key=lambda d: d.busy_s)
        self._accounts.trainer_busy_s += slowest.busy_s - slowest.snapshot_wait_s
        self._accounts.publish_wait_s += slowest.snapshot_wait_s
        self.running = None
        leader = self._done[self._plan.trainers[0]]
        self._observer.step_done(plan, leader.metrics, slowest, now_s)
        return plan
