"""However snapshots and facts are delayed, repeated and reordered: no trajectory in two places, lost, or gone back."""

from __future__ import annotations

import random

import pytest
from hypothesis import HealthCheck, settings
from hypothesis import Phase as HypothesisPhase
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from staleflow.coordination.coordinator import Coordinator
from staleflow.coordination.cost_model import DEFAULT
from staleflow.coordination.ledger import load_ledger, make_ledger
from staleflow.coordination.policies import POLICIES
from staleflow.coordination.settings import CoordinationSettings
from staleflow.coordination.types import Abort, InstanceInfo, InstanceSnapshot, Interrupt, Pull, Route, pack_progress

N = 3
BOUNDED = {"staleflow": None, "sync": 0, "one_step": 1, "wait": None}


def _reward(tid: int) -> float:
    return float((tid * 2654435761 >> 7) % 2)


class _Instance:
    def __init__(self, index: int) -> None:
        self.info = InstanceInfo(index, 0, max_running=4, kv_capacity_tokens=400)
        self.version, self.applied = -1, 0
        self.commands: list = []
        self.tokens: dict[int, int] = {}

    def snapshot(self) -> InstanceSnapshot:
        running = min(len(self.tokens), self.info.max_running)
        kv = sum(10 + t for t in self.tokens.values())
        rest = len(self.tokens) - running
        return InstanceSnapshot(
            self.info.index, self.version, self.applied, running, rest, kv, 400, pack_progress(self.tokens.items())
        )


