"""Metrics, the live view and the logs, as people and tools meet them."""

from __future__ import annotations

import io
import json
import subprocess
import sys
import textwrap
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from staleflow.observe import live, logs
from staleflow.observe.metrics import SUMMARY_KEYS, MetricsWriter, read_metrics, write_summary

STATE = live.LiveState(
    run="demo",
    step=3,
    steps=10,
    elapsed_s=75.2,
    reward=0.4375,
    tokens_per_s=812.0,
    trainer_idle=0.21,
    staleness={0: 3, 2: 1},
    instances=(live.InstanceState(0, 3, 12, 1, 0.5), live.InstanceState(1, -1, 0, 0, 0.0)),
    waiting_for="2 groups on instance 1",
)


def test_a_line_a_step_is_there_at_once(tmp_path: Path) -> None:
    writer = MetricsWriter(tmp_path, tensorboard=False)
    writer.write(0, {"reward": np.float32(0.5), "age": {0: 3, 1: 2}, "note": None})
    assert read_metrics(tmp_path) == [{"step": 0, "reward": 0.5, "age": {"0": 3, "1": 2}, "note": None}]
    writer.close()
    writer.close()


def test_a_number_that_broke_is_null_and_named(tmp_path: Path) -> None:
    writer = MetricsWriter(tmp_path, tensorboard=False)
    writer.write(1, {"loss": float("nan"), "kl": {"mean": float("inf")}, "reward": 1})
    writer.close()
    line = json.loads((tmp_path / "metrics.jsonl").read_text(), parse_constant=pytest.fail)
    assert line == {"step": 1, "loss": None, "kl": {"mean": None}, "reward": 1, "non_finite": ["loss", "kl.mean"]}


def test_a_resume_moves_undone_steps_aside_and_drops_a_torn_line(tmp_path: Path) -> None:
    first = MetricsWriter(tmp_path, tensorboard=False)
    for step in range(5):
        first.write(step, {"try": 1})
    first.close()
    with (tmp_path / "metrics.jsonl").open("a") as out:
        out.write('{"step": 5, "tr')
    second = MetricsWriter(tmp_path, tensorboard=False, from_step=3)
    second.write(3, {"try": 2})
    second.close()
    assert [(line["step"], line["try"]) for line in read_metrics(tmp_path)] == [(0, 1), (1, 1), (2, 1), (3, 2)]
    undone = (tmp_path / "metrics.undone.jsonl").read_text().splitlines()
    assert [json.loads(line)["step"] for line in undone] == [3, 4]


def test_tensorboard_gets_the_numbers(tmp_path: Path) -> None:
    pytest.importorskip("tensorboard")
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    for start in (0, 0, 2):  # from scratch, from scratch again, and a resume
        writer = MetricsWriter(tmp_path, from_step=start)
        for step in range(start, start + 4):
            writer.write(step, {"reward": step / 10 + start, "age": {0: 3}, "policy": "staleflow"})
        writer.close()
    board = EventAccumulator(str(tmp_path / "tb"))
    board.Reload()
    assert sorted(board.Tags()["scalars"]) == ["age/0", "reward"]
    assert [event.step for event in board.Scalars("reward")] == [0, 1, 2, 3, 4, 5]


def summary(**changes: Any) -> dict[str, Any]:
    return {**dict.fromkeys(SUMMARY_KEYS, 0), "status": "completed", **changes}


def test_the_summary_holds_what_was_promised(tmp_path: Path) -> None:
    path = write_summary(tmp_path, summary(staleness_histogram={0: 5}, logprob_gap=None, accuracy_after=0.5))
    read = json.loads(path.read_text())
    assert read["staleness_histogram"] == {"0": 5}
    assert read["logprob_gap"] is None
    assert [file.name for file in tmp_path.iterdir()] == ["summary.json"]
    with pytest.raises(ValueError, match="status 'done'"):
        write_summary(tmp_path, summary(status="done"))
    incomplete = summary()
    del incomplete["pull_s"]
    with pytest.raises(ValueError, match="missing pull_s"):
        write_summary(tmp_path, incomplete)


