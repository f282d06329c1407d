"""Lock-step with the published slot rule: whatever it admits is admitted, whenever it is ready we are ready.

Both take the same requests, and a request that the slots refuse is made to neither. They may train different finished
groups at a step (the slots take what sits in buffer c, the deadlines what is due first); admission and readiness must
dominate all the same.
"""

import random
from collections import Counter

import pytest

from staleflow.protocol import StalenessProtocol
from staleflow.protocol.slots import SlotProtocol


class LockStep:
    def __init__(self, rng: random.Random) -> None:
        self.rng = rng
        batch_groups, self.group_size, eta = rng.randint(1, 8), rng.randint(1, 4), rng.randint(0, 5)
        self.ours = StalenessProtocol(batch_groups, self.group_size, eta)
        self.slots = SlotProtocol(batch_groups, eta)
        self.instances = [0] * rng.randint(1, 4)
        self.running: dict[int, dict[int, bool]] = {}  # unfinished group -> member -> finished
        self.asked = Counter()
        self.next_id = 0

    def start_group(self) -> None:
        version = self.rng.choice(self.instances)
        theirs = self.slots.can_reserve(version)
        assert self.ours.can_reserve(version) or not theirs
        self.asked["both" if theirs else "ours" if self.ours.can_reserve(version) else "neither"] += 1
        if theirs:
            assert self.ours.reserve(self.next_id, 0, version)
            assert self.slots.reserve(self.next_id, version)
            self.running[self.next_id] = {0: False}
            self.next_id += 1

    def start_member(self) -> None:
        open_groups = [i for i, members in self.running.items() if len(members) < self.group_size]
        if not open_groups:
            return
        group_id, version = self.rng.choice(open_groups), self.rng.choice(self.instances)
        members = self.running[group_id]
        if version < self.slots.versions[group_id]:
            theirs = self.slots.lower(group_id, version)
            assert self.ours.can_reserve(version, group_id) or not theirs
            self.asked["lowered" if theirs else "not lowered"] += 1
            if not theirs:
                return
        assert self.ours.reserve(group_id, len(members), version)
        members[len(members)] = False

    def finish_member(self) -> None:
        unfinished = [(i, m) for i, members in self.running.items() for m, done in members.items() if not done]
        if not unfinished:
            return
        group_id, member = self.rng.choice(unfinished)
        self.running[group_id][member] = True
        if self.ours.occupy(group_id, member):
            del self.running[group_id]
            self.slots.occupy(group_id)

    def give_up(self) -> None:
        """An unfinished group fails: those are the same in both, while finished ones may have been trained in one."""
        if self.running and self.rng.random() < 0.1:
            group_id = self.rng.choice(list(self.running))
            del self.running[group_id]
            self.ours.release(group_id, "failed")
            self.slots.release(group_id)

    def step(self) -> None:
        assert self.ours.ready() or not self.slots.ready()
        self.asked["ready earlier"] += self.ours.ready() and not self.slots.ready()
        if self.slots.ready():
            self.ours.consume()
            self.slots.consume()
            self.asked["steps"] += 1

    def pull(self) -> None:
        self.instances[self.rng.randrange(len(self.instances))] = self.ours.version

    def run(self, moves: int) -> Counter:
        moves_by_name = (self.start_group, self.start_member, self.finish_member, self.give_up, self.step, self.pull)
        for _ in range(moves):
            self.rng.choices(moves_by_name, (30, 30, 40, 5, 10, 8))[0]()
            assert self.ours.ready() or not self.slots.ready()
            assert self.ours.counters()["groups"]["outstanding"] == len(self.slots.versions)
        self.ours.check()
        return self.asked


@pytest.mark.parametrize("seed", range(4))
def test_the_deadline_rule_dominates_the_slot_rule(seed: int) -> None:
    asked = Counter()
    for trace in range(150):
        asked += LockStep(random.Random(seed * 1_000 + trace)).run(400)
    # Each of these cases must have occurred, or the traces prove nothing.
    assert asked["both"] > 1_000 and asked["lowered"] > 20 and asked["steps"] > 300, asked
    assert asked["ours"] > 20, "the slots never refused what we admit"


def test_slots_refuse_what_the_deadlines_admit() -> None:
    """B=1, eta=1 at c=1: the only finished group may be trained at step 1 or 2, and slots put it into 1."""
    ours, slots = StalenessProtocol(1, 1, 1, start_version=1), SlotProtocol(1, 1, start_version=1)
    assert ours.reserve(0, 0, 1) and slots.reserve(0, 1)
    ours.occupy(0, 0)
    slots.occupy(0)
    assert slots.buffer_of[0] == 1
    assert not slots.can_reserve(0)
    assert not ours.can_reserve(0), "it would take READY away"
    ours, slots = StalenessProtocol(1, 1, 2, start_version=2), SlotProtocol(1, 2, start_version=2)
    for group_id, version in enumerate((1, 0)):
        assert ours.reserve(group_id, 0, version) and slots.reserve(group_id, version)
    assert ours.can_reserve(2) and slots.can_reserve(2)