class World:
    """The truth: where every payload really is. Every check of the issue is an assertion here."""

    def __init__(self, policy: str, eta: int, group_size: int, spares: int, filtering: bool, **strategies: str) -> None:
        self.policy, self.eta = policy, BOUNDED.get(policy) if BOUNDED.get(policy) is not None else eta
        self.settings = CoordinationSettings(
            policy=policy, filter_zero_variance=filtering, max_filter_rounds=10**6, phi_wait=0, **strategies
        )
        spare_groups = spares if policy in ("staleflow", "sync", "one_step") else 0
        self.ledger = make_ledger(
            policy, batch_groups=2, group_size=group_size, eta=eta, spare_groups=spare_groups, spare_members=spares
        )
        self.instances = {i: _Instance(i) for i in range(N)}
        self.core = Coordinator(self.settings, self.ledger, DEFAULT, [i.info for i in self.instances.values()])
        self.stored: dict[int, int] = {}  # trajectory server: tid -> tokens
        self.v_traj: dict[int, int] = {}  # truth: version of the first segment
        self.finished: dict[int, int] = {}
        self.trained: set[int] = set()
        self.freed: set[int] = set()
        self.snapshots: list[InstanceSnapshot] = []
        self.facts: list[tuple] = []
        self.old_facts: list[tuple] = []
        self.reporter: dict[int, int] = {}  # tid -> instance of its last fact
        self.published, self.now_s, self.next_group = 0, 0.0, 0
        self.core.published(0)

    def offer(self) -> None:
        for _ in range(self.core.wanted()):
            self.core.offer(self.next_group, 10, 30)
            self.next_group += 1

    def cycle(self) -> None:
        self.offer()
        self.now_s += 1.0
        for command in self.core.cycle(self.now_s):
            self.instances[command.instance].commands.append(command)
        for released in self.core.drain_released():
            self.freed.add(released.tid)

    def apply(self, index: int) -> None:
        instance = self.instances[index]
        if not instance.commands:
            return
        command = instance.commands.pop(0)
        assert command.id > instance.applied
        instance.applied = command.id
        if isinstance(command, Pull):
            assert command.version <= self.published
            instance.version = self.published
        elif isinstance(command, Route):
            for tid in command.tids:
                self._begin(instance, tid)
        elif isinstance(command, Interrupt):
            for tid in command.tids:
                if tid in instance.tokens:
                    self.stored[tid] = instance.tokens.pop(tid)
                    self.reporter[tid] = index
                    self.facts.append(("returned", tid, self.stored[tid], self.v_traj[tid], command.id))
        elif isinstance(command, Abort):
            for tid in command.tids:
                instance.tokens.pop(tid, None)

    def _begin(self, instance: _Instance, tid: int) -> None:
        assert all(tid not in other.tokens for other in self.instances.values()), "in two places"
        assert tid not in self.finished and tid not in self.trained
        self.v_traj.setdefault(tid, instance.version)
        assert instance.version >= self.v_traj[tid], "went on by an older version than it began with"
        instance.tokens[tid] = self.stored.pop(tid, 0)

    def work(self, index: int, rng: random.Random, end: float) -> None:
        """One engine step: everything running grows, some end."""
        instance = self.instances[index]
        for tid in list(instance.tokens)[: instance.info.max_running]:
            instance.tokens[tid] += 1
            if rng.random() < end or instance.tokens[tid] >= 30:
                self.finished[tid] = instance.tokens.pop(tid)
                self.reporter[tid] = index
                self.facts.append(("finished", tid, self.finished[tid], self.v_traj[tid], 1))

    def deliver(self, fact: tuple) -> None:
        kind, tid, *rest = fact
        if kind == "finished":
            self.core.finished(tid, *rest)
            self.facts.append(("rewarded", tid, _reward(tid)))
        elif kind == "returned":
            self.core.returned(tid, *rest)
        else:
            self.core.rewarded(tid, *rest)

    def train(self) -> None:
        step = self.ledger.version
        if self.published < step or (batch := self.core.next_batch()) is None:
            return
        assert batch.step == step
        for _, tids in batch.groups:
            assert len(tids) == self.ledger.group_size
            for tid in tids:
                assert tid in self.finished and tid not in self.trained, "trained twice, or not finished"
                self.trained.add(tid)
                if self.policy in BOUNDED:
                    assert 0 <= step - self.v_traj[tid] <= self.eta, "bound"

    def publish(self) -> None:
        self.published = min(self.published + 1, self.ledger.version)
        self.core.published(self.published)

    def lose(self, index: int, rng: random.Random) -> None:
        """What it had reported before it was lost is delivered first, as `lost` demands."""
        for fact in [f for f in self.facts if f[0] != "rewarded" and self.reporter[f[1]] == index]:
            self.facts.remove(fact)
            self.deliver(fact)
        gone = self.instances[index]
        kept = {tid: rng.randrange(tokens + 1) for tid, tokens in gone.tokens.items()}
        self.stored.update(kept)
        self.core.lost(index, kept)
        self.snapshots = [s for s in self.snapshots if s.instance != index]
        self.instances[index] = _Instance(index)
        self.core.joined(self.instances[index].info)

    def settle(self, rounds: int) -> int:
        """Deliver everything fairly; returns the steps trained meanwhile."""
        rng, before = random.Random(0), self.ledger.version
        for _ in range(rounds):
            self.cycle()
            for index, instance in self.instances.items():
                while instance.commands:
                    self.apply(index)
                self.work(index, rng, 0.3)
                self.core.snapshot(instance.snapshot(), self.now_s)
            while self.facts:
                self.deliver(self.facts.pop(0))
            self.train()
            self.publish()
        return self.ledger.version - before


