"""Jobs that are lost: SIGKILL of every process at once, and what is on disk afterwards."""

from __future__ import annotations

import json
import os
import shutil
import signal
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import psutil
import torch
from safetensors.torch import load_file

from staleflow.checkpoint import layout
from staleflow.checkpoint.recovery import Resume, prepare
from staleflow.config import load
from staleflow.trajectories.schema import decode
from staleflow.trajectories.spool import FrameKind, read_segment, segments_in
from tests.job.harness import Job, Task, start

HERE = Path(__file__).parent
Key = tuple[int, int]  # prompt, member


def settings(steps: int, eta: int, **changes: Any) -> dict[str, Any]:
    """A run whose rewards vary, which takes a checkpoint every two steps and keeps every version's weights."""
    return {
        "run__steps": steps,
        "staleness__eta": eta,
        "rollout__step_ms": 20.0,
        "rollout__temperature": 1.0,
        "reward.kind": "python",
        "reward.options": {"function": "checkpoint_rewards:varied"},
        "checkpoint__every_steps": 2,
        "checkpoint__resume": "auto",
        "observe__audit_weights": True,
        "observe__probe_tokens": 0,
        "evaluation__max_prompts": 4,
    } | changes


def launch(task: Task, root: Path, **changes: Any) -> Job:
    """A job whose scoring processes find the reward."""
    others = [part for part in os.environ.get("PYTHONPATH", "").split(os.pathsep) if part and part != str(HERE)]
    os.environ["PYTHONPATH"] = os.pathsep.join([str(HERE), *others])
    return start(task, root, **changes)


def kill_everything(job: Job) -> None:
    """What a power failure does, as far as processes go."""
    parent = psutil.Process(job.process.pid)
    family = [parent, *parent.children(recursive=True)]
    for process in family:
        process.suspend()  # so that nobody can react to the death of another
    for process in family:
        process.send_signal(signal.SIGKILL)
    psutil.wait_procs(family, timeout=30)
    job.process.communicate()


def attempts(run_dir: Path) -> int:
    return len(list(run_dir.glob("attempt_*")))


def wait_until_training(job: Job, attempt: int, timeout_s: float = 240) -> None:
    """Until this attempt has begun to spool (it has generated something)."""
    spool = layout.spool_dir(job.run_dir)
    deadline_s = time.monotonic() + timeout_s
    while not any(name.attempt == attempt and name.number for name in segments_in(spool)):
        if job.process.poll() is not None or time.monotonic() > deadline_s:
            job.process.kill()
            raise AssertionError(f"attempt {attempt} did not come that far:\n{job.process.communicate()[0]}")
        time.sleep(0.05)


@dataclass(frozen=True)
class Remains:
    """What a lost job left: the version it will go on from, and its durable finished work that is still of use."""

    version: int
    finished: dict[Key, bytes]


def remains(run_dir: Path) -> Remains:
    """Read without the code that recovers: the spool, what was trained before the checkpoint, and its version."""
    place = layout.latest(run_dir)
    version = json.loads((place / layout.STATE).read_text())["version"] if place else 0
    trained = {prompt for line in metrics(run_dir) if line["step"] < version for prompt in line["prompts"]}
    finished = {}
    folders = [layout.spool_dir(run_dir), *([place / layout.SPOOL] if place else [])]
    for folder in folders:
        for path in segments_in(folder).values():
            for frame in read_segment(path):
                if frame.kind is not FrameKind.FINISHED or frame.prompt in trained:
                    continue
                if decode(frame.payload).v_traj <= version:
                    finished[frame.prompt, frame.tid & 0xFFFF] = frame.payload
    return Remains(version, finished)


def rehearse(job_dir: Path, scratch: Path) -> tuple[Resume, dict[Key, bytes]]:
    """Recover a copy of the run directory: the state that would be gone on from, and the finished payloads in it."""
    shutil.rmtree(scratch, ignore_errors=True)
    copy = scratch / job_dir.name
    shutil.copytree(job_dir, copy)
    config = load(copy / "config.toml", [f'run.dir="{scratch}"', 'checkpoint.resume="auto"'])
    resume = prepare(config, attempt=999, nodes=1)
    kept = {}
    for path in segments_in(layout.spool_dir(copy)).values():
        for frame in read_segment(path):
            if frame.kind is FrameKind.FINISHED:
                kept[frame.prompt, frame.tid & 0xFFFF] = frame.payload
    return resume, kept


def metrics(run_dir: Path) -> list[dict[str, Any]]:
    """Whole lines of metrics.jsonl: the surviving history."""
    path = run_dir / "metrics.jsonl"
    lines = path.read_text().splitlines() if path.exists() else []
    return [json.loads(line) for line in lines if line.endswith("}")]


def weights(run_dir: Path, version: int) -> dict[str, torch.Tensor]:
    return load_file(run_dir / "audit" / f"v{version}.safetensors")


def equal(a: dict[str, torch.Tensor], b: dict[str, torch.Tensor]) -> bool:
    """Bit by bit."""
    return a.keys() == b.keys() and all(torch.equal(a[name], b[name]) for name in a)
