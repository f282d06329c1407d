"""The trainer rank's publisher: `snapshot` after each optimizer step; a background thread does the rest (paper §4).

consumes      snapshots of the own shard, at most one at a time, each from when its copying begins
waits for     (thread) a snapshot; then the other trainer ranks' publishers and all relays to be ready; then the link
unblocked by  `snapshot` / `close`; relays are ready whenever they are not receiving
produces      the version, in every relay's store

Why this cannot deadlock. The thread uses only its own group, and is the only one to use it on this rank, so no order
of the trainers' other collectives (which stay on the main threads) matters to it. The main thread waits for the thread
only in `snapshot` and `close`, for a buffer that becomes free when a push ends; a push needs the same push of the
other trainer ranks, which they have already snapshot or will after a step that needs nothing from the publishers, and
relays, which wait for nobody. A push that has begun waits for the rest of the snapshot under way, whose copies wait
for nothing (and which says so when it fails). Readers are never waited for. So η = 0 (rollout waits for the version,
the trainer for rollouts) and the last step (nobody waits for its version) are no special cases: the version arrives by
itself.

Transport `direct` has no store, and a push waits for all instances to take the version. They are told to when it has
been snapshot, and never wait for a trainer's main thread: an instance obeys between two of its own steps, and in the
Pull waits for the other instances, which obey as well, and for the trainers' threads. So the buffer becomes free, at
η = 0 too. After the last step nobody is told any more: `close(deliver=False)`.
"""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import TYPE_CHECKING

import torch

from staleflow.parameters.broadcast import Broadcast
from staleflow.parameters.lane import LaneOffer
from staleflow.parameters.manifest import Manifest
from staleflow.parameters.staging import Staging
from staleflow.parameters.transports import Sent, Transport
from staleflow.parameters.wire import PeerLostError, StoppedError

if TYPE_CHECKING:
    from torch.distributed import ProcessGroup

DEFAULT_BUCKET_BYTES = 64 << 20

log = logging.getLogger(__name__)


class PublishError(RuntimeError):
    """Publishing has failed for good on this group; `__cause__` says why and names who was lost."""


@dataclass
class PublishStats:
    """Sums since the start. `blocked_s`: time the trainer's main thread waited for the buffer; the rest overlapped.

    A push (`publish_s`; `last_s` is the last one) counts from when all are ready, so most of the snapshot is in it.
    """

    versions: int = 0
    publish_s: float = 0.0
    last_s: float = 0.0
    snapshot_s: float = 0.0
    blocked_s: float = 0.0
    sent_bytes: int = 0
    full_bytes: int = 0

    @property
    def overlap(self) -> float:
        """Share of the publishing time that training did not wait for, 0 to 1."""
        return 1.0 if self.publish_s == 0 else max(0.0, 1.0 - self.blocked_s / self.publish_s)


@dataclass
class _State:
    """Shared by the two threads, under `changed`."""

    version: int | None = None  # staged, not yet published
    closing: bool = False
    deliver: bool = True
    failure: BaseException | None = None
    changed: threading.Condition = field(default_factory=threading.Condition)


