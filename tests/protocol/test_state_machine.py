"""A hypothesis state machine over all operations; the six invariants are checked against the tests' own account."""

import json
from typing import Any

import pytest
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule
from protocol_driver import REASONS, Pair

from staleflow.protocol import NotReady, ProtocolError, StalenessProtocol


class ProtocolMachine(RuleBasedStateMachine):
    pair: Pair

    @initialize(
        batch_groups=st.integers(1, 4),
        group_size=st.integers(1, 4),
        eta=st.integers(0, 5),
        spare_groups=st.sampled_from((0, 0, 1, 2)),
        spare_members=st.sampled_from((0, 0, 1, 2)),
        start_version=st.sampled_from((0, 3)),
    )
    def start(self, **settings_: int) -> None:
        self.pair = Pair(StalenessProtocol(**settings_))
        self.steps = [self.pair.protocol.version]

    @property
    def ledger(self) -> Any:
        return self.pair.ledger

    def running(self) -> list[tuple[int, int]]:
        return [(i, m) for i, members in self.ledger.groups.items() for m, (_, done) in members.items() if not done]

    def version(self, lag: int) -> int:
        return max(0, self.pair.protocol.version - lag)

    @rule(lag=st.integers(0, 6), data=st.data(), gap=st.sampled_from((0, 0, 0, 2, 3, 500)))
    def reserve_a_new_group(self, lag: int, gap: int, data: st.DataObject) -> None:
        before = self.pair.protocol.dump()
        member = data.draw(st.sampled_from(self.pair.members))
        if not self.pair.reserve(self.pair.next_id + gap, member, self.version(lag)):
            assert self.pair.protocol.dump() == before

    @precondition(lambda self: self.ledger.groups)
    @rule(lag=st.integers(0, 6), data=st.data())
    def reserve_a_member(self, lag: int, data: st.DataObject) -> None:
        before = self.pair.protocol.dump()
        group_id = data.draw(st.sampled_from(list(self.ledger.groups)))
        member = data.draw(st.sampled_from(self.pair.members))
        held = member in self.ledger.groups[group_id]
        if not self.pair.reserve(group_id, member, self.version(lag)) or held:
            assert self.pair.protocol.dump() == before

    @precondition(lambda self: self.running())
    @rule(data=st.data())
    def occupy(self, data: st.DataObject) -> None:
        self.pair.occupy(*data.draw(st.sampled_from(self.running())))

    @precondition(lambda self: self.running())
    @rule(data=st.data())
    def finish_a_whole_group(self, data: st.DataObject) -> None:
        group_id, _ = data.draw(st.sampled_from(self.running()))
        for member in self.pair.members:
            self.pair.reserve(group_id, member, self.pair.protocol.version)
        for running_id, member in self.running():
            if running_id == group_id:
                self.pair.occupy(group_id, member)

    @precondition(lambda self: self.ledger.groups)
    @rule(data=st.data(), reason=st.sampled_from(REASONS))
    def release_a_group(self, data: st.DataObject, reason: str) -> None:
        self.pair.release(data.draw(st.sampled_from(list(self.ledger.groups))), reason)

    @rule(data=st.data(), reason=st.sampled_from(REASONS))
    def release_a_member(self, data: st.DataObject, reason: str) -> None:
        kept = {(i, m) for i in self.ledger.finished for m, (_, done) in self.ledger.groups[i].items() if done}
        everyone = [(i, m) for i, members in self.ledger.groups.items() for m in members]
        if everyone:
            group_id, member = data.draw(st.sampled_from(everyone))
            if (group_id, member) in kept:
                self.misused(lambda: self.pair.protocol.release(group_id, reason, member))
            else:
                self.pair.release(group_id, reason, member)

    @rule()
    def consume(self) -> None:
        if self.pair.protocol.ready():
            row = self.pair.protocol.buffers()[0]
            batch = self.pair.consume()
            assert row == (self.pair.protocol.version - 1, 0, len(batch), 0, "READY")
        else:
            before = self.pair.protocol.dump()
            with pytest.raises(NotReady):
                self.pair.protocol.consume()
            assert self.pair.protocol.dump() == before

    @rule()
    def save_and_restore(self) -> None:
        state = json.loads(json.dumps(self.pair.protocol.dump()))
        self.pair.protocol = StalenessProtocol.load(state)
        assert self.pair.protocol.dump() == state

    @rule(data=st.data())
    def misuse(self, data: st.DataObject) -> None:
        protocol, ledger = self.pair.protocol, self.ledger
        unused, top, now = self.pair.next_id + 9, len(self.pair.members), protocol.version
        calls = [
            lambda: protocol.reserve(unused, 0, now + 1),
            lambda: protocol.reserve(unused, top, now),
            lambda: protocol.reserve(unused, -1, now),
            lambda: protocol.reserve(unused, 0, -1),
            lambda: protocol.reserve("a", 0, now),
            lambda: protocol.occupy(unused, 0),
            lambda: protocol.release(unused, "failed"),
            lambda: protocol.release(unused, "because"),
        ]
        gone = ledger.used - set(ledger.groups)
        if gone:
            old = data.draw(st.sampled_from(sorted(gone)))
            calls += [lambda: protocol.reserve(old, 0, now), lambda: protocol.release(old, "failed")]
            if not protocol.spare_members:
                calls.append(lambda: protocol.occupy(old, 0))
        done = [(i, m) for i, members in ledger.groups.items() for m, (_, finished) in members.items() if finished]
        calls += [lambda twice=twice: protocol.occupy(*twice) for twice in done[:1]]
        self.misused(data.draw(st.sampled_from(calls)))

    def misused(self, call: Any) -> None:
        before = self.pair.protocol.dump()
        with pytest.raises(ProtocolError):
            call()
        assert self.pair.protocol.dump() == before

    @invariant()
    def the_account_agrees(self) -> None:
        self.pair.compare()
        self.pair.protocol.check()

    @invariant()
    def versions_never_go_back(self) -> None:
        self.steps.append(self.pair.protocol.version)
        assert 0 <= self.steps[-1] - self.steps[-2] <= 1

    @invariant()
    def the_view_shows_every_group_once(self) -> None:
        protocol, ledger = self.pair.protocol, self.ledger
        rows = protocol.buffers()
        assert [row[0] for row in rows] == list(range(ledger.version, ledger.version + ledger.eta + 1))
        assert (rows[0][4] == "READY") == ledger.ready()
        assert (rows[0][4] == "STUCK") == bool(ledger.waiting_for())
        for _, reserved, occupied, empty, state in rows[1:]:
            assert reserved + occupied + empty == ledger.places
            assert state == ("PENDING" if empty else "STUCK" if reserved else "READY")
        if not protocol.spare_groups:
            assert sum(row[1] + row[2] for row in rows) == len(ledger.groups)
            assert sum(row[2] for row in rows) == len(ledger.finished)

    @invariant()
    def progress_is_possible(self) -> None:
        """Liveness, locally: when nobody is waited for, either the step can be taken or a new prompt is admitted."""
        protocol = self.pair.protocol
        if not self.running() and not protocol.ready():
            incomplete = set(self.ledger.groups) - set(self.ledger.finished)
            assert incomplete or protocol.can_reserve(protocol.version)


ProtocolMachine.TestCase.settings = settings(
    max_examples=150, stateful_step_count=60, deadline=None, suppress_health_check=list(HealthCheck)
)
TestProtocolMachine = ProtocolMachine.TestCase
