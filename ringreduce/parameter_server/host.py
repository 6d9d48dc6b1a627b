"""A server's door: the thread that lets workers in and answers what they ask beside the data."""

from __future__ import annotations

import contextlib
import logging
import os
import selectors
import socket
import threading
import time
from dataclasses import dataclass, field
from typing import Any

from ringreduce.errors import InvalidArgument, RingReduceError
from ringreduce.parameter_server import control
from ringreduce.parameter_server.shard import Shard
from ringreduce.parameter_server.updates import Function
from ringreduce.rendezvous.host import check_user, own_pidfd
from ringreduce.rendezvous.links import Door

GROUP = "parameter server"
"""What the doors between hosts call it."""
_WRITING = 60.0
"""Seconds in which a snapshot may be finished when its server ends. After that it is absent."""
OBSERVERS = "observers"
"""The group of those that only look: a server does not count them as its workers."""
_MOST_STRANGERS = 64
"""Connections that have not proved themselves yet."""

log = logging.getLogger(__name__)


@dataclass
class _Visitor:
    connection: socket.socket
    nonce: bytes = b""
    worker: int = -1  # -1: has not said who it is
    far: _Far | None = None
    shard: Shard | None = None
    """Whose worker it is."""
    partner: str = ""
    """What its end means, if it is a server with a backup here, or the backup of the server here."""


@dataclass
class _Far:
    """A worker of another host, of which the door between hosts knows who it is."""

    worker: int
    joined: bool = False
    sockets: list[tuple[int, str]] = field(default_factory=list)
    """That came before it has joined: descriptor and path."""
    arriving: control.Arriving = field(default_factory=control.Arriving)


