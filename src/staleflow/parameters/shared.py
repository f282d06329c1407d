"""A piece of POSIX shared memory with an owner: created exclusively, paid for at once, cleaned only when provably dead.

`shm_open` on Linux is `open` in /dev/shm; the file is used directly, so that Python's resource tracker, which unlinks
what another process still needs, stays out of it.
"""

from __future__ import annotations

import contextlib
import errno
import mmap
import os
import struct
from pathlib import Path

import psutil

DIRECTORY = Path("/dev/shm")
_OWNER = struct.Struct("<8sqdQ")  # magic, process id, its start time (seconds since the epoch), namespace of the id
_MAGIC = b"SFPARAM1"
OWNER_BYTES = 64  # the head of every segment, kept for the owner's mark
FREE_MARGIN_BYTES = 16 << 20  # left to everybody else


def create(name: str, nbytes: int) -> int:
    """Create segment `name` of `nbytes`, all of it allocated, owned by this process; returns its file descriptor.

    Raises ValueError for an unusable name, FileExistsError when another live process owns the name, and OSError
    (ENOSPC, saying how much is needed) when there is too little shared memory: never SIGBUS later.
    """
    path = _path(name)
    with contextlib.suppress(FileNotFoundError):
        remove_if_dead(name)
    _require_space(path, nbytes)
    fd = os.open(path, os.O_CREAT | os.O_EXCL | os.O_RDWR | os.O_CLOEXEC, 0o600)
    try:
        os.posix_fallocate(fd, 0, nbytes)
        os.pwrite(fd, _OWNER.pack(_MAGIC, os.getpid(), psutil.Process().create_time(), _pid_namespace()), 0)
    except BaseException:
        os.unlink(path)  # noqa: PTH108 - the path may be one of /proc
        os.close(fd)
        raise
    return fd


def attach(name: str) -> int:
    """Open a segment by its name, or by a path (/proc/PID/fd/N of one that is already unlinked)."""
    path = Path(name) if name.startswith("/") else _path(name)
    fd = os.open(path, os.O_RDWR | os.O_CLOEXEC)
    if _OWNER.unpack(os.pread(fd, _OWNER.size, 0))[0] != _MAGIC:
        os.close(fd)
        raise ValueError(f"{path} is not a parameter store")
    return fd


def unlink(name: str) -> None:
    """Remove the name; the memory lives until the last process that mapped it ends. Idempotent."""
    _path(name).unlink(missing_ok=True)


def owner_alive(fd: int) -> bool:
    """Whether the process that created the segment still runs (a reused process id does not count).

    True too when that cannot be told: its id means nothing here if it lives in another container.
    """
    _, pid, started, namespace = _OWNER.unpack(os.pread(fd, _OWNER.size, 0))
    if namespace != _pid_namespace():
        return True
    with contextlib.suppress(psutil.NoSuchProcess):
        process = psutil.Process(pid)
        return bool(abs(process.create_time() - started) < 1.0 and process.status() != psutil.STATUS_ZOMBIE)
    return False


def remove_if_dead(name: str) -> bool:
    """Remove a segment that is one of ours by its mark and whose owner is gone. FileNotFoundError if there is none."""
    try:
        fd = attach(name)
    except (ValueError, PermissionError, struct.error):
        return False
    try:
        dead = not owner_alive(fd)
        if dead:
            unlink(name)
        return dead
    finally:
        os.close(fd)


def map_all(fd: int, *, writable: bool) -> mmap.mmap:
    access = mmap.PROT_READ | mmap.PROT_WRITE if writable else mmap.PROT_READ
    return mmap.mmap(fd, os.fstat(fd).st_size, mmap.MAP_SHARED, access)


def _require_space(path: Path, nbytes: int) -> None:
    stat = os.statvfs(path.parent)
    free = stat.f_bavail * stat.f_frsize
    if free < nbytes + FREE_MARGIN_BYTES:
        raise OSError(
            errno.ENOSPC,
            f"the parameter store needs {nbytes >> 20} MiB of shared memory (two versions of the model) and "
            f"{free >> 20} MiB are free: enlarge it (mount -o remount,size=, docker run --shm-size) or free some",
            str(path.parent),
        )


def _pid_namespace() -> int:
    return Path("/proc/self/ns/pid").stat().st_ino


def _path(name: str) -> Path:
    if not name or "/" in name or len(name) > 200:
        raise ValueError(f"shared-memory name {name!r}: use 1 to 200 characters without '/'")
    return DIRECTORY / name
