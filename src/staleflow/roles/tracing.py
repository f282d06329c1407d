"""Timelines of a rank: its spans, and on hosts the rewards."""

from __future__ import annotations

import time

from staleflow.jobs.runtime import Job
from staleflow.observe.spans import REWARD, REWARDS, Spans
from staleflow.rewards.pool import RewardPool
from staleflow.rewards.spec import RewardResult, RewardSpec


def spans_of(job: Job) -> Spans:
    directory = job.run_dir / "trace" if job.config.observe.trace else None
    return Spans(directory, job.rank, job.me.role, instance=job.me.instance, attempt=job.attempt)


class TracedRewards(RewardPool):
    """A reward pool that notes how long each trajectory was scored."""

    def __init__(self, spec: RewardSpec, spans: Spans) -> None:
        super().__init__(spec)
        self._spans = spans

    def poll(self) -> list[RewardResult]:
        results = super().poll()
        now_ns = time.perf_counter_ns()
        for result in results:
            self._spans.complete(REWARD, now_ns - int(result.seconds * 1e9), now_ns, REWARDS, tid=result.tid)
        return results
