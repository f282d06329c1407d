"""Does the bound matter? Runs a matrix of (seed, eta, loss) as jobs of their own and draws what they learned.

    python -m staleflow.learning.study configs/studies/staleness.toml [--runs N] [--draw]

Resumable: what a finished run has to say is kept in `results/cells.json`, and a cell that is there is not run again.
Cells go seed by seed, so that a matrix that is not complete holds whole rows. Needs neither torch nor vLLM itself.
"""

from __future__ import annotations

import argparse
import itertools
import json
import shutil
import signal
import subprocess
import sys
import tomllib
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from staleflow.config import load
from staleflow.observe.metrics import replace_text

LEAVES_S = 60.0  # what a job that is told to stop may take


@dataclass(frozen=True)
class Study:
    """The matrix. `settings` hold for every run, `losses[name]` for those of a loss; both are config overrides."""

    base: str
    results: Path
    seeds: tuple[int, ...]
    etas: tuple[int, ...]
    max_run_s: float
    settings: Mapping[str, Any]
    losses: Mapping[str, Mapping[str, Any]]

    @property
    def steps(self) -> int:
        return int(self.settings["run.steps"])

    def matrix(self) -> Iterator[tuple[int, int, str]]:
        """(seed, eta, loss) of every cell, in the order in which they are run."""
        return itertools.product(self.seeds, self.etas, self.losses)

    def overrides(self, seed: int, eta: int, loss: str) -> list[str]:
        changes = {
            **self.settings,
            **self.losses[loss],
            "run.name": f"eta{eta}-{loss}-seed{seed}",
            "run.seed": seed,
            "staleness.eta": eta,
        }
        return [f"{key}={json.dumps(value)}" for key, value in changes.items()]


@dataclass(frozen=True)
class Cell:
    """What one run has shown: `reward[i]` of step i, `ended_s[i]` seconds after the first step began."""

    seed: int
    eta: int
    loss: str
    status: str
    reward: list[float]
    ended_s: list[float]
    mean_age: float
    max_age: int
    before: float | None
    after: float | None


def read_study(path: Path) -> Study:
    """Raises ValueError on an unknown or missing key, ConfigError when one of the runs could not be started."""
    raw = tomllib.loads(path.read_text())
    known = set(Study.__dataclass_fields__)
    if raw.keys() != known:
        raise ValueError(f"{path}: unknown {sorted(raw.keys() - known)}, missing {sorted(known - raw.keys())}")
    study = Study(**raw | {"results": Path(raw["results"]), "seeds": tuple(raw["seeds"]), "etas": tuple(raw["etas"])})
    for key in study.matrix():
        load(study.base, study.overrides(*key))
    return study


def read_cells(folder: Path) -> list[Cell]:
    path = folder / "cells.json"
    return [Cell(**cell) for cell in json.loads(path.read_text())] if path.exists() else []


def write_cells(folder: Path, cells: Sequence[Cell]) -> None:
    """One line a cell."""
    folder.mkdir(parents=True, exist_ok=True)
    lines = ",\n".join(json.dumps(asdict(cell)) for cell in cells)
    replace_text(folder / "cells.json", f"[\n{lines}\n]\n")


def run_cell(study: Study, seed: int, eta: int, loss: str) -> Cell:
    """Start the job, wait for it, read what it left. Raises RuntimeError when it fails."""
    overrides = study.overrides(seed, eta, loss)
    run_dir = load(study.base, overrides).run_dir
    shutil.rmtree(run_dir, ignore_errors=True)  # of an attempt that was interrupted
    job = subprocess.Popen([sys.executable, "-m", "staleflow", "run", study.base, *overrides])
    try:
        job.wait(study.max_run_s)
    except subprocess.TimeoutExpired:
        job.send_signal(signal.SIGINT)
        job.wait(LEAVES_S)
    except BaseException:
        job.send_signal(signal.SIGINT)
        raise
    summary = json.loads((run_dir / "summary.json").read_text())
    if summary["status"] == "failed":
        raise RuntimeError(f"{run_dir}: {summary['reason']}")
    lines = [json.loads(line) for line in (run_dir / "metrics.jsonl").read_text().splitlines()]
    return cell_of(seed, eta, loss, summary, lines)


def cell_of(seed: int, eta: int, loss: str, summary: Mapping[str, Any], lines: Sequence[Mapping[str, Any]]) -> Cell:
    """From a run's summary.json and the lines of its metrics.jsonl."""
    ages = {int(age): count for age, count in summary["staleness_histogram"].items()}
    return Cell(
        seed=seed,
        eta=eta,
        loss=loss,
        status=summary["status"],
        reward=[round(line["reward"], 4) for line in lines],
        ended_s=[round(at, 2) for at in itertools.accumulate(line["step_s"] for line in lines)],
        mean_age=sum(age * count for age, count in ages.items()) / max(1, sum(ages.values())),
        max_age=max(ages, default=0),
        before=summary.get("accuracy_before"),
        after=summary.get("accuracy_after"),
    )


def main(arguments: Sequence[str] | None = None) -> int:
    from staleflow.learning.study_page import draw

    parser = argparse.ArgumentParser(prog="python -m staleflow.learning.study", description="Does the bound matter?")
    parser.add_argument("study", type=Path)
    parser.add_argument("--runs", type=int, help="at most so many runs now; default: all that are missing")
    parser.add_argument("--draw", action="store_true", help="no runs: table and plots from what is there")
    options = parser.parse_args(arguments)
    study = read_study(options.study)
    cells = read_cells(study.results)
    there = {(cell.seed, cell.eta, cell.loss) for cell in cells}
    missing = [key for key in study.matrix() if key not in there]
    for seed, eta, loss in [] if options.draw else missing[: options.runs]:
        print(f"seed {seed}, eta {eta}, {loss}: {len(cells)} of {len(there) + len(missing)} runs are done", flush=True)
        cells.append(run_cell(study, seed, eta, loss))
        write_cells(study.results, cells)
        draw(study, cells)
    draw(study, cells)
    return 0


if __name__ == "__main__":
    sys.exit(main())
