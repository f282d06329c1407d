"""Spans, the merged timeline, and the report page: right numbers, on one clock, and nothing fetched from elsewhere."""

from __future__ import annotations

import json
import os
import re
import shutil
import signal
import subprocess
import sys
import textwrap
import threading
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from staleflow.observe import charts, figures
from staleflow.observe.metrics import SUMMARY_KEYS, MetricsWriter, write_summary
from staleflow.observe.report import main
from staleflow.observe.spans import MAIN, TRAJECTORIES, Spans
from staleflow.observe.trace import Span, exclusive_seconds, lanes, read_traces

S = 1_000_000_000


def write_trace(run: Path, rank: int, role: str, notes: list[Any], **header: Any) -> None:
    """A trace with times in whole seconds on a monotonic clock that began `header["mono"]` ago."""
    folder = run / "trace"
    folder.mkdir(parents=True, exist_ok=True)
    head = {
        "rank": rank, "role": role, "instance": None, "attempt": 0, "host": "a", "boot": "one",
        "mono_ns": 0, "wall_ns": 1000 * S, "offset_ns": 0, **header,
    }  # fmt: skip
    (folder / f"rank_{rank}.jsonl").write_text("\n".join(json.dumps(line) for line in [head, *notes]) + "\n")


def x(name: str, start: float, end: float, track: str = MAIN, **args: Any) -> list[Any]:
    return ["x", name, track, int(start * S), int((end - start) * S), args]


