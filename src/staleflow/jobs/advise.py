"""`staleflow plan --advise`: how many trainer ranks for how many instances, and which eta. Pure, without torch.

Rollout   an instance with n running trajectories of mean context c makes n / step_s(n, n c) tokens/s (the cost model).
Training  a rank takes so many tokens/s: measured in an earlier run, or assumed from its arithmetic.
Ratio     the job is as fast as the slower side: min(trainers x its rate, instances x theirs).
eta       must let every instance be full, (eta + 1) x batch >= all that run at once; and lets the longest response,
          which runs nearly alone in the end, finish while the trainer goes on. Beyond that it only makes data older.
"""

from __future__ import annotations

import json
import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from staleflow.config import Config, ConfigError
from staleflow.coordination.cost_model import DEFAULT, CostModel, load_cost_model
from staleflow.learning.memory import ModelShape, model_shape

PEAK_FLOPS, UTILISATION = 989e12, 0.35  # a Hopper GPU in bfloat16, and what long training steps reach of it
GPU_BYTES = 80e9
MEAN_SHARE = 0.25  # of rollout.max_tokens: the mean response, where nothing was measured
MOST_ETA = 4


@dataclass(frozen=True)
class Workload:
    """What advice is built on. Rates are trained or generated response tokens/s, of one rank or one instance."""

    mean_tokens: float
    longest_tokens: int
    trainer_rate: float
    instance_rate: float
    alone_rate: float  # of a response that has an instance for itself
    running: int
    lengths_from: str
    trainer_from: str
    instance_from: str


@dataclass(frozen=True)
class Split:
    """Device ranks divided into trainers and instances."""

    trainers: int
    instances: int
    tokens_per_s: float
    bound_by: str


def workload(config: Config, run_dir: Path | None) -> Workload:
    """From an earlier run where one is given, otherwise from cost model and arithmetic. Raises ConfigError."""
    r = config.rollout
    measured = _measured(run_dir) if run_dir is not None else {}
    mean = float(measured.get("mean_tokens", MEAN_SHARE * r.max_tokens))
    cost, cost_from = _cost_model(config)
    running = _running(config, mean)
    trainer, trainer_from = measured.get("trainer_rate"), f"measured in {run_dir}"
    if trainer is None:
        trainer, trainer_from = _assumed_rate(config)
    instance, instance_from = measured.get("instance_rate"), f"measured in {run_dir}"
    if instance is None:
        instance = cost.throughput(running, running * (config.data.max_prompt_tokens + mean / 2))
        instance_from = f"cost model: {cost_from}"
    alone = cost.throughput(1, config.data.max_prompt_tokens + r.max_tokens / 2)
    lengths_from = f"measured in {run_dir}" if measured else f"assumed: {MEAN_SHARE:.0%} of rollout.max_tokens"
    return Workload(mean, r.max_tokens, trainer, instance, alone, running, lengths_from, trainer_from, instance_from)


def split(config: Config, work: Workload, trainers: int, instances: int) -> Split:
    training, rollout = trainers * work.trainer_rate, instances * work.instance_rate
    bound_by = "rollout" if rollout < training else "training"
    return Split(trainers, instances, min(training, rollout), bound_by)


