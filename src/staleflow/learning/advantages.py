"""Group-relative advantages. Pure numpy: (rewards [G, N]) -> advantages [G, N], float64 in, float32 out.

G groups of N trajectories each; a group shares its prompt.
"""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import numpy.typing as npt

Array = npt.NDArray[np.float32]
_EPS = 1e-6


def _rewards(rewards: npt.ArrayLike) -> npt.NDArray[np.float64]:
    r = np.asarray(rewards, np.float64)
    if r.ndim != 2 or r.shape[1] < 2:
        raise ValueError(f"rewards of shape {r.shape}: group-relative advantages need [groups, members >= 2]")
    return r


def _divided(centred: npt.NDArray[np.float64], std: npt.NDArray[np.float64]) -> Array:
    """Zero where nothing varies: dividing rounding noise by its own size would make a signal of it."""
    return np.where(std > _EPS, centred / np.maximum(std, _EPS), 0.0).astype(np.float32)


def grpo(rewards: npt.ArrayLike) -> Array:
    """(r - mean of the group) / standard deviation of the group (sample, N-1). DeepSeekMath, eq. in 4.1.2."""
    r = _rewards(rewards)
    return _divided(r - r.mean(1, keepdims=True), r.std(1, ddof=1, keepdims=True))


def dr_grpo(rewards: npt.ArrayLike) -> Array:
    """r - mean of the group: no division, so that easy and hard groups weigh the same (Dr. GRPO)."""
    r = _rewards(rewards)
    return (r - r.mean(1, keepdims=True)).astype(np.float32)


def rloo(rewards: npt.ArrayLike) -> Array:
    """r - mean of the *other* members (leave one out), which is N/(N-1) times Dr. GRPO's."""
    r = _rewards(rewards)
    n = r.shape[1]
    return (r - (r.sum(1, keepdims=True) - r) / (n - 1)).astype(np.float32)


def reinforce_pp(rewards: npt.ArrayLike) -> Array:
    """(r - mean of the batch) / standard deviation of the batch: one baseline for all (REINFORCE++)."""
    r = _rewards(rewards)
    return _divided(r - r.mean(), r.std(ddof=1, keepdims=True))


def reinforce_pp_baseline(rewards: npt.ArrayLike) -> Array:
    """Group mean as baseline, then divided by the standard deviation over the batch (REINFORCE++-baseline)."""
    r = _rewards(rewards)
    centred = r - r.mean(1, keepdims=True)
    return _divided(centred - centred.mean(), centred.std(ddof=1, keepdims=True))


ADVANTAGES: dict[str, Callable[[npt.ArrayLike], Array]] = {
    "grpo": grpo,
    "dr_grpo": dr_grpo,
    "rloo": rloo,
    "reinforce_pp": reinforce_pp,
    "reinforce_pp_baseline": reinforce_pp_baseline,
}


def overlong_penalties(
    response_tokens: npt.ArrayLike, *, max_tokens: int, buffer_tokens: int, penalty: float = 1.0
) -> Array:
    """DAPO's soft overlong punishment, to be added to the rewards: 0 up to `max_tokens - buffer_tokens`, then linear.

    Reaches `-penalty` at `max_tokens` (eq. 13).
    """
    if not 0 < buffer_tokens <= max_tokens:
        raise ValueError(f"buffer_tokens = {buffer_tokens}: must be in 1..max_tokens = {max_tokens}")
    into_buffer = np.asarray(response_tokens, np.float64) - (max_tokens - buffer_tokens)
    return (-penalty * np.clip(into_buffer / buffer_tokens, 0, 1)).astype(np.float32)
