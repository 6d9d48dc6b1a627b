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
from bodies.data import Rows, is_alive, open_files, servers_of, until
from distributed.harness import Rank, in_threads, run

from ringreduce.data import Loader, Order, connections, supervisor
from ringreduce.data.identity import full_name
from ringreduce.data.messages import WHERE, address, next_message
from ringreduce.errors import InvalidArgument, SampleFailed, SystemFailure
from ringreduce.network.local import close_all

PR_SET_CHILD_SUBREAPER = 36


def odd_steps(me: Rank) -> None:
    order = Order(100, 10)
    with Loader(Rows(100), order, timeout=20) as reader:
        for wrong in (1.5, "x", None, torch.ones(2)):
            with pytest.raises(InvalidArgument, match=r"step is .*; give an integer"):
                reader.get(wrong)
        with pytest.raises(InvalidArgument, match="rank is 'x'; give an integer"):
            reader.get(3, "x", 2)
        assert reader.get(torch.tensor(3))[:, 0].tolist() == order.ids(3).tolist()
        assert reader.get(2)[:, 0].tolist() == order.ids(2).tolist(), "a wrong call has left something"


def test_a_step_is_an_integer() -> None:
    run(odd_steps, 1)


def comes_while_a_server_dies(me: Rank) -> None:
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


def test_a_reader_may_come_while_a_server_dies() -> None:
    run(comes_while_a_server_dies, 1)


def too_many_servers(me: Rank) -> None:
    rows, order, name = Rows(100), Order(100, 10), f"too many {os.getpid()}"
    limits = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (open_files() + 50, limits[1]))
    with pytest.raises(SystemFailure, match=rf"'{name}': cannot .* servers=100: .*Too many open files"):
        Loader(rows, order, 100, name=name)
    resource.setrlimit(resource.RLIMIT_NOFILE, limits)
    with Loader(rows, order, 100, name=name) as reader:
        assert reader.get(0)[:, 0].tolist() == order.ids(0).tolist()


def test_servers_that_cannot_start_are_an_error_with_the_reason() -> None:
    run(too_many_servers, 1)


def test_what_a_process_said_before_it_ended_is_heard_after_the_reset() -> None:
    ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    with ours:
        ours.send(b"not read")
        theirs.send(b"the reason")
        theirs.close()
        assert next_message(ours) == (b"the reason", [])
        with pytest.raises(ConnectionError):
            next_message(ours)


def killed_at_its_start(me: Rank) -> None:
    supervisor._become = lambda *_, **__: os.kill(os.getpid(), signal.SIGKILL)
    with pytest.raises(SystemFailure, match="their supervisor was killed"):
        Loader(Rows(100), Order(100, 10))


def test_a_supervisor_that_is_killed_at_its_start_is_an_error() -> None:
    run(killed_at_its_start, 1)


def nobody_answers(me: Rank) -> None:
    """Another process has taken the name and does not listen."""
    name = f"nobody {os.getpid()}"
    with socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as taken:
        taken.bind(address(full_name(name, Rows(100), None, False)))
        with pytest.raises(SystemFailure, match=r"none was there for timeout=0.3 s"):
            Loader(Rows(100), Order(100, 10), name=name, timeout=0.3)


def test_a_loader_does_not_wait_for_ever_for_a_supervisor() -> None:
    run(nobody_answers, 1)


class Panic(BaseException):
    """As an extension in Rust raises."""


class Ends(Rows):
    def __getitem__(self, number: int) -> np.ndarray:
        if number == 3:
            sys.exit("this picture is broken")
        if number == 8:
            raise Panic("index out of bounds")
        return super().__getitem__(number)


def dataset_exits(me: Rank) -> None:
    with Loader(Ends(20), Order(20, 5, shuffle=False)) as reader:
        servers = servers_of(supervisor.started[-1])
        for step, number, message in ((0, 3, "SystemExit: this picture is broken"), (1, 8, "index out of bounds")):
            with pytest.raises(SampleFailed, match=rf"id {number}: (?s:.*){message}") as caught:
                reader.get(step)
            assert caught.value.id == number
        assert reader.get(2)[:, 0].tolist() == [10, 11, 12, 13, 14]
        assert servers_of(supervisor.started[-1]) == servers, "a server has ended"


def test_a_dataset_that_exits_is_an_error_with_its_id() -> None:
    run(dataset_exits, 1)


def held_after_the_end(me: Rank) -> None:
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


def files_of(pid: int, kind: str) -> int:
    return sum(kind in os.path.realpath(file) for file in Path(f"/proc/{pid}/fd").iterdir())


def test_a_batch_that_is_held_outlives_its_loader() -> None:
    run(held_after_the_end, 1)


def leaves_no_zombies(me: Rank) -> None:
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


def test_servers_that_end_leave_no_zombies() -> None:
    run(leaves_no_zombies, 1)


class Interrupted(Exception):
    pass


def loses_messages(me: Rank) -> None:
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


def test_an_interrupted_step_can_be_read_again() -> None:
    run(loses_messages, 1)


def lacks_descriptors(me: Rank) -> None:
    order, limits = Order(100, 10), resource.getrlimit(resource.RLIMIT_NOFILE)
    with Loader(Rows(100), order, timeout=20) as reader:
        resource.setrlimit(resource.RLIMIT_NOFILE, (200, limits[1]))
        files = []
        with contextlib.suppress(OSError):
            while True:
                files.append(os.open(os.devnull, os.O_RDONLY))
        with pytest.raises(SystemFailure, match="no descriptors left"):
            reader.get(0)
        close_all(files)
        for step in range(10):
            assert reader.get(step)[:, 0].tolist() == order.ids(step).tolist()


def test_a_lack_of_descriptors_passes() -> None:
    run(lacks_descriptors, 1)


class Sleeps(Rows):
    def __getitem__(self, number: int) -> np.ndarray:
        time.sleep(1)
        return super().__getitem__(number)


def closes_beside(me: Rank) -> None:
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


def test_a_loader_may_be_closed_while_another_thread_reads() -> None:
    run(closes_beside, 1)


def gives_pipes_up(me: Rank) -> None:
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


def ended(pipe: int) -> bool:
    ready, _, _ = select.select([pipe], [], [], 20)
    return bool(ready) and os.read(pipe, 1) == b""


def test_servers_keep_no_pipe_open() -> None:
    run(gives_pipes_up, 1)


def asks_without_reading(me: Rank) -> None:
    order = Order(100, 10)
    with Loader(Rows(100), order, timeout=20) as reader:
        servers = servers_of(supervisor.started[-1])
        assert reader._connections.supervisor is not None
        for _ in range(2000):
            reader._connections.supervisor.send(WHERE)
        assert reader.get(1)[:, 0].tolist() == order.ids(1).tolist()
        assert servers_of(supervisor.started[-1]) == servers


def test_a_reader_that_does_not_read_what_it_is_told_keeps_its_servers() -> None:
    run(asks_without_reading, 1)


class Lines:
    """Reads from a file whose descriptor is 0."""

    def __getitem__(self, number: int) -> int:
        return os.pread(0, 1, number)[0]


def reads_descriptor_0(me: Rank, path: Path) -> None:
    path.write_bytes(bytes(range(100)))
    os.close(0)
    assert os.open(path, os.O_RDONLY) == 0
    order = Order(100, 10)
    with Loader(Lines(), order, timeout=20) as reader:
        assert reader.get(1).tolist() == order.ids(1).tolist()


def test_a_file_of_the_dataset_may_have_the_number_of_a_closed_stream(tmp_path: Path) -> None:
    run(reads_descriptor_0, 1, tmp_path / "file")


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
