"""The link between hosts: rank 0's host talks to every other host over one authenticated socket each.

consumes      messages of the other hosts (on rank 0), of the coordinator (on the others)
waits for     nothing: `receive` takes what is there
unblocked by  -
produces      the same messages as between coordinator and host in one process; a beat a second when there is none

A side that has heard nothing for SILENT_S, or that finds a message missing, has a `failure` with the other's name from
then on: a node that is cut off ends the job with a reason, it does not hang it.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable
from pathlib import Path
from typing import Any, Generic, TypeVar

import zmq

from staleflow.jobs import security
from staleflow.jobs.runtime import Job, StartError
from staleflow.jobs.security import Inbox, Outbox, client_socket, server_socket
from staleflow.observe.clock import ClockOffset
from staleflow.observe.logs import attempt_dir
from staleflow.roles import messages as m

BEAT_S = 1.0
SILENT_S = 15.0
BEAT = b""
OVERTAKING = (m.Stop, m.LeaveOut, m.Adopt, m.Regroup)

T = TypeVar("T")


class _Peer:
    """What is known of the other side: numbers for what goes there, and when it was last heard."""

    def __init__(self, name: str, now_s: float) -> None:
        self.name, self.outbox, self.heard_s, self.said_s = name, Outbox(), now_s, now_s


class _Link(Generic[T]):
    """What both sides share: numbered messages, beats, and an end to waiting."""

    def __init__(self, socket: zmq.Socket[bytes], inbox: Inbox[T | None], peers: dict[bytes, _Peer]) -> None:
        self._socket, self.inbox, self._peers = socket, inbox, peers
        self.failure: str | None = None

    def _receive(self) -> list[tuple[bytes, T]]:
        """What has come, with the sender's socket name; says a beat where that is due."""
        taken = []
        while self._socket.poll(0):
            if (accepted := self.inbox.take(self._socket.recv_multipart())) is None:
                continue
            peer, message = accepted
            self._peers[peer].heard_s = time.monotonic()
            if message is not None:
                taken.append((peer, message))
        if lost := self.inbox.counters["lost"]:
            self.failure = self.failure or f"{lost} messages between hosts went missing"
        self._look_after_peers(time.monotonic())
        return taken

    def _look_after_peers(self, now_s: float) -> None:
        for name, peer in list(self._peers.items()):
            silence_s = now_s - peer.heard_s
            if silence_s > SILENT_S:
                self._gone(name, f"{peer.name} has been silent for {silence_s:.0f} s: its node or the network is gone")
            elif now_s - peer.said_s > BEAT_S:
                self._say(name, BEAT)

    def _say(self, name: bytes, payload: bytes) -> None:
        if self.failure is not None or name not in self._peers:
            return  # the job is ending, or goes on without this peer: nobody may wait for it
        peer = self._peers[name]
        peer.said_s = time.monotonic()
        address = [name] if name else []
        try:
            self._socket.send_multipart([*address, *peer.outbox.frames(payload)], zmq.NOBLOCK)
        except zmq.Again:
            self._gone(name, f"{peer.name} takes no more messages ({security.QUEUED_MESSAGES} wait for it)")
        except zmq.ZMQError as error:
            if error.errno != zmq.EHOSTUNREACH:
                raise
            self._gone(name, f"{peer.name} has closed its connection: that process is gone")

    def _gone(self, name: bytes, why: str) -> None:
        """A peer is lost, and the link with it."""
        self.failure = self.failure or why


class HostLinks(_Link[m.ToCoordinator]):
    """Rank 0's side: all other hosts."""

    def __init__(self, job: Job) -> None:
        directory = attempt_dir(job.run_dir, job.attempt)
        directory.mkdir(parents=True, exist_ok=True, mode=0o700)
        secret = security.create_secret(_secret_file(directory))
        self._context: zmq.Context[Any] = zmq.Context()
        self._server = server_socket(self._context, secret)
        self._nodes = {_name(node): node for node in range(1, len(job.plan.nodes))}
        now_s = time.monotonic()
        peers = {name: _Peer(_where(job, node), now_s) for name, node in self._nodes.items()}
        decode = m.decode_to_coordinator
        self._members = set(self._nodes)
        super().__init__(self._server.socket, Inbox(lambda b: decode(b) if b else None, self._members), peers)
        self._early: list[tuple[bytes, m.ToCoordinator]] = []
        self._expendable = job.plan.expendable_nodes if job.config.fault.survive_rollout else ()
        self._lost: list[tuple[int, str]] = []
        job.post("coordinator", self._server.address)
        self._meet(job.config.fault.start_timeout_s)

    def _meet(self, limit_s: float) -> None:
        """Every host says its first beat before anything is sent to it; what it says after that is kept."""
        missing = dict(self._nodes)
        deadline_s = time.monotonic() + limit_s
        while missing:
            if not self._socket.poll(200) and time.monotonic() > deadline_s:
                names = ", ".join(self._peers[name].name for name in missing)
                raise StartError(f"no link within {limit_s:.0f} s: {names}")
            while self._socket.poll(0):
                if (accepted := self.inbox.take(self._socket.recv_multipart())) is None:
                    continue
                name, message = accepted
                missing.pop(name, None)
                if message is not None:
                    self._early.append((name, message))
        for peer in self._peers.values():
            peer.heard_s = time.monotonic()

    def receive(self) -> list[tuple[int, m.ToCoordinator]]:
        """(node, message) of all other hosts. Questions about the time are answered at once."""
        early, self._early = self._early, []
        taken = []
        for name, message in [*early, *self._receive()]:
            if isinstance(message, m.ClockAsked):
                self._say(name, m.encode(m.ClockTold(message.asked_ns, time.time_ns())))
            else:
                taken.append((self._nodes[name], message))
        return taken

    def send(self, node: int, message: m.ToHost) -> None:
        """To the host of another node; nothing once the link has a failure."""
        self._say(_name(node), m.encode(message))

    def lost(self) -> list[tuple[int, str]]:
        """(node, why) of nodes that are gone and that the job may survive, since the last call."""
        lost, self._lost = self._lost, []
        return lost

    def _gone(self, name: bytes, why: str) -> None:
        node = self._nodes[name]
        if node not in self._expendable:
            super()._gone(name, why)
        elif self._peers.pop(name, None) is not None:
            self._members.discard(name)  # what it may still say is dropped, as a stranger's
            self._lost.append((node, why))

    @property
    def counters(self) -> dict[str, int]:
        """What came through and what was dropped, strangers included."""
        return self.inbox.counters | {"refused": self._server.refused()}

    def close(self) -> None:
        self._server.close()
        self._context.term()


