"""Who may talk to this job: a secret per job, CURVE on every socket of ours, and counted refusals.

The secret lives in a file of mode 0600 in the run directory, which all nodes see. Both key pairs are derived from it,
so nothing else has to be exchanged. The server also asks for the client's key (ZAP): CURVE alone would let in anybody
who knows the server's public key. What gets through is still checked for form, sender and sequence (`Inbox`): a message
that is malformed, unknown or repeated is dropped and counted, and never reaches the coordinator.
"""

from __future__ import annotations

import hashlib
import os
import secrets
import stat
import struct
import time
from collections.abc import Callable, Collection
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Generic, TypeVar

import zmq
import zmq.utils.monitor
from zmq.auth.thread import ThreadAuthenticator
from zmq.utils import z85

from staleflow.jobs.bootstrap import address_of_interface, free_port, own_address
from staleflow.jobs.env import ADDRESS, LaunchError

T = TypeVar("T")

SECRET_BYTES = 32
DOMAIN = "staleflow"
MAX_MESSAGE_BYTES = 1 << 30
QUEUED_MESSAGES = 100_000  # per peer; beyond it send() says EAGAIN, and nothing is dropped in silence
LINGER_MS = 2_000
HEARTBEAT_MS, HEARTBEAT_TIMEOUT_MS = 5_000, 30_000

HEADER = struct.Struct("<8sQ")  # session, sequence number


# ---- the secret ------------------------------------------------------------------------------------------------------


def create_secret(path: Path) -> bytes:
    """A new secret in a new file that only this user can read; replaces none.

    Raises:
        LaunchError: the file exists (an attempt's secret is never used twice), or cannot be written.
    """
    secret = secrets.token_bytes(SECRET_BYTES)
    draft = path.with_name(f".{path.name}.{secrets.token_hex(4)}")
    try:
        fd = os.open(draft, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW, 0o600)
        try:
            os.write(fd, secret)
            os.fsync(fd)
            os.link(draft, path)  # appears complete or not at all, and never over another
        finally:
            os.close(fd)
            draft.unlink()
    except OSError as error:
        raise LaunchError(
            "job secret", path, f"cannot be created ({error.strerror})", "choose a new run.name"
        ) from error
    return secret


def read_secret(path: Path, timeout_s: float = 30.0) -> bytes:
    """The secret that rank 0 wrote; waits for it, since a shared filesystem shows it late.

    Raises:
        LaunchError: it does not come, belongs to another user, or others may read it.
    """
    deadline = time.monotonic() + timeout_s
    while not path.exists():
        if time.monotonic() > deadline:
            remedy = "put the run directory on a filesystem that all nodes see (staleflow doctor checks it)"
            raise LaunchError("job secret", path, f"has not appeared within {timeout_s:g} s", remedy)
        time.sleep(0.05)
    fd = os.open(path, os.O_RDONLY | os.O_NOFOLLOW)
    with os.fdopen(fd, "rb") as file:
        status = os.fstat(fd)
        if status.st_uid != os.geteuid() or stat.S_IMODE(status.st_mode) & 0o077:
            found = f"mode {stat.S_IMODE(status.st_mode):04o}, user {status.st_uid}: others could read or plant it"
            raise LaunchError(
                "job secret", path, f"has {found}, others could read or plant it", "delete the run directory"
            )
        secret = file.read(SECRET_BYTES + 1)
    if len(secret) != SECRET_BYTES:
        raise LaunchError("job secret", path, f"has {len(secret)} bytes instead of {SECRET_BYTES}", "delete it")
    return secret


def private_directory(path: Path) -> Path:
    """Create a directory for this user only; an existing one must be ours, and is closed to others."""
    path.mkdir(parents=True, exist_ok=True, mode=0o700)
    status = path.stat()
    if status.st_uid != os.geteuid():
        raise LaunchError("run directory", path, f"belongs to user {status.st_uid}", "choose another run.dir")
    if stat.S_IMODE(status.st_mode) & 0o077:
        path.chmod(0o700)
    return path


