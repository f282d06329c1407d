"""`staleflow simulate STUDY`: compare policies in virtual time. A progress bar, a table, JSON, or plots.

`staleflow simulate RUN`: simulate again what a real run has done, and compare the throughputs (its folder is given).
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from statistics import mean, stdev
from typing import Any

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn
from rich.table import Table

from staleflow.coordination.cost_model import CostModel
from staleflow.coordination.policies import POLICIES
from staleflow.simulation.config import Study, StudyError, Variant, load_study
from staleflow.simulation.fluid import Fluid, fluid_bound
from staleflow.simulation.outcome import Outcome
from staleflow.simulation.world import World


@dataclass(frozen=True, slots=True)
class Row:
    """One variant at one eta, over all seeds."""

    variant: Variant
    eta: int
    outcomes: tuple[Outcome, ...]

    def mean(self, name: str) -> float:
        return mean(float(getattr(o, name)) for o in self.outcomes)

    def spread(self, name: str) -> float:
        """Standard deviation over the seeds; 0 with one seed."""
        values = [float(getattr(o, name)) for o in self.outcomes]
        return stdev(values) if len(values) > 1 else 0.0


def cells(study: Study) -> Iterator[tuple[Variant, int]]:
    """Every variant with every eta that it is asked for. A study without variants compares all policies."""
    fixed = {"sync": (0,), "one_step": (1,)}
    variants = study.variants or tuple(Variant(name=p, policy=p) for p in POLICIES)
    for variant in variants:
        etas = fixed.get(variant.policy, study.staleness.eta) if variant.eta is None else variant.eta
        for eta in etas:
            yield variant, eta


def simulate(study: Study, cost: CostModel, console: Console, gantt: bool = False) -> list[Row]:
    """Run every cell over every seed, in order; raises StudyError or CoordinationError."""
    todo = list(cells(study))
    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn())
    rows = []
    with Progress(*columns, console=console, transient=True) as bar:
        task = bar.add_task(study.name, total=len(todo) * study.run.seeds * study.run.steps)
        for variant, eta in todo:
            outcomes = []
            for seed in range(study.run.seeds):
                bar.update(task, description=f"{variant.name} eta={eta} seed={seed}")
                world = World(study, cost, variant, eta, seed, gantt and seed == 0)
                outcomes.append(world.run(lambda steps: bar.advance(task)))
            rows.append(Row(variant, eta, tuple(outcomes)))
    return rows


def as_json(study: Study, fluid: Fluid, rows: Sequence[Row]) -> dict[str, Any]:
    return {
        "study": study.name,
        "seeds": study.run.seeds,
        "fluid_tokens_per_s": fluid.tokens_per_s,
        "rows": [
            {
                "name": row.variant.name,
                "policy": row.variant.policy,
                "eta": row.eta,
                "tokens_per_s": row.mean("tokens_per_s"),
                "tokens_per_s_stdev": row.spread("tokens_per_s"),
                "step_s": row.mean("step_s"),
                "step_s_stdev": row.spread("step_s"),
                "trainer_idle": row.mean("trainer_idle"),
                "staleness_max": int(max(o.staleness_max for o in row.outcomes)),
                "staleness_mean": row.mean("staleness_mean"),
                "waste": row.mean("wasted"),
                "length_bias": row.mean("length_bias"),
                "migrations": row.mean("migrations"),
                "pulls": row.mean("pulls"),
                "preemptions": row.mean("preemptions"),
                "prefilled_tokens": row.mean("prefilled_tokens"),
            }
            for row in rows
        ],
    }


HEADER = (
    "policy",
    "η",
    "step s",
    "± ",
    "tokens/s",
    "of fluid",
    "× first",
    "idle",
    "age max",
    "age mean",
    "waste",
    "bias",
)


def table_rows(fluid: Fluid, rows: Sequence[Row]) -> Iterator[tuple[str, ...]]:
    """The table's cells as text; `× first` is the speed relative to the first row."""
    first = rows[0].mean("step_s")
    for row in rows:
        yield (
            row.variant.name,
            str(row.eta),
            f"{row.mean('step_s'):.0f}",
            f"{row.spread('step_s'):.0f}",
            f"{row.mean('tokens_per_s'):.0f}",
            f"{row.mean('tokens_per_s') / fluid.tokens_per_s:.2f}",
            f"{first / row.mean('step_s'):.2f}",
            f"{row.mean('trainer_idle'):.2f}",
            str(max(o.staleness_max for o in row.outcomes)),
            f"{row.mean('staleness_mean'):.2f}",
            f"{row.mean('wasted'):.3f}",
            f"{row.mean('length_bias'):.3f}",
        )


