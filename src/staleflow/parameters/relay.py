"""The relay of a rollout node: receives every version and lands it in the node's store (paper §4).

consumes      agreements and pieces of the publish group
waits for     (own thread) the trainers' next version, as long as it takes; then each piece, at most `timeout_s`
unblocked by  the trainers, or `close`; never by a reader
produces      a version in the store, `on_stored(version, seconds)`; the same pieces for the next relay of the chain
"""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING

from staleflow.parameters.landing import Deltas, Landing
from staleflow.parameters.lane import Lane, LaneOffer, open_lane
from staleflow.parameters.manifest import Manifest
from staleflow.parameters.rounds import Chain, Course, Round, decide, handshake, relay_row
from staleflow.parameters.store import NodeStore
from staleflow.parameters.wire import PeerLostError, StoppedError, Wire

if TYPE_CHECKING:
    from torch.distributed import ProcessGroup

log = logging.getLogger(__name__)


class Relay:
    """One per node, in the host's process."""

    def __init__(
        self,
        group: ProcessGroup,
        manifest: Manifest,
        store: NodeStore,
        on_stored: Callable[[int, float], None] = lambda version, seconds: None,
        *,
        trainer_ranks_in_group: Sequence[int] = (0,),
        names: Sequence[str] = (),
        timeout_s: float = 60.0,
        on_error: Callable[[BaseException], None] = lambda error: None,
        offer: LaneOffer | None = None,
    ) -> None:
        """Start the relay's thread. `on_stored` and `on_error` are called from it (or from a watching one)."""
        self.manifest = manifest
        self.store = store
        self.failure: BaseException | None = None
        self.ended = threading.Event()  # the trainers have said that no more is coming, or it failed
        self._chain = Chain.of(group.size(), trainer_ranks_in_group)
        self._wire = Wire(group, names, timeout_s, self._fail)
        self._on_stored = on_stored
        self._on_error = on_error
        self._deltas = Deltas()
        self._offer = offer
        self._lane: Lane | None = None
        self._thread = threading.Thread(target=self._run, name="relay", daemon=True)
        self._thread.start()

    def close(self, timeout_s: float = 10.0) -> None:
        """Stop: at once while nothing arrives, otherwise after the version under way. Never raises.

        After the trainers have ended nothing is left to do; before, they are told by a closed connection.
        """
        self._wire.stop()
        self._thread.join(timeout_s)
        if self._thread.is_alive():
            log.warning("the relay did not end within %.0f s; leaving it", timeout_s)

    def abandon(self, timeout_s: float = 10.0) -> None:
        """Stop at once, also in the middle of a version, which is lost: another relay takes the store over."""
        self._wire.break_off()
        self._thread.join(timeout_s)
        if self._thread.is_alive():
            raise RuntimeError(f"the old relay has not let go of the store within {timeout_s:.0f} s")

    def _run(self) -> None:
        try:
            course = handshake(self._wire, self._chain, self.manifest, None, 0, self._offer)
            self._lane = open_lane(self._offer, self._wire, self._chain, course)
            if self._lane is not None:
                self.store.register_cuda()
            while (round_ := self._agree()) is not None:
                self._store(course, round_)
        except StoppedError:
            self._wire.break_off()
        except PeerLostError as error:  # the connections to the living stay open: so they can tell who is lost
            self._fail(error)
        except Exception as error:
            self._fail(error)
            self._wire.break_off()
        finally:
            if self._lane is not None:
                self._lane.close()
            self.ended.set()

    def _agree(self) -> Round | None:
        rows = self._wire.agree(relay_row(self.store.newest()))
        return decide(rows, self._chain, self._wire.names)

    def _store(self, course: Course, round_: Round) -> None:
        begin = time.monotonic()
        if round_.fresh:
            self.store.forget(round_.version)
        base = self.store.newest()
        with self.store.writing(round_.version) as slot:
            whole = round_.base is None
            lane = self._lane if whole else None  # deltas are short, and in host memory already
            landing = Landing(self._wire, self._chain, course, slot, self._deltas, whole=whole, lane=lane)
            landing.run()
        self._deltas = Deltas(base, round_.version, landing.payloads)
        self._on_stored(round_.version, time.monotonic() - begin)

    def _fail(self, error: BaseException | PeerLostError) -> None:
        if self.failure is None:
            log.error("the relay stopped: %s", error)
            self.failure = error
            self._on_error(error)
