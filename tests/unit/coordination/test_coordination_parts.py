"""Cost model, calibration, and what single decisions of the coordinator promise."""

from __future__ import annotations

import random

import pytest

from staleflow.coordination.calibrate import DecodeSample, PrefillSample, fit
from staleflow.coordination.coordinator import CoordinationError, Coordinator
from staleflow.coordination.cost_model import DEFAULT, CostModel, dump_cost_model, load_cost_model
from staleflow.coordination.ledger import make_ledger
from staleflow.coordination.settings import CoordinationSettings
from staleflow.coordination.types import EVAL_GROUP_BASE, Abort, InstanceInfo, InstanceSnapshot, Pull, Route
from staleflow.trajectories.schema import trajectory_id


def _core(n: int = 2, batch: int = 2, size: int = 2, eta: int = 1, spare: int = 0, **settings: object) -> Coordinator:
    chosen = CoordinationSettings(**settings)  # type: ignore[arg-type]  # keys are the test's
    ledger = make_ledger(chosen.policy, batch_groups=batch, group_size=size, eta=eta, spare_members=spare)
    core = Coordinator(chosen, ledger, DEFAULT, [InstanceInfo(i, 0, 8, 100_000) for i in range(n)])
    core.published(0)
    return core


def _offer(core: Coordinator, groups: int) -> None:
    for group in range(groups):
        core.offer(group, 10, 100)


def _routed(commands: list) -> list[int]:
    return [tid for c in commands if isinstance(c, Route) for tid in c.tids]


def test_nothing_is_routed_before_there_are_parameters() -> None:
    core = _core()
    core._desk.published = -1  # as before the first publication
    _offer(core, 4)
    assert core.cycle(0.0) == []
    core.published(0)
    commands = core.cycle(1.0)
    first = {c.instance: c for c in reversed(commands)}
    assert all(isinstance(c, Pull) and c.version == 0 for c in first.values())
    assert len(_routed(commands)) == 8
    assert [c.id for c in commands] == sorted(c.id for c in commands)


def test_a_batch_comes_out_in_full_and_once() -> None:
    core = _core()
    _offer(core, 4)
    tids = _routed(core.cycle(0.0))
    for tid in tids[:-1]:
        core.finished(tid, 5, 0, 1)
        core.finished(tid, 5, 0, 1)
        core.rewarded(tid, float(tid))
        core.rewarded(tid, 0.0)
    batch = core.next_batch()
    assert batch is not None and batch.step == 0 and len(batch.groups) == 2
    assert all(len(members) == 2 for _, members in batch.groups)
    assert core.next_batch() is None
    waited = core.waiting_for()
    assert [w.tid for w in waited] == tids[-1:] and waited[0].instance is not None


def test_a_failed_prompt_is_given_up_whole() -> None:
    core = _core()
    _offer(core, 4)
    core.cycle(0.0)
    core.failed(trajectory_id(0, 0), "too long")
    assert {r.tid for r in core.drain_released()} == {trajectory_id(0, 0), trajectory_id(0, 1)}
    aborted = [tid for c in core.cycle(1.0) if isinstance(c, Abort) for tid in c.tids]
    assert sorted(aborted) == [trajectory_id(0, 0), trajectory_id(0, 1)]
    core.finished(trajectory_id(0, 1), 9, 0, 1)  # it ended before the Abort arrived: its payload must be freed again
    assert [(r.tid, r.tokens) for r in core.drain_released()] == [(trajectory_id(0, 1), 9)]


def test_spare_members_are_aborted_when_the_group_is_complete() -> None:
    core = _core(size=2, spare=1)
    _offer(core, 1)
    core.cycle(0.0)
    for member in (2, 0):
        core.finished(trajectory_id(0, member), 5, 0, 1)
        core.rewarded(trajectory_id(0, member), 1.0 + member)
    assert [(r.tid, r.reason) for r in core.drain_released()] == [(trajectory_id(0, 1), "redundant")]
    assert any(isinstance(c, Abort) for c in core.cycle(1.0))


