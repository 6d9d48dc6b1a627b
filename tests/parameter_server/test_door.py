"""Who is let in to a server, and what it answers to what is said beside the data."""

from __future__ import annotations

import contextlib
import os
import socket
import time
from collections.abc import Iterator
from typing import Any

import pytest
import torch

import ringreduce.parameter_server as ps
from ringreduce import _C
from ringreduce.errors import InvalidArgument, SystemFailure
from ringreduce.parameter_server import control
from ringreduce.parameter_server.doors import enter
from ringreduce.parameter_server.server.listener import Connection
from ringreduce.parameter_server.server.process import ServerProcess

SECRET = b"s" * 32
SPEC = {"dtype": "float32", "mode": ps.sync().as_json(), "update": ps.assign().as_json(), "made": ""}


@pytest.fixture
def process() -> Iterator[ServerProcess]:
    made = ServerProcess(1 << 20, SECRET, {})
    yield made
    made.close()


def hello(client: Any, worker: int = 0, **changed: Any) -> dict[str, Any]:
    said = {"worker": worker, "host": "here", "pid": os.getpid(), "group": "workers", "servers": 1, "lane": 0}
    return said | {"window_bytes": client.window_bytes} | changed


@contextlib.contextmanager
def entered(process: ServerProcess, worker: int = 0, secret: bytes = SECRET, **changed: Any) -> Iterator[socket.socket]:
    client = _C.ParameterClient(worker, 1, 1 << 16)
    given = [client.window, client.news]
    connection, answer, descriptors = enter(
        process.listener.address, secret, hello(client, worker, **changed), given, 5, 3
    )
    for descriptor in descriptors:
        os.close(descriptor)
    assert answer["capacity"] == 1 << 20
    with connection:
        yield connection


def ask(connection: socket.socket, question: Any) -> dict[str, Any]:
    control.send(connection, question)
    return control.receive(connection)[0]


def test_who_does_not_know_the_secret_is_not_let_in(process: ServerProcess) -> None:
    with pytest.raises(OSError), entered(process, secret=b"t" * 32):
        pass
    assert process.server.statistics()["workers"] == 0
    with entered(process):  # others are
        assert process.server.statistics()["workers"] == 1


@pytest.mark.parametrize(
    ("changed", "said"),
    [
        ({"window_bytes": 1 << 30}, "shared memory has"),
        ({"window_bytes": 100}, "has no lane 0 of 1"),
        ({"lane": 1}, "has no lane 1 of 1"),
        ({"servers": 2**40}, "has no lane 0 of"),
        ({"lane": "x"}, "a message that says nothing known"),
    ],
)
def test_a_window_that_is_not_what_it_says_is_refused(
    process: ServerProcess, changed: dict[str, Any], said: str
) -> None:
    with pytest.raises(ConnectionError, match=said), entered(process, **changed):
        pass
    with entered(process, worker=1) as connection:
        assert ask(connection, {"ask": "statistics"})["statistics"]["workers"] == 1


def test_a_second_worker_of_the_same_number_is_refused(process: ServerProcess) -> None:
    with (
        entered(process),
        pytest.raises(ConnectionError, match="there is a worker 0 already"),
        entered(process),
    ):
        pass


@pytest.mark.parametrize("message", [b"{", b"[1]", b"\xff\xfe", b"[" * 20000, b'"' + b"x" * 100000 + b'"', b"{}"])
def test_what_is_no_message_ends_the_connection_or_is_refused_and_harms_nobody(
    process: ServerProcess, message: bytes
) -> None:
    with entered(process) as good:
        with entered(process, worker=1) as bad:
            bad.send(message)
            with contextlib.suppress(ConnectionError):
                assert control.receive(bad)[0]["error"][0] == "InvalidArgument"
        assert "statistics" in ask(good, {"ask": "statistics"})


def test_questions_that_say_nothing_known_are_answered_with_an_error(process: ServerProcess) -> None:
    questions: list[dict[str, Any]] = [
        {"ask": "everything"},
        {"ask": "awaited"},
        {"ask": "create", "key": "k", "blocks": [], "spec": SPEC},
        {"ask": "create", "key": "k", "blocks": [[0, -1]], "spec": SPEC},
        {"ask": "create", "key": "k", "blocks": [[0, 2**62]], "spec": SPEC},
        {"ask": "create", "key": "k", "blocks": [[0, 5]], "spec": SPEC | {"dtype": "float128"}},
        {"ask": "create", "key": "k", "blocks": [[0, 5]], "spec": SPEC | {"mode": {}}},
    ]
    with entered(process) as connection:
        for question in questions:
            assert ask(connection, question)["error"][0] == "InvalidArgument", question
        assert len(ask(connection, {"ask": "create", "key": "k", "blocks": [[0, 5]], "spec": SPEC})["blocks"]) == 1
        assert ask(connection, {"ask": "awaited", "block": 99}) == {"workers": []}


