"""When checkpoints are taken, and when they count: the coordinator's side.

A checkpoint is taken between two steps of the trainer, while generation goes on, and is written beside training:

    begin     the books are marked in the journal; every host is told Save, before the next TrainStep
    wait      for each trainer rank's Saved and each host's NodeSaved; meanwhile the next steps are trained
    finish    (own thread) state.json, the marker, `latest`, retention
    settle    the journal and the hosts' spools forget what is older

A part that fails abandons the checkpoint: what was written of it is removed, the one before it stays, the run goes on.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from staleflow.checkpoint import layout
from staleflow.config import Config
from staleflow.protocol.errors import JournalError
from staleflow.protocol.journal import Journal, Mark
from staleflow.roles import messages as m

Send = Callable[[int, m.ToHost], None]


class Books:
    """The journal between the coordinator and everybody else: nothing is sent before what led to it is durable."""

    def __init__(self, journal: Journal | None, dump: Callable[[], dict[str, Any]], send: Send) -> None:
        self._journal, self._dump, self._send = journal, dump, send
        self._held: list[tuple[int, m.ToHost]] = []

    def send(self, node: int, message: m.ToHost) -> None:
        self._held.append((node, message))

    def commit(self) -> str | None:
        """Make the operations since the last call durable, then send. Why that is impossible, or None."""
        held, self._held = self._held, []
        if self._journal is not None:
            try:
                self._journal.commit()
            except JournalError as error:
                self._journal = None  # what is held must not be seen; what follows is the end of the run
                return str(error)
        for node, message in held:
            self._send(node, message)
        return None

    def mark(self) -> Mark:
        return self._journal.mark() if self._journal is not None else Mark(self._dump())

    def compact(self, mark: Mark) -> None:
        if self._journal is not None:
            self._journal.compact(mark)


@dataclass
class _Save:
    """A checkpoint being written."""

    version: int
    folder: Path
    mark: Mark
    state: dict[str, Any]
    began_s: float
    waiting: set[str]
    error: str | None = None
    finisher: threading.Thread | None = None
    place: Path | None = None
    removed: list[Path] = field(default_factory=list)


class Checkpointing:
    """`state(mark)` is everything in state.json; `took(seconds)` learns how long checkpoints take."""

    def __init__(
        self,
        config: Config,
        trainers: Sequence[int],
        nodes: int,
        books: Books,
        state: Callable[[dict[str, Any]], dict[str, Any]],
        note: Callable[[str], None],
        took: Callable[[float], None],
        start_version: int,
    ) -> None:
        self._c, self._trainers, self._nodes, self._books = config, tuple(trainers), list(range(nodes)), books
        self._state, self._note, self._took = state, note, took
        self._save: _Save | None = None
        self.seen_version = start_version  # of the last checkpoint that was taken, or asked for in vain
        self.saved: Path | None = None  # the last durable one of this attempt
        self._means: dict[int, float] = {}  # version -> mean reward on held-out prompts, until it is compared

    @property
    def busy(self) -> bool:
        return self._save is not None

    def at_boundary(self, version: int, now_s: float) -> None:
        """The trainers are between two steps: take a checkpoint if it is time for one."""
        every = self._c.checkpoint.every_steps
        last = version == self._c.run.steps
        if not every or version <= self.seen_version or (version % every and not last):
            return
        if self.busy:
            if not last:
                self.seen_version = version
                self._note(f"checkpoint of version {version} left out: the one before it is still being written")
            return
        self.begin(version, now_s)

    def begin(self, version: int, now_s: float) -> None:
        """Take a checkpoint now; the trainers must be between two steps, and no other may be under way."""
        assert self._save is None
        self.seen_version = version
        waiting = {f"rank {rank} (trainer)" for rank in self._trainers} | {f"node {n}" for n in self._nodes}
        try:
            folder = layout.begin(self._c.run_dir, version)
            mark = self._books.mark()
        except (OSError, JournalError) as error:
            self._note(f"checkpoint of version {version} not begun: {error}")
            return
        self._save = _Save(version, folder, mark, self._state(mark.state), now_s, waiting)
        for node in self._nodes:
            self._books.send(node, m.Save(version, str(folder)))

    def on(self, message: m.Saved | m.NodeSaved | m.SaveFailed) -> None:
        save = self._save
        if save is None or message.version != save.version:
            return
        match message:
            case m.Saved(rank=rank):
                save.waiting.discard(f"rank {rank} (trainer)")
            case m.NodeSaved(node=node):
                save.waiting.discard(f"node {node}")
            case m.SaveFailed(rank=rank, error=error):
                save.error = save.error or error
                save.waiting -= {f"rank {rank} (trainer)"} if rank in self._trainers else {
                    w for w in save.waiting if w.startswith("node")
                }  # fmt: skip

    def leave_out(self, node: int) -> None:
        """A node is gone: what it held is not in a checkpoint that still waits for it."""
        self._nodes.remove(node)
        if self._save is not None and f"node {node}" in self._save.waiting:
            self._save.error = self._save.error or f"node {node} is gone"
            self._save.waiting = {w for w in self._save.waiting if not w.startswith("node")}

    def turn(self, now_s: float) -> None:
        """Go on with the checkpoint that is being written. Never waits."""
        save = self._save
        if save is None or save.waiting:
            return
        if save.finisher is None and save.error is None:
            save.finisher = threading.Thread(target=self._finish, args=(save,), name="checkpoint", daemon=True)
            save.finisher.start()
        if save.finisher is not None and save.finisher.is_alive():
            return
        self._save = None
        if save.error is None:
            self._settle(save, now_s)
        else:
            layout.abandon(save.folder)
            kept = layout.complete(self._c.run_dir)
            stays = f"{kept[-1].name} stays" if kept else "there is none yet"
            self._note(f"checkpoint of version {save.version} could not be written: {save.error}; {stays}")

    def _finish(self, save: _Save) -> None:
        """In a thread of its own."""
        try:
            save.place = layout.finish(save.folder, save.version, save.state)
            save.removed = layout.retain(self._c.run_dir, self._c.checkpoint.keep)
        except OSError as error:
            if save.place is None:
                save.error = str(error)

    def _settle(self, save: _Save, now_s: float) -> None:
        self.saved = save.place
        self._books.compact(save.mark)
        for node in self._nodes:
            self._books.send(node, m.Settle(save.version))
        seconds = time.monotonic() - save.began_s
        self._took(seconds)
        self._note(f"checkpoint of version {save.version} in {seconds:.1f} s")
        self._choose_best()

    def evaluated(self, version: int, mean: float) -> None:
        """The weights of `version` have been evaluated; before or after their checkpoint, if there is one at all."""
        self._means[version] = mean
        self._choose_best()

    def _choose_best(self) -> None:
        """Not while a checkpoint is being finished: old ones may be on their way out then."""
        if self._save is not None and self._save.finisher is not None:
            return
        for place in layout.complete(self._c.run_dir):
            mean = self._means.pop(layout.version_of(place), None)
            before = layout.best(self._c.run_dir)
            # Evaluated once more, after a resume: the newer figure is the one that is in the summary.
            if mean is not None and (before is None or before[0] == place or mean > before[1]):
                layout.mark_best(self._c.run_dir, place, mean)
                self._note(f"{place.name} is the best checkpoint so far: {mean:.3f} on held-out prompts")

    def waited_for(self) -> str:
        """What the checkpoint waits for, in words; empty when there is none."""
        return ", ".join(sorted(self._save.waiting)) or "the disk" if self._save is not None else ""
