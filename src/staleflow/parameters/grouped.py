"""What the transports `broadcast` and `direct` share at a trainer rank: a publish group, its wire, perhaps its lane."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING

from staleflow.parameters.lane import Lane, LaneOffer, open_lane
from staleflow.parameters.layout import Rows
from staleflow.parameters.manifest import Manifest
from staleflow.parameters.rounds import Chain, Course, end_row, handshake
from staleflow.parameters.staging import Staging
from staleflow.parameters.wire import PeerLostError, Wire

if TYPE_CHECKING:
    from torch.distributed import ProcessGroup


class Grouped:
    """All of `transports.Transport` but `push`. `trainers` are the group ranks of the trainer ranks."""

    def __init__(
        self,
        group: ProcessGroup,
        manifest: Manifest,
        trainers: Sequence[int],
        bucket_bytes: int,
        *,
        names: Sequence[str] = (),
        timeout_s: float = 60.0,
        on_lost: Callable[[PeerLostError], None] = lambda error: None,
        offer: LaneOffer | None = None,
    ) -> None:
        self.manifest = manifest
        self.bucket_bytes = bucket_bytes
        self.chain = Chain.of(group.size(), trainers)
        self.wire = Wire(group, names, timeout_s, on_lost)
        self._offer = offer
        self._lane: Lane | None = None
        self._number = self.chain.trainers.index(self.wire.rank)
        self._course: Course | None = None
        self._staging: Staging | None = None

    def open(self, rows: tuple[Rows, ...], staging: Staging) -> None:
        self._staging = staging
        self._course = handshake(self.wire, self.chain, self.manifest, rows, self.bucket_bytes, self._offer)
        self._lane = open_lane(self._offer, self.wire, self.chain, self._course, staging.stream)

    def stop(self) -> None:
        self.wire.stop()

    def break_off(self) -> None:
        self.wire.break_off()
        self._leave_lane()

    def close(self) -> None:
        if self._course is not None:
            self.wire.agree(end_row())
        self.wire.stop()
        self._leave_lane()

    def _opened(self) -> tuple[Course, Staging]:
        assert self._course is not None and self._staging is not None, "open() comes first"
        return self._course, self._staging

    def _leave_lane(self) -> None:
        if self._lane is not None:
            self._lane.close()
            self._lane = None
