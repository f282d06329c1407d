"""`staleflow bench policies`: real jobs under each policy, equal seeds and steps, one after the other.

Instances get all cores but one, which trainers and hosts share: so nobody takes time from an instance but another one,
and a policy cannot win by leaving a core idle. The cost model is measured under the same pinning, with as many engines
at once as the job has.
A difference counts only beyond the spread over the seeds.

    staleflow bench policies [--config FILE] [--policies a,b] [--seeds 3] [--steps 24] [--out DIR] [--resume]
                             [section.key=value …]

With --resume, a job that an earlier bench of the same settings brought to its end under DIR is not run again.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from contextlib import suppress
from dataclasses import asdict, replace
from pathlib import Path
from statistics import mean, stdev
from typing import Any

from staleflow.config import Config, load
from staleflow.coordination.cost_model import CostModel, dump_cost_model, load_cost_model
from staleflow.coordination.policies import POLICIES
from staleflow.jobs.plan import plan, spread
from staleflow.observe.metrics import read_metrics
from staleflow.simulation.replay import recorded_lengths

INSTANCES = 3
GUARANTEED = ("sync", "one_step", "wait", "staleflow")
SETTLED = 2  # steps beyond eta that still feel the start
PIN_EVERY_S = 0.2


def run(args: list[str]) -> dict[str, Any]:
    """Rows by policy over all seeds, and how `staleflow` stands against each policy with the same guarantee."""
    options, overrides = _parser().parse_known_args(args)
    shape = [f"rollout.instances={INSTANCES}", f"run.steps={options.steps}", "observe.tensorboard=false", *overrides]
    config = load(options.config, shape)
    if config.evaluation is not None:
        shape.insert(0, "evaluation.max_prompts=1")  # what it has learned is not the question, and costs minutes
    cores = sorted(os.sched_getaffinity(0))
    others, instances = {cores[0]}, set(cores[1:]) or {cores[0]}
    options.out.mkdir(parents=True, exist_ok=True)
    if config.rollout.engine == "vllm" and config.coordination.cost_model is None:
        shape.append(f"coordination.cost_model={_calibrated(options, config, shape, instances)}")
    runs: dict[str, list[dict[str, float]]] = {policy: [] for policy in options.policies}
    for seed in range(options.seeds):  # policies in turn, so that a slow quarter of an hour hits all of them
        for policy in options.policies:
            one = _one(options, policy, seed, shape, (others, instances))
            runs[policy].append(one)
            print(f"{policy}, seed {seed}: {one['tokens_per_s']:.1f} trained tokens/s", file=sys.stderr, flush=True)
    rows = [_row(policy, found) for policy, found in runs.items()]
    return {
        "bench": "policies",
        "unit": "trained tokens/s",
        "eta": config.staleness.eta,
        "steps": options.steps,
        "seeds": options.seeds,
        "cores": {"instances": sorted(instances), "others": sorted(others)},
        "rows": rows,
        "against": list(_against(rows)),
    }


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="staleflow bench policies", description=__doc__)
    parser.add_argument("--config", default="configs/demo.toml")
    parser.add_argument("--policies", type=lambda s: tuple(s.split(",")), default=POLICIES)
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--steps", type=int, default=24)
    parser.add_argument("--out", type=Path, default=Path("runs/bench_policies"))
    parser.add_argument("--resume", action="store_true", help="keep the jobs that are through already")
    return parser


# ---- one job ---------------------------------------------------------------------------------------------------------


def _one(
    options: argparse.Namespace, policy: str, seed: int, shape: Sequence[str], cores: tuple[set[int], set[int]]
) -> dict[str, float]:
    """Run one job to its end; what it achieved after the start has settled. Raises RuntimeError when it failed."""
    name = f"{policy}_{seed}"
    overrides = [*shape, f"run.dir={options.out}", f"run.name={name}", f"run.seed={seed}"]
    overrides.append(f"coordination.policy={policy}")
    config = load(options.config, overrides)
    if options.resume and _completed(config.run_dir):
        return measured(config.run_dir, config)
    log = options.out / f"{name}.log"
    with log.open("w") as output:
        job = subprocess.Popen(
            [sys.executable, "-m", "staleflow", "run", options.config, *overrides], stdout=output, stderr=output
        )
        _pin_while_running(job, config, *cores)
    if job.returncode:
        raise RuntimeError(f"policy {policy}, seed {seed} ended with exit code {job.returncode}: see {log}")
    return measured(config.run_dir, config)


def _completed(run_dir: Path) -> bool:
    path = run_dir / "summary.json"
    return path.exists() and json.loads(path.read_text())["status"] == "completed"


def _pin_while_running(job: subprocess.Popen[bytes], config: Config, others: set[int], instances: set[int]) -> None:
    roles = [rank.role for rank in plan(config, spread(config, 1)).ranks]
    pinned: set[int] = set()
    while job.poll() is None:
        for pid in set(_descendants(job.pid)) - pinned:
            rank = _rank_of(pid)
            if rank is not None and rank < len(roles):
                pinned.add(pid)
                _pin(pid, instances if roles[rank] == "rollout" else others)
        time.sleep(PIN_EVERY_S)


def _descendants(pid: int) -> Iterator[int]:
    for children in Path(f"/proc/{pid}/task").glob("*/children"):
        with suppress(OSError):
            for child in map(int, children.read_text().split()):
                yield child
                yield from _descendants(child)


def _rank_of(pid: int) -> int | None:
    """RANK of a process's environment; None before it has one, or when it has gone."""
    with suppress(OSError):
        for entry in Path(f"/proc/{pid}/environ").read_bytes().split(b"\0"):
            if entry.startswith(b"RANK="):
                return int(entry[5:])
    return None


