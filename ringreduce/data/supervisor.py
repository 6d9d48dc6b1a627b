"""A supervisor: a process that starts a Loader's servers, replaces those that die, and ends them with the last reader.

It is forked from the process that makes the first Loader of a name. It does nothing but wait, so the servers that it
forks later begin as the first ones did, without threads.
"""

from __future__ import annotations

import contextlib
import ctypes
import gc
import json
import mmap
import os
import secrets
import select
import signal
import socket
import sys
import threading
import traceback
from collections.abc import Iterable
from typing import Any

import torch

from ringreduce.common.descriptors import above_streams, make_above_streams
from ringreduce.common.system import explained, fork
from ringreduce.data import fresh
from ringreduce.data.messages import WHERE, accept, listen, next_message
from ringreduce.data.server import Recipe, Server, is_pipe_or_socket, point_at_dev_null, release_output
from ringreduce.network.local import shared_memory

PR_SET_PDEATHSIG = 1

TITLE = "data supervisor"
"""How `ps` shows supervisors; servers are called "data server 0" and so on."""

started: list[int] = []
"""Processes that this one has forked, until `reap` finds that they have ended."""


def start(name: str, listener: socket.socket, terms: dict[str, Any], recipe: Recipe) -> socket.socket:
    """Forks a supervisor, whose readers come to `listener`. Returns a connection to it.

    `terms`: what all its readers must agree on; terms["servers"] is how many servers it keeps. If it cannot start them,
    it says so to this connection. Raises `OSError`, and `InvalidArgument` if servers are to be new programs and the
    recipe cannot be pickled.
    """
    with contextlib.ExitStack() as opened:
        opened.enter_context(listener)
        ours, theirs = map(above_streams, socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET))
        opened.enter_context(ours)
        opened.enter_context(theirs)
        starter = above_streams(os.pidfd_open(os.getpid()))
        opened.callback(os.close, starter)
        is_fresh = terms["multiprocessing_context"] == "spawn"
        packed = fresh.packed(recipe) if is_fresh else None
        if packed is not None:
            opened.callback(os.close, packed)
        threads = 1 if is_fresh else len(os.listdir("/proc/self/task"))
        pid = _fork()
        opened.pop_all()
    if pid:
        os.close(starter)
        if packed is not None:
            os.close(packed)
        theirs.close()
        listener.close()
        return ours
    try:
        os.setsid()  # so it gets no signals of the terminal
        _become(TITLE, keep=(listener.fileno(), theirs.fileno()))
        torch.set_num_threads(1)
        gc.freeze()  # so that collections of garbage do not copy memory that is shared with the parent
        _Supervisor(name, listener, starter, terms, recipe if packed is None else packed, threads).run(theirs)
    except BaseException as error:
        with contextlib.suppress(OSError):
            theirs.send(json.dumps({"failed": explained(error)[:1000]}).encode())
        traceback.print_exc()
        sys.stderr.flush()
    finally:
        os._exit(0)


def reap() -> None:
    """Takes notice of supervisors that have ended."""
    for pid in [*started]:
        try:
            over = os.waitpid(pid, os.WNOHANG)[0] == pid
        except ChildProcessError:
            over = True
        if over:
            started.remove(pid)


def _fork() -> int:
    """`os.fork`, after which the program's handlers of signals run: Python drops what one raises within it.

    The child has none of them. They are for the program, although a launcher may send signals to all processes.
    """
    came: list[int] = []

    def deliver() -> None:
        for each in reversed(came):
            back.callback(signal.raise_signal, each)  # all, whatever the first one's handler raises

    with contextlib.ExitStack() as back:
        if threading.current_thread() is threading.main_thread():  # the one in which handlers run
            back.callback(deliver)
            for each in signal.valid_signals():
                if callable(handler := signal.getsignal(each)):
                    back.callback(signal.signal, each, handler)
                    signal.signal(each, lambda number, _: came.append(number))
        if pid := fork():
            started.append(pid)  # whatever a handler raises
        else:
            back.pop_all()
    if pid:
        return pid
    for each in signal.valid_signals():
        if callable(signal.getsignal(each)):
            signal.signal(each, signal.SIG_IGN)
    for each in (signal.SIGTERM, signal.SIGCHLD):
        signal.signal(each, signal.SIG_DFL)
    return 0


def _become(title: str, keep: Iterable[int]) -> None:
    """Names this process. Gives up a terminal as its input, and its sockets and pipes but those to `keep` and output.

    What is at the other end must notice when the process that they are of has closed them, or ended. Files stay open,
    since the dataset may read them. The numbers stay taken: an object of the parent may close its own once more.
    """
    fresh.name_process(title)
    kept = {1, 2, *keep}
    for fd in map(int, os.listdir("/proc/self/fd")):
        with contextlib.suppress(OSError):
            if fd not in kept and (is_pipe_or_socket(fd) or (fd == 0 and os.isatty(fd))):
                point_at_dev_null(fd)