def best_split(config: Config, work: Workload) -> Split:
    """Of the device ranks that the config has now; of equal ones that with the fewest trainers."""
    devices, width = config.device_ranks, config.rollout.tensor_parallel
    choices = [split(config, work, t, (devices - t) // width) for t in range(1, devices - width + 1)]
    return max(choices, key=lambda choice: choice.tokens_per_s)


def advised_eta(config: Config, work: Workload, chosen: Split) -> tuple[int, int, int]:
    """(eta, what keeps the instances full, what lets the longest response end)."""
    s = config.staleness
    batch = s.batch_groups * s.group_size
    full = max(0, math.ceil(chosen.instances * work.running / batch) - 1)
    step_s = batch * work.mean_tokens / chosen.tokens_per_s
    longest = math.ceil(work.longest_tokens / work.alone_rate / step_s)
    return min(MOST_ETA, max(full, longest)), full, longest


def advise(config: Config, run_dir: Path | None = None) -> str:
    """The text that `staleflow plan --advise` prints."""
    return "\n".join(_lines(config, workload(config, run_dir)))


def _lines(config: Config, w: Workload) -> Iterator[str]:
    now = split(config, w, config.trainer.ranks, config.rollout.instances)
    best = best_split(config, w)
    eta, full, longest = advised_eta(config, w, best)
    yield f"advice for {config.run.name}: {config.device_ranks} device ranks"
    yield f"  responses      mean {w.mean_tokens:.0f}, longest {w.longest_tokens} tokens ({w.lengths_from})"
    yield f"  one instance   {w.instance_rate:.0f} tokens/s with {w.running} running ({w.instance_from})"
    yield f"  one trainer    {w.trainer_rate:.0f} tokens/s ({w.trainer_from})"
    yield f"  balance        {w.trainer_rate / w.instance_rate:.2f} instances for each trainer rank"
    yield f"  now            {_said(now, config)}"
    gain = best.tokens_per_s / now.tokens_per_s - 1
    yield f"  best           {_said(best, config)}" + (f", {gain:+.0%}" if gain >= 0.005 else ": as it is now")
    yield (
        f"  staleness.eta  {eta} (now {config.staleness.eta}): {full} keeps all instances full, {longest} lets the "
        f"longest response end while training goes on"
    )
    if max(full, longest) > MOST_ETA:
        yield f"                 more than {MOST_ETA} is not advised: raise staleness.batch_groups instead"


def _said(s: Split, config: Config) -> str:
    width = config.rollout.tensor_parallel
    return (
        f"trainer.ranks={s.trainers} rollout.instances={s.instances}" + (f" (x {width})" if width > 1 else "")
    ) + f": {s.tokens_per_s:.0f} tokens/s, bound by {s.bound_by}"


def _running(config: Config, mean_tokens: float) -> int:
    """Trajectories that an instance runs at once: limited by its settings, and by its cache."""
    r, shape = config.rollout, model_shape(config.model.path)
    kv_tokens = float("inf") if r.kv_cache_tokens is None else float(r.kv_cache_tokens)
    if r.kv_cache_tokens is None and shape is not None:
        room = r.tensor_parallel * r.gpu_memory_utilization * GPU_BYTES - 2 * shape.parameters
        kv_tokens = room / shape.kv_bytes_per_token()
    return int(max(1, min(r.max_running, kv_tokens / (config.data.max_prompt_tokens + mean_tokens / 2))))


def _cost_model(config: Config) -> tuple[CostModel, str]:
    path = config.coordination.cost_model
    try:
        return (
            (load_cost_model(path), path) if path else (DEFAULT, f"{DEFAULT.source}; coordination.cost_model is unset")
        )
    except (OSError, ValueError) as error:
        raise ConfigError(f"coordination.cost_model = {path!r}: {error}") from None


def _assumed_rate(config: Config) -> tuple[float, str]:
    shape = model_shape(config.model.path)
    if shape is None:
        raise ConfigError(
            f"model.path = {config.model.path!r}: neither there nor a known model, so its training speed cannot be "
            "assumed; give a run that measured it: --advise --run runs/NAME"
        )
    passes = 4 if config.model.activation_checkpointing else 3  # forward, twice as much backward, forward again
    flops = 2 * _active_parameters(shape) * passes
    said = f"assumed: {UTILISATION:.0%} of {PEAK_FLOPS / 1e12:.0f} TFLOP/s; --run NAME takes a measured one"
    return UTILISATION * PEAK_FLOPS / flops, said


def _active_parameters(shape: ModelShape) -> int:
    idle = max(0, shape.experts - shape.experts_per_token) * 3 * shape.hidden * shape.intermediate
    return shape.parameters - shape.layers * idle


def _measured(run_dir: Path) -> Mapping[str, float]:
    """Rates and lengths of a finished run. Raises ConfigError."""
    try:
        summary: dict[str, Any] = json.loads((run_dir / "summary.json").read_text())
        ranks = json.loads((run_dir / "plan.json").read_text())["ranks"]
        steps = [json.loads(line) for line in (run_dir / "metrics.jsonl").read_text().splitlines()]
    except (OSError, ValueError) as error:
        raise ConfigError(f"--run {run_dir}: not the directory of a finished run ({error})") from None
    roles = [r["role"] for r in ranks]
    instances = len({r["instance"] for r in ranks if r["instance"] is not None})
    tokens, busy_s = sum(s["trained_tokens"] for s in steps), sum(s["train_s"] for s in steps)
    engines_s = summary["wall_s"] * summary["rollout_busy_fraction"] * instances
    if not tokens or not engines_s:
        raise ConfigError(f"--run {run_dir}: it has trained on nothing")
    return {
        "mean_tokens": summary["trained_tokens"] / summary["trained_trajectories"],
        "trainer_rate": tokens / busy_s / roles.count("trainer"),
        "instance_rate": summary["generated_tokens"] / engines_s,
    }
