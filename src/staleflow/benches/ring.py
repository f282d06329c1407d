"""`staleflow bench ring`: records per second from one process to another, beside what else one could use for it.

Everything is measured in this run, one measurement after the other, each with a sender (this process) and a receiver
(a spawned one), the best of several. A receiver looks at the first and the last byte of every record; where it gets a
view, it copies nothing, since that is what the ring is for. `limit` is one thread's memcpy of the same bytes into
shared memory of the ring's size. A peer that is not installed is left out.
"""

from __future__ import annotations

import ctypes
import itertools
import multiprocessing
import os
import queue
import statistics
import time
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from importlib.util import find_spec
from multiprocessing.connection import Connection
from typing import Any

REPEATS = 3
SIZES = {64: 2_000_000, 16 << 10: 100_000, 1 << 20: 3_000}  # record bytes: records for the ring
CAPACITY = 8 << 20  # stays in the cache, as what the peers reuse does
LARGE_CAPACITY = 64 << 20
NATIVE_SHARE = 5.0
PEER_SHARE = {"iceoryx2": 0.05, "zmq_ipc": 0.1, "multiprocessing_queue": 0.02, "vllm_message_queue": 0.02}
READY_S = 120.0
SPIN_S = 1e-3  # iceoryx2's and vLLM's receivers never sleep while they are sent to; nor does ours
RUN_ID = 1

_count = itertools.count()


@dataclass(frozen=True)
class Lane:
    """A way for records: `open(nbytes)` in the sender gives (address, send); `connect(address)` in the other process
    gives `receive`. Both take how many."""

    open: Callable[[int], tuple[Any, Callable[[int], None]]]
    connect: Callable[[Any], Callable[[int], None]]


def run(args: list[str]) -> dict[str, Any]:
    """`--quick` sends a tenth of the records; `--no-vllm` leaves out the peer that takes long to import."""
    scale = 0.1 if "--quick" in args else 1.0
    lanes = {name: lane for name, lane in PEERS.items() if _installed(name, args)}
    rates = {name: _rates(lane, scale * PEER_SHARE[name]) for name, lane in lanes.items()}
    return {
        "bench": "ring",
        "unit": "records/s",
        "ours": _rates(RING, scale),
        "limit": {str(nbytes): _memcpy_rate(nbytes) for nbytes in SIZES},
        "peers": rates,
        "ours_without_python": _rates(NATIVE_RING, scale * NATIVE_SHARE),
        "delay_us": {"spinning": _delays(1.0, scale), "sleeping": _delays(0.0, scale)},
        "capacity_bytes": CAPACITY,
        "large_ring": {"capacity_bytes": LARGE_CAPACITY, **_in_a_large_ring(scale)},
        "cpus": len(os.sched_getaffinity(0)),
        "load_1m": os.getloadavg()[0],
    }


def _installed(name: str, args: list[str]) -> bool:
    modules = {"iceoryx2": "iceoryx2", "zmq_ipc": "zmq", "vllm_message_queue": "vllm"}
    if name == "vllm_message_queue" and "--no-vllm" in args:
        return False
    return name not in modules or find_spec(modules[name]) is not None


def _rates(lane: Lane, scale: float) -> dict[str, float]:
    """Records per second by record size, from the first send until the receiver has seen the last; best of several."""
    counts = {nbytes: max(20, int(count * scale)) for nbytes, count in SIZES.items()}
    opened = {nbytes: lane.open(nbytes) for nbytes in SIZES}
    child = _Child(_receiver, lane.connect, [(opened[nbytes][0], counts[nbytes]) for nbytes in SIZES])
    rates = {str(n): max(_one_rate(child, opened[n][1], counts[n]) for _ in range(REPEATS)) for n in SIZES}
    child.join()
    return rates


def _one_rate(child: _Child, send: Callable[[int], None], count: int) -> float:
    child.answer()
    start = time.perf_counter()
    send(count)
    child.answer()
    return count / (time.perf_counter() - start)


def _receiver(pipe: Connection, connect: Callable[[Any], Callable[[int], None]], jobs: list[tuple[Any, int]]) -> None:
    for address, count in jobs:
        receive = connect(address)
        for _ in range(REPEATS):
            pipe.send("ready")
            receive(count)
            pipe.send("done")


