"""When to stop: a file, a signal, or the end of the allocation; early enough for the checkpoint to be written.

The coordinator asks `StopWatch.asked()` once per cycle. The answer leads to the same place whatever the reason: no new
admissions, Interrupt all, checkpoint with partial trajectories, exit code 85 (launch/slurm requeues on it).
"""

from __future__ import annotations

import os
import signal
from collections.abc import Mapping
from pathlib import Path

STOP_FILE = "STOP"
STOPPED = 85  # exit code: stopped with a checkpoint, to be started again
ORDERED = (STOPPED, 128 + signal.SIGINT, 128 + signal.SIGTERM)  # exit codes of a stop that somebody asked for
MARGIN = 2.0  # a checkpoint may take this many times as long as the longest so far
SPARE_S = 20.0  # for interrupting, leaving, and the first checkpoint, which nobody has measured yet
LOOK_EVERY_S = 1.0  # the file may lie on a busy shared filesystem


class StopWatch:
    """Looks at `runs/NAME/STOP` and at the allocation's end (SLURM_JOB_END_TIME, seconds since the epoch)."""

    def __init__(self, run_dir: Path, environ: Mapping[str, str] = os.environ) -> None:
        self._file = run_dir / STOP_FILE
        end = environ.get("SLURM_JOB_END_TIME", "")
        self._end_s = float(end) if end.isdigit() and int(end) > 0 else None
        self._longest_s = 0.0
        self._looked_s = float("-inf")
        self._reason: str | None = None

    def checkpoint_took(self, seconds: float) -> None:
        """Remember how long a checkpoint takes: the walltime guard leaves room for one."""
        self._longest_s = max(self._longest_s, seconds)

    @property
    def needed_s(self) -> float:
        """Time kept free before the end of the allocation."""
        return SPARE_S + MARGIN * self._longest_s

    def asked(self, now_s: float) -> str | None:
        """Why the job should stop now, or None. `now_s` is wall-clock time (time.time()). Stays once given."""
        if self._reason is None:
            self._reason = self._walltime(now_s) or self._stop_file(now_s)
        return self._reason

    def _walltime(self, now_s: float) -> str | None:
        if self._end_s is None or now_s < self._end_s - self.needed_s:
            return None
        return f"the allocation ends in {self._end_s - now_s:.0f} s"

    def _stop_file(self, now_s: float) -> str | None:
        if now_s < self._looked_s + LOOK_EVERY_S:
            return None
        self._looked_s = now_s
        return f"{self._file} exists" if self._file.exists() else None
