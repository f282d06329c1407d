"""How a staged version leaves a trainer rank: one small interface, three ways.

| name        | from a trainer rank to            | read by                                                       |
|-------------|-----------------------------------|---------------------------------------------------------------|
| `broadcast` | a relay and its store on each node | `NodeStore`: each instance at its own time                   |
| `direct`    | the instances themselves           | `DirectSource`: all instances of the group pull together     |
| `file`      | a directory all nodes see          | `FileSource`: slow and obvious; for tests and other programs |
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

from staleflow.parameters.layout import Rows
from staleflow.parameters.staging import Staging


@dataclass(frozen=True)
class Sent:
    """One push from one trainer rank. `full_bytes` is what it would have been without deltas."""

    version: int
    seconds: float
    sent_bytes: int
    full_bytes: int


class Transport(Protocol):
    """The trainer rank's end. All calls come from the publisher's own thread."""

    def open(self, rows: tuple[Rows, ...], staging: Staging) -> None:
        """Meet the other members; `rows` is what this rank holds, `staging` where it will lie."""

    def push(self, version: int, *, fresh: bool) -> Sent:
        """Carry what is staged to whoever serves the readers; `fresh`: the first push of this publisher."""

    def stop(self) -> None:
        """Make a wait for other members end (from any thread)."""

    def break_off(self) -> None:
        """After a failure: let the other members notice at once instead of waiting for this one."""

    def close(self) -> None:
        """Tell the other members that no more is coming."""
