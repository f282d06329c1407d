"""When a checkpoint counts: never before all of it is there, and never the loss of the one before."""

from __future__ import annotations

from pathlib import Path

import pytest

from staleflow.checkpoint import layout
from staleflow.checkpoint.layout import CheckpointError


def take(run_dir: Path, version: int, text: str = "weights") -> Path:
    folder = layout.begin(run_dir, version)
    (folder / layout.TRAINER).mkdir()
    (folder / layout.TRAINER / "part").write_text(text)
    return layout.finish(folder, version, {"version": version})


def test_latest_is_the_last_finished_one(tmp_path: Path) -> None:
    assert layout.latest(tmp_path) is None
    for version in (2, 4):
        place = take(tmp_path, version)
        assert layout.latest(tmp_path) == place
        assert layout.read_state(place)["version"] == layout.version_of(place) == version


def test_one_that_is_being_written_does_not_count(tmp_path: Path) -> None:
    place = take(tmp_path, 2)
    folder = layout.begin(tmp_path, 4)
    (folder / "part").write_text("half")
    assert layout.latest(tmp_path) == place
    assert layout.complete(tmp_path) == [place]
    again = layout.begin(tmp_path, 4)  # what a lost attempt left is removed
    assert list(again.iterdir()) == []


def test_same_version_again_replaces_only_when_it_is_durable(tmp_path: Path) -> None:
    first, second = take(tmp_path, 2, "first"), take(tmp_path, 2, "second")
    assert layout.complete(tmp_path) == [first, second]
    assert layout.latest(tmp_path) == second
    assert (second / layout.TRAINER / "part").read_text() == "second"


def test_retention_keeps_the_newest(tmp_path: Path) -> None:
    places = [take(tmp_path, version) for version in (2, 10, 999_998, 1_000_000)]
    assert layout.retain(tmp_path, keep=2) == places[:2]
    assert layout.complete(tmp_path) == places[2:]
    assert layout.latest(tmp_path) == places[3]


def test_the_best_stays_until_another_does_better(tmp_path: Path) -> None:
    assert layout.best(tmp_path) is None
    best = take(tmp_path, 2)
    layout.mark_best(tmp_path, best, 0.25)
    later = [take(tmp_path, version) for version in (4, 6)]
    assert layout.retain(tmp_path, keep=1) == later[:1]
    assert layout.complete(tmp_path) == [best, later[1]]
    assert layout.best(tmp_path) == (best, 0.25)
    layout.mark_best(tmp_path, later[1], 0.5)
    assert layout.retain(tmp_path, keep=1) == [best]
    (later[1] / layout.MARKER).unlink()
    assert layout.best(tmp_path) is None


@pytest.mark.parametrize("harm", ["missing", "short", "marker", "folder"])
def test_a_damaged_one_is_an_error_that_names_the_others(tmp_path: Path, harm: str) -> None:
    good, bad = take(tmp_path, 2), take(tmp_path, 4)
    part = bad / layout.TRAINER / "part"
    match harm:
        case "missing":
            part.unlink()
        case "short":
            part.write_text("weig")
        case "marker":
            (bad / layout.MARKER).unlink()
        case "folder":
            bad.rename(bad.with_name("elsewhere"))
    with pytest.raises(CheckpointError, match=f"step_000004.*complete ones: {good.name}.*latest"):
        layout.latest(tmp_path)


def test_going_back_puts_what_came_after_aside(tmp_path: Path) -> None:
    old, _, _ = take(tmp_path, 2), take(tmp_path, 4), take(tmp_path, 6)
    (layout.checkpoints_dir(tmp_path) / layout.LATEST).write_text(old.name)
    assert layout.latest(tmp_path) == old
    aside = layout.set_aside_newer(tmp_path, old)
    assert [path.name for path in aside] == ["undone-step_000004", "undone-step_000006"]
    assert layout.complete(tmp_path) == [old]


def test_link_falls_back_to_a_copy(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    source, folder = tmp_path / "segment", tmp_path / "there"
    source.write_text("payloads")
    folder.mkdir()

    def refused(_source: Path, _target: Path) -> None:
        raise OSError("no hard links on this file system")

    monkeypatch.setattr(layout.os, "link", refused)
    layout.link(source, folder)
    source.unlink()
    assert (folder / "segment").read_text() == "payloads"
