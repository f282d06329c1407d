"""If every dispatched trajectory finishes or is released, every step is eventually READY; and nothing is wasted.

A small closed world: instances at versions of their own, a queue of prompts, and an adversary who picks which
trajectory finishes next. Nothing here looks at the protocol's internals to decide what to do.
"""

import random

import pytest

from staleflow.protocol import StalenessProtocol

STEPS = 12


class World:
    def __init__(self, rng: random.Random, order: str, spares: tuple[int, int], failing: float) -> None:
        self.rng, self.order, self.failing = rng, order, failing
        self.protocol = StalenessProtocol(rng.randint(1, 5), rng.randint(1, 3), rng.randint(0, 4), *spares)
        self.instances = [0] * rng.randint(1, 4)
        self.running: list[tuple[int, int]] = []  # (group, member), oldest first
        self.todo: list[tuple[int, int]] = []
        self.next_id = 0
        self.complete: set[int] = set()

    def dispatch(self) -> bool:
        """Begin one trajectory somewhere: an instance that is refused pulls the newest version and asks again."""
        if not self.todo:
            members = range(self.protocol.group_size + self.protocol.spare_members)
            self.todo = [(self.next_id, member) for member in members]
            self.next_id += 1
        group_id, member = self.todo[0]
        instance = self.rng.randrange(len(self.instances))
        if not self.protocol.reserve(group_id, member, self.instances[instance]):
            self.instances[instance] = self.protocol.version
            if not self.protocol.reserve(group_id, member, self.protocol.version):
                return False
        self.running.append(self.todo.pop(0))
        return True

    def finish_one(self) -> None:
        """The adversary's choice; a group that fails leaves with all of its trajectories."""
        self.running = [pair for pair in self.running if self.protocol.holds(*pair)]
        if not self.running:
            return
        last = {"oldest first": 0, "newest first": -1}.get(self.order, self.rng.randrange(len(self.running)))
        group_id, member = self.running.pop(last)
        if self.rng.random() < self.failing and group_id not in self.complete:
            self.protocol.release(group_id, "failed")
            self.todo = [pair for pair in self.todo if pair[0] != group_id]
            return
        if self.protocol.occupy(group_id, member):
            self.complete.add(group_id)
            self.todo = [pair for pair in self.todo if pair[0] != group_id]  # no further spare member is needed

    def run(self) -> None:
        moves = 0
        while self.protocol.version < STEPS:
            moves += 1
            assert moves < 20_000, f"no progress at step {self.protocol.version}: {self.protocol.buffers()}"
            if self.protocol.ready() and self.rng.random() < 0.7:
                self.protocol.consume()
                dropped = {group_id for group_id, _, _ in self.protocol.dropped}
                self.todo = [pair for pair in self.todo if pair[0] not in dropped]
            began = self.rng.random() < 0.6 and self.dispatch()
            if not began:
                self.finish_one()
        self.protocol.check()


@pytest.mark.parametrize("order", ["random", "oldest first", "newest first"])
@pytest.mark.parametrize("spares", [(0, 0), (0, 1), (2, 0), (1, 2)])
@pytest.mark.parametrize("failing", [0.0, 0.2])
def test_every_step_becomes_ready(order: str, spares: tuple[int, int], failing: float) -> None:
    for seed in range(12):
        world = World(random.Random(seed), order, spares, failing)
        world.run()
        released = world.protocol.counters()["groups"]["released"]
        if not failing and not spares[0]:
            assert not released, "without spare groups no finished work is thrown away"


def test_when_all_is_admitted_and_all_finishes_the_step_is_ready() -> None:
    """Saturate with every mix of admissible versions, then let everything finish, whatever the order."""
    for seed in range(300):
        rng = random.Random(seed)
        protocol = StalenessProtocol(rng.randint(1, 5), 1, rng.randint(0, 4), start_version=5)
        versions = [5 - lag for lag in range(protocol.eta + 1)]
        ids = []
        while any(protocol.can_reserve(version) for version in versions):
            if protocol.reserve(len(ids), 0, rng.choice(versions)):
                ids.append(len(ids))
        assert len(ids) == protocol.batch_groups * (protocol.eta + 1)
        rng.shuffle(ids)
        for group_id in ids:
            protocol.occupy(group_id, 0)
        for _ in range(protocol.eta + 1):
            protocol.consume()
        assert protocol.counters()["groups"]["consumed"] == len(ids)
