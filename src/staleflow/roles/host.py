"""A host rank: the node's shard of the trajectory server, its rewards, its parameter store. No GPU, one per node.

consumes      records from the up rings of its device ranks; messages of the coordinator; reward results; "stored"
              events of the relay thread
waits for     any of these, `WAIT_S` at most (the doorbell of the up rings wakes it at once)
unblocked by  nobody: no call here waits for another rank. Full down rings fill an outbox, the relay has its own thread,
              rewards run in child processes
produces      commands and micro-batches into the down rings; events for the coordinator

It cannot deadlock: it never waits without a limit, and never stops draining the up rings while it has something to
send.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from queue import Empty, SimpleQueue
from typing import Any

import numpy as np

from staleflow.coordination.types import EVAL_GROUP_BASE
from staleflow.engines.scripted import mix
from staleflow.rewards.pool import RewardPool
from staleflow.rewards.spec import RewardSample
from staleflow.roles import messages as m
from staleflow.roles.devicelink import DeviceLink
from staleflow.roles.messages import Kind
from staleflow.roles.spooling import Spooling
from staleflow.trajectories.ring import wait_any
from staleflow.trajectories.schema import Finish, Trajectory, decode, encode, group_and_member
from staleflow.trajectories.server import PromptEntry, TrajectoryServer

WAIT_S = 0.005
LIVENESS_EVERY_S = 0.5
COPIES_S = 30.0  # an instance that has not handed over its copies for a checkpoint by then is left out of it


@dataclass(frozen=True)
class HostSettings:
    rank: int
    node: int
    max_tokens: int
    run_seed: int = 0


@dataclass
class _Saving:
    """A checkpoint that waits for copies of what these ranks' instances hold."""

    version: int
    folder: Path
    waiting: set[int]
    deadline_s: float


