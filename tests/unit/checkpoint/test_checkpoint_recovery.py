"""From what is on disk to where a run goes on: small histories written by hand, lost, and recovered."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from staleflow.checkpoint import layout
from staleflow.checkpoint.layout import CheckpointError
from staleflow.checkpoint.recovery import Resume, cut, prepare, settings_of
from staleflow.config import Config, load
from staleflow.coordination.coordinator import Coordinator
from staleflow.coordination.cost_model import DEFAULT
from staleflow.coordination.ledger import Ledger, make_ledger
from staleflow.data.prompts import Prompt
from staleflow.protocol.journal import Journal
from staleflow.roles.beginning import core_state
from staleflow.trajectories.schema import Finish, Trajectory, decode, encode, trajectory_id
from staleflow.trajectories.spool import (
    FrameKind,
    SegmentWriter,
    encode_frame,
    encode_reward,
    read_segment,
    segments_in,
)

Segments = Sequence[tuple[int, int]]


def config_for(root: Path, *overrides: str) -> Config:
    base = [
        f'run.dir="{root}"',
        "run.name=lost",
        "staleness.batch_groups=2",
        "staleness.group_size=2",
        "staleness.eta=1",
    ]
    return load("configs/demo.toml", [*base, "checkpoint.every_steps=1", "checkpoint.resume=auto", *overrides])


def record(group_id: int, member: int, segments: Segments, finish: Finish = Finish.STOP) -> bytes:
    n = sum(tokens for _, tokens in segments)
    tokens = np.arange(2 + n, dtype=np.int32) + 10 * group_id
    v_traj = segments[0][0] if segments else 0
    return bytes(
        encode(Trajectory(group_id, member, v_traj, 2, tokens, np.ones(n, np.float32), tuple(segments), finish))
    )


@dataclass
class Run:
    """A run that is written step by step, as rank 0 and its host would; prompt of group g is g + 100."""

    config: Config
    journal: Journal
    writer: SegmentWriter
    attempt: int = 0
    next_group: int = 0

    @classmethod
    def begin(cls, config: Config, attempt: int = 0) -> Run:
        resume = prepare(config, attempt, 1)
        assert resume.journal is not None
        writer = SegmentWriter(layout.spool_dir(config.run_dir), attempt, 0, first=1)
        return cls(config, resume.journal, writer, attempt, resume.next_group)

    def start(self, version: int, members: int = 2) -> int:
        group_id, self.next_group = self.next_group, self.next_group + 1
        for member in range(members):
            assert self.journal.protocol.reserve(group_id, member, version)
        self.journal.commit()
        return group_id

    def finish(self, group_id: int, member: int, segments: Segments, reward: float | None = 0.5) -> None:
        tid = trajectory_id(group_id, member)
        payload = record(group_id, member, segments)
        self.writer.write([encode_frame(FrameKind.FINISHED, tid, group_id + 100, payload)], {group_id})
        if reward is not None:
            self.writer.write([encode_reward(tid, group_id + 100, reward)], {group_id})
            self.journal.protocol.occupy(group_id, member)
            self.journal.commit()

    def partial(self, group_id: int, member: int, segments: Segments) -> None:
        payload = record(group_id, member, segments, Finish.PARTIAL)
        tid = trajectory_id(group_id, member)
        self.writer.write([encode_frame(FrameKind.PARTIAL, tid, group_id + 100, payload)], {group_id})

    def whole(self, version: int) -> int:
        group_id = self.start(version)
        for member in range(2):
            self.finish(group_id, member, [(version, 3)])
        return group_id

    def train(self) -> list[int]:
        batch = self.journal.protocol.consume()
        self.journal.commit()
        self.writer.forget(set(batch))
        return batch

    def checkpoint(self) -> Path:
        version = self.journal.protocol.version
        folder = layout.begin(self.config.run_dir, version)
        mark = self.journal.mark()
        self.writer.close_segment()
        (folder / layout.SPOOL).mkdir()
        for path in self.writer.needed():
            layout.link(path, folder / layout.SPOOL)
        dead = self.writer.unneeded()
        groups = {str(g): g + 100 for g in self.journal.protocol.outstanding()}
        prompts = {"fingerprint": "f", "next": 100 + self.next_group, "settled": []}
        state = {
            "version": version,
            "settings": settings_of(self.config),
            "policy": "staleflow",
            "ledger": mark.state,
            "groups": groups,
            "next_group": self.next_group,
            "prompts": prompts,
            "run": {"steps": version},
        }
        place = layout.finish(folder, version, state)
        self.journal.compact(mark)
        self.writer.remove(dead)
        return place

    def lose(self) -> Path:
        """The process is gone; what it wrote is there. Returns the run's directory."""
        self.writer.close_segment()
        self.journal.close()
        return self.config.run_dir