def test_without_a_terminal_there_is_one_line_a_step() -> None:
    out = io.StringIO()
    view = live.open_view("auto", out)
    for step in (0, 1, 1, 1, 2):
        view.update(live.LiveState("demo", step, 2, 1.0, reward=0.5))
    view.note("done")
    view.close()
    assert out.getvalue().splitlines() == ["step 1/2  reward 0.5  0:01", "step 2/2  reward 0.5  0:01", "done"]


def test_the_line_says_what_the_trainer_waits_for() -> None:
    assert live.step_line(STATE) == (
        "step 3/10  reward 0.438  tokens/s 812  age 0:3 2:1  versions 3 -1  idle 21%  "
        "waits for 2 groups on instance 1  1:15"
    )


def test_the_terminal_view_shows_the_same_facts() -> None:
    out = io.StringIO()
    view = live.open_view("always", out)
    view.update(STATE)
    view.note("[not markup]")
    view.close()
    view.close()
    for fact in ("step 3 of 10", "0.438", "812", "75%", "2 groups on instance 1", "KV use", "50%", "[not markup]"):
        assert fact in out.getvalue()


def test_small_pictures() -> None:
    assert live.sparkline([0.0, 0.5, 1.0]) == "▁▅█"
    assert (live.sparkline([]), live.histogram_line({})) == ("", "")
    assert live.histogram_line({1: 1, 0: 3}) == "0 █████████ 75%  1 ███ 25%"
    with pytest.raises(ValueError, match=r"observe\.live"):
        live.open_view("sometimes")


def test_plain_lines_do_not_import_rich() -> None:
    program = """
        import io, sys
        from staleflow.observe.live import open_view
        open_view("auto", io.StringIO())
        assert "rich" not in sys.modules
    """
    subprocess.run([sys.executable, "-c", textwrap.dedent(program)], check=True)


def test_a_rank_log_takes_everything_and_gives_it_back(tmp_path: Path) -> None:
    program = f"""
        import logging, os, pathlib
        from staleflow.observe.logs import RankLog
        log = RankLog(pathlib.Path({str(tmp_path)!r}) / "attempt_0", 2, "rollout")
        print("from python")
        os.write(2, b"from C\\n")
        logging.getLogger("engine").warning("from a library")
        print("for people", file=log.console)
        log.close()
        log.close()
        print("after")
    """
    done = subprocess.run([sys.executable, "-c", textwrap.dedent(program)], capture_output=True, text=True, check=True)
    assert (done.stdout, done.stderr) == ("for people\nafter\n", "")
    text = (tmp_path / "attempt_0" / "rank_2.rollout.log").read_text()
    for line in ("from python\n", "from C\n", "rank 2 rollout WARNING engine: from a library\n"):
        assert line in text


def test_attempts_are_counted(tmp_path: Path) -> None:
    assert logs.next_attempt(tmp_path) == 0
    for name in ("attempt_0", "attempt_10", "attempt_x"):
        (tmp_path / name).mkdir()
    assert logs.next_attempt(tmp_path) == 11


def test_only_the_first_failure_counts(tmp_path: Path) -> None:
    assert logs.first_failure(tmp_path) is None
    with ThreadPoolExecutor(8) as ranks:
        won = list(ranks.map(lambda rank: logs.record_failure(tmp_path, rank, "rollout", f"lost\n{rank}"), range(8)))
    assert won.count(True) == 1
    first = logs.first_failure(tmp_path)
    assert first is not None
    assert (first.rank, first.error) == (won.index(True), f"lost {won.index(True)}")
    assert [path.name for path in tmp_path.iterdir()] == ["first_failure.json"]


def test_a_failure_is_told_in_one_line_and_its_traceback_is_in_the_log(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    try:
        raise RuntimeError("no room")
    except RuntimeError as error:
        logs.record_failure(tmp_path, 3, "trainer", error)
    assert "Traceback" in capsys.readouterr().err
    first = logs.first_failure(tmp_path)
    assert first is not None
    assert first.line(tmp_path) == (
        f"rank 3 (trainer) failed first: RuntimeError: no room (log: {tmp_path}/rank_3.trainer.log)"
    )
    told = logs.Failure(1, "rollout", "killed by signal 9", 0.0, reported_by=0).line(tmp_path)
    assert "rank 1 (rollout) failed first, as seen by rank 0: killed by signal 9" in told
