"""Lost, and gone on with other numbers of trainer and rollout ranks; what was evaluated on the way, and the best."""

from __future__ import annotations

from pathlib import Path

import pytest

from staleflow.checkpoint import export, layout
from tests.fault.checkpoint.lost import (
    attempts,
    equal,
    kill_everything,
    launch,
    metrics,
    rehearse,
    remains,
    settings,
    weights,
)
from tests.job.harness import Task

pytestmark = [pytest.mark.dist, pytest.mark.slow]
STEPS = 8


@pytest.mark.timeout(600)
def test_more_trainers_and_fewer_instances_go_on_from_the_same_weights(task: Task, tmp_path: Path) -> None:
    evaluated = {"evaluation__every_steps": 2, "evaluation__samples": 2, "evaluation__temperature": 1.0}
    changes = settings(STEPS, eta=1, checkpoint__keep=1, **evaluated)
    job = launch(task, tmp_path, **changes)
    job.until_step(3)
    kill_everything(job)
    left = remains(job.run_dir)
    assert left.version >= 2
    saved = weights(job.run_dir, left.version)
    _, kept = rehearse(job.run_dir, tmp_path / "rehearsal")
    assert not {key for key in left.finished if kept.get(key) != left.finished[key]}

    again = launch(task, tmp_path, **changes | {"trainer__ranks": 2, "rollout__instances": 1})
    assert again.wait(280) == 0, again.output
    run_dir = again.run_dir
    assert attempts(run_dir) == 2
    assert equal(weights(run_dir, left.version), saved), "the second attempt begins with other weights"
    assert not equal(weights(run_dir, STEPS), saved)
    lines = metrics(run_dir)
    assert [line["step"] for line in lines] == list(range(STEPS))
    assert sorted(prompt for line in lines for prompt in line["prompts"]) == list(range(4 * STEPS))
    _every_evaluation_is_there_once(again.summary["evaluations"], left.version)
    _the_best_is_kept_and_exported(run_dir, again.summary["evaluations"], tmp_path / "exported")


def _every_evaluation_is_there_once(evaluations: list[dict[str, float]], resumed_from: int) -> None:
    versions = [int(one["version"]) for one in evaluations]
    assert len(set(versions)) == len(versions)
    assert set(range(resumed_from, STEPS + 1, 2)) <= set(versions)
    assert all(one["version"] <= one["newest_version"] for one in evaluations)


def _the_best_is_kept_and_exported(run_dir: Path, evaluations: list[dict[str, float]], out: Path) -> None:
    found = layout.best(run_dir)
    assert found is not None
    place, mean = found
    assert place in layout.complete(run_dir)
    last = next(one for one in evaluations if one["version"] == STEPS)
    assert mean >= last["mean"]
    assert mean in [one["mean"] for one in evaluations if one["version"] == layout.version_of(place)]
    assert export.main([str(run_dir), str(out), "--best"]) == 0
    assert (out / "model.safetensors").exists()
