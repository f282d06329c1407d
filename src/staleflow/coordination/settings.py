"""What can be chosen about coordination. Names are checked at the border (`Coordinator.__init__`)."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class CoordinationSettings:
    """Strategies by name, and their thresholds (paper's values where the paper has one).

    `mu`: a trajectory is placed only where it gains at least this share of what it would gain on an empty instance.
    `phi_wait`: trajectories waiting on an instance before some are moved. `phi_throughput`: ratio of the slowest to the
    fastest decode step before stragglers are moved. `kv_threshold`: share of the KV cache in use up to which `paper`
    synchronization Pulls. `kv_limit`: share of the KV cache that routing fills.
    """

    policy: str = "staleflow"
    routing: str = "marginal_gain"
    synchronization: str = "paper"
    migration: str = "subset"
    mu: float = 0.3
    phi_wait: int = 3
    phi_throughput: float = 5.0
    kv_threshold: float = 0.6
    kv_limit: float = 0.95
    slowdown: float = 1.25
    moves: int = 8
    ratio: float = 1.1
    crit: int = 0
    partial_rollout: bool = True
    filter_zero_variance: bool = False
    max_filter_rounds: int = 10
    max_routes_per_cycle: int = 4096
    cycle_ms: float = 50.0  # the driver runs at most one cycle in this time
    cost_model: str | None = None  # path of a cost_model.toml; None: a default for the device
