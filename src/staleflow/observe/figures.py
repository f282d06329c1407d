"""From a run's records to the charts of its report. Every function takes data and returns a piece of HTML."""

from __future__ import annotations

import json
import math
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import numpy as np

from staleflow.observe import charts
from staleflow.observe.charts import GREY, PALETTE, Bar, Series
from staleflow.observe.spans import MAIN, TRAIN, TRAJECTORIES, VERBS, WAIT
from staleflow.observe.trace import RankTrace, Span, exclusive_seconds, lanes

NO_TRACE = "no trace: the run was made without observe.trace"
OTHER = "other"
MOST_LANES = 40
_PALE, _DARK, _MARK = "#9ecae1", "#3182bd", "#D55E00"


def colour_of(name: str) -> str:
    """A verb has the same colour in every report."""
    if name in (WAIT, OTHER):
        return GREY if name == WAIT else "#dedede"
    known = [verb for verb in VERBS if verb != WAIT]
    at = known.index(name) if name in known else len(known) + sum(name.encode())
    return PALETTE[at % len(PALETTE)]


def result(summary: Mapping[str, Any]) -> str:
    """The figures that matter as tiles, all of them below, folded."""
    if not summary:
        return charts.nothing("no summary.json: the run has not ended")
    rows = [(key.replace("_", " "), _said(value)) for key, value in _flat(summary)]
    return charts.tiles(list(_headline(summary))) + charts.folded("All figures", charts.table(rows))


def _headline(s: Mapping[str, Any]) -> Iterator[tuple[str, str, str]]:
    """(name, figure, what it is of)"""
    wall_s = s.get("wall_s") or 0.0
    yield "steps", str(s.get("steps", "?")), f"{s.get('status', '?')} in {_duration(wall_s)}"
    if wall_s and s.get("trained_tokens"):
        yield "throughput", charts.number(s["trained_tokens"] / wall_s), "trained tokens/s"
    if s.get("reward_last") is not None:
        yield "reward", f"{s['reward_last']:.3f}", f"from {s['reward_first']:.3f}"
    if s.get("accuracy_after") is not None and s.get("accuracy_before") is not None:
        yield "held out", f"{s['accuracy_after']:.3f}", f"from {s['accuracy_before']:.3f}"
    if s.get("trainer_idle_fraction") is not None:
        yield "trainer idle", f"{s['trainer_idle_fraction']:.0%}", "of the time"
    if s.get("rollout_busy_fraction") is not None:
        yield "rollout busy", f"{s['rollout_busy_fraction']:.0%}", "of the time"
    if s.get("max_staleness") is not None:
        yield "oldest", str(s["max_staleness"]), f"versions, of eta = {s.get('eta')}"
    if s.get("generated_tokens"):
        wasted = sum((s.get("discarded_tokens") or {}).values()) / s["generated_tokens"]
        yield "discarded", f"{wasted:.1%}", "of generated tokens"


def _duration(seconds: float) -> str:
    if seconds < 120:
        return f"{seconds:.0f} s"
    return f"{seconds / 60:.0f} min" if seconds < 7200 else f"{seconds / 3600:.1f} h"


def _flat(values: Mapping[str, Any], prefix: str = "") -> Iterator[tuple[str, Any]]:
    """Nested mappings with their keys joined; a list of mappings numbered."""
    for key, value in values.items():
        if isinstance(value, list) and value and all(isinstance(item, Mapping) for item in value):
            value = {str(at): item for at, item in enumerate(value)}
        if isinstance(value, Mapping) and any(isinstance(item, Mapping) for item in value.values()):
            yield from _flat(value, f"{prefix}{key} ")
        else:
            yield f"{prefix}{key}", value


def _said(value: Any) -> str:
    if isinstance(value, float):
        return charts.number(value)
    if isinstance(value, Mapping) and all(isinstance(item, int | float | str) for item in value.values()):
        return ", ".join(f"{key}: {_said(item)}" for key, item in value.items()) or "none"
    return "none" if value is None else value if isinstance(value, str) else json.dumps(value)


def reward(steps: Sequence[Mapping[str, Any]], summary: Mapping[str, Any]) -> str:
    """Of each step, and what evaluations on held-out prompts gave."""
    series = _series(steps, {"reward": "reward"})
    held_out = sorted((e["version"], e["mean"]) for e in summary.get("evaluations") or ())
    if held_out:
        series.append(Series("held out", [x for x, _ in held_out], [y for _, y in held_out]))
    return charts.lines(series, "step", "reward")


