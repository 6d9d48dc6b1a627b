"""How a Loader reaches the supervisor of its name and the servers that the supervisor keeps."""

from __future__ import annotations

import contextlib
import json
import mmap
import os
import socket
import struct
import threading
import time
from typing import Any

import numpy as np

from ringreduce.common.descriptors import make_above_streams
from ringreduce.common.failures import InvalidArgument, SystemFailure
from ringreduce.common.system import explained
from ringreduce.data import supervisor
from ringreduce.data.batches import Memory
from ringreduce.data.messages import FILLED, LONGEST, WELCOME, Filled, connect, listen, next_message
from ringreduce.data.server import Recipe

LONGEST_WAIT = 0.5
"""Seconds in one system call, after which a reader looks whether its time is over or the Loader closed."""


class Connection:
    """A connection to a server, and the slots of it that this process has mapped."""

    def __init__(self, connection: socket.socket) -> None:
        self.socket = connection
        self._slots: dict[int, Memory] = {}

    def next(self) -> tuple[int, Filled, Memory | None]:
        """The number of a request, and its batch; without its memory if that was lost, as after an error.

        Raises `BlockingIOError` if there is none for long, and other `OSError`s.
        """
        message, fds = next_message(self.socket)
        request, *where = FILLED.unpack(message)
        filled = Filled(*where)
        for fd in fds:
            try:
                self._slots[filled.slot] = _mapped(fd, filled.bytes)
            finally:
                os.close(fd)
        return request, filled, self._slots.get(filled.slot)


def _mapped(fd: int, size: int) -> Memory:
    return np.frombuffer(make_above_streams(lambda: mmap.mmap(fd, size)), np.uint8)


class Connections:
    """A reader's connections. Where one is broken, calls raise `OSError`."""

    def __init__(self, name: str, full_name: str, terms: dict[str, Any], recipe: Recipe, timeout: float) -> None:
        """`name`: for messages; `full_name`: under which the supervisor listens; `terms`: see `supervisor.start`."""
        self._name, self._full_name, self._terms, self._recipe, self._timeout = name, full_name, terms, recipe, timeout
        self.supervisor: socket.socket | None = None
        self.threads = 1
        """Of the process that the servers were forked from."""
        self._servers: list[Connection | None] = [None] * terms["servers"]

    def to(self, number: int) -> Connection:
        if (server := self._servers[number]) is None:
            raise ConnectionError
        return server

    def release(self, number: int) -> socket.socket | None:
        """Leaves the connection to a server to the caller."""
        server, self._servers[number] = self._servers[number], None
        return server.socket if server else None

    def join(self, end: float) -> None:
        """Connects to the supervisor and to its servers. Starts the supervisor if there is none.

        Raises `SystemFailure`, and `InvalidArgument` if the others of this name differ.
        """
        try:
            while not self._has_joined(end):
                if time.monotonic() >= end:
                    raise TimeoutError(f"none was there for timeout={self._timeout:g} s")
                time.sleep(0.001)
        except OSError as error:
            self.close()
            raise SystemFailure(
                f"Loader {self._name}: cannot start or reach servers={len(self._servers)}: {explained(error)}"
            ) from None

    def replace(self, number: int) -> bool:
        """Connects to the server that replaces number `number`; False: all have gone, or are about to."""
        try:
            connection = connect(supervisor.server_name(self._servers_name, number))
        except OSError as error:
            raise SystemFailure(f"Loader.get: cannot connect to server {number}: {explained(error)}") from None
        if connection is None:
            return False
        if old := self.release(number):
            old.close()
        self._servers[number] = self._of_server(connection)
        return True

    def ask_supervisor(self, what: str, question: bytes = b"") -> Any:
        """The next thing of this kind that it says, or None."""
        with contextlib.suppress(OSError):
            if self.supervisor and question:
                self.supervisor.send(question)
            while self.supervisor and (message := self.supervisor.recv(LONGEST)):
                if what in (said := json.loads(message)):
                    return said[what]
        return None

    def close(self) -> None:
        for number in range(len(self._servers)):
            if server := self.release(number):
                server.close()
        if self.supervisor is not None:
            self.supervisor.close()
            self.supervisor = None

    def _has_joined(self, end: float) -> bool:
        """False if the supervisor ends just now, or another process starts one."""
        supervisor.reap()
        connection = connect(self._full_name)
        if is_new := connection is None:
            if (listener := listen(self._full_name)) is None:
                return False
            connection = supervisor.start(self._full_name, listener, self._terms, self._recipe)
        connection.settimeout(min(max(0.05, end - time.monotonic()), threading.TIMEOUT_MAX))
        try:
            with contextlib.suppress(ConnectionError):  # of one that has ended, and may have said why
                connection.send(WELCOME)
            welcome = _welcome(connection)
        except OSError as error:
            connection.close()
            if not isinstance(error, ConnectionError):
                raise
            if is_new:  # it had this reader
                raise OSError(
                    "their supervisor was killed, or had no memory to answer; free memory, or start fewer processes on "
                    "this host"
                ) from None
            return False  # its last reader has gone
        for what, theirs in welcome["terms"].items():
            if self._terms[what] != theirs:
                connection.close()
                raise InvalidArgument(
                    f"Loader: {what} is {self._terms[what]}, and a Loader {self._name} on this host has {theirs}; give "
                    "this one another name"
                )
        connection.settimeout(0.5)  # longer than the supervisor takes to see a server's end
        self.supervisor, self._servers_name = connection, welcome["name"]
        self.threads = welcome["threads"]
        for number in range(len(self._servers)):
            found = connect(supervisor.server_name(self._servers_name, number))
            if found is None:
                self.close()
                return False
            self._servers[number] = self._of_server(found)
        return True

    def _of_server(self, connection: socket.socket) -> Connection:
        seconds = struct.pack("ll", 0, int(1e6 * min(LONGEST_WAIT, max(0.05, self._timeout / 20))))
        connection.setsockopt(socket.SOL_SOCKET, socket.SO_RCVTIMEO, seconds)
        connection.setsockopt(socket.SOL_SOCKET, socket.SO_SNDTIMEO, seconds)
        return Connection(connection)


def _welcome(connection: socket.socket) -> dict[str, Any]:
    """What a supervisor tells a new reader: its terms, and its servers' name.

    Raises `OSError` if it could not start them.
    """
    while True:
        said: dict[str, Any] = json.loads(next_message(connection)[0])
        if "failed" in said:
            raise OSError(said["failed"])
        if "terms" in said:
            return said
        # a server died before this reader was heard
