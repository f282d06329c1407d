"""Publishers, relays and pullers in one process: threads over Gloo, so that hundreds of versions take seconds."""

from __future__ import annotations

import os
import queue
import threading
import uuid
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor, wait
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import timedelta

import numpy as np
import pytest
import torch
import torch.distributed as dist
from hypothesis import given
from hypothesis import strategies as st

from staleflow.parameters import delta, landing
from staleflow.parameters.checksum import piece_sum, tensor_sum
from staleflow.parameters.direct import Direct, DirectSource
from staleflow.parameters.file import File, FileSource, FileWatch
from staleflow.parameters.landing import CorruptPieceError
from staleflow.parameters.lane import DeviceMessage, LaneOffer
from staleflow.parameters.layout import Piece, Range, pieces_of
from staleflow.parameters.manifest import Manifest
from staleflow.parameters.publish import Publisher, PublishError
from staleflow.parameters.pull import Puller, PullError
from staleflow.parameters.relay import Relay
from staleflow.parameters.rounds import Chain, decide, end_row, relay_row, trainer_row
from staleflow.parameters.staging import Staging
from staleflow.parameters.store import NodeStore

SHAPES = [("embed", (40, 300)), ("bias", (5,)), ("scale", ()), ("head", (2000, 301))]
MANIFEST = Manifest.from_shapes(SHAPES, "bfloat16")
BUCKET = 1 << 18
NAMES = ("trainer", "relay 1", "relay 2")
CUDA = torch.device("cuda")  # by name only


def groups(size: int) -> list[dist.ProcessGroup]:
    store = dist.HashStore()
    with ThreadPoolExecutor(size) as pool:
        made = [pool.submit(dist.ProcessGroupGloo, store, r, size, timedelta(seconds=20)) for r in range(size)]
        return [one.result() for one in made]


def model(dtype: str = "bfloat16") -> dict[str, torch.Tensor]:
    generator = torch.Generator().manual_seed(0)
    return {name: torch.randn(shape, generator=generator).to(getattr(torch, dtype)) for name, shape in SHAPES}


class Lanes:
    """Offers of a lane: Gloo and host memory stand for NCCL and GPUs. `opened` says who took part in one."""

    def __init__(self, size: int) -> None:
        self.opened: set[int] = set()
        self._groups = groups(size)

    def offer(self, rank: int, device_id: int | None = None) -> LaneOffer:
        def group() -> dist.ProcessGroup:
            self.opened.add(rank)
            return self._groups[rank]

        return LaneOffer(torch.device("cpu"), rank + 1 if device_id is None else device_id, group)


class Net:
    """One trainer and some relays with their stores; `offers` by group rank."""

    def __init__(
        self,
        relays: int = 1,
        manifest: Manifest = MANIFEST,
        use_delta: bool = False,
        offers: Sequence[LaneOffer | None] = (None,) * 3,
    ) -> None:
        self.weights = model(manifest.entries[0].dtype)
        self.stored: list[int] = []
        names = NAMES[: relays + 1]
        token = f"sftest-{os.getpid()}-{uuid.uuid4().hex[:8]}"
        self.stores = [NodeStore.create(f"{token}-{i}", manifest) for i in range(relays)]
        first, *others = groups(relays + 1)
        self.relays = [
            Relay(group, manifest, store, lambda version, _: self.stored.append(version), names=names, offer=offer)
            for group, store, offer in zip(others, self.stores, offers[1:], strict=False)
        ]
        self.publisher = Publisher(
            self.weights.items(), manifest, first, bucket_bytes=BUCKET, delta=use_delta, names=names, offer=offers[0]
        )

    def publish(self, version: int) -> None:
        self.publisher.snapshot(version)
        self.publisher.wait_free(20)
        for store in self.stores:  # the trainer is done when all is sent; the last relay a moment later
            Puller(store, Collector()).pull(version, 20)

    def close(self) -> None:
        self.publisher.close()
        for relay, store in zip(self.relays, self.stores, strict=True):
            relay.close()
            store.close()


@contextmanager
def net(*args, **kwargs) -> Iterator[Net]:
    made = Net(*args, **kwargs)
    try:
        yield made
    finally:
        made.close()


