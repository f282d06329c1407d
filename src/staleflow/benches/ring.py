"""`staleflow bench ring`: records per second from one process to another, beside what else one could use for it.

Everything is measured in this run, one measurement after the other, each with a sender (this process) and a receiver
(a spawned one). A lane gets as many records per round as it passes in about `ROUND_S`, so that a round is as long, and
as likely to be disturbed, for all of them; the best of several counts. Every sender copies the same payload into what
it sends through. A receiver looks at the first and the last byte of every record; where it gets a view, it copies
nothing, since that is what the ring is for. `limit` is one thread's memcpy of the same bytes into shared memory of the
ring's size. A peer that is not installed is left out.

iceoryx2 hands out the block that was given back last, and with a receiver that only looks that is always the same one:
its sender writes over memory that is in the cache, where the ring's goes through all of its own. `iceoryx2_in_turn`
writes through as many bytes as the ring has, as it would with a receiver that keeps what it got for a while.

Delays are those of the best of several rounds too, with sender and receiver each on a core of its own; `p99_rounds` has
all of them. A round is long enough to hold the operating system's own interruptions, and short enough to fall between
those by other programs.
"""

from __future__ import annotations

import ctypes
import itertools
import multiprocessing
import os
import queue
import statistics
import time
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from importlib.util import find_spec
from multiprocessing.connection import Connection
from typing import Any

REPEATS = 5
ROUND_S = 0.2
SIZES = (64, 16 << 10, 1 << 20)  # record bytes
DELAY_ROUNDS, DELAYS, DELAY_GAP_NS = 10, 2_000, 200_000
CAPACITY = 8 << 20  # stays in the cache, as what the peers reuse does
LARGE_CAPACITY = 64 << 20
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
    """`--quick` makes the rounds a tenth as long; `--no-vllm` leaves out the peer that takes long to import."""
    round_s = ROUND_S * (0.1 if "--quick" in args else 1.0)
    lanes = {name: lane for name, lane in PEERS.items() if _installed(name, args)}
    rates = {name: _rates(lane, round_s) for name, lane in lanes.items()}
    return {
        "bench": "ring",
        "unit": "records/s",
        "ours": _rates(RING, round_s),
        "limit": {str(nbytes): _memcpy_rate(nbytes) for nbytes in SIZES},
        "peers": rates,
        "ours_without_python": _rates(NATIVE_RING, round_s),
        "delay_us": {"spinning": _delays(1.0), "sleeping": _delays(0.0)},
        "capacity_bytes": CAPACITY,
        "large_ring": {"capacity_bytes": LARGE_CAPACITY, **_in_a_large_ring(round_s)},
        "cpus": len(os.sched_getaffinity(0)),
        "load_1m": os.getloadavg()[0],
    }


def _installed(name: str, args: list[str]) -> bool:
    modules = {
        "iceoryx2": "iceoryx2",
        "iceoryx2_in_turn": "iceoryx2",
        "zmq_ipc": "zmq",
        "vllm_message_queue": "vllm",
    }
    if name == "vllm_message_queue" and "--no-vllm" in args:
        return False
    return name not in modules or find_spec(modules[name]) is not None


def _rates(lane: Lane, round_s: float) -> dict[str, float]:
    """Records per second by record size, from the first send until the receiver has seen the last; best of several."""
    opened = {nbytes: lane.open(nbytes) for nbytes in SIZES}
    child = _Child(_receiver, lane.connect, [opened[nbytes][0] for nbytes in SIZES])
    rates = {str(nbytes): _best_rate(child, opened[nbytes][1], round_s) for nbytes in SIZES}
    child.join()
    return rates


def _best_rate(child: _Child, send: Callable[[int], None], round_s: float) -> float:
    """Rounds grow until they are long enough to count."""
    child.answer()
    rates: list[float] = []
    count = 20
    while len(rates) < REPEATS:
        child.ask(count)
        start = time.perf_counter()
        send(count)
        child.answer()
        took_s = time.perf_counter() - start
        if took_s >= round_s / 2:
            rates.append(count / took_s)
        count = max(20, int(count * min(8.0, round_s / took_s)))
    child.ask(0)
    return max(rates)


