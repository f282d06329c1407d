"""One step of a random but legal life of a StalenessProtocol, every answer compared with the Ledger's prediction."""

import random

from protocol_ledger import Ledger

from staleflow.protocol import StalenessProtocol

REASONS = ("redundant", "surplus", "filtered", "failed", "aborted")


class Pair:
    """A protocol and the tests' account of it, driven together."""

    def __init__(self, protocol: StalenessProtocol) -> None:
        self.protocol = protocol
        self.ledger = Ledger(
            protocol.batch_groups,
            protocol.group_size,
            protocol.eta,
            protocol.spare_groups,
            protocol.spare_members,
            protocol.version,
        )
        self.next_id = 0
        self.skipped: list[int] = []  # unused ids below it

    @property
    def members(self) -> range:
        return range(self.protocol.group_size + self.protocol.spare_members)

    def reserve(self, group_id: int, member: int, version: int) -> bool:
        held = member in self.ledger.groups.get(group_id, {})
        expected = held or self.ledger.may_reserve(group_id, version)
        was_ready = self.protocol.ready()
        if not held:
            assert self.protocol.can_reserve(version, group_id) == expected
        assert self.protocol.reserve(group_id, member, version) == expected
        assert self.protocol.ready() or not was_ready, "a READY step stays READY"
        if expected and not held:
            self.ledger.reserved(group_id, member, version)
            self.next_id = max(self.next_id, group_id + 1)
        return expected

    def occupy(self, group_id: int, member: int) -> bool:
        completed = self.protocol.occupy(group_id, member)
        assert completed == self.ledger.occupied(group_id, member)
        return completed

    def release(self, group_id: int, reason: str, member: int | None = None) -> None:
        self.protocol.release(group_id, reason, member)
        if member is None:
            self.ledger.group_released(group_id, reason)
        else:
            self.ledger.member_released(group_id, reason, member)

    def consume(self) -> list[int]:
        expected = self.ledger.batch()
        before = set(self.ledger.groups)
        batch = self.protocol.consume()
        assert batch == expected
        self.ledger.step(batch)
        self.ledger.surplus(before - set(batch) - set(self.protocol.outstanding()))
        return batch

    def compare(self) -> None:
        """The six invariants, from the ledger's account: what the protocol says must be what the account says."""
        protocol, ledger = self.protocol, self.ledger
        due = ledger.deadlines()
        assert protocol.version == ledger.version
        assert all(ledger.version <= d <= ledger.version + ledger.eta for d in due.values()), "bound"
        assert ledger.feasible(list(due.values()), ledger.version, ledger.places), "feasibility"
        assert len(ledger.trained) == len(set(ledger.trained)), "exactly once"
        assert protocol.counters() == ledger.counters(), "conservation"
        assert protocol.outstanding() == list(ledger.groups), "in the order of the first reservations"
        assert {i: protocol.version_of(i) for i in protocol.outstanding()} == {
            i: d - ledger.eta for i, d in due.items()
        }
        assert protocol.ready() == ledger.ready(due)
        assert set(protocol.waiting_for()) == ledger.waiting_for()


def random_pair(rng: random.Random, redundancy: bool = True) -> Pair:
    """A pair with random settings: eta 0-5, B 1-8, group sizes 1-4."""
    spares = {"spare_groups": rng.choice((0, 0, 0, 1, 3)), "spare_members": rng.choice((0, 0, 1, 2))}
    return Pair(
        StalenessProtocol(
            batch_groups=rng.randint(1, 8),
            group_size=rng.randint(1, 4),
            eta=rng.randint(0, 5),
            start_version=rng.choice((0, 7)),
            **(spares if redundancy else {}),
        )
    )


def random_operation(pair: Pair, rng: random.Random) -> str:
    """Do one legal operation; its name, or "" when the one drawn was impossible."""
    ledger = pair.ledger
    kind = rng.choices(("start", "join", "occupy", "release", "consume"), (20, 35, 40, 2, 10))[0]
    if kind == "start":
        pair.reserve(_new_id(pair, rng), rng.choice(pair.members), _version(pair, rng))
        return kind
    if kind == "consume":
        if not pair.protocol.ready():
            return ""
        pair.consume()
        return kind
    candidates = tuple(i for i in ledger.groups if kind == "release" or i not in ledger.finished or rng.random() < 0.1)
    if not candidates:
        return ""
    group_id = rng.choice(candidates)
    if kind == "join":
        pair.reserve(group_id, rng.choice(pair.members), _version(pair, rng))
        return kind
    if kind == "release":
        return _release(pair, rng, group_id)
    running = [member for member, (_, done) in ledger.groups[group_id].items() if not done]
    if not running:
        return ""
    pair.occupy(group_id, rng.choice(running))
    return kind


def _new_id(pair: Pair, rng: random.Random) -> int:
    """Most often the next id; at times one behind a gap, or from an earlier gap."""
    luck = rng.random()
    if luck < 0.05 and pair.skipped:
        return pair.skipped.pop(rng.randrange(len(pair.skipped)))
    if luck > 0.95:
        first, pair.next_id = pair.next_id, pair.next_id + rng.choice((1, 2, 30, 1_000))
        pair.skipped += range(first, min(pair.next_id, first + 5))
    return pair.next_id


def _version(pair: Pair, rng: random.Random) -> int:
    """An instance's version: most often the newest, at times one that is too old."""
    lag = 0 if rng.random() < 0.5 else rng.randint(0, pair.protocol.eta + 1)
    return max(0, pair.protocol.version - lag)


def _release(pair: Pair, rng: random.Random, group_id: int) -> str:
    members = pair.ledger.groups[group_id]
    if group_id in pair.ledger.finished:
        members = {member: state for member, state in members.items() if not state[1]}
    member = rng.choice((None, *members))
    pair.release(group_id, rng.choice(REASONS), member)
    return "release"