class Collector:
    """Stands for an engine."""

    def __init__(self) -> None:
        self.weights: dict[str, torch.Tensor] = {}
        self.resets = True

    def load_weights(self, tensors: Iterator[tuple[str, torch.Tensor]]) -> None:
        self.weights = {name: tensor.clone() for name, tensor in tensors}

    def reset_prefix_cache(self) -> bool:
        return self.resets


def same(found: dict[str, torch.Tensor], wanted: dict[str, torch.Tensor]) -> bool:
    """Bit for bit: NaN payloads and -0 too."""
    pairs = [(found[name], tensor) for name, tensor in wanted.items()]
    as_bytes = [(a.reshape(-1).view(torch.uint8), b.reshape(-1).view(torch.uint8)) for a, b in pairs]
    return len(found) == len(wanted) and all(torch.equal(a, b) for a, b in as_bytes)


def change(weights: dict[str, torch.Tensor], share: float, seed: int) -> None:
    """New bits, any bits, at a random `share` of all places."""
    rng = np.random.default_rng(seed)
    for tensor in weights.values():
        words = tensor.view(-1).view(torch.int16).numpy()
        places = rng.random(words.size) < share
        words[places] = rng.integers(-(2**15), 2**15, int(places.sum()))


def test_a_version_arrives_whole_in_every_store() -> None:
    with net(relays=2) as n:
        for version in (3, 4, 9):
            change(n.weights, 0.5, version)
            n.publish(version)
            for store in n.stores:
                engine = Collector()
                assert Puller(store, engine).pull().version == version
                assert same(engine.weights, n.weights)
                assert store.read().checksum_ok()
    assert sorted(n.stored) == [3, 3, 4, 4, 9, 9]


def test_float32_travels_unrounded() -> None:
    with net(manifest=Manifest.from_shapes(SHAPES, "float32"), use_delta=True) as n:
        for version in range(3):
            change(n.weights, 0.01, version)
            n.publish(version)
            engine = Collector()
            Puller(n.stores[0], engine).pull(version)
            assert same(engine.weights, n.weights)


def test_deltas_equal_full_pushes_bit_for_bit_over_hundreds_of_versions() -> None:
    shares = [0.0, 0.0001, 0.01, 0.9, 0.05, 0.2]
    with net(relays=2, use_delta=True) as n:
        for version in range(300):
            change(n.weights, shares[version % len(shares)], version)
            n.publish(version)
            if version % 10 == 9 or version < 10:
                for store in n.stores:
                    engine = Collector()
                    Puller(store, engine).pull(version)
                    assert same(engine.weights, n.weights), version
                    assert store.read().checksum_ok()
        stats = n.publisher.stats
    assert stats.versions == 300
    assert stats.sent_bytes < 0.6 * stats.full_bytes


def test_a_sparse_delta_is_small_and_a_dense_one_is_sent_whole() -> None:
    with net(use_delta=True) as n:
        sizes = []
        for version, share in enumerate((0.0, 0.01, 0.6)):
            change(n.weights, share, version)
            before = n.publisher.stats.sent_bytes
            n.publish(version)
            sizes.append(n.publisher.stats.sent_bytes - before)
    full = sizes[0]
    assert sizes[1] < full / 15
    assert sizes[2] == full


def test_a_relay_without_the_base_gets_the_full_version() -> None:
    """A relay that starts anew on an empty store, in a rebuilt group, while the trainer lives on."""
    with net(use_delta=True) as n:
        for version in range(3):
            change(n.weights, 0.001, version)
            n.publish(version)
        n.relays[0].close()
        change(n.weights, 0.001, 3)
        n.publisher.snapshot(3)
        with pytest.raises(PublishError, match="relay 1"):
            n.publisher.wait_free(20)
        n.stores[0].forget(0)
        first, second = groups(2)
        n.relays[0] = Relay(second, MANIFEST, n.stores[0], names=NAMES[:2])
        before = n.publisher.stats.sent_bytes
        n.publisher.regroup(first, names=NAMES[:2])
        n.publisher.wait_free(20)  # version 3, which was lost, is published again
        assert n.publisher.stats.sent_bytes - before == n.publisher.stats.full_bytes / 4
        n.publish(4)
        engine = Collector()
        Puller(n.stores[0], engine).pull(4)
        assert same(engine.weights, n.weights)


