"""The closed form of an engine against decoding step by step."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from staleflow.coordination.cost_model import CostModel
from staleflow.coordination.types import InstanceInfo
from staleflow.simulation.engine import NEVER, Engine, Sample

COST = CostModel(1e-5, 4e-3, 1e-3, 3e-3, 1e-4)


def _engine(capacity: int = 10**9, prefill: bool = False, pull_s: float = 0.0) -> Engine:
    engine = Engine(InstanceInfo(0, 0, 64, capacity), COST, prefill=prefill, pull_s=pull_s)
    engine.pull(0)
    return engine


def _run(engine: Engine) -> dict[int, float]:
    ends = {}
    while (at := engine.next_event_s()) != NEVER:
        engine.advance(at)
        for sample in engine.settle():
            ends[sample.tid] = engine.now_s
    return ends


def _step_by_step(lengths: list[int], prompt: int) -> dict[int, float]:
    left = {i << 16: n for i, n in enumerate(lengths)}
    kv, now_s, ends = prompt * len(lengths), 0.0, {}
    while left:
        # The closed form counts half a step's growth: the cache on the mean over the step.
        now_s += COST.step_s(len(left), kv + 0.5 * len(left))
        kv += len(left)
        for tid in [t for t, n in left.items() if n == 1]:
            ends[tid] = now_s
            kv -= prompt + lengths[tid >> 16]
        left = {t: n - 1 for t, n in left.items() if n > 1}
    return ends


@settings(max_examples=50, deadline=None)
@given(lengths=st.lists(st.integers(1, 200), min_size=1, max_size=12), prompt=st.integers(1, 50))
def test_the_closed_form_decodes_like_single_steps(lengths: list[int], prompt: int) -> None:
    engine = _engine()
    engine.route([Sample(i << 16, prompt, n) for i, n in enumerate(lengths)])
    engine.settle()
    assert _run(engine) == pytest.approx(_step_by_step(lengths, prompt), rel=1e-6, abs=1e-6)


@settings(max_examples=50, deadline=None)
@given(
    lengths=st.lists(st.integers(1, 100), min_size=1, max_size=12),
    capacity=st.integers(20, 400),
    looks=st.lists(st.floats(0.0, 0.3), max_size=10),
)
def test_everything_ends_once_however_small_the_cache(lengths: list[int], capacity: int, looks: list[float]) -> None:
    engine = _engine(capacity, prefill=True)
    engine.route([Sample(i << 16, 5, n) for i, n in enumerate(lengths)])
    done = [s.tid for s in engine.settle()]
    for look_s in looks:  # looking in between changes nothing that counts
        engine.advance(min(engine.now_s + look_s, engine.next_event_s() if engine.running else engine.now_s))
        done += [s.tid for s in engine.settle()]
        assert engine.snapshot(progress=True).kv_tokens <= max(capacity, 105) + len(lengths)
    done += list(_run(engine))
    assert sorted(done) == [i << 16 for i in range(len(lengths))]
    assert not engine.running and not engine.waiting


def test_siblings_share_their_prompt_and_a_pull_computes_contexts_again() -> None:
    engine = _engine(prefill=True, pull_s=2.0)
    paid_s = engine.next_event_s() if engine.running else 2.0
    engine.advance(paid_s)
    engine.route([Sample(7 << 16 | member, 1000, 10) for member in range(4)])
    engine.settle()
    assert engine.prefilled_tokens == 1000
    before_s = engine.next_event_s()
    engine.pull(1)
    assert engine.prefilled_tokens == 2000
    assert engine.next_event_s() == pytest.approx(before_s + 2.0 + 1000 * COST.k6)


def test_what_is_taken_keeps_its_tokens() -> None:
    engine = _engine()
    engine.route([Sample(0, 10, 1000)])
    engine.settle()
    engine.advance(1.0)
    (sample,) = engine.take((0,))
    assert 0 < sample.tokens < 1000
    assert engine.next_event_s() == NEVER
    kept = sample.tokens
    engine.route([sample])
    engine.settle()
    engine.advance(engine.next_event_s())
    assert [s.tokens for s in engine.settle()] == [1000] and kept < 1000