class Publisher:
    """One per trainer rank, on its main thread."""

    def __init__(
        self,
        parameters: Iterable[tuple[str, torch.Tensor]],
        manifest: Manifest,
        group: ProcessGroup | None,
        trainer_ranks_in_group: Sequence[int] = (0,),
        bucket_bytes: int = DEFAULT_BUCKET_BYTES,
        delta: bool = False,
        on_done: Callable[[Sent], None] = lambda sent: None,
        *,
        names: Sequence[str] = (),
        timeout_s: float = 60.0,
        transport: Transport | None = None,
        trainer: int | None = None,
        offer: LaneOffer | None = None,
    ) -> None:
        """Start the publishing thread; it meets the relays by itself and waits for them as long as it takes.

        `parameters` are (checkpoint name, tensor or DTensor sharded on dimension 0), kept by reference. `names` names
        the group's members in errors. `transport` replaces `broadcast` over `group`; then `trainer` is this rank's
        number among the trainers. Where all members make an `offer`, whole pieces go from GPU to GPU. Raises
        ValueError when the parameters are not those of the manifest.
        """
        self._broadcast = partial(
            Broadcast,
            manifest=manifest,
            bucket_bytes=bucket_bytes,
            delta=delta,
            timeout_s=timeout_s,
            on_lost=self._fail,
        )
        if transport is None:
            if group is None:
                raise ValueError("a publisher needs a group (transport broadcast) or a transport")
            trainer = list(trainer_ranks_in_group).index(group.rank())
            transport = self._broadcast(group, trainers=trainer_ranks_in_group, names=names, offer=offer)
        self.stats = PublishStats()
        self._on_done = on_done
        self._transport = transport
        self._staging = Staging(parameters, manifest, trainer or 0)
        self._state = _State()
        self._staged: int | None = None
        self._start()

    def regroup(
        self,
        group: ProcessGroup,
        trainer_ranks_in_group: Sequence[int] = (0,),
        *,
        names: Sequence[str] = (),
        offer: LaneOffer | None = None,
        timeout_s: float = 60.0,
    ) -> None:
        """After a loss: go on over a group without the lost member. What was staged last is published again, in full:
        this rank may be through with it while a relay behind the lost one is not. Raises PublishError.
        """
        self._transport.break_off()
        self._thread.join(timeout_s)
        if self._thread.is_alive():
            raise PublishError(f"the old publish group has not let go within {timeout_s:.0f} s")
        self._transport = self._broadcast(group, trainers=trainer_ranks_in_group, names=names, offer=offer)
        self._state.failure = None
        self._state.version = self._staged
        self._start()

    def _start(self) -> None:
        self._fresh = True
        self._thread = threading.Thread(target=self._run, name="publisher", daemon=True)
        self._thread.start()

    def snapshot(self, version: int, timeout_s: float = 600.0) -> None:
        """Stage the present weights as `version` and return; they travel in the background.

        Call it after the optimizer step, on all trainer ranks, and once at the start with the version of the
        checkpoint. Waits until the previous version has left the buffer. No collective. Raises PublishError.
        The thread is told first: what has been staged is summed, or encoded and sent, while the rest is copied.
        """
        self.wait_free(timeout_s)
        begin = time.monotonic()
        self._staging.begin()
        self._staged = version
        with self._state.changed:
            self._state.version = version
            self._state.changed.notify_all()
        self._staging.snapshot()
        self.stats.snapshot_s += time.monotonic() - begin

    def wait_free(self, timeout_s: float) -> None:
        """Until the buffer is free: all that was snapshot is published. Raises PublishError, or TimeoutError."""
        begin = time.monotonic()
        state = self._state
        with state.changed:
            done = state.changed.wait_for(lambda: state.version is None or state.failure is not None, timeout_s)
            version = state.version
            failure = state.failure
        self.stats.blocked_s += time.monotonic() - begin
        if failure is not None:
            raise PublishError(f"version {version} could not be published: {failure}") from failure
        if not done:
            raise TimeoutError(f"version {version} is not published after {timeout_s:.0f} s")

    @property
    def failure(self) -> BaseException | None:
        """Why publishing stopped, or None."""
        return self._state.failure

    def close(self, timeout_s: float = 60.0, *, deliver: bool = True) -> None:
        """Publish what is staged, tell the relays that this is the end, and stop. Never raises for a lost peer.

        Without `deliver` what nobody has taken yet is dropped.
        """
        with self._state.changed:
            self._state.closing, self._state.deliver = True, deliver
            self._state.changed.notify_all()
        if not deliver:
            self._transport.stop()
        self._thread.join(timeout_s)
        if self._thread.is_alive():
            log.warning("the publisher did not end within %.0f s; leaving it", timeout_s)
        self._transport.stop()

    def _run(self) -> None:
        try:
            self._transport.open(self._staging.shard.rows, self._staging)
            while (version := self._next()) is not None:
                self._publish(version)
            self._transport.close()
        except StoppedError:
            self._transport.break_off()
        except PeerLostError as error:  # the connections to the living stay open: so they can tell who is lost
            self._fail(error)
        except Exception as error:
            self._fail(error)
            self._transport.break_off()

    def _next(self) -> int | None:
        state = self._state
        with state.changed:
            state.changed.wait_for(lambda: state.version is not None or state.closing)
            return state.version

    def _publish(self, version: int) -> None:
        sent = self._transport.push(version, fresh=self._fresh)
        self._fresh = False
        self.stats.versions += 1
        self.stats.publish_s += sent.seconds
        self.stats.last_s = sent.seconds
        self.stats.sent_bytes += sent.sent_bytes
        self.stats.full_bytes += sent.full_bytes
        with self._state.changed:
            self._state.version = None
            self._state.changed.notify_all()
        self._on_done(sent)

    def _fail(self, error: BaseException | PeerLostError) -> None:
        with self._state.changed:
            over = self._state.closing and (self._state.version is None or not self._state.deliver)
            if self._state.failure is None and not over:
                log.error("publishing failed: %s", error)
                self._state.failure = error
            self._state.changed.notify_all()
