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
from typing import TYPE_CHECKING, Any

from ringreduce.errors import Aborted, CollectiveTimeout, InvalidArgument, ServerLost, SystemFailure
from ringreduce.parameter_server import control

if TYPE_CHECKING:
    from ringreduce.parameter_server.key_value import Membership

_LOOK = 0.005
"""Seconds between two questions to a backup whether it has taken over."""


class Questions:
    """Asks questions for one worker, one after the other. Only usable in the process that made it."""

    def __init__(self, membership: Membership) -> None:
        self._with = membership
        self._client = membership.client
        self._pid = os.getpid()
        self._numbers = itertools.count()
        self._asking = threading.Lock()
        self._aborted = os.eventfd(0, os.EFD_CLOEXEC)
        """Readable after `abort`."""
        weakref.finalize(self, os.close, self._aborted)

    def abort(self) -> None:
        """Ends every wait for an answer, now and later, with `Aborted`."""
        os.eventfd_write(self._aborted, 1)

    def check_process(self) -> None:
        """Raises `InvalidArgument` in a forked child."""
        if os.getpid() != self._pid:
            raise InvalidArgument(
                f"worker {self._with.worker} is the process that this one was forked from: call join() here for a "
                "worker of its own"
            )

    def ask(self, server: int, question: dict[str, Any], deadline: float) -> dict[str, Any]:
        """Returns the answer of `server` or, if that has ended, of the server that took over its blocks.

        Raises `ServerLost` if there is none, and `CollectiveTimeout` after `deadline`. If the answer is an error,
        raises `InvalidArgument` or `SystemFailure` with its text.
        """
        self.check_process()
        with self._asking:  # by another thread, so that each gets its own answer
            return self._ask(server, question, deadline)

    def _ask(self, server: int, question: dict[str, Any], deadline: float) -> dict[str, Any]:
        while True:
            connection, name = self._with.connections[server], self._with.names[server]
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
                turn = self._turn_to_next if self._with.attendant is None else self._turn_to_replica
                if not turn(server, deadline):
                    raise ServerLost(f"{name} has ended: {error}", server) from None
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
        while True:
            known = self._with.turns[server]
            turn, name, address = self._client.served_by(server, known, timeout=max(0.0, deadline - time.monotonic()))
            if turn == known:
                if name != self._with.names[server]:
                    raise CollectiveTimeout(
                        f"{self._with.names[server]} has ended, and {name} has not taken over yet", server
                    )
                return False
            self._with.turns[server], self._with.names[server] = turn, name
            with contextlib.suppress(OSError):  # the new server has ended as well
                connection = self._with.reach(server, address, max(0.01, deadline - time.monotonic()))
                self._with.connections[server].close()
                self._with.connections[server] = connection
                return True

    def _turn_to_replica(self, server: int, deadline: float) -> bool:
        """The same if backups are reached by TCP. Workers turn to a backup even before it has taken over."""
        assert self._with.attendant is not None
        while asked := self._client.asks(server):
            if found := self._with.attendant.take(server, asked[0]):
                self._with.connections[server].close()
                self._with.turns[server] = asked[0]
                self._with.connections[server], self._with.names[server] = found
            if found and self._serves(server, deadline):
                return True
            if time.monotonic() >= deadline:
                name = self._with.names[server]
                raise CollectiveTimeout(f"{name} has ended, and no other one has taken over yet", server)
            time.sleep(_LOOK)
        return False

    def _serves(self, server: int, deadline: float) -> bool:
        """Waits until the replica that is asked now serves; returns False if it has ended."""
        with contextlib.suppress(OSError):
            connection, number = self._with.connections[server], next(self._numbers)
            while time.monotonic() < deadline:
                connection.settimeout(max(0.01, deadline - time.monotonic()))
                control.send(connection, {"ask": "serves", "number": number})
                if self._receive(connection, deadline).get("serves"):
                    return True
                time.sleep(_LOOK)
        return False