def throughput(steps: Sequence[Mapping[str, Any]]) -> str:
    usable = [line for line in steps if line.get("trained_tokens") is not None and line.get("step_s")]
    ys = [line["trained_tokens"] / line["step_s"] for line in usable]
    return charts.lines([Series("tokens/s", [line["step"] for line in usable], ys)], "step", "trained tokens/s")


def step_times(steps: Sequence[Mapping[str, Any]]) -> str:
    """What a step took, what of it training took, and the way of a version to the stores and into an engine."""
    names = {"step_s": "step", "train_s": "training", "publish_s": "publishing", "pull_s": "a Pull"}
    return charts.lines(_series(steps, names), "step", "seconds")


def _series(steps: Sequence[Mapping[str, Any]], names: Mapping[str, str]) -> list[Series]:
    found = []
    for key, name in names.items():
        points = [(line["step"], line[key]) for line in steps if line.get(key) is not None]
        if points:
            found.append(Series(name, [x for x, _ in points], [y for _, y in points]))
    return found


def staleness(steps: Sequence[Mapping[str, Any]], summary: Mapping[str, Any]) -> str:
    counts: Counter[int] = Counter()
    for line in steps:
        counts.update({int(age): count for age, count in (line.get("staleness") or {}).items()})
    if not counts:
        counts.update({int(age): count for age, count in (summary.get("staleness_histogram") or {}).items()})
    if not counts:
        return charts.nothing()
    ages = range(max(max(counts), int(summary.get("eta") or 0)) + 1)
    return charts.histogram([(str(age), counts[age]) for age in ages], "age (versions)", "trajectories")


def time_shares(traces: Sequence[RankTrace]) -> str:
    """The paper's Fig. 1 for every rank: shares of its time, by verb."""
    content, used = [], dict[str, str]()
    for trace in traces:
        seconds = _shares(trace.on(MAIN))
        if seconds:
            used |= {name: colour_of(name) for name in seconds}
            content.append((trace.label, _stacked(seconds)))
    if not content:
        return charts.nothing(NO_TRACE)
    return charts.rows(content, "share of the time", 0.0, 1.0, page_width=charts.WIDE) + charts.legend(used)


def _shares(spans: Sequence[Span]) -> dict[str, float]:
    if not spans:
        return {}
    seconds = exclusive_seconds(spans)
    total = max(span.end_s for span in spans) - spans[0].start_s
    seconds[OTHER] = max(0.0, total - sum(seconds.values()))
    order = {name: at for at, name in enumerate((*VERBS, OTHER))}
    return {name: seconds[name] / total for name in sorted(seconds, key=lambda name: order.get(name, -1)) if total > 0}


def _stacked(shares: Mapping[str, float]) -> list[Bar]:
    bars, at = [], 0.0
    for name, share in shares.items():
        said = f"{share:.0%}" if share >= 0.04 and name != OTHER else ""
        bars.append(Bar(at, at + share, colour_of(name), f"{name}: {share:.1%}", said))
        at += share
    return bars


# ---- lengths (the paper's Fig. 4) ------------------------------------------------------------------------------------


def finished_lengths(trace: RankTrace) -> list[int]:
    """Response tokens of the trajectories that ended on this instance."""
    pieces = trace.on(TRAJECTORIES)
    return [int(piece.args["tokens"]) for piece in pieces if piece.args.get("finish") and "tokens" in piece.args]


def lengths(traces: Sequence[RankTrace]) -> str:
    found = [length for trace in traces for length in finished_lengths(trace)]
    if not found:
        return charts.nothing(NO_TRACE)
    counts, edges = np.histogram(found, bins=min(40, max(1, max(found) - min(found))))
    bars = [(charts.number(math.ceil(edge)), int(count)) for edge, count in zip(edges[:-1], counts, strict=True)]
    facts = f"{len(found)} trajectories, mean {np.mean(found):.1f}, median {np.median(found):.0f}, longest {max(found)}"
    return charts.histogram(bars, "response tokens", "trajectories") + f'<p class="about">{facts}</p>'


