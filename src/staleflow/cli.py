"""The verbs. Each imports what it needs: `staleflow plan` answers without torch and vLLM."""

from __future__ import annotations

import argparse
import importlib
import json
import sys
from collections.abc import Sequence
from pathlib import Path

from staleflow.config import Config, ConfigError, load

REFUSED = 2
BENCHES = ("protocol", "ring", "pack", "delta", "weights", "coordinator", "simulator", "policies")


def main(argv: Sequence[str] | None = None) -> int:
    """Entry point; returns the exit code."""
    arguments = list(sys.argv[1:] if argv is None else argv)
    verb = arguments[0] if arguments else ""
    if verb in ("submit", "doctor", "simulate", "report", "calibrate", "export"):
        return int(importlib.import_module(_MODULES[verb]).main(arguments[1:]))
    parser = _parser()
    parsed, rest = parser.parse_known_args(arguments)
    if verb in ("run", "plan"):  # overrides may come after options too
        parsed.overrides += [word for word in rest if not word.startswith("-")]
        rest = [word for word in rest if word.startswith("-")]
    if rest and verb != "bench":  # a bench has options of its own
        parser.error(f"unrecognized arguments: {' '.join(rest)}")
    try:
        return int(parsed.do(parsed, arguments[1:]))
    except ConfigError as error:
        print(f"staleflow: {error}", file=sys.stderr)
        return REFUSED


_MODULES = {
    "submit": "staleflow.jobs.slurm",
    "doctor": "staleflow.jobs.doctor",
    "simulate": "staleflow.simulation.cli",
    "report": "staleflow.observe.report",
    "calibrate": "staleflow.engines.calibrate",
    "export": "staleflow.checkpoint.export",
}


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="staleflow", description="Asynchronous RL post-training as one SPMD job.")
    verbs = parser.add_subparsers(dest="verb", required=True, metavar="VERB")
    run = verbs.add_parser("run", help="run a job; under a launcher: as one of its ranks")
    run.add_argument("--resume", choices=("never", "auto", "must"), help="go on from the last checkpoint of the run")
    run.set_defaults(do=_run)
    plan = verbs.add_parser("plan", help="print who would do what, without starting anything")
    plan.add_argument("--nodes", type=int, default=1, help="nodes the device ranks are spread over")
    plan.add_argument("--json", action="store_true")
    plan.add_argument("--advise", action="store_true", help="which ratio of rollout to trainer ranks, and which eta")
    plan.add_argument("--run", type=Path, metavar="DIR", help="with --advise: an earlier run that measured the speeds")
    plan.set_defaults(do=_plan)
    for verb in (run, plan):
        verb.add_argument("config", help="a TOML file, e.g. configs/demo.toml")
        verb.add_argument("overrides", nargs="*", metavar="section.key=value")
    bench = verbs.add_parser("bench", help="measure a part against its limit and its peers")
    bench.add_argument("name", choices=BENCHES)
    bench.add_argument("--json", action="store_true")
    bench.set_defaults(do=_bench)
    for verb, text in _OTHERS.items():
        verbs.add_parser(verb, help=text, add_help=False)
    return parser


_OTHERS = {
    "submit": "render an sbatch script and submit it",
    "doctor": "check machine, cluster and leftovers",
    "simulate": "simulate policies on a workload",
    "calibrate": "measure the cost model of an instance",
    "report": "one HTML page about a run",
    "export": "write a checkpoint as a Hugging Face model",
}


def _run(parsed: argparse.Namespace, arguments: Sequence[str]) -> int:
    from staleflow.jobs.entry import run

    overrides = [*parsed.overrides, *([f"checkpoint.resume={parsed.resume}"] if parsed.resume else [])]
    return run(parsed.config, overrides, arguments)


def _plan(parsed: argparse.Namespace, _arguments: Sequence[str]) -> int:
    from staleflow.jobs.describe import describe
    from staleflow.jobs.plan import plan, spread

    config: Config = load(parsed.config, parsed.overrides)
    if parsed.advise:
        from staleflow.jobs.advise import advise

        print(advise(config, parsed.run))
        return 0
    job_plan = plan(config, spread(config, parsed.nodes))
    print(json.dumps(job_plan.to_json()) if parsed.json else describe(config, job_plan))
    return 0


def _bench(parsed: argparse.Namespace, arguments: Sequence[str]) -> int:
    module = importlib.import_module(f"staleflow.benches.{parsed.name}")
    result = module.run([a for a in arguments if a not in ("--json", parsed.name)])
    print(json.dumps(result, indent=None if parsed.json else 2))
    return 0
