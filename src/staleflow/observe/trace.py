"""The traces of all ranks on one clock, and as one file that Perfetto and chrome://tracing open."""

from __future__ import annotations

import json
from collections import defaultdict
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import msgspec

from staleflow.observe.spans import OVERLAPPING, TRAJECTORIES


@dataclass(frozen=True)
class Span:
    """`start_s` and `end_s` count from the beginning of the run's trace."""

    name: str
    track: str
    start_s: float
    end_s: float
    args: dict[str, Any]

    @property
    def seconds(self) -> float:
        return self.end_s - self.start_s


@dataclass
class RankTrace:
    """What one rank noted, over all attempts. `counters` are (time_s, name, {series: value})."""

    rank: int
    role: str
    host: str
    instance: int | None
    spans: list[Span] = field(default_factory=list)
    counters: list[tuple[float, str, dict[str, float]]] = field(default_factory=list)
    instants: list[Span] = field(default_factory=list)
    dropped: int = 0

    @property
    def label(self) -> str:
        return f"rank {self.rank} {self.role}" + ("" if self.instance is None else f" (instance {self.instance})")

    def on(self, track: str) -> list[Span]:
        return [span for span in self.spans if span.track == track]


def read_traces(run_dir: Path) -> list[RankTrace]:
    """All ranks, by number, on one clock. Lines that a kill has torn are left out; no trace gives an empty list."""
    files = sorted((run_dir / "trace").glob("rank_*.jsonl"), key=lambda path: int(path.stem.rpartition("_")[2]))
    notes = {path: list(_lines(path)) for path in files}
    anchors = _anchors(line for lines in notes.values() for line in lines if isinstance(line, dict))
    traces = [_read(lines, anchors) for lines in notes.values() if lines]
    _start_at_zero(traces)
    return traces


def _lines(path: Path) -> Iterator[Any]:
    with path.open("rb") as lines:
        for line in lines:
            try:
                yield msgspec.json.decode(line)
            except msgspec.DecodeError:
                continue  # blank, or torn by a kill


def _anchors(headers: Iterable[dict[str, Any]]) -> dict[str, int]:
    """Nanoseconds from each machine's monotonic clock to rank 0's wall clock.

    One anchor serves a machine, the last one of its lowest rank, which is its host: its processes share the monotonic
    clock, so reading the wall clock again in each could only add noise. Where the clocks of machines differ,
    `offset_ns` says by how much; hosts measure it better and better.
    """
    anchors: dict[str, tuple[int, int]] = {}
    for header in headers:
        to_wall = header["wall_ns"] - header["offset_ns"] - header["mono_ns"]
        rank, _ = anchors.get(header["boot"], (header["rank"], 0))
        if header["rank"] <= rank:
            anchors[header["boot"]] = header["rank"], to_wall
    return {boot: to_wall for boot, (_, to_wall) in anchors.items()}


def _read(lines: list[Any], anchors: dict[str, int]) -> RankTrace:
    first = next(line for line in lines if isinstance(line, dict))
    trace = RankTrace(first["rank"], first["role"], first["host"], first["instance"])
    shift = 0
    for line in lines:
        if isinstance(line, dict):
            shift = anchors[line["boot"]]
            continue
        match line:
            case ["x", name, track, start, duration, args]:
                trace.spans.append(Span(name, track, (start + shift) / 1e9, (start + duration + shift) / 1e9, args))
            case ["c", name, at, series]:
                trace.counters.append(((at + shift) / 1e9, name, series))
            case ["i", name, track, at, args]:
                trace.instants.append(Span(name, track, (at + shift) / 1e9, (at + shift) / 1e9, args))
            case ["d", count]:
                trace.dropped += count
    return trace


def _start_at_zero(traces: list[RankTrace]) -> None:
    zero = min((span.start_s for trace in traces for span in trace.spans), default=0.0)
    for trace in traces:
        for spans in (trace.spans, trace.instants):
            spans[:] = [Span(s.name, s.track, s.start_s - zero, s.end_s - zero, s.args) for s in spans]
            spans.sort(key=lambda span: (span.start_s, -span.end_s))
        trace.counters[:] = sorted((at - zero, name, series) for at, name, series in trace.counters)


