"""The stranger at the door: who is not of the job gets nothing through, and is counted."""

import os
import socket as tcp
import stat

import msgspec
import pytest
import zmq

from staleflow.jobs.env import LaunchError
from staleflow.jobs.security import (
    Inbox,
    Outbox,
    client_socket,
    create_secret,
    key_pair,
    private_directory,
    read_secret,
    server_socket,
)

SECRET = b"s" * 32
WAIT_MS = 5_000


@pytest.fixture
def server():
    context = zmq.Context()
    server = server_socket(context, SECRET, "lo")
    yield server
    server.close()
    context.destroy(linger=0)


@pytest.fixture
def context():
    context = zmq.Context()
    context.linger = 0  # a refused stranger's message would otherwise be waited for
    yield context
    context.destroy(linger=0)


def receive(socket):
    assert socket.poll(WAIT_MS), "nothing came"
    return socket.recv_multipart()


def wait_until_refused(server, count):
    for _ in range(100):
        if server.refused() >= count:
            return
        assert not server.socket.poll(50), "a stranger's message came through"
    pytest.fail(f"refused {server.refused()} instead of {count}")


def test_members_talk_both_ways(server, context):
    member = client_socket(context, SECRET, server.address, b"host1")
    member.send_multipart([b"hello"])
    assert receive(server.socket) == [b"host1", b"hello"]
    server.socket.send_multipart([b"host1", b"welcome"])
    assert receive(member) == [b"welcome"]
    assert server.refused() == 0


def no_encryption(context):
    return context.socket(zmq.DEALER)


def keys_of_another_job(context):
    socket = context.socket(zmq.DEALER)
    pair = key_pair(b"x" * 32, "client")
    socket.curve_publickey, socket.curve_secretkey = pair.public, pair.secret
    socket.curve_serverkey = key_pair(b"x" * 32, "server").public
    return socket


def leaked_public_key(context):
    """CURVE alone admits anybody who has learnt the server's public key; ours must not."""
    socket = context.socket(zmq.DEALER)
    socket.curve_publickey, socket.curve_secretkey = zmq.curve_keypair()
    socket.curve_serverkey = key_pair(SECRET, "server").public
    return socket


@pytest.mark.parametrize("stranger", [no_encryption, keys_of_another_job, leaked_public_key])
def test_a_stranger_is_refused_and_counted_while_members_go_on(server, context, stranger):
    socket = stranger(context)
    socket.connect("tcp://{}:{}".format(*server.address))
    socket.send(b"let me in")
    wait_until_refused(server, 1)
    member = client_socket(context, SECRET, server.address, b"host1")
    member.send(b"still here")
    assert receive(server.socket) == [b"host1", b"still here"]


def test_a_program_that_does_not_speak_zeromq_is_refused_and_counted(server):
    with tcp.create_connection(server.address) as raw:
        raw.sendall(b"GET / HTTP/1.1\r\n\r\n" * 10)
        wait_until_refused(server, 1)


def test_the_server_listens_on_the_named_interface_only(server):
    host, port = server.address
    assert host == "127.0.0.1"
    others = {info[4][0] for info in tcp.getaddrinfo(tcp.gethostname(), None, tcp.AF_INET)} - {host}
    for other in others:
        with pytest.raises(OSError, match=r"refused|timed out|unreachable"):
            tcp.create_connection((other, port), timeout=1)


def test_a_second_server_of_the_process_is_guarded_too(server, context):
    second = server_socket(server.socket.context, SECRET, "lo")
    member = client_socket(context, SECRET, second.address, b"host1")
    member.send(b"payload")
    assert receive(second.socket) == [b"host1", b"payload"]
    stranger = leaked_public_key(context)
    stranger.connect("tcp://{}:{}".format(*second.address))
    stranger.send(b"let me in")
    wait_until_refused(second, 1)
    second.close()


def test_closing_leaves_nothing_that_keeps_the_context_open():
    context = zmq.Context()
    server = server_socket(context, SECRET, "lo")
    member = client_socket(context, SECRET, server.address, b"host1")
    member.send(b"hello")
    assert receive(server.socket) == [b"host1", b"hello"]
    member.close()
    server.close()
    context.term()  # waits for every socket


def test_an_unknown_interface_or_a_taken_port_is_named(server):
    with pytest.raises(LaunchError, match="interface=nonet7"):
        server_socket(server.socket.context, SECRET, "nonet7")
    with pytest.raises(LaunchError, match=f"port={server.address[1]}"):
        server_socket(server.socket.context, SECRET, "lo", server.address[1])


