"""The staleness study: which runs are still to come, what is kept of one, and a page that says when it is partial."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from staleflow.learning import study as room
from staleflow.learning.study import Cell, Study, cell_of, read_cells, read_study
from staleflow.learning.study_page import BEGIN, END, smoothed, table

SHIPPED = Path("configs/studies/staleness.toml")


@pytest.fixture
def small(tmp_path: Path) -> Study:
    page = tmp_path / "staleness.md"
    page.write_text(f"what is seen\n{BEGIN}\n{END}\nand said\n")
    return replace(read_study(SHIPPED), results=tmp_path / "staleness", seeds=(0, 1), etas=(0, 40))


def cell(seed: int, eta: int, loss: str, steps: int = 40) -> Cell:
    reward = [0.25 + eta / 400] * steps
    return Cell(seed, eta, loss, "completed", reward, [2.0 * i for i in range(steps)], eta / 2, eta, 0.2, 0.4)


def test_the_shipped_matrix_is_the_papers_question() -> None:
    study = read_study(SHIPPED)
    keys = list(study.matrix())
    assert len(keys) == 5 * 3 * 2 and study.max_run_s <= 180
    assert keys[:3] == [(0, 0, "vanilla"), (0, 0, "decoupled"), (0, 1, "vanilla")]
    assert study.etas[-1] >= study.steps, "the last one is no bound at all"


def test_an_unknown_key_and_an_override_that_cannot_be_are_refused(tmp_path: Path) -> None:
    path = tmp_path / "study.toml"
    path.write_text(SHIPPED.read_text().replace("max_run_s", "max_runs"))
    with pytest.raises(ValueError, match=r"unknown \['max_runs'\], missing \['max_run_s'\]"):
        read_study(path)
    path.write_text(SHIPPED.read_text().replace('"algorithm.loss" = "decoupled"', '"algorithm.loss" = "decupled"'))
    with pytest.raises(ValueError, match="decupled"):
        read_study(path)


def test_it_goes_on_where_it_was_interrupted(small: Study, monkeypatch: pytest.MonkeyPatch) -> None:
    ran: list[tuple[int, int, str]] = []

    def run(_study: Study, *key: object) -> Cell:
        if len(ran) == 3:
            raise KeyboardInterrupt
        ran.append(key)  # type: ignore[arg-type]
        return cell(*key)  # type: ignore[arg-type]

    monkeypatch.setattr(room, "read_study", lambda _path: small)
    monkeypatch.setattr(room, "run_cell", run)
    assert room.main(["x", "--runs", "2"]) == 0
    with pytest.raises(KeyboardInterrupt):
        room.main(["x"])
    assert ran == list(small.matrix())[:3]
    assert [(c.seed, c.eta, c.loss) for c in read_cells(small.results)] == ran
    page = small.results.with_suffix(".md").read_text()
    assert page.startswith("what is seen\n") and page.endswith("\nand said\n")
    assert "**partial matrix:** 3 of 8 runs" in page
    assert (small.results / "reward.svg").stat().st_size > 1000


def test_a_whole_matrix_and_one_that_was_cut_short(small: Study) -> None:
    cells = [cell(*key) for key in small.matrix()]
    assert table(small, cells).splitlines()[0] == "all 8 of 8 runs"
    assert "| unbounded | vanilla | 2 | 20.00 | 40 | 0.350 ± 0.000 |" in table(small, cells)
    cells[0] = cell(0, 0, "vanilla", steps=12)
    assert "1 of them cut short by the time limit" in table(small, cells)


def test_what_is_kept_of_a_run() -> None:
    lines = [{"reward": 0.25, "step_s": 1.5}, {"reward": 0.5, "step_s": 2.0}]
    summary = {"status": "completed", "staleness_histogram": {"0": 3, "2": 1}, "accuracy_before": 0.1}
    kept = cell_of(1, 2, "vanilla", summary, lines)
    assert (kept.reward, kept.ended_s) == ([0.25, 0.5], [1.5, 3.5])
    assert (kept.mean_age, kept.max_age, kept.before, kept.after) == (0.5, 2, 0.1, None)
    assert smoothed([1.0, 3.0, 5.0], width=2) == [1.0, 2.0, 4.0]
