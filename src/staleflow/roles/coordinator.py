"""The coordinator: rank 0's second hat. Drives the pure core with facts, carries out what it decides.

consumes      messages of all hosts (its own in process, the others by socket)
waits for     nothing: `turn` is called by rank 0's loop
unblocked by  -
produces      commands, train steps, forgets and stops for the hosts; metrics and the live view

A run: instances join and Pull the start version that the trainers publish; prompts are offered as the protocol has
room; whenever the trainers are free and the protocol is READY a step is planned and sent. After the last step the last
version is evaluated (if asked for), then everybody is told to leave. A loss or no progress lead to the same end; a
signal or a stop file too, after a checkpoint (`stopping`). Between two steps a checkpoint may be taken
(`checkpointing`).
"""

from __future__ import annotations

import signal
import time
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from staleflow.checkpoint.recovery import Resume, settings_of
from staleflow.config import Config
from staleflow.coordination.coordinator import Coordinator
from staleflow.coordination.types import EVAL_GROUP_BASE, InstanceInfo, is_evaluation
from staleflow.data.prompts import Prompt, PromptSource
from staleflow.jobs.plan import JobPlan
from staleflow.jobs.stop import STOPPED, StopWatch
from staleflow.roles import messages as m
from staleflow.roles.accounts import Accounts
from staleflow.roles.auditing import Audit
from staleflow.roles.batching import Generated
from staleflow.roles.cause import Cause, Signalled
from staleflow.roles.checkpointing import Books, Checkpointing
from staleflow.roles.evaluating import Evaluating
from staleflow.roles.evaluations import Evaluations
from staleflow.roles.payloads import Payloads
from staleflow.roles.steps import Steps
from staleflow.roles.stopping import OrderedStop
from staleflow.roles.survival import Holdings, Survival

CHECKPOINT_SHARE = 0.6  # of the grace time: what a checkpoint may take; the rest is for leaving


@dataclass(frozen=True)
class Outcome:
    """How the run ended: status completed | stopped | failed, exit code, and why."""

    status: str
    code: int
    reason: str


