"""Weights and optimizer of the trainer ranks, by torch.distributed.checkpoint: written beside training, read by any
number of ranks.

A save copies the rank's own shards to host memory on the calling thread (training may change them then), and writes
them on DCP's thread, over a process group of its own: never the publish group, nor the trainers' default group.
"""

from __future__ import annotations

import shutil
import time
from concurrent.futures import Future
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint.staging import DefaultStager, StagingOptions
from torch.distributed.checkpoint.state_dict import get_model_state_dict, set_model_state_dict

from staleflow.learning.trainer import PolicyTrainer

ROOT = "trainer"
OPTIMIZER = f"{ROOT}.optimizer."
FULL_BYTES = 1 << 20
MODEL = f"{ROOT}.model.hf"  # then transformers' own names


@dataclass(frozen=True)
class SaveResult:
    """How a save ended; `error` is None when this rank's part and all others' are durable."""

    version: int
    seconds: float
    error: str | None


@dataclass(frozen=True)
class _Running:
    """A save that has begun."""

    version: int
    folder: Path
    began_s: float
    future: Future[Any]
    stager: DefaultStager


class TrainerCheckpoints:
    """One per trainer rank; a collective of all of them. At most one save at a time."""

    def __init__(self, policy: PolicyTrainer) -> None:
        self._policy = policy
        self._group = dist.new_group(backend="gloo")
        self._running: _Running | None = None

    def save(self, version: int, folder: Path) -> None:
        """Begin; on all ranks between the same two steps."""
        if self._running is not None:
            raise RuntimeError(f"checkpoint of version {version}: that of {self._running.version} is still written")
        began_s = time.monotonic()
        # Without `cache`, buffers are made anew each time; always a copy, also of tensors that live in host memory.
        stager = DefaultStager(StagingOptions(False, False, False, False))
        future = dcp.async_save(
            {ROOT: _state(self._policy)},
            storage_writer=dcp.FileSystemWriter(folder, single_file_per_rank=True, sync_files=True),
            async_stager=stager,
            process_group=self._group,
        )
        assert isinstance(future, Future)  # with a stager of this kind
        self._running = _Running(version, folder, began_s, future, stager)

    def finished(self) -> SaveResult | None:
        """The result of a save that has ended since the last call."""
        run = self._running
        if run is None or not run.future.done():
            return None
        self._running = None
        run.stager.close()
        error = run.future.exception()
        why = None if error is None else f"{_why(error)} ({_free(run.folder)})"
        return SaveResult(run.version, time.monotonic() - run.began_s, why)


def load(policy: PolicyTrainer, folder: Path) -> None:
    """Read what `save` wrote, by any number of ranks, into the trainer. A collective of all trainer ranks."""
    reader = dcp.FileSystemReader(folder)
    stored = reader.read_metadata().state_dict_metadata
    if any(name.startswith(OPTIMIZER) for name in stored):
        state = policy.state_dict()
        dcp.load({ROOT: state}, storage_reader=reader)
        policy.load_state_dict(state)
    else:  # written before the first step
        weights = get_model_state_dict(policy.model)
        dcp.load({ROOT: {"model": weights}}, storage_reader=reader)
        set_model_state_dict(policy.model, weights)


def _state(policy: PolicyTrainer) -> dict[str, Any]:
    """Before its first step the optimizer has no state, and asking for it would count as a step."""
    return policy.state_dict() if policy.optimizer.state else {"model": get_model_state_dict(policy.model)}


def _free(folder: Path) -> str:
    """Room on the disk: what a full one makes of a write is not always told in those words."""
    try:
        free_bytes = shutil.disk_usage(folder).free
    except OSError as error:
        return str(error)
    return "no space left on device" if free_bytes < FULL_BYTES else f"{free_bytes >> 20} MiB free there"


def _why(error: BaseException) -> str:
    """The first rank's own error in what DCP collects from all of them."""
    failures = getattr(error, "failures", None)
    if failures:
        rank, wrapped = next(iter(failures.items()))
        cause = wrapped[0] if isinstance(wrapped, tuple) else wrapped
        return f"trainer {rank}: {type(cause).__name__}: {cause}"
    return f"{type(error).__name__}: {error}"
