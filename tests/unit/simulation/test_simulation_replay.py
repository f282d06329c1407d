"""A run's folder, written by hand, simulated again."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from staleflow.config import dumps, load
from staleflow.coordination.types import EVAL_GROUP_BASE
from staleflow.observe.spans import TRAJECTORIES, Spans
from staleflow.simulation.cli import main
from staleflow.simulation.config import StudyError
from staleflow.simulation.replay import RecordedLengths, recorded_lengths, replay
from staleflow.trajectories.schema import Finish, trajectory_id

STEPS, TOKENS, STEP_MS = 10, 50, 20.0
SETTINGS = [
    f"run.steps={STEPS}",
    "rollout.engine=scripted",
    f"rollout.step_ms={STEP_MS}",
    "rollout.instances=2",
    "rollout.max_running=64",
    "staleness.batch_groups=4",
    "staleness.group_size=4",
    "coordination.policy=sync",
    "coordination.cycle_ms=10",
]


@pytest.fixture
def run_dir(tmp_path: Path) -> Path:
    """`sync`, every response 50 tokens of 20 ms, then a second of training: a step takes 2 s and what messages take."""
    config = load("configs/demo.toml", [f'run.dir="{tmp_path}"', *SETTINGS])
    config.run_dir.mkdir(parents=True)
    (config.run_dir / "config.toml").write_text(dumps(config))
    line = {"train_s": 1.0, "step_s": 2.1, "trained_tokens": 16 * TOKENS, "pull_s": 0.01, "publish_s": 0.01}
    metrics = [json.dumps({"step": step} | line) for step in range(STEPS)]
    (config.run_dir / "metrics.jsonl").write_text("\n".join(metrics) + "\n")
    return config.run_dir


def note(run_dir: Path, ended: list[tuple[int, int, int, Finish]]) -> None:
    """The trace of an instance on which these (group, member, tokens, finish) left."""
    spans = Spans(run_dir / "trace", 2, "rollout", instance=0)
    for group, member, tokens, finish in ended:
        facts = {"tid": trajectory_id(group, member), "version": 0, "tokens": tokens, "finish": int(finish)}
        spans.complete("trajectory", 0, 1000, TRAJECTORIES, **facts)
    spans.close()


def test_the_simulated_throughput_is_that_of_the_run(run_dir: Path, capsys: pytest.CaptureFixture[str]) -> None:
    note(run_dir, [(group, member, TOKENS, Finish.STOP) for group in range(40) for member in range(4)])
    found = replay(run_dir)
    assert (found.policy, found.steps) == ("sync", STEPS - 4)
    assert found.real_tokens_per_s == pytest.approx(16 * TOKENS / 2.1)
    assert found.ratio == pytest.approx(1.0, abs=0.1)
    assert main([str(run_dir), "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["ratio"] == pytest.approx(found.ratio)


def test_lengths_are_those_of_what_was_finished(run_dir: Path) -> None:
    interrupted, evaluation = (0, 1, 3, Finish.PARTIAL), (EVAL_GROUP_BASE, 0, 7, Finish.STOP)
    note(run_dir, [(0, 0, 5, Finish.STOP), interrupted, (0, 1, 9, Finish.LENGTH), evaluation])
    recorded = recorded_lengths(run_dir)
    assert recorded == {(0, 0): 5, (0, 1): 9}
    lengths = RecordedLengths(recorded, 2)
    assert list(lengths(0)) == [5, 9] and set(lengths(7)) <= {5, 9}


def test_what_cannot_be_replayed_is_refused(run_dir: Path, tmp_path: Path) -> None:
    with pytest.raises(StudyError, match="no finished trajectory"):
        replay(run_dir)
    with pytest.raises(StudyError, match=r"holds no config\.toml"):
        replay(tmp_path)
    (run_dir / "metrics.jsonl").write_text("")
    with pytest.raises(StudyError, match="0 steps"):
        replay(run_dir)
