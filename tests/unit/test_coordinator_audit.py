"""The real coordinator over three hosts of the test's own making.

Its accounts agree however messages are delayed, and any number that goes wrong stops the run in the same turn, with
both accounts on disk.
"""

from __future__ import annotations

import json
import random
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from staleflow.checkpoint.recovery import Kept, Resume
from staleflow.config import load
from staleflow.coordination.board import Phase
from staleflow.coordination.coordinator import Coordinator
from staleflow.coordination.cost_model import DEFAULT
from staleflow.coordination.ledger import Ledger, load_ledger, make_ledger
from staleflow.coordination.policies import POLICIES
from staleflow.coordination.types import pack_progress
from staleflow.data.prompts import Prompt
from staleflow.jobs.plan import Node, plan
from staleflow.jobs.stop import StopWatch
from staleflow.roles import messages as m
from staleflow.roles.auditing import MISMATCH_FILE, ShardAccount
from staleflow.roles.checkpointing import Books
from staleflow.roles.coordinator import CoordinatorRole
from staleflow.trajectories.schema import Finish, group_and_member, trajectory_id

STEPS = 30
SETTINGS = [
    f"run.steps={STEPS}",
    "trainer.ranks=3",
    "rollout.instances=3",
    "staleness.batch_groups=4",
    "staleness.group_size=2",
    "checkpoint.every_steps=0",
    "coordination.cycle_ms=1",
]


class Prompts:
    """An endless stream of one-token prompts."""

    def __init__(self) -> None:
        self.drawn = 0

    def __iter__(self) -> Iterator[Prompt]:
        return self

    def __next__(self) -> Prompt:
        self.drawn += 1
        return Prompt(self.drawn - 1, "?", np.zeros(1, np.int32), {}, 0)

    def settle(self, index: int) -> None:
        pass


class Silence:
    """An observer that looks away."""

    accuracies: tuple[()] = ()

    def __getattr__(self, name: str) -> Callable[..., None]:
        return lambda *_: None


class FakeInstance:
    """Ends each trajectory it holds with probability 0.3 a turn."""

    def __init__(self, index: int) -> None:
        self.index, self.version, self.applied = index, -1, 0
        self.held: dict[int, int] = {}  # tid -> V_traj


class FakeHost:
    """One node with its trainer ranks and its instances."""

    def __init__(self, world: World, node: int) -> None:
        self.world, self.node = world, node
        devices = world.plan.devices_of(node)
        self.trainers = [d.rank for d in devices if d.role == "trainer"]
        self.instances = {d.instance: FakeInstance(d.instance) for d in devices if d.instance is not None}
        self.told: list[m.ToCoordinator] = [m.Ready(device.rank, 0.1) for device in devices]
        self.account = ShardAccount(node, self.told.append)
        self.inbox: list[m.ToHost] = []
        self.steps = self.trained = 0

    def turn(self, take: int, rng: random.Random) -> None:
        """Take some of what has arrived, let some trajectories end."""
        for _ in range(min(take, len(self.inbox))):
            self._handle(self.inbox.pop(0))
        for instance in self.instances.values():
            for tid in [tid for tid in instance.held if rng.random() < 0.3]:
                v_traj = instance.held.pop(tid)
                self.account.emit(m.Finished(tid, 1, 5, [(v_traj, 5)], int(Finish.STOP), self.node))
                self._score(tid, rng)
            progress = pack_progress((tid, 1) for tid in instance.held)
            self.account.emit(
                m.Snapshot(
                    instance.index,
                    instance.version,
                    instance.applied,
                    len(instance.held),
                    0,
                    0,
                    10**6,
                    progress,
                    0,
                    0.0,
                    0.0,
                )
            )
        self.account.tell(self.steps, self.trained)

    def _score(self, tid: int, rng: random.Random) -> None:
        if rng.random() < 0.1:
            self.account.emit(m.RewardFailed(tid, "unlucky"))
        else:
            self.account.emit(m.Rewarded(tid, float(rng.random() < 0.5)))

    def _handle(self, message: m.ToHost) -> None:
        if isinstance(message, m.Commands):
            for name, id_, instance, tids, _ in message.commands:
                self._apply(self.instances[instance], name, id_, tids)
        elif isinstance(message, m.TrainStep):
            self.steps += 1
            self.trained += sum(len(tids) for _, parts in message.ranks for tids in parts)
            for rank in self.trainers:
                self.account.emit(m.StepDone(rank, message.header.step, {}, 0.1, 0.0))
            self.world.publish(message.header.step + 1)
        elif isinstance(message, m.Reload):
            for tid in message.score:
                self._score(tid, self.world.rng)

    def _apply(self, instance: FakeInstance, name: str, id_: int, tids: list[int]) -> None:
        instance.applied = id_
        if name == "Pull":
            instance.version = self.world.published
        elif name == "Route":
            instance.held |= dict.fromkeys(tids, instance.version)
        else:
            for tid in [tid for tid in tids if tid in instance.held]:
                v_traj = instance.held.pop(tid)
                if name == "Interrupt":
                    self.account.emit(m.Returned(tid, 1, self.node, v_traj))