def test_the_snapshot_is_what_counts_not_what_the_optimizer_does_after() -> None:
    with net() as n:
        wanted = {name: tensor.clone() for name, tensor in n.weights.items()}
        n.publisher.snapshot(0)
        for tensor in n.weights.values():
            tensor.fill_(7)
        engine = Collector()
        Puller(n.stores[0], engine).pull(0, 20)
        assert same(engine.weights, wanted)


def test_a_piece_is_read_only_when_it_has_been_snapshot() -> None:
    """The publisher's thread reads while the main thread still copies."""
    staging = Staging(model().items(), MANIFEST, 0)
    first, *_, last = pieces_of(staging.shard, BUCKET)
    staging.begin()
    for tensor, _, _ in staging._pairs:
        tensor.fill_(3)
    with ThreadPoolExecutor(2) as pool:
        reads = [pool.submit(staging.read, piece) for piece in (last, first)]
        assert wait(reads, timeout=0.1).done == set()
        staging.snapshot()
        words = [read.result(20).view(np.uint16) for read in reads]
    three = torch.tensor(3, dtype=torch.bfloat16).view(torch.int16).item()
    assert words[0][-1] == three and words[1][0] == three


def test_a_snapshot_that_fails_half_way_is_never_served() -> None:
    with net() as n:
        n.publish(0)
        n.weights["head"].resize_(7, 7)  # the optimizer's tensor has lost its shape: the last copy raises
        with pytest.raises(RuntimeError, match="size"):
            n.publisher.snapshot(1)
        with pytest.raises(PublishError, match="snapshot failed half-way"):
            n.publisher.wait_free(20)
        assert n.relays[0].ended.wait(20)
        assert n.stores[0].newest() == 0


def test_a_late_reader_gets_the_current_version_by_the_same_path() -> None:
    with net() as n:
        for version in range(3):
            n.publish(version)
        engine = Collector()
        assert Puller(NodeStore.attach(n.stores[0].name), engine).pull().version == 2
        assert same(engine.weights, n.weights)


def test_a_restarted_trainer_replaces_versions_beyond_its_checkpoint() -> None:
    with net() as n:
        for version in range(6):
            n.publish(version)
        n.publisher.close()
        assert n.relays[0].ended.wait(10)
        n.relays[0].close()
        first, second = groups(2)
        relay = Relay(second, MANIFEST, n.stores[0], names=NAMES[:2])
        change(n.weights, 0.5, 99)
        restarted = Publisher(n.weights.items(), MANIFEST, first, bucket_bytes=BUCKET, names=NAMES[:2])
        restarted.snapshot(4)
        restarted.wait_free(20)
        engine = Collector()
        restarted.close()
        assert relay.ended.wait(10)
        assert n.stores[0].newest() == 4
        Puller(n.stores[0], engine).pull(4)
        assert same(engine.weights, n.weights)


def test_a_pull_that_is_overtaken_starts_again_on_the_newest() -> None:
    with net() as n:
        n.publish(0)

        class Slow(Collector):
            """Two further versions arrive during the first copy."""

            def load_weights(self, tensors):
                if n.stores[0].newest() == 0:
                    for version in (1, 2):
                        change(n.weights, 0.5, version)
                        n.publish(version)
                super().load_weights(tensors)

        engine = Slow()
        result = Puller(n.stores[0], engine).pull()
        assert (result.version, result.retries) == (2, 1)
        assert same(engine.weights, n.weights)


def test_tp_ranks_agree_although_only_one_was_overtaken() -> None:
    with net() as n:
        n.publish(0)
        meet = threading.Barrier(2)
        said: dict[int, int] = {}

        def minimum_for(rank: int):
            def agree(value: int) -> int:
                said[rank] = value
                meet.wait(20)
                least = min(said.values())
                meet.wait(20)
                return least

            return agree

        class Overtaken(Collector):
            def load_weights(self, tensors):
                super().load_weights(tensors)
                if n.stores[0].newest() == 0:
                    for version in (1, 2):
                        n.publish(version)

        engines = [Collector(), Overtaken()]
        with ThreadPoolExecutor(2) as pool:
            pulls = [
                pool.submit(Puller(n.stores[0], engine, minimum_for(rank)).pull, 0, 20)
                for rank, engine in enumerate(engines)
            ]
            results = [pull.result() for pull in pulls]
        assert [result.version for result in results] == [2, 2]
        assert all(same(engine.weights, n.weights) for engine in engines)


