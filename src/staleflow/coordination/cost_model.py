"""How long one decode step of one instance takes (paper's cost model), with prefill, which the paper leaves out.

    t = k1 * kv + max(k2, k3 * n) + k4            seconds per decode step; n running, kv tokens of KV cache in use
    p = k6 * new + k7 * cached                    seconds of prefill: tokens computed, tokens found in the prefix cache

Throughput is n / t tokens/s. A running trajectory of context length l adds l to kv.
"""

from __future__ import annotations

import tomllib
from dataclasses import asdict, dataclass, fields
from pathlib import Path


@dataclass(frozen=True, slots=True)
class CostModel:
    """Coefficients in seconds; `source` says where they come from."""

    k1: float
    k2: float
    k3: float
    k4: float
    k6: float = 0.0
    k7: float = 0.0
    source: str = ""

    def __post_init__(self) -> None:
        for name in ("k1", "k2", "k3", "k4", "k6", "k7"):
            value = getattr(self, name)
            if not 0.0 <= value < float("inf"):
                raise ValueError(f"cost model: {name} = {value!r} must be a finite number >= 0; calibrate again")
        if self.k2 + self.k4 <= 0.0:
            raise ValueError("cost model: k2 + k4 = 0, a decode step would cost nothing; calibrate again")

    def step_s(self, n: int, kv_tokens: float) -> float:
        """Seconds of one decode step with `n` running and `kv_tokens` in the cache."""
        return self.k1 * kv_tokens + max(self.k2, self.k3 * n) + self.k4

    def throughput(self, n: int, kv_tokens: float) -> float:
        """Tokens per second of the instance; 0 when nothing runs."""
        return n / self.step_s(n, kv_tokens) if n else 0.0

    def gain(self, n: int, kv_tokens: float, context_tokens: float) -> float:
        """Tokens per second that one more trajectory of this context adds (paper's marginal gain)."""
        return self.throughput(n + 1, kv_tokens + context_tokens) - self.throughput(n, kv_tokens)

    def prefill_s(self, new_tokens: float, cached_tokens: float = 0.0) -> float:
        return self.k6 * new_tokens + self.k7 * cached_tokens


# A stand-in when nothing was calibrated: Qwen2.5-14B on one device (configs/cost_models/qwen_14b_tp1.toml).
DEFAULT = CostModel(1.165e-7, 7.40e-3, 2.441e-4, 6.87e-3, 2.441e-4, 0.0, "published coefficients, Qwen 14B TP1")


def load_cost_model(path: Path | str) -> CostModel:
    """Read a cost_model.toml. Raises ValueError naming the key."""
    raw = tomllib.loads(Path(path).read_text())
    known = {field.name for field in fields(CostModel)}
    unknown, missing = set(raw) - known, {"k1", "k2", "k3", "k4"} - set(raw)
    if unknown or missing:
        fault = f"unknown {sorted(unknown)}" if unknown else f"missing {sorted(missing)}"
        raise ValueError(f"{path}: {fault}; a cost model has {sorted(known)}")
    return CostModel(**raw)


def dump_cost_model(model: CostModel) -> str:
    """TOML text that `load_cost_model` reads back."""
    lines = [f"{key} = {value!r}" if key != "source" else f'source = "{value}"' for key, value in asdict(model).items()]
    return "\n".join(lines) + "\n"
