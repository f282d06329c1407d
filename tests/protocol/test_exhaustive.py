"""Every interleaving for small sizes: the bound, exactly-once, no deadlock, and READY exactly when it ought to be.

States that differ only in the names of groups behave alike, so each is visited once under its canonical form.
"""

import pytest
from protocol_driver import Pair
from protocol_ledger import Ledger

from staleflow.protocol import StalenessProtocol

Move = tuple[str, int, int]


def canonical(protocol: StalenessProtocol, started: int) -> tuple[object, ...]:
    groups = sorted(tuple(sorted(protocol.members(i).values())) for i in protocol.outstanding())
    return protocol.version, started, tuple(groups)


def moves(protocol: StalenessProtocol, started: int, max_groups: int) -> list[Move]:
    """Every legal call: (name, group, member or version)."""
    versions = range(max(0, protocol.version - protocol.eta), protocol.version + 1)
    found: list[Move] = [("start", started, version) for version in versions if started < max_groups]
    for group_id in protocol.outstanding():
        members = protocol.members(group_id)
        if len(members) < protocol.group_size:
            found += [("join", group_id, version) for version in versions]
        found += [("occupy", group_id, member) for member, (_, done) in members.items() if not done]
        found.append(("release", group_id, 0))
    if protocol.ready():
        found.append(("consume", 0, 0))
    return found


def clone(pair: Pair) -> Pair:
    protocol = StalenessProtocol.load(pair.protocol.dump())
    twin = Pair(protocol)
    old = pair.ledger
    twin.ledger = Ledger(old.batch_groups, old.group_size, old.eta, version=old.version)
    twin.ledger.groups = {i: {m: list(state) for m, state in members.items()} for i, members in old.groups.items()}
    twin.ledger.finished, twin.ledger.trained, twin.ledger.used = list(old.finished), list(old.trained), set(old.used)
    twin.next_id = pair.next_id
    return twin


def apply(pair: Pair, move: Move) -> bool:
    """Do the move; False if it was refused. The pair compares every answer with the account."""
    name, group_id, value = move
    if name == "start":
        return pair.reserve(group_id, 0, value)
    if name == "join":
        return pair.reserve(group_id, len(pair.protocol.members(group_id)), value)
    if name == "occupy":
        pair.occupy(group_id, value)
    elif name == "release":
        pair.release(group_id, "failed")
    else:
        pair.consume()
    return True


def examine(pair: Pair, started: int, max_groups: int) -> None:
    protocol, ledger = pair.protocol, pair.ledger
    assert protocol.ready() == ledger.ready_by_search()
    unfinished = set(ledger.groups) - set(ledger.finished)
    if not protocol.ready() and not unfinished and started < max_groups:
        assert protocol.can_reserve(protocol.version), "deadlock: nothing runs, nothing is ready, nothing may start"
    waiting = set(protocol.waiting_for())
    assert waiting <= unfinished
    if len(ledger.groups) >= ledger.batch_groups and not protocol.ready():
        assert waiting, "enough is outstanding, so the step waits for somebody"


def explore(batch_groups: int, group_size: int, eta: int, max_groups: int) -> int:
    """Visit every reachable state; how many there are."""
    start = Pair(StalenessProtocol(batch_groups, group_size, eta, start_version=eta))  # so that instances may lag
    seen = {canonical(start.protocol, 0)}
    stack = [start]
    while stack:
        pair = stack.pop()
        examine(pair, pair.next_id, max_groups)
        for move in moves(pair.protocol, pair.next_id, max_groups):
            after = clone(pair)
            if apply(after, move):
                form = canonical(after.protocol, after.next_id)
                if form not in seen:
                    seen.add(form)
                    stack.append(after)
    return len(seen)


@pytest.mark.parametrize(
    ("batch_groups", "group_size", "eta", "max_groups"),
    [(b, 1, eta, 5) for b in (1, 2) for eta in (0, 1, 2)]
    + [(1, 2, 0, 5), (2, 2, 0, 4), (1, 2, 1, 5), (2, 2, 1, 4), (1, 2, 2, 3), (2, 2, 2, 3)],
)
def test_every_interleaving(batch_groups: int, group_size: int, eta: int, max_groups: int) -> None:
    assert explore(batch_groups, group_size, eta, max_groups) > 20
