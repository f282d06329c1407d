"""Reconciling a journal with the checkpoint that a run resumes from, against a model of every trajectory's life."""

import random
from collections import Counter
from dataclasses import dataclass
from pathlib import Path

import pytest
from protocol_driver import Pair, random_operation

from staleflow.protocol import JournalError, StalenessProtocol
from staleflow.protocol.journal import Journal, read
from staleflow.protocol.recovery import Recovered, recover

RUN = "run"


@dataclass
class Life:
    """One trajectory as the test saw it, across the checkpoint. Times are counts of operations."""

    group_id: int
    member: int
    version: int
    born: int
    finished: int | None = None
    released: int | None = None
    redundant: bool = False


class Observer:
    """Watches a protocol from outside, by comparing its members before and after every operation."""

    def __init__(self, pair: Pair) -> None:
        self.pair = pair
        self.lives: list[Life] = []
        self.now = 0
        self.living: dict[tuple[int, int], Life] = {}
        self.trained: list[tuple[int, int]] = []  # (time, group)
        self.complete: dict[int, frozenset[int]] = {}

    def operate(self, rng: random.Random) -> None:
        self.now += 1
        already = len(self.pair.ledger.trained)
        random_operation(self.pair, rng)
        trained = set(self.pair.ledger.trained[already:])
        self.trained += [(self.now, group_id) for group_id in self.pair.ledger.trained[already:]]
        seen = {(i, m): state for i in self.pair.protocol.outstanding() for m, state in self._members(i).items()}
        for key in set(self.living) - set(seen):
            life = self.living.pop(key)
            if key[0] not in trained or key[1] not in self.complete.get(key[0], ()):
                life.released = self.now
        for (group_id, member), (version, done) in seen.items():
            if (group_id, member) not in self.living:
                self.living[group_id, member] = Life(group_id, member, version, self.now)
                self.lives.append(self.living[group_id, member])
            life = self.living[group_id, member]
            if done and life.finished is None:
                life.finished = self.now
        for group_id in self.pair.ledger.finished:
            done = frozenset(m for m, (_, finished) in self._members(group_id).items() if finished)
            self.complete.setdefault(group_id, done)

    def _members(self, group_id: int) -> dict[int, tuple[int, bool]]:
        return self.pair.protocol.members(group_id)

    def expected(self, checkpoint_time: int, version: int, durable: set[tuple[int, int]]) -> dict[int, dict[int, bool]]:
        """What has to be outstanding after the recovery: group -> member -> finished."""
        left: dict[int, dict[int, bool]] = {}
        early = {group_id for time, group_id in self.trained if time <= checkpoint_time}
        again = {(one.group_id, one.member) for one in self.lives if (one.released or 0) > checkpoint_time}
        for life in self.lives:
            key = (life.group_id, life.member)
            finished_by_checkpoint = life.finished is not None and life.finished <= checkpoint_time
            known = life.born <= checkpoint_time
            spare = life.group_id in self.complete and life.member not in self.complete[life.group_id]
            if life.group_id in early or life.released is not None or life.version > version or spare:
                continue
            if key in durable and (life.finished is not None or key not in again):
                left.setdefault(life.group_id, {})[life.member] = life.finished is not None
            elif known and not finished_by_checkpoint:
                left.setdefault(life.group_id, {})[life.member] = False
        return left


def lost_job(path: Path, seed: int) -> tuple[Observer, dict, int, set[tuple[int, int]], Recovered, random.Random]:
    """Run, take a checkpoint, run on, lose everything but disk, recover."""
    rng = random.Random(seed)
    spares = {"spare_groups": rng.choice((0, 0, 2)), "spare_members": rng.choice((0, 0, 1))}
    pair = Pair(StalenessProtocol(rng.randint(1, 4), rng.randint(1, 3), rng.randint(0, 4), **spares))
    journal = Journal.create(path, RUN, pair.protocol)
    pair.protocol = journal.protocol
    observer = Observer(pair)
    for _ in range(rng.randint(0, 400)):
        observer.operate(rng)
    mark, checkpoint_time = journal.mark(), observer.now
    for _ in range(rng.choice((3, 30, 400))):
        observer.operate(rng)
    if rng.random() < 0.5:
        journal.compact(mark)
    journal.commit()
    journal.close()
    last = {(life.group_id, life.member): life for life in observer.lives}
    everything = {key for key, life in last.items() if life.finished is not None}
    unrewarded = {key for key in observer.living if rng.random() < 0.3}  # generated and spooled, but not occupied yet
    everything |= unrewarded
    durable = everything if rng.random() < 0.5 else {key for key in everything if rng.random() < 0.8}
    recovered = recover(read(path, RUN), mark.state, lambda group_id, member, _: (group_id, member) in durable)
    return observer, mark.state, checkpoint_time, durable, recovered, rng


def test_what_was_generated_but_not_yet_rewarded_is_not_generated_again(tmp_path: Path) -> None:
    journal = Journal.create(tmp_path / "journal", RUN, StalenessProtocol(1, 2, 1))
    mark = journal.mark()
    journal.protocol.reserve(0, 0, 0)
    journal.protocol.reserve(0, 1, 0)
    journal.commit()
    journal.close()
    recovered = recover(read(tmp_path / "journal", RUN), mark.state, lambda _, member, __: member == 0)
    assert recovered.protocol.members(0) == {0: (0, False)}