@dataclass(frozen=True)
class KeyPair:
    """A CURVE key pair, both Z85-encoded (40 bytes)."""

    public: bytes
    secret: bytes


def key_pair(secret: bytes, role: str) -> KeyPair:
    """The pair of "server" or "client" of the job with this secret."""
    raw = hashlib.blake2b(key=secret, digest_size=32, person=f"sf-{role}".encode()).digest()
    encoded = z85.encode(raw)
    return KeyPair(zmq.curve_public(encoded), encoded)


# ---- sockets ---------------------------------------------------------------------------------------------------------


class Server:
    """A ROUTER that only this job's clients reach. Use `socket` as any other; `refused()` counts who was sent away."""

    def __init__(self, context: zmq.Context[Any], secret: bytes, address: str, port: int) -> None:
        self._client_key = key_pair(secret, "client").public
        self._refused = 0
        self._gate = _gate(context, self)
        self.socket = context.socket(zmq.ROUTER)
        _common(self.socket)
        own = key_pair(secret, "server")
        self.socket.curve_server = True
        self.socket.curve_publickey, self.socket.curve_secretkey = own.public, own.secret
        self.socket.zap_domain = DOMAIN.encode()
        self.socket.setsockopt(zmq.ROUTER_MANDATORY, 1)  # sending to nobody is an error
        self.socket.setsockopt(zmq.ROUTER_HANDOVER, 1)  # a restarted host takes its name over
        self._monitor = self.socket.get_monitor_socket(zmq.EVENT_ACCEPTED | zmq.EVENT_HANDSHAKE_SUCCEEDED)
        self.socket.bind(f"tcp://{address}:{port}")
        self.address = (address, port)

    def callback(self, domain: str, key: bytes) -> bool:
        """Asked by the gate, on its thread: is this the key of a client of ours?"""
        return secrets.compare_digest(key, self._client_key)

    def refused(self) -> int:
        """Connections that did not prove membership: no CURVE, wrong keys, or no ZeroMQ at all.

        ZeroMQ has no event for every way to fail, so these are the accepted ones less those that succeeded; a member
        counts during the milliseconds of its handshake.
        """
        while self._monitor.poll(0):
            event = zmq.utils.monitor.recv_monitor_message(self._monitor)["event"]
            self._refused += 1 if event == zmq.EVENT_ACCEPTED else -1
        return self._refused

    def close(self) -> None:
        """Close the socket; messages on their way get LINGER_MS to leave."""
        self.refused()
        self.socket.disable_monitor()
        self._monitor.close(linger=0)
        self.socket.close()
        if self._gate is not None:
            self._gate.stop()


def server_socket(context: zmq.Context[Any], secret: bytes, bind_interface: str | None = None, port: int = 0) -> Server:
    """Listen on one interface only, by name ("lo", "ib0") or address; None is the interface of this node's host name.

    Port 0 chooses a free one below the ephemeral range; the answer's `address` is the (host, port) to tell the clients.
    """
    address = bind_interface if bind_interface and ADDRESS.match(bind_interface) else None
    if address is None:
        address = own_address() if bind_interface is None else address_of_interface(bind_interface)
    for _ in range(8):  # between choosing a free port and taking it, another program may be faster
        try:
            return Server(context, secret, address, port or free_port(address))
        except zmq.ZMQError as error:
            if error.errno != zmq.EADDRINUSE or port:
                raise LaunchError(
                    "port", port, f"cannot listen on {address}: {error}", "choose another port"
                ) from error
    raise LaunchError("port", "any", f"eight free ports of {address} were taken within moments", "see `ss -tlnp`")


