"""`staleflow calibrate` on an engine whose clock is the cost model, disturbed as other programs disturb it."""

from __future__ import annotations

import random
from collections.abc import Iterable

import pytest

from staleflow.config import load
from staleflow.coordination.calibrate import fit
from staleflow.coordination.cost_model import CostModel
from staleflow.engines import calibrate
from staleflow.engines.base import Delta, Request
from staleflow.trajectories.schema import Finish

TRUTH = CostModel(k1=2e-6, k2=2e-3, k3=1e-4, k4=5e-3, k6=1.5e-5)
PROMPT_TOKENS_A_STEP = 512


class Clocked:
    """Computes prompts, some a step, then decodes; `now_s` goes on by what the model says, sometimes by far more."""

    def __init__(self, disturbed: float) -> None:
        self.now_s, self._disturbed, self._rng = 0.0, disturbed, random.Random(1)
        self._waiting: dict[int, Request] = {}
        self._running: dict[int, list[int]] = {}  # tid -> context, tokens to go

    def add(self, request: Request) -> None:
        self._waiting[request.tid] = request

    def step(self) -> list[Delta]:
        room, begun = PROMPT_TOKENS_A_STEP, []
        for tid, request in list(self._waiting.items()):
            if len(request.tokens) > room:
                break
            room -= len(request.tokens)
            begun.append(tid)
            self._running[tid] = [len(request.tokens), request.max_new]
            del self._waiting[tid]
        kv = sum(context for context, _ in self._running.values())
        seconds = TRUTH.step_s(len(self._running), kv) + TRUTH.prefill_s(PROMPT_TOKENS_A_STEP - room)
        self.now_s += seconds * (self._rng.uniform(1.5, 4.0) if self._rng.random() < self._disturbed else 1.0)
        for one in self._running.values():
            one[0], one[1] = one[0] + 1, one[1] - 1
            assert one[1] > 0, "ended while it was measured"
        return [Delta(tid, [7], [0.0], Finish.PARTIAL) for tid in self._running]

    def abort(self, tids: Iterable[int]) -> None:
        for tid in tids:
            self._running.pop(tid, None)

    def busy(self) -> bool:
        return bool(self._running or self._waiting)

    def reset_prefix_cache(self) -> bool:
        return True


def measured(monkeypatch: pytest.MonkeyPatch, disturbed: float, shared: bool = False) -> calibrate.Calibration:
    engine = Clocked(disturbed)
    monkeypatch.setattr(calibrate.time, "perf_counter", lambda: engine.now_s)
    return fit(*calibrate.measure(engine, load("configs/demo.toml", ["rollout.max_running=32"]), shared))


@pytest.mark.parametrize("disturbed", [0.0, 0.4])
def test_coefficients_are_found_although_other_programs_run(monkeypatch: pytest.MonkeyPatch, disturbed: float) -> None:
    found = measured(monkeypatch, disturbed)
    assert found.held_out_median_error < 0.05
    for n, kv in ((1, 50), (8, 400), (32, 1500)):
        assert found.model.step_s(n, kv) == pytest.approx(TRUTH.step_s(n, kv), rel=0.08)
    assert found.model.k6 == pytest.approx(TRUTH.k6, rel=0.25)


def test_on_shared_cores_what_others_take_counts(monkeypatch: pytest.MonkeyPatch) -> None:
    alone, shared = (measured(monkeypatch, 0.4, shared).model.step_s(8, 400) for shared in (False, True))
    assert shared > 1.3 * alone
