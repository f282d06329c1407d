"""`staleflow plan --advise`: the calculator's sums, its sources, and what it says."""

import json

import pytest

from staleflow.cli import main
from staleflow.config import ConfigError, load
from staleflow.jobs.advise import Workload, advise, advised_eta, best_split, split, workload

WORK = Workload(100.0, 1000, 3000.0, 1000.0, 50.0, 16, "here", "here", "here")


def config(config_file, *overrides):
    return load(config_file, overrides)


def test_the_best_split_has_both_sides_equally_fast(config_file):
    """12 device ranks, a trainer as fast as three instances: 3 and 9."""
    c = config(config_file, "trainer.ranks=6", "rollout.instances=6")
    assert split(c, WORK, 6, 6) == type(best_split(c, WORK))(6, 6, 6000.0, "rollout")
    best = best_split(c, WORK)
    assert (best.trainers, best.instances, best.tokens_per_s) == (3, 9, 9000.0)


def test_instances_of_several_ranks_are_not_cut(config_file):
    c = config(config_file, "trainer.ranks=4", "rollout.instances=2", "rollout.tensor_parallel=4")
    best = best_split(c, WORK)
    assert (best.trainers, best.instances) == (1, 2), "three ranks are left over: a third instance needs four"


def test_eta_keeps_instances_full_and_lets_the_longest_end(config_file):
    """9 instances x 16 running = 144 at once, 16 a step: 9 steps' worth. 16 x 100 tokens at 9000/s: a step of 0.18 s,
    the longest takes 1000 / 50 = 20 s."""
    c = config(config_file)
    assert advised_eta(c, WORK, split(c, WORK, 3, 9)) == (4, 8, 113)
    slow = Workload(100.0, 100, 3000.0, 1000.0, 1000.0, 1, "", "", "")
    assert advised_eta(c, slow, split(c, slow, 1, 1)) == (1, 0, 1)


def test_a_finished_run_gives_the_speeds(config_file, tmp_path):
    run = tmp_path / "run"
    run.mkdir()
    ranks = [{"role": "host", "instance": None}, {"role": "trainer", "instance": None}]
    ranks += [{"role": "rollout", "instance": i} for i in (0, 1)]
    (run / "plan.json").write_text(json.dumps({"ranks": ranks}))
    steps = [{"step": i, "trained_tokens": 500, "train_s": 0.25} for i in range(4)]
    (run / "metrics.jsonl").write_text("".join(json.dumps(step) + "\n" for step in steps))
    summary = {
        "trained_tokens": 2000, "trained_trajectories": 40, "generated_tokens": 2400, "wall_s": 4.0,
        "rollout_busy_fraction": 0.5,
    }  # fmt: skip
    (run / "summary.json").write_text(json.dumps(summary))
    work = workload(config(config_file), run)
    assert (work.mean_tokens, work.trainer_rate, work.instance_rate) == (50.0, 2000.0, 600.0)
    assert f"measured in {run}" in advise(config(config_file), run)


def test_what_is_missing_is_said(config_file, tmp_path):
    with pytest.raises(ConfigError, match="--run runs/NAME"):
        advise(config(config_file))
    with pytest.raises(ConfigError, match="not the directory of a finished run"):
        advise(config(config_file), tmp_path)


def test_a_known_model_needs_neither_files_nor_torch(config_file, capsys):
    assert main(["plan", str(config_file), "--advise", "model.path=models/Qwen2.5-14B"]) == 0
    said = capsys.readouterr().out
    assert "instances for each trainer rank" in said
    assert "staleness.eta" in said