class Host:
    """The servers in this process, their threads in C++, and their door: a server, and backups of others."""

    def __init__(self, capacity: int, secret: bytes, functions: dict[str, Function]) -> None:
        self._functions = functions
        self._shard = Shard(capacity, functions)
        self._backups: dict[int, Shard] = {}
        """By the number of the server that they are backups of."""
        self._secret = secret
        self._names: dict[int, tuple[str, int]] = {}
        self._observers: set[int] = set()
        self._begun, self._served = time.monotonic(), False
        self._listener = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        self._listener.bind("")  # the kernel picks a free abstract address
        self._listener.listen(128)
        self.address: bytes = self._listener.getsockname()
        self._wake, self._woken = socket.socketpair()
        self._wake.setblocking(False)  # a byte that is there already wakes the thread as well
        self._left = threading.Condition()
        self._visitors: dict[int, _Visitor] = {}
        self._door: Door | None = None
        self._servers, self._window = 0, 0
        self._far: dict[int, _Far] = {}
        self._arrived: list[_Visitor] = []
        """From other hosts, for the thread."""
        self._closing = False
        self._thread = threading.Thread(target=self._run, name="ringreduce door", daemon=True)
        self._thread.start()

    @property
    def server(self) -> Any:
        """This process's own, in C++."""
        return self._shard.server

    def _shards(self) -> list[Shard]:
        return [self._shard, *list(self._backups.values())]

    def have_backup(self, number: int, address: bytes, name: str, timeout: float) -> None:
        """Has the server whose door is at `address` keep a backup of this one, which is server `number`.

        Before workers join. Raises `OSError` if it does not work.
        """
        journal, pidfd = self.server.journal(), own_pidfd()
        try:
            hello = {"worker": number, "backup": True, "capacity": self.server.capacity}
            given = [journal, self.server.bell, self.server.values, pidfd]
            connection, _, (bell, values, its) = _enter(address, self._secret, hello, given, timeout)
            self.server.lead(journal=os.dup(journal), bell=bell, values=values, pidfd=its)
        finally:
            os.close(journal)
            os.close(pidfd)
        connection.settimeout(1.0)
        meaning = f"{name} has ended: server {number} goes on without a backup"
        with self._left:
            self._arrived.append(_Visitor(connection, shard=self._shard, partner=meaning))
        with contextlib.suppress(BlockingIOError):
            self._wake.send(b"a")

    def listen(self, door: Door, number: int, servers: int, window: int, dead_after: int) -> None:
        """From here on workers of other hosts are let in, by `door`: each with at most `window` bytes under way.

        At doors, server s is number s, and worker w is number `servers` + w.
        """
        self._door, self._servers, self._window = door, servers, window
        door.open(number, GROUP, self._secret, None, self._arrive, dead_after=dead_after)

    def _arrive(self, number: int, descriptor: int, path: str) -> None:
        """A connection of a worker of another host. The first of its connections is for control messages."""
        worker = number - self._servers
        with contextlib.suppress(BlockingIOError), self._left:
            if worker not in self._far:
                self._far[worker] = far = _Far(worker)
                connection = socket.socket(fileno=descriptor)
                connection.settimeout(1.0)
                self._arrived.append(_Visitor(connection, far=far))
                self._wake.send(b"a")
            elif not self._far[worker].joined:
                self._far[worker].sockets.append((descriptor, path))
            else:
                self.server.connect(worker, descriptor, path)

    def close_in_child(self) -> None:
        """In a forked process, which has copies of the parent's sockets: nobody is to wait for the child to end."""
        for end in (self._wake, self._woken, self._listener):
            end.close()
        for visitor in self._visitors.values():
            visitor.connection.close()

    def close(self) -> None:
        """Ends both threads; workers that still need this server see it end."""
        if not self._thread.is_alive():
            return
        if self._door is not None:
            self._door.close()
        self._closing = True
        with contextlib.suppress(BlockingIOError):
            self._wake.send(b"x")
        self._thread.join()
        for shard in self._shards():
            for saving in list(shard.savings.values())[-1:]:  # earlier ones have ended
                saving.done.wait(_WRITING)
            shard.server.stop()
        for end in (self._wake, self._woken, self._listener):
            end.close()

    def statistics(self) -> dict[str, Any]:
        """What `KeyValue.stats` says of this process's own server."""
        return self._statistics(self._shard)

    def _statistics(self, shard: Shard) -> dict[str, Any]:
        found = shard.server.statistics()
        found["waits_for"] = [self._describe(worker) for worker in sorted(found["waits_for"])]
        clocks = sorted((worker, clock) for worker, clock in found["clocks"].items() if worker not in self._observers)
        found["clocks"] = {self._describe(worker): clock for worker, clock in clocks}
        return found | {"seconds": round(time.monotonic() - self._begun, 3)}

    def serving(self, number: int) -> dict[int, Shard]:
        """What is served here, by the server's number: this process's own, `number`, and backups that took over."""
        took_over = {other: shard for other, shard in list(self._backups.items()) if shard.server.serves}
        return {number: self._shard} | took_over

    def wait_until_left(self, timeout: float) -> list[str]:
        """Waits until all workers have gone; returns who has not. Nobody waits for a reader."""
        with self._left:
            self._left.wait_for(lambda: not self._workers(), timeout)
            return [self._describe(v.worker) for v in self._workers()]

    def wait_until_served(self, timeout: float | None) -> bool:
        """Waits until workers have come and all have gone; returns whether it is so."""
        with self._left:
            return self._left.wait_for(lambda: self._served and not self._workers(), timeout)

    def _inside(self) -> list[_Visitor]:
        return [visitor for visitor in list(self._visitors.values()) if visitor.worker >= 0]

    def _workers(self) -> list[_Visitor]:
        return [visitor for visitor in self._inside() if visitor.worker not in self._observers]

    def _describe(self, worker: int) -> str:
        host, pid = self._names.get(worker, ("?", 0))
        return f"worker {worker} ({host}, pid {pid})"

    def _run(self) -> None:
        with selectors.DefaultSelector() as selector:
            selector.register(self._listener, selectors.EVENT_READ)
            selector.register(self._woken, selectors.EVENT_READ)
            while True:
                for key, _ in selector.select():
                    if key.fileobj is self._woken:
                        self._woken.recv(4096)
                        self._greet(selector)
                        if self._closing:
                            for visitor in list(self._visitors.values()):
                                self._forget(visitor)
                            return
                    elif key.fileobj is self._listener:
                        self._admit(selector)
                    else:
                        self._serve(selector, key.data)

    def _admit(self, selector: selectors.BaseSelector) -> None:
        connection, _ = self._listener.accept()
        connection.settimeout(1.0)
        visitor = _Visitor(connection, control.new_nonce())
        try:
            check_user(connection)
            if len(self._visitors) - len(self._inside()) >= _MOST_STRANGERS:
                raise ConnectionError("too many have connected and said nothing")
            connection.send(visitor.nonce)
        except OSError:
            connection.close()
            return
        self._visitors[connection.fileno()] = visitor
        selector.register(connection, selectors.EVENT_READ, visitor)

    def _greet(self, selector: selectors.BaseSelector) -> None:
        with self._left:
            arrived, self._arrived = self._arrived, []
        for visitor in arrived:
            self._visitors[visitor.connection.fileno()] = visitor
            selector.register(visitor.connection, selectors.EVENT_READ, visitor)

    def _serve(self, selector: selectors.BaseSelector, visitor: _Visitor) -> None:
        try:
            if visitor.far is None:
                self._respond(visitor, *control.receive(visitor.connection))
                return
            with contextlib.suppress(BlockingIOError):
                for message in visitor.far.arriving.take(visitor.connection):
                    self._respond(visitor, message, [])
        except (OSError, RingReduceError):
            selector.unregister(visitor.connection)
            if visitor.partner and any(other.shard is visitor.shard for other in self._workers()):
                log.warning("%s", visitor.partner)
            if visitor.worker >= 0 and visitor.shard is not None:
                visitor.shard.server.lose(visitor.worker)  # no loss if it has left
            self._forget(visitor)

    def _respond(self, visitor: _Visitor, message: dict[str, Any], descriptors: list[int]) -> None:
        answer, given = self._answer(visitor, message, descriptors)
        if "number" in message:  # so that the answer to a question that was given up is known for one
            answer["number"] = message["number"]
        try:
            control.send(visitor.connection, answer, given)
        finally:
            for descriptor in given:
                os.close(descriptor)

    def _forget(self, visitor: _Visitor) -> None:
        with self._left:
            del self._visitors[visitor.connection.fileno()]
            for descriptor, _ in visitor.far.sockets if visitor.far else ():
                os.close(descriptor)
            self._left.notify_all()
        visitor.connection.close()

    def _answer(
        self, visitor: _Visitor, message: dict[str, Any], descriptors: list[int]
    ) -> tuple[dict[str, Any], list[int]]:
        try:
            if visitor.worker < 0 and visitor.far is not None:
                return self._welcome_far(visitor, visitor.far, message), []
            if visitor.worker < 0:
                return self._welcome(visitor, message, descriptors)
            return self._asked(visitor.shard or self._shard, message), []
        except RingReduceError as error:
            return {"error": [type(error).__name__, str(error)]}, []
        except OSError:
            raise
        except Exception as error:  # whatever a message does, the next one is answered
            return {"error": ["InvalidArgument", f"a message that says nothing known: {error!r}"]}, []
        finally:
            for descriptor in descriptors:
                os.close(descriptor)

    def _welcome(
        self, visitor: _Visitor, hello: dict[str, Any], descriptors: list[int]
    ) -> tuple[dict[str, Any], list[int]]:
        worker = int(hello["worker"])
        if not control.same(control.proof(self._secret, "worker", visitor.nonce, worker), hello.get("proof")):
            raise ConnectionError("it does not know the secret")
        proof = {"proof": control.proof(self._secret, "server", bytes.fromhex(hello["nonce"]), worker)}
        if hello.get("backup"):
            shard = self._follow(visitor, worker, int(hello["capacity"]), descriptors)
            return proof, [os.dup(shard.server.bell), os.dup(shard.server.values), own_pidfd()]
        shard = self._backups[int(hello["of"])] if "of" in hello else self._shard
        window, pidfd = descriptors
        shard.server.join(
            id=worker,
            group=str(hello["group"]),
            window=os.dup(window),
            window_bytes=int(hello["window_bytes"]),
            servers=int(hello["servers"]),
            lane=int(hello["lane"]),
            pidfd=os.dup(pidfd),
        )
        visitor.worker, visitor.shard = worker, shard
        self._introduce(worker, hello)
        reply = proof | {"capacity": shard.server.capacity}
        return reply, [os.dup(shard.server.values), os.dup(shard.server.bell), own_pidfd()]

    def _follow(self, visitor: _Visitor, number: int, capacity: int, descriptors: list[int]) -> Shard:
        """Makes the backup of server `number`."""
        if number in self._backups:
            raise InvalidArgument(f"there is a backup of server {number} here already")
        if len(descriptors) != 4:
            raise InvalidArgument(f"a server gave {len(descriptors)} descriptors to its backup; 4 are needed")
        shard = Shard(capacity, self._functions)
        journal, bell, values, pidfd = map(os.dup, descriptors)
        shard.follow(journal=journal, bell=bell, values=values, pidfd=pidfd)
        self._backups[number] = shard
        visitor.shard = shard
        visitor.partner = f"server {number} has ended: its backup, in this process (pid {os.getpid()}), takes over"
        return shard

    def _introduce(self, worker: int, hello: dict[str, Any]) -> None:
        self._names[worker] = str(hello["host"]), int(hello["pid"])
        if hello["group"] == OBSERVERS:
            self._observers.add(worker)
        else:
            self._served = True

    def _welcome_far(self, visitor: _Visitor, far: _Far, hello: dict[str, Any]) -> dict[str, Any]:
        window = int(hello["window"])
        if not 0 < window <= self._window:
            raise InvalidArgument(
                f"the window of a worker of another host has {window} bytes; this server keeps 1 to {self._window}"
            )
        self.server.join_far(id=far.worker, group=str(hello["group"]), window=window)
        visitor.worker, visitor.shard = far.worker, self._shard
        self._introduce(far.worker, hello)
        with self._left:
            far.joined = True
            sockets, far.sockets = far.sockets, []
        for descriptor, path in sockets:
            self.server.connect(far.worker, descriptor, path)
        return {"capacity": self.server.capacity}

    def _asked(self, shard: Shard, message: dict[str, Any]) -> dict[str, Any]:
        if message["ask"] == "serves":
            return {"serves": shard.server.serves}
        shard.check_serving()
        match message["ask"]:
            case "create":
                return {"blocks": shard.create(str(message["key"]), message["blocks"], message["spec"])}
            case "create table":
                return {"block": shard.create_table(str(message["key"]), message["spec"])}
            case "awaited":
                return {"workers": [self._describe(w) for w in shard.server.awaited(int(message["block"]))]}
            case "absent":
                return {"workers": [self._describe(w) for w in shard.server.absent(str(message["group"]))]}
            case "failure":
                return {"text": shard.server.failure(int(message["block"]))}
            case "snapshot":
                shard.save(str(message["folder"]), str(message["part"]))
                return {}
            case "snapshot state":
                saving = shard.savings.get(str(message["folder"]))
                if saving is None:
                    raise InvalidArgument(f"this server does not write the snapshot {message['folder']!r}")
                return {"done": saving.done.is_set(), "fault": saving.error}
            case "statistics":
                return {"statistics": self._statistics(shard)}
        raise InvalidArgument(f"a worker asked for {message['ask']!r}")


