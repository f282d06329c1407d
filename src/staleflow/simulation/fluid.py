"""The fluid bound: what no policy can exceed, whatever it knows. And the training time that balances rollout."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from staleflow.coordination.cost_model import CostModel
from staleflow.simulation.config import Study
from staleflow.simulation.workload import Lengths


@dataclass(frozen=True, slots=True)
class Fluid:
    """Tokens per second of all instances at the best batch size, and of the trainer; response tokens of a step."""

    rollout_tokens_per_s: float
    training_tokens_per_s: float
    step_tokens: float

    @property
    def tokens_per_s(self) -> float:
        return min(self.rollout_tokens_per_s, self.training_tokens_per_s)


def fluid_bound(study: Study, cost: CostModel) -> Fluid:
    """With lengths l and prompts p a running trajectory holds p + E[l^2] / 2E[l] tokens of cache on the mean of time.

    The best batch is the number of running trajectories, at most what cache and `max_running` hold, that gives the most
    tokens per second; each trajectory's prompt is computed once per group (once per trajectory without groups).
    """
    lengths = Lengths(study.workload, study.staleness.group_size, seed=0)
    sample = np.concatenate([lengths(g) for g in range(4096)]).astype(np.float64)
    mean = float(sample.mean())
    context = study.workload.prompt_tokens + float((sample**2).mean()) / (2.0 * mean)
    most = max(1, min(study.fleet.max_running, int(study.fleet.kv_capacity_tokens / context)))
    prompt_s = cost.prefill_s(study.workload.prompt_tokens) / study.staleness.group_size if study.fleet.prefill else 0.0
    best = max(1.0 / (1.0 / cost.throughput(n, n * context) + prompt_s / mean) for n in range(1, min(most, 4096) + 1))
    rollout = best * study.fleet.instances
    tokens = mean * study.staleness.batch_groups * study.staleness.group_size
    return Fluid(rollout, tokens / train_s(study, rollout, tokens), tokens)


def train_s(study: Study, rollout_tokens_per_s: float, tokens: float) -> float:
    """Seconds of one step on this many tokens; "balanced" takes as long as their rollout at the fluid rate."""
    per_token = study.costs.train_s_per_token
    rate = 1.0 / rollout_tokens_per_s if per_token == "balanced" else float(per_token)
    return study.costs.train_s + rate * tokens
