"""The parameter plane where weights lie on a GPU: out of it, through a store in pinned memory, and back into it."""

from __future__ import annotations

import os
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from datetime import timedelta

import pytest

torch = pytest.importorskip("torch")

import torch.distributed as dist  # noqa: E402

from staleflow.parameters.checksum import piece_sum, tensor_sum  # noqa: E402
from staleflow.parameters.layout import Piece, Range  # noqa: E402
from staleflow.parameters.manifest import Manifest  # noqa: E402
from staleflow.parameters.publish import Publisher  # noqa: E402
from staleflow.parameters.pull import Puller  # noqa: E402
from staleflow.parameters.relay import Relay  # noqa: E402
from staleflow.parameters.store import NodeStore  # noqa: E402

SHAPES = [("embed", (4000, 300)), ("bias", (5,)), ("head", (2000, 301))]
MANIFEST = Manifest.from_shapes(SHAPES, "bfloat16")
LIMIT = timedelta(seconds=60)


class DeviceEngine:
    """Stands for an engine on the device."""

    def __init__(self) -> None:
        self.weights = {name: torch.empty(shape, dtype=torch.bfloat16, device="cuda") for name, shape in SHAPES}

    def load_weights(self, tensors: Iterator[tuple[str, torch.Tensor]]) -> None:
        for name, tensor in tensors:
            self.weights[name].copy_(tensor, non_blocking=True)

    def reset_prefix_cache(self) -> bool:
        return True


def gloo(size: int) -> list[dist.ProcessGroup]:
    store = dist.HashStore()
    with ThreadPoolExecutor(size) as pool:
        return list(pool.map(lambda rank: dist.ProcessGroupGloo(store, rank, size, LIMIT), range(size)))


@pytest.mark.parametrize("use_delta", [False, True])
def test_versions_go_from_the_gpu_through_a_pinned_store_to_the_gpu(use_delta: bool) -> None:
    weights = {name: torch.randn(shape, device="cuda") for name, shape in SHAPES}
    first, second = gloo(2)
    store = NodeStore.create(f"sftest-gpu-{os.getpid()}-{use_delta}", MANIFEST)
    assert store.register_cuda(), "the driver refused to pin; see the warning"
    relay = Relay(second, MANIFEST, store)
    publisher = Publisher(weights.items(), MANIFEST, first, bucket_bytes=1 << 20, delta=use_delta)
    engine = DeviceEngine()
    for version in range(4):
        weights["head"][version] += 1.0
        wanted = {name: tensor.bfloat16() for name, tensor in weights.items()}
        publisher.snapshot(version)
        for tensor in weights.values():
            tensor.add_(0.0)  # training goes on
        assert Puller(store, engine).pull(version, 60).version == version
        assert all(torch.equal(engine.weights[name], tensor) for name, tensor in wanted.items())
    publisher.close()
    relay.close()
    store.close()


def test_a_piece_has_the_same_sum_on_the_device() -> None:
    data = torch.randint(0, 256, (1_000_003,), dtype=torch.uint8)
    piece = Piece((Range(0, 3, 500_001), Range(500_001, 800_000, 500_002)))
    assert tensor_sum(data.cuda(), piece) == piece_sum(data.numpy(), piece)