def test_a_run_in_which_everything_is_filtered_ends_with_a_reason() -> None:
    core = _core(filter_zero_variance=True, max_filter_rounds=2)
    group = 0
    with pytest.raises(CoordinationError, match="equal rewards"):
        for _ in range(20):
            while core.wanted():
                core.offer(group, 10, 100)
                group += 1
            for tid in _routed(core.cycle(0.0)):
                core.finished(tid, 5, 0, 1)
                core.rewarded(tid, 0.0)


def test_an_instance_with_evaluation_work_is_not_told_to_pull() -> None:
    core = _core(n=1)
    core.cycle(0.0)
    tid = trajectory_id(EVAL_GROUP_BASE, 0)
    core.evaluate([tid], [10], 0)
    core.evaluate([tid], [10], 0)
    assert _routed(core.cycle(1.0)) == [tid] and core.evaluations_outstanding() == 1
    core.published(1)
    assert not any(isinstance(c, Pull) for c in core.cycle(2.0))
    core.finished(tid, 5, 0, 1)
    assert core.evaluations_outstanding() == 0
    assert any(isinstance(c, Pull) for c in core.cycle(3.0))


def test_a_lost_instance_gives_its_work_to_the_others() -> None:
    core = _core(n=2)
    _offer(core, 4)
    commands = core.cycle(0.0)
    mine = [tid for c in commands if isinstance(c, Route) and c.instance == 0 for tid in c.tids]
    core.lost(0, {mine[0]: 7})
    core.lost(0, {})
    assert sorted(_routed(core.cycle(1.0))) == sorted(mine)


def test_a_snapshot_from_before_the_last_one_changes_nothing() -> None:
    core = _core(n=1)
    _offer(core, 1)
    last = core.cycle(0.0)[-1].id
    core.snapshot(InstanceSnapshot(0, 0, last, 2, 0, 40, 100_000), 1.0)
    core.snapshot(InstanceSnapshot(0, -1, 0, 0, 0, 0, 100_000), 2.0)
    (view,) = core.view().instances
    assert (view.version, view.running, view.kv_tokens) == (0, 2, 40)


def test_unknown_names_are_refused_with_those_known() -> None:
    with pytest.raises(ValueError, match="subset"):
        _core(migration="sideways")
    with pytest.raises(ValueError, match="one_step"):
        _core(policy="two_step")


@pytest.mark.parametrize("truth", [DEFAULT, CostModel(2e-6, 0.02, 1e-3, 0.004), CostModel(1e-9, 0.0, 2e-3, 0.01)])
def test_a_fit_recovers_noisy_measurements(truth: CostModel) -> None:
    rng = random.Random(0)
    decode = [
        DecodeSample(n, n * context, truth.step_s(n, n * context) * rng.uniform(0.97, 1.03))
        for n in (1, 2, 4, 8, 16, 32, 64, 128)
        for context in (100, 1000, 5000)
    ]
    prefill = [PrefillSample(n, 100, 3e-4 * n + 1e-6 * 100) for n in (64, 256, 1024)]
    calibration = fit(decode, prefill)
    assert calibration.held_out_median_error < 0.05
    assert calibration.model.k6 == pytest.approx(3e-4, rel=0.05)
    for sample in decode:
        assert calibration.model.step_s(sample.n, sample.kv_tokens) == pytest.approx(sample.seconds, rel=0.12)


def test_a_fit_needs_measurements_that_tell_coefficients_apart() -> None:
    with pytest.raises(ValueError, match="8 needed"):
        fit([DecodeSample(1, 10, 0.1)] * 20)


def test_a_cost_model_survives_its_file(tmp_path) -> None:
    path = tmp_path / "cost_model.toml"
    path.write_text(dump_cost_model(DEFAULT))
    assert load_cost_model(path) == DEFAULT
    path.write_text("k1 = 1.0\nk9 = 2.0\n")
    with pytest.raises(ValueError, match="k9"):
        load_cost_model(path)