class Host:
    """`decode_text(token_ids) -> str` for rewards; `alive(rank) -> bool`; `emit(message)` goes to the coordinator."""

    def __init__(
        self,
        settings: HostSettings,
        links: Sequence[DeviceLink],
        server: TrajectoryServer,
        rewards: RewardPool,
        decode_text: Callable[[Any], str],
        alive: Callable[[int], bool],
        emit: Callable[[m.ToCoordinator], None],
        spooling: Spooling,
        audit: Callable[[bytes], None] | None = None,
    ) -> None:
        self._s, self.links, self._server, self._rewards = settings, tuple(links), server, rewards
        self._decode_text, self._alive, self._emit, self._audit = decode_text, alive, emit, audit
        self._spooling = spooling
        self._saving: _Saving | None = None
        self._by_rank = {link.plan.rank: link for link in links}
        self._from_relay: SimpleQueue[m.Stored | m.RelayStopped] = SimpleQueue()
        self._last_liveness_s = 0.0
        self.stopping: m.Stop | None = None
        self.steps = self.trained = 0  # train steps carried out, records handed over in them

    # ---- the turn ----------------------------------------------------------------------------------------------------

    def turn(self, inbox: Sequence[m.ToHost]) -> None:
        """Everything that can be done without waiting."""
        for message in inbox:
            self.handle(message)
        for link in self.links:
            self._drain(link)
            link.flush()
        self._collect_rewards()
        self._collect_stored()
        self._go_on_saving()
        self._spooling.collect()
        self._look_after_ranks()

    def wait(self, timeout_s: float = WAIT_S) -> None:
        """Until a device rank has something to say."""
        rings = [link.up for link in self.links if not link.gone]
        if rings:
            wait_any(rings, timeout_s)
        else:
            time.sleep(timeout_s)

    def on_stored(self, version: int, seconds: float) -> None:
        """Called from the relay's thread."""
        self._from_relay.put(m.Stored(self._s.node, version, seconds))

    def on_relay_error(self, error: BaseException, generation: int = 0) -> None:
        """Called from one of the relay's threads; `generation` is that of its publish group."""
        why = f"the relay of node {self._s.node} stopped: {error}"
        self._from_relay.put(m.RelayStopped(self._s.node, why, generation))

    # ---- from the device ranks ---------------------------------------------------------------------------------------

    def _drain(self, link: DeviceLink) -> None:
        for record in link.records():
            match record.kind:
                case Kind.FINISHED:
                    self._finished(record.id0, record.payload)
                case Kind.RETURNED:
                    self._server.put(record.id0, record.payload)
                    returned = decode(record.payload, copy=False)
                    v_traj = returned.v_traj if returned.segments else -1
                    self._emit(m.Returned(record.id0, returned.response_tokens, self._s.node, v_traj))
                    del returned
                case Kind.COPY:
                    self._spooling.copied(record.id0, record.payload)
                case Kind.REPORT:
                    self._reported(link, m.decode_report(record.payload))
                case _:
                    raise RuntimeError(f"host of node {self._s.node}: kind {record.kind} from rank {link.plan.rank}")

    def _reported(self, link: DeviceLink, report: m.Report) -> None:
        if isinstance(report, m.Ready):
            link.ready = True
        elif isinstance(report, m.Copied):
            if self._saving is not None:
                self._saving.waiting.discard(report.rank)
            return
        elif isinstance(report, m.Failed):
            link.gone = True
            self._spooling.tell_after(report)
            return
        self._emit(report)

    def adopt(self, tid: int, payload: Any) -> None:
        """A finished trajectory of a node that is gone counts as this node's own."""
        self._finished(tid, payload)

    def _finished(self, tid: int, payload: Any) -> None:
        """Keep it, tell of it as soon as it is durable, have it scored."""
        self._server.put(tid, payload)
        t = decode(payload, copy=False)
        segments = list(t.segments)
        told = m.Finished(tid, t.prompt_tokens, t.response_tokens, segments, int(t.finish), self._s.node)
        self._spooling.finished(tid, payload, told)
        if self._server.knows(tid):  # otherwise it was given up while its last tokens were made
            self._score(tid, t)

    def _score(self, tid: int, t: Trajectory) -> None:
        prompt = self._server.prompt(tid)
        text = self._decode_text(t.response)
        self._rewards.submit(tid, RewardSample(prompt.text, text, t.finish is Finish.LENGTH, prompt.reference))

    def _collect_rewards(self) -> None:
        for result in self._rewards.poll():
            if result.reward is None:
                self._emit(m.RewardFailed(result.tid, result.error or "no reason given"))
            else:
                self._spooling.rewarded(m.Rewarded(result.tid, result.reward))

    def _collect_stored(self) -> None:
        with suppress(Empty):
            while True:
                self._emit(self._from_relay.get_nowait())

    def _look_after_ranks(self) -> None:
        now_s = time.monotonic()
        if now_s - self._last_liveness_s >= LIVENESS_EVERY_S:
            self._last_liveness_s = now_s
            self._look_now()

    def _look_now(self) -> None:
        """Find out which device ranks have died, and say so."""
        for link in self.links:
            if not link.gone and not self._alive(link.plan.rank):
                link.gone = True
                self._drain(link)  # what it had published before it died is whole
                if self.stopping is None:
                    self._spooling.tell_after(m.Lost(link.plan.rank, "its process has died"))

    # ---- from the coordinator ----------------------------------------------------------------------------------------

    def handle(self, message: m.ToHost) -> None:
        match message:
            case m.Commands():
                self._command(message)
            case m.TrainStep():
                self._train(message)
            case m.Forget(tids=tids, groups=groups):
                self._forget(tids, groups)
            case m.Reload(prompts=prompts, score=score):
                self._reload(prompts, score)
            case m.Save(version=version, directory=directory):
                self._save(version, directory)
            case m.Settle():
                self._spooling.settle()
            case m.Forward(tids=tids, node=node):
                for tid in tids:
                    record = self._server.get(tid)
                    self._emit(m.Payload(tid, node, b"" if record is None else bytes(record)))
            case m.Payload(tid=tid, record=record):
                if record:
                    self._server.put(tid, record)
            case m.Stop(code=code):
                self.stopping = message
                for link in self.links:
                    link.stop(code or 1)

    def _command(self, message: m.Commands) -> None:
        self.learn(message.prompts)
        for plain in message.commands:
            name, id_, instance, tids, _ = plain
            encoded = m.encode(plain)
            for link in self._instance(instance):
                if name == "Route":
                    for tid in tids:
                        link.send(Kind.PAYLOAD, self._start_record(tid), tid)
                link.send(Kind.COMMAND, encoded, id_)

    def learn(self, prompts: Sequence[m.PromptMessage]) -> None:
        """What starts and scores the members of these groups."""
        for p in prompts:
            self._server.add_prompt(p.group_id, PromptEntry(p.tokens, p.text, p.reference, p.index))

    def _reload(self, prompts: Sequence[m.PromptMessage], score: Sequence[int]) -> None:
        """After a resume: what was restored gets its prompts; what was generated but not rewarded is scored again."""
        self.learn(prompts)
        for tid in score:
            self._score(tid, decode(self._record(tid)))

    def _instance(self, index: int) -> list[DeviceLink]:
        return [link for link in self.links if link.plan.instance == index and not link.gone]

    def _start_record(self, tid: int) -> bytes:
        """What an instance goes on from: the partial record that is held here, or the bare prompt."""
        held = self._server.get(tid)
        if held is not None:
            return bytes(held)
        group_id, member = group_and_member(tid)
        prompt = self._server.prompt(tid)
        tokens = np.frombuffer(prompt.tokens, np.int32)
        # By the prompt, so that one drawn again after a resume, under another group id, is answered alike.
        source = tid if group_id >= EVAL_GROUP_BASE else prompt.index
        seed = mix(self._s.run_seed, source, member) >> 1
        return bytes(
            encode(Trajectory(group_id, member, 0, len(tokens), tokens, np.zeros(0, np.float32), (), seed=seed))
        )

    def _train(self, message: m.TrainStep) -> None:
        header = m.encode(message.header)
        self.steps += 1
        for rank, microbatches in message.ranks:
            link = self._by_rank[rank]
            link.send(Kind.STEP, header)
            for tids in microbatches:
                self.trained += len(tids)
                records = [self._record(tid) for tid in tids]
                if self._audit is not None:
                    for record in records:
                        self._audit(bytes(record))
                link.send_microbatch(records, [message.advantages[tid] for tid in tids])

    def _record(self, tid: int) -> memoryview:
        record = self._server.get(tid)
        if record is None:
            raise RuntimeError(f"host of node {self._s.node}: trajectory {tid} is to be trained on but not held here")
        return record

    def _forget(self, tids: Sequence[int], groups: Sequence[int]) -> None:
        for tid in tids:
            self._server.forget(tid)
        for group_id in groups:
            self._server.forget_prompt(group_id)
        self._spooling.forget(groups)

    # ---- checkpoints -------------------------------------------------------------------------------------------------

    def _save(self, version: int, directory: str) -> None:
        """Trainer ranks write their part by themselves; instances hand over copies of what they hold first."""
        request = m.encode(m.SaveRequest(version, directory))
        living = [link for link in self.links if not link.gone]
        for link in living:
            link.send(Kind.SAVE, request)
        leaders = {link.plan.rank for link in living if link.plan.role == "rollout" and link.plan.instance_rank == 0}
        self._saving = _Saving(version, Path(directory), leaders, time.monotonic() + COPIES_S)

    def _go_on_saving(self) -> None:
        if (saving := self._saving) is None:
            return
        saving.waiting -= {link.plan.rank for link in self.links if link.gone}
        if not saving.waiting or time.monotonic() > saving.deadline_s:
            self._saving = None
            self._spooling.save(saving.version, saving.folder)
