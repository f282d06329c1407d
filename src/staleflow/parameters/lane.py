"""The fast lane of a publish group: whole pieces from GPU to GPU over NCCL, where every member has a GPU of its own.

The wire (Gloo, host memory) goes on carrying all that is short: agreements, headers, deltas, checksums. And it keeps
watch, because a member of an NCCL group never hears that another one has died: a message on the lane is waited for
like one on the wire, so the wire asks around when it hangs, names who is gone, and `break_off` ends the wait.

NCCL knows no tags: between two members messages arrive in the order in which both ends begin them. Both begin pieces
in the order of the course, so that needs no more than care.

Why it cannot deadlock. A kernel of NCCL occupies its GPU until the other end has begun too, and CUDA calls that wait
for the whole device (allocations do) wait for it: with a kernel that waits for another trainer's thread, the trainers'
own collectives could close a circle. So pieces go from one member to one other, never round several trainers, and a
sender begins only when it has the receiver's word that it has begun: a trainer's kernel lasts as long as its bytes.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable
from dataclasses import dataclass
from datetime import timedelta
from typing import TYPE_CHECKING, Any

import numpy as np
import torch

from staleflow.parameters.staging import on_stream
from staleflow.parameters.wire import InFlight, Message, Wire

if TYPE_CHECKING:
    from staleflow.parameters.rounds import Chain, Course

LANE_AHEAD = 2  # pieces under way at each end: a bucket each, of the GPU's memory
POLL_S = 5e-5  # a piece of 64 MiB takes ten times as long

log = logging.getLogger(__name__)


@dataclass(frozen=True)
class LaneOffer:
    """What a member brings that could use a lane: it is used if all members do.

    `device_id` is not 0 and tells its GPU from all others, since NCCL takes each only once; `group()` meets the other
    members.
    """

    device: torch.device
    device_id: int
    group: Callable[[], Any]


@dataclass
class DeviceMessage(Message):
    """A message on the lane. `data` must live until it is through, and so it does."""

    data: torch.Tensor
    broken: Callable[[], bool]

    def finish(self, limit: timedelta) -> None:
        """Until it is through. RuntimeError at the time limit, when the wire was broken off, or when NCCL failed."""
        if self.data.device.type != "cuda":
            self.work.wait(limit)
            return
        until = time.monotonic() + limit.total_seconds()
        while not self.work.is_completed():
            if self.broken():
                raise RuntimeError("the publish group was broken off")
            if time.monotonic() > until:
                raise RuntimeError(f"not through after {limit.total_seconds():.0f} s")
            time.sleep(POLL_S)
        self.work.wait()  # returns at once; raises what went wrong


class Lane:
    """One member's end of the chain. Calls come from the wire's thread; `Wire.wait` waits for its messages."""

    def __init__(
        self, offer: LaneOffer, wire: Wire, chain: Chain, course: Course, stream: torch.cuda.Stream | None = None
    ) -> None:
        """Meets the members before and behind. Copies and messages are queued on `stream`; None: the current one."""
        self.device = offer.device
        self._wire, self._chain, self._course = wire, chain, course
        self._stream = stream
        self._group: Any = offer.group()
        self._words = InFlight(wire, LANE_AHEAD)
        if self.device.type == "cuda":
            torch.cuda.set_device(self.device)  # a thread begins with device 0, where a context would cost memory
        self._meet()

    def send(self, place: int, data: torch.Tensor, to: int) -> Message:
        """Begin to send a piece once `to` is receiving it; `data` must stay as it is until `Wire.wait`."""
        word = np.empty(1, np.uint8)
        self._wire.wait(self._wire.receive(word, to, self._course.word_tag(place)))
        return self._send(data, to)

    def receive(self, place: int, nbytes: int, source: int) -> tuple[torch.Tensor, Message]:
        """Begin to receive a piece, and tell `source` so; the uint8 tensor [nbytes] is complete after `Wire.wait`."""
        with on_stream(self._stream):
            data = torch.empty(nbytes, dtype=torch.uint8, device=self.device)
        message = self._receive(data, source)
        self._say(place, source)
        return data, message

    def close(self) -> None:
        """Give up what is under way, and the connections. Never raises."""
        if self.device.type == "cuda":
            try:
                self._group.abort()
            except RuntimeError as error:
                log.warning("closing the NCCL group: %s", error)

    def _meet(self) -> None:
        """One byte over every link of the chain: NCCL connects two members when they first have something to say.

        In an order that cannot lock: a relay has met all before it when it turns to the one behind it. And only once
        the other end has said that it has a GPU to meet with: nothing ends NCCL's wait for one that never comes.
        """
        me, chain = self._wire.rank, self._chain
        token = torch.zeros(1, dtype=torch.uint8, device=self.device)
        place = len(self._course.steps)
        if me in chain.trainers:
            self._wire.wait(self.send(place, token, chain.relays[0]))
            return
        for source in dict.fromkeys(chain.before(me, trainer) for trainer in range(len(chain.trainers))):
            self._say(place, source)
            self._wire.wait(self._receive(token, source))
        if (behind := chain.after(me)) is not None:
            self._wire.wait(self.send(place, token, behind))

    def _say(self, place: int, source: int) -> None:
        word = np.zeros(1, np.uint8)
        self._words.add(self._wire.send(word, source, self._course.word_tag(place)), word)

    def _send(self, data: torch.Tensor, to: int) -> Message:
        what = f"sending {data.nbytes} bytes to {self._wire.names[to]} (NCCL)"
        return self._begin(what, to, data, lambda: self._group.send([data], to, 0))

    def _receive(self, data: torch.Tensor, source: int) -> Message:
        what = f"receiving {data.nbytes} bytes from {self._wire.names[source]} (NCCL)"
        return self._begin(what, source, data, lambda: self._group.recv([data], source, 0))

    def _begin(self, what: str, peer: int, data: torch.Tensor, operation: Callable[[], Any]) -> Message:
        # Watched, since the first message to a member waits for it to connect.
        with self._wire.watching(what), on_stream(self._stream):
            work = self._wire.attempt(what, operation)
        return DeviceMessage(work, what, self._wire.names[peer], data, self._wire.broken.is_set)


def open_lane(
    offer: LaneOffer | None, wire: Wire, chain: Chain, course: Course, stream: torch.cuda.Stream | None = None
) -> Lane | None:
    """This member's end, if the handshake agreed on a lane."""
    return Lane(offer, wire, chain, course, stream) if offer is not None and course.lane else None


def agreed_on(device_ids: list[int]) -> bool:
    """Whether all members have a GPU, each its own. 0: none."""
    return all(device_ids) and len(set(device_ids)) == len(device_ids)
