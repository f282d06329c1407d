"""The reward pool: what is scored, what fails, what is killed, and that nothing is left behind."""

from __future__ import annotations

import os
import select
import signal
import subprocess
import sys
import textwrap
import time
from pathlib import Path

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from staleflow.rewards.pool import RewardPool, RewardResult, RewardSample, RewardSpec, RewardTerm

GRADERS = textwrap.dedent(
    """
    import os, signal, sys, time

    def length(sample, unit=1):
        print("a grader may print")
        return len(sample.response) / unit

    def moody(sample):
        if sample.response == "hang":
            while True:
                pass
        if sample.response == "crash":
            os.kill(os.getpid(), signal.SIGSEGV)
        if sample.response == "raise":
            raise KeyError("no such thing")
        if sample.response == "nan":
            return float("nan")
        if sample.response == "torch":
            return float("torch" in sys.modules)
        if sample.response == "once" and not os.path.exists(sample.reference["mark"]):
            open(sample.reference["mark"], "w").close()
            os._exit(3)
        return 1.0

    def deaf(sample):
        signal.signal(signal.SIGTERM, signal.SIG_IGN)
        if os.fork() == 0:
            time.sleep(60)
        time.sleep(60)
    """
)


@pytest.fixture
def graders(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> str:
    (tmp_path / "graders_for_test.py").write_text(GRADERS)
    monkeypatch.syspath_prepend(str(tmp_path))
    return "graders_for_test"


def sample(response: str, answer: object = "", *, truncated: bool = False, **reference: object) -> RewardSample:
    return RewardSample("prompt", response, truncated, {"answer": answer, **reference})


def collect(pool: RewardPool, count: int, limit_s: float = 20.0) -> dict[int, RewardResult]:
    """Wait as a role's loop does: on the descriptor alone."""
    results: dict[int, RewardResult] = {}
    end_s = time.monotonic() + limit_s
    while len(results) < count:
        assert time.monotonic() < end_s, f"only {len(results)} of {count} results"
        select.select([pool], [], [], 5.0)
        for result in pool.poll():
            assert result.tid not in results
            results[result.tid] = result
    return results


def test_exact_match_is_scored_in_submit_without_any_process() -> None:
    with RewardPool(RewardSpec("exact_match", {"extract": "after:="})) as pool:
        pool.submit(1, sample("1+1=2", "2"))
        pool.submit(2, sample("1+1=3", "2"))
        pool.submit(3, sample("1+1=2", "2", truncated=True))
        assert pool.pending() == 3
        assert select.select([pool], [], [], 0)[0] == [pool]
        assert {result.tid: result.reward for result in pool.poll()} == {1: 1.0, 2: 0.0, 3: 0.0}
        assert (pool.pending(), select.select([pool], [], [], 0)[0]) == (0, [])


def test_a_missing_reference_is_a_failure_and_not_a_zero() -> None:
    with RewardPool(RewardSpec("exact_match")) as pool:
        pool.submit(1, RewardSample("p", "r", False, {}))
        (result,) = pool.poll()
    assert result.reward is None
    assert "answer_field" in str(result.error)


def test_a_pattern_runs_in_a_child_and_a_pattern_that_explodes_is_a_failure() -> None:
    spec = RewardSpec("exact_match", {"pattern": r"(a+)+$"}, workers=1, timeout_s=0.3, retries=0)
    with RewardPool(spec) as pool:
        pool.submit(1, sample("aaa", "aaa"))
        pool.submit(2, sample("a" * 40 + "!", "aaa"))
        results = collect(pool, 2)
    assert results[1].reward == 1.0
    assert results[2].reward is None
    assert "0.3 s" in str(results[2].error)


def test_hang_crash_exception_and_nan_fail_and_the_others_are_scored(graders: str) -> None:
    spec = RewardSpec("python", {"function": f"{graders}:moody"}, workers=2, timeout_s=0.4, retries=1)
    words = ["fine", "hang", "fine", "crash", "raise", "nan", "fine", "torch"]
    with RewardPool(spec) as pool:
        for tid, word in enumerate(words):
            pool.submit(tid, sample(word))
        results = collect(pool, len(words))
        assert pool.pending() == 0
    assert [results[tid].reward for tid in (0, 2, 6)] == [1.0, 1.0, 1.0]
    assert results[7].reward == 0.0, "a worker must not import torch"
    for tid, said in ((1, "longer than"), (3, "signal 11"), (4, "KeyError"), (5, "nan")):
        assert results[tid].reward is None
        assert said in str(results[tid].error)
    assert results[1].seconds >= 0.8, "a hung sample is tried again"


def test_a_crash_that_does_not_repeat_is_scored_at_the_second_attempt(graders: str, tmp_path: Path) -> None:
    with RewardPool(RewardSpec("python", {"function": f"{graders}:moody"}, workers=1)) as pool:
        pool.submit(5, sample("once", mark=str(tmp_path / "mark")))
        assert collect(pool, 1)[5].reward == 1.0
        assert pool.restarts == 1


def test_weighted_terms_add_up_and_are_reported_apart(graders: str) -> None:
    terms = (
        RewardTerm("exact_match", 1.0),
        RewardTerm("python", -0.5, {"function": f"{graders}:length", "kwargs": {"unit": 4}}),
    )
    with RewardPool(RewardSpec(terms=terms, workers=1)) as pool:
        pool.submit(1, sample("abcd", "abcd"))
        result = collect(pool, 1)[1]
    assert result.parts == (1.0, 1.0)
    assert result.reward == pytest.approx(0.5)


def test_large_samples_do_not_block_submit(graders: str) -> None:
    with RewardPool(RewardSpec("python", {"function": f"{graders}:length"}, workers=1)) as pool:
        for tid in range(3):
            pool.submit(tid, sample("x" * 3_000_000))
        assert {result.reward for result in collect(pool, 3).values()} == {3e6}


@pytest.mark.parametrize(
    ("options", "said"),
    [
        ({"function": "no_such_module_here:f"}, "no_such_module_here"),
        ({"function": "graders_for_test:nothing"}, "nothing"),
        ({"function": "graders_for_test"}, "module:function"),
        ({"function": "graders_for_test:length", "wieght": 1}, "wieght"),
    ],
)
def test_a_grader_that_cannot_be_loaded_is_refused_at_the_start(graders: str, options: dict, said: str) -> None:
    with RewardPool(RewardSpec("python", options, workers=1)) as pool, pytest.raises(ValueError, match=said):
        pool.wait_ready(20)


@pytest.mark.parametrize(
    "bad",
    [
        {"kind": "exactmatch"},
        {"terms": (RewardTerm("exactmatch"),)},
        {"terms": (RewardTerm("math"),), "options": {"boxed_only": True}},
        {"workers": 0},
        {"timeout_s": 0.0},
        {"retries": -1},
    ],
)
def test_bad_settings_are_refused(bad: dict) -> None:
    with pytest.raises(ValueError, match=r"reward\."):
        RewardSpec(**bad)


def test_unknown_options_and_broken_patterns_are_refused() -> None:
    for options in ({"extract": "magic"}, {"extrct": "whole"}):
        with pytest.raises(ValueError, match=r"reward\.options"):
            RewardPool(RewardSpec("exact_match", options))
    broken = RewardSpec("exact_match", {"pattern": "("}, workers=1)
    with RewardPool(broken) as pool, pytest.raises(ValueError, match="pattern"):
        pool.wait_ready(20)


def test_close_kills_what_a_grader_started_even_when_it_is_deaf(graders: str) -> None:
    pool = RewardPool(RewardSpec("python", {"function": f"{graders}:deaf"}, workers=2, timeout_s=50))
    pool.wait_ready(20)
    for tid in range(4):
        pool.submit(tid, sample("x"))
    groups = [child.process.pid for child in pool._children.values()]
    time.sleep(0.3)
    pool.close(5)
    pool.close(5)
    wait_until_gone(groups)


def test_the_children_die_with_a_killed_parent(graders: str, tmp_path: Path) -> None:
    program = f"""
        import sys, time
        sys.path[:0] = {sys.path!r}
        from staleflow.rewards.pool import *
        pool = RewardPool(RewardSpec("python", {{"function": "{graders}:moody"}}, workers=2, timeout_s=50))
        pool.wait_ready(20)
        pool.submit(1, RewardSample("", "hang", False, {{}}))
        print(*[child.process.pid for child in pool._children.values()], flush=True)
        time.sleep(60)
    """
    with subprocess.Popen(
        [sys.executable, "-c", textwrap.dedent(program)], stdout=subprocess.PIPE, text=True
    ) as parent:
        assert parent.stdout is not None
        pids = [int(word) for word in parent.stdout.readline().split()]
        time.sleep(0.2)
        parent.kill()
    assert len(pids) == 2
    wait_until_gone(pids)


def wait_until_gone(groups: list[int], limit_s: float = 5.0) -> None:
    end_s = time.monotonic() + limit_s
    for group in groups:
        while _group_lives(group):
            assert time.monotonic() < end_s, f"process group {group} is still there"
            time.sleep(0.02)


def _group_lives(group: int) -> bool:
    try:
        os.killpg(group, 0)
    except ProcessLookupError:
        return False
    states = [
        path.read_text().rpartition(") ")[2].split() for path in Path("/proc").glob("[0-9]*/stat") if path.exists()
    ]
    return any(int(fields[2]) == group and fields[0] != "Z" for fields in states)


def test_nothing_is_killed_twice_by_a_signal_to_us() -> None:
    """A worker sits in a session of its own: Ctrl-C on the terminal reaches the job alone."""
    with RewardPool(RewardSpec("exact_match", {"pattern": "x"}, workers=1)) as pool:
        pool.wait_ready(20)
        (child,) = pool._children.values()
        assert os.getsid(child.process.pid) == child.process.pid
        os.kill(child.process.pid, signal.SIGKILL)
        pool.submit(1, sample("x", "x"))
        assert collect(pool, 1)[1].reward == 1.0


@settings(max_examples=3, deadline=None, suppress_health_check=list(HealthCheck))
@given(st.lists(st.sampled_from(["fine"] * 6 + ["crash", "raise", "hang"]), min_size=30, max_size=30))
def test_each_sample_has_exactly_one_result_and_no_descriptor_is_leaked(graders: str, words: list[str]) -> None:
    spec = RewardSpec("python", {"function": f"{graders}:moody"}, workers=3, timeout_s=0.3, retries=1)
    before = len(list(Path("/proc/self/fd").iterdir()))
    with RewardPool(spec) as pool:
        for tid, word in enumerate(words):
            pool.submit(tid, sample(word))
        results = collect(pool, len(words), limit_s=60)
        assert (pool.pending(), pool.poll()) == (0, [])
    assert {tid: result.reward for tid, result in results.items()} == {
        tid: 1.0 if word == "fine" else None for tid, word in enumerate(words)
    }
    assert len(list(Path("/proc/self/fd").iterdir())) == before