class _Child:
    """A spawned process that sends answers through a pipe."""

    def __init__(self, target: Callable[..., None], *args: Any) -> None:
        context = multiprocessing.get_context("spawn")
        self._pipe, theirs = context.Pipe()
        self._process = context.Process(target=target, args=(theirs, *args), daemon=True)
        self._process.start()
        theirs.close()  # so that its death is the end of the pipe

    def answer(self) -> Any:
        """The next answer; EOFError when the process ended without one."""
        if not self._pipe.poll(READY_S):
            raise TimeoutError(f"the receiver (pid {self._process.pid}) did not answer within {READY_S} s")
        return self._pipe.recv()

    def join(self) -> None:
        self._process.join()


def _look(payload: Any) -> None:
    _ = payload[0], payload[-1]


# ---------------------------------------------------------------- ours


def _open_ring(capacity: int) -> tuple[str, Any]:
    from staleflow.trajectories.ring import Ring, segment_name

    name = segment_name("bench", RUN_ID, f"{os.getpid()}.{next(_count)}")
    ring = Ring.create(name, capacity, run_id=RUN_ID)
    ring.spin_s = SPIN_S
    return name, ring


def _attach_ring(name: str) -> Any:
    from staleflow.trajectories.ring import Ring

    ring = Ring.attach(name, run_id=RUN_ID)
    ring.claim_consumer()
    ring.unlink()
    ring.spin_s = SPIN_S
    return ring


def _ring_sender(nbytes: int) -> tuple[str, Callable[[int], None]]:
    name, ring = _open_ring(CAPACITY)
    payload = os.urandom(nbytes)
    batch = [(1, payload)] * (256 if nbytes < 4096 else 1)

    def send(count: int) -> None:
        while count > 0:
            sent = ring.push_batch(batch[:count])
            count -= sent
            if not sent:
                ring.wait_writable(nbytes, READY_S)

    return name, send


def _ring_receiver(name: str) -> Callable[[int], None]:
    ring = _attach_ring(name)

    def receive(count: int) -> None:
        while count > 0:
            ring.wait(READY_S)
            records = ring.peek(256)
            for record in records:
                _look(record.payload)
            ring.release(records[-1].sequence)
            count -= len(records)

    return receive


def _native_sender(nbytes: int, capacity: int = CAPACITY) -> tuple[str, Callable[[int], None]]:
    from staleflow import _ring

    name, ring = _open_ring(capacity)
    return name, lambda count: _ring.produce(ring, count, nbytes)


def _native_receiver(name: str) -> Callable[[int], None]:
    from staleflow import _ring

    ring = _attach_ring(name)
    return lambda count: _ring.consume(ring, count)


RING = Lane(_ring_sender, _ring_receiver)
NATIVE_RING = Lane(_native_sender, _native_receiver)
LARGE_NATIVE_RING = Lane(partial(_native_sender, capacity=LARGE_CAPACITY), _native_receiver)


def _in_a_large_ring(scale: float) -> dict[str, Any]:
    limit = {str(nbytes): _memcpy_rate(nbytes, LARGE_CAPACITY) for nbytes in SIZES}
    return {"ours_without_python": _rates(LARGE_NATIVE_RING, scale * NATIVE_SHARE), "limit": limit}


def _memcpy_rate(nbytes: int, capacity: int = CAPACITY) -> float:
    """Copies per second, all over the shared memory of a ring; small ones many at once, since the call would count."""
    _, ring = _open_ring(capacity)
    ring.unlink()
    piece = nbytes if nbytes >= 4096 else capacity // 4
    source = ctypes.create_string_buffer(os.urandom(piece), piece)
    address = ctypes.addressof(ctypes.c_char.from_buffer(ring.data))
    places, rates = [address + at for at in range(0, capacity, piece)], []
    for _ in range(4 * REPEATS):
        start = time.perf_counter()
        for place in places:
            ctypes.memmove(place, source, piece)
        rates.append(capacity / nbytes / (time.perf_counter() - start))
    return max(rates)


def _delays(spin_s: float, scale: float) -> dict[str, float]:
    """Microseconds from just before commit until the other process has the record; one every 0.2 ms."""
    name, ring = _open_ring(CAPACITY)
    count = int(5000 * scale)
    child = _Child(_delay_receiver, name, spin_s, count)
    child.answer()
    from staleflow import _ring

    _ring.produce_stamped(ring, count, 200_000)
    delays = sorted(ns / 1000 for ns in child.answer())
    child.join()
    return {"p50": statistics.median(delays), "p99": delays[int(0.99 * count)], "max": delays[-1]}