def recovered(config: Config, attempt: int = 1, nodes: int = 1) -> Resume:
    resume = prepare(config, attempt, nodes)
    resume.ledger.check()
    if resume.journal is not None:
        resume.journal.close()
    return resume


def payloads(run_dir: Path) -> dict[int, Trajectory]:
    """What the hosts of the new attempt would load."""
    return {
        frame.tid: decode(frame.payload)
        for path in segments_in(layout.spool_dir(run_dir)).values()
        for frame in read_segment(path)
        if frame.kind is not FrameKind.REWARD
    }


def test_finished_work_after_the_checkpoint_is_kept_and_newer_weights_work_is_not(tmp_path: Path) -> None:
    run = Run.begin(config_for(tmp_path))
    trained = [run.whole(0), run.whole(0)]
    assert run.train() == trained
    old = run.whole(0)  # finished before the checkpoint
    run.checkpoint()
    mixed = run.start(1)
    run.finish(mixed, 0, [(1, 4)])
    waiting = run.start(1)
    run.finish(waiting, 0, [(1, 2)], reward=None)  # durable, not rewarded yet
    run.finish(mixed, 1, [(1, 4), (2, 1)])  # ended by weights that are gone: still finished work
    assert set(run.train()) == {old, mixed}
    newer = run.whole(2)
    run_dir = run.lose()

    resume = recovered(run.config)
    assert resume.version == 1
    assert set(resume.members) == {old, mixed, waiting}
    assert all(done for group in (old, mixed) for _, done in resume.members[group].values())
    assert resume.members[waiting] == {0: (1, False), 1: (1, False)}  # the lost member has its place again
    assert resume.kept[trajectory_id(waiting, 0)].generated and not resume.kept[trajectory_id(waiting, 1)].generated
    assert resume.kept[trajectory_id(mixed, 1)].segments == ((1, 4), (2, 1))
    assert resume.prompt_of == {group: group + 100 for group in (old, mixed, waiting)}
    assert resume.next_group > newer
    assert resume.prompts is not None and resume.prompts["next"] == 101 + waiting
    assert resume.run == {"steps": 1}
    assert {tid >> 16 for tid in payloads(run_dir)} == {old, mixed, waiting}


def test_a_member_begun_anew_before_the_checkpoint_is_not_matched_with_its_old_payload(tmp_path: Path) -> None:
    run = Run.begin(config_for(tmp_path, "staleness.eta=2"))
    run.whole(0), run.whole(0)
    again = run.start(0)
    run.finish(again, 0, [(0, 7)], reward=None)  # durable; then given up, and begun anew by newer weights
    run.train()
    run.journal.protocol.release(again, "aborted", member=0)
    assert run.journal.protocol.reserve(again, 0, 1)
    ahead = run.start(0)
    run.finish(ahead, 0, [(1, 4)], reward=None)  # begun newer than reserved: its instance was ahead of what it was told
    run.checkpoint()
    run.lose()
    resume = recovered(run.config)
    assert resume.members[again] == {0: (1, False), 1: (0, False)}
    begun_anew = resume.kept[trajectory_id(again, 0)]
    assert (begun_anew.generated, begun_anew.tokens, begun_anew.v_traj) == (False, 0, 1)
    assert resume.kept[trajectory_id(ahead, 0)].generated


def test_nothing_to_resume_begins_anew(tmp_path: Path) -> None:
    resume = recovered(config_for(tmp_path))
    assert (resume.version, resume.trainer, resume.members) == (0, None, {})


def test_must_needs_a_checkpoint(tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match=r"'must'.*no checkpoint.*'auto'"):
        prepare(config_for(tmp_path, "checkpoint.resume=must"), 0, 1)