@pytest.fixture
def run(tmp_path: Path) -> Path:
    """A run of four ranks and three steps, with two instances of unequal lengths."""
    run = tmp_path / "demo & co"
    writer = MetricsWriter(run, tensorboard=False)
    for step in range(3):
        writer.write(
            step,
            {"reward": 0.2 + 0.1 * step, "staleness": {0: 4 - step, 1: step}, "trained_tokens": 100, "step_s": 2.0},
        )
    writer.close()
    write_summary(run, {**dict.fromkeys(SUMMARY_KEYS, 1), "status": "completed", "discarded_tokens": {"surplus": 3}})
    steps = [x("train", 2 * i + 1, 2 * i + 2, step=i) for i in range(3)]
    write_trace(run, 0, "host", [x("reward", 0, 1), ["c", "outstanding", 1 * S, {"groups": 4}]])
    write_trace(run, 1, "trainer", [*steps, x("pack", 1.0, 1.25), x("wait", 2, 3), x("wait", 4, 5)])
    for rank, factor in ((2, 1), (3, 3)):
        pieces = [
            x("trajectory", i / 4, i / 4 + 1, TRAJECTORIES, tid=i, version=i // 8, tokens=factor * i, finish=1)
            for i in range(1, 20)
        ]
        notes = [
            x("generate", 0, 6),
            x("pull", 3, 3.5, version=1),
            ["i", "interrupt", "main", 3 * S, {"tids": 2}],
            *pieces,
        ]
        write_trace(run, rank, "rollout", notes, instance=rank - 2)
    return run


def test_spans_states_and_counters_come_back_as_noted(tmp_path: Path) -> None:
    spans = Spans(tmp_path / "trace", rank=2, role="rollout", instance=1)
    for name in ("wait", "generate", "generate", "generate", "wait"):
        spans.state(name)
    with spans.span("pull", version=3) as args:
        args["bytes"] = 10
    spans.complete("trajectory", 0, 5 * S, TRAJECTORIES, tid=7)
    spans.counter("kv", used=0.5)
    spans.instant("abort", tids=1)
    spans.close()
    spans.close()
    spans.instant("after the end")
    (trace,) = read_traces(tmp_path)
    assert (trace.rank, trace.role, trace.instance, trace.label) == (2, "rollout", 1, "rank 2 rollout (instance 1)")
    assert sorted(span.name for span in trace.on(MAIN)) == ["generate", "pull", "wait", "wait"]
    pull = next(span for span in trace.spans if span.name == "pull")
    assert pull.args == {"version": 3, "bytes": 10}
    assert trace.on(TRAJECTORIES)[0].seconds == pytest.approx(5.0)
    assert [(name, series) for _, name, series in trace.counters] == [("kv", {"used": 0.5})]
    assert [one.name for one in trace.instants] == ["abort"]


def test_a_span_is_noted_also_when_its_block_fails(tmp_path: Path) -> None:
    spans = Spans(tmp_path / "trace")
    with pytest.raises(KeyError), spans.span("push"):
        raise KeyError
    spans.close()
    assert [span.name for span in read_traces(tmp_path)[0].spans] == ["push"]


def test_without_a_directory_nothing_is_noted_and_no_thread_runs(tmp_path: Path) -> None:
    before = threading.active_count()
    spans = Spans(None)
    spans.state("wait")
    with spans.span("pull"):
        spans.counter("kv", used=1)
    spans.close()
    assert threading.active_count() == before
    assert read_traces(tmp_path) == []


def test_a_killed_rank_leaves_what_was_written_and_its_next_attempt_goes_on(tmp_path: Path) -> None:
    program = f"""
        import os, pathlib, time
        from staleflow.observe.spans import Spans
        spans = Spans(pathlib.Path({str(tmp_path)!r}) / "trace", rank=1, role="trainer")
        spans.instant("begun")
        time.sleep(1.5)
        spans._file.write(b'["x","torn')
        spans._file.flush()
        os.kill(os.getpid(), 9)
    """
    done = subprocess.run([sys.executable, "-c", textwrap.dedent(program)])
    assert done.returncode == -signal.SIGKILL
    again = Spans(tmp_path / "trace", rank=1, role="trainer", attempt=1)
    again.instant("resumed")
    again.close()
    (trace,) = read_traces(tmp_path)
    assert [one.name for one in trace.instants] == ["begun", "resumed"]


def test_machines_are_put_on_one_clock(tmp_path: Path) -> None:
    """Machine b booted 50 s later and its wall clock is 3 s ahead; what happened together stands together."""
    write_trace(tmp_path, 0, "host", [x("wait", 100, 101)], mono_ns=100 * S, wall_ns=1000 * S)
    write_trace(tmp_path, 1, "trainer", [x("train", 100, 102)], mono_ns=101 * S, wall_ns=1001 * S + S // 10)
    away = {"boot": "two", "host": "b", "mono_ns": 50 * S, "wall_ns": 1003 * S, "offset_ns": 3 * S}
    write_trace(tmp_path, 2, "host", [x("wait", 50, 51)], **away)
    starts = {trace.rank: trace.spans[0].start_s for trace in read_traces(tmp_path)}
    assert starts == pytest.approx({0: 0.0, 1: 0.0, 2: 0.0})


def test_time_inside_another_span_counts_once() -> None:
    spans = [
        Span("wait", MAIN, 0, 10, {}),
        Span("pull", MAIN, 2, 5, {}),
        Span("load", MAIN, 3, 4, {}),
        Span("wait", MAIN, 11, 12, {}),
    ]
    assert exclusive_seconds(spans) == {"wait": 8, "pull": 2, "load": 1}


@given(st.lists(st.tuples(st.integers(0, 50), st.integers(1, 20)), max_size=40))
def test_lanes_never_overlap_and_are_as_few_as_can_be(drawn: list[tuple[int, int]]) -> None:
    spans = [Span("t", TRAJECTORIES, start, start + length, {}) for start, length in sorted(drawn)]
    placed = list(lanes(spans))
    for at, (lane, span) in enumerate(placed):
        assert all(other.end_s <= span.start_s for before, other in placed[:at] if before == lane)
    deepest = max((sum(s.start_s <= span.start_s < s.end_s for s in spans) for span in spans), default=0)
    assert len({lane for lane, _ in placed}) == deepest


def test_the_merged_trace_opens_in_viewers(run: Path) -> None:
    assert main([str(run), "--trace"]) == 0
    events = json.loads((run / "trace.json").read_text())["traceEvents"]
    assert {event["ph"] for event in events} == {"M", "X", "C", "i"}
    for event in events:
        assert isinstance(event["pid"], int) and isinstance(event["tid"], int) and isinstance(event["name"], str)
        assert event["ph"] == "M" or event["ts"] >= 0
    names = {event["args"]["name"] for event in events if event["name"] == "process_name"}
    assert "rank 3 rollout (instance 1) @ a" in names
    slices = [event for event in events if event["ph"] == "X" and event["pid"] == 2]
    assert {event["name"] for event in slices} == {"generate", "pull", "v0", "v1", "v2"}, "a version is a colour"
    by_thread: dict[int, float] = {}
    for event in slices:
        if event["name"].startswith("v"):
            assert event["ts"] >= by_thread.get(event["tid"], 0) - 1e-3, "slices of a thread do not overlap"
            by_thread[event["tid"]] = event["ts"] + event["dur"]


class Outline(HTMLParser):
    """Checks that tags nest, and collects what a page could fetch."""

    VOID = frozenset({"meta", "br"})

    def __init__(self) -> None:
        super().__init__()
        self.open: list[str] = []
        self.fetches: list[str] = []
        self.text: list[str] = []

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.fetches += [f"{tag} {name}" for name, _ in attrs if name in ("src", "href", "srcset", "data")]
        assert tag != "script"
        if tag not in self.VOID:
            self.open.append(tag)

    def handle_endtag(self, tag: str) -> None:
        assert self.open.pop() == tag

    def handle_data(self, data: str) -> None:
        self.text.append(data)


def test_the_page_is_whole_and_fetches_nothing(run: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main([str(run)]) == 0
    assert "report.html: 3 steps, 4 ranks traced" in capsys.readouterr().out
    page = (run / "report.html").read_text()
    outline = Outline()
    outline.feed(page)
    assert (outline.open, outline.fetches) == ([], [])
    assert not re.search(r"url\(|@import|https?://", page)
    text = " ".join(outline.text)
    for words in (
        "demo & co",
        "discarded tokens",
        "surplus: 3",
        "rank 3 rollout (instance 1)",
        "Skew across instances",
    ):
        assert words in text
    assert "no trace" not in text and "nan" not in text


def test_the_page_of_a_run_without_traces_or_end_says_what_is_missing(tmp_path: Path) -> None:
    writer = MetricsWriter(tmp_path, tensorboard=False)
    writer.write(0, {"reward": None})
    assert main([str(tmp_path)]) == 0
    page = (tmp_path / "report.html").read_text()
    assert "the run has not ended" in page
    assert "without observe.trace" in page


def test_no_run_is_an_error_with_its_path(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main([str(tmp_path / "nowhere")]) == 2
    assert "nowhere: no metrics.jsonl" in capsys.readouterr().err


def test_shares_skew_and_the_window_of_a_step(run: Path) -> None:
    traces = read_traces(run)
    assert "train: 55.0%" in figures.time_shares(traces[1:2])
    assert figures.step_window(traces, None) == (2, 4.0, 6.0)
    assert figures.step_window(traces, 1) == (1, 2.0, 4.0)
    assert figures.step_window(traces, 99) is None
    assert "1.50" in figures.lengths_by_instance(traces), "means 10 and 30: the longer is 1.5 times their mean"
    assert "1: 3" in figures.staleness([{"staleness": {"0": 1, "1": 3}}], {"eta": 2})


@given(st.floats(-1e9, 1e9), st.floats(0, 1e9))
def test_ticks_are_few_round_and_inside(low: float, width: float) -> None:
    found = charts.ticks(low, low + width)
    assert len(found) <= 8
    within = 1e-6 * (1 + abs(low) + width)
    assert all(low - within <= tick <= low + width + within for tick in found)


@pytest.mark.slow
def test_a_browser_shows_the_page_offline(run: Path, tmp_path: Path) -> None:
    browser = shutil.which("chromium") or shutil.which("google-chrome")
    if browser is None:
        pytest.skip("no Chromium on this machine")
    main([str(run)])
    quiet = ["--headless", "--no-sandbox", "--disable-gpu", "--disable-quic", "--no-first-run", "--disable-sync"]
    quiet += [
        "--disable-background-networking",
        "--disable-component-update",
        f"--user-data-dir={tmp_path / 'profile'}",
    ]
    url = f"file://{run / 'report.html'}"
    done = subprocess.run(
        [browser, *quiet, "--host-resolver-rules=MAP * ~NOTFOUND", "--dump-dom", url],
        capture_output=True, text=True, timeout=120, env={**os.environ, "HOME": str(tmp_path)}, check=True,
    )  # fmt: skip
    assert done.stdout.count("<svg") == 9
    assert "rank 3 rollout (instance 1)" in done.stdout
