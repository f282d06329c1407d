"""`staleflow calibrate CONFIG`: measure a real vLLM instance, fit the cost model, write cost_model.toml.

Sweeps the number of running trajectories and their context lengths. Each point is visited several times, in an order
drawn at random, and counts with the lower quartile of its steps: what other programs take away is not the instance's.
With `--shared` it counts with their mean: for instances that share their cores, and are measured together. Prefill is
what the first tokens of new requests take beyond a decode step. One process, tensor-parallel 1.

`staleflow calibrate RUN…`: nothing is measured; the cost model is fitted to what the traces of these runs say of their
instances (`simulation.traced`).
"""

from __future__ import annotations

import argparse
import os
import random
import statistics
import time
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

import tomli_w

from staleflow.config import Config, ConfigError, load
from staleflow.coordination.calibrate import Calibration, DecodeSample, PrefillSample, fit
from staleflow.engines.base import Engine, Request
from staleflow.engines.vllm import VllmEngine, VllmSettings, environment
from staleflow.jobs import preflight
from staleflow.simulation.config import StudyError
from staleflow.simulation.traced import calibrated

STEPS = 6  # decode steps per visit
WARM_STEPS = 2
VISITS = 8
PREFILL_STEPS = 8  # at most, until all prompts of a point are computed


def main(argv: Sequence[str]) -> int:
    parser = argparse.ArgumentParser(prog="staleflow calibrate", description="Measure the cost model of an instance.")
    parser.add_argument("config", help="a TOML file, or folders of runs")
    parser.add_argument("overrides", nargs="*", metavar="section.key=value")
    parser.add_argument("--out", type=Path, default=Path("cost_model.toml"))
    parser.add_argument("--shared", action="store_true", help="count what other programs take away, too")
    parsed = parser.parse_intermixed_args(argv)
    try:
        if Path(parsed.config).is_dir():
            result = calibrated([Path(run) for run in (parsed.config, *parsed.overrides)])
        else:
            result = _measured(parsed)
    except (ConfigError, StudyError) as error:
        parser.exit(2, f"staleflow: {error}\n")
    parsed.out.write_text(tomli_w.dumps(asdict(result.model)))
    print(report(result, parsed.out))
    return 0


def _measured(parsed: argparse.Namespace) -> Calibration:
    config = load(parsed.config, parsed.overrides)
    preflight.check(config)
    engine = _engine(config)
    try:
        return fit(*measure(engine, config, parsed.shared), source=f"staleflow calibrate {parsed.config}")
    finally:
        engine.close()


def report(result: Calibration, out: Path) -> str:
    m = result.model
    return (
        f"t = {m.k1:.3g} kv + max({m.k2:.3g}, {m.k3:.3g} n) + {m.k4:.3g} s; prefill {m.k6:.3g} s a token, "
        f"{m.k7:.3g} a cached one\nmedian error on {result.held_out_samples} measurements held out: "
        f"{result.held_out_median_error:.1%}\nwritten to {out}; use it with coordination.cost_model = {str(out)!r}"
    )


def measure(engine: Engine, config: Config, shared: bool = False) -> tuple[list[DecodeSample], list[PrefillSample]]:
    """One sample of each kind per point of the sweep."""
    visits = [point for point in _sweep(config) for _ in range(VISITS)]
    random.Random(0).shuffle(visits)
    _visit(engine, 1, 8)  # the first steps of an engine are slower than all others
    seen: dict[tuple[int, int], list[_Visit]] = {}
    for n, context in visits:
        seen.setdefault((n, context), []).append(_visit(engine, n, context))
    decode, prefill = [], []
    typical = statistics.mean if shared else _lower_quartile
    for (n, context), there in seen.items():
        step_s = typical([seconds for visit in there for seconds in visit.steps_s])
        first_s = typical([visit.first_s - (visit.first_steps - 1) * step_s for visit in there])
        decode.append(DecodeSample(n, n * (context + WARM_STEPS + STEPS // 2), step_s))
        prefill.append(PrefillSample(n * context, 0, max(0.0, first_s - step_s)))
    return decode, prefill


def _sweep(config: Config) -> Iterator[tuple[int, int]]:
    longest = config.rollout.max_model_len - STEPS - WARM_STEPS - PREFILL_STEPS
    contexts = sorted({max(2, longest * share // 8) for share in (1, 3, 5, 8)})
    n = 1
    while n <= config.rollout.max_running:
        yield from ((n, context) for context in contexts)
        n *= 2


def _lower_quartile(values: Sequence[float]) -> float:
    return statistics.quantiles(values, n=4)[0]


@dataclass(frozen=True)
class _Visit:
    """Seconds of some decode steps, and of the steps until all had their first token."""

    steps_s: list[float]
    first_s: float
    first_steps: int


def _visit(engine: Engine, n: int, context: int) -> _Visit:
    rng = random.Random(n * 1000 + context)
    for tid in range(n):
        tokens = [3 + rng.randrange(5) for _ in range(context)]
        engine.add(Request(tid, tokens, STEPS + WARM_STEPS + PREFILL_STEPS, 1.0, ignore_eos=True))
    first_s, first_steps, begun = 0.0, 0, set[int]()
    while len(begun) < n:  # an engine may take several steps to compute many prompts
        began_s = time.perf_counter()
        begun.update(delta.tid for delta in engine.step())
        first_s, first_steps = first_s + time.perf_counter() - began_s, first_steps + 1
    seconds = []
    for _ in range(WARM_STEPS + STEPS):
        began_s = time.perf_counter()
        engine.step()
        seconds.append(time.perf_counter() - began_s)
    engine.abort(range(n))
    while engine.busy():
        engine.step()
    engine.reset_prefix_cache()
    return _Visit(seconds[WARM_STEPS:], first_s, first_steps)


def _engine(config: Config) -> Engine:
    import torch

    os.environ.update({k: v for k, v in environment(not torch.cuda.is_available()).items() if k not in os.environ})
    os.environ.update(RANK="0", LOCAL_RANK="0", WORLD_SIZE="1", MASTER_ADDR="127.0.0.1")
    store = torch.distributed.TCPStore("127.0.0.1", 0, 1, True)
    os.environ["MASTER_PORT"] = str(store.port)
    torch.distributed.init_process_group("gloo", store=store, rank=0, world_size=1)
    r = config.rollout
    return VllmEngine(
        VllmSettings(
            model=Path(config.model.path), dtype=config.model.dtype, seed=0, max_model_len=r.max_model_len,
            max_running=r.max_running, tensor_parallel=1, instance_name=f"staleflow-calibrate-{os.getpid()}",
            instance_rank=0, device=0, gpu_memory_utilization=r.gpu_memory_utilization, enforce_eager=r.enforce_eager,
            kv_cache_tokens=r.kv_cache_tokens, top_p=1.0, top_k=0, stop=(),
        )
    )  # fmt: skip
