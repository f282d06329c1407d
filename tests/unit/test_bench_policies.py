"""What `staleflow bench policies` makes of runs that have ended; running them is the bench itself."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from staleflow.benches.policies import _against, _completed, _row, averaged, measured
from staleflow.config import load
from staleflow.coordination.cost_model import CostModel
from staleflow.observe.spans import TRAJECTORIES, Spans
from staleflow.trajectories.schema import Finish, trajectory_id


def test_columns_come_from_what_a_run_leaves_without_its_first_steps(tmp_path: Path) -> None:
    config = load("configs/demo.toml", [f'run.dir="{tmp_path}"', "staleness.eta=1", "staleness.group_size=2"])
    spans = Spans(config.run_dir / "trace", 2, "rollout", instance=0)
    for group in range(6):
        for member in range(2):
            facts = {"tid": trajectory_id(group, member), "tokens": 10, "finish": int(Finish.STOP)}
            spans.complete("trajectory", 0, 1000, TRAJECTORIES, **facts)
    spans.close()
    slow, steady = {"step_s": 9.0, "train_s": 1.0}, {"step_s": 2.0, "train_s": 1.5}
    lines = [{"step": step, "trained_tokens": 40} | (slow if step < 3 else steady) for step in range(6)]
    (config.run_dir / "metrics.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    summary = {
        "staleness_histogram": {"0": 3, "1": 9}, "max_staleness": 1, "rollout_busy_fraction": 0.5,
        "discarded_tokens": {"failed": 30}, "generated_tokens": 300, "trained_tokens": 108, "trained_trajectories": 12,
        "migrations": 0, "pulls": 4,
    }  # fmt: skip
    (config.run_dir / "summary.json").write_text(json.dumps(summary))
    found = measured(config.run_dir, config)
    assert (found["step_s"], found["tokens_per_s"], found["trainer_idle"]) == (2.0, 20.0, 0.25)
    assert (found["waste"], found["staleness_mean"], found["length_bias"]) == (0.1, 0.75, pytest.approx(0.9))


def test_resumed_it_runs_again_only_what_did_not_complete(tmp_path: Path) -> None:
    assert not _completed(tmp_path)
    for status in ("failed", "completed"):
        (tmp_path / "summary.json").write_text(json.dumps({"status": status}))
        assert _completed(tmp_path) == (status == "completed")


def test_a_difference_within_the_spread_does_not_count() -> None:
    def row(policy: str, *tokens_per_s: float) -> dict[str, object]:
        return _row(policy, [{"tokens_per_s": t, "step_s": 1.0, "staleness_max": 2.0} for t in tokens_per_s])

    rows = [row("staleflow", 110.0, 120.0), row("wait", 100.0, 118.0), row("sync", 50.0, 52.0), row("pace", 1.0, 1.0)]
    assert [(one["policy"], one["beyond_spread"]) for one in _against(rows)] == [("wait", False), ("sync", True)]
    assert next(_against(rows))["ratio"] == pytest.approx(115.0 / 109.0)


def test_engines_measured_at_once_count_with_their_mean() -> None:
    one = averaged([CostModel(1e-6, 0.0, 1e-4, 1e-3), CostModel(3e-6, 0.0, 3e-4, 3e-3)])
    assert (one.k1, one.k3, one.k4) == pytest.approx((2e-6, 2e-4, 2e-3)) and "2 calibrations" in one.source
