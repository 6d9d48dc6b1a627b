"""`Listener`: the door of a process with servers, and the thread that accepts connections and reads their messages."""

from __future__ import annotations

import contextlib
import logging
import os
import secrets
import selectors
import socket
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, Protocol

from ringreduce.common.descriptors import above_streams, make_above_streams
from ringreduce.common.system import WANTS, explained, start
from ringreduce.errors import RingReduceError, SystemFailure
from ringreduce.network.listener import Door
from ringreduce.network.local import check_user, close_all
from ringreduce.parameter_server import control
from ringreduce.parameter_server.doors import GROUP
from ringreduce.parameter_server.server.shard import Shard

_LOOK = 0.01
"""Seconds until the thread looks again for messages when it cannot let a connection in yet."""
_MOST_UNAUTHENTICATED = 64
"""The most connections that have not proved themselves yet. If there are more, the oldest is closed."""
_PATIENCE = 1.0
"""A connection has at least this many seconds to prove itself."""

log = logging.getLogger(__name__)


class Process(Protocol):
    """What the listener's thread calls."""

    on_change: Callable[[], None]  # called when a server or a backup has ended

    def answer(
        self, connection: Connection, message: dict[str, Any], descriptors: list[int]
    ) -> tuple[dict[str, Any], list[int]]:
        """Returns an answer and descriptors that go with it. To end the connection, raises `OSError`."""

    def has_ended(self, connection: Connection) -> None:
        """Called before a connection that the other side has ended is forgotten."""


@dataclass(eq=False)
class Connection:
    socket: socket.socket  # for control messages
    nonce: bytes = b""
    data: DataConnections | None = None  # set if the other side is on another host
    shard: Shard | None = None  # the server or backup here that it belongs to
    worker: int = -1  # -1: it is not a worker's, or that has not said yet who it is
    name: str = ""  # the worker's name in messages
    is_reader: bool = False
    is_partner: bool = False  # whether the other side is a server with a backup here, or the backup of a server here
    meaning: str = ""  # for a partner: what is logged when it ends; "" if nothing is
    since: float = field(default_factory=time.monotonic)

    @property
    def is_unauthenticated(self) -> bool:
        """Whether the other side is to prove that it knows the secret. Another host's has, before it gets here."""
        return self.worker < 0 and self.data is None and not self.is_partner


@dataclass
class DataConnections:
    """The further connections of a worker or server on another host."""

    take: Callable[[int, str], None] | None = None
    """Takes a connection (descriptor and path); set when the other side has joined."""
    sockets: list[tuple[int, str]] = field(default_factory=list)  # connections that have arrived before that
    arriving: control.Arriving = field(default_factory=control.Arriving)


def name_in(hello: dict[str, Any]) -> str:
    """Returns the name of a worker in messages."""
    return f"{hello['host']}, pid {int(hello['pid'])}"


def _tell_shortage(error: Exception, what: str = "") -> None:
    """In the log, if this process has run out of something; otherwise the other end is the reason."""
    if isinstance(error, OSError) and error.errno in WANTS:
        log.warning("the door of process %d%s: %s", os.getpid(), what, explained(error))


