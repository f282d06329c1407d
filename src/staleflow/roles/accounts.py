"""What the run has done so far, in numbers: the source of metrics.jsonl, of the live view and of summary.json."""

from __future__ import annotations

from collections import Counter, deque
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from staleflow.roles.messages import Probe, Snapshot

_LASTING = (
    "rewards", "trained_trajectories", "trained_tokens", "trainer_busy_s", "publish_wait_s", "segments_max",
    "interrupted",
)  # fmt: skip


@dataclass
class Accounts:
    """Times in seconds, cumulative since training could begin (`began_s`)."""

    rewards: list[float] = field(default_factory=list)  # mean reward of each step
    ages: Counter[int] = field(default_factory=Counter)
    trained_trajectories: int = 0
    trained_tokens: int = 0
    trainer_busy_s: float = 0.0
    publish_s: list[float] = field(default_factory=list)
    publish_wait_s: float = 0.0
    pull_s: list[float] = field(default_factory=list)
    interrupted: int = 0  # by Pulls; those called back to be moved are the core's
    segments_max: int = 0
    began_s: float = 0.0
    ended_s: float = 0.0
    earlier_s: float = 0.0  # of earlier attempts, which this one has resumed
    earlier_generated_tokens: int = 0
    engines: dict[int, Snapshot] = field(default_factory=dict)
    busy_at_begin: dict[int, float] = field(default_factory=dict)
    gaps: list[float] = field(default_factory=list)
    discarded: Counter[str] = field(default_factory=Counter)
    _probes: dict[int, dict[int, np.ndarray]] = field(default_factory=dict)
    _recent: deque[tuple[float, int]] = field(default_factory=lambda: deque(maxlen=64))

    def snapshot(self, s: Snapshot) -> None:
        self.busy_at_begin.setdefault(s.instance, s.busy_s)
        self.engines[s.instance] = s

    @property
    def generated_tokens(self) -> int:
        return self.earlier_generated_tokens + sum(s.generated_tokens for s in self.engines.values())

    def tokens_per_s(self, now_s: float) -> float:
        """Generated tokens per second over the last few seconds."""
        self._recent.append((now_s, self.generated_tokens))
        (then_s, then), (_, now) = self._recent[0], self._recent[-1]
        return (now - then) / (now_s - then_s) if now_s > then_s else 0.0

    def trained(self, ages: Counter[int], tokens: int, segments: Sequence[int], reward: float) -> None:
        self.ages.update(ages)
        self.trained_trajectories += sum(ages.values())
        self.trained_tokens += tokens
        self.segments_max = max(self.segments_max, *segments)
        self.rewards.append(reward)

    def probe(self, probe: Probe, trainer: bool) -> None:
        """Compare engine and trainer at the same version, whichever came first."""
        side = self._probes.setdefault(probe.version, {})
        side[-1 if trainer else probe.rank] = np.frombuffer(probe.logprobs, np.float32)
        reference = side.get(-1)
        if reference is None:
            return
        for rank in [r for r in side if r >= 0]:
            self.gaps.append(float(np.abs(side.pop(rank) - reference).mean()))
        for old in [v for v in self._probes if v < probe.version - 16]:
            del self._probes[old]

    def wall_s(self, now_s: float) -> float:
        return self.earlier_s + self._attempt_s(now_s)

    def _attempt_s(self, now_s: float) -> float:
        return max(1e-9, (self.ended_s or now_s) - self.began_s)

    def trainer_idle_fraction(self, now_s: float) -> float:
        return max(0.0, 1.0 - self.trainer_busy_s / self.wall_s(now_s))

    def rollout_busy_fraction(self, now_s: float) -> float:
        busy = [s.busy_s - self.busy_at_begin[i] for i, s in self.engines.items()]
        return min(1.0, sum(busy) / (len(busy) * self._attempt_s(now_s))) if busy else 0.0

    def dump(self, now_s: float) -> dict[str, Any]:
        """What a resumed run counts on from; JSON-able."""
        return {
            **{name: getattr(self, name) for name in _LASTING},
            "ages": sorted(self.ages.items()),
            "discarded": dict(self.discarded),
            "earlier_s": self.wall_s(now_s) if self.began_s else self.earlier_s,
            "earlier_generated_tokens": self.generated_tokens,
        }

    def load(self, state: dict[str, Any]) -> None:
        """Take over a `dump()`."""
        for name in (*_LASTING, "earlier_s", "earlier_generated_tokens"):
            setattr(self, name, state[name])
        self.ages, self.discarded = Counter(dict(state["ages"])), Counter(state["discarded"])

    def reward_ends(self) -> tuple[float | None, float | None]:
        """Mean reward of the first and of the last tenth of the steps."""
        if not self.rewards:
            return None, None
        tenth = max(1, len(self.rewards) // 10)
        return float(np.mean(self.rewards[:tenth])), float(np.mean(self.rewards[-tenth:]))
