"""Puts a host rank together; on rank 0 the coordinator too."""

from __future__ import annotations

import logging
import time
from collections import deque
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import Any, TextIO

from staleflow.checkpoint import layout
from staleflow.checkpoint.layout import CheckpointError
from staleflow.checkpoint.recovery import Resume, durable, prepare
from staleflow.config import Config, ConfigError, Source
from staleflow.coordination.coordinator import Coordinator
from staleflow.coordination.cost_model import DEFAULT, load_cost_model
from staleflow.data.prompts import Dataset, DataSettings, Prompt, PromptSource
from staleflow.data.tokenizer import load_tokenizer
from staleflow.jobs import rings, runtime
from staleflow.jobs.plan import JobPlan
from staleflow.jobs.runtime import Job
from staleflow.jobs.stop import STOP_FILE, StopWatch
from staleflow.learning.sampling import warnings_of
from staleflow.observe.live import open_view
from staleflow.observe.metrics import MetricsWriter
from staleflow.parameters.manifest import Manifest
from staleflow.parameters.relay import Relay
from staleflow.parameters.store import NodeStore
from staleflow.roles import messages as m
from staleflow.roles import plane
from staleflow.roles.auditing import ShardAccount
from staleflow.roles.beginning import Start, core_state, restore_prompts, tell_start, wait_for_start
from staleflow.roles.checkpointing import Books
from staleflow.roles.coordinator import CoordinatorRole
from staleflow.roles.devicelink import DeviceLink
from staleflow.roles.evaluations import Evaluations
from staleflow.roles.host import Host, HostSettings
from staleflow.roles.hostlink import CoordinatorLink, Gate, HostLinks
from staleflow.roles.observer import Observer
from staleflow.roles.spooling import Spooling
from staleflow.roles.survivor import Survivor
from staleflow.roles.tracing import TracedRewards, spans_of
from staleflow.trajectories.arena import Arena
from staleflow.trajectories.ring import segment_name
from staleflow.trajectories.server import TrajectoryServer

VIEW_EVERY_S = 0.25
FAILED = 1
log = logging.getLogger(__name__)


def play_host(job: Job, console: TextIO) -> int:
    manifest = plane.manifest_of(job)
    runtime.check_shared_memory(job.plan, job.me.node, 2 * manifest.nbytes if plane.has_stores(job) else 0)
    resume = _begin(job)
    node = _Node(job, manifest)
    try:
        return _serve(job, node) if resume is None else _coordinate(job, node, resume, console)
    finally:
        node.close()


def _begin(job: Job) -> Resume | None:
    """Rank 0 finds out where this attempt begins, and tells the others."""
    if job.rank != 0:
        wait_for_start(job)
        return None
    try:
        resume = prepare(job.config, job.attempt, len(job.plan.nodes))
    except CheckpointError as error:
        raise ConfigError(str(error)) from error
    (job.run_dir / STOP_FILE).unlink(missing_ok=True)  # it was meant for an earlier attempt
    tell_start(job, Start(resume.version, str(resume.trainer) if resume.trainer else None))
    return resume


