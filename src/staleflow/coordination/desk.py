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
    version_life_s: float = 0.0  # between two published versions, smoothed; 0 until two were published
    mean_context_tokens: float = 0.0  # of a trajectory at half its length, smoothed over finished ones
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

    def learn_length(self, prompt_tokens: int, tokens: int) -> None:
        """A trajectory finished: on the mean over its life its context was half its length."""
        self.mean_context_tokens += 0.01 * (prompt_tokens + 0.5 * tokens - self.mean_context_tokens)

    def beginnable(self) -> int:
        """New trajectories that the books would admit at the published version."""
        if not self.offers or self.published > self.ledger.version or not self.ledger.can_reserve(self.published):
            return 0
        places = (self.ledger.eta + 1) * (self.ledger.batch_groups + self.ledger.spare_groups)
        first = self.offers[0].size - self.offers[0].placed if self.offers[0].placed else 0
        groups = min(places - self.outstanding_groups, len(self.offers))
        return max(0, groups) * self.offers[0].size + first

    def stranded(self) -> int:
        """Trajectories that wait and are too new for every instance."""
        newest = max(i.spec_version for i in self.board.instances.values())
        return sum(len(level) for floor, level in self.board.levels.items() if floor > newest)

    def lagging(self) -> Iterator[Instance]:
        """Instances that may be told to Pull: older than what is published, and without evaluation work."""
        for instance in self.board.instances.values():
            if instance.spec_version < self.published and not instance.evaluations:
                yield instance