def _print(study: Study, fluid: Fluid, rows: Sequence[Row], console: Console) -> None:
    title = f"{study.name}: {study.description}; fluid bound {fluid.tokens_per_s:.0f} tokens/s, {study.run.seeds} seeds"
    table = Table(*HEADER, title=title)
    for cells_ in table_rows(fluid, rows):
        table.add_row(*cells_)
    console.print(table)


def _narrow(study: Study, arguments: argparse.Namespace) -> Study:
    """The study with what the command line leaves of it."""
    if arguments.eta is not None:
        staleness = study.staleness.model_copy(update={"eta": arguments.eta})
        variants = [
            v if v.policy in ("sync", "one_step") else v.model_copy(update={"eta": None}) for v in study.variants
        ]
        study = study.model_copy(update={"staleness": staleness, "variants": tuple(variants)})
    run = {key: getattr(arguments, key) for key in ("seeds", "steps") if getattr(arguments, key) is not None}
    study = study.model_copy(update={"run": study.run.model_copy(update=run)})
    if study.run.warmup >= study.run.steps:
        raise StudyError(
            f"run.steps = {study.run.steps}: at least one more than run.warmup = {study.run.warmup} needed"
        )
    if arguments.policies is not None:
        known = study.variants or tuple(Variant(name=p, policy=p) for p in POLICIES)
        names = {v.name for v in known}
        if unknown := [name for name in arguments.policies if name not in names]:
            raise StudyError(f"--policies {unknown[0]}: not in this study; it has {', '.join(sorted(names))}")
        study = study.model_copy(update={"variants": tuple(v for v in known if v.name in arguments.policies)})
    return study


def _replay(arguments: argparse.Namespace, console: Console) -> None:
    from staleflow.simulation.replay import replay

    found = replay(arguments.study, arguments.cost_model)
    if arguments.json:
        print(json.dumps(asdict(found) | {"ratio": found.ratio}))
    else:
        console.print(
            f"{found.run}: {found.policy}, {found.steps} steps: {found.real_tokens_per_s:.1f} trained tokens/s "
            f"measured, {found.simulated_tokens_per_s:.1f} simulated ({found.ratio - 1:+.1%})"
        )


def parser() -> argparse.ArgumentParser:
    p = argparse.ArgumentParser(prog="staleflow simulate", description=__doc__)
    p.add_argument("study", type=Path, help="a study, e.g. configs/studies/yardstick.toml, or the folder of a run")
    p.add_argument("--policies", type=lambda s: s.split(","), help="names of variants, comma-separated")
    p.add_argument("--eta", type=lambda s: tuple(int(x) for x in s.split(",")), help="e.g. 0,1,2,3")
    p.add_argument("--seeds", type=int)
    p.add_argument("--steps", type=int)
    p.add_argument("--json", action="store_true", help="one JSON object on standard output")
    p.add_argument("--cost-model", type=Path, help="of a run's instances, where its config names none")
    p.add_argument("--plots", type=Path, metavar="DIR", help="write PNG files there (needs matplotlib)")
    return p


def main(argv: Sequence[str]) -> int:
    """Exit code 0, or 2 with one line per fault on standard error."""
    arguments = parser().parse_args(argv)
    console = Console(stderr=arguments.json)
    try:
        if arguments.study.is_dir():
            _replay(arguments, console)
            return 0
        study, cost = load_study(arguments.study)
        study = _narrow(study, arguments)
        rows = simulate(study, cost, console, gantt=arguments.plots is not None)
    except StudyError as error:
        print(error, file=sys.stderr)
        return 2
    fluid = fluid_bound(study, cost)
    if arguments.json:
        print(json.dumps(as_json(study, fluid, rows)))
    else:
        _print(study, fluid, rows, console)
    if arguments.plots is not None:
        from staleflow.simulation.plots import plot

        for path in plot(study, fluid, rows, arguments.plots):
            console.print(f"wrote {path}")
    return 0


if __name__ == "__main__":
    raise SystemExit(main(sys.argv[1:]))
