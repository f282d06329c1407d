"""What a strategy works on: the board, the books, the offered prompts, the clock value. Strategies act through it."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field

from staleflow.coordination.board import Board, Instance, Work
from staleflow.coordination.cost_model import CostModel
from staleflow.coordination.ledger import Ledger
from staleflow.coordination.settings import CoordinationSettings
from staleflow.trajectories.schema import trajectory_id


@dataclass(slots=True, eq=False)
class Group:
    """One prompt. `placed` members have been dispatched, in the order of their numbers."""

    group_id: int
    prompt_tokens: int
    max_new_tokens: int
    expected_tokens: float | None
    size: int
    placed: int = 0
    works: dict[int, Work] = field(default_factory=dict)  # tid -> outstanding member
    rewards: dict[int, float] = field(default_factory=dict)  # tid -> reward, of the members occupied so far
    complete: bool = False


@dataclass(slots=True, eq=False)
class Desk:
    board: Board
    ledger: Ledger
    settings: CoordinationSettings
    cost: CostModel
    groups: dict[int, Group] = field(default_factory=dict)  # every group that is offered or outstanding
    offers: deque[Group] = field(default_factory=deque)  # groups with members not yet dispatched, oldest first
    published: int = -1
    now_s: float = 0.0
    may_begin: Callable[[Desk], bool] = lambda desk: True  # the policy's say on groups without a place
    unfinished: int = 0  # trajectories dispatched and not yet generated, evaluation apart

    @property
    def outstanding_groups(self) -> int:
        """Groups that hold a place. Offers are dispatched in order, so only the first can be partly placed."""
        partly = bool(self.offers) and self.offers[0].placed > 0
        return len(self.groups) - len(self.offers) + partly

    def start(self, group: Group, instance: Instance) -> bool:
        """Reserve a place for the group's next member at this instance's version and route it; False: refused."""
        version = instance.spec_version
        if not self.ledger.reserve(group.group_id, group.placed, version):
            return False
        tid = trajectory_id(group.group_id, group.placed)
        work = Work(tid, group.prompt_tokens, version=version, floor=version)
        group.works[tid] = self.board.works[tid] = work
        group.placed += 1
        self.unfinished += 1
        self.board.route(work, instance)
        return True

    def lagging(self) -> Iterator[Instance]:
        """Instances that may be told to Pull: older than what is published, and without evaluation work."""
        for instance in self.board.instances.values():
            if instance.spec_version < self.published and not instance.evaluations:
                yield instance
