"""How a restarted rank finds its rings again, whose names are gone: the host hands out their file descriptors.

Segments are unlinked as soon as both sides have mapped them, so that no kill leaves a file behind. The host keeps
every segment's descriptor and passes it over a Unix socket (SCM_RIGHTS) to whoever asks for its name and runs under
the same user::

    server = DescriptorServer(address)              # host
    server.offer("rank3-up", ring.fileno())

    fd = fetch(address, "rank3-up", timeout_s=10)   # restarted rank
    ring = Ring.attach(fd, run_id=run_id)
    os.close(fd)

No role needs it yet: jobs do not restart a single rank (csrc/README.md).
"""

from __future__ import annotations

import os
import socket
import struct
import threading

_CREDENTIALS = struct.Struct("3i")  # pid, uid, gid
_REQUEST_TIMEOUT_S = 5.0
_MAX_NAME_BYTES = 256


def socket_address(name: str) -> str:
    """An address without a file (Linux's abstract namespace): it goes with the process, and has no length of path."""
    return f"\0{name}"


class DescriptorServer:
    """Answers requests in a thread of its own until `close`."""

    def __init__(self, address: str) -> None:
        self._offers: dict[str, int] = {}
        self._lock = threading.Lock()
        self._socket = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        self._socket.bind(address)
        self._socket.listen()
        self._thread = threading.Thread(target=self._serve, name="descriptors", daemon=True)
        self._thread.start()

    def offer(self, name: str, fd: int) -> None:
        """Hand out `fd`, which stays the caller's and open, under this name."""
        with self._lock:
            self._offers[name] = fd

    def close(self) -> None:
        self._socket.shutdown(socket.SHUT_RDWR)  # wakes accept
        self._thread.join()
        self._socket.close()

    def _serve(self) -> None:
        while True:
            try:
                connection, _ = self._socket.accept()
            except OSError:  # closed
                return
            with connection:
                self._answer(connection)

    def _answer(self, connection: socket.socket) -> None:
        connection.settimeout(_REQUEST_TIMEOUT_S)
        raw = connection.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, _CREDENTIALS.size)
        if _CREDENTIALS.unpack(raw)[1] != os.getuid():
            return
        try:
            name = connection.recv(_MAX_NAME_BYTES).decode(errors="replace")
            with self._lock:
                fd = self._offers.get(name)
            if fd is None:
                connection.sendall(b"?")
            else:
                socket.send_fds(connection, [b"!"], [fd])
        except OSError:  # the asker has gone; it will ask again
            return


def fetch(address: str, name: str, *, timeout_s: float) -> int:
    """The descriptor offered under `name`; the caller closes it.

    ConnectionError when nobody serves the address or another user does, KeyError for a name that is not offered,
    TimeoutError.
    """
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as connection:
        connection.settimeout(timeout_s)
        connection.connect(address)
        connection.sendall(name.encode())
        answer, fds, _, _ = socket.recv_fds(connection, 1, 1)
    if answer == b"?":
        raise KeyError(f"the host offers no segment {name!r}")
    if not fds:
        raise ConnectionError(f"the host refused to hand out {name!r} (does it run as another user?)")
    return fds[0]
