"""Members that are killed or fall silent in the middle: the others notice, say who, and serve only whole versions."""

from __future__ import annotations

import os
import signal
import time
from functools import partial

import pytest
from parameters_world import MANIFEST, Context, DictEngine, World, weights

from staleflow.parameters import landing
from staleflow.parameters.layout import Rows, pieces_of, shard_of
from staleflow.parameters.publish import Publisher, PublishError
from staleflow.parameters.pull import Puller
from staleflow.parameters.relay import Relay
from staleflow.parameters.store import NodeStore

pytestmark = pytest.mark.dist
TIMEOUT_S = 6.0
NOTICED_S = 12.0  # the time limit of a message, and some for a machine that is busy
BUCKET = 1024
ROWS = [Rows(index, 0, entry.rows) for index, entry in enumerate(MANIFEST.entries)]
PIECES = len(pieces_of(shard_of(MANIFEST, ROWS), BUCKET))
STALL_AT = 2  # the piece after which a relay stands still
# A receive that is posted completes without its process, by Gloo's thread, and Gloo sends nothing that is not posted.
# So a stalled relay still takes the pieces that it has posted, and no more: whoever sends to it cannot get through.
assert PIECES > STALL_AT + landing.AHEAD + 1


def trainer(context: Context, group: str, relays: list[int], first: int, last: int) -> None:
    """Publishes versions first..last, then says how it ended."""
    parameters = {name: tensor.float() for name, tensor in weights(first).items()}
    names = ["the trainer", *(f"relay {rank}" for rank in relays)]
    members = context.group(group, [context.rank, *relays])
    publisher = Publisher(parameters.items(), MANIFEST, members, (0,), BUCKET, names=names, timeout_s=TIMEOUT_S)
    try:
        for version in range(first, last + 1):
            for name, tensor in weights(version).items():
                parameters[name].copy_(tensor)
            publisher.snapshot(version)
            publisher.wait_free(60)
            context.tell(version)
            context.await_signal(f"go {version}")
    except PublishError as error:
        context.tell(str(error))
    publisher.close()


def relay(context: Context, group: str, trainer_rank: int, relays: list[int], stall_at: int = -1) -> None:
    """Stores what comes; stalls in the middle of version `stall_at`. Serves until told to end."""
    store = NodeStore.create(f"{context.token}-{context.rank}", MANIFEST)
    context.signal(f"store {context.rank}")
    stall(context, stall_at)
    run_relay(context, store, group, trainer_rank, relays)
    context.await_signal("end", 120)
    store.close()


def run_relay(context: Context, store: NodeStore, group: str, trainer_rank: int, relays: list[int]) -> None:
    names = ["the trainer", *(f"relay {rank}" for rank in relays)]
    members = context.group(group, [trainer_rank, *relays])
    relay = Relay(members, MANIFEST, store, names=names, timeout_s=TIMEOUT_S)
    assert relay.ended.wait(100)
    context.tell((str(relay.failure or "ended"), store.newest()))
    relay.close()


def stall(context: Context, version: int) -> None:
    """Make this process stand still in the middle of `version` (counted from 0)."""
    landed = landing.Landing._finish
    count = 0

    def finish(self, arrival) -> None:
        nonlocal count
        landed(self, arrival)
        count += arrival.place == STALL_AT
        if arrival.place == STALL_AT and count == version + 1:
            context.signal("stalled")
            time.sleep(1000)

    landing.Landing._finish = finish


def reader(context: Context, host: int, versions: list[int], stall_at: int = -1) -> None:
    """Pulls each of `versions` when told to; stands still in the copy of `stall_at`."""
    context.await_signal(f"store {host}")
    store = NodeStore.attach(f"{context.token}-{host}")

    class Engine(DictEngine):
        def load_weights(self, tensors) -> None:
            if store.newest() == stall_at:
                next(tensors)
                context.signal("stalled")
                time.sleep(1000)
            super().load_weights(tensors)

    engine = Engine()
    for version in versions:
        context.await_signal(f"pull {version}")
        result = Puller(store, engine).pull(version)
        context.tell((result.version, engine.has(result.version), store.read().checksum_ok()))
    context.await_signal("end", 120)
    readable = store.newest()
    context.tell((readable, store.read().checksum_ok()))


def test_a_reader_killed_in_the_middle_of_a_pull_disturbs_nobody() -> None:
    ranks = [
        partial(relay, group="g", trainer_rank=1, relays=[0]),
        partial(trainer, group="g", relays=[0], first=0, last=3),
        partial(reader, host=0, versions=[0], stall_at=0),
        partial(reader, host=0, versions=[0, 3]),
    ]
    with World(ranks) as world:
        assert world.told(1) == [(1, 0)]
        world.signal("pull 0")
        world.await_signal("stalled")
        assert world.told(1) in ([(3, (0, True, True))],)
        world.kill(2)
        for version in range(3):
            world.signal(f"go {version}")
            assert world.told(1) == [(1, version + 1)]
        world.signal("pull 3")
        assert world.told(1) == [(3, (3, True, True))]


