"""A rollout rank: one vLLM instance (or one tensor-parallel rank of it), stepped by this loop.

consumes      PAYLOAD and COMMAND records from its down ring
waits for     nothing while it has work; else a record in the down ring (50 ms at most, then it looks again)
unblocked by  its host, which never waits for this rank
produces      FINISHED / RETURNED trajectories and reports on its up ring; what does not fit waits in a backlog, so that
              a full ring never stops the loop

One turn = take commands, apply them, one engine step, report. Between two steps of the engine all tensor-parallel ranks
of an instance apply the same commands: the leader (instance rank 0) chooses the last command id before the step and
shares it, its peers wait until their own ring has delivered that id. The leader also says when all leave, so that
none waits for one that has gone. Only the leader reports.

It cannot deadlock: the only waits besides its ring are the agreement inside the instance, which every rank of it enters
once a turn whatever it holds, with a time limit, and a Pull (parameters/pull.py).
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass

import numpy as np

from staleflow.coordination.types import EVAL_GROUP_BASE, Abort, Command, Interrupt, Pull, Route, pack_progress
from staleflow.engines.base import Engine
from staleflow.observe.profiling import Profiling
from staleflow.observe.spans import GENERATE, PULL, TRAJECTORIES, WAIT, Spans
from staleflow.parameters.pull import Puller
from staleflow.roles.held import Held
from staleflow.roles.messages import Copied, Kind, Probe, Pulled, Ready, Snapshot, decode_command, decode_save_request
from staleflow.roles.ranklink import RankLink, SignalReporter
from staleflow.trajectories.schema import Finish, decode

IDLE_WAIT_S = 0.05
LEAVE = -1  # instead of a command id


@dataclass(frozen=True)
class RolloutSettings:
    rank: int
    instance: int
    leader: bool
    max_tokens: int
    temperature: float
    evaluation_temperature: float
    seed_per_request: bool
    snapshot_every_s: float
    pull_timeout_s: float
    probe: tuple[int, ...]  # token ids that are scored after each Pull; empty: none


class Rollout:
    """`agree(n)` gives the leader's n, so that the instance's ranks take the same cut; identity without peers."""

    def __init__(
        self,
        settings: RolloutSettings,
        link: RankLink,
        engine: Engine,
        puller: Puller,
        agree: Callable[[int], int],
        signal: Callable[[], int] = lambda: 0,
        spans: Spans | None = None,
        profiling: Profiling | None = None,
    ) -> None:
        self._profiling = profiling or Profiling(())
        self._spans = spans or Spans(None)
        self._piece_began_ns: dict[int, int] = {}  # tid -> when its present piece began here
        self._signal = SignalReporter(settings.rank, link, signal)
        self._s, self._link, self._engine, self._puller, self._agree = settings, link, engine, puller, agree
        self._version = -1
        self._inbox: dict[int, Held] = {}  # payloads whose Route has not been applied yet
        self._held: dict[int, Held] = {}
        self._commands: deque[Command] = deque()
        self._arrived = self._applied = 0  # last command id in the queue, last one applied
        self._generated_tokens = 0
        self._busy_s = 0.0
        self._last_snapshot_s = 0.0
        self._changed = True

    def run(self, started_s: float) -> None:
        """Until the host says stop."""
        self._link.report(Ready(self._s.rank, time.monotonic() - started_s))
        while self.turn():
            pass

    def turn(self) -> bool:
        """False when the instance is to leave."""
        self._signal.look()
        if not self._engine.busy() and not self._commands:
            self._spans.state(WAIT)
            self._link.wait(IDLE_WAIT_S)
        self._receive()
        if not self._apply_cut():
            return False
        if self._engine.busy():
            self._step()
        self._report()
        self._link.flush()
        return True

    # ---- commands ----------------------------------------------------------------------------------------------------

    def _receive(self) -> None:
        for record in self._link.records():
            if record.kind == Kind.PAYLOAD:
                held = Held.of(decode(record.payload))
                self._inbox[held.tid] = held
            elif record.kind == Kind.COMMAND:
                command = decode_command(record.payload)
                self._commands.append(command)
                self._arrived = command.id
            elif record.kind == Kind.SAVE:
                self._copy(decode_save_request(bytes(record.payload)).version)
            else:
                raise RuntimeError(f"rollout rank {self._s.rank}: record of kind {record.kind} is not for it")

    def _apply_cut(self) -> bool:
        """Apply the commands up to the leader's cut. False: it was told to stop, and the instance leaves as one."""
        cut = self._agree(LEAVE if self._link.stop_code else self._arrived)
        if cut == LEAVE:
            return False
        deadline_s = time.monotonic() + self._s.pull_timeout_s
        while self._arrived < cut:  # a peer of the leader whose ring is a little behind
            if time.monotonic() > deadline_s:
                raise TimeoutError(f"rollout rank {self._s.rank}: its host has not delivered command {cut}")
            self._link.wait(IDLE_WAIT_S)
            self._receive()
        while self._commands and self._commands[0].id <= cut:
            self._apply(self._commands.popleft())
        return True

    def _apply(self, command: Command) -> None:
        if command.id <= self._applied:
            return  # repeated
        match command:
            case Route(tids=tids):
                self._route(tids)
            case Interrupt(tids=tids):
                self._interrupt(tids)
            case Abort(tids=tids):
                self._drop(tids)
            case Pull(version=version):
                self._pull(version)
        self._applied, self._changed = command.id, True

    def _route(self, tids: tuple[int, ...]) -> None:
        for tid in tids:
            if tid in self._held:
                continue
            held = self._held[tid] = self._inbox.pop(tid)
            self._start(held)

    def _start(self, held: Held) -> None:
        evaluation = held.group_id >= EVAL_GROUP_BASE
        temperature = self._s.evaluation_temperature if evaluation else self._s.temperature
        # Only for engines whose draws depend on the position too: a restarted vLLM request would repeat its draws.
        seed = held.seed if self._s.seed_per_request else None
        self._piece_began_ns[held.tid] = time.perf_counter_ns()
        self._engine.add(held.request(self._s.max_tokens, temperature, seed))

    def _interrupt(self, tids: tuple[int, ...]) -> None:
        mine = [tid for tid in tids if tid in self._held]
        self._engine.abort(mine)
        for tid in mine:
            held = self._held.pop(tid)
            self._piece_ended(held, Finish.PARTIAL)
            if self._s.leader:
                self._link.hand_over(Kind.RETURNED, held.record(Finish.PARTIAL))

    def _copy(self, version: int) -> None:
        """For a checkpoint: what it holds, as it is between two steps. Generation goes on."""
        if self._s.leader:
            for held in self._held.values():
                self._link.hand_over(Kind.COPY, held.record(Finish.PARTIAL))
            self._link.report(Copied(self._s.rank, version))

    def _drop(self, tids: tuple[int, ...]) -> None:
        self._engine.abort(tids)
        for tid in tids:
            self._held.pop(tid, None)
            self._inbox.pop(tid, None)

    def _pull(self, version: int) -> None:
        """Interrupt all, load, forget the old cache blocks, go on with the same tokens."""
        if version <= self._version:
            return
        self._engine.abort(list(self._held))
        for held in self._held.values():
            self._piece_ended(held, Finish.PARTIAL)
        self._spans.state(None)
        with self._spans.span(PULL, version=version):
            result = self._puller.pull(version, self._s.pull_timeout_s)
        self._version = result.version
        self._profiling.step(self._version)
        if self._s.probe:
            logprobs = np.asarray(self._engine.score(self._s.probe), np.float32)
            self._tell(Probe(self._s.rank, self._version, logprobs.tobytes()))
        for held in self._held.values():
            self._start(held)
        self._tell(Pulled(self._s.instance, result.version, result.seconds, result.retries, len(self._held)))

    # ---- generation --------------------------------------------------------------------------------------------------

    def _step(self) -> None:
        began_s = time.monotonic()
        self._spans.state(GENERATE, version=self._version)
        for delta in self._engine.step():
            held = self._held[delta.tid]
            held.extend(delta, self._version)
            self._generated_tokens += len(delta.tokens)
            if delta.finish is not Finish.PARTIAL:
                del self._held[delta.tid]
                self._changed = True
                self._piece_ended(held, delta.finish)
                if self._s.leader:
                    self._link.hand_over(Kind.FINISHED, held.record(delta.finish))
        self._busy_s += time.monotonic() - began_s

    def _piece_ended(self, held: Held, finish: Finish) -> None:
        """For the timeline: what this instance made of a trajectory under one version."""
        began_ns = self._piece_began_ns.pop(held.tid, 0)
        facts = {"tid": held.tid, "version": self._version, "tokens": held.response_tokens, "finish": int(finish)}
        self._spans.complete("trajectory", began_ns, time.perf_counter_ns(), TRAJECTORIES, **facts)

    # ---- reports -----------------------------------------------------------------------------------------------------

    def _tell(self, report: Probe | Pulled | Snapshot) -> None:
        if self._s.leader:
            self._link.report(report)

    def _report(self) -> None:
        now_s = time.monotonic()
        if now_s - self._last_snapshot_s < self._s.snapshot_every_s or not (self._changed or self._held):
            return
        self._last_snapshot_s, self._changed = now_s, False
        load = self._engine.load()
        self._spans.counter("kv", used=load.kv_tokens)
        progress = pack_progress((tid, held.response_tokens) for tid, held in self._held.items())
        self._tell(
            Snapshot(
                self._s.instance, self._version, self._applied, load.running, load.waiting, load.kv_tokens,
                load.kv_capacity_tokens, progress, self._generated_tokens, self._busy_s, now_s,
            )
        )  # fmt: skip
