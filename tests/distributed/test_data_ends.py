"""Loaders: calls that are wrong, and processes that end at a bad moment."""

from __future__ import annotations

import contextlib
import ctypes
import os
import resource
import select
import signal
import socket
import sys
import time
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from bodies.data import Rows, is_alive, open_files, servers_of
from distributed.harness import Rank, in_threads, on_ranks
from processes import limited, no_descriptors, until

from ringreduce.data import Loader, Order, connections, supervisor
from ringreduce.data.identity import full_name
from ringreduce.data.messages import WHERE, address, next_message
from ringreduce.errors import InvalidArgument, SampleFailed, SystemFailure
from ringreduce.network.local import close_all

PR_SET_CHILD_SUBREAPER = 36


@on_ranks(1)
def test_a_step_is_an_integer(me: Rank) -> None:
    order = Order(100, 10)
    with Loader(Rows(100), order, timeout=20) as reader:
        for wrong in (1.5, "x", None, torch.ones(2)):
            with pytest.raises(InvalidArgument, match=r"step is .*; give an integer"):
                reader.get(wrong)
        with pytest.raises(InvalidArgument, match="rank is 'x'; give an integer"):
            reader.get(3, "x", 2)
        assert reader.get(torch.tensor(3))[:, 0].tolist() == order.ids(3).tolist()
        assert reader.get(2)[:, 0].tolist() == order.ids(2).tolist(), "a wrong call has left something"


@on_ranks(1)
def test_a_reader_may_come_while_a_server_dies(me: Rank) -> None:
    """The supervisor sleeps until a server has died and a new reader has come. It sees the reader first."""
    rows, order, name = Rows(100), Order(100, 10), f"comes {os.getpid()}"
    with Loader(rows, order, name=name) as first:
        parent, next_message = supervisor.started[-1], connections.next_message
        os.kill(parent, signal.SIGSTOP)
        (server,) = servers_of(parent)
        os.kill(server, signal.SIGKILL)
        until(lambda: not is_alive(server))

        def wakes_the_supervisor(connection: socket.socket) -> tuple[bytes, list[int]]:
            os.kill(parent, signal.SIGCONT)
            return next_message(connection)

        connections.next_message = wakes_the_supervisor
        with Loader(rows, order, name=name) as second:
            assert second.get(1)[:, 0].tolist() == order.ids(1).tolist()
        assert first.get(1)[:, 0].tolist() == order.ids(1).tolist()


@on_ranks(1)
def test_servers_that_cannot_start_are_an_error_with_the_reason(me: Rank) -> None:
    rows, order, name = Rows(100), Order(100, 10), f"too many {os.getpid()}"
    refused = pytest.raises(SystemFailure, match=rf"'{name}': cannot .* servers=100: .*Too many open files")
    with limited(resource.RLIMIT_NOFILE, open_files() + 50), refused:
        Loader(rows, order, 100, name=name)
    with Loader(rows, order, 100, name=name) as reader:
        assert reader.get(0)[:, 0].tolist() == order.ids(0).tolist()


def test_what_a_process_said_before_it_ended_is_heard_after_the_reset() -> None:
    ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    with ours:
        ours.send(b"not read")
        theirs.send(b"the reason")
        theirs.close()
        assert next_message(ours) == (b"the reason", [])
        with pytest.raises(ConnectionError):
            next_message(ours)


@on_ranks(1)
def test_a_supervisor_that_is_killed_at_its_start_is_an_error(me: Rank) -> None:
    supervisor._become = lambda *_, **__: os.kill(os.getpid(), signal.SIGKILL)
    with pytest.raises(SystemFailure, match="their supervisor was killed"):
        Loader(Rows(100), Order(100, 10))


@on_ranks(1)
def test_a_loader_does_not_wait_for_ever_for_a_supervisor(me: Rank) -> None:
    """Another process has taken the name and does not listen."""
    name = f"nobody {os.getpid()}"
    with socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as taken:
        taken.bind(address(full_name(name, Rows(100), None, False)))
        with pytest.raises(SystemFailure, match=r"none was there for timeout=0.3 s"):
            Loader(Rows(100), Order(100, 10), name=name, timeout=0.3)


class Panic(BaseException):
    """As an extension in Rust raises."""


class Ends(Rows):
    def __getitem__(self, number: int) -> np.ndarray:
        if number == 3:
            sys.exit("this picture is broken")
        if number == 8:
            raise Panic("index out of bounds")
        return super().__getitem__(number)


