"""Start all ranks on this machine: `staleflow run` without a launcher. torchrun starts them, this one looks after it.

The exit code tells how it ended: 0 completed, 130 Ctrl-C, 143 SIGTERM, 85 stopped with a checkpoint, 1 failed, 2
refused.
"""

from __future__ import annotations

import contextlib
import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Sequence
from types import FrameType

import psutil

from staleflow.config import Config
from staleflow.jobs.plan import plan, spread
from staleflow.jobs.slurm import LAUNCH
from staleflow.jobs.stop import ORDERED, STOP_FILE

REFUSED = 2


def run_here(config: Config, arguments: Sequence[str]) -> int:
    """Run `staleflow run ARGUMENTS` on 1 + trainer + rollout ranks of this machine; returns the exit code."""
    wrapper, environment = _under_nsys(config) if config.profile.nsys else ([], {})
    command = [
        sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(1 + config.device_ranks),
        "--no-python", *wrapper, sys.executable, "-m", "staleflow", "run", *arguments,
    ]  # fmt: skip
    environment |= {"OMP_NUM_THREADS": os.environ.get("OMP_NUM_THREADS", "1"), "STALEFLOW_LOCAL": "1"}
    environment = os.environ | environment
    # A session of its own: Ctrl-C reaches this process only, which passes it on once.
    child = subprocess.Popen(command, env=environment, start_new_session=True)
    received: list[int] = []

    def forward(number: int, _frame: FrameType | None) -> None:
        if not received:
            received.append(number)
            _tell_ranks(child, number)

    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, forward)
    # torchrun would die of it; the stop file reaches rank 0 and means the same.
    signal.signal(signal.SIGUSR1, lambda _number, _frame: (config.run_dir / STOP_FILE).write_text("SIGUSR1\n"))
    started_s = time.time()
    code = _wait(child, received, config.fault.stop_grace_s)
    if received:
        return 128 + received[0]
    ended = _exit_code_of(config, started_s)
    if ended in ORDERED:
        return ended
    return code if code in (0, REFUSED) else 1


def _tell_ranks(agent: subprocess.Popen[bytes], number: int) -> None:
    """Pass a signal to the ranks themselves: torchrun's agent would do so too, and then die of it with a traceback."""
    with contextlib.suppress(psutil.NoSuchProcess):
        ranks = psutil.Process(agent.pid).children()
        for process in ranks or [agent]:
            with contextlib.suppress(psutil.NoSuchProcess, ProcessLookupError):
                process.send_signal(number)


def _under_nsys(config: Config) -> tuple[list[str], dict[str, str]]:
    """What starts the wanted ranks under Nsight Systems, and what it has to know."""
    window = config.profile.nsys
    assert window is not None
    config.run_dir.mkdir(parents=True, exist_ok=True, mode=0o700)
    plan_file = config.run_dir / "plan.json"
    plan_file.write_text(json.dumps(plan(config, spread(config, 1)).to_json()))
    environment = {
        "NSYS_RANKS": window.ranks_text, "NSYS_DIR": str(config.run_dir / "trace"), "NSYS_PLAN": str(plan_file),
        "NSYS_RANGE": "1",
    }  # fmt: skip
    return [str(LAUNCH / "nsys.sh")], environment


def _exit_code_of(config: Config, since_s: float) -> int | None:
    """What rank 0 says of a run that has ended since then."""
    path = config.run_dir / "summary.json"
    if not path.exists() or path.stat().st_mtime < since_s:
        return None
    code = json.loads(path.read_text()).get("exit_code")
    return None if code is None else int(code)


def _wait(child: subprocess.Popen[bytes], received: list[int], grace_s: float) -> int:
    """Until the ranks have left. After a signal they have the grace time, then they are killed."""
    deadline_s = float("inf")
    while True:
        with contextlib.suppress(subprocess.TimeoutExpired):
            return child.wait(timeout=0.2)
        if received and deadline_s == float("inf"):
            deadline_s = time.monotonic() + grace_s
        if time.monotonic() > deadline_s:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(child.pid, signal.SIGKILL)
            return child.wait()