class World:
    """`lost`: another world, of which only what is durable is left: books, and whole payloads with their rewards."""

    def __init__(self, root: Path, *overrides: str, policy: str = "staleflow", lost: World | None = None) -> None:
        overrides = (f'run.dir="{root}"', f"coordination.policy={policy}", *SETTINGS, *overrides)
        config = load("configs/demo.toml", overrides).model_copy(update={"evaluation": None})
        config.run_dir.mkdir(parents=True, exist_ok=True)
        s = config.staleness
        ledger = make_ledger(policy, batch_groups=s.batch_groups, group_size=s.group_size, eta=s.eta,
                             spare_members=s.spare_members)  # fmt: skip
        resume = Resume(0, ledger, None)
        if lost is not None:
            resume = lost.left(load_ledger(policy, lost.ledger.dump()))
            ledger = resume.ledger
        self.plan = plan(config, [Node(name, 3) for name in "abc"])
        self.core = Coordinator(config.coordination, ledger, DEFAULT, [])
        if lost is not None:
            state = lost.core.dump()
            self.core.load(state | {"groups": [g for g in state["groups"] if g["id"] in resume.members]})
        books = Books(None, ledger.dump, lambda node, message: self.hosts[node].inbox.append(message))
        self.books, self.ledger, self.config, self.published = books, ledger, config, -1
        self.hosts = [FakeHost(self, node) for node in range(3)]
        watch = StopWatch(config.run_dir, {})
        self.role = CoordinatorRole(
            config, self.plan, self.core, Prompts(), None, books, watch, Silence(), resume.version
        )
        self.role.resume(resume, lambda index: Prompt(index, "", np.zeros(1, np.int32), {}, 0))
        self.publish(resume.version)
        self.rng, self.now_s = random.Random(0), 1.0

    def left(self, ledger: Ledger) -> Resume:
        members = {group_id: ledger.members(group_id) for group_id in ledger.outstanding()}
        kept = {}
        for group_id, there in members.items():
            for member, (version, _) in there.items():
                tid = trajectory_id(group_id, member)
                reward, whole = self.role._payloads.rewards.get(tid), self.core._works[tid].phase is Phase.GENERATED
                segments = ((version, 5),) if whole else ()
                kept[tid] = Kept(0, 0, version, 1, 5 * whole, segments, int(Finish.STOP), whole, reward)
        prompts = dict.fromkeys(members, 0)
        return Resume(ledger.version, ledger, None, None, members, kept, prompts, self.role._next_group)

    def publish(self, version: int) -> None:
        if version > self.published:
            self.published = version
            for rank in self.plan.relays:
                node = self.plan.ranks[rank].node
                self.hosts[node].told.append(m.Stored(node, version, 0.1))

    def turn(self) -> None:
        """Both hosts go on; of what they have told, the first few have arrived."""
        arrived = []
        for host in self.hosts:
            host.turn(self.rng.randrange(4), self.rng)
            arriving = self.rng.randrange(len(host.told) + 1)
            arrived += [(host.node, message) for message in host.told[:arriving]]
            del host.told[:arriving]
        self.now_s += 0.01
        self.role.turn(arrived, self.now_s)
        assert self.books.commit() is None

    def until(self, done: Callable[[], Any]) -> None:
        for _ in range(5_000):
            if done():
                return
            self.turn()
        raise AssertionError(self.role.waited_for())

    def dump(self) -> dict[str, Any]:
        return json.loads((self.config.run_dir / MISMATCH_FILE).read_text())


@pytest.mark.parametrize("policy", POLICIES)
def test_delayed_messages_of_several_hosts_are_no_mismatch(tmp_path: Path, policy: str) -> None:
    world = World(tmp_path, "staleness.spare_members=1", policy=policy)
    world.until(lambda: world.role.outcome)
    assert world.role.outcome.status == "completed", world.role.outcome
    counted = world.core.counters()["trajectories"]
    assert counted["consumed"] == STEPS * 8 and sum(counted["released"].values()) > 0
    assert not (world.config.run_dir / MISMATCH_FILE).exists()