def connect(
    address: bytes, secret: bytes, hello: dict[str, Any], window: int, timeout: float
) -> tuple[socket.socket, dict[str, Any], list[int]]:
    """Joins a worker to a server: the connection, what the server says, and its values, bell and pidfd.

    `hello` may have the number of the server "of" which it is the backup. Raises `ConnectionError` or another `OSError`
    if it does not work.
    """
    pidfd = own_pidfd()
    try:
        return _enter(address, secret, hello, [window, pidfd], timeout)
    finally:
        os.close(pidfd)


def _enter(
    address: bytes, secret: bytes, hello: dict[str, Any], given: list[int], timeout: float
) -> tuple[socket.socket, dict[str, Any], list[int]]:
    connection = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    with contextlib.ExitStack() as undo:
        undo.callback(connection.close)
        connection.settimeout(timeout)
        connection.connect(address)
        check_user(connection)
        theirs, ours, worker = connection.recv(control.NONCE), control.new_nonce(), int(hello["worker"])
        proof = control.proof(secret, "worker", theirs, worker)
        control.send(connection, hello | {"nonce": ours.hex(), "proof": proof}, given)
        answer, descriptors = control.receive(connection)
        if "error" in answer:
            raise ConnectionError(answer["error"][1])
        if len(descriptors) != 3 or not control.same(
            control.proof(secret, "server", ours, worker), answer.get("proof")
        ):
            for descriptor in descriptors:
                os.close(descriptor)
            raise ConnectionError("what answered does not know the secret")
        undo.pop_all()
    return connection, answer, descriptors