def test_pull_refuses_what_would_be_wrong() -> None:
    with net() as n:
        with pytest.raises(PullError, match="no version >= 5") as caught:
            Puller(n.stores[0], Collector()).pull(5, 0.1)
        assert not caught.value.torn
        n.publish(0)
        engine = Collector()
        engine.resets = False
        with pytest.raises(PullError, match="prefix cache") as caught:
            Puller(n.stores[0], engine).pull(0, 5)
        assert caught.value.torn


def test_a_damaged_piece_stops_the_relay_and_is_never_served(monkeypatch: pytest.MonkeyPatch) -> None:
    with net() as n:
        n.publish(0)
        monkeypatch.setattr(landing, "piece_sum", lambda data, piece: 1)
        n.publisher.snapshot(1)
        assert n.relays[0].ended.wait(20)
        assert isinstance(n.relays[0].failure, CorruptPieceError)
        assert "trainer" in str(n.relays[0].failure)
        assert n.stores[0].newest() == 0
        with pytest.raises(PublishError, match="relay 1"):  # noticed at the latest by the next version
            n.publisher.wait_free(20)
            n.publisher.snapshot(2)
            n.publisher.wait_free(20)


def test_a_relay_that_stops_first_is_noticed_at_once_and_by_name() -> None:
    with net() as n:
        n.publish(0)
        n.relays[0].close()
        n.publisher.snapshot(1)
        with pytest.raises(PublishError, match="lost: relay 1"):
            n.publisher.wait_free(10)


def test_another_model_on_the_other_side_is_refused() -> None:
    other = Manifest.from_shapes([("embed", (1, 1))], "bfloat16")
    store = NodeStore.create(f"sftest-{os.getpid()}-{uuid.uuid4().hex[:8]}", other)
    first, second = groups(2)
    relay = Relay(second, other, store, names=NAMES[:2])
    publisher = Publisher(model().items(), MANIFEST, first, names=NAMES[:2])
    publisher.snapshot(0)
    with pytest.raises(PublishError, match="another model"):
        publisher.wait_free(20)
    assert relay.ended.wait(20)
    assert "another model" in str(relay.failure)
    publisher.close()
    relay.close()
    store.close()


def test_parameters_that_the_manifest_does_not_know_are_named() -> None:
    weights = model()
    weights["rotary"] = weights.pop("bias")
    with pytest.raises(ValueError, match=r"missing \['bias'\], unknown \['rotary'\]"):
        Publisher(weights.items(), MANIFEST, groups(1)[0], transport=File("unused", MANIFEST, 0, 1))


def test_file_transport(tmp_path) -> None:
    """Two trainer ranks' rows (here of one process) and a reader; old versions go, void ones are withdrawn."""
    weights = model()
    publishers = [
        Publisher(weights.items(), MANIFEST, None, transport=File(tmp_path, MANIFEST, t, 2), trainer=t) for t in (0, 1)
    ]
    source = FileSource(tmp_path, MANIFEST)
    assert source.newest() is None
    told: queue.Queue[int] = queue.Queue()
    watch = FileWatch(source, lambda version, seconds: told.put(version), lambda error: told.put(-1))
    for version in range(4):
        change(weights, 0.1, version)
        for publisher in publishers:
            publisher.snapshot(version)
            publisher.wait_free(20)
        assert told.get(timeout=20) == version
    watch.close()
    engine = Collector()
    assert Puller(source, engine).pull(3).version == 3
    assert same(engine.weights, weights)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["version_000002", "version_000003"]
    for publisher in publishers:
        publisher.close()