@on_ranks(1)
def test_a_dataset_that_exits_is_an_error_with_its_id(me: Rank) -> None:
    with Loader(Ends(20), Order(20, 5, shuffle=False)) as reader:
        servers = servers_of(supervisor.started[-1])
        for step, number, message in ((0, 3, "SystemExit: this picture is broken"), (1, 8, "index out of bounds")):
            with pytest.raises(SampleFailed, match=rf"id {number}: (?s:.*){message}") as caught:
                reader.get(step)
            assert caught.value.id == number
        assert reader.get(2)[:, 0].tolist() == [10, 11, 12, 13, 14]
        assert servers_of(supervisor.started[-1]) == servers, "a server has ended"


def files_of(pid: int, kind: str) -> int:
    return sum(kind in os.path.realpath(file) for file in Path(f"/proc/{pid}/fd").iterdir())


@on_ranks(1)
def test_a_batch_that_is_held_outlives_its_loader(me: Rank) -> None:
    """A Loader is closed, and one goes out of scope, while a third one of the name reads on."""
    rows, order, name = Rows(2000), Order(2000, 10), f"held {os.getpid()}"
    first, second, third = (Loader(rows, order, 2, name=name) for _ in range(3))
    server, _ = servers_of(supervisor.started[-1])
    ours = files_of(os.getpid(), "socket")
    held = [first.get(0), first.get(1)[2:, :3], second.get(2)]
    expected = [each.clone() for each in held]
    first.close()
    del second
    for step in range(3, 100):
        assert third.get(step)[:, 0].tolist() == order.ids(step).tolist()
        assert all(map(torch.equal, held, expected)), f"a batch that is held was overwritten at step {step}"
    assert files_of(server, "memfd") < 20, "it keeps batches for Loaders that are closed"  # two for each slot
    theirs = files_of(server, "socket")
    held.clear()
    assert files_of(os.getpid(), "socket") == ours - 6, "a closed Loader has left a connection"
    until(lambda: files_of(server, "socket") == theirs - 2)
    third.close()


@on_ranks(1)
def test_servers_that_end_leave_no_zombies(me: Rank) -> None:
    """This process gets the processes that their parent has left, as a container's first process does."""
    ctypes.CDLL(None).prctl(PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0)
    with Loader(Rows(100), Order(100, 10), 3):
        parent = supervisor.started[-1]
        until(lambda: len(servers_of(parent)) == 3)
        servers = servers_of(parent)
    until(lambda: not any(map(is_alive, [parent, *servers])))
    for pid in servers:
        with pytest.raises(ChildProcessError):
            os.waitpid(pid, 0)


class Interrupted(Exception):
    pass


@on_ranks(1)
def test_an_interrupted_step_can_be_read_again(me: Rank) -> None:
    """A signal's handler raises when a message has come and is not used yet: the first of a step, or a later one."""
    order, held = Order(400, 10), torch.tensor(0)
    with Loader(Rows(400), order, 2, timeout=20) as reader:
        for step in range(0, 39, 2):
            expected, left = held.clone(), step % 3

            def lossy(connection: socket.socket) -> tuple[bytes, list[int]]:
                nonlocal left
                message, fds = next_message(connection)
                left -= 1
                if left < 0:
                    close_all(fds)
                    raise Interrupted
                return message, fds

            connections.next_message = lossy
            with contextlib.suppress(Interrupted):
                reader.get(step)
            connections.next_message = next_message
            assert reader.get(step)[:, 0].tolist() == order.ids(step).tolist()
            assert torch.equal(held, expected), "a batch that was held meanwhile has been overwritten"
            held = reader.get(step + 1)
            assert held[:, 0].tolist() == order.ids(step + 1).tolist()


@on_ranks(1)
def test_a_lack_of_descriptors_passes(me: Rank) -> None:
    order = Order(100, 10)
    with Loader(Rows(100), order, timeout=20) as reader:
        with no_descriptors(200), pytest.raises(SystemFailure, match="no descriptors left"):
            reader.get(0)
        for step in range(10):
            assert reader.get(step)[:, 0].tolist() == order.ids(step).tolist()


class Sleeps(Rows):
    def __getitem__(self, number: int) -> np.ndarray:
        time.sleep(1)
        return super().__getitem__(number)


