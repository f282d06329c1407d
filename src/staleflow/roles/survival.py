"""`fault.survive_rollout`, the coordinator's side: what is done when an instance or a whole rollout node is gone.

An instance (one of its ranks died or failed; its host lives)
    the core routes its trajectories again, with the tokens that a trajectory server still holds; the host ends what is
    left of it.
A node (its host is gone, or the network to it)
    all its instances as above; rank 0's host adopts, from the node's spool, what was finished there and not trained on
    yet; what was to come from there is asked of rank 0's host; its unanswered evaluations are generated again; a
    checkpoint under way is given up; trainers and the other relays make a new publish group.

Trainers, rank 0's node, and the last instance are essential: without them the job ends. So does it before all ranks are
ready: then a new start costs nothing.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from staleflow.config import Config
from staleflow.coordination.coordinator import Coordinator
from staleflow.jobs.plan import JobPlan
from staleflow.roles import messages as m
from staleflow.roles.batching import Generated
from staleflow.roles.checkpointing import Checkpointing
from staleflow.roles.evaluations import Evaluations
from staleflow.trajectories.schema import group_and_member

SETTLES_S = 1.0  # nodes that a switch takes down together are lost one after the other, within moments
RELAY_WAITS_S = 30.0  # a relay has stopped: by then the news of a lost node must have come (hostlink.SILENT_S)


@dataclass(frozen=True)
class Holdings:
    """The coordinator's own records of where payloads, prompts and versions are; a lost node is struck out."""

    generated: dict[int, Generated]
    holder: dict[int, int]
    known_on: dict[int, set[int]]
    copies: dict[int, set[int]]
    stored: dict[int, set[int]]
    store_nodes: set[int]


class Survival:
    """`prompt(group)` is a group's prompt as a message; `note` tells people."""

    def __init__(
        self,
        config: Config,
        job_plan: JobPlan,
        core: Coordinator,
        holdings: Holdings,
        checkpointing: Checkpointing,
        evaluations: Evaluations | None,
        send: Callable[[int, m.ToHost], None],
        prompt: Callable[[int], m.PromptMessage],
        note: Callable[[str], None],
    ) -> None:
        self._on, self._plan, self._core, self._holdings = config.fault.survive_rollout, job_plan, core, holdings
        self._checkpointing, self._evaluations = checkpointing, evaluations
        self._send, self._prompt, self._note = send, prompt, note
        self._instances = set(range(job_plan.instances))
        self._nodes = set(range(len(job_plan.nodes)))
        self._generation = 0
        self._regroup_at_s: float | None = None
        self._relay_stopped: tuple[str, float] | None = None
        self.ranks: set[int] = set()  # gone, or told to go

    # ---- losses ------------------------------------------------------------------------------------------------------

    def rank_lost(self, rank: int, why: str, starting: bool) -> bool:
        """Whether the job goes on without this rank (or does already)."""
        instance = self._plan.ranks[rank].instance
        if rank in self.ranks:
            return True
        if not self._on or starting or instance is None or self._instances <= {instance}:
            return False
        self._note(self._leave_out(instance, f"instance {instance} is left out: rank {rank} (rollout): {why}"))
        self._send(self._plan.ranks[rank].node, m.LeaveOut(instance))
        return True

    def node_lost(self, node: int, why: str, now_s: float, starting: bool) -> bool:
        """Whether the job goes on without this node."""
        ranks = [r for r in self._plan.ranks if r.node == node]
        instances = {r.instance for r in ranks if r.instance is not None} & self._instances
        if not self._on or starting or node not in self._plan.expendable_nodes or self._instances <= instances:
            return False
        for instance in sorted(instances):
            self._leave_out(instance, f"instance {instance} is left out: {why}")
        self.ranks |= {r.rank for r in ranks}
        self._nodes.discard(node)
        self._note(f"node {self._plan.nodes[node].name} is left out: {why}")
        self._strike_out(node)
        self._checkpointing.leave_out(node)
        self._evaluate_again()
        self._relay_stopped, self._regroup_at_s = None, now_s + SETTLES_S
        return True

    def relay_stopped(self, why: str, generation: int, now_s: float) -> bool:
        """Whether that may be the consequence of a node's loss which the job survives.

        The loss may be known already, and its relays be replaced or about to be: theirs is no news.
        """
        if self._on and generation == self._generation:
            self._relay_stopped = self._relay_stopped or (why, now_s)
        return self._on

    def gone(self, node: int) -> bool:
        return node not in self._nodes

    def turn(self, now_s: float) -> str | None:
        """Go on with what takes time; why the job has to end after all, or None."""
        if self._regroup_at_s is not None and now_s >= self._regroup_at_s:
            self._regroup_at_s = None
            self._regroup()
        if self._relay_stopped is not None and now_s > self._relay_stopped[1] + RELAY_WAITS_S:
            return self._relay_stopped[0]
        return None

    # ---- what follows from them --------------------------------------------------------------------------------------

    def _leave_out(self, instance: int, reason: str) -> str:
        self._instances.discard(instance)
        self.ranks |= set(self._plan.instance(instance))
        self._core.lost(instance, {})
        return reason

    def _strike_out(self, node: int) -> None:
        h = self._holdings
        finished = [tid for tid, generated in h.generated.items() if generated.node == node]
        for tid in [tid for tid, holder in h.holder.items() if holder == node]:
            del h.holder[tid]
        for nodes in (*h.known_on.values(), *h.copies.values(), *h.stored.values(), h.store_nodes):
            nodes.discard(node)
        groups = sorted({group_and_member(tid)[0] for tid in finished})
        for group in groups:
            h.known_on.setdefault(group, set()).add(0)
        self._send(0, m.Adopt(node, finished, [self._prompt(group) for group in groups]))
        self._send(node, m.Gone())

    def _evaluate_again(self) -> None:
        """What was generated there and not scored. What is being generated elsewhere is known to the core."""
        for tid, prompt, version in self._evaluations.unanswered() if self._evaluations is not None else ():
            self._core.evaluate([tid], [len(prompt.token_ids)], version)

    def _regroup(self) -> None:
        self._generation += 1
        self._relay_stopped = None
        relays = [rank for rank in self._plan.relays if rank not in self.ranks]
        order = m.Regroup(self._generation, [*self._plan.trainers, *relays])
        for node in sorted(self._nodes):
            self._send(node, order)