@pytest.mark.parametrize("on_lane", [False, True])
def test_direct_transport(on_lane: bool) -> None:
    weights = model()
    first, second, third = groups(3)
    lanes = Lanes(3)
    offers = [lanes.offer(rank) if on_lane else None for rank in range(3)]
    transport = Direct(first, MANIFEST, [0], BUCKET, offer=offers[0])
    publisher = Publisher(weights.items(), MANIFEST, None, transport=transport)
    sources = [
        DirectSource(second, MANIFEST, [0], offer=offers[1]),
        DirectSource(third, MANIFEST, [0], offer=offers[2]),
    ]
    engines = [Collector(), Collector()]
    pullers = [Puller(source, engine) for source, engine in zip(sources, engines, strict=True)]
    with ThreadPoolExecutor(2) as pool:
        for version in range(3):
            change(weights, 0.3, version)
            publisher.snapshot(version)
            pulls = [pool.submit(puller.pull, version, 20) for puller in pullers]
            assert [pull.result().version for pull in pulls] == [version, version]
            assert all(same(engine.weights, weights) for engine in engines)
    for source in sources:
        source.close()
    publisher.close()
    assert lanes.opened == ({0, 1, 2} if on_lane else set())


def test_direct_ends_although_nobody_takes_the_last_version() -> None:
    weights = model()
    first, second = groups(2)
    publisher = Publisher(weights.items(), MANIFEST, None, transport=Direct(first, MANIFEST, [0], BUCKET))
    source = DirectSource(second, MANIFEST, [0])
    publisher.snapshot(0)
    Puller(source, Collector()).pull(0, 20)
    publisher.wait_free(20)
    publisher.snapshot(1)
    publisher.close(deliver=False)
    assert publisher.failure is None and not publisher._thread.is_alive()
    source.close()


@pytest.mark.parametrize("use_delta", [False, True])
def test_whole_pieces_take_the_lane_where_everybody_offers_one(use_delta: bool) -> None:
    lanes = Lanes(3)
    with net(relays=2, use_delta=use_delta, offers=[lanes.offer(rank) for rank in range(3)]) as n:
        for version, share in enumerate((0.5, 0.01, 0.9, 0.01)):
            change(n.weights, share, version)
            n.publish(version)
            for store in n.stores:
                engine = Collector()
                assert Puller(store, engine).pull().version == version
                assert same(engine.weights, n.weights), version
                assert store.read().checksum_ok()
    assert lanes.opened == {0, 1, 2}


@pytest.mark.parametrize("ids", [(1, 0, 3), (1, 1, 3)], ids=["one without a GPU", "two on one GPU"])
def test_without_a_gpu_for_each_member_nobody_takes_the_lane(ids: tuple[int, ...]) -> None:
    lanes = Lanes(3)
    with net(relays=2, offers=[lanes.offer(rank, device_id) for rank, device_id in enumerate(ids)]) as n:
        n.publish(0)
        engine = Collector()
        Puller(n.stores[1], engine).pull(0)
        assert same(engine.weights, n.weights)
    assert lanes.opened == set()


def test_a_relay_that_stops_in_the_lane_is_noticed_and_the_group_rebuilt_with_another_lane() -> None:
    lanes, others = Lanes(2), Lanes(2)
    with net(offers=[lanes.offer(0), lanes.offer(1)]) as n:
        n.publish(0)
        n.relays[0].abandon()
        n.publisher.snapshot(1)
        with pytest.raises(PublishError, match="lost: relay 1"):
            n.publisher.wait_free(10)
        first, second = groups(2)
        n.relays[0] = Relay(second, MANIFEST, n.stores[0], names=NAMES[:2], offer=others.offer(1))
        n.publisher.regroup(first, names=NAMES[:2], offer=others.offer(0))
        engine = Collector()
        assert Puller(n.stores[0], engine).pull(1, 20).version == 1
        assert same(engine.weights, n.weights)
    assert others.opened == {0, 1}


