"""How long the responses will be: known to the simulated engines, never to the coordinator."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import numpy as np
import numpy.typing as npt

from staleflow.simulation.config import StudyError, Workload

IntArray = npt.NDArray[np.int64]
_BLOCK = 1024  # groups drawn at once


class Lengths:
    """`lengths(group_id)` -> response tokens of each member, the same for the same seed in every policy."""

    def __init__(self, workload: Workload, members: int, seed: int) -> None:
        self._workload, self._members, self._seed = workload, members, seed
        self._draw = _DRAWS[workload.kind]
        self._trace = read_trace(workload.trace) if workload.trace is not None else None
        self._blocks: dict[int, IntArray] = {}

    def __call__(self, group_id: int) -> IntArray:
        block, row = divmod(group_id, _BLOCK)
        if block not in self._blocks:
            self._blocks[block] = self._make(block)
        row_lengths: IntArray = self._blocks[block][row]
        return row_lengths

    def _make(self, block: int) -> IntArray:
        shape = (_BLOCK, self._members)
        if self._workload.kind == "trace":
            if self._trace is None:
                raise StudyError("workload.trace: missing; kind = 'trace' needs a JSONL file or a run's folder")
            return np.resize(np.roll(self._trace, -block * _BLOCK * self._members), shape)
        raw = self._draw(self._workload, np.random.default_rng((self._seed, block)), shape)
        return np.clip(raw, 1, self._workload.clip).astype(np.int64)


def _lognormal(w: Workload, rng: np.random.Generator, shape: tuple[int, int]) -> npt.NDArray[np.float64]:
    own, shared = rng.standard_normal(shape), rng.standard_normal((shape[0], 1))
    z = np.sqrt(w.correlation) * shared + np.sqrt(1.0 - w.correlation) * own
    return np.asarray(np.exp(w.mu + w.sigma * z))


def _pareto(w: Workload, rng: np.random.Generator, shape: tuple[int, int]) -> npt.NDArray[np.float64]:
    return np.asarray(w.minimum * (1.0 + rng.pareto(w.alpha, shape)))


def _bimodal(w: Workload, rng: np.random.Generator, shape: tuple[int, int]) -> npt.NDArray[np.float64]:
    """By prompt: a hard prompt makes all its members long."""
    hard = rng.random((shape[0], 1)) < w.share
    return np.asarray(_lognormal(w, rng, shape) * np.where(hard, w.factor, 1.0))


def _from_trace(w: Workload, rng: np.random.Generator, shape: tuple[int, int]) -> npt.NDArray[np.float64]:
    raise StudyError("a trace is read, not drawn")


_DRAWS: dict[str, Callable[[Workload, np.random.Generator, tuple[int, int]], npt.NDArray[np.float64]]] = {
    "lognormal": _lognormal,
    "pareto": _pareto,
    "bimodal": _bimodal,
    "trace": _from_trace,
}


def read_trace(path: Path) -> IntArray:
    """Response lengths of a JSONL file: a number a line, or an object with `response_tokens`; or of a run's folder."""
    file = path / "lengths.jsonl" if path.is_dir() else path
    try:
        rows = [json.loads(line) for line in file.read_text().splitlines() if line.strip()]
        lengths = [row["response_tokens"] if isinstance(row, dict) else row for row in rows]
    except (OSError, ValueError, KeyError) as error:
        raise StudyError(f"workload.trace = {str(path)!r}: {error!r}; it needs a length or an object a line") from None
    if not lengths:
        raise StudyError(f"workload.trace = {str(path)!r}: holds no lengths")
    return np.asarray(lengths, np.int64)
