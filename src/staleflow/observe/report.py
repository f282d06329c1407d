"""`staleflow report RUN`: one self-contained HTML page about a run, and with --trace its merged timeline."""

from __future__ import annotations

import argparse
import json
import sys
from dataclasses import dataclass
from html import escape
from pathlib import Path
from typing import Any

from staleflow.observe import figures
from staleflow.observe.metrics import read_metrics
from staleflow.observe.trace import RankTrace, read_traces, write_chrome

_STYLE = """
:root { color-scheme: light dark; --ink: #1c1c1c; --paper: #fff; --faint: #767676; --grid: #e2e2e2; }
@media (prefers-color-scheme: dark) { :root { --ink: #e6e6e6; --paper: #161616; --faint: #9a9a9a; --grid: #333; } }
body { font: 15px/1.45 system-ui, sans-serif; color: var(--ink); background: var(--paper); margin: 2rem auto;
       max-width: 1180px; padding: 0 1.2rem; }
main { display: grid; grid-template-columns: repeat(auto-fit, minmax(min(100%, 520px), 1fr)); gap: .4rem 2.2rem; }
section.wide { grid-column: 1 / -1; } section { min-width: 0; } section.wide > svg { width: 100%; }
h1 { font-size: 1.6rem; margin: 0; } h2 { font-size: 1.05rem; margin: 1.6rem 0 .2rem; }
.tiles { display: grid; grid-template-columns: repeat(auto-fit, minmax(120px, 1fr)); gap: .7rem; margin: .8rem 0; }
.tiles div { border: 1px solid var(--grid); border-radius: 8px; padding: .55rem .8rem; }
.tiles b { display: block; font-size: 1.55rem; line-height: 1.25; font-variant-numeric: tabular-nums; }
.tiles span { color: var(--faint); font-size: .82rem; } summary { cursor: pointer; color: var(--faint); }
details table { margin-top: .4rem; } details td:first-child { color: var(--faint); white-space: nowrap; }
p.about, p.nothing, .legend { color: var(--faint); font-size: .88rem; margin: .2rem 0 .6rem; }
svg { max-width: 100%; height: auto; } svg text { font: 11px system-ui, sans-serif; fill: var(--faint); }
svg .grid { stroke: var(--grid); stroke-width: 1; } svg text.inside { fill: #fff; font-weight: 600; }
table { border-collapse: collapse; font-size: .9rem; } td, th { padding: .15rem .9rem .15rem 0; text-align: left; }
th { color: var(--faint); font-weight: normal; } td { font-variant-numeric: tabular-nums; }
.legend span { margin-right: 1rem; white-space: nowrap; } .legend i { display: inline-block; width: .8em; height: .8em;
       margin-right: .35em; border-radius: 2px; }
"""


_WIDE = ("Result", "Where the time goes", "One step", "Trajectories of that step")  # over both columns


@dataclass(frozen=True)
class Recorded:
    """What a run directory holds: a line for each step, the summary ({} while it runs), and the traces."""

    name: str
    steps: list[dict[str, Any]]
    summary: dict[str, Any]
    traces: list[RankTrace]


def main(argv: list[str]) -> int:
    """Write RUN/report.html (and RUN/trace.json); returns the exit code, 2 when there is no such run."""
    parser = argparse.ArgumentParser(prog="staleflow report", description=__doc__)
    parser.add_argument("run", type=Path, help="a run directory, e.g. runs/demo")
    parser.add_argument("--out", type=Path, help="where to write the page (default: RUN/report.html)")
    parser.add_argument("--trace", action="store_true", help="also write RUN/trace.json, for ui.perfetto.dev")
    parser.add_argument("--step", type=int, help="the step to show in the time line (default: a typical one)")
    options = parser.parse_args(argv)
    try:
        run = read_run(options.run)
    except ValueError as error:
        print(f"staleflow report: {error}", file=sys.stderr)
        return 2
    out = options.out or options.run / "report.html"
    out.write_text(page(run, options.step), encoding="utf-8")
    print(f"{out}: {len(run.steps)} steps, {len(run.traces)} ranks traced")
    if options.trace:
        merged = options.run / "trace.json"
        print(f"{merged}: {write_chrome(run.traces, merged)} events; open it at ui.perfetto.dev or chrome://tracing")
    return 0


def read_run(run_dir: Path) -> Recorded:
    """Raises ValueError when the directory holds nothing that a report could show."""
    summary_path = run_dir / "summary.json"
    summary = json.loads(summary_path.read_text(encoding="utf-8")) if summary_path.exists() else {}
    run = Recorded(run_dir.resolve().name, read_metrics(run_dir), summary, read_traces(run_dir))
    if not (run.steps or run.summary or run.traces):
        raise ValueError(f"{run_dir}: no metrics.jsonl, summary.json or trace/ there; give a run directory")
    return run


def page(run: Recorded, step: int | None = None) -> str:
    """The whole page. It loads nothing: everything is in it."""
    sections = [
        ("Result", "", figures.result(run.summary)),
        ("Reward", "Mean reward of the trajectories of each step.", figures.reward(run.steps, run.summary)),
        ("Throughput", "Trained tokens per second of each step.", figures.throughput(run.steps)),
        (
            "Where the time goes",
            "Share of each rank's time by what its loop did.",
            figures.time_shares(run.traces),
        ),
        (
            "Staleness",
            "Trained trajectories by age: the step that trained on them minus the version that began them.",
            figures.staleness(run.steps, run.summary),
        ),
        (
            "Time of a step",
            "Publishing goes on beside the next step; a Pull is one instance's.",
            figures.step_times(run.steps),
        ),
        ("Response lengths", "Tokens of finished trajectories.", figures.lengths(run.traces)),
        (
            "Lengths within and across instances",
            "From the shortest to the longest; darker from the 10th to the 90th percentile; the mark is the median.",
            figures.lengths_by_instance(run.traces),
        ),
        (
            "One step",
            "From the end of the step before to its own end: what every rank did.",
            figures.one_step(run.traces, step),
        ),
        (
            "Trajectories of that step",
            "One lane for each place in an engine's batch; the colour is the version that generated the piece.",
            figures.trajectories_of_step(run.traces, step),
        ),
    ]
    body = "".join(
        f'<section class="{"wide" if title in _WIDE else ""}"><h2>{title}</h2>'
        + (f'<p class="about">{about}</p>' if about else "")
        + f"{content}</section>"
        for title, about, content in sections
    )
    return (
        '<!doctype html><html lang="en"><head><meta charset="utf-8">'
        '<meta name="viewport" content="width=device-width, initial-scale=1">'
        f"<title>{escape(run.name)} - staleflow</title><style>{_STYLE}</style></head><body>"
        f"<h1>{escape(run.name)}</h1><main>{body}</main></body></html>\n"
    )
