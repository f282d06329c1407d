"""Start real jobs as a user would, watch them, and look at what they leave behind."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tests.shm import lasting

REPOSITORY = Path(__file__).parents[2]
BIN = Path(sys.executable).parent


@dataclass(frozen=True)
class Task:
    """A tiny model and its data, made once per test session."""

    root: Path

    def overrides(self, run_dir: Path, **changes: Any) -> list[str]:
        """configs/demo.toml on this model, with a short run and the scripted engine unless told otherwise."""
        settings = {
            "model.path": str(self.root / "model"),
            "data.train": [{"path": str(self.root / "train.jsonl")}],
            "evaluation.data": [{"path": str(self.root / "test.jsonl")}],
            "evaluation.max_prompts": 8,
            "run.dir": str(run_dir),
            "run.name": "test",
            "run.steps": 3,
            "staleness.batch_groups": 4,
            "staleness.group_size": 4,
            "rollout.engine": "scripted",
            "observe.tensorboard": False,
        } | {key.replace("__", "."): value for key, value in changes.items()}
        return [f"{key}={_toml(value)}" for key, value in settings.items()]


def _toml(value: Any) -> str:
    if isinstance(value, list):
        return f"[{', '.join(map(_toml, value))}]"
    if isinstance(value, dict):
        return "{" + ", ".join(f"{key} = {_toml(item)}" for key, item in value.items()) + "}"
    return json.dumps(value)


@dataclass
class Job:
    """A running `staleflow run` and its run directory."""

    process: subprocess.Popen[str]
    run_dir: Path
    shm_before: frozenset[str]

    def wait(self, timeout_s: float = 240) -> int:
        """Exit code; the output is kept in `output`."""
        self.output, _ = self.process.communicate(timeout=timeout_s)
        return self.process.returncode

    def until(self, what: Any, timeout_s: float = 180) -> None:
        """Wait for `what()` to become true while the job runs."""
        deadline_s = time.monotonic() + timeout_s
        while not what():
            if self.process.poll() is not None:
                raise AssertionError(f"the job ended with {self.process.returncode}:\n{self.process.stdout.read()}")
            if time.monotonic() > deadline_s:
                raise AssertionError("the job did not come that far")
            time.sleep(0.1)

    def until_step(self, step: int) -> None:
        self.until(lambda: any(line["step"] >= step for line in self.metrics()))

    def metrics(self) -> list[dict[str, Any]]:
        path = self.run_dir / "metrics.jsonl"
        return [json.loads(line) for line in path.read_text().splitlines()] if path.exists() else []

    @property
    def summary(self) -> dict[str, Any]:
        return dict(json.loads((self.run_dir / "summary.json").read_text()))

    def pid_of(self, rank: int) -> int:
        """The process of a rank, by its open log file."""
        log = next((self.run_dir / "attempt_0").glob(f"rank_{rank}.*.log")).resolve()
        return next(pid for pid in _pids() if any(path == str(log) for path in _open_files(pid)))

    def ranks_alive(self) -> list[int]:
        """Pids that still have a log of this run open."""
        logs = str((self.run_dir / "attempt_0").resolve())
        return [pid for pid in _pids() if any(path.startswith(logs) for path in _open_files(pid))]

    def shm_left(self) -> set[str]:
        """New names in shared memory since the job was started that carry this run's name or vLLM's mark."""
        return lasting(self._shm_new, 20.0)

    def _shm_new(self) -> set[str]:
        return {
            name for name in _shm() - self.shm_before if "-test-" in name or name.startswith(("staleflow-", "vllm"))
        }

    def signal(self, number: int) -> None:
        self.process.send_signal(number)


def start(task: Task, run_root: Path, *, launcher: tuple[str, ...] = (), **changes: Any) -> Job:
    """`staleflow run configs/demo.toml …`, alone or under a launcher's command line."""
    overrides = task.overrides(run_root, **changes)
    command = [
        *launcher,
        *([] if launcher else [sys.executable]),
        "-m",
        "staleflow",
        "run",
        "configs/demo.toml",
        *overrides,
    ]
    environment = os.environ | {
        "PATH": f"{BIN}:{os.environ['PATH']}",
        "OMPI_ALLOW_RUN_AS_ROOT": "1",
        "OMPI_ALLOW_RUN_AS_ROOT_CONFIRM": "1",
        "TMPDIR": "/tmp",  # Open MPI's sockets need a short path
    }
    before = frozenset(_shm())
    process = subprocess.Popen(
        command, cwd=REPOSITORY, env=environment, text=True, stdout=subprocess.PIPE, stderr=subprocess.STDOUT
    )
    name = changes.get("run__name", "test")
    return Job(process, run_root / name, before)


def finished(task: Task, run_root: Path, **changes: Any) -> Job:
    """A job that has run to its end with exit code 0."""
    job = start(task, run_root, **changes)
    code = job.wait()
    assert code == 0, job.output
    return job


TORCHRUN = (str(BIN / "torchrun"), "--standalone", "--nproc-per-node", "4")
MPIRUN = (str(BIN / "mpirun"), "-n", "4", "--oversubscribe", sys.executable)
INTERRUPT, TERMINATE = signal.SIGINT, signal.SIGTERM


def _shm() -> set[str]:
    return {path.name for path in Path("/dev/shm").iterdir()}


def _pids() -> list[int]:
    return [int(path.name) for path in Path("/proc").iterdir() if path.name.isdigit()]


def _open_files(pid: int) -> list[str]:
    try:
        return [str(fd.readlink()) for fd in Path(f"/proc/{pid}/fd").iterdir()]
    except OSError:
        return []
