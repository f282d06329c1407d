"""The coordinator's side: when a checkpoint begins, what a failure leaves, and how the ordered stop goes through."""

from __future__ import annotations

import time
from pathlib import Path
from typing import Any

import pytest

from staleflow.checkpoint import layout
from staleflow.config import load
from staleflow.coordination.types import Interrupt
from staleflow.protocol import StalenessProtocol
from staleflow.protocol.errors import JournalError
from staleflow.protocol.journal import Journal
from staleflow.roles import messages as m
from staleflow.roles.checkpointing import Books, Checkpointing
from staleflow.roles.stopping import DRAIN_S, OrderedStop


class Desk:
    """A checkpointing with one trainer rank (1) and one node, whose messages are kept."""

    def __init__(self, root: Path, *overrides: str, start_version: int = 0) -> None:
        self.config = load(
            "configs/demo.toml", [f'run.dir="{root}"', "run.steps=9", "checkpoint.every_steps=2", *overrides]
        )
        self.sent: list[m.ToHost] = []
        self.notes: list[str] = []
        self.took: list[float] = []
        books = Books(None, lambda: {"version": 0}, lambda _node, message: self.sent.append(message))
        self.books = books
        self.checkpointing = Checkpointing(
            self.config,
            [1],
            1,
            books,
            lambda ledger: {"ledger": ledger},
            self.notes.append,
            self.took.append,
            start_version,
        )

    def saves(self) -> list[int]:
        self.books.commit()
        return [message.version for message in self.sent if isinstance(message, m.Save)]

    def done(self, version: int) -> None:
        """Everybody has written its part; wait for the rest."""
        self.checkpointing.on(m.Saved(1, version, 0.1))
        self.checkpointing.on(m.NodeSaved(0, version, 0.1))
        deadline_s = time.monotonic() + 10
        while self.checkpointing.busy and time.monotonic() < deadline_s:
            self.checkpointing.turn(0.0)
            time.sleep(0.005)


def test_every_so_many_steps_and_after_the_last(tmp_path: Path) -> None:
    desk = Desk(tmp_path)
    for version in range(10):
        desk.checkpointing.at_boundary(version, 0.0)
        desk.checkpointing.at_boundary(version, 0.0)
        desk.done(version)
    assert desk.saves() == [2, 4, 6, 8, 9]
    assert [layout.version_of(place) for place in layout.complete(desk.config.run_dir)] == [8, 9]
    assert len(desk.took) == 5
    assert [s.version for s in desk.sent if isinstance(s, m.Settle)] == [2, 4, 6, 8, 9]


def test_none_at_the_version_it_was_resumed_from_and_none_unless_asked(tmp_path: Path) -> None:
    desk = Desk(tmp_path, start_version=4)
    desk.checkpointing.at_boundary(4, 0.0)
    assert desk.saves() == []
    off = Desk(tmp_path, "checkpoint.every_steps=0")
    for version in range(10):
        off.checkpointing.at_boundary(version, 0.0)
    assert off.saves() == []


def test_a_slow_one_makes_the_next_one_wait_for_its_turn_but_not_the_last(tmp_path: Path) -> None:
    desk = Desk(tmp_path)
    desk.checkpointing.at_boundary(2, 0.0)
    desk.checkpointing.at_boundary(4, 0.0)
    assert desk.saves() == [2] and "version 4 left out" in desk.notes[0]
    desk.checkpointing.at_boundary(9, 0.0)
    desk.done(2)
    desk.checkpointing.at_boundary(9, 0.0)
    assert desk.saves() == [2, 9]


def test_the_best_on_held_out_prompts_is_kept_whenever_its_evaluation_ends(tmp_path: Path) -> None:
    desk = Desk(tmp_path, "checkpoint.keep=1")
    desk.checkpointing.evaluated(2, 0.5)  # before the checkpoint of these weights …
    for version in (2, 4):
        desk.checkpointing.at_boundary(version, 0.0)
        desk.done(version)
    desk.checkpointing.at_boundary(6, 0.0)
    desk.checkpointing.evaluated(4, 0.75)  # … after it, while another one is being written
    desk.checkpointing.evaluated(3, 1.0)  # of no checkpoint
    desk.done(6)
    desk.checkpointing.evaluated(6, 0.25)
    run_dir = desk.config.run_dir
    best = layout.best(run_dir)
    assert best is not None and best[0].name == "step_000004"
    assert [layout.version_of(place) for place in layout.complete(run_dir)] == [4, 6]
    desk.checkpointing.at_boundary(8, 0.0)
    desk.done(8)
    desk.checkpointing.evaluated(8, 0.875)
    assert layout.best(run_dir) == (desk.checkpointing.saved, 0.875)
    assert desk.notes[-1] == "step_000008 is the best checkpoint so far: 0.875 on held-out prompts"
    desk.checkpointing.evaluated(8, 0.5)  # once more, after a resume
    assert layout.best(run_dir) == (desk.checkpointing.saved, 0.5)


def test_it_counts_only_when_everybody_has_written(tmp_path: Path) -> None:
    desk = Desk(tmp_path)
    desk.checkpointing.at_boundary(2, 0.0)
    desk.checkpointing.on(m.Saved(1, 2, 0.1))
    desk.checkpointing.on(m.NodeSaved(0, 1, 0.1))  # of another checkpoint
    desk.checkpointing.turn(0.0)
    assert desk.checkpointing.busy and layout.latest(desk.config.run_dir) is None
    assert desk.checkpointing.waited_for() == "node 0"
    desk.done(2)
    assert layout.latest(desk.config.run_dir) == desk.checkpointing.saved


