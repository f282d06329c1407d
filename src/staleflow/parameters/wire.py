"""What a publish group says to itself: agreements, and messages from one member to another, over Gloo.

Two rules keep it from hanging. Nobody waits for slow data inside an operation: all members first *agree* (one small
all-gather in which waiting long is normal, and which a member enters only when it is ready), and the messages that
follow have a short time limit. And nothing is waited for in vain without a name: a dead process is noticed by its
closed connection, at once by those who wait for it and by the others when they ask around (`lost`); a silent one by
the time limit; a member that failed in another way, or stops, closes its connections itself (`break_off`).

A Gloo operation that ran out of time closes its connection, so a group that failed once is not used again: it is
rebuilt without the lost member. That is also why waiting for an agreement slices the *wait*, not the operation.
"""

from __future__ import annotations

import contextlib
import logging
import threading
import time
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from datetime import timedelta
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt
import torch

if TYPE_CHECKING:
    from torch.distributed import ProcessGroup, Work

Bytes = npt.NDArray[np.uint8]
ROW_WORDS = 8  # an agreement gathers this many int64 from each member
SLICE = timedelta(seconds=0.2)  # how soon a member that waits for an agreement notices that it is to stop
IDLE_LIMIT = timedelta(days=7)  # of the all-gather itself: the time between two optimizer steps is not ours to limit
SUSPICION_S = 2.0  # a message that takes longer than this makes us ask after everybody's connection
ASK_AFTER_S, ASK_EVERY_S = 4.0, 60.0  # in a long agreement: first after 4 s, then 8, 16, … and every minute
PROBE_TAG = (1 << 30) + 1

log = logging.getLogger(__name__)


class PeerLostError(RuntimeError):
    """A member of the group died, fell silent or left. `peers` are the names of those whose connection is gone."""

    def __init__(self, what: str, peers: Sequence[str]) -> None:
        super().__init__(f"{what}; lost: {', '.join(peers) or 'nobody for certain (no answer in time)'}")
        self.peers = tuple(peers)


class StoppedError(RuntimeError):
    """This member was told to stop while it waited for an agreement."""


@dataclass
class Message:
    """A message on its way; `to` names the other end."""

    work: Work
    what: str
    to: str

    def finish(self, limit: timedelta) -> None:
        """Until it is through; RuntimeError when it fails or takes longer than `limit`."""
        self.work.wait(limit)


class InFlight:
    """Messages under way, at most `limit` of them, with the data that they need until they are through."""

    def __init__(self, wire: Wire, limit: int) -> None:
        self._wire, self._limit = wire, limit
        self._messages: deque[tuple[Message, Any]] = deque()

    def add(self, message: Message, data: Any = None) -> None:
        """One more; waits for the oldest when they become too many. Errors as in `Wire.wait`."""
        self._messages.append((message, data))
        while len(self._messages) > self._limit:
            self._wire.wait(self._messages.popleft()[0])

    def finish(self) -> None:
        """Wait for all."""
        while self._messages:
            self._wire.wait(self._messages.popleft()[0])


@dataclass
class Agreement:
    """An all-gather on its way; its tensors must live as long."""

    work: Work
    mine: torch.Tensor
    rows: list[torch.Tensor]
    ask_at_s: float
    ask_every_s: float


