"""Logs of one attempt: a file per rank, and which rank failed first.

`attempt_N/rank_R.ROLE.log` takes everything a rank prints, also from C and from the libraries under it. What people
should see goes to `RankLog.console`, the stream that was standard output before.
"""

from __future__ import annotations

import contextlib
import json
import logging
import os
import re
import sys
import time
import traceback
import warnings
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TextIO

_FIRST = "first_failure.json"
_VLLM_RELOAD = "vllm.model_executor.model_loader.reload.layerwise"


def attempt_dir(run_dir: Path, attempt: int) -> Path:
    return run_dir / f"attempt_{attempt}"


def next_attempt(run_dir: Path) -> int:
    """The number of the next attempt, from 0. Rank 0 asks and tells the others, so that all agree."""
    taken = [
        int(found[1]) for path in run_dir.glob("attempt_*") if (found := re.fullmatch(r"attempt_(\d+)", path.name))
    ]
    return max(taken, default=-1) + 1


class RankLog:
    """Sends standard output and error of this process to its file, from the file descriptor up, until `close`."""

    def __init__(self, directory: Path, rank: int, role: str, level: int = logging.INFO) -> None:
        directory.mkdir(parents=True, exist_ok=True, mode=0o700)
        self.path = directory / f"rank_{rank}.{role}.log"
        _flush()
        self._saved = os.dup(1), os.dup(2)
        self.console: TextIO = os.fdopen(os.dup(1), "w", encoding="utf-8", buffering=1)
        file = os.open(self.path, os.O_WRONLY | os.O_CREAT | os.O_APPEND | os.O_CLOEXEC, 0o600)
        for descriptor in (1, 2):
            os.dup2(file, descriptor)
        os.close(file)
        self._handler = logging.StreamHandler(os.fdopen(os.dup(2), "w", encoding="utf-8", buffering=1))
        form = f"%(asctime)s.%(msecs)03d rank {rank} {role} %(levelname)s %(name)s: %(message)s"
        self._handler.setFormatter(logging.Formatter(form, "%Y-%m-%d %H:%M:%S"))
        root = logging.getLogger()
        root.addHandler(self._handler)
        root.setLevel(level)
        _quieten_libraries()

    def close(self) -> None:
        """Give the descriptors back; may be called twice."""
        if self.console.closed:
            return
        _flush()
        for descriptor, saved in zip((1, 2), self._saved, strict=True):
            os.dup2(saved, descriptor)
            os.close(saved)
        logging.getLogger().removeHandler(self._handler)
        self._handler.stream.close()
        self.console.close()


def _quieten_libraries() -> None:
    """What would be said again at every step or Pull, and is nothing that a user could act on."""
    warnings.filterwarnings("ignore", category=FutureWarning, module="torch")  # of torch, about calls inside torch
    # Tables of rotary embeddings are computed, never loaded; of other layers the warning is wanted.
    logging.getLogger(_VLLM_RELOAD).addFilter(lambda record: "RotaryEmbedding" not in record.getMessage())


@dataclass(frozen=True)
class Failure:
    """The failure that came first. `error` is one line; `reported_by` is another rank when the failed one could not."""

    rank: int
    role: str
    error: str
    time_s: float
    reported_by: int

    def line(self, directory: Path) -> str:
        log = directory / f"rank_{self.rank}.{self.role}.log"
        by = "" if self.reported_by == self.rank else f", as seen by rank {self.reported_by}"
        return f"rank {self.rank} ({self.role}) failed first{by}: {self.error} (log: {log})"


def record_failure(
    directory: Path, rank: int, role: str, error: BaseException | str, *, reported_by: int | None = None
) -> bool:
    """Write down a failure; True when it is the attempt's first. The traceback goes to this rank's log.

    A rank that was killed cannot speak: who notices calls this for it, with `reported_by`.
    """
    if isinstance(error, BaseException):
        traceback.print_exception(error, file=sys.stderr)
        text = f"{type(error).__name__}: {error}"
    else:
        text = error
    failure = Failure(
        rank, role, " ".join(text.split())[:1000], time.time(), rank if reported_by is None else reported_by
    )
    directory.mkdir(parents=True, exist_ok=True, mode=0o700)
    mine = directory / f".failure.{failure.reported_by}.{os.getpid()}"
    mine.write_text(json.dumps(asdict(failure)), encoding="utf-8")
    try:
        os.link(mine, directory / _FIRST)  # whole and exclusive at once, also on a shared file system
        return True
    except FileExistsError:
        return False
    finally:
        mine.unlink()


def first_failure(directory: Path) -> Failure | None:
    """The failure that was recorded first, if any."""
    path = directory / _FIRST
    return Failure(**json.loads(path.read_text(encoding="utf-8"))) if path.exists() else None


def _flush() -> None:
    for stream in (sys.stdout, sys.stderr):
        with contextlib.suppress(ValueError):  # closed by somebody else
            stream.flush()
