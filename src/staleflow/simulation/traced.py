"""What a run's own traces say of its instances: how fast they decoded in the job, and how long a Pull held them up.

`staleflow calibrate` measures an instance alone. In a job it also reads rings, obeys commands, computes prompts again
after a Pull, and may share its cores; what all that costs is in the pieces of trajectories that the trace holds: when a
piece began and ended on an instance, and how many tokens it grew by.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import mean

import numpy as np

from staleflow.config import Config, load
from staleflow.coordination.calibrate import Calibration, DecodeSample, fit
from staleflow.observe.spans import GENERATE, MAIN, PULL, TRAJECTORIES
from staleflow.observe.trace import RankTrace, read_traces
from staleflow.simulation.config import StudyError

SHORTEST = 4  # tokens: the steps of a shorter piece were mostly its prompt's


@dataclass(frozen=True)
class _Piece:
    start_s: float
    end_s: float
    tokens_before: int
    tokens: int


def calibrated(run_dirs: Sequence[Path]) -> Calibration:
    """The cost model that fits the pieces of these runs best. What prefill they needed is in the decode steps.

    Raises StudyError: no run, no trace, or one that cannot tell the coefficients apart.
    """
    samples: list[DecodeSample] = []
    for run_dir in run_dirs:
        config = config_of(run_dir)
        samples += decode_samples(read_traces(run_dir), config.data.max_prompt_tokens, config.rollout.max_running)
    try:
        return fit(samples, source=f"traces of {', '.join(map(str, run_dirs))}")
    except ValueError as error:
        raise StudyError(f"{', '.join(map(str, run_dirs))}: {error}; is observe.trace on?") from error


def config_of(run_dir: Path) -> Config:
    """The resolved config of a run. Raises StudyError: it is no run."""
    if not (run_dir / "config.toml").exists():
        raise StudyError(f"{run_dir}: holds no config.toml; give the folder of a run")
    return load(run_dir / "config.toml")


def decode_samples(traces: Iterable[RankTrace], prompt_tokens: int, max_running: int) -> list[DecodeSample]:
    """One sample per piece: how many ran beside it on the mean, and its seconds a token.

    Pieces with more beside them than the engine runs at a time waited for a part of their time, and are left out.
    """
    found = []
    for pieces in _by_instance(traces):
        edges = np.unique([at for piece in pieces for at in (piece.start_s, piece.end_s)])
        running = np.zeros(len(edges))
        for piece in pieces:
            running[np.searchsorted(edges, piece.start_s) : np.searchsorted(edges, piece.end_s)] += 1
        area = np.concatenate([[0.0], np.cumsum(running[:-1] * np.diff(edges))])  # trajectory-seconds until each edge
        for piece in pieces:
            seconds = piece.end_s - piece.start_s
            if piece.tokens < SHORTEST or seconds <= 0.0:
                continue
            begin, end = np.searchsorted(edges, [piece.start_s, piece.end_s])
            n = float(area[end] - area[begin]) / seconds
            context = prompt_tokens + piece.tokens_before + piece.tokens / 2
            if n <= max_running:
                found.append(DecodeSample(max(1, round(n)), round(n * context), seconds / piece.tokens))
    return found


def pull_pause_s(traces: Iterable[RankTrace]) -> float:
    """Seconds from an instance's last step before a Pull to its first one after it, on the mean; 0 without a Pull.

    More than the Pull itself: requests are taken out and put in again, and the probe of a new version is scored.
    """
    pauses = []
    for trace in traces:
        loop = [span for span in trace.on(MAIN) if trace.role == "rollout"]
        for before, pull, after in zip(loop, loop[1:], loop[2:], strict=False):
            if (before.name, pull.name, after.name) == (GENERATE, PULL, GENERATE):
                pauses.append(after.start_s - before.end_s)
    return mean(pauses) if pauses else 0.0


def _by_instance(traces: Iterable[RankTrace]) -> Iterator[list[_Piece]]:
    """The pieces of each instance. A trajectory's pieces may lie on several, so all are gone through by their ends."""
    ended = sorted(
        ((span.end_s, trace.rank, span) for trace in traces for span in trace.on(TRAJECTORIES)),
        key=lambda one: one[:2],
    )
    grown: dict[int, int] = {}
    found: dict[int, list[_Piece]] = {}
    for _, rank, span in ended:
        tid, tokens = span.args["tid"], span.args["tokens"]
        before = grown.get(tid, 0)
        found.setdefault(rank, []).append(_Piece(span.start_s, span.end_s, before, tokens - before))
        grown[tid] = tokens
    yield from found.values()