class Wire:
    """One member's end of a publish group. All calls but `stop` come from one thread."""

    def __init__(
        self,
        group: ProcessGroup,
        names: Sequence[str] = (),
        timeout_s: float = 60.0,
        on_lost: Callable[[PeerLostError], None] = lambda error: None,
    ) -> None:
        self.rank, self.size = group.rank(), group.size()
        self.names = list(names) or [f"member {rank}" for rank in range(self.size)]
        if len(self.names) != self.size:
            raise ValueError(f"{len(self.names)} names for a publish group of {self.size}: {self.names}")
        self.timeout_s = timeout_s
        self._group: Any = group
        self._on_lost = on_lost
        self._stopping = threading.Event()
        self.broken = threading.Event()
        self._pending = ""  # what is being waited for
        self._pending_since = 0.0
        self._watch = threading.Thread(target=self._suspect, name="publish-watch", daemon=True)
        self._watch.start()

    def stop(self) -> None:
        """Make this member's waiting for an agreement end (from any thread). The group is unusable afterwards."""
        self._stopping.set()

    def break_off(self) -> None:
        """Close all connections, so that nobody waits for this member any more, and it for nobody.

        Gloo has no call for that, but closes a connection on which an operation has run out of time.
        """
        self._stopping.set()
        self.broken.set()
        for rank in range(self.size):
            if rank != self.rank:
                with contextlib.suppress(RuntimeError):
                    self._group.recv([torch.zeros(1)], rank, PROBE_TAG + 1).wait(timedelta(milliseconds=1))

    def agree(self, row: Sequence[int]) -> list[list[int]]:
        """All-gather `ROW_WORDS` int64 from every member; waits as long as it takes for all to be ready.

        Raises PeerLostError when a member dies meanwhile, StoppedError after `stop`.
        """
        agreement = self.enter(row)
        while (rows := self.poll(agreement)) is None:
            pass
        return rows

    def enter(self, row: Sequence[int]) -> Agreement:
        """Begin to agree; this member is ready from now on."""
        mine = torch.zeros(ROW_WORDS, dtype=torch.int64)
        mine[: len(row)] = torch.tensor(list(row), dtype=torch.int64)
        rows = [torch.zeros(ROW_WORDS, dtype=torch.int64) for _ in range(self.size)]
        work = self.attempt("agreement", lambda: self._group.allgather(rows, mine, IDLE_LIMIT))
        return Agreement(work, mine, rows, time.monotonic() + ASK_AFTER_S, ASK_AFTER_S)

    def poll(self, agreement: Agreement) -> list[list[int]] | None:
        """Wait for an agreement for a moment (`SLICE`); what each member said, or None. Errors as in `agree`."""
        try:
            agreement.work.wait(SLICE)
        except RuntimeError:  # the slice is over, or it failed, or it completed just after the slice was over
            if not agreement.work.is_completed():
                if self._stopping.is_set():
                    raise StoppedError("stopped while waiting for the publish group") from None
                self._ask(agreement)
                return None
            self.attempt("agreement", agreement.work.wait)
        return [gathered.tolist() for gathered in agreement.rows]

    def broadcast(self, data: Bytes, root: int) -> None:
        """Send `data` from `root` to all members (in place), within the time limit."""
        limit = timedelta(seconds=self.timeout_s)
        what = f"broadcast from {self.names[root]}"
        self.attempt(what, lambda: self._group.broadcast(torch.from_numpy(data), root, limit).wait())

    def send(self, data: Bytes, to: int, tag: int) -> Message:
        """Begin to send; `data` must stay as it is until `wait`."""
        what = f"sending {data.nbytes} bytes to {self.names[to]}"
        return Message(
            self.attempt(what, lambda: self._group.send([torch.from_numpy(data)], to, tag)), what, self.names[to]
        )

    def receive(self, data: Bytes, source: int, tag: int) -> Message:
        """Begin to receive into `data`; it is complete after `wait`."""
        what = f"receiving {data.nbytes} bytes from {self.names[source]}"
        work = self.attempt(what, lambda: self._group.recv([torch.from_numpy(data)], source, tag))
        return Message(work, what, self.names[source])

    def wait(self, message: Message) -> None:
        """Until the message is through; PeerLostError after `timeout_s` or when the other end is gone."""
        with self.watching(message.what):
            self.attempt(message.what, lambda: message.finish(timedelta(seconds=self.timeout_s)))

    @contextlib.contextmanager
    def watching(self, what: str) -> Iterator[None]:
        """When the block takes long, see whether everybody is still there, and report who is not (`on_lost`)."""
        self._pending, self._pending_since = what, time.monotonic()
        try:
            yield
        finally:
            self._pending = ""

    def lost(self) -> list[str]:
        """Names of the members whose connection is closed; asked by a one-byte message that nobody reads."""
        return [self.names[rank] for rank in range(self.size) if rank != self.rank and not self._answers(rank)]

    def _ask(self, agreement: Agreement) -> None:
        """In a long wait, now and then, see whether everybody is still there."""
        if time.monotonic() < agreement.ask_at_s:
            return
        agreement.ask_every_s = min(2 * agreement.ask_every_s, ASK_EVERY_S)
        agreement.ask_at_s = time.monotonic() + agreement.ask_every_s
        if peers := self.lost():
            raise PeerLostError(f"{self.names[self.rank]}: waiting for the publish group", peers)

    def _answers(self, rank: int) -> bool:
        try:
            self._group.send([torch.zeros(1, dtype=torch.uint8)], rank, PROBE_TAG)
        except RuntimeError:
            return False
        return True

    def attempt(self, what: str, operation: Callable[[], Any]) -> Any:
        """What the operation returns; its RuntimeError becomes a PeerLostError."""
        try:
            return operation()
        except RuntimeError as error:
            raise self._lost(what, error) from error

    def _lost(self, what: str, error: RuntimeError) -> PeerLostError:
        reason = str(error).split("] ", 1)[-1].split(". This", 1)[0]
        return PeerLostError(f"{self.names[self.rank]}: {what}: {reason}", self.lost())

    def _suspect(self) -> None:
        """While a message hangs, look for dead members and report them before the time limit is reached."""
        while not self._stopping.wait(SUSPICION_S / 4):
            pending = self._pending
            if not pending or time.monotonic() - self._pending_since < SUSPICION_S:
                continue
            if peers := self.lost():
                self._on_lost(PeerLostError(f"{self.names[self.rank]}: {pending} hangs", peers))
                return
