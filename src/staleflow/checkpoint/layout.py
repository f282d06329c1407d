"""Where checkpoints lie, and when one counts.

    runs/NAME/journal                    operations of the protocol since the last checkpoint
    runs/NAME/spool/*.spool              finished payloads (trajectories.spool)
    runs/NAME/checkpoints/latest         the name of the checkpoint to resume from, one line
    runs/NAME/checkpoints/best           the name of the one that did best on held-out prompts, and how well
    runs/NAME/checkpoints/step_000012/   after 12 training steps:
        trainer/                         weights and optimizer (torch.distributed.checkpoint)
        spool/                           payloads of everything outstanding, finished and partial
        state.json                       protocol, data position, group -> prompt, seeds, accounts
        complete.json                    the marker: written last, when everything else is durable

While it is written the folder is called `writing-000012`. `latest` moves only after the marker is durable.
"""

from __future__ import annotations

import json
import os
import re
import shutil
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from staleflow.observe.metrics import replace_text
from staleflow.protocol.journal import sync_folder

FORMAT = 1
MARKER = "complete.json"
STATE = "state.json"
TRAINER = "trainer"
SPOOL = "spool"
LATEST = "latest"
BEST = "best"
_COMPLETE = re.compile(r"step_(\d{6,})(?:-(\d+))?")  # -N: taken again at the same version


class CheckpointError(ValueError):
    """A checkpoint cannot be used; the message says what to do."""


def checkpoints_dir(run_dir: Path) -> Path:
    return run_dir / "checkpoints"


def spool_dir(run_dir: Path) -> Path:
    return run_dir / "spool"


def journal_path(run_dir: Path) -> Path:
    return run_dir / "journal"


def begin(run_dir: Path, version: int) -> Path:
    """An empty folder for the checkpoint of `version`; remains of an attempt that failed are removed."""
    folder = checkpoints_dir(run_dir) / f"writing-{version:06d}"
    if folder.exists():
        shutil.rmtree(folder)
    folder.mkdir(parents=True)
    return folder


def finish(folder: Path, version: int, state: Mapping[str, Any]) -> Path:
    """Everything else in `folder` is durable: add state and marker, give it its name, move `latest`."""
    _write_durably(folder / STATE, json.dumps(state, separators=(",", ":")))
    for inner in [path for path in folder.rglob("*") if path.is_dir()]:
        sync_folder(inner)
    files = {str(p.relative_to(folder)): p.stat().st_size for p in sorted(folder.rglob("*")) if p.is_file()}
    sync_folder(folder)
    _write_durably(folder / MARKER, json.dumps({"format": FORMAT, "version": version, "files": files}, indent=1))
    sync_folder(folder)
    place = _free_place(folder.parent, version)
    folder.rename(place)
    sync_folder(place.parent)
    replace_text(place.parent / LATEST, place.name + "\n")
    sync_folder(place.parent)
    return place


def _free_place(folder: Path, version: int) -> Path:
    place, again = folder / f"step_{version:06d}", 1
    while place.exists():
        again += 1
        place = folder / f"step_{version:06d}-{again}"
    return place


def complete(run_dir: Path) -> list[Path]:
    """All checkpoints with a marker, oldest first."""
    found = [(m, p) for p in checkpoints_dir(run_dir).glob("step_*") if (m := _COMPLETE.fullmatch(p.name))]
    found.sort(key=lambda pair: (int(pair[0][1]), int(pair[0][2] or 1)))
    return [p for _, p in found if (p / MARKER).is_file()]


def version_of(place: Path) -> int:
    """Training steps done at this checkpoint."""
    found = _COMPLETE.fullmatch(place.name)
    if found is None:
        raise CheckpointError(f"{place}: not the name of a checkpoint")
    return int(found[1])


def latest(run_dir: Path) -> Path | None:
    """The checkpoint to resume from, or None when there is none.

    Raises CheckpointError when `latest` names something that is not a complete checkpoint.
    """
    pointer = checkpoints_dir(run_dir) / LATEST
    if not pointer.exists():
        return None
    place = checkpoints_dir(run_dir) / pointer.read_text().strip()
    fault = _fault(place)
    if fault is not None:
        others = ", ".join(p.name for p in complete(run_dir) if p != place) or "none"
        raise CheckpointError(f"{place}: {fault}; complete ones: {others}; write the name of one into {pointer}")
    return place


def _fault(place: Path) -> str | None:
    try:
        marker = json.loads((place / MARKER).read_text())
    except (OSError, ValueError) as error:
        return f"not a complete checkpoint ({error})"
    if marker.get("format") != FORMAT:
        return f"written in format {marker.get('format')}, this program reads {FORMAT}"
    for name, nbytes in marker["files"].items():
        path = place / name
        if not path.is_file() or path.stat().st_size != nbytes:
            return f"damaged: {name} is missing or not {nbytes} bytes long"
    return None


def read_state(place: Path) -> dict[str, Any]:
    return dict(json.loads((place / STATE).read_text()))


def mark_best(run_dir: Path, place: Path, mean: float) -> None:
    """`place` did best so far, with this mean reward on held-out prompts: it stays until another does better."""
    replace_text(checkpoints_dir(run_dir) / BEST, f"{place.name} {mean!r}\n")


def best(run_dir: Path) -> tuple[Path, float] | None:
    """The best complete checkpoint and its mean reward; None when none was evaluated, or it is no more."""
    pointer = checkpoints_dir(run_dir) / BEST
    if not pointer.exists():
        return None
    name, mean = pointer.read_text().split()
    place = checkpoints_dir(run_dir) / name
    return (place, float(mean)) if (place / MARKER).is_file() else None


def retain(run_dir: Path, keep: int) -> list[Path]:
    """Remove all complete checkpoints but the newest `keep` and the best; returns what went."""
    kept = best(run_dir)
    gone = [place for place in complete(run_dir)[:-keep] if kept is None or place != kept[0]]
    for place in gone:
        (place / MARKER).unlink()  # first, so that a kill in the middle leaves nothing that looks complete
        shutil.rmtree(place)
    return gone


def set_aside_newer(run_dir: Path, place: Path) -> list[Path]:
    """Checkpoints after `place`, which the run goes on from, are of a history that is given up."""
    found = complete(run_dir)
    newer = found[found.index(place) + 1 :] if place in found else []
    return [path.rename(path.with_name(f"undone-{path.name}")) for path in newer]


def remove_unfinished(run_dir: Path) -> None:
    """Remove what lost attempts were writing; nobody else may be writing to this run."""
    for folder in checkpoints_dir(run_dir).glob("writing-*"):
        shutil.rmtree(folder)


def abandon(folder: Path) -> None:
    """Remove what was written of a checkpoint that failed."""
    shutil.rmtree(folder, ignore_errors=True)


def link(source: Path, folder: Path) -> None:
    """Keep a file that nobody writes to any more: a hard link, or a durable copy where the file system has none."""
    target = folder / source.name
    try:
        os.link(source, target)
    except OSError:
        shutil.copyfile(source, target)
        with target.open("rb") as copied:
            os.fsync(copied.fileno())


def _write_durably(path: Path, text: str) -> None:
    with path.open("w", encoding="utf-8") as out:
        out.write(text)
        out.flush()
        os.fsync(out.fileno())
