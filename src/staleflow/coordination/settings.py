"""What can be chosen about coordination. Names are checked at the border (`Coordinator.__init__`)."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class CoordinationSettings:
    """Strategies by name, and their thresholds (paper's values where the paper has one).

    `mu`: a new trajectory is placed only where it gains at least this share of what it would gain on an empty instance
    (`marginal_gain`). `growth`: mean contexts by which each running trajectory is expected to grow, `affinity`: how
    much longer a step may be where the siblings' prompt is cached (`step_time`).
    `kv_threshold`: share of the KV cache in use up to which `paper` Pulls. `kv_limit`: share that routing fills.
    `phi_wait`: trajectories waiting on an instance before some are moved. `imbalance`: ratio of two decode steps from
    which stragglers are moved, `imbalance_left`: what a move must make of the longer one, `max_moves` at once.
    `pull_s`: seconds of a Pull beside computing the contexts again.
    """

    policy: str = "staleflow"
    routing: str = "step_time"
    synchronization: str = "gain"
    migration: str = "subset"
    mu: float = 0.3
    phi_wait: int = 3
    kv_threshold: float = 0.6
    kv_limit: float = 0.95
    growth: float = 0.6
    affinity: float = 1.2
    imbalance: float = 1.2
    imbalance_left: float = 0.98
    max_moves: int = 8
    partial_rollout: bool = True
    filter_zero_variance: bool = False
    pull_s: float = 0.0
    max_filter_rounds: int = 10
    max_routes_per_cycle: int = 4096
    cycle_ms: float = 50.0  # the driver runs at most one cycle in this time
    cost_model: str | None = None  # path of a cost_model.toml; None: a default for the device