class Delays(RuleBasedStateMachine):
    @initialize(
        policy=st.sampled_from(POLICIES),
        eta=st.integers(0, 3),
        group_size=st.integers(1, 3),
        spares=st.integers(0, 1),
        filtering=st.booleans(),
        routing=st.sampled_from(("balanced", "least_loaded", "marginal_gain", "step_time")),
        synchronization=st.sampled_from(("paper", "greedy", "gain")),
        migration=st.sampled_from(("none", "subset", "all")),
    )
    def start(self, policy, eta, group_size, spares, filtering, **strategies) -> None:
        self.world = World(policy, eta, group_size, spares, filtering and group_size > 1, **strategies)

    @rule()
    def cycle(self) -> None:
        self.world.cycle()

    @rule(index=st.integers(0, N - 1), many=st.integers(1, 4))
    def apply(self, index, many) -> None:
        for _ in range(many):
            self.world.apply(index)

    @rule(index=st.integers(0, N - 1), seed=st.integers(0, 99), steps=st.integers(1, 5))
    def work(self, index, seed, steps) -> None:
        for step in range(steps):
            self.world.work(index, random.Random(seed + step), 0.3)

    @rule(index=st.integers(0, N - 1))
    def report(self, index) -> None:
        self.world.snapshots.append(self.world.instances[index].snapshot())

    @precondition(lambda self: self.world.snapshots)
    @rule(at=st.integers(0, 50), keep=st.booleans())
    def deliver_snapshot(self, at, keep) -> None:
        snapshots = self.world.snapshots
        at %= len(snapshots)
        self.world.core.snapshot(snapshots[at] if keep else snapshots.pop(at), self.world.now_s)

    @precondition(lambda self: self.world.facts)
    @rule(at=st.integers(0, 50), keep=st.booleans())
    def deliver_fact(self, at, keep) -> None:
        facts = self.world.facts
        fact = facts.pop(at % len(facts))
        self.world.deliver(fact)
        if keep:
            self.world.old_facts.append(fact)

    @precondition(lambda self: self.world.old_facts)
    @rule(at=st.integers(0, 50))
    def repeat_fact(self, at) -> None:
        old = self.world.old_facts
        fact = old[at % len(old)]
        if fact[0] != "finished":
            self.world.deliver(fact)
        else:
            self.world.core.finished(*fact[1:])

    @rule()
    def train(self) -> None:
        self.world.train()

    @rule()
    def publish(self) -> None:
        self.world.publish()

    @rule(index=st.integers(0, N - 1), seed=st.integers(0, 9))
    def lose(self, index, seed) -> None:
        self.world.lose(index, random.Random(seed))

    @rule()
    def interrupt_all(self) -> None:
        for command in self.world.core.interrupt_all():
            self.world.instances[command.instance].commands.append(command)

    @invariant()
    def books_are_right(self) -> None:
        if hasattr(self, "world"):
            self.world.ledger.check()

    def teardown(self) -> None:
        """Nothing was lost: once everything is delivered, the run goes on."""
        if hasattr(self, "world"):
            assert self.world.settle(400) >= 5, self.world.core.waiting_for()


TestDelays = Delays.TestCase
TestDelays.settings = settings(
    max_examples=60,
    stateful_step_count=60,
    deadline=None,
    phases=[HypothesisPhase.explicit, HypothesisPhase.reuse, HypothesisPhase.generate],  # shrinking takes minutes
    suppress_health_check=[HealthCheck.too_slow],
)


@pytest.mark.parametrize("policy", POLICIES)
def test_a_dumped_run_goes_on(policy: str) -> None:
    world = World(policy, 2, 2, 0, False)
    world.settle(30)
    core, ledger = world.core.dump(), load_ledger(policy, world.ledger.dump())
    again = World(policy, 2, 2, 0, False)
    again.ledger = ledger
    again.core = Coordinator(again.settings, ledger, DEFAULT, [i.info for i in again.instances.values()])
    again.core.load(core)
    again.published = ledger.version
    again.core.published(ledger.version)
    again.next_group, again.v_traj, again.trained = world.next_group, world.v_traj, world.trained
    again.finished = {t: n for t, n in world.finished.items() if t not in world.trained}
    for instance in world.instances.values():
        again.stored.update(instance.tokens)
    again.stored.update(world.stored)
    again.facts = [("rewarded", tid, _reward(tid)) for tid in again.core.unrewarded()]
    assert again.settle(200) >= 5
