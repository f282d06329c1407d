"""The cost model and the length of a Pull, out of traces whose makers are known."""

from __future__ import annotations

import random
from pathlib import Path

import pytest

from staleflow.config import dumps, load
from staleflow.coordination.cost_model import CostModel, load_cost_model
from staleflow.engines.calibrate import main
from staleflow.observe.spans import GENERATE, MAIN, PULL, TRAJECTORIES, Spans
from staleflow.observe.trace import read_traces
from staleflow.simulation.traced import decode_samples, pull_pause_s
from staleflow.trajectories.schema import Finish

TRUE = CostModel(2e-6, 0.0, 5e-4, 0.010)
PROMPT = 6
RUNNING = 16


@pytest.fixture
def run_dir(tmp_path: Path) -> Path:
    config = load("configs/demo.toml", [f'run.dir="{tmp_path}"', f"rollout.max_running={RUNNING}"])
    config.run_dir.mkdir(parents=True)
    (config.run_dir / "config.toml").write_text(dumps(config))
    return config.run_dir


def decode(run_dir: Path, rank: int, steps: int) -> None:
    """An instance whose steps take what `TRUE` says; the number running wanders, pieces end early now and then."""
    spans, rng = Spans(run_dir / "trace", rank, "rollout", instance=rank), random.Random(rank)
    now, target, next_tid = 0.0, RUNNING, rank * 100_000
    running: dict[int, list[float]] = {}  # tid -> begin of its piece, tokens, tokens to come
    for step in range(steps):
        if step % 40 == 0:
            target = rng.randint(1, RUNNING)
        while len(running) < target:
            running[next_tid] = [now, 0, rng.randint(5, 80)]
            next_tid += 1
        now += TRUE.step_s(len(running), sum(PROMPT + tokens for _, tokens, _ in running.values()))
        for tid, piece in list(running.items()):
            piece[1] += 1
            done = piece[1] >= piece[2]
            if done or rng.random() < 0.01:
                facts = {"tid": tid, "version": 0, "tokens": piece[1], "finish": int(Finish.STOP if done else 0)}
                spans.complete("trajectory", int(piece[0] * 1e9), int(now * 1e9), TRAJECTORIES, **facts)
                piece[0] = now
            if done:
                del running[tid]
    spans.close()


def test_the_cost_model_of_a_run_is_found_in_its_traces(
    run_dir: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    for rank in (1, 2):
        decode(run_dir, rank, 2000)
    out = tmp_path / "cost_model.toml"
    assert main([str(run_dir), "--out", str(out)]) == 0
    assert "held out" in capsys.readouterr().out
    found = load_cost_model(out)
    for n, context in ((1, 20), (4, 40), (12, 30), (16, 60)):
        assert found.step_s(n, n * context) == pytest.approx(TRUE.step_s(n, n * context), rel=0.08)


def test_pieces_that_waited_for_a_place_are_left_out(run_dir: Path) -> None:
    decode(run_dir, 1, 200)
    every = decode_samples(read_traces(run_dir), PROMPT, RUNNING)
    some = decode_samples(read_traces(run_dir), PROMPT, 8)
    assert 0 < len(some) < len(every) and all(sample.n <= 8 for sample in some)


def test_what_holds_no_pieces_is_refused(run_dir: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    for folder, why in ((run_dir, "is observe.trace on"), (tmp_path, "holds no config.toml")):
        with pytest.raises(SystemExit) as left:
            main([str(folder), "--out", str(tmp_path / "cost_model.toml")])
        assert left.value.code == 2 and why in capsys.readouterr().err


def test_a_pull_lasts_from_the_last_step_to_the_next_one(run_dir: Path) -> None:
    spans = Spans(run_dir / "trace", 1, "rollout", instance=0)
    moments = [(GENERATE, 0, 100), (PULL, 103, 110), (GENERATE, 115, 200), (PULL, 200, 205), (GENERATE, 208, 300)]
    for name, begin, end in moments:
        spans.complete(name, begin * 1_000_000, end * 1_000_000, MAIN)
    spans.close()
    assert pull_pause_s(read_traces(run_dir)) == pytest.approx((0.015 + 0.008) / 2, abs=1e-6)