def _pin(pid: int, cores: set[int]) -> None:
    """All its threads; those to come inherit it."""
    for task in Path(f"/proc/{pid}/task").glob("*"):
        with suppress(OSError):
            os.sched_setaffinity(int(task.name), cores)


# ---- the cost model --------------------------------------------------------------------------------------------------


def _calibrated(options: argparse.Namespace, config: Config, shape: Sequence[str], cores: set[int]) -> Path:
    """The mean of as many calibrations at once as the job has instances, on the cores that these will have."""
    path = options.out / "cost_model.toml"
    if options.resume and path.exists():
        return path
    places = [options.out / f"cost_model_{i}.toml" for i in range(config.rollout.instances)]
    processes = []
    for place in places:
        command = [
            sys.executable,
            "-m",
            "staleflow",
            "calibrate",
            options.config,
            *shape,
            "--shared",
            "--out",
            str(place),
        ]
        with place.with_suffix(".log").open("w") as output:
            processes.append(subprocess.Popen(command, stdout=output, stderr=output))
        _pin(processes[-1].pid, cores)
    failed = [
        str(place.with_suffix(".log")) for process, place in zip(processes, places, strict=True) if process.wait()
    ]
    if failed:
        raise RuntimeError(f"calibration failed: see {', '.join(failed)}")
    path.write_text(dump_cost_model(averaged([load_cost_model(place) for place in places])))
    return path


def averaged(models: Sequence[CostModel]) -> CostModel:
    """Coefficient by coefficient."""
    names = [name for name in asdict(models[0]) if name != "source"]
    means = {name: mean(getattr(model, name) for model in models) for name in names}
    return replace(models[0], **means, source=f"mean of {len(models)} calibrations at once")


# ---- what came of it -------------------------------------------------------------------------------------------------


def measured(run_dir: Path, config: Config) -> dict[str, float]:
    """The columns of the study, of a real run. The first eta + 2 steps are not measured."""
    lines = read_metrics(run_dir)[config.staleness.eta + SETTLED :]
    summary = json.loads((run_dir / "summary.json").read_text())
    wall_s, busy_s = sum(line["step_s"] for line in lines), sum(line["train_s"] for line in lines)
    ages = {int(age): n for age, n in summary["staleness_histogram"].items()}
    trained = sum(ages.values())
    offered = recorded_lengths(run_dir)
    first = [tokens for (group, _), tokens in offered.items() if group < trained // config.staleness.group_size]
    return {
        "step_s": wall_s / len(lines),
        "tokens_per_s": sum(line["trained_tokens"] for line in lines) / wall_s,
        "trainer_idle": 1.0 - busy_s / wall_s,
        "rollout_busy": summary["rollout_busy_fraction"],
        "staleness_max": summary["max_staleness"],
        "staleness_mean": sum(age * n for age, n in ages.items()) / trained,
        "waste": sum(summary["discarded_tokens"].values()) / max(1, summary["generated_tokens"]),
        "length_bias": summary["trained_tokens"] / summary["trained_trajectories"] / mean(first),
        "migrations": summary["migrations"],
        "pulls": summary["pulls"],
    }


def _row(policy: str, runs: Sequence[dict[str, float]]) -> dict[str, Any]:
    row: dict[str, Any] = {"policy": policy} | {name: mean(one[name] for one in runs) for name in runs[0]}
    row["staleness_max"] = max(one["staleness_max"] for one in runs)
    for name in ("step_s", "tokens_per_s"):
        row[f"{name}_stdev"] = stdev(one[name] for one in runs) if len(runs) > 1 else 0.0
    return row


def _against(rows: Sequence[dict[str, Any]]) -> Iterator[dict[str, Any]]:
    """`staleflow` and each other policy with a bound and no waste; `beyond_spread`: by more than both deviations."""
    ours = next((row for row in rows if row["policy"] == "staleflow"), None)
    for row in rows if ours is not None else ():
        if row is ours or row["policy"] not in GUARANTEED:
            continue
        difference = ours["tokens_per_s"] - row["tokens_per_s"]
        yield {
            "policy": row["policy"],
            "ratio": ours["tokens_per_s"] / row["tokens_per_s"],
            "beyond_spread": abs(difference) > ours["tokens_per_s_stdev"] + row["tokens_per_s_stdev"],
        }
