"""`staleflow submit`: a readable sbatch script with the resolved config beside it, and its submission.

The scripts are the templates in launch/slurm/ with `@@NAME@@` filled in; what they have in common at run time (meeting
place, stop and requeue, who failed first) is launch/slurm/common.sh. Needs neither torch nor vLLM nor Slurm to render.
"""

from __future__ import annotations

import argparse
import json
import shlex
import subprocess
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from staleflow.config import Config, ConfigError, dumps, load
from staleflow.jobs.plan import plan, spread
from staleflow.jobs.security import private_directory

LAUNCH = Path(__file__).resolve().parents[3] / "launch"
LAUNCHERS = ("srun", "torchrun", "mpirun")
REFUSED = 2


@dataclass(frozen=True)
class JobScript:
    """What an sbatch script is made of. Paths are absolute; `work_dir` is where relative paths of the config begin."""

    name: str
    launcher: str
    nodes: int
    ranks_per_node: int
    run_dir: Path
    work_dir: Path
    launch_dir: Path
    site: Path
    python: str
    time: str | None = None
    partition: str | None = None
    gpus_per_node: int = 0
    exclusive: bool = True
    stop_before_s: int = 300
    max_requeues: int = 100
    survive_rollout: bool = False
    nsys_ranks: str | None = None  # ranks to start under Nsight Systems: "all" or "0,3"
    options: tuple[str, ...] = ()  # more options for sbatch, each as `--name=value`

    @property
    def folder(self) -> Path:
        """Where the script, the resolved config and the plan lie."""
        return self.run_dir / "submit"


def render_sbatch(job: JobScript) -> str:
    """The text of the script. Raises ConfigError when the templates are not there."""
    template = job.launch_dir / "slurm" / f"{job.launcher}.sbatch"
    if not template.is_file():
        raise ConfigError(f"{template}: no such template; run submit from a source checkout, or name --launch-dir")
    values = {
        "DIRECTIVES": "\n".join(f"#SBATCH {line}" for line in _directives(job)),
        "SETTINGS": "\n".join(_settings(job)),
        "NODES": str(job.nodes),
        "RANKS": str(job.nodes * job.ranks_per_node),
        "RANKS_PER_NODE": str(job.ranks_per_node),
        "KILL_ON_BAD_EXIT": "0" if job.survive_rollout else "1",
        "NO_KILL": " --no-kill" if job.survive_rollout else "",
    }
    text = template.read_text()
    for name, value in values.items():
        text = text.replace(f"@@{name}@@", value)
    return text


def _directives(job: JobScript) -> list[str]:
    tasks = 1 if job.launcher == "torchrun" else job.ranks_per_node
    lines = [
        f"--job-name={job.name}",
        f"--nodes={job.nodes}",
        f"--ntasks-per-node={tasks}",
        f"--chdir={shlex.quote(str(job.work_dir))}",
        f"--output={shlex.quote(str(job.run_dir / 'slurm-%j.log'))}",
        "--open-mode=append",
        "--requeue",
        f"--signal=B:USR1@{job.stop_before_s}",
    ]
    if job.exclusive:
        lines += ["--exclusive", "--mem=0"]
    if job.survive_rollout:
        lines.append("--no-kill")  # Slurm leaves the job alone when a node fails
    if job.gpus_per_node:
        lines.append(f"--gpus-per-node={job.gpus_per_node}")
    lines += [f"--{key}={value}" for key, value in (("time", job.time), ("partition", job.partition)) if value]
    return [*lines, *job.options]


def _settings(job: JobScript) -> list[str]:
    quoted = {
        "launch": job.launch_dir,
        "run_dir": job.run_dir,
        "config": job.folder / "config.toml",
        "max_requeues": job.max_requeues,
        "survive": int(job.survive_rollout),
    }
    return [
        *(f"{name}={shlex.quote(str(value))}" for name, value in quoted.items()),
        f"export STALEFLOW_PYTHON={shlex.quote(job.python)}",
        *([f"export {_nsys(job)}"] if job.nsys_ranks else []),
        "SITE_SRUN=() SITE_WRAP=() # the site's flags for srun, and a command around each rank",
        "# shellcheck source=/dev/null",
        f"source {shlex.quote(str(job.site))}",
    ]


def _nsys(job: JobScript) -> str:
    """What launch/nsys.sh reads; the ranks themselves say when the capture begins and ends (`observe.profiling`)."""
    values = {
        "NSYS_RANKS": job.nsys_ranks,
        "NSYS_DIR": job.run_dir / "trace",
        "NSYS_PLAN": job.folder / "plan.json",
        "NSYS_RANGE": 1,
    }
    return " ".join(f"{name}={shlex.quote(str(value))}" for name, value in values.items())