@on_ranks(1)
def test_a_loader_may_be_closed_while_another_thread_reads(me: Rank) -> None:
    """Another thread reads. It must start no supervisor, which nobody would end."""
    reader = Loader(Sleeps(100), Order(100, 10), timeout=60)

    def reads() -> None:
        with pytest.raises(InvalidArgument, match="this Loader is closed"):
            reader.get(0)

    def closes() -> None:
        time.sleep(0.2)
        reader.close()

    in_threads([reads, closes])
    until(lambda: not (supervisor.reap() or supervisor.started))


def ended(pipe: int) -> bool:
    ready, _, _ = select.select([pipe], [], [], 20)
    return bool(ready) and os.read(pipe, 1) == b""


@on_ranks(1)
def test_servers_keep_no_pipe_open(me: Rank) -> None:
    """Who reads from a pipe gets its end: of pipes at once, of a process's output when that process has ended."""
    order, name = Order(100, 10), f"pipes {os.getpid()}"
    other, output, ready, go = os.pipe(), os.pipe(), os.pipe(), os.pipe()
    if (pid := os.fork()) == 0:
        os.dup2(output[1], 1)
        os.dup2(output[1], 2)
        for end in (output[1], other[1], go[1]):
            os.close(end)
        with Loader(Rows(100), order, name=name):
            os.write(ready[1], b"x")
            os.read(go[0], 1)
            os._exit(0)
    for pipe in (other, output):
        os.close(pipe[1])
    os.read(ready[0], 1)
    with Loader(Rows(100), order, name=name) as reader:
        assert not supervisor.started, "the child's servers are not shared"
        assert ended(other[0]), "a server has kept a pipe"
        os.write(go[1], b"x")
        os.waitpid(pid, 0)
        assert ended(output[0]), "a server has kept the output of the process that started it"
        assert reader.get(3)[:, 0].tolist() == order.ids(3).tolist()


@on_ranks(1)
def test_a_reader_that_does_not_read_what_it_is_told_keeps_its_servers(me: Rank) -> None:
    order = Order(100, 10)
    with Loader(Rows(100), order, timeout=20) as reader:
        servers = servers_of(supervisor.started[-1])
        assert reader._connections.supervisor is not None
        for _ in range(2000):
            reader._connections.supervisor.send(WHERE)
        assert reader.get(1)[:, 0].tolist() == order.ids(1).tolist()
        assert servers_of(supervisor.started[-1]) == servers


class Lines:
    """Reads from a file whose descriptor is 0."""

    def __getitem__(self, number: int) -> int:
        return os.pread(0, 1, number)[0]


@on_ranks(1)
def test_a_file_of_the_dataset_may_have_the_number_of_a_closed_stream(me: Rank, tmp_path: Path) -> None:
    path = tmp_path / "file"
    path.write_bytes(bytes(range(100)))
    os.close(0)
    assert os.open(path, os.O_RDONLY) == 0
    order = Order(100, 10)
    with Loader(Lines(), order, timeout=20) as reader:
        assert reader.get(1).tolist() == order.ids(1).tolist()


class Signals(Rows):
    """A dataset that sends a signal to its server."""

    def __getitem__(self, number: int) -> Any:
        os.kill(os.getpid(), signal.SIGUSR1)
        return super().__getitem__(number)


def test_handlers_of_the_program_do_not_run_in_servers() -> None:
    def fails(*_: object) -> None:
        raise RuntimeError("in the wrong process")

    before = signal.signal(signal.SIGUSR1, fails)
    try:
        with Loader(Signals(10), Order(10, 10), timeout=10) as loader:
            loader.get(0)
    finally:
        signal.signal(signal.SIGUSR1, before)


def test_a_handler_that_raises_while_a_loader_is_made_is_not_lost() -> None:
    def raises(*_: object) -> None:
        raise KeyboardInterrupt

    def comes_amid_fork() -> None:
        if signal.getsignal(signal.SIGUSR2) != signal.SIG_DFL:
            signal.raise_signal(signal.SIGUSR2)

    os.register_at_fork(after_in_parent=comes_amid_fork)
    before = signal.signal(signal.SIGUSR2, raises)
    try:
        with pytest.raises(KeyboardInterrupt):
            Loader(Rows(10), Order(10, 10))
        os.waitpid(supervisor.started[-1], 0)  # it has noticed that it has no reader
        assert signal.getsignal(signal.SIGUSR2) is raises
    finally:
        signal.signal(signal.SIGUSR2, before)
    with Loader(Rows(10), Order(10, 10)) as loader:
        loader.get(0)
