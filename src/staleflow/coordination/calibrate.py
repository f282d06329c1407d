"""Fit the cost model to measurements of an instance. Pure: what is measured, and how, is the caller's.

    t = k1*kv + max(k2, k3*n) + k4  =  k1*kv + k3*max(n, knee) + k4          with k2 = k3*knee

is linear in k1, k3, k4 for a given knee, so the knee is searched and the rest solved, in relative error (weights 1/t),
with every coefficient >= 0.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import combinations

import numpy as np
import numpy.typing as npt

from staleflow.coordination.cost_model import CostModel

FloatArray = npt.NDArray[np.float64]
FOLDS = 4


@dataclass(frozen=True, slots=True)
class DecodeSample:
    """One measured decode step: trajectories running, tokens in the cache, seconds."""

    n: int
    kv_tokens: int
    seconds: float


@dataclass(frozen=True, slots=True)
class PrefillSample:
    """One measured prefill: tokens computed, tokens found in the cache, seconds beyond a decode step."""

    new_tokens: int
    cached_tokens: int
    seconds: float


@dataclass(frozen=True, slots=True)
class Calibration:
    """The fitted model, and |predicted - measured| / measured on measurements it has not seen."""

    model: CostModel
    held_out_median_error: float
    held_out_samples: int


def fit(
    decode: Sequence[DecodeSample], prefill: Sequence[PrefillSample] = (), source: str = "calibrated"
) -> Calibration:
    """Fit on all decode samples; each is also held out once, with a quarter of the others, to report the error on it.

    Raises ValueError when the samples cannot tell the coefficients apart.
    """
    sizes, contexts = len({s.n for s in decode}), len({s.kv_tokens for s in decode})
    if len(decode) < 8 or sizes < 3 or contexts < 3:
        raise ValueError(f"{len(decode)} decode samples with {sizes} n and {contexts} kv: 8 needed, with 3 of each")
    if any(s.seconds <= 0.0 or s.n < 1 for s in decode):
        raise ValueError("a decode sample with seconds <= 0 or n < 1: measure steps in which something runs")
    errors = _held_out_errors(decode)
    model = _fit_decode(decode)
    k6, k7 = _fit_prefill(prefill)
    final = CostModel(model.k1, model.k2, model.k3, model.k4, k6, k7, source)
    return Calibration(final, float(np.median(errors)), len(errors))


def _held_out_errors(samples: Sequence[DecodeSample]) -> list[float]:
    """Relative errors by cross-validation: quarters drawn at random, each predicted by a fit to the other three."""
    order = np.random.default_rng(0).permutation(len(samples))
    errors = []
    for quarter in range(FOLDS):
        tried = _fit_decode([samples[i] for at, i in enumerate(order) if at % FOLDS != quarter])
        held_out = [samples[i] for at, i in enumerate(order) if at % FOLDS == quarter]
        errors += [abs(tried.step_s(s.n, s.kv_tokens) - s.seconds) / s.seconds for s in held_out]
    return errors


def _fit_decode(samples: Sequence[DecodeSample]) -> CostModel:
    n = np.array([s.n for s in samples], np.float64)
    kv = np.array([s.kv_tokens for s in samples], np.float64)
    t = np.array([s.seconds for s in samples], np.float64)
    best: tuple[float, float, FloatArray] | None = None
    for knee in [0.0, *np.unique(n)]:
        columns = np.stack([kv, np.maximum(n, knee), np.ones_like(n)], axis=1) / t[:, None]
        k, error = _nonnegative(columns, np.ones_like(t))
        if best is None or error < best[0] * (1.0 - 1e-9):
            best = (error, float(knee), k)
    assert best is not None
    _, knee, (k1, k3, k4) = best
    return CostModel(float(k1), float(k3 * knee), float(k3), float(max(k4, 1e-9)))


def _fit_prefill(samples: Sequence[PrefillSample]) -> tuple[float, float]:
    if not samples:
        return 0.0, 0.0
    t = np.array([s.seconds for s in samples], np.float64)  # absolute errors: short ones vanish beside a decode step
    columns = np.array([(s.new_tokens, s.cached_tokens) for s in samples], np.float64)
    k, _ = _nonnegative(columns, t)
    return float(k[0]), float(k[1])


def _nonnegative(columns: FloatArray, target: FloatArray) -> tuple[FloatArray, float]:
    """Least squares with coefficients >= 0 by trying every set of active columns (there are at most three)."""
    width = columns.shape[1]
    best, best_error = np.zeros(width), float(target @ target)
    for size in range(1, width + 1):
        for active in combinations(range(width), size):
            chosen = columns[:, active]
            k = np.linalg.lstsq(chosen, target, rcond=None)[0]
            error = float(np.sum((chosen @ k - target) ** 2))
            if (k >= 0.0).all() and error < best_error:
                best, best_error = np.zeros(width), error
                best[list(active)] = k
    return best, best_error
