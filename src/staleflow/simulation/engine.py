"""One simulated rollout instance: decoding integrated in closed form between events, as the cost model says.

With n running and kv tokens in the cache, x decode steps from now take

    T(x) = x * (k1*kv + max(k2, k3*n) + k4) + k1*n*x*x/2        seconds, since every step adds n tokens to the cache.

A trajectory that joins at step count s with r tokens to go ends at step s + r, whatever happens in between, so the
next end is the smallest of a heap. Prefill and Pulls stop decoding: they are a debt of seconds that is paid first.
"""

from __future__ import annotations

import heapq
import math
from collections import deque
from dataclasses import dataclass

from staleflow.coordination.cost_model import CostModel
from staleflow.coordination.types import InstanceInfo, InstanceSnapshot, pack_progress

_EPS = 1e-9
NEVER = math.inf


@dataclass(slots=True, eq=False)
class Sample:
    """A trajectory as an engine sees it. `ends_at` is a step count of its instance, meaningful while it runs."""

    tid: int
    prompt_tokens: int
    target_tokens: int
    tokens: float = 0.0
    v_traj: int = -1
    segments: int = 0
    ends_at: float = 0.0
    version: int = -1  # of its last segment

    @property
    def context_tokens(self) -> float:
        return self.prompt_tokens + self.tokens


