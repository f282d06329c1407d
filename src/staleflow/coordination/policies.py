"""A policy is a choice of books (`make_ledger`), strategies, and the versions at which new prompts may begin."""

from __future__ import annotations

from dataclasses import dataclass

from staleflow.coordination.desk import Desk
from staleflow.coordination.migration import MIGRATIONS, Migration
from staleflow.coordination.routing import ROUTINGS, Routing
from staleflow.coordination.settings import CoordinationSettings
from staleflow.coordination.synchronization import SYNCHRONIZATIONS, Synchronization


@dataclass(frozen=True, slots=True)
class Policy:
    """`barrier`: None, or how many versions behind the trainer a whole batch is generated (`sync` 0, `one_step` 1)."""

    name: str
    routing: Routing
    synchronization: Synchronization
    migration: Migration
    barrier: int | None = None

    def may_begin(self, desk: Desk) -> bool:
        """May a group be begun that has no place yet?"""
        if self.barrier is None:
            return True
        behind = desk.ledger.version - desk.published
        batch = desk.ledger.batch_groups + desk.ledger.spare_groups
        everywhere = all(i.spec_version == desk.published for i in desk.board.instances.values())
        return behind <= self.barrier and desk.outstanding_groups < batch and everywhere


_BASELINES: dict[str, tuple[str, str, str, int | None]] = {
    "sync": ("balanced", "drained", "none", 0),
    "one_step": ("balanced", "drained", "none", 1),
    "pace": ("balanced", "greedy", "none", None),
    "drop": ("balanced", "greedy", "none", None),
    "wait": ("balanced", "greedy", "none", None),
}
POLICIES = ("staleflow", *_BASELINES)


def make_policy(settings: CoordinationSettings) -> Policy:
    """The policy of this name; `staleflow` takes its strategies from the settings. Raises ValueError."""
    if settings.policy not in POLICIES:
        raise ValueError(f"coordination.policy = {settings.policy!r}: known are {', '.join(POLICIES)}")
    own = (settings.routing, settings.synchronization, settings.migration, None)
    routing, synchronization, migration, barrier = _BASELINES.get(settings.policy, own)
    for key, name, table in (
        ("routing", routing, ROUTINGS),
        ("synchronization", synchronization, SYNCHRONIZATIONS),
        ("migration", migration, MIGRATIONS),
    ):
        if name not in table:
            raise ValueError(f"coordination.{key} = {name!r}: known are {', '.join(table)}")
    return Policy(
        settings.policy,
        ROUTINGS[routing](),
        SYNCHRONIZATIONS[synchronization](),
        MIGRATIONS[migration](),
        barrier,
    )