def ranks_per_node(config: Config, nodes: int) -> int:
    """Host and device ranks of each node. Raises ConfigError unless the device ranks divide evenly over the nodes."""
    world = spread(config, nodes)
    if len({node.ranks for node in world}) > 1:
        devices = config.device_ranks
        fitting = ", ".join(str(n) for n in range(1, devices + 1) if devices % n == 0)
        raise ConfigError(
            f"--nodes {nodes}: {devices} device ranks (trainer.ranks + rollout.instances x rollout.tensor_parallel) do "
            f"not divide evenly; choose one of {fitting}, or change the config"
        )
    plan(config, world)  # an instance must not lie across nodes
    return world[0].ranks


def submit(job: JobScript, config: Config) -> str:
    """Write script, config and plan, and hand the script to sbatch; returns its answer.

    Raises:
        ConfigError: there is no sbatch, or Slurm refuses.
    """
    private_directory(job.run_dir)
    job.folder.mkdir(exist_ok=True)
    script = job.folder / "job.sbatch"
    script.write_text(render_sbatch(job))
    (job.folder / "config.toml").write_text(dumps(config))
    (job.folder / "plan.json").write_text(json.dumps(plan(config, spread(config, job.nodes)).to_json(), indent=1))
    try:
        answer = subprocess.run(["sbatch", str(script)], capture_output=True, text=True)
    except FileNotFoundError:
        raise ConfigError("sbatch: not found; submit on a login node, or look at the script with --dry-run") from None
    if answer.returncode:
        raise ConfigError(f"sbatch refused {script}: {answer.stderr.strip()}")
    return answer.stdout.strip()


def main(argv: Sequence[str]) -> int:
    """Exit code: 0 submitted or printed, 2 refused."""
    arguments = _parser().parse_intermixed_args(argv)
    try:
        config = load(arguments.config, arguments.overrides)
        job = _job(arguments, config)
        if arguments.dry_run:
            print(render_sbatch(job), end="")
        else:
            print(f"{submit(job, config)}\nscript and config: {job.folder}\nlog: {job.run_dir}/slurm-*.log")
    except ValueError as error:  # ConfigError and LaunchError
        print(f"staleflow: {error}", file=sys.stderr)
        return REFUSED
    return 0


def _job(arguments: argparse.Namespace, config: Config) -> JobScript:
    if config.fault.survive_rollout and arguments.launcher != "srun":
        raise ConfigError(
            f"fault.survive_rollout = true: {arguments.launcher} ends all ranks when one dies; use --launcher srun, or "
            "switch it off"
        )
    ranks = ranks_per_node(config, arguments.nodes)
    launch_dir = arguments.launch_dir.resolve()
    site = arguments.site if arguments.site.exists() else launch_dir / "sites" / f"{arguments.site}.env"
    if not site.is_file():
        known = ", ".join(sorted(p.stem for p in (launch_dir / "sites").glob("*.env")))
        raise ConfigError(f"--site {arguments.site}: no such file or site; known: {known}")
    return JobScript(
        name=config.run.name,
        launcher=arguments.launcher,
        nodes=arguments.nodes,
        ranks_per_node=ranks,
        run_dir=config.run_dir.absolute(),
        work_dir=Path.cwd(),
        launch_dir=launch_dir,
        site=site.resolve(),
        python=arguments.python,
        time=arguments.time,
        partition=arguments.partition,
        gpus_per_node=ranks - 1 if arguments.gpus_per_node is None else arguments.gpus_per_node,
        exclusive=not arguments.shared_nodes,
        stop_before_s=arguments.stop_before,
        max_requeues=arguments.max_requeues,
        survive_rollout=config.fault.survive_rollout,
        nsys_ranks=config.profile.nsys.ranks_text if config.profile.nsys else None,
        options=tuple(arguments.sbatch),
    )


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="staleflow submit", description="Render an sbatch script and submit it.")
    add = parser.add_argument
    add("config", help="a TOML file, e.g. configs/demo.toml")
    add("overrides", nargs="*", metavar="section.key=value")
    add("--nodes", type=int, required=True, help="nodes; the device ranks are spread evenly over them")
    add("--time", help="time limit as sbatch takes it, e.g. 04:00:00")
    add("--partition")
    add("--launcher", choices=LAUNCHERS, default="srun", help="what starts the ranks (default: srun)")
    add("--gpus-per-node", type=int, help="default: one per device rank; 0 for a cluster without GPUs")
    add("--site", type=Path, default=Path("default"), help="site file, or the name of one in launch/sites")
    add("--shared-nodes", action="store_true", help="do not ask for whole nodes")
    add("--stop-before", type=int, default=300, metavar="S", help="seconds before the limit: stop, checkpoint, requeue")
    add("--max-requeues", type=int, default=100)
    add(
        "--sbatch",
        action="append",
        default=[],
        metavar="--OPTION=VALUE",
        help="more options for sbatch: --sbatch=--account=me",
    )
    add("--python", default=sys.executable, help="interpreter of the ranks (default: this one)")
    add("--launch-dir", type=Path, default=LAUNCH, help="folder with slurm/*.sbatch, sites/ and rank.sh")
    add("--dry-run", action="store_true", help="print the script; write and submit nothing")
    return parser
