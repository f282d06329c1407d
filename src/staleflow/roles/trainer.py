"""A trainer rank: one shard of the model, stepped in time with the other trainer ranks.

consumes      STEP, SAVE and REGROUP records, and after a STEP its micro-batches, from the down ring
waits for     the next record of the down ring; in a step: the other trainer ranks (FSDP2's collectives, all on this
              thread, at points equal on all ranks since every rank gets the same number of micro-batches); before the
              snapshot of its shard: the staging buffer, which the publisher's own thread frees
unblocked by  its host, which plans a step for all trainer ranks or for none
produces      StepDone, Saved, Offered and probe reports on the up ring; versions, through its publisher; its part of
              checkpoints, through DCP's own thread and group

It cannot deadlock: the publisher has a communicator and a thread of its own and waits for relays only, which wait for
nothing but the publish group (with transport `direct` for instances, which are told to Pull once this rank has offered
a version: parameters/publish.py); the ring holds at least two of the largest micro-batches, so the host can always
finish the one that this rank is waiting for.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from staleflow.checkpoint import layout
from staleflow.checkpoint.trainer_state import TrainerCheckpoints
from staleflow.learning.batch import BatchTotals, PackedBatch, pack
from staleflow.learning.export import full_state
from staleflow.learning.trainer import PolicyTrainer
from staleflow.observe.profiling import Profiling
from staleflow.observe.spans import FORWARD_BACKWARD, PACK, PUSH, TRAIN, WAIT, Spans
from staleflow.parameters.publish import Publisher, PublishError
from staleflow.roles.messages import (
    Kind,
    Offered,
    Probe,
    Ready,
    Regroup,
    Saved,
    SaveFailed,
    StepDone,
    StepHeader,
    decode_regroup,
    decode_save_request,
    decode_step_header,
)
from staleflow.roles.ranklink import RankLink, SignalReporter
from staleflow.trajectories.schema import Trajectory
from staleflow.trajectories.unpacking import Unpack

IDLE_WAIT_S = 0.2


@dataclass(frozen=True)
class TrainerSettings:
    rank: int
    leader: bool  # first of the trainer ranks: reports what is equal on all
    start_version: int
    offers: bool  # tells the coordinator of versions itself: transport `direct`, first trainer rank
    record_timeout_s: float
    probe: tuple[int, ...]  # token ids scored after each step, for the engine-trainer gap; empty: none
    audit_dir: Path | None  # keep every version's weights here (tests)


class Trainer:
    """`unpack(record)`: a micro-batch on the trainer's device, copied out of the ring."""

    def __init__(
        self,
        settings: TrainerSettings,
        link: RankLink,
        policy: PolicyTrainer,
        publisher: Publisher,
        unpack: Unpack,
        signal: Callable[[], int] = lambda: 0,
        spans: Spans | None = None,
        regroup: Callable[[Regroup], None] | None = None,
        profiling: Profiling | None = None,
    ) -> None:
        self._regroup = regroup
        self._profiling = profiling or Profiling(())
        self._publishing_failed_s: float | None = None
        self._spans = spans or Spans(None)
        self._s, self._link, self._policy, self._publisher, self._unpack = settings, link, policy, publisher, unpack
        self._signal = SignalReporter(settings.rank, link, signal)
        self._checkpoints = TrainerCheckpoints(policy)
        self._records: Iterator[Any] = iter(())

    def run(self, started_s: float) -> None:
        """Publish the version it starts with, then train until the host says stop."""
        self._publish(self._s.start_version)
        self._link.report(Ready(self._s.rank, time.monotonic() - started_s))
        while not self._link.stop_code:
            self._signal.look()
            self._tell_saved()
            self._spans.state(WAIT)
            record = self._next(IDLE_WAIT_S)
            if record is None:
                self._link.flush()
                self._look_after_publishing()
            elif record.kind == Kind.REGROUP:
                self._follow(decode_regroup(bytes(record.payload)))
            elif record.kind == Kind.STEP:
                self._step(decode_step_header(bytes(record.payload)))
            elif record.kind == Kind.SAVE:
                request = decode_save_request(bytes(record.payload))
                self._checkpoints.save(request.version, Path(request.directory) / layout.TRAINER)
            else:
                raise RuntimeError(f"trainer rank {self._s.rank}: record of kind {record.kind} is not for it")

    # ---- publishing --------------------------------------------------------------------------------------------------

    def _look_after_publishing(self) -> None:
        """A failure is final, unless a relay's node is gone and the job is to survive that: then a new group comes."""
        if (failure := self._publisher.failure) is None:
            return
        self._publishing_failed_s = self._publishing_failed_s or time.monotonic()
        if self._regroup is None or time.monotonic() > self._publishing_failed_s + self._s.record_timeout_s:
            raise RuntimeError(f"publishing has stopped: {failure}") from failure

    def _follow(self, order: Regroup) -> None:
        if self._regroup is None:
            raise RuntimeError(f"trainer rank {self._s.rank}: told to regroup without fault.survive_rollout")
        self._publishing_failed_s = None
        self._regroup(order)

    def _snapshot(self, version: int) -> None:
        while True:
            try:
                return self._publisher.snapshot(version)
            except PublishError:
                if self._regroup is None:
                    raise
            record = self._awaited("a new publish group")
            if record.kind != Kind.REGROUP:
                raise RuntimeError(f"trainer rank {self._s.rank}: kind {record.kind} instead of a new publish group")
            self._follow(decode_regroup(bytes(record.payload)))

    # ---- records -----------------------------------------------------------------------------------------------------

    def _next(self, timeout_s: float) -> Any:
        """The next record, or None. Valid until the next call."""
        for record in self._records:
            return record
        if self._link.wait(timeout_s):
            self._records = self._link.records()
            return next(self._records, None)
        return None

    def _microbatches(self, header: StepHeader) -> Iterator[PackedBatch]:
        for index in range(header.microbatches):
            record = self._awaited(f"micro-batch {index} of step {header.step}")
            if record.kind != Kind.MICROBATCH:
                raise RuntimeError(f"trainer rank {self._s.rank}: kind {record.kind} within step {header.step}")
            with self._spans.span(PACK):
                batch = self._unpack(record)
            with self._spans.span(FORWARD_BACKWARD, version=header.step):  # until the next one is asked for
                yield batch

    def _awaited(self, what: str) -> Any:
        deadline_s = time.monotonic() + self._s.record_timeout_s
        while time.monotonic() < deadline_s and not self._link.stop_code:
            if (record := self._next(IDLE_WAIT_S)) is not None:
                return record
        if self._link.stop_code:
            raise SystemExit(0)
        raise TimeoutError(f"trainer rank {self._s.rank}: its host did not send {what} in {self._s.record_timeout_s} s")

    # ---- a step ------------------------------------------------------------------------------------------------------

    def _step(self, header: StepHeader) -> None:
        began_s = time.monotonic()
        self._spans.state(None)
        self._profiling.step(header.step)
        totals = BatchTotals(header.total_response_tokens, header.total_sequences)
        with self._spans.span(TRAIN, step=header.step, version=header.step):
            metrics = self._policy.train_step(header.step, self._microbatches(header), totals)
        waited_s = self._publish(header.step + 1)
        overlap = self._publisher.stats.overlap
        self._link.report(StepDone(self._s.rank, header.step, metrics, time.monotonic() - began_s, waited_s, overlap))
        self._link.flush()

    def _tell_saved(self) -> None:
        if (result := self._checkpoints.finished()) is None:
            return
        if result.error is None:
            self._link.report(Saved(self._s.rank, result.version, result.seconds))
        else:
            self._link.report(SaveFailed(self._s.rank, result.version, result.error))

    def _publish(self, version: int) -> float:
        """Snapshot the shard; the publisher's thread sends it while the next step goes on. Seconds this rank lost."""
        began_s = time.monotonic()
        with self._spans.span(PUSH, version=version):
            self._snapshot(version)
        waited_s = time.monotonic() - began_s
        if self._s.offers:
            self._link.report(Offered(self._s.rank, version, self._publisher.stats.last_s))
            self._link.flush()
        if self._s.audit_dir is not None:
            self._keep_weights(self._s.audit_dir / f"v{version}.safetensors")
        if self._s.probe:
            logprobs = self._policy.logprobs(self._probe())[1:]
            if self._s.leader:
                self._link.report(Probe(self._s.rank, version, logprobs.float().cpu().numpy().tobytes()))
        return waited_s

    def _probe(self) -> PackedBatch:
        """The probe as a response to its own first token."""
        tokens = np.asarray(self._s.probe, np.int32)
        n = len(tokens) - 1
        return pack([Trajectory(0, 0, 0, 1, tokens, np.zeros(n, np.float32), ((0, n),))], [0.0]).to(self._policy.device)

    def _keep_weights(self, path: Path) -> None:
        from safetensors.torch import save_file

        state = full_state(self._policy.model)
        if self._s.leader:
            save_file(state, path)
