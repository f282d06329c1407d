"""A deadline as a file descriptor (timerfd), so that one epoll waits for answers and for time."""

from __future__ import annotations

import contextlib
import ctypes
import os
import time

_libc = ctypes.CDLL(None, use_errno=True)


class _Spec(ctypes.Structure):
    _fields_ = [(name, ctypes.c_long) for name in ("interval_s", "interval_ns", "value_s", "value_ns")]


class Timer:
    """Readable from the deadline on (`time.monotonic` seconds) until `clear` or `set`."""

    def __init__(self) -> None:
        self._fd: int = _libc.timerfd_create(time.CLOCK_MONOTONIC, os.O_NONBLOCK | os.O_CLOEXEC)
        if self._fd < 0:
            raise OSError(ctypes.get_errno(), "timerfd_create")
        self._deadline_s: float | None = None

    def fileno(self) -> int:
        return self._fd

    def set(self, deadline_s: float | None) -> None:
        """Fire once at `deadline_s`, or not at all."""
        if deadline_s == self._deadline_s:
            return
        self._deadline_s = deadline_s
        left_s = 0.0 if deadline_s is None else max(deadline_s - time.monotonic(), 1e-6)
        spec = _Spec(0, 0, int(left_s), int(left_s % 1 * 1e9))
        if _libc.timerfd_settime(self._fd, 0, ctypes.byref(spec), None) != 0:
            raise OSError(ctypes.get_errno(), "timerfd_settime")

    def clear(self) -> None:
        with contextlib.suppress(BlockingIOError):
            os.read(self._fd, 8)
            self._deadline_s = None

    def close(self) -> None:
        os.close(self._fd)