class _Node:
    """The host of one node with what it owns: rings, arena, store, relay, reward processes."""

    def __init__(self, job: Job, manifest: Manifest) -> None:
        self.outbox: deque[m.ToCoordinator] = deque()
        self._account = ShardAccount(job.me.node, self.outbox.append)
        tokenizer = load_tokenizer(job.config.model.path)
        self.spans = spans_of(job)
        self._rewards = TracedRewards(job.config.reward, self.spans)
        made = rings.create_rings(job)
        links = [DeviceLink(job.plan.ranks[rank], down, up) for rank, (down, up) in made.items()]
        name = segment_name(job.config.run.name, rings.run_id_of(job), f"node{job.me.node}-arena")
        self._arena = Arena.create(name, job.plan.arena_bytes, run_id=rings.run_id_of(job))
        self._arena.unlink()  # only this process uses it
        stores = plane.has_stores(job) and job.rank in job.plan.relays
        self._store = NodeStore.create(rings.store_name(job), manifest) if stores else None
        server = TrajectoryServer(self._arena)
        self._spooling = Spooling(
            layout.spool_dir(job.run_dir), job.attempt, job.me.node, job.rank, server, self._account.emit,
            durable=durable(job.config),
        )  # fmt: skip
        self._spooling.restore()
        self.host = Host(
            HostSettings(job.rank, job.me.node, job.config.rollout.max_tokens, job.config.run.seed),
            links,
            server,
            self._rewards,
            lambda ids: str(tokenizer.decode(ids, skip_special_tokens=True)),
            job.alive,
            self._account.emit,
            self._spooling,
            _audit(job),
        )
        job.post(f"store/{job.me.node}", self._store.name if self._store else None)
        members = job.plan.publish
        start_relay = partial(self._start_relay, job, manifest)
        relay = start_relay(job.group("publish", members), members, 0) if self._store is not None else None
        self._survivor = Survivor(job, self.host, relay, start_relay)
        self._watch = plane.watch_of(job, self.host.on_stored, self.host.on_relay_error)
        self._unmapped = rings.Unmapped(job)

    def _start_relay(
        self, job: Job, manifest: Manifest, group: Any, members: tuple[int, ...], generation: int
    ) -> Relay:
        assert self._store is not None, "only nodes with rollout ranks are in the publish group"
        return Relay(
            group,
            manifest,
            self._store,
            self.host.on_stored,
            trainer_ranks_in_group=range(len(job.plan.trainers)),
            names=rings.names_of(job, members),
            timeout_s=job.config.fault.collective_timeout_s,
            on_error=partial(self.host.on_relay_error, generation=generation),
            offer=plane.lane_offer(job, generation, members),
        )

    def turn(self, inbox: Sequence[m.ToHost]) -> None:
        """The host's turn. While the device ranks are starting: look whether all have mapped what is shared."""
        self.host.turn(self._survivor.take(inbox))
        self._account.tell(self.host.steps, self.host.trained)
        if self._unmapped.waiting and not self._unmapped.look():
            self._unlink()

    def _unlink(self) -> None:
        for link in self.host.links:
            link.down.unlink()
            link.up.unlink()
        if self._store is not None:
            self._store.unlink()

    def close(self) -> None:
        self.spans.close()
        self._rewards.close()
        self._spooling.close()
        if self._survivor.relay is not None:
            self._survivor.relay.close()
        if self._watch is not None:
            self._watch.close()
        self._unlink()


def _audit(job: Job) -> Callable[[bytes], None] | None:
    """Tests: keep every trajectory that is trained on, one record after the other."""
    if not job.config.observe.audit_weights:
        return None
    file = (job.run_dir / "audit.trajectories").open("ab")
    return lambda record: file.write(record) and file.flush()


# ---- rank 0 ----------------------------------------------------------------------------------------------------------


def _coordinate(job: Job, node: _Node, resume: Resume, console: TextIO) -> int:
    job.watch_signals()  # from here on every end is an ordered one, with a summary
    runtime.write_run_files(job)
    inbox: deque[m.ToHost] = deque()
    observer = Observer(
        job.config,
        open_view(_live_mode(job), console),
        MetricsWriter(job.run_dir, tensorboard=job.config.observe.tensorboard, from_step=resume.version),
        node.spans,
    )
    for note in (*resume.notes, *(f"warning: {line}" for line in warnings_of(job.config))):
        observer.note(note)
    links = HostLinks(job) if len(job.plan.nodes) > 1 else None

    def send(n: int, message: m.ToHost) -> None:
        if n == 0 or links is None:
            inbox.append(message)
        else:
            links.send(n, message)

    books = Books(resume.journal, resume.ledger.dump, Gate(send))
    role = build_coordinator(job.config, job.plan, resume, books, StopWatch(job.run_dir), observer)
    try:
        _loop(job, node, role, books, inbox, observer, links)
    except Exception as error:
        role.fail(f"rank 0 (host) failed: {type(error).__name__}: {error}")
        for link in node.host.links:
            link.stop(FAILED)
        observer.finish("failed", role.outcome.reason if role.outcome else str(error), FAILED)
        raise
    if links is not None:
        log.info("links between hosts: %s", links.counters)
        links.close()
    outcome = role.outcome
    assert outcome is not None
    observer.finish(outcome.status, outcome.reason, outcome.code)
    return outcome.code


def _live_mode(job: Job) -> str:
    """mpirun gives its ranks a terminal of its own making: no place to draw on."""
    mode = job.config.observe.live
    return "never" if mode == "auto" and job.info.launcher in ("openmpi", "mpich", "pmix") else mode


def _loop(
    job: Job,
    node: _Node,
    role: CoordinatorRole,
    books: Books,
    inbox: deque[m.ToHost],
    observer: Observer,
    links: HostLinks | None,
) -> None:
    """Host and coordinator by turns until the run has ended and every rank of this node has left."""
    viewed_s = 0.0
    while role.outcome is None:
        node.turn(_drained(inbox))
        now_s = time.monotonic()
        elsewhere = links.receive() if links is not None else []
        if job.signal:
            node.outbox.append(m.StopRequested(0, job.signal))
            job.signal = 0
        role.turn([*((0, message) for message in _drained(node.outbox)), *elsewhere], now_s)
        for lost, why in links.lost() if links is not None else ():
            role.node_lost(lost, why, now_s)
        if links is not None and links.failure is not None:
            role.fail(links.failure)
        if (failure := books.commit()) is not None:
            role.fail(failure)
            books.commit()
        if now_s - viewed_s > VIEW_EVERY_S:
            viewed_s = now_s
            observer.refresh(now_s, role.waited_for())
        if not inbox:
            node.host.wait()
    job.left_out = role.survival.ranks
    node.turn(_drained(inbox))
    _see_off(job, node)