# ---- messages of members ---------------------------------------------------------------------------------------------


def inbox():
    return Inbox(msgspec.msgpack.Decoder(int).decode, peers={b"host1", b"host2"})


def message(number):
    return msgspec.msgpack.encode(number)


def test_messages_pass_once_and_in_order():
    box, out = inbox(), Outbox()
    first, second = out.frames(message(1)), out.frames(message(2))
    assert box.take([b"host1", *first]) == (b"host1", 1)
    assert box.take([b"host1", *second]) == (b"host1", 2)
    assert box.take([b"host1", *first]) is None
    assert box.take([b"host1", *second]) is None
    assert box.counters == {"accepted": 2, "malformed": 0, "unknown": 0, "replayed": 2, "lost": 0}


def test_a_restarted_peer_begins_anew_and_its_former_life_cannot_be_replayed():
    box, former, present = inbox(), Outbox(), Outbox()
    old = former.frames(message(1))
    late = former.frames(message(2))
    assert box.take([b"host1", *old])
    assert box.take([b"host1", *present.frames(message(3))])
    assert box.take([b"host1", *old]) is None
    assert box.take([b"host1", *late]) is None
    assert box.take([b"host1", *present.frames(message(4))]) == (b"host1", 4)
    assert box.counters["replayed"] == 2


def test_lost_messages_are_counted():
    box, out = inbox(), Outbox()
    box.take([b"host2", *out.frames(message(1))])
    out.frames(message(2))
    box.take([b"host2", *out.frames(message(3))])
    assert box.counters["lost"] == 1


@pytest.mark.parametrize(
    ("why", "frames"),
    [
        ("malformed", [b"host1"]),
        ("malformed", [b"host1", b"short", message(1)]),
        ("malformed", [b"host1", *Outbox().frames(b"\xc1 no msgpack")]),
        ("malformed", [b"host1", *Outbox().frames(msgspec.msgpack.encode("of another type"))]),
        ("malformed", [b"host1", *Outbox().frames(message(1)), b"one too many"]),
        ("unknown", [b"host9", *Outbox().frames(message(1))]),
    ],
)
def test_what_is_no_message_is_dropped_and_counted(why, frames):
    box = inbox()
    assert box.take(frames) is None
    assert box.counters[why] == 1
    assert box.counters["accepted"] == 0


# ---- the secret ------------------------------------------------------------------------------------------------------


def test_the_secret_is_private_and_never_overwritten(tmp_path):
    secret = create_secret(tmp_path / "secret")
    assert stat.S_IMODE((tmp_path / "secret").stat().st_mode) == 0o600
    assert read_secret(tmp_path / "secret") == secret
    with pytest.raises(LaunchError, match="job secret"):
        create_secret(tmp_path / "secret")
    assert [entry.name for entry in tmp_path.iterdir()] == ["secret"]


def test_a_secret_that_others_can_read_is_refused(tmp_path):
    create_secret(tmp_path / "secret")
    (tmp_path / "secret").chmod(0o644)
    with pytest.raises(LaunchError, match="0644"):
        read_secret(tmp_path / "secret")


def test_a_planted_link_is_refused(tmp_path):
    create_secret(tmp_path / "real")
    (tmp_path / "secret").symlink_to(tmp_path / "real")
    with pytest.raises(OSError, match="symbolic links"):
        read_secret(tmp_path / "secret")


def test_a_secret_that_does_not_come_says_where_it_was_expected(tmp_path):
    with pytest.raises(LaunchError, match="filesystem that all nodes see"):
        read_secret(tmp_path / "secret", timeout_s=0.1)


def test_the_run_directory_becomes_private(tmp_path):
    (tmp_path / "run").mkdir(mode=0o755)
    assert stat.S_IMODE(private_directory(tmp_path / "run").stat().st_mode) == 0o700
    if os.geteuid() == 0:
        os.chown(tmp_path / "run", 12345, 12345)
        with pytest.raises(LaunchError, match="user 12345"):
            private_directory(tmp_path / "run")


def test_roles_and_jobs_have_different_keys():
    pairs = {key_pair(secret, role).secret for secret in (SECRET, b"x" * 32) for role in ("server", "client")}
    assert len(pairs) == 4
