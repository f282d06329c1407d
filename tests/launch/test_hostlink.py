"""The link between hosts, without a job around it: order, payloads that overtake, strangers, silence."""

import threading
import time
from types import SimpleNamespace

import pytest
import zmq

from staleflow.roles import hostlink
from staleflow.roles import messages as m
from staleflow.roles.hostlink import CoordinatorLink, Gate, HostLinks

# ---- the gate --------------------------------------------------------------------------------------------------------


def commands(number):
    return m.Commands([("Pull", number, 0, [], 1)], [])


def test_messages_wait_for_the_payloads_that_were_announced_before_them():
    sent = []
    gate = Gate(lambda node, message: sent.append((node, message)))
    payload = {tid: m.Payload(tid, 0, b"record") for tid in (7, 8)}
    gate(0, commands(1))
    gate(1, m.Forward([7, 8], 0))
    gate(0, commands(2))
    gate(1, commands(3))
    gate(0, payload[7])
    gate(0, commands(4))
    assert sent == [(0, commands(1)), (1, m.Forward([7, 8], 0)), (1, commands(3)), (0, payload[7])]
    gate(0, payload[8])
    assert sent[4:] == [(0, payload[8]), (0, commands(2)), (0, commands(4))]
    gate(0, commands(5))
    assert sent[-1] == (0, commands(5))


def test_a_held_message_does_not_wait_for_payloads_announced_after_it():
    sent = []
    gate = Gate(lambda node, message: sent.append(message))
    gate(1, m.Forward([7], 0))
    gate(0, commands(1))
    gate(1, m.Forward([8], 0))
    gate(0, commands(2))
    gate(0, m.Payload(7, 0, b""))
    assert commands(1) in sent
    assert commands(2) not in sent


def test_stop_overtakes():
    sent = []
    gate = Gate(lambda node, message: sent.append(message))
    gate(1, m.Forward([7], 0))
    gate(0, commands(1))
    gate(0, m.Stop(1, "why"))
    assert sent[-1] == m.Stop(1, "why")


def test_what_a_lost_node_was_to_forward_is_asked_of_node_0_and_nothing_waits_for_it():
    """Node 0 has adopted 7 and answers with nothing for 8: what was held for either passes."""
    sent = []
    gate = Gate(lambda node, message: sent.append((node, message)))
    gate(2, m.Forward([7, 8], 1))
    gate(1, commands(1))
    adopt, order = m.Adopt(2, [7], []), m.Regroup(1, [1, 3])
    gate(0, adopt)
    gate(2, m.Gone())
    gate(2, commands(2))
    gate(1, order)
    assert sent == [(2, m.Forward([7, 8], 1)), (0, adopt), (0, m.Forward([7, 8], 1)), (1, order)]
    gate(1, m.Payload(7, 1, b"record"))
    gate(1, m.Payload(8, 1, b""))
    assert sent[4:] == [(1, m.Payload(7, 1, b"record")), (1, m.Payload(8, 1, b"")), (1, commands(1))]
    gate(2, m.Forward([9], 0))
    gate(0, m.Forward([9], 2))
    assert sent[7:] == [(0, m.Forward([9], 0))], "from it: asked of node 0; to it: not at all"


# ---- the sockets -----------------------------------------------------------------------------------------------------


class Board:
    """Stands for the job's store."""

    def __init__(self):
        self.values = {}

    def post(self, key, value):
        self.values[key] = value

    def read(self, key, timeout_s, who):
        while key not in self.values:
            time.sleep(0.01)
        return self.values[key]


def fake_job(tmp_path, board, node):
    plan = SimpleNamespace(nodes=[SimpleNamespace(name="node1"), SimpleNamespace(name="node2")], hosts=(0, 3))
    fault = SimpleNamespace(start_timeout_s=10.0, survive_rollout=False)
    return SimpleNamespace(
        run_dir=tmp_path, attempt=0, plan=plan, config=SimpleNamespace(fault=fault), me=SimpleNamespace(node=node),
        post=board.post, read=board.read,
    )  # fmt: skip


@pytest.fixture
def links(tmp_path, monkeypatch):
    monkeypatch.setenv("GLOO_SOCKET_IFNAME", "lo")
    board, ends = Board(), {}
    thread = threading.Thread(target=lambda: ends.update(root=HostLinks(fake_job(tmp_path, board, 0))))
    thread.start()
    other = CoordinatorLink(fake_job(tmp_path, board, 1))
    thread.join()
    yield ends["root"], other
    other.close()
    ends["root"].close()


def until(receive):
    end_s = time.monotonic() + 10
    while not (got := receive()):
        assert time.monotonic() < end_s
        time.sleep(0.01)
    return got


def test_hosts_and_coordinator_talk(links):
    root, other = links
    other.send(m.Returned(5, 17, 1, 0))
    assert until(root.receive) == [(1, m.Returned(5, 17, 1, 0))]
    root.send(1, m.Forward([5], 0))
    assert until(other.receive) == [m.Forward([5], 0)]
    assert root.failure is None
    assert other.failure is None


def test_what_is_said_while_others_are_still_missing_is_kept(tmp_path, monkeypatch):
    monkeypatch.setenv("GLOO_SOCKET_IFNAME", "lo")
    said = m.Returned(1, 2, 1, 0)
    beats = threading.Event()

    class Eager(CoordinatorLink):
        def _say(self, name, payload):
            super()._say(name, payload)
            if payload == hostlink.BEAT and not beats.is_set():
                beats.set()
                self.send(said)

    board, ends = Board(), {}
    thread = threading.Thread(target=lambda: ends.update(root=HostLinks(fake_job(tmp_path, board, 0))))
    thread.start()
    other = Eager(fake_job(tmp_path, board, 1))
    thread.join()
    assert until(ends["root"].receive) == [(1, said)]
    other.close()
    ends["root"].close()


def test_a_stranger_changes_nothing_and_is_counted(links):
    root, other = links
    context = zmq.Context()
    context.linger = 0
    stranger = context.socket(zmq.DEALER)
    stranger.connect("tcp://{}:{}".format(*root._server.address))
    stranger.send_multipart([b"header", m.encode(m.Failed(3, "not true"))])
    end_s = time.monotonic() + 10
    while not root.counters["refused"]:
        assert root.receive() == []
        assert time.monotonic() < end_s
    context.destroy(linger=0)
    other.send(m.Rewarded(1, 1.0))
    assert until(root.receive) == [(1, m.Rewarded(1, 1.0))]
    assert root.failure is None


def test_silence_is_a_failure_that_names_the_node(links, monkeypatch):
    root, other = links
    other.send(m.Rewarded(1, 1.0))
    until(root.receive)
    monkeypatch.setattr(hostlink, "SILENT_S", 0.05)
    time.sleep(0.1)
    root.receive()
    assert "rank 3 (host of node2) has been silent" in root.failure
    root.send(1, m.Forward([1], 0))  # goes nowhere, and hangs nobody


def test_a_host_that_is_gone_is_a_failure_too(tmp_path, links):
    root, other = links
    other._socket.close(linger=0)
    end_s = time.monotonic() + 10
    while root.failure is None:
        root.send(1, m.Forward([1], 0))
        assert time.monotonic() < end_s
        time.sleep(0.01)
    assert "rank 3 (host of node2) has closed its connection" in root.failure
