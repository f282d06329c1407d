"""Puts a trainer rank and a rollout rank together."""

from __future__ import annotations

import os
import time
from collections.abc import Callable
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch

from staleflow.config import Config
from staleflow.engines.base import Engine
from staleflow.engines.scripted import ScriptedEngine, mix
from staleflow.engines.vllm import VllmEngine, VllmSettings, environment
from staleflow.jobs import rings
from staleflow.jobs.devices import cuda_index
from staleflow.jobs.preflight import model_facts
from staleflow.jobs.runtime import Job
from staleflow.observe.profiling import Profiling, open_profiling
from staleflow.roles import plane
from staleflow.roles.beginning import wait_for_start
from staleflow.roles.messages import Failed, Regroup
from staleflow.roles.ranklink import RankLink
from staleflow.roles.rollout import Rollout, RolloutSettings
from staleflow.roles.tracing import spans_of
from staleflow.trajectories.pinning import cuda_runtime, pin
from staleflow.trajectories.unpacking import unpack_to

RETIRE_FLUSH_S = 2.0


def play_trainer(job: Job) -> int:
    from staleflow.checkpoint.trainer_state import load
    from staleflow.learning.trainer import PolicyTrainer
    from staleflow.roles.trainer import Trainer, TrainerSettings

    started_s = time.monotonic()
    config = job.config
    down, up = rings.attach_rings(job)
    link = RankLink(down, up)
    rings.tell_mapped(job)
    group = plane.publish_group(job)
    job.enter_role_world(job.plan.trainers, job.me.device or 0)
    with _told_to_host(job, link):
        device = device_of(job)
        pinning = pin(down.data, f"down ring of trainer rank {job.rank}", cuda_runtime())
        policy = PolicyTrainer(
            config.model,
            config.optimizer,
            replace(config.algorithm, temperature=config.rollout.temperature),
            device=device,
            seed=config.run.seed,
        )
        start = wait_for_start(job)
        if start.trainer is not None:
            load(policy, Path(start.trainer))
        publisher = plane.publisher_of(job, group, policy.sharded_parameters())
        direct = config.parameters.transport == "direct"
        settings = TrainerSettings(
            rank=job.rank,
            leader=job.rank == job.plan.trainers[0],
            start_version=start.version,
            offers=direct and job.rank == job.plan.trainers[0],
            record_timeout_s=config.fault.collective_timeout_s,
            probe=probe_tokens(config),
            audit_dir=_audit_dir(job),
        )
        job.watch_signals()
        spans = spans_of(job)
        profiling = _profiling(job)
        regroup = _regrouping(job, publisher) if config.fault.survive_rollout else None
        try:
            unpack, asked = unpack_to(device, down), job_signal(job)
            Trainer(settings, link, policy, publisher, unpack, asked, spans, regroup, profiling).run(started_s)
        finally:
            profiling.close()
            spans.close()
            publisher.close(deliver=not direct)  # of the last version nobody may be told to take it
        pinning.unpin()
    _retire(link)
    return 0  # told to leave: the exit code of the job is rank 0's


def _regrouping(job: Job, publisher: Any) -> Callable[[Regroup], None]:
    """Publish over a new group, which all its members make together."""

    def regroup(order: Regroup) -> None:
        ranks = tuple(order.ranks)
        group = job.group(plane.publish_name(order.generation), ranks)
        offer = plane.lane_offer(job, order.generation, ranks)
        trainers = range(len(job.plan.trainers))
        publisher.regroup(group, trainer_ranks_in_group=trainers, names=rings.names_of(job, ranks), offer=offer)

    return regroup


def play_rollout(job: Job) -> int:
    started_s = time.monotonic()
    config = job.config
    link = RankLink(*rings.attach_rings(job))
    group = plane.publish_group(job)
    source = plane.source_of(job, group)
    rings.tell_mapped(job)
    instance = job.plan.instance(job.me.instance or 0)
    cut = job.group(f"cut-{job.me.instance}", instance) if len(instance) > 1 else None
    os.environ.update({k: v for k, v in environment(not torch.cuda.is_available()).items() if k not in os.environ})
    job.enter_role_world(instance, job.me.device or 0)
    with _told_to_host(job, link):
        from staleflow.parameters.pull import Puller

        engine = build_engine(job)
        plane.pin(source)  # now that the engine has chosen its device
        puller = Puller(source, engine, agree=_agree(cut, "MIN"))
        settings = RolloutSettings(
            rank=job.rank,
            instance=job.me.instance or 0,
            leader=job.me.instance_rank == 0,
            max_tokens=config.rollout.max_tokens,
            temperature=config.rollout.temperature,
            evaluation_temperature=config.evaluation.temperature if config.evaluation else 0.0,
            seed_per_request=config.rollout.engine == "scripted",
            snapshot_every_s=config.coordination.cycle_ms / 1000,
            pull_timeout_s=config.fault.collective_timeout_s,
            probe=probe_tokens(config),
        )
        job.watch_signals()
        spans, profiling = spans_of(job), _profiling(job)
        try:
            Rollout(settings, link, engine, puller, _agree(cut, None), job_signal(job), spans, profiling).run(started_s)
        finally:
            profiling.close()
            spans.close()
            engine.close()
    _retire(link)
    return 0  # told to leave: the exit code of the job is rank 0's


