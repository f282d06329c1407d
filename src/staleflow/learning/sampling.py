"""Is what the engine samples what the trainer differentiates? Pure; for plans, start-up messages and logs."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from staleflow.learning.settings import AlgorithmSettings


def bias_warnings(
    algorithm: AlgorithmSettings,
    *,
    eta: int,
    top_p: float = 1.0,
    top_k: int = 0,
    stop: tuple[str, ...] = (),
    engine_dtype: str | None = None,
    trainer_dtype: str | None = None,
) -> list[str]:
    """What makes this run's gradient other than the policy's, one line each with the remedy; empty if nothing does.

    The engine's log-probabilities are of the full distribution at the sampling temperature. Truncated sampling draws
    from another one, renormalised over what is left, which no weight on those log-probabilities corrects exactly.
    """
    return list(_sampling(top_p, top_k, stop)) + list(_corrections(algorithm, eta, engine_dtype, trainer_dtype))


def warnings_of(config: Any) -> list[str]:
    """`bias_warnings` of a resolved config. Weights that travel in bfloat16 make the engine one of bfloat16."""
    m = config.model
    return bias_warnings(
        config.algorithm,
        eta=config.staleness.eta,
        top_p=config.rollout.top_p,
        top_k=config.rollout.top_k,
        stop=config.rollout.stop,
        engine_dtype="bfloat16" if config.parameters.wire_dtype == "bfloat16" else m.dtype,
        trainer_dtype=m.dtype,
    )


def _sampling(top_p: float, top_k: int, stop: tuple[str, ...]) -> Iterator[str]:
    if top_p < 1.0:
        yield f"rollout.top_p = {top_p}: tokens come from a truncated distribution, log-probabilities do not; set 1.0"
    if top_k:
        yield f"rollout.top_k = {top_k}: tokens come from a truncated distribution, log-probabilities do not; set 0"
    if stop:
        yield (
            f"rollout.stop = {list(stop)}: a response then ends without an end-of-sequence token, and ending is never "
            "trained; prefer a prompt format in which the model ends by itself"
        )


def _corrections(a: AlgorithmSettings, eta: int, engine_dtype: str | None, trainer_dtype: str | None) -> Iterator[str]:
    corrected = a.engine_correction != "none" or a.age_correction != "none"
    if a.proximal == "engine" and corrected:
        yield (
            "algorithm.engine_correction, age_correction: without effect while algorithm.proximal = 'engine', which "
            "already clips around the engine's own log-probabilities; set proximal = 'recompute' or both to 'none'"
        )
    if a.proximal != "engine" and eta > 0 and a.age_correction == "none":
        yield (
            f"algorithm.age_correction = 'none' with staleness.eta = {eta}: tokens of older versions are trained as if "
            "the present policy had sampled them; set 'truncate' or 'mask'"
        )
    if a.proximal == "recompute" and a.updates_per_step == 1 and eta > 0:
        yield (
            f"algorithm.updates_per_step = 1 with proximal = 'recompute' and staleness.eta = {eta}: the policy is its "
            "own proximal policy, no token is ever clipped, and the learning rate alone bounds how far old tokens push "
            "it; set updates_per_step to 2 or more with a lower optimizer.lr, or proximal = 'engine'"
        )
    if a.proximal != "engine" and engine_dtype != trainer_dtype and a.engine_correction == "none":
        yield (
            f"engine in {engine_dtype}, trainer in {trainer_dtype}: their log-probabilities differ at equal weights; "
            "set algorithm.engine_correction = 'truncate'"
        )
    if a.loss == "gspo" and a.aggregation != "sequence_mean":
        yield f"algorithm.aggregation = {a.aggregation!r}: GSPO's objective is the mean over sequences; 'sequence_mean'"