def _receiver(pipe: Connection, connect: Callable[[Any], Callable[[int], None]], addresses: list[Any]) -> None:
    for address in addresses:
        receive = connect(address)
        pipe.send("connected")
        while count := pipe.recv():
            pipe.send("ready")
            receive(count)
            pipe.send("done")


class _Child:
    """A spawned process, spoken to through a pipe."""

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

    def ask(self, count: int) -> None:
        """Let it receive so many records, and wait until it does; 0: this lane is done."""
        self._pipe.send(count)
        if count:
            self.answer()

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


def _in_a_large_ring(round_s: float) -> dict[str, Any]:
    limit = {str(nbytes): _memcpy_rate(nbytes, LARGE_CAPACITY) for nbytes in SIZES}
    return {"ours_without_python": _rates(LARGE_NATIVE_RING, round_s), "limit": limit}


def _memcpy_rate(nbytes: int, capacity: int = CAPACITY) -> float:
    """Copies per second, all over the shared memory of a ring; small ones many at once, since the call would count."""
    _, ring = _open_ring(capacity)
    ring.unlink()
    piece = nbytes if nbytes >= 4096 else capacity // 4
    source = ctypes.create_string_buffer(os.urandom(piece), piece)
    address = ctypes.addressof(ctypes.c_char.from_buffer(ring.data))
    places, rates = [address + at for at in range(0, capacity, piece)], []
    for _ in range(12):
        start = time.perf_counter()
        for place in places:
            ctypes.memmove(place, source, piece)
        rates.append(capacity / nbytes / (time.perf_counter() - start))
    return max(rates)


def _delays(spin_s: float) -> dict[str, Any]:
    """Microseconds from just before commit until the other process has the record; one every 0.2 ms."""
    from staleflow import _ring

    name, ring = _open_ring(CAPACITY)
    cpus = sorted(os.sched_getaffinity(0))
    own, theirs = cpus[-2:] if len(cpus) > 1 else cpus * 2  # neighbours, and not the first, which gets most interrupts
    rounds = []
    child = _Child(_delay_receiver, name, spin_s, theirs)
    child.answer()
    os.sched_setaffinity(0, {own})
    try:
        for _ in range(DELAY_ROUNDS):
            child.ask(DELAYS)
            _ring.produce_stamped(ring, DELAYS, DELAY_GAP_NS)
            rounds.append(sorted(ns / 1000 for ns in child.answer()))
    finally:
        os.sched_setaffinity(0, cpus)
    child.ask(0)
    child.join()
    p99s = [delays[int(0.99 * DELAYS)] for delays in rounds]
    best = rounds[p99s.index(min(p99s))]
    return {"p50": statistics.median(best), "p99": min(p99s), "max": best[-1], "p99_rounds": p99s}


def _delay_receiver(pipe: Connection, name: str, spin_s: float, cpu: int) -> None:
    from staleflow import _ring

    os.sched_setaffinity(0, {cpu})
    ring = _attach_ring(name)
    ring.spin_s = spin_s
    pipe.send("connected")
    while count := pipe.recv():
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


def _iceoryx_sender(nbytes: int, in_turn: bool = False) -> tuple[str, Callable[[int], None]]:
    import iceoryx2

    name = f"staleflow-bench-{os.getpid()}-{next(_count)}"
    node, service = _iceoryx_service(name)
    ahead = min(512, CAPACITY // nbytes) - 1 if in_turn else 0  # blocks loaned before they are needed
    builder = service.publisher_builder().initial_max_slice_len(nbytes).max_loaned_samples(ahead + 2)
    publisher = builder.backpressure_strategy(iceoryx2.BackpressureStrategy.RetryUntilDelivered).create()
    payload = ctypes.create_string_buffer(os.urandom(nbytes), nbytes)
    loaned = deque(publisher.loan_slice_uninit(nbytes) for _ in range(ahead))

    def send(count: int) -> None:
        for _ in range(count):
            loaned.append(publisher.loan_slice_uninit(nbytes))
            sample = loaned.popleft()
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
    "iceoryx2_in_turn": Lane(partial(_iceoryx_sender, in_turn=True), _iceoryx_receiver),
}