class CoordinatorLink(_Link[m.ToHost]):
    """Every other host's side. `on_offset` learns how far this node's clock is from rank 0's, better and better."""

    def __init__(self, job: Job, on_offset: Callable[[int], None] = lambda offset_ns: None) -> None:
        self._clock, self._on_offset, self._asked_s = ClockOffset(), on_offset, 0.0
        limit_s = job.config.fault.start_timeout_s
        host, port = job.read("coordinator", limit_s, "rank 0 (host)")
        secret = security.read_secret(_secret_file(attempt_dir(job.run_dir, job.attempt)))
        self._context: zmq.Context[Any] = zmq.Context()
        socket = client_socket(self._context, secret, (host, port), _name(job.me.node))
        peers = {b"": _Peer(_where(job, 0), time.monotonic() + limit_s)}  # it speaks when all hosts have come
        super().__init__(socket, Inbox(lambda b: m.decode_to_host(b) if b else None), peers)
        self._say(b"", BEAT)

    def receive(self) -> list[m.ToHost]:
        """What the coordinator wants."""
        if time.monotonic() - self._asked_s > BEAT_S:
            self._asked_s = time.monotonic()
            self.send(m.ClockAsked(time.time_ns()))
        taken = []
        for _, message in self._receive():
            if isinstance(message, m.ClockTold):
                self._told_time(message)
            else:
                taken.append(message)
        return taken

    def _told_time(self, told: m.ClockTold) -> None:
        if self._clock.answered(told.asked_ns, told.seen_ns, time.time_ns()) and self._clock.offset_ns is not None:
            self._on_offset(self._clock.offset_ns)

    def send(self, message: m.ToCoordinator) -> None:
        self._say(b"", m.encode(message))

    def close(self) -> None:
        self._socket.close()
        self._context.term()


class Gate:
    """Sends to hosts in order, and holds back what needs a payload that is still on its way from another node.

    A Forward announces payloads; messages for their destination that come after it wait until they have passed.
    Payloads and what ends or survives a loss overtake. After `Gone` nothing goes to that node; what it was to forward
    is asked from node 0, which has adopted what was finished there and answers with nothing for the rest.
    """

    def __init__(self, send: Callable[[int, m.ToHost], None]) -> None:
        self._send = send
        self._coming: dict[int, dict[int, int]] = {}  # node -> tids on their way there, and from where
        self._held: dict[int, deque[tuple[frozenset[int], m.ToHost]]] = {}
        self._gone: set[int] = set()

    def __call__(self, node: int, message: m.ToHost) -> None:
        if isinstance(message, m.Gone):
            self._lose(node)
            return
        if isinstance(message, m.Forward):
            if message.node in self._gone:
                return
            node = 0 if node in self._gone else node
        elif node in self._gone:
            return
        if isinstance(message, m.Payload):
            self._send(node, message)
            self._coming.get(node, {}).pop(message.tid, None)
            self._release(node)
        elif isinstance(message, OVERTAKING) or not (self._coming.get(node) or self._held.get(node)):
            self._send(node, message)
        else:
            needed = frozenset(self._coming.get(node, ()))
            self._held.setdefault(node, deque()).append((needed, message))
        if isinstance(message, m.Forward):
            self._coming.setdefault(message.node, {}).update(dict.fromkeys(message.tids, node))

    def _lose(self, node: int) -> None:
        self._gone.add(node)
        self._coming.pop(node, None)
        self._held.pop(node, None)
        for target, coming in self._coming.items():
            if wanted := [tid for tid, source in coming.items() if source == node]:
                coming.update(dict.fromkeys(wanted, 0))
                self._send(0, m.Forward(wanted, target))

    def _release(self, node: int) -> None:
        held, coming = self._held.get(node, deque()), self._coming.get(node, {})
        while held and not held[0][0] & coming.keys():
            self._send(node, held.popleft()[1])


def _name(node: int) -> bytes:
    return f"host-{node}".encode()


def _where(job: Job, node: int) -> str:
    rank = job.plan.hosts[node]
    return f"rank {rank} (host of {job.plan.nodes[node].name})"


def _secret_file(directory: Path) -> Path:
    return directory / "secret"