@pytest.mark.parametrize("killed", [1, 2])
def test_a_relay_killed_in_the_middle_of_a_push_is_named_by_all(killed: int) -> None:
    """Relays 1 and 2 in a chain, each with a reader on its node: both nodes serve the old version on, whole.

    Neither relay can have the new one: relay 2 gets every piece from relay 1, and relay 1 has a version only when it
    has passed all of it on.
    """
    ranks = [
        partial(trainer, group="g", relays=[1, 2], first=0, last=2),
        partial(relay, group="g", trainer_rank=0, relays=[1, 2], stall_at=1 if killed == 1 else -1),
        partial(relay, group="g", trainer_rank=0, relays=[1, 2], stall_at=1 if killed == 2 else -1),
        partial(reader, host=1, versions=[0]),
        partial(reader, host=2, versions=[0]),
    ]
    with World(ranks) as world:
        assert world.told(1) == [(0, 0)]
        world.signal("pull 0")
        assert sorted(world.told(2)) == [(3, (0, True, True)), (4, (0, True, True))]
        world.signal("go 0")
        world.await_signal("stalled")
        killed_at = time.monotonic()
        world.kill(killed)
        survivor = 3 - killed
        told = {}
        while survivor not in told or (0 not in told or isinstance(told[0], int)):
            told.update(world.told(1))
            if told.get(0) == 1:  # relay 1, which lives, has taken all: the next push tells
                world.signal("go 1")
        assert time.monotonic() - killed_at < NOTICED_S
        assert f"relay {killed}" in told[0] and f"relay {killed}" in told[survivor][0]
        assert told[survivor][1] == 0
        world.signal("end")
        assert sorted(world.told(2)) == [(3, (0, True)), (4, (0, True))]


def trainer_that_stops_in_the_middle(context: Context, relays: list[int], how: int) -> None:
    """Publishes version 7, then is struck by signal `how` in the middle of version 8."""
    from staleflow.parameters.broadcast import Broadcast

    put, count = Broadcast._put_payload, 0

    def struck(self, *payload: object) -> int:
        nonlocal count
        count += 1
        if count > PIECES + 3:
            context.signal("stalled")
            os.kill(os.getpid(), how)
        return put(self, *payload)

    Broadcast._put_payload = struck
    trainer(context, "g", relays, 7, 8)


def relay_with_two_lives(context: Context, trainers: list[int], relays: list[int]) -> None:
    """Loses the first trainer, then serves a second one, over another group, with the same store."""
    store = NodeStore.create(f"{context.token}-{context.rank}", MANIFEST)
    context.signal(f"store {context.rank}")
    run_relay(context, store, "g", trainers[0], relays)
    run_relay(context, store, "g again", trainers[1], relays)
    context.await_signal("end", 120)
    store.close()


def second_trainer(context: Context, relays: list[int]) -> None:
    context.await_signal("restart", 120)
    trainer(context, "g again", relays, 7, 8)


@pytest.mark.parametrize("how", [signal.SIGKILL, signal.SIGSTOP])
def test_a_trainer_struck_in_the_middle_of_a_push_and_started_again_from_its_checkpoint(how: int) -> None:
    """Killed: noticed at once. Silent: after the time limit. Version 7 is served on; the second trainer remakes it."""
    ranks = [
        partial(trainer_that_stops_in_the_middle, relays=[1], how=how),
        partial(relay_with_two_lives, trainers=[0, 3], relays=[1]),
        partial(reader, host=1, versions=[7, 8]),
        partial(second_trainer, relays=[1]),
    ]
    with World(ranks) as world:
        assert world.told(1) == [(0, 7)]
        world.signal("go 7")
        world.await_signal("stalled")
        struck_at = time.monotonic()
        rank, (message, newest) = world.told(1)[0]
        assert time.monotonic() - struck_at < NOTICED_S
        assert (rank, newest) == (1, 7)
        assert "lost: the trainer" in message
        world.signal("pull 7")
        assert world.told(1) == [(2, (7, True, True))]
        world.signal("restart")
        assert world.told(1) == [(3, 7)]
        assert world.told(1) == [(3, 8)]
        world.signal("pull 8")
        assert world.told(1) == [(2, (8, True, True))]
        world.signal("go 8")
        assert world.told(1) == [(1, ("ended", 8))]
