"""Clean up shared memory that killed jobs left behind: only what is provably ours, and provably dead.

A segment is ours when its name begins with our prefix and user id, the file belongs to this user, and its first bytes
are those of a ring, an arena or a parameter store. Rings and arenas are dead when nobody holds the shared lock that
every process with such a segment open holds (the kernel drops it with the process, however it ended); a parameter
store, when the process that its head names is gone.
"""

from __future__ import annotations

import fcntl
import os
import stat
from dataclasses import dataclass
from pathlib import Path

from staleflow.parameters import shared
from staleflow.trajectories.ring import SEGMENT_PREFIX

_LOCKED_MAGICS = {b"SFWRING1": "ring", b"SFARENA1": "arena"}


@dataclass(frozen=True)
class Leftover:
    """A segment that was removed."""

    path: Path
    kind: str
    nbytes: int


def reap(directory: Path = shared.DIRECTORY) -> list[Leftover]:
    """Remove the dead segments of this user in `directory`; returns what was removed. Living ones are not touched."""
    removed = (_reap_one(path) for path in sorted(directory.glob(f"{SEGMENT_PREFIX}-{os.getuid()}-*")))
    return [leftover for leftover in removed if leftover is not None]


def _reap_one(path: Path) -> Leftover | None:
    try:
        fd = os.open(path, os.O_RDWR | os.O_CLOEXEC | os.O_NOFOLLOW)
    except OSError:  # gone meanwhile, a link, or not ours to open
        return None
    try:
        info = os.fstat(fd)
        if not stat.S_ISREG(info.st_mode) or info.st_uid != os.getuid():
            return None
        kind = _removed_kind(fd, path, info)
        return Leftover(path, kind, info.st_size) if kind else None
    finally:
        os.close(fd)


def _removed_kind(fd: int, path: Path, info: os.stat_result) -> str | None:
    magic = os.pread(fd, 8, 0)
    if magic in _LOCKED_MAGICS and _nobody_lives(fd) and _still_names(path, info):
        path.unlink()  # still under the exclusive lock: who opens it now is told that it is being reaped
        return _LOCKED_MAGICS[magic]
    if magic == b"SFPARAM1" and path.parent == shared.DIRECTORY and shared.remove_if_dead(path.name):
        return "parameters"
    return None


def _nobody_lives(fd: int) -> bool:
    try:
        fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    return True


def _still_names(path: Path, info: os.stat_result) -> bool:
    try:
        return path.stat().st_ino == info.st_ino
    except FileNotFoundError:
        return False
