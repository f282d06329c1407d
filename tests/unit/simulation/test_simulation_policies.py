"""Whole runs in virtual time: the promises of every policy, on workloads of every kind."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from staleflow.coordination.policies import POLICIES
from staleflow.simulation.cli import main
from staleflow.simulation.config import Study, StudyError, Variant, load_study, studies_in
from staleflow.simulation.fluid import fluid_bound
from staleflow.simulation.workload import Lengths
from staleflow.simulation.world import World

STUDIES = studies_in(Path(__file__).parents[3] / "configs" / "studies")
YARDSTICK = next(path for path in STUDIES if path.stem == "yardstick")


def _small(**changes: dict[str, object]) -> tuple[Study, object]:
    """2 instances, 12 groups of 4, tight cache, everything costs."""
    study, cost = load_study(YARDSTICK)
    parts: dict[str, dict[str, object]] = {
        "fleet": {"instances": 2, "max_running": 32, "kv_capacity_tokens": 60_000, "prefill": True},
        "costs": {"command_s": 0.05, "pull_s": 2.0, "push_s": 3.0, "reward_s": 1.0, "train_s": 60.0},
        "workload": {"clip": 4000, "mu": 6.5},
        "staleness": {"batch_groups": 12, "group_size": 4},
        "run": {"steps": 8, "warmup": 2, "seeds": 1},
    }
    for key, value in changes.items():
        parts.setdefault(key, {}).update(value)
    update = {key: getattr(study, key).model_copy(update=value) for key, value in parts.items()}
    return study.model_copy(update=update), cost


@pytest.mark.parametrize("eta", [0, 1, 3])
@pytest.mark.parametrize("policy", POLICIES)
def test_a_policy_keeps_what_it_promises(policy: str, eta: int) -> None:
    study, cost = _small()
    out = World(study, cost, Variant(name=policy, policy=policy), eta, 0).run()
    bound = {"sync": 0, "one_step": 1}.get(policy, eta)
    if policy != "pace":
        assert out.staleness_max <= bound
    if policy != "drop":
        assert out.wasted == 0.0
    assert len(out.steps) == 8 and 0.0 <= out.trainer_idle < 1.0


def test_eta_zero_is_synchronous_and_more_eta_is_never_slower() -> None:
    study, cost = _small()
    steps = [World(study, cost, Variant(name="x"), eta, 0).run().step_s for eta in (0, 1, 3)]
    assert steps[0] > steps[1] > 0.99 * steps[2]


@pytest.mark.parametrize("kind", ["lognormal", "pareto", "bimodal"])
def test_lengths_are_the_same_for_a_seed_and_inside_the_clip(kind: str) -> None:
    study, _ = _small(workload={"kind": kind, "minimum": 200, "correlation": 0.5})
    one, two, other = (Lengths(study.workload, 4, seed) for seed in (1, 1, 2))
    assert (one(5) == two(5)).all() and any((one(g) != other(g)).any() for g in range(4))
    assert all(1 <= n <= 4000 for g in range(50) for n in one(g))


def test_a_trace_is_replayed(tmp_path: Path) -> None:
    trace = tmp_path / "lengths.jsonl"
    trace.write_text('5\n{"response_tokens": 7}\n9\n')
    study, cost = _small(workload={"kind": "trace", "trace": trace})
    assert list(Lengths(study.workload, 4, 0)(0)) == [5, 7, 9, 5]
    World(study, cost, Variant(name="x"), 1, 0).run()
    trace.write_text("{}\n")
    with pytest.raises(StudyError, match="trace"):
        Lengths(study.workload, 4, 0)


def test_redundancy_wastes_and_says_so() -> None:
    study, cost = _small()
    out = World(study, cost, Variant(name="x", spare_members=1, spare_groups=2), 1, 0).run()
    assert out.wasted > 0.0 and set(out.discarded_tokens) <= {"redundant", "surplus"}
    assert out.staleness_max <= 1


@pytest.mark.parametrize("path", STUDIES, ids=lambda path: path.stem)
def test_a_shipped_study_is_valid(path: Path) -> None:
    study, cost = load_study(path)
    assert study.run.seeds >= 5
    fluid = fluid_bound(study, cost)
    assert fluid.tokens_per_s > 0.0
    for variant in study.variants:
        study.settings(variant)


def test_no_policy_with_the_bound_beats_the_fluid_bound() -> None:
    study, cost = _small()
    fluid = fluid_bound(study, cost)
    out = World(study, cost, Variant(name="x"), 3, 0).run()
    assert out.step_s >= 0.99 * fluid.step_tokens / fluid.tokens_per_s


def test_the_command_line_prints_one_json_object(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    assert main([str(YARDSTICK), "--policies", "sync", "--seeds", "1", "--steps", "8", "--json"]) == 0
    out = json.loads(capsys.readouterr().out)
    (row,) = out["rows"]
    assert row["policy"] == "sync" and 700.0 < row["step_s"] < 1000.0 and row["staleness_max"] == 0
    assert main([str(YARDSTICK), "--policies", "sync", "--steps", "4"]) == 2
    assert "warmup" in capsys.readouterr().err
    assert main([str(YARDSTICK), "--policies", "nobody"]) == 2
    assert "nobody" in capsys.readouterr().err
    (tmp_path / "x.toml").write_text('name = "x"\n[fleet]\ninstanzes = 3\n')
    assert main([str(tmp_path / "x.toml")]) == 2
    assert "instanzes" in capsys.readouterr().err