def lanes(spans: Iterable[Span]) -> Iterator[tuple[int, Span]]:
    """Spread spans that overlap over as few lanes as needed; `spans` by rising start."""
    free_at: list[float] = []
    for span in spans:
        lane = next((lane for lane, end_s in enumerate(free_at) if end_s <= span.start_s), len(free_at))
        free_at[lane : lane + 1] = [span.end_s]
        yield lane, span


def exclusive_seconds(spans: Iterable[Span]) -> dict[str, float]:
    """Seconds by name, what lies inside another span counted for the inner one only; `spans` by rising start."""
    seconds: dict[str, float] = defaultdict(float)
    open_spans: list[Span] = []
    for span in spans:
        while open_spans and open_spans[-1].end_s <= span.start_s:
            open_spans.pop()
        seconds[span.name] += span.seconds
        if open_spans:
            seconds[open_spans[-1].name] -= min(span.end_s, open_spans[-1].end_s) - span.start_s
        open_spans.append(span)
    return dict(seconds)


# ---- one file for Perfetto -------------------------------------------------------------------------------------------

# chrome://tracing knows colours by these names only; Perfetto takes the slice's name for its colour.
_COLOURS = (
    "thread_state_running", "rail_response", "thread_state_iowait", "rail_animation", "cq_build_passed", "rail_load",
    "thread_state_runnable", "cq_build_failed",
)  # fmt: skip


def chrome_events(traces: list[RankTrace]) -> Iterator[dict[str, Any]]:
    """A process per rank, a thread per track, and as many as needed where spans overlap. Trajectories are called after
    their version, so that a version is a colour.
    """
    for trace in traces:
        yield _meta("process_name", trace.rank, 0, f"{trace.label} @ {trace.host}")
        yield {"ph": "M", "name": "process_sort_index", "pid": trace.rank, "tid": 0, "args": {"sort_index": trace.rank}}
        threads: dict[str, int] = {}
        for track in sorted({span.track for span in trace.spans}, key=lambda name: (name != "main", name)):
            for lane, span in lanes(trace.on(track)) if track in OVERLAPPING else ((0, s) for s in trace.on(track)):
                name = f"{track} {lane:02}" if track in OVERLAPPING else track
                if name not in threads:
                    threads[name] = len(threads) + 1
                    yield _meta("thread_name", trace.rank, threads[name], name)
                yield _slice(span, trace.rank, threads[name])
        for one in trace.instants:
            yield {
                "ph": "i",
                "s": "p",
                "name": one.name,
                "pid": trace.rank,
                "tid": 0,
                "ts": one.start_s * 1e6,
                "args": one.args,
            }
        for at_s, name, series in trace.counters:
            yield {"ph": "C", "name": name, "pid": trace.rank, "tid": 0, "ts": at_s * 1e6, "args": series}


def write_chrome(traces: list[RankTrace], path: Path) -> int:
    """Write the merged trace; returns the number of its events."""
    count = 0
    with path.open("w", encoding="utf-8") as out:
        out.write('{"displayTimeUnit": "ms", "traceEvents": [\n')
        for count, event in enumerate(chrome_events(traces), 1):
            out.write((",\n" if count > 1 else "") + json.dumps(event))
        out.write("\n]}\n")
    return count


def _slice(span: Span, pid: int, tid: int) -> dict[str, Any]:
    event = {
        "ph": "X", "name": span.name, "pid": pid, "tid": tid, "ts": span.start_s * 1e6, "dur": span.seconds * 1e6,
        "args": span.args,
    }  # fmt: skip
    if span.track == TRAJECTORIES and "version" in span.args:
        version = int(span.args["version"])
        event |= {"name": f"v{version}", "cname": _COLOURS[version % len(_COLOURS)]}
    return event


def _meta(kind: str, pid: int, tid: int, name: str) -> dict[str, Any]:
    return {"ph": "M", "name": kind, "pid": pid, "tid": tid, "args": {"name": name}}
