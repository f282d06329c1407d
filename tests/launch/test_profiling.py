"""`[profile]`: which steps of which ranks are recorded, and by what."""

import json
from types import SimpleNamespace

import pytest
import torch

from staleflow.config import ConfigError, Profile, Window, parse
from staleflow.jobs.slurm import main
from staleflow.observe import profiling
from staleflow.observe.clock import ClockOffset
from staleflow.observe.profiling import Profiling, open_profiling


class Noted:
    def __init__(self):
        self.calls = []

    def start(self):
        self.calls.append("start")

    def stop(self):
        self.calls.append("stop")


@pytest.mark.parametrize(
    ("numbers", "calls"),
    [
        ([0, 1, 2, 3, 4, 5, 6], [[], [], ["start"], ["start"], ["start"], ["start", "stop"], ["start", "stop"]]),
        ([1, 3, 7], [[], ["start"], ["start", "stop"]]),  # a rollout rank skips versions
        ([1, 9], [[], []]),  # over before it began
    ],
)
def test_recording_lasts_from_the_first_step_of_the_window_to_the_end_of_the_last(numbers, calls):
    capture = Noted()
    ours = Profiling([(Window(steps=(2, 4)), capture)])
    seen = []
    for number in numbers:
        ours.step(number)
        seen.append(list(capture.calls))
    assert seen == calls


def test_a_rank_that_ends_within_the_window_writes_what_it_has():
    capture = Noted()
    ours = Profiling([(Window(steps=(0, 9)), capture)])
    ours.step(3)
    ours.close()
    ours.close()
    assert capture.calls == ["start", "stop"]


def test_torchs_profiler_writes_a_trace_of_the_window_with_rank_and_role_in_its_name(tmp_path):
    profile = Profile(torch=Window(steps=(1, 1), ranks=(3,)))
    ours = open_profiling(profile, 3, "trainer", tmp_path / "trace")
    for step in range(3):
        ours.step(step)
        torch.ones(step + 2).cumsum(0)
    events = json.loads((tmp_path / "trace" / "torch_rank_3.trainer.json").read_text())["traceEvents"]
    assert sum(event.get("name") == "aten::cumsum" for event in events) == 1
    others = open_profiling(profile, 2, "trainer", tmp_path / "trace")
    others.step(1)
    others.close()
    assert len(list((tmp_path / "trace").iterdir())) == 1


def test_nsys_captures_between_cuda_profiler_start_and_stop(monkeypatch, tmp_path):
    capture = Noted()
    monkeypatch.setattr(profiling, "NsysCapture", lambda: capture)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    ours = open_profiling(Profile(nsys=Window(steps=(5, 6))), 1, "rollout", tmp_path)
    for version in (4, 5, 6, 7):
        ours.step(version)
    assert capture.calls == ["start", "stop"]


def test_submit_starts_the_wanted_ranks_under_nsys(config_file, tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    window = "profile.nsys={steps = [3, 4], ranks = [1, 2]}"
    assert main([str(config_file), window, "--nodes", "2", "--dry-run"]) == 0
    run_dir = tmp_path / "runs" / "two-nodes"
    text = capsys.readouterr().out
    assert f"export NSYS_RANKS=1,2 NSYS_DIR={run_dir}/trace NSYS_PLAN={run_dir}/submit/plan.json NSYS_RANGE=1\n" in text


@pytest.mark.parametrize("steps", [[4, 3], [-1, 3]])
def test_a_window_that_cannot_be_is_refused(steps):
    with pytest.raises(ConfigError, match="first and the last step"):
        parse({"profile": {"torch": {"steps": steps}}})


def test_the_answer_with_the_shortest_way_tells_the_clocks_difference():
    """Here the clock is 1000 ahead of rank 0's. Slow ways are lopsided; the shortest is trusted."""
    ours = ClockOffset()
    told = [(90, 10), (3, 3), (40, 0)]
    better = [ours.answered(1000 + t, t + wait, 1000 + t + wait + back) for t, (wait, back) in enumerate(told)]
    assert better == [True, True, False]
    assert ours.offset_ns == 1000
    assert not ours.answered(50, 0, 40), "the clock was set back meanwhile"


def test_hosts_measure_their_clock_against_rank_0(monkeypatch):
    from staleflow.roles import hostlink
    from staleflow.roles import messages as m

    offsets = []
    link = SimpleNamespace(_clock=ClockOffset(), _on_offset=offsets.append)
    monkeypatch.setattr(hostlink.time, "time_ns", lambda: 5_000_010)
    hostlink.CoordinatorLink._told_time(link, m.ClockTold(5_000_000, 4_000_005))
    assert offsets == [1_000_000]
