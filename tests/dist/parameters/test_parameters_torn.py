"""A writer that never pauses and readers that never wait: what a reader calls valid is never torn."""

from __future__ import annotations

import time
from functools import partial

import numpy as np
import pytest
import torch
from parameters_world import Context, World

from staleflow.parameters.checksum import word_sum
from staleflow.parameters.manifest import Manifest
from staleflow.parameters.pull import Puller, PullError
from staleflow.parameters.store import NodeStore

pytestmark = pytest.mark.dist
MANIFEST = Manifest.from_shapes([(f"t{i}", (64, 500)) for i in range(20)], "bfloat16")
SECONDS = 4.0


def writer(context: Context, pause_s: float) -> None:
    store = NodeStore.create(f"{context.token}-store", MANIFEST)
    context.signal("store")
    end = time.monotonic() + SECONDS
    version = 0
    while time.monotonic() < end:
        with store.writing(version) as slot:
            view = slot.view(0, MANIFEST.nbytes)
            view[:] = version % 251
            slot.checksum = word_sum(view)
        version += 1
        time.sleep(pause_s)
    context.signal("written")
    context.tell(version)


def reader(context: Context) -> None:
    context.await_signal("store")
    store = NodeStore.attach(f"{context.token}-store")
    engine = Image()
    puller = Puller(store, engine)
    whole = retries = 0
    last = -1
    while not context.store.check(["written"]):
        try:
            result = puller.pull(0, 2)
        except PullError as error:
            assert error.torn  # overtaken for two seconds on end: said, and not used
            continue
        assert (engine.data == result.version % 251).all(), f"version {result.version} is torn"
        assert result.version >= last
        last = result.version
        whole += 1
        retries += result.retries
    context.tell((whole, retries))


class Image:
    """An engine that keeps every byte it was given."""

    def load_weights(self, tensors) -> None:
        self.data = np.concatenate([tensor.view(torch.uint8).numpy().reshape(-1) for _, tensor in tensors])

    def reset_prefix_cache(self) -> bool:
        return True


@pytest.mark.parametrize("pause_s", [0.0, 0.003])
def test_what_is_valid_is_whole(pause_s: float) -> None:
    with World([partial(writer, pause_s=pause_s), reader, reader]) as world:
        told = world.finish()
    print(f"versions written {told[0][0]}, (whole, retries) of the readers {told[1][0]} {told[2][0]}")
    assert told[0][0] > 10
    assert pause_s == 0 or min(told[1][0][0], told[2][0][0]) > 0
