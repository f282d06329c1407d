"""`staleflow run`: find out who this process is, refuse what cannot run, meet the others, play the role."""

from __future__ import annotations

import contextlib
import os
import sys
from collections.abc import Sequence

from staleflow.config import Config, ConfigError, load
from staleflow.jobs import local, preflight
from staleflow.jobs.bootstrap import bootstrap_mpi, check_rendezvous, detect_here
from staleflow.jobs.env import LaunchError, LaunchInfo
from staleflow.jobs.stop import ORDERED

REFUSED = 2
FAILED = 1
STARTED_BY_US = "STALEFLOW_LOCAL"  # set by jobs.local: config and files have been checked already


def run(config_path: str, overrides: Sequence[str], arguments: Sequence[str]) -> int:
    """Exit code of this process: 0, 1 failed, 2 refused, 85 stopped with a checkpoint, 128 + signal."""
    try:
        info = detect_here()
        config = load(config_path, overrides)
        if STARTED_BY_US not in os.environ:
            preflight.check(config)
        if info.launcher == "none":
            return local.run_here(config, arguments[1:] if arguments and arguments[0] == "run" else arguments)
        return _rank(config, info)
    except (ConfigError, LaunchError) as error:
        if os.environ.get("RANK", os.environ.get("OMPI_COMM_WORLD_RANK", os.environ.get("SLURM_PROCID", "0"))) == "0":
            for line in str(error).splitlines():
                print(f"staleflow: {line}", file=sys.stderr)
        return REFUSED


def _rank(config: Config, info: LaunchInfo) -> int:
    os.environ.setdefault("OMP_NUM_THREADS", "1")  # before torch: several ranks share these cores
    from staleflow.jobs import runtime
    from staleflow.observe.logs import RankLog, attempt_dir, record_failure

    runtime.die_with_parent()
    check_rendezvous(info)
    rendezvous = info.rendezvous or bootstrap_mpi(info)
    job = runtime.start(config, info, rendezvous, serves_store=info.rank == 0 and not info.agent_store)
    directory = attempt_dir(job.run_dir, job.attempt)
    log = RankLog(directory, job.rank, job.me.role)
    code = FAILED
    try:
        from staleflow.roles.wiring import play

        code = play(job, log.console)
    except SystemExit as leaving:
        code = leaving.code if isinstance(leaving.code, int) else FAILED
    except ConfigError as error:
        code = REFUSED
        if job.rank == 0:
            print(f"staleflow: {error}", file=log.console)
    except BaseException as error:
        record_failure(directory, job.rank, job.me.role, error)
        print(f"staleflow: rank {job.rank} ({job.me.role}) failed: {error!r}; log: {log.path}", file=log.console)
    job.leave()
    log.close()
    if code in ORDERED and STARTED_BY_US in os.environ:
        code = 0  # no failure in torchrun's eyes; jobs.local knows the signal, or reads the summary
    # Libraries' threads and destructors (engines, communicators) must not turn an ordered end into a hang or an abort.
    for stream in (sys.stdout, sys.stderr):
        with contextlib.suppress(ValueError, OSError):
            stream.flush()
    os._exit(code)