def _profiling(job: Job) -> Profiling:
    return open_profiling(job.config.profile, job.rank, job.me.role, job.run_dir / "trace")


def job_signal(job: Job) -> Callable[[], int]:
    """The signal that this rank has got, 0 for none."""
    return lambda: job.signal


class _told_to_host:
    """An exception inside is told to the host before it ends this rank."""

    def __init__(self, job: Job, link: RankLink) -> None:
        self._job, self._link = job, link

    def __enter__(self) -> None: ...

    def __exit__(self, kind: Any, error: BaseException | None, _trace: Any) -> None:
        if error is None or isinstance(error, SystemExit):
            return
        with suppress(Exception):  # the host may be what failed
            self._link.report(Failed(self._job.rank, f"{type(error).__name__}: {error}"))
            _retire(self._link)


def _retire(link: RankLink) -> None:
    """Give the host the chance to take what is still to be said."""
    deadline_s = time.monotonic() + RETIRE_FLUSH_S
    while not link.flush() and time.monotonic() < deadline_s:
        time.sleep(0.01)


def device_of(job: Job) -> torch.device:
    """The planned device, never LOCAL_RANK's."""
    if not torch.cuda.is_available():
        return torch.device("cpu")
    device = torch.device("cuda", _index_of(job))
    torch.cuda.set_device(device)
    return device


def _index_of(job: Job) -> int:
    """The planned device among those that CUDA shows; where a node has fewer than device ranks, they share."""
    device = cuda_index(job.me.device or 0, len(job.plan.devices_of(job.me.node)), os.environ)
    return device % torch.cuda.device_count() if torch.cuda.is_available() else device


def build_engine(job: Job) -> Engine:
    config, r = job.config, job.config.rollout
    if r.engine == "scripted":
        vocabulary = int(model_facts(Path(config.model.path))["vocab_size"])
        return ScriptedEngine(vocabulary=vocabulary, max_running=r.max_running, step_s=r.step_ms / 1000)
    return VllmEngine(
        VllmSettings(
            model=Path(config.model.path),
            dtype=config.model.dtype,
            # Equal on the ranks of an instance, different between instances and between attempts.
            seed=mix(config.run.seed, job.me.instance or 0, job.attempt) & 0x7FFFFFFF,
            max_model_len=r.max_model_len,
            max_running=r.max_running,
            tensor_parallel=r.tensor_parallel,
            instance_name=f"staleflow-{job.job_id}-{job.me.instance}",
            instance_rank=job.me.instance_rank,
            device=_index_of(job),
            gpu_memory_utilization=r.gpu_memory_utilization,
            enforce_eager=r.enforce_eager,
            kv_cache_tokens=r.kv_cache_tokens,
            top_p=r.top_p,
            top_k=r.top_k,
            stop=r.stop,
        )
    )


def probe_tokens(config: Config) -> tuple[int, ...]:
    """A fixed sequence of legal token ids, equal on all ranks."""
    vocabulary = int(model_facts(Path(config.model.path))["vocab_size"])
    n = min(config.observe.probe_tokens + 1, config.rollout.max_model_len - 1) if config.observe.probe_tokens else 0
    return tuple(mix(17, i) % vocabulary for i in range(n))


def _audit_dir(job: Job) -> Path | None:
    if not job.config.observe.audit_weights:
        return None
    directory = job.run_dir / "audit"
    directory.mkdir(exist_ok=True)
    return directory


def _agree(group: Any, operation: str | None) -> Callable[[int], int]:
    """A number agreed on by the instance's ranks: reduced by `operation`, or (None) the leader's."""
    if group is None:
        return lambda n: n
    import torch.distributed as dist

    def agree(n: int) -> int:
        tensor = torch.tensor([n], dtype=torch.int64)
        if operation is None:
            group.broadcast(tensor, 0).wait()
        else:
            options = dist.AllreduceOptions()
            options.reduceOp = getattr(dist.ReduceOp, operation)
            group.allreduce([tensor], options).wait()
        return int(tensor[0])

    return agree
