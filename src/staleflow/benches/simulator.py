"""`staleflow bench simulator`: how long the simulator takes for many trajectories on a large fleet, on one core.

    staleflow bench simulator [--trajectories 1000000] [--instances 512] [--json]

The load is the paper-like one (Qwen2.5-14B coefficients, groups of 16, lognormal lengths, all costs on), with as many
groups a step as the fleet needs. No peer does this with the coordinator of the real job; the limit is ten minutes.
"""

from __future__ import annotations

import argparse
import sys
import time
from itertools import count
from pathlib import Path
from typing import Any

from staleflow.coordination.cost_model import load_cost_model
from staleflow.simulation.config import Costs, Fleet, Run, Staleness, Study, Variant, Workload
from staleflow.simulation.world import World

ROOT = Path(__file__).parents[3]
COST_MODEL = ROOT / "configs" / "cost_models" / "qwen_14b_tp1.toml"
GROUP_SIZE, ETA = 16, 2
GROUPS_PER_INSTANCE = 6  # of a step: two batches at the bound keep an instance at the batch size where it saturates
LIMIT_S = 600.0


def run(args: list[str]) -> dict[str, Any]:
    options = _options(args)
    study = _study(options.instances, options.trajectories)
    world = World(study, load_cost_model(COST_MODEL), Variant(name="staleflow"), ETA, seed=0)
    begin, cpu, steps = time.perf_counter(), time.process_time(), count(1)
    outcome = world.run(lambda _: _tell(next(steps), study.run.steps, time.perf_counter() - begin))
    wall_s = time.perf_counter() - begin
    trained = study.run.steps * study.staleness.batch_groups * GROUP_SIZE
    return {
        "bench": "simulator",
        "unit": "trained trajectories/s of wall time",
        "ours": trained / wall_s,
        "limit": trained / LIMIT_S,
        "peers": {},
        "trajectories": trained,
        "instances": options.instances,
        "steps": study.run.steps,
        "wall_s": wall_s,
        "cpu_s": time.process_time() - cpu,
        "virtual_s_per_wall_s": outcome.step_s * study.run.steps / wall_s,
    }


def _options(args: list[str]) -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="staleflow bench simulator", description=__doc__)
    parser.add_argument("--trajectories", type=int, default=1_000_000)
    parser.add_argument("--instances", type=int, default=512)
    return parser.parse_args(args)


def _study(instances: int, trajectories: int) -> Study:
    groups = GROUPS_PER_INSTANCE * instances
    steps = max(ETA + 3, -(-trajectories // (groups * GROUP_SIZE)))
    return Study(
        name="simulator",
        fleet=Fleet(instances=instances, cost_model=COST_MODEL, max_running=256, kv_capacity_tokens=270_000),
        costs=Costs(command_s=0.02, pull_s=3.0, push_s=8.0, reward_s=1.0, train_s_per_token="balanced"),
        workload=Workload(correlation=0.5),
        staleness=Staleness(batch_groups=groups, group_size=GROUP_SIZE, eta=(ETA,)),
        run=Run(steps=steps, warmup=ETA + 2, seeds=1, cycle_s=1.0, snapshot_s=20.0),
    )


def _tell(step: int, steps: int, wall_s: float) -> None:
    print(f"step {step}/{steps} after {wall_s:.0f} s", file=sys.stderr, flush=True)