def _delay_receiver(pipe: Connection, name: str, spin_s: float, count: int) -> None:
    from staleflow import _ring

    ring = _attach_ring(name)
    ring.spin_s = spin_s
    pipe.send("ready")
    pipe.send(_ring.consume_stamped(ring, count))


# ---------------------------------------------------------------- peers


def _queue_sender(nbytes: int) -> tuple[Any, Callable[[int], None]]:
    channel = multiprocessing.get_context("spawn").Queue(maxsize=1000)
    payload = os.urandom(nbytes)

    def send(count: int) -> None:
        for _ in range(count):
            channel.put(payload)

    return channel, send


def _queue_receiver(channel: queue.Queue[bytes]) -> Callable[[int], None]:
    def receive(count: int) -> None:
        for _ in range(count):
            _look(channel.get(timeout=READY_S))

    return receive


def _zmq_sender(nbytes: int) -> tuple[str, Callable[[int], None]]:
    import zmq

    address = f"ipc://@staleflow-bench-{os.getpid()}-{next(_count)}"
    sender = zmq.Context.instance().socket(zmq.PUSH)
    sender.bind(address)
    payload = os.urandom(nbytes)

    def send(count: int) -> None:
        for _ in range(count):
            sender.send(payload, copy=nbytes < 4096)

    return address, send


def _zmq_receiver(address: str) -> Callable[[int], None]:
    import zmq

    receiver = zmq.Context.instance().socket(zmq.PULL)
    receiver.connect(address)

    def receive(count: int) -> None:
        for _ in range(count):
            _look(receiver.recv(copy=True))

    return receive


def _vllm_sender(nbytes: int) -> tuple[Any, Callable[[int], None]]:
    from vllm.distributed.device_communicators.shm_broadcast import MessageQueue

    channel = MessageQueue(n_reader=1, n_local_reader=1)
    return channel.export_handle(), _after(channel.wait_until_ready, channel.enqueue, os.urandom(nbytes))


def _after(shake_hands: Callable[[], None], put: Callable[[bytes], None], payload: bytes) -> Callable[[int], None]:
    """`send` of a queue whose two sides must meet once."""
    first = [shake_hands]

    def send(count: int) -> None:
        while first:
            first.pop()()
        for _ in range(count):
            put(payload)

    return send


def _vllm_receiver(handle: Any) -> Callable[[int], None]:
    from vllm.distributed.device_communicators.shm_broadcast import MessageQueue

    channel = MessageQueue.create_from_handle(handle, 0)
    return _after(channel.wait_until_ready, lambda _: _look(channel.dequeue()), b"")


def _iceoryx_service(name: str) -> Any:
    import iceoryx2

    node = iceoryx2.NodeBuilder.new().create(iceoryx2.ServiceType.Ipc)
    builder = node.service_builder(iceoryx2.ServiceName.new(name))
    service = builder.publish_subscribe(iceoryx2.Slice[ctypes.c_uint8])
    return node, service.enable_safe_overflow(False).subscriber_max_buffer_size(64).open_or_create()


def _iceoryx_sender(nbytes: int) -> tuple[str, Callable[[int], None]]:
    import iceoryx2

    name = f"staleflow-bench-{os.getpid()}-{next(_count)}"
    node, service = _iceoryx_service(name)
    builder = service.publisher_builder().initial_max_slice_len(nbytes)
    publisher = builder.backpressure_strategy(iceoryx2.BackpressureStrategy.RetryUntilDelivered).create()
    payload = ctypes.create_string_buffer(os.urandom(nbytes), nbytes)

    def send(count: int) -> None:
        for _ in range(count):
            sample = publisher.loan_slice_uninit(nbytes)
            ctypes.memmove(sample.payload_ptr, payload, nbytes)
            sample.assume_init().send()
        assert node  # it must live until all is sent

    return name, send


def _iceoryx_receiver(name: str) -> Callable[[int], None]:
    node, service = _iceoryx_service(name)
    subscriber = service.subscriber_builder().create()

    def receive(count: int) -> None:
        while count > 0:
            sample = subscriber.receive()
            if sample is None:
                continue
            _look(sample.payload().as_memory_view().cast("B"))
            count -= 1
        assert node

    return receive


PEERS = {
    "multiprocessing_queue": Lane(_queue_sender, _queue_receiver),
    "zmq_ipc": Lane(_zmq_sender, _zmq_receiver),
    "vllm_message_queue": Lane(_vllm_sender, _vllm_receiver),
    "iceoryx2": Lane(_iceoryx_sender, _iceoryx_receiver),
}