def test_lost_before_the_first_checkpoint_keeps_what_the_first_weights_made(tmp_path: Path) -> None:
    run = Run.begin(config_for(tmp_path))
    first, second = run.whole(0), run.whole(0)
    run.train()
    run.whole(1)
    run.lose()
    resume = recovered(run.config)
    assert resume.version == 0 and resume.trainer is None and resume.prompts is None
    assert set(resume.members) == {first, second}


def test_never_begins_anew_and_puts_the_old_checkpoints_aside(tmp_path: Path) -> None:
    run = Run.begin(config_for(tmp_path))
    run.whole(0), run.whole(0)
    run.train()
    run.checkpoint()
    run_dir = run.lose()
    resume = recovered(config_for(tmp_path, "checkpoint.resume=never"))
    assert resume.version == 0 and resume.members == {}
    assert layout.latest(run_dir) is None
    assert "now in" in resume.notes[0] and (run_dir / "checkpoints.old1" / "step_000001").is_dir()


def test_what_a_lost_attempt_was_writing_is_removed(tmp_path: Path) -> None:
    run = Run.begin(config_for(tmp_path))
    run.whole(0), run.whole(0)
    run.train()
    place = run.checkpoint()
    run_dir = run.lose()
    (layout.begin(run_dir, 2) / "part").write_text("half of it")
    assert recovered(run.config).version == 1
    assert [path.name for path in layout.checkpoints_dir(run_dir).iterdir() if path.is_dir()] == [place.name]


def test_partial_trajectories_go_on_without_the_tokens_of_lost_weights(tmp_path: Path) -> None:
    run = Run.begin(config_for(tmp_path))
    run.whole(0), run.whole(0)
    run.train()
    long = run.start(1)
    run.partial(long, 0, [(1, 5), (2, 3)])  # copied after an instance had pulled the next version
    run.partial(long, 1, [(2, 3)])
    run.checkpoint()
    run_dir = run.lose()
    resume = recovered(run.config)
    one, other = (resume.kept[trajectory_id(long, member)] for member in range(2))
    assert (one.tokens, one.segments, one.generated) == (5, ((1, 5),), False)
    assert other.tokens == 0
    there = payloads(run_dir)[trajectory_id(long, 0)]
    assert there.response_tokens == 5 and list(there.tokens) == list(range(10 * long, 10 * long + 7))


def test_lost_again_before_a_checkpoint_of_its_own(tmp_path: Path) -> None:
    """A member redone under its old id must not be taken for what it was in the history that is gone."""
    config = config_for(tmp_path)
    run = Run.begin(config)
    run.whole(0), run.whole(0)
    run.train()
    run.checkpoint()
    kept = run.start(1, members=1)
    run.finish(kept, 0, [(1, 3)])
    other = run.whole(1)
    run.train() if run.journal.protocol.ready() else None
    assert run.journal.protocol.reserve(kept, 1, 1)
    run.finish(kept, 1, [(1, 9)], reward=None)
    run.lose()

    again = Run.begin(config, attempt=1)
    assert again.journal.protocol.members(kept) == {0: (1, True), 1: (1, False)}
    fresh = again.whole(1) if again.journal.protocol.can_reserve(1) else None
    run_dir = again.lose()

    resume = recovered(config, attempt=2)
    expected = {kept, other} | ({fresh} if fresh is not None else set())
    assert set(resume.members) == expected
    assert resume.kept[trajectory_id(kept, 1)].generated
    assert {name.attempt for name in segments_in(layout.spool_dir(run_dir))} == {2}


def test_recovering_twice_from_the_same_remains_gives_the_same(tmp_path: Path) -> None:
    """A crash in the middle of a recovery, after the new segments and before the new journal."""
    config = config_for(tmp_path)
    run = Run.begin(config)
    run.whole(0), run.whole(0)
    run.train()
    run.checkpoint()
    late = run.start(1)
    run.finish(late, 0, [(1, 3)])
    run_dir = run.lose()
    journal = layout.journal_path(run_dir).read_bytes()
    first = recovered(config, attempt=1)
    layout.journal_path(run_dir).write_bytes(journal)
    second = recovered(config, attempt=2)
    assert first.members == second.members and first.kept == second.kept and first.prompt_of == second.prompt_of


