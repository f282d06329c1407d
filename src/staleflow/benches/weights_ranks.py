"""The processes that `bench weights` starts: a trainer, a host with relay and store, readers.

    python -m staleflow.benches.weights_ranks ROLE JSON

All times are of CLOCK_MONOTONIC, which the processes of one machine share (network namespaces too).
"""

from __future__ import annotations

import json
import os
import queue
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass
from datetime import timedelta
from functools import cached_property, partial
from typing import Any

import numpy as np
import torch
import torch.distributed as dist

from staleflow.parameters.manifest import Manifest
from staleflow.parameters.publish import Publisher
from staleflow.parameters.pull import Puller
from staleflow.parameters.relay import Relay
from staleflow.parameters.store import NodeStore, as_tensor, image_part

TIMEOUT = timedelta(seconds=300)
TRAINER, HOST = 0, 1  # ranks; readers follow


@dataclass(frozen=True)
class Setup:
    """What all ranks of one measurement are told."""

    address: str
    port: int
    token: str
    shapes: list[tuple[str, list[int]]]
    readers: list[int]  # how many read at the same time, one measurement each
    shares: list[float]  # of changed values, one delta each
    repeats: int
    bucket_bytes: int
    limits: bool  # also measure the raw broadcast and the per-parameter one

    @cached_property
    def manifest(self) -> Manifest:
        return Manifest.from_shapes(self.shapes, "bfloat16")

    @property
    def ranks(self) -> int:
        return 2 + max(self.readers, default=0)


class Meeting:
    """Barriers and results, over the job's store."""

    def __init__(self, setup: Setup, rank: int) -> None:
        self.setup, self.rank = setup, rank
        self.store = dist.TCPStore(setup.address, setup.port, setup.ranks, rank == TRAINER, TIMEOUT)
        self._met: dict[str, int] = {}

    def group(self, name: str) -> Any:
        """Trainer and host, connected anew."""
        return dist.ProcessGroupGloo(dist.PrefixStore(name, self.store), self.rank, 2, TIMEOUT)

    def barrier(self, ranks: int = 2, name: str = "trainer and host") -> None:
        self._met[name] = self._met.get(name, 0) + 1
        key = f"{name} {self._met[name]}"
        if self.store.add(key, 1) == ranks:
            self.store.set(f"{key} open", "1")
        self.store.wait([f"{key} open"], TIMEOUT)


def trainer(setup: Setup) -> None:
    meeting = Meeting(setup, TRAINER)
    weights = random_weights(setup.manifest)
    results: dict[str, Any] = {"raw": [], "per_parameter": [], "copy": []}
    limits = Limits(meeting, [weights.flat.numpy()], results).turn if setup.limits else _nothing
    _publish(setup, meeting, weights, "full", [1.0] * setup.repeats, limits)
    _publish(setup, meeting, weights, "delta", [1.0, *(share for share in setup.shares for _ in range(setup.repeats))])
    meeting.store.wait([f"done {rank}" for rank in range(HOST, setup.ranks)], TIMEOUT)  # the store lives here
    print(json.dumps(results))


class Limits:
    """Both ends: the image in one broadcast, then one broadcast per parameter; from and into the memory of a push.

    The trainer also copies the image once more, as a snapshot does, without anything else going on. One turn before
    each push, so that a machine that becomes slower does so for both.
    """

    def __init__(self, meeting: Meeting, images: list[np.ndarray], results: dict[str, Any]) -> None:
        self._meeting, self._images, self._results = meeting, images, results
        self._group = meeting.group("raw")
        self._staging = torch.empty(meeting.setup.manifest.nbytes, dtype=torch.uint8)

    def turn(self, version: int) -> None:
        meeting, memory = self._meeting, self._images[version % len(self._images)]  # the slot of that version
        if meeting.rank == TRAINER:
            self._results["copy"].append(seconds(partial(self._staging.copy_, torch.from_numpy(memory))))
        meeting.barrier()
        self._results["raw"].append(seconds(partial(_broadcast_whole, self._group, memory)))
        meeting.barrier()
        each = partial(send_each, self._group, meeting.setup.manifest, memory)
        self._results["per_parameter"].append(seconds(each))


def _nothing(version: int) -> None:
    """No limits are measured."""


def _publish(
    setup: Setup,
    meeting: Meeting,
    weights: Weights,
    mode: str,
    shares: list[float],
    limits: Callable[[int], None] = _nothing,
) -> None:
    publisher = Publisher(
        weights.tensors.items(), setup.manifest, meeting.group(mode),
        bucket_bytes=setup.bucket_bytes, delta=mode == "delta", timeout_s=TIMEOUT.total_seconds(),
    )  # fmt: skip
    for version, share in enumerate(shares):
        if share < 1:
            weights.change(share, version)
        limits(version)
        meeting.barrier()
        begin, cpu, sent = time.monotonic(), time.process_time(), publisher.stats.sent_bytes
        publisher.snapshot(version)
        staged = time.monotonic()
        publisher.wait_free(TIMEOUT.total_seconds())
        told = {
            "begin": begin, "staged": staged, "bytes": publisher.stats.sent_bytes - sent, "share": share,
            "trainer_cpu_s": time.process_time() - cpu,
        }  # fmt: skip
        meeting.store.set(f"{mode} {version}", json.dumps(told))
    publisher.close()


