"""A worker's questions to servers, as control messages. If a server has ended, they go to the one that took over."""

from __future__ import annotations

import contextlib
import itertools
import os
import select
import socket
import threading
import time
import weakref
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from ringreduce._C import ParameterClient
from ringreduce.common.descriptors import above_streams
from ringreduce.coordination.wait import every, wait_for
from ringreduce.errors import Aborted, CollectiveTimeout, InvalidArgument, ServerLost, SystemFailure
from ringreduce.parameter_server import control, doors
from ringreduce.parameter_server.client.failover import FailoverConnector
from ringreduce.parameter_server.entry import Entry

_LOOK = 0.005
"""Seconds between two questions to a backup whether it has taken over."""


@dataclass
class Joined:
    """A server that has let this worker in, and later the one that took over its blocks."""

    connection: socket.socket  # for control messages
    name: str  # its name in messages
    turn: int  # how many servers have served these blocks before it; if backups are reached by TCP, its replica number


class Questions:
    """Asks questions for one worker, one after the other."""

    def __init__(
        self, entry: Entry, client: ParameterClient, servers: Sequence[Joined], failover: FailoverConnector | None
    ) -> None:
        """`failover` is given if backups are reached by TCP."""
        self.servers = servers
        self._entry, self._client, self._failover = entry, client, failover
        self._numbers = itertools.count()
        self._asking, self._is_asking = threading.RLock(), False
        self._aborted = above_streams(os.eventfd(0, os.EFD_CLOEXEC))  # readable after `abort`
        weakref.finalize(self, os.close, self._aborted)

    def close(self) -> None:
        """Closes all connections."""
        if self._failover is not None:  # first, so that its thread connects to nobody meanwhile
            self._failover.close()
        self._client.close_news()
        for each in self.servers:
            each.connection.close()

    def name_of(self, server: int) -> str:
        """Returns the name of a server, or of the backup that has taken over, in messages."""
        return self.servers[server].name

    def abort(self) -> None:
        """Ends every wait for an answer, now and later, with `Aborted`."""
        os.eventfd_write(self._aborted, 1)

    def check_caller(self) -> None:
        """Raises `InvalidArgument` in a forked child, and in a function that a server calls."""
        self._client.check_caller()

    def ask(self, server: int, question: dict[str, Any], deadline: float) -> dict[str, Any]:
        """Returns the answer of `server` or, if that has ended, of the server that took over its blocks. Raises
        `ServerLost` if there is none, `CollectiveTimeout` after `deadline`, and the error that is the answer."""
        self.check_caller()
        if not self._asking.acquire(timeout=max(0.0, deadline - time.monotonic())):
            raise CollectiveTimeout(f"{self.servers[server].name} was not asked in time: another thread asks", server)
        try:
            if self._is_asking:
                raise InvalidArgument(
                    f"a signal handler asked {self.servers[server].name} while its thread waited for an answer: set a "
                    "flag in the handler, and ask after the call that it has interrupted"
                )
            self._is_asking = True
            try:
                return self._ask(server, question, deadline)
            finally:
                self._is_asking = False
        finally:
            self._asking.release()

    def _ask(self, server: int, question: dict[str, Any], deadline: float) -> dict[str, Any]:
        while True:
            connection, name = self.servers[server].connection, self.servers[server].name
            try:
                connection.settimeout(max(0.01, deadline - time.monotonic()))
                number = next(self._numbers)
                control.send(connection, {**question, "number": number})
                answer = self._receive(connection, deadline)
                while answer.get("number") != number:  # answers to questions that were given up
                    answer = self._receive(connection, deadline)
            except TimeoutError:
                raise CollectiveTimeout(f"{name} did not answer {question['ask']!r} in time", server) from None
            except OSError as error:
                turn = self._turn_to_next if self._failover is None else self._turn_to_replica
                if not turn(server, deadline):
                    raise ServerLost(f"{name} is lost to this worker: {error}", server) from None
                continue
            if "error" in answer:
                kind, text = answer["error"]
                raise (InvalidArgument if kind == "InvalidArgument" else SystemFailure)(f"{name}: {text}", server)
            return answer

    def _receive(self, connection: socket.socket, deadline: float) -> dict[str, Any]:
        """Returns the next message of a server. Raises as `control.receive`, and `Aborted`."""
        poll = select.poll()
        poll.register(connection, select.POLLIN)
        poll.register(self._aborted, select.POLLIN)
        ready = dict(poll.poll(1000 * max(0.01, deadline - time.monotonic())))
        if self._aborted in ready:
            raise Aborted("abort() was called")
        if not ready:
            raise TimeoutError
        return control.receive(connection)[0]

    def _turn_to_next(self, server: int, deadline: float) -> bool:
        """Turns to the server that has taken over the blocks of one that has ended. Returns whether there is one."""
        asked = self.servers[server]
        while True:
            left = max(0.0, deadline - time.monotonic())
            turn, name, address = self._client.served_by(server, asked.turn, timeout=left)
            if turn == asked.turn:
                if name != asked.name:
                    raise CollectiveTimeout(f"{asked.name} has ended, and {name} has not taken over yet", server)
                return False
            asked.turn, asked.name = turn, name
            # The server knows this worker, as it was its backup.
            hello, left = self._entry.hello() | {"of": server, "again": True}, max(0.01, deadline - time.monotonic())
            with contextlib.suppress(OSError):  # the new server has ended as well
                connection, *_ = doors.enter(bytes.fromhex(address), self._entry.secret, hello, [], left)
                asked.connection.close()
                asked.connection = connection
                return True

    def _turn_to_replica(self, server: int, deadline: float) -> bool:
        """The same if backups are reached by TCP. Workers turn to a backup even before it has taken over."""
        assert self._failover is not None
        asked = self.servers[server]
        while replicas := self._client.asks(server):
            if found := self._failover.take(server, replicas[0]):
                asked.connection.close()
                asked.turn = replicas[0]
                asked.connection, asked.name = found
            if found and self._serves(asked.connection, deadline):
                return True
            if time.monotonic() >= deadline:
                raise CollectiveTimeout(f"{asked.name} has ended, and no other one has taken over yet", server)
            time.sleep(_LOOK)
        return False

    def _serves(self, connection: socket.socket, deadline: float) -> bool:
        """Waits until the replica that is asked now serves; returns False if it has ended."""
        number = next(self._numbers)

        def serves() -> bool:
            connection.settimeout(max(0.01, deadline - time.monotonic()))
            control.send(connection, {"ask": "serves", "number": number})
            return bool(self._receive(connection, deadline).get("serves"))

        with contextlib.suppress(OSError):
            return bool(wait_for(serves, every(_LOOK), deadline))
        return False