@pytest.mark.parametrize("nodes", [1, 2, 3])
def test_other_numbers_of_nodes_share_the_payloads(tmp_path: Path, nodes: int) -> None:
    run = Run.begin(config_for(tmp_path))
    groups = [run.whole(0), run.whole(0)]
    run_dir = run.lose()
    resume = recovered(run.config, nodes=nodes)
    assert set(resume.members) == set(groups)
    assert {one.node for one in resume.kept.values()} <= set(range(nodes))
    for name, path in segments_in(layout.spool_dir(run_dir)).items():
        for frame in read_segment(path):
            assert resume.kept[frame.tid].node == name.node


@pytest.mark.parametrize("change", ["staleness.eta=2", "staleness.group_size=3", "run.seed=5"])
def test_settings_that_the_books_depend_on_may_not_change(tmp_path: Path, change: str) -> None:
    run = Run.begin(config_for(tmp_path))
    run.whole(0), run.whole(0)
    run.train()
    run.checkpoint()
    run.lose()
    key = change.partition("=")[0]
    with pytest.raises(CheckpointError, match=f"{key} = .*the checkpoint has .*set it back"):
        prepare(config_for(tmp_path, change), 1, 1)


def test_a_lost_reward_is_named(tmp_path: Path) -> None:
    run = Run.begin(config_for(tmp_path))
    group = run.start(0)
    run.finish(group, 0, [(0, 2)], reward=None)
    run.journal.protocol.occupy(group, 0)
    run.journal.commit()
    run.lose()
    with pytest.raises(CheckpointError, match=f"trajectory 0 of group {group} .*lost its reward"):
        prepare(run.config, 1, 1)


class Prompts:
    """As many as one likes, of three tokens each."""

    def prompt(self, index: int) -> Prompt:
        return Prompt(index, "1+1=", np.zeros(3, np.int32), {}, 0)


def test_the_coordinator_goes_on_with_what_survived(tmp_path: Path) -> None:
    run = Run.begin(config_for(tmp_path))
    whole, half = run.whole(0), run.start(0)
    run.finish(half, 0, [(0, 4)])
    run.finish(half, 1, [(0, 4)], reward=None)
    run.lose()
    resume = recovered(run.config)
    core = Coordinator(run.config.coordination, resume.ledger, DEFAULT, [])
    core.load(core_state(resume, Prompts(), run.config))  # type: ignore[arg-type]  # a stand-in for the prompt source
    assert core.unrewarded() == [trajectory_id(half, 1)]
    assert core.holds(whole) and core.holds(half) and core.next_batch() is None
    core.rewarded(trajectory_id(half, 1), 1.0)
    batch = core.next_batch()
    assert batch is not None and {group for group, _ in batch.groups} == {whole, half}


@pytest.mark.parametrize("policy", ["pace", "drop", "wait"])
def test_baselines_go_on_from_their_checkpoint_alone(tmp_path: Path, policy: str) -> None:
    config = config_for(tmp_path, f"coordination.policy={policy}")
    ledger: Ledger = make_ledger(policy, batch_groups=2, group_size=2, eta=1)
    assert ledger.reserve(0, 0, 0)
    assert ledger.reserve(0, 1, 0)
    ledger.occupy(0, 0)
    folder = layout.begin(config.run_dir, 0)
    (folder / layout.SPOOL).mkdir()
    writer = SegmentWriter(folder / layout.SPOOL, 0, 0)
    writer.write([encode_frame(FrameKind.FINISHED, 0, 100, record(0, 0, [(0, 2)])), encode_reward(0, 100, 1.0)], {0})
    writer.close_segment()
    state: dict[str, Any] = {"version": 0, "settings": settings_of(config), "policy": policy, "ledger": ledger.dump(),
                             "groups": {"0": 100}, "next_group": 1, "prompts": None, "run": {}}  # fmt: skip
    layout.finish(folder, 0, state)
    resume = recovered(config)
    assert resume.journal is None
    assert resume.members == {0: {0: (0, True), 1: (0, False)}}
    assert resume.kept[0].reward == 1.0


def test_cut_keeps_whole_segments_of_surviving_versions() -> None:
    t = decode(record(1, 0, [(3, 2), (5, 4), (6, 1)], Finish.PARTIAL))
    assert cut(t, 5).segments == ((3, 2), (5, 4))
    assert cut(t, 5).response_tokens == 6 and len(cut(t, 5).tokens) == 8
    assert cut(t, 2).response_tokens == 0 and cut(t, 2).segments == ()
    assert cut(t, 6).response_tokens == t.response_tokens
