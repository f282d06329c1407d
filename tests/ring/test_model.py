"""Ring and arena against the obvious model of each, over random sequences of operations."""

from __future__ import annotations

from collections import deque

from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from staleflow.trajectories.arena import Arena, Block
from staleflow.trajectories.ring import Ring

from .conftest import RUN_ID, unique_name

CAPACITY = 4096
SIZES = st.integers(0, CAPACITY // 8)
PAYLOADS = st.binary(min_size=0, max_size=CAPACITY // 8)


def room(nbytes: int) -> int:
    return 64 + -(-nbytes // 64) * 64


class RingAgainstDeque(RuleBasedStateMachine):
    """The model: published records not yet released, and how many of them were handed out."""

    def __init__(self) -> None:
        super().__init__()
        self.records: deque[tuple[int, int, bytes]] = deque()  # sequence, kind, payload
        self.read = 0
        self.sequence = 0
        self.reserved: memoryview | None = None

    @initialize()
    def create(self) -> None:
        self.host = Ring.create(unique_name(), CAPACITY, run_id=RUN_ID)
        self.host.unlink()
        self.restart_producer()
        self.restart_consumer()

    def published(self, kind: int, payload: bytes) -> None:
        self.sequence += 1
        self.records.append((self.sequence, kind, payload))

    def may_be_full(self, payload: bytes) -> bool:
        """Refusing is right when the record and the longest padding before it do not fit beside what is used."""
        return self.producer.used + 2 * room(len(payload)) > CAPACITY

    @rule(kind=st.integers(0, 2**32 - 2), payload=PAYLOADS)
    @precondition(lambda self: self.reserved is None)
    def push(self, kind: int, payload: bytes) -> None:
        if self.producer.push(kind, payload):
            self.published(kind, payload)
        else:
            assert self.may_be_full(payload)

    @rule(payloads=st.lists(PAYLOADS, max_size=12))
    @precondition(lambda self: self.reserved is None)
    def push_batch(self, payloads: list[bytes]) -> None:
        sent = self.producer.push_batch([(9, payload) for payload in payloads])
        for payload in payloads[:sent]:
            self.published(9, payload)
        if sent < len(payloads):
            assert self.may_be_full(payloads[sent])

    @rule(nbytes=SIZES)
    @precondition(lambda self: self.reserved is None)
    def reserve(self, nbytes: int) -> None:
        self.reserved = self.producer.reserve(nbytes, 5)
        if self.reserved is None:
            assert self.may_be_full(bytes(nbytes))
        else:
            self.reserved[:] = bytes(i % 251 for i in range(nbytes))

    @rule()
    @precondition(lambda self: self.reserved is not None)
    def commit(self) -> None:
        payload = bytes(self.reserved)
        self.producer.commit()
        self.published(5, payload)
        self.reserved = None

    @rule()
    @precondition(lambda self: self.reserved is not None)
    def abort(self) -> None:
        self.producer.abort()
        self.reserved = None

    @rule(limit=st.integers(1, 20))
    def peek(self, limit: int) -> None:
        got = [(r.sequence, r.kind, bytes(r.payload)) for r in self.consumer.peek(limit)]
        assert got == list(self.records)[self.read : self.read + limit]
        self.read += len(got)

    @rule(data=st.data())
    @precondition(lambda self: self.read > 0)
    def release(self, data: st.DataObject) -> None:
        count = data.draw(st.integers(1, self.read))
        self.consumer.release(self.records[count - 1][0])
        for _ in range(count):
            self.records.popleft()
        self.read -= count

    @rule(limit=st.integers(1, 20))
    @precondition(lambda self: self.read == 0)
    def pop_batch(self, limit: int) -> None:
        got = [(r.sequence, r.kind, r.payload) for r in self.consumer.pop_batch(limit)]
        expected = list(self.records)[:limit]
        assert got == expected
        for _ in got:
            self.records.popleft()

    @rule()
    def restart_producer(self) -> None:
        """What was reserved and not committed is gone; the sequence goes on."""
        self.producer = None
        self.producer = Ring.attach(self.host.fileno(), run_id=RUN_ID)
        self.reserved = None

    @rule()
    def restart_consumer(self) -> None:
        """What was read and not released comes again."""
        self.consumer = None
        self.consumer = Ring.attach(self.host.fileno(), run_id=RUN_ID)
        self.read = 0

    @invariant()
    def waits_only_when_all_is_read(self) -> None:
        assert self.consumer.wait(0) == (self.read < len(self.records))

    @invariant()
    def used_is_what_is_unreleased_and_padding(self) -> None:
        least = sum(room(len(payload)) for _, _, payload in self.records)
        assert least <= self.producer.used <= CAPACITY


class ArenaAgainstDict(RuleBasedStateMachine):
    """The model: the bytes of every block, and the views that are held."""

    def __init__(self) -> None:
        super().__init__()
        self.contents: dict[Block, bytes] = {}
        self.views: list[tuple[memoryview, bytes]] = []

    @initialize()
    def create(self) -> None:
        self.arena = Arena.create(unique_name("arena"), CAPACITY, run_id=RUN_ID)
        self.arena.unlink()

    @rule(payload=st.binary(min_size=1, max_size=1500))
    def take(self, payload: bytes) -> None:
        block = self.arena.take(payload)
        if block is None:
            free = self.arena.capacity - self.arena.used
            assert free < room(len(payload)) - 64 or self.views, "room enough, and nothing stood in the way"
        else:
            self.contents[block] = payload

    @rule(data=st.data())
    @precondition(lambda self: self.contents)
    def free(self, data: st.DataObject) -> None:
        block = data.draw(st.sampled_from(list(self.contents)))
        self.arena.free(block)
        del self.contents[block]

    @rule(data=st.data())
    @precondition(lambda self: self.contents)
    def hold(self, data: st.DataObject) -> None:
        block = data.draw(st.sampled_from(list(self.contents)))
        self.views.append((self.arena.view(block), self.contents[block]))

    @rule()
    @precondition(lambda self: self.views)
    def let_go(self) -> None:
        self.views.pop()

    @invariant()
    def every_byte_is_where_it_belongs(self) -> None:
        for block, payload in self.contents.items():
            assert bytes(self.arena.view(block)) == payload
        for view, payload in self.views:
            assert bytes(view) == payload, "a block moved or was given away under a view"

    @invariant()
    def books_balance(self) -> None:
        if not self.views:
            assert self.arena.used == sum(room(len(payload)) - 64 for payload in self.contents.values())
            assert self.arena.blocks == len(self.contents)


TestRing = RingAgainstDeque.TestCase
TestArena = ArenaAgainstDict.TestCase
TestRing.settings = TestArena.settings = settings(max_examples=150, stateful_step_count=60, deadline=None)