def client_socket(
    context: zmq.Context[Any], secret: bytes, address: tuple[str, int], name: bytes = b""
) -> zmq.Socket[bytes]:
    """A DEALER to a `Server` of the same job; the server sees `name` (1..255 bytes, the first not 0) as the sender."""
    socket: zmq.Socket[bytes] = context.socket(zmq.DEALER)
    _common(socket)
    own = key_pair(secret, "client")
    socket.curve_publickey, socket.curve_secretkey = own.public, own.secret
    socket.curve_serverkey = key_pair(secret, "server").public
    if name:
        socket.setsockopt(zmq.IDENTITY, name)
    socket.connect(f"tcp://{address[0]}:{address[1]}")
    return socket


def _common(socket: zmq.Socket[bytes]) -> None:
    options = {
        zmq.LINGER: LINGER_MS,
        zmq.MAXMSGSIZE: MAX_MESSAGE_BYTES,
        zmq.SNDHWM: QUEUED_MESSAGES,
        zmq.RCVHWM: QUEUED_MESSAGES,
        zmq.HEARTBEAT_IVL: HEARTBEAT_MS,
        zmq.HEARTBEAT_TIMEOUT: HEARTBEAT_TIMEOUT_MS,
        zmq.HANDSHAKE_IVL: HEARTBEAT_TIMEOUT_MS,
    }
    for option, value in options.items():
        socket.setsockopt(option, value)


def _gate(context: zmq.Context[Any], keeper: Server) -> ThreadAuthenticator | None:
    """The context's one ZAP handler; a second server of the context (of the same job) is served by the first one's."""
    gate = ThreadAuthenticator(context)
    try:
        gate.start()
    except zmq.ZMQError as error:
        gate.stop()
        if error.errno != zmq.EADDRINUSE:
            raise
        return None
    gate.configure_curve_callback(domain=DOMAIN, credentials_provider=keeper)
    return gate


# ---- messages --------------------------------------------------------------------------------------------------------


class Outbox:
    """Numbers this process's messages to one peer."""

    def __init__(self) -> None:
        self._session, self._next = secrets.token_bytes(8), 0

    def frames(self, payload: bytes) -> list[bytes]:
        """[header, payload] for `send_multipart`, behind the peer's name on a ROUTER."""
        header = HEADER.pack(self._session, self._next)
        self._next += 1
        return [header, payload]


class Inbox(Generic[T]):
    """Lets each message through once, in order. `counters` says what was dropped, and why.

    Args:
        decode: bytes to a message; raises ValueError (as msgspec's errors are) for what is no message.
        peers: the names that may send, or None for a socket with one peer (a DEALER).
    """

    def __init__(self, decode: Callable[[bytes], T], peers: Collection[bytes] | None = None) -> None:
        self._decode, self._peers = decode, peers
        self._last: dict[bytes, tuple[bytes, int]] = {}  # peer -> session, last number
        self._ended: set[bytes] = set()  # sessions of a peer's former lives
        self.counters = {"accepted": 0, "malformed": 0, "unknown": 0, "replayed": 0, "lost": 0}

    def take(self, frames: list[bytes]) -> tuple[bytes, T] | None:
        """The sender's name (b"" on a DEALER) and the message; None when it was dropped."""
        peer, *rest = frames if self._peers is not None else [b"", *frames]
        if self._peers is not None and peer not in self._peers:
            return self._drop("unknown")
        if len(rest) != 2 or len(rest[0]) != HEADER.size:
            return self._drop("malformed")
        session, number = HEADER.unpack(rest[0])
        last_session, last = self._last.get(peer, (session, -1))
        if session in self._ended or (session == last_session and number <= last):
            return self._drop("replayed")
        try:
            message = self._decode(rest[1])
        except ValueError:
            return self._drop("malformed")
        if session != last_session:
            self._ended.add(last_session)
            last = number - 1
        self.counters["lost"] += number - last - 1
        self.counters["accepted"] += 1
        self._last[peer] = (session, number)
        return peer, message

    def _drop(self, why: str) -> tuple[bytes, T] | None:
        self.counters[why] += 1
        return None