class _Supervisor:
    def __init__(
        self,
        name: str,
        listener: socket.socket,
        starter: int,
        terms: dict[str, Any],
        recipe: Recipe | int,
        threads: int,
    ) -> None:
        """`recipe`: or a descriptor of it, for servers that are new programs; `threads`: of the process that began."""
        self._listener, self._starter, self._terms, self._recipe = listener, starter, terms, recipe
        # The servers' own names: an earlier supervisor of this name may have ended before its servers.
        servers_name = f"{name} {secrets.token_hex(8)}"
        self._welcome = {"name": servers_name, "terms": terms, "threads": threads}
        self._doors: list[socket.socket] = []
        for number in range(terms["servers"]):
            door = listen(server_name(servers_name, number))
            assert door is not None, "the name has a random part"
            self._doors.append(door)
        self._current_fd = shared_memory(8 * terms["servers"])
        self._current = memoryview(make_above_streams(lambda: mmap.mmap(self._current_fd, 0))).cast("q")
        """By server: the id that it has asked the dataset for, or -1."""
        self._servers: dict[int, tuple[int, int]] = {}
        """By pidfd: process and number."""
        self._readers: dict[int, socket.socket] = {}
        self._poll = select.poll()
        self._poll.register(listener, select.POLLIN)
        self._poll.register(starter, select.POLLIN)

    def run(self, first: socket.socket) -> None:
        """Returns when the last reader has gone."""
        self._add(first)
        for number in range(len(self._doors)):
            self._fork(number)
        listening = self._listener.fileno()
        while self._readers:
            ready, newcomer = self._ready(), None
            if listening in ready:
                newcomer = accept(self._listener)
                # Nobody may be let in by the servers of readers who have gone before. `poll` looks at one connection
                # after the other, so their ends may have come after its look.
                ready |= self._ready(0)
            for fd in ready - {listening}:
                if fd in self._servers:
                    self._replace(fd)
                elif fd in self._readers:
                    self._hear(self._readers[fd])
                elif fd == self._starter:
                    self._poll.unregister(fd)
                    release_output()
            if newcomer is not None and self._readers:
                self._add(newcomer)
        self._listener.close()
        for pid, _ in self._servers.values():
            os.kill(pid, signal.SIGKILL)
        for pid, _ in self._servers.values():
            os.waitpid(pid, 0)  # not every container has a first process that does it

    def _ready(self, milliseconds: int | None = None) -> set[int]:
        return {fd for fd, _ in self._poll.poll(milliseconds)}

    def _add(self, connection: socket.socket) -> None:
        self._readers[connection.fileno()] = connection
        self._poll.register(connection, select.POLLIN)

    def _hear(self, connection: socket.socket) -> None:
        """A reader has asked something, or gone."""
        try:
            message, _ = next_message(connection)
            answer = {"where": self._where()} if message == WHERE else self._welcome
            with contextlib.suppress(BlockingIOError):  # it has not read what it was told of servers that died
                connection.send(json.dumps(answer).encode(), socket.MSG_DONTWAIT)
        except OSError:
            del self._readers[connection.fileno()]
            self._poll.unregister(connection)
            connection.close()

    def _where(self) -> dict[int, tuple[int, int]]:
        """By server: its process, and the id that it has asked the dataset for, or -1."""
        return {number: (pid, self._current[number]) for pid, number in self._servers.values()}

    def _fork(self, number: int) -> None:
        parent, self._current[number] = os.getpid(), -1
        if pid := fork():
            pidfd = above_streams(os.pidfd_open(pid))
            self._servers[pidfd] = pid, number
            self._poll.register(pidfd, select.POLLIN)
            return
        try:
            ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)
            if os.getppid() == parent:
                door = self._doors[number]
                _become(f"data server {number}", keep=(door.fileno(),))
                if isinstance(self._recipe, int):
                    fresh.become_server(number, self._recipe, door.fileno(), self._starter, self._current_fd)
                current = self._current[number : number + 1]
                Server(self._recipe, door, self._starter, current).run()
        except BaseException:
            traceback.print_exc()
            sys.stderr.flush()
        finally:
            os._exit(1)

    def _replace(self, pidfd: int) -> None:
        """A server has died. Its readers come again to the same door."""
        pid, number = self._servers.pop(pidfd)
        self._poll.unregister(pidfd)
        os.close(pidfd)
        _, status = os.waitpid(pid, 0)
        how, current = _how(status), self._current[number]
        how += f", in dataset[{current}]" if current >= 0 else ""
        for connection in self._readers.values():
            with contextlib.suppress(OSError):
                connection.send(json.dumps({"died": (number, how)}).encode(), socket.MSG_DONTWAIT)
        self._fork(number)


def server_name(welcomed: str, number: int) -> str:
    return f"{welcomed} {number}"


def _how(status: int) -> str:
    code = os.waitstatus_to_exitcode(status)
    return f"by {signal.Signals(-code).name}" if code < 0 else f"with exit code {code}"