def come(process: ServerProcess, undo: contextlib.ExitStack) -> socket.socket:
    connection = undo.enter_context(socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET))
    connection.connect(process.listener.address)
    return connection


def test_unauthenticated_connections_are_bounded(process: ServerProcess) -> None:
    with contextlib.ExitStack() as undo:
        for _ in range(100):
            come(process, undo)
        end = time.monotonic() + 20
        while len(process.listener._connections) < 64 and time.monotonic() < end:
            time.sleep(0.01)
        time.sleep(0.1)
        assert len(process.listener._connections) == 64
        with entered(process):  # although they stay and say nothing
            pass
    with entered(process):  # they have gone
        pass


def test_the_oldest_unauthenticated_connection_may_speak_as_another_one_comes(process: ServerProcess) -> None:
    with contextlib.ExitStack() as undo:
        oldest, *_ = [come(process, undo) for _ in range(64)]
        time.sleep(1.2)  # now it may be closed
        with process.listener.changed:  # the door waits for this, and then finds both at once
            process.listener._wake.send(b"a")
            time.sleep(0.1)
            come(process, undo)
            oldest.send(b"{}")
        with entered(process):
            pass


def test_partners_are_no_unauthenticated_connections(process: ServerProcess) -> None:
    """The backups of a process with many servers do not keep workers out."""
    with contextlib.ExitStack() as partners:
        for _ in range(64):
            here, there = socket.socketpair()
            partners.enter_context(there)
            process.listener._connections[here.fileno()] = Connection(here, is_partner=True)
        with entered(process):
            pass


def test_long_messages_are_not_sent() -> None:
    one, other = socket.socketpair()
    with one, other, pytest.raises(SystemFailure, match=r"a control message has \d+ bytes; the most is 65536"):
        control.send(one, {"x": "y" * 70000})


def test_nobody_can_write_a_servers_values(process: ServerProcess) -> None:
    """Not even with the descriptor that workers get."""
    import mmap

    descriptor = os.dup(process.server.values)
    try:
        with pytest.raises(PermissionError):
            mmap.mmap(descriptor, 4096)
        with pytest.raises(PermissionError):
            os.pwrite(descriptor, b"x", 0)
        mmap.mmap(descriptor, 4096, prot=mmap.PROT_READ).close()
    finally:
        os.close(descriptor)


def test_nothing_is_left_open() -> None:
    def descriptors() -> int:
        return len(os.listdir("/proc/self/fd"))

    def round_trip() -> None:
        with ps.join(window=8 << 20, memory=1 << 20) as kv:
            w = torch.zeros(10)
            kv.init("w", w)
            kv.push_pull("w", torch.ones(10), out=w).wait()

    round_trip()
    before = descriptors()
    for _ in range(5):
        round_trip()
    assert descriptors() == before


def test_after_leaving_calls_are_refused() -> None:
    kv = ps.join(window=8 << 20, memory=1 << 20)
    kv.leave()
    kv.leave()
    with pytest.raises(InvalidArgument, match="this worker has left"):
        kv.init("w", torch.zeros(3))


def test_messages_over_tcp_may_come_byte_by_byte_and_several_at_once() -> None:
    said = [{"ask": "statistics", "number": i} for i in range(3)]
    with contextlib.ExitStack() as undo:
        listener = undo.enter_context(socket.create_server(("127.0.0.1", 0)))
        sender = undo.enter_context(socket.create_connection(listener.getsockname()))
        receiver = undo.enter_context(listener.accept()[0])
        arriving = control.Arriving()
        with pytest.raises(BlockingIOError):
            arriving.take(receiver)  # it does not wait
        for message in said:
            control.send(sender, message)
        data, found = receiver.recv(4096), []
        for begin, end in ((0, 1), (1, 5), (5, len(data) - 1), (len(data) - 1, len(data))):
            sender.sendall(data[begin:end])
            with contextlib.suppress(BlockingIOError):
                found += arriving.take(receiver)
        assert found == said
        sender.sendall((control.MOST + 1).to_bytes(4, "big"))
        with pytest.raises(ConnectionError, match="longer than"):
            arriving.take(receiver)
        sender.close()
        with pytest.raises(ConnectionError, match="closed"):
            control.Arriving().take(receiver)