class Engine:
    """State is valid at `now_s`; `advance` moves it. Callers act on it only at its own time."""

    def __init__(self, info: InstanceInfo, cost: CostModel, *, prefill: bool, pull_s: float) -> None:
        self.info, self._cost, self._prefill, self._pull_s = info, cost, prefill, pull_s
        self.version, self.applied = -1, 0
        self.now_s = self.busy_s = 0.0
        self.prefilled_tokens = 0.0
        self.preemptions = self.pulls = 0
        self.running: dict[int, Sample] = {}  # in order of admission
        self.waiting: deque[Sample] = deque()
        self._steps = self._kv = self._debt_s = 0.0
        self._ends: list[tuple[float, int]] = []
        self._prompts: dict[int, int] = {}  # group -> running members, which share the prompt's cache

    # ---- time -----------------------------------------------------------------------------------------------------

    def advance(self, now_s: float) -> None:
        """Decode until `now_s`, which must not lie beyond `next_event_s`."""
        spent = now_s - self.now_s
        self.now_s = now_s
        if self.running or self._debt_s > 0.0:
            self.busy_s += spent
        paid = min(spent, self._debt_s)
        self._debt_s -= paid
        n = len(self.running)
        if n and spent > paid:
            steps = self._steps_in(spent - paid, n)
            self._steps += steps
            self._kv += n * steps

    def _steps_in(self, seconds: float, n: int) -> float:
        """Inverse of T(x)."""
        per_step, growth = self._cost.step_s(n, self._kv), self._cost.k1 * n
        if growth <= 0.0:
            return seconds / per_step
        return 2.0 * seconds / (per_step + math.sqrt(per_step * per_step + 2.0 * growth * seconds))

    def next_event_s(self) -> float:
        """When something ends, or the cache is full."""
        n = len(self.running)
        if not n:
            return self.now_s + self._debt_s if self.waiting else NEVER
        while self._ends[0][1] not in self.running or self.running[self._ends[0][1]].ends_at != self._ends[0][0]:
            heapq.heappop(self._ends)
        until_end = max(0.0, self._ends[0][0] - self._steps)
        until_full = max(0.0, (self.info.kv_capacity_tokens - self._kv) / n) if n > 1 else NEVER
        steps = min(until_end, until_full)
        per_step = self._cost.step_s(n, self._kv)
        return self.now_s + self._debt_s + steps * per_step + 0.5 * self._cost.k1 * n * steps * steps

    def settle(self) -> list[Sample]:
        """What has ended by now leaves; then preempt or admit. Returns the ended ones."""
        done = []
        while self._ends and self._ends[0][0] <= self._steps + 1e-6:
            at, tid = heapq.heappop(self._ends)
            sample = self.running.get(tid)
            if sample is not None and sample.ends_at == at:
                self._leave(sample)
                sample.tokens = sample.target_tokens
                done.append(sample)
        self._preempt()
        self._admit()
        return done

    # ---- places ---------------------------------------------------------------------------------------------------

    def _leave(self, sample: Sample) -> None:
        del self.running[sample.tid]
        sample.tokens = min(float(sample.target_tokens), sample.target_tokens - (sample.ends_at - self._steps))
        self._kv = self._kv - sample.context_tokens if self.running else 0.0
        group = sample.tid >> 16
        self._prompts[group] -= 1
        if not self._prompts[group]:
            del self._prompts[group]

    def _preempt(self) -> None:
        """The youngest leaves when the cache is full, and must be computed again later."""
        while len(self.running) > 1 and self._kv >= self.info.kv_capacity_tokens - _EPS * self._kv:
            sample = self.running[next(reversed(self.running))]
            self._leave(sample)
            self.waiting.appendleft(sample)
            self.preemptions += 1

    def _admit(self) -> None:
        capacity, most = self.info.kv_capacity_tokens, self.info.max_running
        while self.waiting and len(self.running) < most:
            sample = self.waiting[0]
            if self.running and self._kv + sample.context_tokens + len(self.running) + 1 > capacity:
                return
            self.waiting.popleft()
            self._start(sample)

    def _start(self, sample: Sample) -> None:
        if sample.v_traj < 0:
            sample.v_traj = self.version
        if sample.version != self.version:
            sample.segments, sample.version = sample.segments + 1, self.version
        group = sample.tid >> 16
        siblings = self._prompts.get(group, 0)
        self._prompts[group] = siblings + 1
        self._compute(sample.context_tokens - (sample.prompt_tokens if siblings else 0))
        sample.ends_at = self._steps + sample.target_tokens - sample.tokens
        heapq.heappush(self._ends, (sample.ends_at, sample.tid))
        self.running[sample.tid] = sample
        self._kv += sample.context_tokens

    def _compute(self, tokens: float) -> None:
        self.prefilled_tokens += tokens
        if self._prefill:
            self._debt_s += self._cost.prefill_s(tokens)

    # ---- commands -------------------------------------------------------------------------------------------------

    def route(self, samples: list[Sample]) -> None:
        self.waiting.extend(samples)

    def take(self, tids: tuple[int, ...]) -> list[Sample]:
        """Remove these, running or waiting; the ones that are not here have ended already."""
        gone = []
        for tid in tids:
            if tid in self.running:
                gone.append(self.running[tid])
                self._leave(gone[-1])
        if len(gone) < len(tids) and self.waiting:
            left = set(tids)
            gone += [s for s in self.waiting if s.tid in left]
            self.waiting = deque(s for s in self.waiting if s.tid not in left)
        return gone

    def pull(self, version: int) -> None:
        """New parameters: what runs goes on afterwards, its cache computed again."""
        self.version = version
        self.pulls += 1
        self._debt_s += self._pull_s
        shared = sum((members - 1) for members in self._prompts.values())
        prompt = next(iter(self.running.values())).prompt_tokens if self.running else 0
        self._compute(max(0.0, self._kv - shared * prompt))
        for sample in self.running.values():
            sample.segments, sample.version = sample.segments + 1, version

    def snapshot(self, progress: bool) -> InstanceSnapshot:
        reported = b""
        if progress:
            base = self._steps
            pairs = [(tid, int(s.target_tokens - s.ends_at + base)) for tid, s in self.running.items()]
            reported = pack_progress(pairs + [(s.tid, int(s.tokens)) for s in self.waiting])
        return InstanceSnapshot(
            self.info.index,
            self.version,
            self.applied,
            len(self.running),
            len(self.waiting),
            int(self._kv),
            self.info.kv_capacity_tokens,
            reported,
            self.now_s,
        )