def lengths_by_instance(traces: Sequence[RankTrace]) -> str:
    found = {trace.label: lengths for trace in traces if (lengths := finished_lengths(trace))}
    if not found:
        return charts.nothing(NO_TRACE)
    longest = max(max(lengths) for lengths in found.values())
    content = [(label, _quantiles(lengths, longest)) for label, lengths in found.items()]
    means = {label: float(np.mean(lengths)) for label, lengths in found.items()}
    facts = [
        (label, len(lengths), f"{means[label]:.1f}", f"{max(lengths) / means[label]:.2f}", f"{sum(lengths)}")
        for label, lengths in found.items()
    ]
    across = max(means.values()) / (sum(means.values()) / len(means))
    return (
        charts.rows(content, "response tokens", 0, longest)
        + charts.table(facts, ("instance", "finished", "mean", "skew within (longest / mean)", "tokens"))
        + f'<p class="about">Skew across instances (largest mean / mean of means): {across:.2f}</p>'
    )


def _quantiles(values: Sequence[int], longest: int) -> list[Bar]:
    low, p10, median, p90, high = (float(q) for q in np.quantile(values, [0, 0.1, 0.5, 0.9, 1]))
    tip = f"shortest {low:.0f}, 10 % {p10:.0f}, median {median:.0f}, 90 % {p90:.0f}, longest {high:.0f}"
    half = 0.003 * longest
    return [Bar(low, high, _PALE, tip), Bar(p10, p90, _DARK, tip), Bar(median - half, median + half, _MARK, tip)]


# ---- time line of one step -------------------------------------------------------------------------------------------


def step_window(traces: Sequence[RankTrace], step: int | None) -> tuple[int, float, float] | None:
    """(step, begin, end) in seconds: of `step`, or of the step whose duration is the median one."""
    ends: dict[int, float] = {}
    for trace in traces:
        for span in trace.spans:
            if span.name == TRAIN and "step" in span.args:
                at = int(span.args["step"])
                ends[at] = max(ends.get(at, 0.0), span.end_s)
    windows = [(at, ends[at - 1], ends[at]) for at in sorted(ends) if at - 1 in ends and ends[at] > ends[at - 1]]
    if step is not None:
        return next((window for window in windows if window[0] == step), None)
    by_length = sorted(windows, key=lambda window: window[2] - window[1])
    return by_length[len(by_length) // 2] if by_length else None


def one_step(traces: Sequence[RankTrace], step: int | None) -> str:
    window = step_window(traces, step)
    if window is None:
        return charts.nothing(NO_TRACE if step is None else f"step {step} is not in the trace")
    at, begin_s, end_s = window
    content, used = [], dict[str, str]()
    for trace in traces:
        if not trace.on(MAIN):
            continue  # a host: it waits for nobody, so its loop has no verbs
        inside = [span for span in trace.on(MAIN) if span.end_s > begin_s and span.start_s < end_s]
        used |= {span.name: colour_of(span.name) for span in inside}
        content.append((trace.label, [_bar(span, begin_s, end_s, colour_of(span.name), span.name) for span in inside]))
    chart = charts.rows(content, f"seconds of step {at}", 0.0, end_s - begin_s, 24, charts.WIDE)
    return chart + charts.legend(used)


def trajectories_of_step(traces: Sequence[RankTrace], step: int | None) -> str:
    window = step_window(traces, step)
    if window is None:
        return charts.nothing(NO_TRACE)
    _, begin_s, end_s = window
    content, versions = [], set[int]()
    for trace in traces:
        inside = [s for s in trace.on(TRAJECTORIES) if s.end_s > begin_s and s.start_s < end_s]
        by_lane: dict[int, list[Bar]] = {}
        for lane, span in lanes(inside):
            version = int(span.args.get("version", 0))
            versions.add(version)
            tip = f"trajectory {span.args.get('tid', '?')} v{version}"
            by_lane.setdefault(lane, []).append(_bar(span, begin_s, end_s, _version_colour(version), tip))
        shown = sorted(by_lane)[:MOST_LANES]
        content += [(trace.label if lane == 0 else "", by_lane[lane]) for lane in shown]
        if len(by_lane) > MOST_LANES:
            content.append((f"and {len(by_lane) - MOST_LANES} lanes more", []))
        content.append(("", []))
    colours = {f"v{version}": _version_colour(version) for version in sorted(versions)}
    return charts.rows(content, "seconds", 0.0, end_s - begin_s, 9, charts.WIDE) + charts.legend(colours)


def _version_colour(version: int) -> str:
    return PALETTE[version % len(PALETTE)]


def _bar(span: Span, begin_s: float, end_s: float, colour: str, tip: str) -> Bar:
    start, end = max(span.start_s, begin_s) - begin_s, min(span.end_s, end_s) - begin_s
    args = " ".join(f"{key}={value}" for key, value in span.args.items())
    return Bar(start, end, colour, f"{tip} {span.seconds * 1e3:.1f} ms {args}".strip())
