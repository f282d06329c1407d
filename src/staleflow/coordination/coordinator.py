"""The coordinator core: facts in, commands out. No clock, no I/O, no threads; the same in a job and in the simulator.

Facts may be repeated by a transport and may overtake each other: each changes something once. The cost of a fact is
that of what it names; the cost of a cycle is that of what changed plus the number of instances.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from typing import Any

from staleflow.coordination import persistence
from staleflow.coordination.board import Board, Phase, Work
from staleflow.coordination.cost_model import CostModel
from staleflow.coordination.desk import Desk, Group
from staleflow.coordination.ledger import Ledger
from staleflow.coordination.policies import make_policy
from staleflow.coordination.settings import CoordinationSettings
from staleflow.coordination.types import (
    EVAL_GROUP_BASE,
    Batch,
    Command,
    CoordinatorView,
    InstanceInfo,
    InstanceSnapshot,
    InstanceView,
    Released,
    Waited,
    is_evaluation,
)
from staleflow.trajectories.schema import group_and_member


class CoordinationError(RuntimeError):
    """The run cannot go on; the message says what to change."""


class Coordinator:
    """See the module. `protocol` comes from `make_ledger(policy, …)`, so that books and policy fit together."""

    def __init__(
        self,
        settings: CoordinationSettings,
        protocol: Ledger,
        cost_model: CostModel,
        instances: Sequence[InstanceInfo],
    ) -> None:
        if settings.filter_zero_variance and protocol.group_size < 2:
            raise ValueError("filter_zero_variance with group_size = 1: a single reward never varies; switch it off")
        self._policy = make_policy(settings)
        self._settings, self._ledger = settings, protocol
        self._board = Board(instances)
        self._desk = Desk(self._board, protocol, settings, cost_model, may_begin=self._policy.may_begin)
        self._works, self._groups = self._board.works, self._desk.groups
        self._released: list[Released] = []
        self._aborting: dict[int, tuple[str, int]] = {}  # tid -> reason, tokens known: may still come on its way out
        self._discarded: Counter[str] = Counter()
        self._counts: Counter[str] = Counter()
        self._last_group = -1
        self._no_more_data = self._paused = False
        self._filtered_in_a_row = 0
        self._published_s = 0.0

    @property
    def version(self) -> int:
        """The step that is trained next."""
        return self._ledger.version

    # ---- facts: prompts -------------------------------------------------------------------------------------------

    def offer(
        self, group_id: int, prompt_tokens: int, max_new_tokens: int, expected_tokens: float | None = None
    ) -> None:
        """A prompt that may be drawn. Ids rise; a repeated offer changes nothing."""
        if group_id <= self._last_group:
            return
        if group_id >= EVAL_GROUP_BASE:
            raise ValueError(f"group id {group_id}: ids from {EVAL_GROUP_BASE} up are evaluation work; use evaluate()")
        self._last_group = group_id
        size = self._ledger.group_size + self._ledger.spare_members
        group = Group(group_id, prompt_tokens, max_new_tokens, expected_tokens, size)
        self._groups[group_id] = group
        self._desk.offers.append(group)
        if not self._desk.mean_context_tokens:  # before anything has finished: a quarter of the limit
            self._desk.mean_context_tokens = prompt_tokens + 0.5 * (expected_tokens or 0.25 * max_new_tokens)

    def wanted(self) -> int:
        """How many more prompts the core would like to have at hand: what could be admitted, and one batch more."""
        if self._no_more_data:
            return 0
        batch = self._ledger.batch_groups + self._ledger.spare_groups
        room = (self._ledger.eta + 1) * batch - self._desk.outstanding_groups
        return max(0, room + batch - len(self._desk.offers))

    def end_of_data(self) -> None:
        self._no_more_data = True

    # ---- facts: instances -----------------------------------------------------------------------------------------

    def snapshot(self, s: InstanceSnapshot, now_s: float) -> None:
        """An instance's own view of itself. An older one than the last accepted is ignored."""
        if not self._board.accept(s):
            self._counts["snapshots_rejected"] += 1

    def joined(self, info: InstanceInfo) -> None:
        """A new instance, or one that came back empty after `lost`."""
        self._board.join(info)

    def lost(self, instance: int, tokens: Mapping[int, int]) -> None:
        """An instance is gone. Its trajectories wait again, with the `tokens` that survived (others start again).

        What it had reported before (`finished`, `returned`) must have been delivered, or it would be generated twice.
        """
        gone = self._board.instances.get(instance)
        if gone is None:
            return
        for work in list(gone.held.values()):
            self._board.lift(work)
            work.tokens = tokens.get(work.tid, 0)
            self._board.enqueue(work)
        del self._board.instances[instance]

    # ---- facts: trajectories --------------------------------------------------------------------------------------

    def returned(self, tid: int, tokens: int, v_traj: int | None = None, command: int | None = None) -> None:
        """An interrupted trajectory is back in the trajectory server with this many response tokens.

        `v_traj` is the version that its payload says it was started at, which may be newer than what was reserved.
        `command` is the id of the Interrupt that it answers: needed only where a transport may repeat the fact so late
        that the trajectory is being interrupted again.
        """
        work = self._works.get(tid)
        if work is None:
            self._ended_too_late(tid, tokens)
            return
        if work.phase is not Phase.LEAVING or command not in (None, work.interrupted_by):
            return
        self._board.lift(work)
        work.tokens = tokens
        work.floor = max(work.floor, -1 if v_traj is None else v_traj)
        self._board.enqueue(work)

    def finished(self, tid: int, tokens: int, v_traj: int, segments: int) -> None:
        """Generation ended and the payload is durable."""
        work = self._works.get(tid)
        if work is None:
            self._ended_too_late(tid, tokens)
            return
        if work.phase is Phase.GENERATED:
            return
        if not work.evaluation and v_traj < work.version:
            raise CoordinationError(f"trajectory {tid}: started at version {v_traj}, reserved at {work.version}")
        self._board.lift(work)
        work.tokens, work.phase = tokens, Phase.GENERATED
        self._counts["generated_tokens"] += tokens
        self._desk.learn_length(work.prompt_tokens, tokens)
        if work.evaluation:
            del self._works[tid]
        else:
            self._desk.unfinished -= 1

    def _ended_too_late(self, tid: int, tokens: int) -> None:
        """It was given up, and finished or was called back before its Abort arrived: its payload is to be freed."""
        if tid in self._aborting:
            reason, known = self._aborting.pop(tid)
            self._discard(tid, reason, max(0, tokens - known))

    def rewarded(self, tid: int, reward: float) -> None:
        """A finished trajectory has its reward. The last one of a group decides: occupied, or filtered."""
        work = self._works.get(tid)
        if work is None or work.phase is not Phase.GENERATED:
            return
        group = self._groups[work.group_id]
        if tid in group.rewards:
            return
        group.rewards[tid] = reward
        if len(group.rewards) == self._ledger.group_size and self._filter(group):
            return
        if self._ledger.occupy(group.group_id, group_and_member(tid)[1]):
            group.complete = True
            self._filtered_in_a_row = 0
            self._drop_spares(group)

    def _filter(self, group: Group) -> bool:
        """Release a group whose rewards are all equal, if that is asked for (DAPO's dynamic sampling)."""
        if not self._settings.filter_zero_variance or len(set(group.rewards.values())) > 1:
            return False
        self._filtered_in_a_row += 1
        limit = self._settings.max_filter_rounds * self._ledger.batch_groups
        if self._filtered_in_a_row > limit:
            raise CoordinationError(
                f"{self._filtered_in_a_row} groups in a row had equal rewards and were filtered; the task is too easy "
                "or too hard for this model: change the data, or set algorithm.filter_zero_variance = false"
            )
        self._release(group, "filtered")
        return True

    def failed(self, tid: int, why: str) -> None:
        """Generation or reward failed for good: the whole group is given up."""
        work = self._works.get(tid)
        if work is None:
            return
        self._counts["failures"] += 1
        if work.evaluation:
            self._board.abort(work)
            del self._works[tid]
            return
        self._release(self._groups[work.group_id], "failed")

    # ---- giving up ------------------------------------------------------------------------------------------------

    def _release(self, group: Group, reason: str) -> None:
        self._ledger.release(group.group_id, reason)
        self._forget(group, reason)

    def _forget(self, group: Group, reason: str) -> None:
        """Drop a group that the ledger has released already."""
        for tid in list(group.works):
            self._discard_work(group, tid, reason)
        del self._groups[group.group_id]
        if group.placed < group.size:
            self._desk.offers.remove(group)

    def _drop_spares(self, group: Group) -> None:
        """The group is complete: nobody needs the members that still run, or that have not begun."""
        for tid in [t for t in group.works if t not in group.rewards]:
            self._ledger.release(group.group_id, "redundant", group_and_member(tid)[1])
            self._discard_work(group, tid, "redundant")
        if group.placed < group.size:
            group.size = group.placed
            self._desk.offers.remove(group)

    def _discard_work(self, group: Group, tid: int, reason: str) -> None:
        work = group.works.pop(tid)
        del self._works[tid]
        if work.phase is not Phase.GENERATED:
            self._desk.unfinished -= 1
            if work.instance is not None:
                self._board.refresh(self._board.instances[work.instance])
                self._aborting[tid] = (reason, work.tokens)
            self._board.abort(work)
        self._discard(tid, reason, work.tokens)

    def _discard(self, tid: int, reason: str, tokens: int) -> None:
        self._released.append(Released(tid, reason, tokens))
        self._discarded[reason] += tokens

    def drain_released(self) -> list[Released]:
        """Trajectories whose payload may be freed, since the last call."""
        out, self._released = self._released, []
        return out

    # ---- facts: the trainer ---------------------------------------------------------------------------------------

    def published(self, version: int) -> None:
        """Every store holds this version: Pulls may be told."""
        desk = self._desk
        if version <= desk.published:
            return
        if desk.published >= 0:
            life_s = (desk.now_s - self._published_s) / (version - desk.published)
            desk.version_life_s = 0.5 * (desk.version_life_s + life_s) if desk.version_life_s else life_s
        desk.published, self._published_s = version, desk.now_s

    def next_batch(self) -> Batch | None:
        """What the next step trains on, if it is ready; taken from the books for good."""
        if not self._ledger.ready():
            return None
        step = self._ledger.version
        chosen = self._ledger.consume()
        batch = Batch(step, tuple((group_id, tuple(self._groups[group_id].rewards)) for group_id in chosen))
        for group_id in chosen:
            for tid in self._groups.pop(group_id).works:
                del self._works[tid]
        self._drop_what_the_ledger_released()
        return batch

    def _drop_what_the_ledger_released(self) -> None:
        """Surplus of spare groups, or what the `drop` baseline found too old: whole groups."""
        for group_id, reason in {group_id: reason for group_id, _, reason in self._ledger.dropped}.items():
            if group_id in self._groups:
                self._forget(self._groups[group_id], reason)

    # ---- evaluation -----------------------------------------------------------------------------------------------

    def evaluate(self, tids: Sequence[int], prompt_tokens: Sequence[int], version: int) -> None:
        """Generate these at a version >= `version`, before anything else. Their `finished` is only remembered."""
        for tid, tokens in zip(tids, prompt_tokens, strict=True):
            if not is_evaluation(tid):
                raise ValueError(f"trajectory {tid}: evaluation needs group ids from {EVAL_GROUP_BASE} up")
            if tid not in self._works:
                work = self._works[tid] = Work(tid, tokens, version=version, floor=version)
                self._board.enqueue(work)

    def evaluations_outstanding(self) -> int:
        return len(self._board.evaluations) + sum(i.evaluations for i in self._board.instances.values())

    # ---- decisions ------------------------------------------------------------------------------------------------

    def cycle(self, now_s: float) -> list[Command]:
        """What to tell the instances now. Commands carry rising ids and are to be delivered in this order."""
        desk = self._desk
        desk.now_s = now_s
        pulled = self._policy.synchronization(desk)
        if not self._paused:
            self._policy.routing(desk)
            if not pulled:
                self._counts["migrations"] += self._policy.migration(desk)
        self._counts["cycles"] += 1
        return self._board.drain()

    def pause_admission(self, paused: bool) -> None:
        """While paused nothing is routed."""
        self._paused = paused

    def interrupt_all(self) -> list[Command]:
        """Call every running trajectory back to the trajectory server."""
        for instance in self._board.instances.values():
            for work in list(instance.held.values()):
                if work.phase is Phase.RUNNING:
                    self._board.interrupt(work, instance)
        return self._board.drain()

    # ---- views ----------------------------------------------------------------------------------------------------

    def waiting_for(self) -> list[Waited]:
        """The trajectories that a stuck step waits for."""
        out = []
        for group_id in sorted(self._ledger.waiting_for()):
            group = self._groups[group_id]
            out += [Waited(group_id, tid, w.instance) for tid, w in group.works.items() if tid not in group.rewards]
        return out

    def view(self) -> CoordinatorView:
        awaiting = sum(w.phase is Phase.GENERATED for w in self._works.values()) - sum(
            len(g.rewards) for g in self._groups.values()
        )
        instances = tuple(
            InstanceView(
                i.info.index,
                i.spec_version,
                i.pulling,
                i.running,
                i.spec_waiting,
                i.kv_tokens,
                i.info.kv_capacity_tokens,
            )
            for i in self._board.instances.values()
        )
        return CoordinatorView(
            version=self.version,
            published=self._desk.published,
            instances=instances,
            buffers=tuple(tuple(row) for row in self._ledger.buffers()),
            queued=self._board.queued(),
            offered_groups=len(self._desk.offers),
            awaiting_reward=awaiting,
            interrupts=self._board.interrupts,
            migrations=self._counts["migrations"],
            pulls=self._board.pulls,
            discarded_tokens=dict(self._discarded),
        )

    def counters(self) -> Any:
        """The ledger's own counts, per group and per trajectory."""
        return self._ledger.counters()

    def dump_ledger(self) -> Any:
        """The ledger's state, JSON-able."""
        return self._ledger.dump()

    def holds(self, group_id: int) -> bool:
        """Whether a group is still on offer, on its way or finished, but neither consumed nor released."""
        return group_id in self._groups

    def exhausted(self) -> bool:
        """The data has ended and what is left cannot fill another step."""
        return self._no_more_data and len(self._groups) < self._ledger.batch_groups

    # ---- persistence ----------------------------------------------------------------------------------------------

    def dump(self) -> dict[str, Any]:
        """JSON-able metadata. The ledger is dumped by itself. What is on an instance counts as waiting."""
        return {
            "groups": [persistence.dump_group(group) for group in self._groups.values()],
            "last_group": self._last_group,
            "last_command": self._board.last_command,
            "no_more_data": self._no_more_data,
            "discarded": dict(self._discarded),
            "counts": dict(self._counts),
        }

    def load(self, state: Mapping[str, Any]) -> None:
        """Take over a `dump()` into a fresh coordinator over the same ledger: nothing is on an instance."""
        size = self._ledger.group_size + self._ledger.spare_members
        for saved in state["groups"]:
            persistence.load_group(self._desk, saved, size)
        self._last_group, self._no_more_data = state["last_group"], state["no_more_data"]
        self._board.last_command = state["last_command"]
        self._discarded, self._counts = Counter(state["discarded"]), Counter(state["counts"])

    def unrewarded(self) -> list[int]:
        """Generated trajectories without a reward yet: after `load`, their reward must be asked for again."""
        done = {tid for group in self._groups.values() for tid in group.rewards}
        return [tid for tid, w in self._works.items() if w.phase is Phase.GENERATED and tid not in done]