def _see_off(job: Job, node: _Node) -> None:
    """Go on draining until the device ranks have gone or posted that they leave, for half the grace time at most."""
    deadline_s = time.monotonic() + job.config.fault.stop_grace_s / 2
    while time.monotonic() < deadline_s:
        node.turn(())
        if all(job.posted(f"left/{d.rank}") or not job.alive(d.rank) for d in job.plan.devices_of(job.me.node)):
            return
        time.sleep(0.02)


def _serve(job: Job, node: _Node) -> int:
    """Any host but rank 0's: its turns, and its coordinator at the other end of a link, until that says stop."""
    link = CoordinatorLink(job, node.spans.align)
    job.watch_signals()
    told = False
    while node.host.stopping is None:
        node.turn(link.receive())
        if job.signal and not told:
            told = True
            link.send(m.StopRequested(job.rank, job.signal))
        for message in _drained(node.outbox):
            link.send(message)
        if link.failure is not None:
            node.turn([m.Stop(FAILED, link.failure)])
        node.host.wait()
    _see_off(job, node)
    link.close()
    stop = node.host.stopping
    if link.failure is not None:
        raise RuntimeError(stop.reason)
    return stop.code


def _drained(queue: deque[Any]) -> list[Any]:
    out = []
    while queue:
        out.append(queue.popleft())
    return out


# ---- the coordinator's parts -----------------------------------------------------------------------------------------


def build_coordinator(
    config: Config, job_plan: JobPlan, resume: Resume, books: Books, watch: StopWatch, observer: Observer
) -> CoordinatorRole:
    """The pure core with its books, the prompts, and the role that drives them; at the point where the run goes on."""
    tokenizer = load_tokenizer(config.model.path)
    path = config.coordination.cost_model
    core = Coordinator(config.coordination, resume.ledger, load_cost_model(path) if path else DEFAULT, [])
    prompts = PromptSource(data_settings(config, config.data.train), tokenizer)
    _tell_left_out("data.train", prompts, observer)
    restore_prompts(prompts, resume)
    core.load(core_state(resume, prompts, config))
    observer.accuracies = list(resume.run.get("evaluations", ()))
    evaluations = None
    if config.evaluation is not None:
        held_out = evaluation_prompts(config, tokenizer, observer)
        evaluations = Evaluations(held_out, config.evaluation.samples)
    role = CoordinatorRole(config, job_plan, core, prompts, evaluations, books, watch, observer, resume.version)
    role.resume(resume, prompts.prompt)
    observer.watch(role.accounts, core)
    return role


def data_settings(config: Config, sources: tuple[Source, ...], **changes: Any) -> DataSettings:
    d = config.data
    settings: dict[str, Any] = {
        "datasets": tuple(Dataset(source.path, source.weight) for source in sources),
        "prompt_field": d.prompt_field,
        "answer_field": d.answer_field,
        "reference_fields": d.reference_fields,
        "chat_template": d.chat_template,
        "system_prompt": d.system_prompt,
        "deduplicate": d.deduplicate,
        "max_prompt_tokens": d.max_prompt_tokens,
        "epochs": d.epochs,
        "shuffle": d.shuffle,
        "seed": config.run.seed,
    }
    return DataSettings(**(settings | changes))


def _tell_left_out(key: str, prompts: PromptSource, observer: Observer) -> None:
    if (words := prompts.left_out_in_words()) is not None:
        observer.note(f"{key}: {words} (data.max_prompt_tokens = {prompts.settings.max_prompt_tokens})")


def evaluation_prompts(config: Config, tokenizer: Any, observer: Observer) -> list[Prompt]:
    """The held-out prompts, in file order; the first `max_prompts` of them."""
    assert config.evaluation is not None
    settings = data_settings(config, config.evaluation.data, epochs=1, shuffle=False)
    source = PromptSource(settings, tokenizer, settle_on_issue=True)
    _tell_left_out("evaluation.data", source, observer)
    return list(source)[: config.evaluation.max_prompts]


def audit_dir(run_dir: Path) -> Path:
    """Where a trainer keeps every version's weights when `observe.audit_weights` is on."""
    return run_dir / "audit"