def test_a_relay_without_its_gpu_in_the_end_leaves_nobody_waiting_in_the_lane() -> None:
    """As when there is no memory left for a context there: the trainer must not wait where nothing can end it."""
    lanes = Lanes(2)
    theirs = lanes.offer(1)

    def fails() -> None:
        raise RuntimeError("out of memory")

    with net(offers=[lanes.offer(0), LaneOffer(theirs.device, theirs.device_id, fails)]) as n:
        n.publisher.snapshot(0)
        with pytest.raises(PublishError, match=r"receiving 1 bytes from relay 1: .*lost: relay 1"):
            n.publisher.wait_free(20)
        assert "out of memory" in str(n.relays[0].failure)


def test_a_publisher_that_does_not_let_go_of_its_group_does_not_hold_up_regroup() -> None:
    leave = threading.Event()
    with net() as n:
        n.publish(0)
        n.publisher._on_done = lambda sent: leave.wait(20)  # stands for a wait that nothing ends
        n.publisher.snapshot(1)
        n.publisher.wait_free(20)
        with pytest.raises(PublishError, match="has not let go"):
            n.publisher.regroup(groups(1)[0], timeout_s=0.1)
        leave.set()


@dataclass
class OnGpu:
    """What `DeviceMessage` asks of NCCL's work and of the tensor."""

    completes: bool
    device: torch.device = CUDA

    def is_completed(self) -> bool:
        return self.completes

    def wait(self) -> None:
        assert self.completes, "would block"


def test_a_message_on_the_lane_ends_with_its_completion_the_time_limit_or_the_group() -> None:
    broken = threading.Event()

    def finish(completes: bool, limit_s: float) -> None:
        work = OnGpu(completes)
        DeviceMessage(work, "sending", "relay 1", work, broken.is_set).finish(timedelta(seconds=limit_s))

    finish(True, 0.0)
    with pytest.raises(RuntimeError, match="not through after"):
        finish(False, 0.01)
    broken.set()
    with pytest.raises(RuntimeError, match="broken off"):
        finish(False, 60.0)


@given(
    ranges=st.lists(st.tuples(st.integers(0, 40), st.integers(0, 40)), min_size=1, max_size=4), begin=st.integers(0, 9)
)
def test_a_piece_has_the_same_sum_as_a_tensor(ranges: list[tuple[int, int]], begin: int) -> None:
    data = np.random.default_rng(0).integers(0, 256, 200, dtype=np.uint8)
    staged = begin
    parts = []
    for image, nbytes in ranges:
        parts.append(Range(staged, image, nbytes))
        staged += nbytes
    piece = Piece(tuple(parts))
    content = torch.from_numpy(data)[begin:staged]
    assert tensor_sum(content, piece) == piece_sum(content.numpy(), piece)


def test_a_delta_that_does_not_pay_is_none() -> None:
    old = torch.arange(0, 200, dtype=torch.uint8)
    new = old.clone()
    assert delta.encode(new, old).nbytes == 0
    new[:32] += 1
    payload = delta.encode(new, old)
    assert payload.nbytes == 16 * delta.CHANGE_BYTES
    target = old.numpy().copy()
    delta.apply(target, payload)
    assert np.array_equal(target, new.numpy())
    new[:100] += 1
    assert delta.encode(new, old) is None


def test_decisions() -> None:
    chain = Chain.of(4, [1, 2])
    assert chain.relays == (0, 3)
    assert (chain.before(0, 1), chain.after(0), chain.before(3, 1), chain.after(3)) == (2, 3, 0, None)
    names = ["a", "b", "c", "d"]

    def rows(*said: list[int]) -> list[list[int]]:
        return [row + [0] * (8 - len(row)) for row in said]

    push = trainer_row(5, 4, False)
    assert decide(rows(relay_row(4), push, push, relay_row(4)), chain, names).base == 4
    assert decide(rows(relay_row(4), push, push, relay_row(3)), chain, names).base is None
    assert decide(rows(relay_row(None), push, push, relay_row(4)), chain, names).base is None
    assert decide(rows(relay_row(4), end_row(), end_row(), relay_row(4)), chain, names) is None
    with pytest.raises(ValueError, match="b: PUSH 5, c: PUSH 6"):
        decide(rows(relay_row(4), push, trainer_row(6, 4, False), relay_row(4)), chain, names)
    with pytest.raises(ValueError, match="needs a trainer and a relay"):
        Chain.of(2, [0, 1])
