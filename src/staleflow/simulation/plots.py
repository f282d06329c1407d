"""Plots of a study: throughput by policy and eta, staleness, length bias, and what every instance did."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from staleflow.simulation.config import Study
from staleflow.simulation.fluid import Fluid

if TYPE_CHECKING:
    from staleflow.simulation.cli import Row


def plot(study: Study, fluid: Fluid, rows: Sequence[Row], folder: Path) -> list[Path]:
    """Write the PNG files; returns their paths. Raises ImportError without matplotlib."""
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    folder.mkdir(parents=True, exist_ok=True)
    written = []
    for name, draw in (("throughput", _throughput), ("staleness", _staleness), ("bias", _bias), ("instances", _gantt)):
        figure, axes = plt.subplots(figsize=(9, 5), layout="constrained")
        draw(axes, fluid, rows)
        axes.set_title(f"{study.name}: {name}")
        written.append(folder / f"{study.name}_{name}.png")
        figure.savefig(written[-1], dpi=110)
        plt.close(figure)
    return written


def _labels(rows: Sequence[Row]) -> list[str]:
    return [f"{row.variant.name}\nη={row.eta}" for row in rows]


def _throughput(axes: Any, fluid: Fluid, rows: Sequence[Row]) -> None:
    values, spreads = [r.mean("tokens_per_s") for r in rows], [r.spread("tokens_per_s") for r in rows]
    axes.bar(_labels(rows), values, yerr=spreads)
    axes.axhline(fluid.tokens_per_s, color="black", linestyle="--", label="fluid bound")
    axes.set_ylabel("trained tokens/s")
    axes.legend()


def _staleness(axes: Any, fluid: Fluid, rows: Sequence[Row]) -> None:
    for row in rows:
        ages = row.outcomes[0].staleness
        total = sum(ages.values())
        axes.plot(list(ages), [n / total for n in ages.values()], marker="o", label=f"{row.variant.name} η={row.eta}")
    axes.set_xlabel("staleness of a trained trajectory (versions)")
    axes.set_ylabel("share")
    axes.legend(fontsize="small")


def _bias(axes: Any, fluid: Fluid, rows: Sequence[Row]) -> None:
    axes.bar(_labels(rows), [r.mean("length_bias") for r in rows])
    axes.axhline(1.0, color="black", linestyle="--")
    axes.set_ylabel("mean trained length / mean offered length")


def _gantt(axes: Any, fluid: Fluid, rows: Sequence[Row]) -> None:
    """Running trajectories of every instance over time, of the last row's first seed."""
    row = rows[-1]
    gantt = row.outcomes[0].gantt
    grid = [[cell[0] for cell in cells] for _, cells in gantt]
    extent = (gantt[0][0], gantt[-1][0], -0.5, len(grid[0]) - 0.5)
    columns = list(zip(*grid, strict=True))[::-1]
    image = axes.imshow(columns, aspect="auto", extent=extent, interpolation="nearest")
    for begin, _ in row.outcomes[0].steps:
        axes.axvline(begin, color="white", linewidth=0.6)
    axes.set_xlabel(f"seconds ({row.variant.name} η={row.eta}; lines: a training step begins)")
    axes.set_ylabel("instance")
    axes.figure.colorbar(image, label="running trajectories")
