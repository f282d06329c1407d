"""The page of a staleness study: its table, put between two marks of a hand-written page, and its plots."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from statistics import mean, pstdev
from typing import TYPE_CHECKING, Any

from staleflow.observe.metrics import replace_text

if TYPE_CHECKING:
    from staleflow.learning.study import Cell, Study

BEGIN, END = "<!-- written by staleflow.learning.study -->", "<!-- end -->"
TAIL = 5  # steps whose mean is the reward at the end
SMOOTH = 5  # steps of the moving mean in the plots
COLOURS = ("black", "#0072B2", "#009E73", "#E69F00", "#D55E00", "#CC79A7")


def draw(study: Study, cells: Sequence[Cell]) -> None:
    """Write `RESULTS/reward.svg` and the table in `RESULTS.md`. Raises ValueError when that lacks the two marks."""
    page = study.results.with_suffix(".md")
    head, begin, rest = page.read_text().partition(BEGIN)
    _, end, tail = rest.partition(END)
    if not begin or not end:
        raise ValueError(f"{page}: it needs the lines {BEGIN!r} and {END!r}, between which the table goes")
    if cells:
        _plot(study, cells, study.results / "reward.svg")
    replace_text(page, f"{head}{BEGIN}\n{table(study, cells)}{END}{tail}")


def table(study: Study, cells: Sequence[Cell]) -> str:
    """Markdown. A matrix that is not complete, and runs that were cut short, are said to be so."""
    wanted = len(list(study.matrix()))
    whole = "all" if len(cells) == wanted else "**partial matrix:**"
    cut = [cell for cell in cells if len(cell.reward) < study.steps]
    lines = [
        f"{whole} {len(cells)} of {wanted} runs" + (f", {len(cut)} of them cut short by the time limit" if cut else ""),
        "",
        f"| eta | loss | runs | mean age | max age | reward, first {TAIL} steps | last {TAIL} steps | held out before "
        "| after | seconds |",
        "|---|---|---|---|---|---|---|---|---|---|",
    ]
    for eta in study.etas:
        for loss in study.losses:
            if some := [cell for cell in cells if (cell.eta, cell.loss) == (eta, loss)]:
                lines.append(_row(_eta(study, eta), loss, some))
    return "\n".join([*lines, ""])


def _row(eta: str, loss: str, cells: Sequence[Cell]) -> str:
    parts = [
        eta,
        loss,
        str(len(cells)),
        f"{mean(cell.mean_age for cell in cells):.2f}",
        str(max(cell.max_age for cell in cells)),
        _spread([mean(cell.reward[:TAIL]) for cell in cells if cell.reward]),
        _spread([mean(cell.reward[-TAIL:]) for cell in cells if cell.reward]),
        _spread([cell.before for cell in cells if cell.before is not None]),
        _spread([cell.after for cell in cells if cell.after is not None]),
        f"{mean(cell.ended_s[-1] for cell in cells if cell.ended_s):.0f}",
    ]
    return f"| {' | '.join(parts)} |"


def _spread(values: Sequence[float]) -> str:
    """Mean, and over several seeds their standard deviation."""
    if not values:
        return "-"
    return f"{mean(values):.3f}" + (f" ± {pstdev(values):.3f}" if len(values) > 1 else "")


def _eta(study: Study, eta: int) -> str:
    return "unbounded" if eta >= study.steps else str(eta)


def smoothed(values: Sequence[float], width: int = SMOOTH) -> list[float]:
    """Each value with up to `width - 1` before it."""
    return [mean(values[max(0, i - width + 1) : i + 1]) for i in range(len(values))]


def _plot(study: Study, cells: Sequence[Cell], path: Path) -> None:
    """Reward against steps (above) and seconds (below), a column a loss, a colour an eta, a line a seed."""
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    matplotlib.rcParams["svg.hashsalt"] = "staleflow"  # the same data give the same file
    figure, grid = plt.subplots(
        2, len(study.losses), figsize=(5 * len(study.losses), 7), sharey=True, squeeze=False, layout="constrained"
    )
    for column, loss in enumerate(study.losses):
        mine = [cell for cell in cells if cell.loss == loss]
        _lines(study, mine, grid[0][column], [list(range(1, len(cell.reward) + 1)) for cell in mine], "step")
        _lines(study, mine, grid[1][column], [cell.ended_s for cell in mine], "seconds of training")
        grid[0][column].set_title(loss)
    whole = len(cells) == len(list(study.matrix()))
    figure.suptitle(f"reward, moving mean of {SMOOTH} steps" + ("" if whole else " (partial matrix)"))
    figure.savefig(path, metadata={"Date": None})
    plt.close(figure)


def _lines(study: Study, cells: Sequence[Cell], axes: Any, xs: Sequence[Sequence[float]], label: str) -> None:
    named = set()
    for cell, x in zip(cells, xs, strict=True):
        name = f"eta {_eta(study, cell.eta)}"
        colour = COLOURS[study.etas.index(cell.eta) % len(COLOURS)]
        axes.plot(x, smoothed(cell.reward), color=colour, linewidth=1.2, label=None if name in named else name)
        named.add(name)
    axes.set_xlabel(label)
    axes.set_ylabel("reward")
    if named:
        axes.legend(fontsize="small")
