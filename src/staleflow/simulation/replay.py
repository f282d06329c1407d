"""A real run again in virtual time: the same trajectories, fleet and policy; how far apart are the two?

What is taken from the run: its config, the length of every trajectory and how long a Pull held an instance up (from its
traces), and the seconds that training and publishing took on the mean. How fast its instances decode is the cost
model's word (`staleflow calibrate RUN` fits one to a run's own traces). What the simulator adds is everything in
between, so that the ratio of the throughputs is its error.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import mean
from typing import Any

import numpy as np

from staleflow.config import Config
from staleflow.coordination.cost_model import CostModel, load_cost_model
from staleflow.coordination.types import EVAL_GROUP_BASE
from staleflow.observe.metrics import read_metrics
from staleflow.observe.spans import TRAJECTORIES
from staleflow.observe.trace import RankTrace, read_traces
from staleflow.simulation.config import Costs, Fleet, Run, Staleness, Study, StudyError, Variant, Workload
from staleflow.simulation.traced import config_of, pull_pause_s
from staleflow.simulation.workload import IntArray
from staleflow.simulation.world import World
from staleflow.trajectories.schema import group_and_member

SCRIPTED_KV_TOKENS = 1 << 20  # what the scripted engine reports
SETTLED = 2  # steps beyond eta that still feel the start
MESSAGE_S = 0.01  # a command's way to the engine: the host's turn, the ring, the rest of the step that is running


@dataclass(frozen=True)
class Fidelity:
    """Trained response tokens a second after the warm-up, as measured and as simulated."""

    run: str
    policy: str
    steps: int
    real_tokens_per_s: float
    simulated_tokens_per_s: float

    @property
    def ratio(self) -> float:
        return self.simulated_tokens_per_s / self.real_tokens_per_s


class RecordedLengths:
    """`lengths(group)` as the run had them. Members that it never finished get those of others, in turn."""

    def __init__(self, recorded: dict[tuple[int, int], int], members: int) -> None:
        self._recorded, self._members = recorded, members
        self._others = list(recorded.values())

    def __call__(self, group_id: int) -> IntArray:
        return np.array(
            [
                self._recorded.get((group_id, m)) or self._others[(group_id * self._members + m) % len(self._others)]
                for m in range(self._members)
            ],
            np.int64,
        )


def recorded_lengths(run_dir: Path) -> dict[tuple[int, int], int]:
    """{(group, member): response tokens} of what the run finished, evaluation apart. Raises StudyError: no trace."""
    return _lengths(run_dir, read_traces(run_dir))


def _lengths(run_dir: Path, traces: Sequence[RankTrace]) -> dict[tuple[int, int], int]:
    pieces = (piece.args for trace in traces for piece in trace.on(TRAJECTORIES))
    found = {group_and_member(args["tid"]): args["tokens"] for args in pieces if args.get("finish")}
    found = {key: tokens for key, tokens in found.items() if key[0] < EVAL_GROUP_BASE}
    if not found:
        raise StudyError(f"{run_dir}: no finished trajectory in its trace; run with observe.trace = true")
    return found


def replay(run_dir: Path, cost_model: Path | None = None, seed: int = 0) -> Fidelity:
    """Simulate what was run there. `cost_model`: of its instances; None: the run's own.

    Raises StudyError: it is no run, it is too short, or there is no cost model for it.
    """
    config, lines = config_of(run_dir), read_metrics(run_dir)
    warmup = config.staleness.eta + SETTLED
    if len(lines) <= warmup:
        raise StudyError(
            f"{run_dir}: {len(lines)} steps; more than {warmup} are needed, the first ones are not measured"
        )
    cost = _cost(config, cost_model)
    traces = read_traces(run_dir)
    study = _study(config, lines, warmup, pull_pause_s(traces))
    lengths = RecordedLengths(_lengths(run_dir, traces), config.members)
    variant = Variant(name=config.coordination.policy, policy=config.coordination.policy)
    out = World(study, cost, variant, config.staleness.eta, seed, lengths=lengths).run()
    measured = lines[warmup:]
    real = sum(line["trained_tokens"] for line in measured) / sum(line["step_s"] for line in measured)
    return Fidelity(str(run_dir), variant.policy, len(measured), real, out.tokens_per_s)


def _cost(config: Config, path: Path | None) -> CostModel:
    if config.rollout.engine == "scripted":  # every step takes the same time, whatever runs
        return CostModel(0.0, config.rollout.step_ms / 1000, 0.0, 0.0, source="the scripted engine")
    chosen = path or config.coordination.cost_model
    if chosen is None:
        raise StudyError("no cost model: fit one with `staleflow calibrate RUN`, and name it with --cost-model")
    return load_cost_model(chosen)


def _study(config: Config, lines: Sequence[dict[str, Any]], warmup: int, pull_s: float) -> Study:
    rollout, staleness, coordination = config.rollout, config.staleness, config.coordination
    kv_tokens = SCRIPTED_KV_TOKENS if rollout.engine == "scripted" else rollout.kv_cache_tokens or 1 << 40
    fleet = Fleet(
        instances=rollout.instances,
        cost_model=Path(),
        max_running=rollout.max_running,
        kv_capacity_tokens=kv_tokens,
        prefill=rollout.engine != "scripted",
    )
    costs = Costs(
        command_s=MESSAGE_S,
        pull_s=pull_s,
        push_s=_mean(lines, "publish_s"),
        reward_s=MESSAGE_S,
        train_s=_mean(lines[warmup:], "train_s"),
    )
    return Study(
        name=config.run.name,
        fleet=fleet,
        costs=costs,
        workload=Workload(clip=rollout.max_tokens, prompt_tokens=config.data.max_prompt_tokens),
        staleness=Staleness(
            batch_groups=staleness.batch_groups,
            group_size=staleness.group_size,
            eta=(staleness.eta,),
            spare_groups=staleness.spare_groups,
            spare_members=staleness.spare_members,
        ),
        run=Run(
            steps=len(lines), warmup=warmup, seeds=1, cycle_s=coordination.cycle_ms / 1000,
            snapshot_s=coordination.cycle_ms / 1000,
        ),
        coordination={
            name: getattr(coordination, name)
            for name in ("routing", "synchronization", "migration", "partial_rollout")
        },
    )  # fmt: skip


def _mean(lines: Sequence[dict[str, Any]], name: str) -> float:
    """Of the lines that have it."""
    values = [line[name] for line in lines if line.get(name) is not None]
    return mean(values) if values else 0.0