@pytest.mark.parametrize("failure", [m.SaveFailed(1, 4, "disk full"), m.SaveFailed(0, 4, "disk full")])
def test_a_part_that_failed_keeps_the_one_before_and_says_so(tmp_path: Path, failure: m.SaveFailed) -> None:
    desk = Desk(tmp_path)
    desk.checkpointing.at_boundary(2, 0.0)
    desk.done(2)
    before = layout.latest(desk.config.run_dir)
    desk.checkpointing.at_boundary(4, 0.0)
    desk.checkpointing.on(failure)
    desk.done(4)
    assert layout.latest(desk.config.run_dir) == before
    assert desk.notes[-1] == "checkpoint of version 4 could not be written: disk full; step_000002 stays"
    assert [path.name for path in sorted(layout.checkpoints_dir(desk.config.run_dir).iterdir())] == [
        "latest",
        "step_000002",
    ]
    desk.checkpointing.at_boundary(6, 0.0)
    desk.done(6)
    assert layout.version_of(layout.latest(desk.config.run_dir)) == 6


def test_nothing_is_sent_before_its_cause_is_durable(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    journal = Journal.create(tmp_path / "journal", "run", StalenessProtocol(1, 1, 1))
    sent: list[Any] = []
    books = Books(journal, journal.protocol.dump, lambda node, message: sent.append((node, message)))
    journal.protocol.reserve(0, 0, 0)
    books.send(0, m.Settle(1))
    assert sent == []
    assert books.commit() is None and sent == [(0, m.Settle(1))]

    def refused(_self: Journal) -> int:
        raise JournalError("the disk is full")

    monkeypatch.setattr(Journal, "commit", refused)
    books.send(0, m.Settle(2))
    assert books.commit() == "the disk is full"
    books.send(0, m.Stop(1, "the end"))
    assert books.commit() is None and sent[-1] == (0, m.Stop(1, "the end")) and len(sent) == 2


# ---- the ordered stop ------------------------------------------------------------------------------------------------


class Core:
    """Two trajectories run."""

    paused = False

    def pause_admission(self, paused: bool) -> None:
        self.paused = paused

    def interrupt_all(self) -> list[Interrupt]:
        return [Interrupt(1, 0, (10, 11))]


class Stop:
    def __init__(self, root: Path) -> None:
        self.desk, self.core, self.ends, self.said = Desk(root), Core(), [], []
        checkpointing = self.desk.checkpointing
        self.stop = OrderedStop(self.core, checkpointing, self.said.extend, lambda *how: self.ends.append(how))


def test_stop_calls_back_waits_saves_and_ends(tmp_path: Path) -> None:
    s = Stop(tmp_path)
    s.stop.turn(3, False, 0.0)
    assert not s.stop.asked and not s.core.paused
    s.stop.ask("USR1", 85, 0.0)
    assert s.core.paused and s.said == [Interrupt(1, 0, (10, 11))]
    s.stop.left(10)
    s.stop.turn(3, False, 1.0)
    assert s.desk.saves() == []  # 11 is on its way
    s.stop.left(11)
    s.stop.turn(3, True, 2.0)
    assert s.desk.saves() == []  # a step is being trained
    s.stop.turn(4, False, 3.0)
    assert s.desk.saves() == [4] and not s.ends
    s.desk.done(4)
    s.stop.turn(4, False, 4.0)
    assert s.ends == [("stopped", 85, "USR1; checkpoint step_000004")]


def test_an_instance_that_never_answers_does_not_hold_the_stop_up(tmp_path: Path) -> None:
    s = Stop(tmp_path)
    s.stop.ask("USR1", 85, 0.0)
    s.stop.turn(3, False, DRAIN_S - 1)
    assert s.desk.saves() == []
    s.stop.turn(3, False, DRAIN_S + 1)
    assert s.desk.saves() == [3]


def test_the_grace_time_ends_it_without_a_checkpoint(tmp_path: Path) -> None:
    s = Stop(tmp_path)
    s.stop.ask("signal 15", 143, 0.0, deadline_s=12.0)
    s.stop.turn(3, True, 11.0)
    assert not s.ends
    s.stop.turn(3, True, 12.0)
    assert s.ends == [("stopped", 143, "signal 15; the grace time did not allow for a checkpoint")]


def test_the_last_request_gives_the_code_and_the_earliest_deadline_counts(tmp_path: Path) -> None:
    s = Stop(tmp_path)
    s.stop.ask("USR1", 85, 0.0)
    s.stop.ask("signal 15", 143, 1.0, deadline_s=5.0)
    assert len(s.said) == 1
    s.stop.turn(3, True, 6.0)
    assert s.ends[0][:2] == ("stopped", 143)


def test_a_checkpoint_that_cannot_be_written_makes_the_stop_a_failure(tmp_path: Path) -> None:
    s = Stop(tmp_path)
    s.stop.ask("USR1", 85, 0.0)
    s.stop.left(10), s.stop.left(11)
    s.stop.turn(3, False, 1.0)
    s.desk.checkpointing.on(m.SaveFailed(1, 3, "disk full"))
    s.desk.done(3)
    s.stop.turn(3, False, 2.0)
    assert s.ends == [("failed", 1, "USR1; the checkpoint could not be written")]