@pytest.mark.parametrize("seeds", [range(first, first + 40) for first in (0, 40, 80)])
def test_recovery_agrees_with_the_life_of_every_trajectory(tmp_path: Path, seeds: range) -> None:
    seen = Counter()
    for seed in seeds:
        observer, checkpoint, time, durable, recovered, _ = lost_job(tmp_path / str(seed), seed)
        protocol = recovered.protocol
        protocol.check()
        assert protocol.version == checkpoint["version"]
        left = observer.expected(time, protocol.version, durable)
        got = {i: {m: done for m, (_, done) in protocol.members(i).items()} for i in protocol.outstanding()}
        assert got == left
        versions = {(life.group_id, life.member): life.version for life in observer.lives if life.released is None}
        assert all(protocol.version_of(i, m) == versions[i, m] for i, members in left.items() for m in members), (
            "V_traj never changes"
        )
        trained_before = [group_id for when, group_id in observer.trained if when <= time]
        counters = protocol.counters()
        assert counters["groups"]["consumed"] == len(trained_before)
        assert counters["trajectories"]["reserved"] == len(observer.lives)
        assert set(recovered.undone) == {i for when, i in observer.trained if when > time} & set(left)
        assert set(recovered.restarted) == {
            (i, m) for i, members in left.items() for m, done in members.items() if not done
        }
        seen += Counter(undone=len(recovered.undone), new=len(recovered.new), aborted=len(recovered.aborted))
        seen += Counter(restarted=len(recovered.restarted))
    assert min(seen[name] for name in ("undone", "new", "aborted", "restarted")) > 10, seen


@pytest.mark.parametrize("seed", range(200, 225))
def test_after_a_recovery_the_run_goes_on_within_the_bound_and_without_a_burst(tmp_path: Path, seed: int) -> None:
    observer, _, time, _, recovered, rng = lost_job(tmp_path / "journal", seed)
    journal = Journal.create(tmp_path / "journal", RUN, recovered.protocol, replace=True)
    protocol = journal.protocol
    capacity = (protocol.batch_groups + protocol.spare_groups) * (protocol.eta + 1)
    trained = [group_id for when, group_id in observer.trained if when <= time]
    next_id, resumed_at = 1_000_000, protocol.version
    while protocol.version < resumed_at + 6:
        while protocol.reserve(next_id, 0, protocol.version):
            next_id += 1
        assert len(protocol.outstanding()) <= capacity, "admission does not burst"
        group_id = rng.choice(protocol.outstanding())
        for member in range(protocol.group_size + protocol.spare_members):
            if protocol.reserve(group_id, member, protocol.version) and not protocol.members(group_id)[member][1]:
                protocol.occupy(group_id, member)
        if protocol.ready():
            versions = {i: protocol.version_of(i) for i in protocol.outstanding()}
            now = protocol.version
            batch = protocol.consume()
            assert all(versions[i] <= now <= versions[i] + protocol.eta for i in batch)
            trained += batch
        protocol.check()
    assert len(trained) == len(set(trained)), "no id is trained twice in the history of the surviving weights"
    journal.commit()
    state = protocol.dump()
    journal.close()
    with Journal.reopen(journal.path, RUN) as again:
        assert again.protocol.dump() == state


def test_finished_work_of_surviving_weights_is_kept_and_the_rest_is_aborted(tmp_path: Path) -> None:
    with Journal.create(tmp_path / "journal", RUN, StalenessProtocol(1, 1, 2)) as journal:
        protocol = journal.protocol
        protocol.reserve(0, 0, 0)
        protocol.occupy(0, 0)
        mark = journal.mark()  # the checkpoint c0 = 0 holds the finished group 0
        protocol.consume()
        protocol.reserve(1, 0, 0)  # a lagging instance, still at c0
        protocol.occupy(1, 0)
        protocol.reserve(2, 0, 1)  # begun by weights that will be lost
        protocol.occupy(2, 0)
        journal.commit()
    recovered = recover(read(journal.path, RUN), mark.state, lambda *_: True)
    assert recovered.undone == [0] and recovered.new == [1] and recovered.aborted == [(2, 0)]
    assert recovered.protocol.version == 0
    assert recovered.protocol.counters()["groups"]["released"] == {"aborted": 1}
    assert recovered.protocol.consume() == [0] and recovered.protocol.consume() == [1]


def test_a_trajectory_that_was_begun_anew_after_the_checkpoint_is_not_the_one_in_it(tmp_path: Path) -> None:
    with Journal.create(tmp_path / "journal", RUN, StalenessProtocol(1, 2, 2)) as journal:
        protocol = journal.protocol
        assert protocol.reserve(0, 0, 0) and protocol.reserve(0, 1, 0)
        mark = journal.mark()
        protocol.release(0, "failed", member=1)
        assert protocol.reserve(0, 1, 0)
        journal.commit()
    recovered = recover(read(journal.path, RUN), mark.state, lambda *_: True)
    assert recovered.restarted == [(0, 0)] and recovered.aborted == [(0, 1)]


def test_a_checkpoint_of_another_run_is_refused(tmp_path: Path) -> None:
    with Journal.create(tmp_path / "journal", RUN, StalenessProtocol(1, 1, 2)) as journal:
        journal.protocol.reserve(0, 0, 0)
        journal.commit()
    with pytest.raises(JournalError, match="knows nothing of this checkpoint"):
        recover(read(journal.path, RUN), StalenessProtocol(1, 1, 2, start_version=4).dump(), lambda *_: True)