class CoordinatorRole:
    """`observer` gets every finished step and every view; it never decides anything."""

    def __init__(
        self,
        config: Config,
        job_plan: JobPlan,
        core: Coordinator,
        prompts: PromptSource,
        evaluations: Evaluations | None,
        books: Books,
        watch: StopWatch,
        observer: Any,
        start_version: int = 0,
    ) -> None:
        self._c, self._plan, self.core, self._prompts, self._send = config, job_plan, core, prompts, books.send
        self._observer = observer
        self.accounts = Accounts()
        self.outcome: Outcome | None = None
        self._last_step = config.run.steps
        self._node_of_instance = {r.instance: r.node for r in job_plan.ranks if r.instance is not None}
        self._waiting_ready = set(range(job_plan.world_size)) - set(job_plan.hosts)
        self._stored: dict[int, set[int]] = {}  # version -> nodes that hold it
        self._store_nodes = {job_plan.ranks[r].node for r in job_plan.relays}
        self._joined: set[int] = set()
        self._next_group = 0
        self._cause = Cause()
        self._audit = Audit(core, config.run_dir)
        self._payloads = p = Payloads(self._node_of_instance, books.send)
        self._steps = Steps(config, job_plan, p, self.accounts, self._audit, observer, books.send)
        self._last_cycle_s = self._progress_s = time.monotonic()
        self._watched = watch
        self._checkpointing = Checkpointing(
            config, job_plan.trainers, len(job_plan.nodes), books, self._state, observer.note, watch.checkpoint_took,
            start_version,
        )  # fmt: skip
        self._evaluating = Evaluating(config, evaluations, core, p, self._checkpointing, observer, start_version)
        self._stop = OrderedStop(core, self._checkpointing, self._command, lambda *how: self._end(Outcome(*how)))
        holdings = Holdings(p.generated, p.holder, p.known_on, p.copies, self._stored, self._store_nodes)
        self.survival = Survival(
            config, job_plan, core, holdings, self._checkpointing, evaluations, books.send, p.prompt_message,
            observer.note,
        )  # fmt: skip

    # ---- the turn ----------------------------------------------------------------------------------------------------

    def turn(self, inbox: Sequence[tuple[int, m.ToCoordinator]], now_s: float) -> None:
        for node, message in inbox:
            self._on(node, message, now_s)
        if self.outcome is not None:
            return
        if now_s - self._last_cycle_s >= self._c.coordination.cycle_ms / 1000 or inbox:
            self._last_cycle_s = now_s
            self._offer()
            self._command(self.core.cycle(now_s))
            self._forget_released()
            self._fail_if(self._audit.after_cycle())
        if self._steps.running is None and not self._waiting_ready and not self._stop.asked:
            self._checkpointing.at_boundary(self.core.version, now_s)
            self._train(now_s)
        self._checkpointing.turn(now_s)
        self._stop_when_asked(now_s)
        self._finish_when_done(now_s)
        self._watch(now_s)

    # ---- facts -------------------------------------------------------------------------------------------------------

    def _on(self, node: int, message: m.ToCoordinator, now_s: float) -> None:
        self._audit.told(node, message)
        match message:
            case m.Account():
                self._fail_if(self._audit.account(message))
            case m.Snapshot():
                self._snapshot(message, now_s)
            case m.Finished():
                self._finished(message, now_s)
            case m.Rewarded(tid=tid, reward=reward):
                self._rewarded(tid, reward)
            case m.RewardFailed(tid=tid, why=why):
                self._reward_failed(tid, why)
            case m.Returned(tid=tid, tokens=tokens, v_traj=v_traj):
                self._payloads.holder[tid] = node
                self._stop.left(tid)
                self.core.returned(tid, tokens, v_traj)
            case m.Stored(version=version, seconds=seconds):
                self._on_stored(node, version, seconds)
            case m.Offered(version=version, last_s=last_s):
                self._offered(version, last_s)
            case m.StepDone():
                self._on_step_done(message, now_s)
            case m.Ready(rank=rank):
                self._on_ready(rank, now_s)
            case m.Pulled():
                self.accounts.pull_s.append(message.seconds)
                self.accounts.interrupted += message.interrupted
            case m.Probe(rank=rank):
                self.accounts.probe(message, trainer=rank in self._plan.trainers)
            case m.Payload(tid=tid, node=target):
                self._send(target, message)
                if message.record and not self.survival.gone(target):
                    self._payloads.copied(tid, target)
            case m.Saved() | m.NodeSaved() | m.SaveFailed():
                self._progress_s = now_s
                self._checkpointing.on(message)
            case m.Lost(rank=rank, reason=reason):
                if not self.survival.rank_lost(rank, reason, bool(self._waiting_ready)):
                    self.fail(f"rank {rank} ({self._role_of(rank)}) is lost: {reason}")
            case m.Failed(rank=rank, error=error):
                if not self.survival.rank_lost(rank, error, bool(self._waiting_ready)):
                    self._cause.failed(f"rank {rank} ({self._role_of(rank)}) failed: {error}", now_s)
            case m.RelayStopped(node=stopped, why=why, generation=generation):
                if not self.survival.relay_stopped(why, generation, now_s):
                    self._cause.failed(f"rank {self._plan.hosts[stopped]} (host) failed: {why}", now_s)
            case m.StopRequested(rank=rank, signal=number):
                self._cause.signalled(number, f"signal {number} at rank {rank} ({self._role_of(rank)})", now_s)

    def node_lost(self, node: int, why: str, now_s: float) -> None:
        """The link to a node that may be expendable is gone."""
        if not self.survival.node_lost(node, why, now_s, bool(self._waiting_ready)):
            self.fail(why)

    def _role_of(self, rank: int) -> str:
        return self._plan.ranks[rank].role

    def _on_ready(self, rank: int, now_s: float) -> None:
        self._waiting_ready.discard(rank)
        self._progress_s = now_s
        if not self._waiting_ready:
            self.accounts.began_s = now_s
            self._evaluating.at_start()

    def _snapshot(self, s: m.Snapshot, now_s: float) -> None:
        if s.instance not in self._joined:
            self._joined.add(s.instance)
            node = self._node_of_instance[s.instance]
            self.core.joined(InstanceInfo(s.instance, node, self._c.rollout.max_running, s.kv_capacity_tokens))
        if s.progress:
            self._progress_s = now_s
        self.accounts.snapshot(s)
        self.core.snapshot(m.instance_snapshot(s), now_s)

    def _on_stored(self, node: int, version: int, seconds: float) -> None:
        self.accounts.publish_s.append(seconds)
        nodes = self._stored.setdefault(version, set())
        nodes.add(node)
        if nodes == self._store_nodes:
            self.core.published(version)
            for old in [v for v in self._stored if v < version]:
                del self._stored[old]

    def _offered(self, version: int, last_s: float) -> None:
        """Transport `direct`: nothing is stored; a push lasts until all instances have pulled."""
        if last_s > 0:
            self.accounts.publish_s.append(last_s)
        self.core.published(version)

    def _finished(self, f: m.Finished, now_s: float) -> None:
        self._progress_s = now_s
        self._stop.left(f.tid)
        generated = Generated(f.prompt_tokens, f.tokens, tuple(f.segments), f.finish, f.node)
        self._payloads.holder.pop(f.tid, None)
        if is_evaluation(f.tid):
            self._evaluating.generated(f.tid, [version for version, _ in f.segments])
        else:
            self._payloads.generated[f.tid] = generated
        self.core.finished(f.tid, f.tokens, generated.v_traj, len(f.segments))

    def _rewarded(self, tid: int, reward: float) -> None:
        if is_evaluation(tid):
            self._evaluated(tid, reward)
            return
        self._payloads.rewards[tid] = reward
        self.core.rewarded(tid, reward)

    def _reward_failed(self, tid: int, why: str) -> None:
        self._observer.note(f"the reward of trajectory {tid} failed: {why}")
        if is_evaluation(tid):
            self._evaluated(tid, None)
        else:
            self.core.failed(tid, why)

    def _evaluated(self, tid: int, reward: float | None) -> None:
        self._evaluating.answered(tid, reward)
        self._forget([tid])

    # ---- prompts and commands ----------------------------------------------------------------------------------------

    def _offer(self) -> None:
        """Only as many groups as steps still need: the run ends without a queue of half-made work."""
        s = self._c.staleness
        live = sum(1 for group in self._payloads.prompt_of if group < EVAL_GROUP_BASE)
        needed = (self._last_step - self.core.version) * (s.batch_groups + s.spare_groups) - live
        for _ in range(min(self.core.wanted(), needed)):
            prompt = next(self._prompts, None)
            if prompt is None:
                self.core.end_of_data()
                return
            group_id, self._next_group = self._next_group, self._next_group + 1
            self._payloads.prompt_of[group_id] = prompt
            self.core.offer(group_id, len(prompt.token_ids), self._c.rollout.max_tokens)

    def _command(self, commands: Sequence[Any]) -> None:
        self._audit.commanded(commands)
        self._payloads.command(commands)

    def _forget_released(self) -> None:
        released = self.core.drain_released()
        self._audit.released(released)
        for item in released:
            self.accounts.discarded[item.reason] += item.tokens
        self._forget([item.tid for item in released])

    def _forget(self, tids: Sequence[int]) -> None:
        for group_id, prompt in self._payloads.forget(tids, self._lives).items():
            if group_id < EVAL_GROUP_BASE:
                self._prompts.settle(prompt.index)

    def _lives(self, group_id: int) -> bool:
        if group_id >= EVAL_GROUP_BASE:
            return self._evaluating.waits_for(group_id)
        return self.core.holds(group_id)

    # ---- training ----------------------------------------------------------------------------------------------------

    def _train(self, now_s: float) -> None:
        if self.core.version >= self._last_step or (batch := self.core.next_batch()) is None:
            return
        self._steps.begin(batch, now_s)

    def _on_step_done(self, done: m.StepDone, now_s: float) -> None:
        self._progress_s = now_s
        plan = self._steps.done(done, now_s)
        if plan is None:
            return
        self._forget(plan.tids)
        self._evaluating.at_version(plan.step + 1)

    # ---- checkpoints -------------------------------------------------------------------------------------------------

    def _state(self, ledger: dict[str, Any]) -> dict[str, Any]:
        """Everything of a checkpoint that neither the trainers nor the hosts write."""
        return {
            "version": self.core.version,
            "settings": settings_of(self._c),
            "policy": self._c.coordination.policy,
            "ledger": ledger,
            "groups": {str(g): p.index for g, p in self._payloads.prompt_of.items() if g < EVAL_GROUP_BASE},
            "next_group": self._next_group,
            "prompts": self._prompts.state_dict(),
            "run": {"accounts": self.accounts.dump(time.monotonic()), "evaluations": self._observer.accuracies},
        }

    def resume(self, resume: Resume, prompt: Callable[[int], Prompt]) -> None:
        """Before the first turn: take over what an earlier attempt has left. `core` has been loaded already."""
        self._next_group = resume.next_group
        if "accounts" in resume.run:
            self.accounts.load(resume.run["accounts"])
        self._audit.restored(resume.kept)
        self._payloads.restore(resume, prompt, self.core.unrewarded(), range(len(self._plan.nodes)))

    # ---- the end -----------------------------------------------------------------------------------------------------

    def _finish_when_done(self, now_s: float) -> None:
        starved = self._starved()
        if self._steps.running is not None or (self.core.version < self._last_step and not starved):
            return
        if self._checkpointing.busy or self._stop.asked:
            return
        self.accounts.ended_s = self.accounts.ended_s or now_s
        if not self._evaluating.through(self.core.version):
            return
        reason = "the data set ended" if starved else "all steps done"
        self._end(Outcome("completed", 0, reason))

    def _starved(self) -> bool:
        """No prompt is left and the books are too empty for another step."""
        return self.core.exhausted() and not self._waiting_ready

    def fail(self, reason: str) -> None:
        self._end(Outcome("failed", 1, reason))

    def _fail_if(self, why: str | None) -> None:
        if why is not None:
            self.fail(why)

    def _obey(self, signal_number: int, reason: str) -> None:
        """SIGUSR1 asks for a stop that the run goes on from (85). SIGTERM and SIGINT end it, with a checkpoint where
        those are on and as far as the grace time allows.
        """
        if signal_number == signal.SIGUSR1:
            self._ask_to_stop(reason, STOPPED)
        elif self._c.checkpoint.every_steps:
            limit_s = CHECKPOINT_SHARE * self._c.fault.stop_grace_s
            self._ask_to_stop(reason, 128 + signal_number, time.monotonic() + limit_s)
        else:
            self._end(Outcome("stopped", 128 + signal_number, reason))

    def _ask_to_stop(self, reason: str, code: int, deadline_s: float = float("inf")) -> None:
        if self._waiting_ready:  # nothing has happened yet that a checkpoint could keep
            self._end(Outcome("stopped", code, reason))
            return
        if not self._stop.asked:
            self._observer.note(f"{reason}: stopping with a checkpoint")
        self._stop.ask(reason, code, time.monotonic(), deadline_s)

    def _stop_when_asked(self, now_s: float) -> None:
        if not self._stop.asked and (why := self._watched.asked(time.time())) is not None:
            self._ask_to_stop(why, STOPPED)
        self._stop.turn(self.core.version, self._steps.running is not None, now_s)

    def _end(self, outcome: Outcome) -> None:
        if self.outcome is not None:
            return
        self.outcome = outcome
        self.accounts.ended_s = self.accounts.ended_s or time.monotonic()
        for node in range(len(self._plan.nodes)):
            self._send(node, m.Stop(outcome.code, outcome.reason))

    def _watch(self, now_s: float) -> None:
        """Nothing is waited for without a limit; the error names who was waited for."""
        match self._cause.settled(now_s):
            case Signalled(number=number, reason=reason):
                self._obey(number, reason)
            case str(reason):
                self.fail(reason)
        if (why := self.survival.turn(now_s)) is not None:
            self.fail(why)
        limit_s = self._c.fault.start_timeout_s if self._waiting_ready else self._c.fault.no_progress_s
        if now_s - self._progress_s < limit_s:
            return
        if self._waiting_ready:
            whom = ", ".join(f"rank {r} ({self._role_of(r)})" for r in sorted(self._waiting_ready))
            self.fail(f"not ready after {limit_s:.0f} s: {whom}")
        else:
            self.fail(f"no progress for {limit_s:.0f} s; waiting for {self.waited_for()}")

    def waited_for(self) -> str:
        """What the trainer waits for, in words."""
        if self._stop.asked and self._checkpointing.busy:
            return f"the checkpoint: {self._checkpointing.waited_for()}"
        if self._steps.running is not None:
            return f"the trainer, at step {self._steps.running.step}"
        if self._evaluating.at_the_end:
            return "the evaluation"
        waited = Counter("rewards" if w.instance is None else f"instance {w.instance}" for w in self.core.waiting_for())
        if waited:
            return ", ".join(f"{n} trajectories at {where}" for where, n in waited.most_common(4))
        return f"{self._c.staleness.batch_groups} finished groups for step {self.core.version}"