class Weights:
    """A model's tensors as views of one buffer, in the layout of the image."""

    def __init__(self, manifest: Manifest, data: np.ndarray) -> None:
        self.flat = torch.from_numpy(data)
        self.tensors = {entry.name: image_part(self.flat, entry) for entry in manifest.entries}

    def change(self, share: float, seed: int) -> None:
        """Flip the lowest bit of a random `share` of all values: one in each stretch of 1 / share."""
        words = self.flat.numpy().view(np.uint16)
        stretch = 1 / share
        jitter = np.random.default_rng(seed).random(int(words.size * share), dtype=np.float32)
        words[((np.arange(jitter.size) + jitter) * stretch).astype(np.int64)] ^= 1


def random_weights(manifest: Manifest) -> Weights:
    rng = np.random.default_rng(0)
    return Weights(manifest, rng.integers(0, 2**64, manifest.nbytes // 8, dtype=np.uint64).view(np.uint8))


def host(setup: Setup) -> None:
    meeting = Meeting(setup, HOST)
    store = NodeStore.create(f"{setup.token}-store", setup.manifest)
    results: dict[str, Any] = {"raw": [], "per_parameter": [], "pushes": []}
    limits = Limits(meeting, store._images, results).turn if setup.limits else _nothing
    _store_versions(setup, meeting, store, "full", setup.repeats, results["pushes"], limits)
    _store_versions(setup, meeting, store, "delta", 1 + setup.repeats * len(setup.shares), results["pushes"])
    meeting.store.set("store", "1")
    for readers in setup.readers:
        meeting.store.wait([f"read {readers}"], TIMEOUT)
    store.close()
    print(json.dumps(results))
    meeting.store.set(f"done {HOST}", "1")


def _store_versions(
    setup: Setup,
    meeting: Meeting,
    store: NodeStore,
    mode: str,
    count: int,
    out: list[dict[str, Any]],
    limits: Callable[[int], None] = _nothing,
) -> None:
    stored: queue.Queue[float] = queue.Queue()
    relay = Relay(
        meeting.group(mode), setup.manifest, store,
        lambda version, took: stored.put(time.monotonic()), timeout_s=TIMEOUT.total_seconds(),
        on_error=lambda error: os._exit(1),
    )  # fmt: skip
    for version in range(count):
        limits(version)
        meeting.barrier()
        cpu = time.process_time()
        at = stored.get(timeout=TIMEOUT.total_seconds())
        cpu_s = time.process_time() - cpu
        told = json.loads(meeting.store.get(f"{mode} {version}"))
        times = {"push_s": at - told["staged"], "end_to_end_s": at - told["begin"]}
        out.append({"mode": mode, **times, "relay_cpu_s": cpu_s, **told})
    relay.ended.wait(TIMEOUT.total_seconds())
    relay.close()


def reader(setup: Setup, index: int) -> None:
    """Memory copies of the whole image (the limit) and pulls, with others reading at the same time."""
    torch.set_num_threads(1)
    meeting = Meeting(setup, HOST + 1 + index)
    meeting.store.wait(["store"], TIMEOUT)
    store = NodeStore.attach(f"{setup.token}-store")
    engine = Copier(setup.manifest)
    puller = Puller(store, engine)
    copy = partial(torch.from_numpy(engine.data).copy_, as_tensor(store.read().image()))
    copy()
    results = {}
    for count in setup.readers:
        if index >= count:
            continue
        copies, pulls = [], []
        for _ in range(setup.repeats):
            meeting.barrier(count, f"{count} readers")
            copies.append(when(copy))
            meeting.barrier(count, f"{count} readers")
            pulls.append(when(puller.pull))
        meeting.barrier(count, f"{count} readers")
        results[count] = {"copy": copies, "pull": pulls}
        if index == 0:
            meeting.store.set(f"read {count}", "1")
    print(json.dumps(results))
    meeting.store.set(f"done {meeting.rank}", "1")


class Copier:
    """An engine that only copies: parameters of its own, filled tensor by tensor."""

    def __init__(self, manifest: Manifest) -> None:
        self.data = np.zeros(manifest.nbytes, np.uint8)
        self._own = Weights(manifest, self.data).tensors

    def load_weights(self, tensors: Any) -> None:
        for name, tensor in tensors:
            self._own[name].copy_(tensor)

    def reset_prefix_cache(self) -> bool:
        return True


def seconds(action: Callable[[], object]) -> tuple[float, float]:
    """Wall time, and CPU time of all threads of this process: the latter says something on a busy machine too."""
    begin, cpu = time.perf_counter(), time.process_time()
    action()
    return time.perf_counter() - begin, time.process_time() - cpu


def when(action: Callable[[], object]) -> tuple[float, float, float]:
    """Begin and end, by the clock that all processes share, and CPU seconds of this one."""
    begin, cpu = time.monotonic(), time.process_time()
    action()
    return begin, time.monotonic(), time.process_time() - cpu


def _broadcast_whole(group: Any, memory: np.ndarray) -> None:
    group.broadcast(torch.from_numpy(memory), 0).wait()


def send_each(group: Any, manifest: Manifest, memory: np.ndarray) -> None:
    """What peers do: one broadcast per parameter."""
    for entry in manifest.entries:
        data = torch.from_numpy(memory[entry.offset_bytes : entry.offset_bytes + entry.nbytes])
        group.broadcast(data, 0).wait()


def main() -> None:
    role, text = sys.argv[1], sys.argv[2]
    setup = Setup(**json.loads(text))
    torch.set_num_threads(1)
    if role.startswith("reader"):
        reader(setup, int(role.removeprefix("reader")))
    else:
        {"trainer": trainer, "host": host}[role](setup)
    sys.stdout.flush()
    os._exit(0)  # Gloo's threads need not be waited for


if __name__ == "__main__":
    main()