class Listener:
    """Accepts connections until `close`. Connections of partners, and of other hosts, are handed to its thread."""

    def __init__(self, process: Process) -> None:
        self._process = process
        self._unix = above_streams(socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET))
        self._unix.bind("")  # the kernel picks a free abstract address
        self._unix.listen(128)
        self.address: bytes = self._unix.getsockname()
        self._wake, self._woken = map(above_streams, socket.socketpair())
        self._wake.setblocking(False)  # a byte that is there already wakes the thread as well
        self.changed = threading.Condition()  # notified when a connection is forgotten
        self._connections: dict[int, Connection] = {}
        self._arrived: list[Connection] = []  # new connections that the thread has not taken over yet
        self._door: Door | None = None
        self._dialers: dict[int, DataConnections] = {}
        self.is_closing = False
        self._thread = threading.Thread(target=self._run, name="ringreduce door", daemon=True)
        start(self._thread)

    def open(self, door: Door, number: int, secret: bytes, dead_after: int) -> None:
        """Opens `door` for workers and servers on other hosts."""
        self._door = door
        door.open(number, GROUP, secret, None, self._arrive, dead_after=dead_after)

    def addresses(self) -> list[str]:
        """Returns where `open` has opened a door."""
        return [] if self._door is None else [str(address) for address in self._door.addresses]

    def adopt(self, connection: Connection) -> None:
        """Hands a connection to the thread."""
        connection.socket.settimeout(1.0)
        with contextlib.suppress(BlockingIOError, BrokenPipeError), self.changed:  # it is awake, or at its end
            self._arrived.append(connection)
            try:
                self._wake.send(b"a")
            except OSError as error:
                _tell_shortage(error)
                raise

    def _arrive(self, number: int, descriptor: int, path: str) -> None:
        """Takes a connection from another host. The first one of each dialer is for control messages."""
        with self.changed:
            if number not in self._dialers:
                self._dialers[number] = DataConnections()
                return self.adopt(Connection(socket.socket(fileno=descriptor), data=self._dialers[number]))
            data = self._dialers[number]
            if data.take is None:
                data.sockets.append((descriptor, path))
            else:
                data.take(descriptor, path)

    def hand_over(self, data: DataConnections, take: Callable[[int, str], None]) -> None:
        """Passes the connections for data, also those that arrive later, to `take`."""
        with self.changed:
            data.take = take
            sockets, data.sockets = data.sockets, []
        for descriptor, path in sockets:
            take(descriptor, path)

    def all(self) -> list[Connection]:
        return [*list(self._connections.values()), *self._arrived]

    def partners(self, shard: Shard) -> list[Connection]:
        with self.changed:
            return [each for each in self.all() if each.is_partner and each.shard is shard]

    def shut(self, shard: Shard) -> None:
        """Ends the connections of a server or backup here."""
        for connection in [each for each in list(self._connections.values()) if each.shard is shard]:
            with contextlib.suppress(OSError):  # it may have gone
                connection.socket.shutdown(socket.SHUT_RDWR)

    def close_in_child(self) -> None:
        """Closes a forked child's copies of sockets: others must notice the end of the parent before the child's."""
        for end in (self._wake, self._woken, self._unix, *(each.socket for each in self._connections.values())):
            end.close()

    def stop(self) -> None:
        """Ends the thread and all connections. The addresses stay, so others see that this process is there."""
        self.is_closing = True
        self._wake.shutdown(socket.SHUT_WR)  # which wakes the thread, and needs no memory
        self._thread.join()

    def close(self) -> None:
        """Gives up the addresses, after `stop`."""
        vars(self).pop("_process", None)  # otherwise a circle would keep its servers alive
        if self._door is not None:
            self._door.close()
        for data in self._dialers.values():  # of those whose first connection has not been registered
            close_all(descriptor for descriptor, _ in data.sockets)
            data.sockets.clear()
        for end in (self._wake, self._woken, *(each.socket for each in self._arrived), self._unix):
            end.close()

    def _run(self) -> None:
        with make_above_streams(selectors.DefaultSelector) as selector:
            selector.register(self._unix, selectors.EVENT_READ)
            selector.register(self._woken, selectors.EVENT_READ)
            while True:
                # Accepting comes last, since letting one in may close the connection of another.
                for key, _ in sorted(selector.select(), key=lambda ready: ready[0].fileobj is self._unix):
                    if key.fileobj is self._woken:
                        self._woken.recv(4096)
                        with self.changed:
                            arrived, self._arrived = self._arrived, []
                        self._register(selector, arrived)
                        if self.is_closing:
                            for connection in list(self._connections.values()):
                                self._forget(connection)
                            return
                    elif key.fileobj is self._unix:
                        self._accept(selector)
                    else:
                        try:
                            self._serve(selector, key.data)
                        except MemoryError as error:  # it is tried again, since the connection stays ready
                            log.warning("the door of process %d: %s", os.getpid(), error)
                            time.sleep(0.05)

    def _accept(self, selector: selectors.BaseSelector) -> None:
        waiting = [each for each in self._connections.values() if each.is_unauthenticated]
        if len(waiting) >= _MOST_UNAUTHENTICATED:
            if time.monotonic() < waiting[0].since + _PATIENCE:
                return time.sleep(_LOOK)  # the next round of the loop serves those that have said something meanwhile
            selector.unregister(waiting[0].socket)
            self._forget(waiting[0])
        try:
            accepted = above_streams(self._unix.accept()[0])
        except OSError as error:  # no descriptors are left, say: whoever connects waits until there are some
            log.warning("the door of process %d: %s", os.getpid(), error)
            time.sleep(0.05)
            return
        accepted.settimeout(1.0)
        connection = Connection(accepted, secrets.token_bytes(control.NONCE))
        try:
            check_user(accepted)
            accepted.send(connection.nonce)
        except OSError as error:
            accepted.close()
            _tell_shortage(error)
            return
        self._register(selector, [connection])

    def _register(self, selector: selectors.BaseSelector, connections: list[Connection]) -> None:
        for each in connections:
            self._connections[each.socket.fileno()] = each
            selector.register(each.socket, selectors.EVENT_READ, each)

    def _serve(self, selector: selectors.BaseSelector, connection: Connection) -> None:
        try:
            if connection.is_partner:
                control.receive(connection.socket)  # the only message of a partner is "quietly"
                connection.meaning = ""
                if connection.shard is not None:
                    connection.shard.takes_over_quietly = True
                self._process.on_change()
            elif connection.data is None:
                self._respond(connection, *control.receive(connection.socket))
            else:
                with contextlib.suppress(BlockingIOError):
                    for message in connection.data.arriving.take(connection.socket):
                        self._respond(connection, message, [])
        except (OSError, RingReduceError) as error:
            _tell_shortage(error, " ends a connection")
            self._process.has_ended(connection)
            selector.unregister(connection.socket)
            self._forget(connection)
            if connection.is_partner:
                self._process.on_change()

    def _respond(self, connection: Connection, message: dict[str, Any], descriptors: list[int]) -> None:
        answer, given = self._process.answer(connection, message, descriptors)
        # The number lets the worker recognise an answer to a question that it has given up.
        number = {"number": message["number"]} if "number" in message else {}
        try:
            control.send(connection.socket, answer | number, given)
        except SystemFailure as error:  # the answer is too long, which is no reason to end the connection
            control.send(connection.socket, {"error": ["SystemFailure", str(error)]} | number)
        finally:
            close_all(given)

    def _forget(self, connection: Connection) -> None:
        with self.changed:
            del self._connections[connection.socket.fileno()]
            if connection.data is not None:  # nobody will take over its connections
                close_all(descriptor for descriptor, _ in connection.data.sockets)
                connection.data.sockets, connection.data.take = [], lambda descriptor, path: os.close(descriptor)
            self.changed.notify_all()
        connection.socket.close()
