"""The ordered stop with a checkpoint: a state machine of the coordinator.

    asked     no admission any more; everything that runs is called back with its tokens
    draining  until the step in training is done and what was called back has arrived (DRAIN_S at most)
    saving    one checkpoint of it all
    ended     the job leaves; with STOPPED (85) it is to be started again

With a deadline (the grace time after SIGTERM) the job leaves when it has come, with or without the checkpoint.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from staleflow.coordination.coordinator import Coordinator
from staleflow.coordination.types import Interrupt
from staleflow.roles.checkpointing import Checkpointing

DRAIN_S = 30.0
End = Callable[[str, int, str], None]  # (status, exit code, reason)


class OrderedStop:
    """`command(commands)` sends what the core decides; `end` ends the run."""

    def __init__(
        self, core: Coordinator, checkpointing: Checkpointing, command: Callable[[Sequence[Any]], None], end: End
    ) -> None:
        self._core, self._checkpointing, self._command, self._end = core, checkpointing, command, end
        self._reason: str | None = None
        self._code = 0
        self._deadline_s = self._drain_until_s = float("inf")
        self._leaving: set[int] = set()
        self._began = False
        self._before: Path | None = None  # the last checkpoint before that of the stop

    @property
    def asked(self) -> bool:
        return self._reason is not None

    def ask(self, reason: str, code: int, now_s: float, deadline_s: float = float("inf")) -> None:
        """Begin to stop. Asked again, the exit code of the last one counts, and the earliest deadline."""
        again, self._code = self.asked, code
        self._reason, self._deadline_s = reason, min(deadline_s, self._deadline_s)
        if again:
            return
        self._drain_until_s = now_s + DRAIN_S
        self._core.pause_admission(True)
        commands = self._core.interrupt_all()
        self._leaving = {tid for c in commands if isinstance(c, Interrupt) for tid in c.tids}
        self._command(commands)

    def left(self, tid: int) -> None:
        """A trajectory has come back, or has finished before it could be called back."""
        self._leaving.discard(tid)

    def turn(self, version: int, training: bool, now_s: float) -> None:
        if self._reason is None:
            return
        if now_s >= self._deadline_s:
            self._end("stopped", self._code, f"{self._reason}; the grace time did not allow for a checkpoint")
        elif training or (self._leaving and now_s < self._drain_until_s) or self._checkpointing.busy:
            return
        elif not self._began:
            self._began, self._before = True, self._checkpointing.saved
            self._checkpointing.begin(version, now_s)
        elif self._checkpointing.saved is not self._before:
            name = self._checkpointing.saved.name if self._checkpointing.saved else ""
            self._end("stopped", self._code, f"{self._reason}; checkpoint {name}")
        else:
            self._end("failed", 1, f"{self._reason}; the checkpoint could not be written")