def test_after_a_resume_the_accounts_go_on_from_what_was_left(tmp_path: Path) -> None:
    lost = World(tmp_path)
    lost.until(lambda: lost.core.version == STEPS // 2 and len(lost.ledger.outstanding()) > 8)
    again = World(tmp_path, lost=lost)
    again.until(lambda: again.role.outcome)
    assert again.role.outcome.status == "completed", again.role.outcome
    assert again.core.counters()["trajectories"]["consumed"] == STEPS * 8


def reserved(world: World) -> None:
    world.ledger._reserved_trajectories += 1


def lost_release(world: World) -> None:
    world.ledger._released_trajectories["failed"] -= 1


def consumed(world: World) -> None:
    world.ledger._consumed_trajectories += 2
    world.ledger._reserved_trajectories += 2


def unannounced(world: World) -> None:
    """The books admit a trajectory that nobody is ever told to generate."""
    world.ledger.reserve(10**6, 0, world.core.version)


@pytest.mark.parametrize("corrupt", [reserved, lost_release, consumed, unannounced])
def test_a_number_of_the_protocol_that_is_wrong_stops_the_run_in_one_cycle(tmp_path: Path, corrupt: Any) -> None:
    world = World(tmp_path)
    world.until(lambda: world.core.version == 2 and world.ledger.can_reserve(2))
    assert world.role.outcome is None
    corrupt(world)
    world.turn()
    outcome = world.role.outcome
    assert outcome is not None and outcome.status == "failed"
    assert "count differently" in outcome.reason and str(world.config.run_dir / MISMATCH_FILE) in outcome.reason
    dump = world.dump()
    ours, theirs = dump["protocol"]["counters"]["trajectories"], dump["trajectory_server"]["trajectories"]
    assert ours != theirs and dump["why"] in outcome.reason
    assert dump["protocol"]["state"] == json.loads(json.dumps(world.ledger.dump()))
    assert len(dump["trajectory_server"]["outstanding"]) == theirs["outstanding"]
    world.until(lambda: all(isinstance(host.inbox[-1], m.Stop) for host in world.hosts if host.inbox))


def untrained(world: World) -> None:
    world.hosts[1].trained -= 1


def swallowed(world: World) -> None:
    """A message got lost on its way from a host."""
    host = world.hosts[2]
    while not any(isinstance(message, m.Rewarded) for message in host.told):
        host.turn(4, world.rng)
    host.told.remove(next(message for message in host.told if isinstance(message, m.Rewarded)))


@pytest.mark.parametrize("corrupt", [untrained, swallowed])
def test_a_host_that_counts_differently_stops_the_run_as_soon_as_its_account_is_there(
    tmp_path: Path, corrupt: Any
) -> None:
    world = World(tmp_path)
    world.until(lambda: world.core.version == 2)
    corrupt(world)
    for host in world.hosts:
        host.account.tell(host.steps, host.trained)
        world.role.turn([(host.node, message) for message in host.told], world.now_s)
    outcome = world.role.outcome
    assert outcome is not None and outcome.status == "failed"
    assert "on node" in outcome.reason and MISMATCH_FILE in outcome.reason
    assert set(world.dump()["trajectory_server"]["shards"]) == {"0", "1", "2"}


def test_what_comes_back_after_it_was_given_up_is_freed_where_it_lies(tmp_path: Path) -> None:
    """Called back and then given up: its payload has come back to its host, and nobody will ever ask for it."""
    world = World(tmp_path)
    host = world.hosts[1]
    (instance,) = host.instances.values()
    world.until(lambda: world.core.version == 1 and len(instance.held) > 1)
    world.role.turn([(1, message) for message in host.told], world.now_s)
    host.told.clear()
    tid = next(tid for tid in instance.held if world.core.holds(group_and_member(tid)[0]))
    world.core._board.interrupt(world.core._works[tid], world.core._board.instances[instance.index])
    world.core.failed(tid, "a sibling failed")
    world.role.turn([(1, m.Returned(tid, 3, 1, 0))], world.now_s + 1)
    world.books.commit()
    forgotten = [t for message in host.inbox if isinstance(message, m.Forget) for t in message.tids]
    assert forgotten.count(tid) == 2  # when it was given up, and when it had come
