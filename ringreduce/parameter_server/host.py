"""A server's door: the thread that lets workers in and answers what they ask beside the data."""

from __future__ import annotations

import contextlib
import logging
import os
import selectors
import socket
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

from ringreduce.errors import Aborted, InvalidArgument, RingReduceError
from ringreduce.membership.directory import Bounded
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
_LOOK = 0.01
"""Seconds between looks for workers that have gone."""
_MOST_STRANGERS = 64
"""Connections that have not proved themselves yet."""
_AGAIN = 0.2
"""Seconds until a store that could not be reached is asked again."""

log = logging.getLogger(__name__)


@dataclass
class _Visitor:
    connection: socket.socket
    nonce: bytes = b""
    worker: int = -1  # -1: has not said who it is
    name: str = ""
    observes: bool = False
    far: _Far | None = None
    shard: Shard | None = None
    """Whose worker it is."""
    is_partner: bool = False
    """It is a server with a backup here, or the backup of a server here."""
    meaning: str = ""
    """What its end means, if it is a partner."""


@dataclass
class _Far:
    """A worker or a server of another host, of which the door between hosts knows who it is."""

    number: int
    take: Callable[[int, str], None] | None = None
    """Takes its connections, once it has joined: descriptor and path."""
    sockets: list[tuple[int, str]] = field(default_factory=list)
    """That came before."""
    arriving: control.Arriving = field(default_factory=control.Arriving)


def number_at_door(servers: int, worker: int, of: int = -1) -> int:
    """What a worker is called at a server's door; or at that of the backup `of` a server. A server is called by its own
    number, below `servers`."""
    return servers + worker * (servers + 1) + of + 1


class Host:
    """The servers in this process, their threads in C++, and their door: servers, and backups of others."""

    def __init__(
        self,
        capacity: int,
        secret: bytes,
        functions: dict[str, Function],
        founds: Sequence[int] = (0,),
        backed_up: bool = False,
    ) -> None:
        """`founds` are the numbers of the servers that begin here, each with room for `capacity` bytes. `backed_up`:
        servers have backups."""
        self._functions, self._backed_up = functions, backed_up
        self.shards = {number: Shard(capacity, functions, backed_up) for number in founds}
        """What is served here and what is the backup of another server, by the server's number."""
        self.is_leaving = False
        self._keeper: Any = None
        self.on_wish: Callable[[int, int], None] = lambda process, has: None
        """Called by it when a process that serves so many would like to serve one more."""
        self.on_change: Callable[[], None] = lambda: None
        """Called by the door's thread when a server or a backup has ended."""
        self._own = next(iter(self.shards.values()), None) or Shard(1 << 12, functions)
        self._secret = secret
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
        self._store: Any = None
        """Where it is decided who serves the blocks of a server that cannot be heard."""
        self.far_backup_at = -1
        """The process with the backup of the server here, if that is reached by TCP."""
        self._closing = False
        self._thread = threading.Thread(target=self._run, name="ringreduce door", daemon=True)
        self._thread.start()

    @property
    def server(self) -> Any:
        """The one that began here, in C++."""
        return self._own.server

    def have_backup(self, number: int, address: bytes, timeout: float) -> None:
        """Has the process whose door is at `address` keep a backup of server `number`, which is served here.

        Raises `OSError` if it does not work, and `InvalidArgument` if there can be none.
        """
        server = self.shards[number].server
        journal, pidfd = server.journal(), own_pidfd()
        ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        try:
            hello = {"worker": number, "backup": True, "capacity": server.capacity}
            given = [journal, server.bell, server.values, pidfd, theirs.fileno()]
            connection, answer, (bell, values, its) = _enter(address, self._secret, hello, given, timeout)
            name = str(answer["name"])
            about: dict[str, Any] = {"capacity": server.capacity, "name": name, "address": address.hex()}
            with contextlib.ExitStack() as undo:
                undo.callback(connection.close)
                server.lead(
                    journal=os.dup(journal), bell=bell, values=values, pidfd=its, passage=os.dup(ours.fileno()), **about
                )
                undo.pop_all()
        finally:
            ours.close()
            theirs.close()
            os.close(journal)
            os.close(pidfd)
        connection.settimeout(1.0)
        meaning = f"{name} has ended: server {number} goes on, and gets another one"
        with self._left:
            for earlier in self._partners(number):
                self._part_quietly(earlier)
            visitor = _Visitor(connection, shard=self.shards[number], is_partner=True, meaning=meaning)
            self._arrived.append(visitor)
        with contextlib.suppress(BlockingIOError):
            self._wake.send(b"a")

    def have_far_backup(self, number: int, its: control.Reached, timeout: float) -> None:
        """The same over connections to the door of the backup's process, which this takes over. Raises `OSError`."""
        shard = self.shards[number]
        with contextlib.closing(its):
            its.control.settimeout(timeout)
            control.send(its.control, {"capacity": shard.server.capacity})
            answer, _ = control.receive(its.control)
            if "error" in answer:
                raise ConnectionError(answer["error"][1])
            shard.server.lead_far(lambda: self._decide_later(shard, number, "server"), str(answer["name"]))
            for descriptor, path in its.take():
                shard.server.connect_partner(descriptor, path)

    def hand_over(self, number: int) -> None:
        """Ends server `number` here, which has a backup: that serves from now on."""
        shard = self.shards[number]
        with self._left:
            for partner in self._partners(number):
                self._part_quietly(partner)
        shard.server.stop()  # first: it must not take the end of its workers' connections for theirs
        self.drop(number, shard)

    def wish_for_server(self, process: int, address: bytes, timeout: float) -> None:
        """Tells the process whose door is at `address` that this one, which is `process`, would serve one of its
        servers. Raises `OSError` if it has ended."""
        hello = {"worker": process, "wish": True, "has": len(self.serving())}
        connection, _, descriptors = _enter(address, self._secret, hello, [], timeout)
        connection.close()
        for descriptor in descriptors:
            os.close(descriptor)

    def drop(self, number: int, shard: Shard) -> None:
        """Forgets a server. Its workers' connections for control messages end here."""
        with self._left:
            if self.shards.get(number) is shard:  # and not a backup that has just been made
                del self.shards[number]
        for visitor in [each for each in list(self._visitors.values()) if each.shard is shard]:
            with contextlib.suppress(OSError):  # it may have gone
                visitor.connection.shutdown(socket.SHUT_RDWR)
        if shard.server.has_ended:
            shard.server.stop()

    def _partners(self, number: int) -> list[_Visitor]:
        visitors = [*list(self._visitors.values()), *self._arrived]
        return [each for each in visitors if each.is_partner and each.shard is self.shards[number]]

    @staticmethod
    def _part_quietly(partner: _Visitor) -> None:
        """What its end means, it is told, is nothing that anybody has to know."""
        partner.meaning = ""
        with contextlib.suppress(OSError):
            control.send(partner.connection, {"tell": "quietly"})

    def is_followed_by_nobody(self, number: int) -> bool:
        """Whether the other one of a server and its backup, of which one is here, has closed its connection."""
        with self._left:
            return not self._partners(number)

    def keep(self, keeper: Any) -> None:
        """Has a `Keeper` see to what is here, until this is closed."""
        self._keeper = keeper

    def give_away(self, timeout: float) -> bool:
        """See `Keeper.give_away`. Servers with backups that are reached by TCP stay where they are."""
        return self._keeper is not None and bool(self._keeper.give_away(timeout))

    @staticmethod
    def is_there(address: bytes) -> bool:
        """Whether there is a process whose door is at `address`."""
        with socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as connection, contextlib.suppress(OSError):
            connection.connect(address)
            return True
        return False

    def listen(self, door: Door, number: int, servers: int, window: int, dead_after: int, store: Any) -> None:
        """From here on workers of other hosts are let in, by `door`: each with at most `window` bytes under way. And
        servers that have their backups here; `store` knows who goes on when one of the two cannot be heard."""
        self._door, self._servers, self._window, self._store = door, servers, window, store
        door.open(number, GROUP, self._secret, None, self._arrive, dead_after=dead_after)

    def _arrive(self, number: int, descriptor: int, path: str) -> None:
        """A connection from another host. The first one from there is for control messages."""
        with contextlib.suppress(BlockingIOError), self._left:
            if number not in self._far:
                self._far[number] = far = _Far(number)
                connection = socket.socket(fileno=descriptor)
                connection.settimeout(1.0)
                self._arrived.append(_Visitor(connection, far=far))
                self._wake.send(b"a")
                return
            far = self._far[number]
            if far.take is None:
                far.sockets.append((descriptor, path))
            else:
                far.take(descriptor, path)

    def _decide_later(self, shard: Shard, number: int, who: str) -> None:
        """Called by a server's thread, which must not wait, when a server and its backup do not hear each other."""
        if not self._closing:
            threading.Thread(target=self._decide, args=(shard, number, who), daemon=True).start()

    def _decide(self, shard: Shard, number: int, who: str) -> None:
        """Who goes on with the blocks of server `number`: the one of "server" and "backup" that sets this first. So
        never both do, and the one that cannot reach the store does not go on."""
        view, directory, warned = f"1 {who}", Bounded(self._store), False
        while not self._closing:
            try:
                found = directory.compare_set(f"view/{number}", "", view)
                break
            except Exception as error:  # of whatever kind of store; it may be reached later
                if not warned:
                    log.warning("server %d and its backup do not hear each other, nor the store: %s", number, error)
                warned = True
                time.sleep(_AGAIN)
        else:
            return
        with contextlib.suppress(RingReduceError):  # it has been stopped
            shard.server.decided(found == view)
        if found == view and not self.has_workers(shard):  # the other one has left, as all have
            return
        here = f"in this process (pid {os.getpid()})"
        if found == view and who == "backup":
            log.warning("server %d has ended or cannot be reached: its backup, %s, takes over", number, here)
        elif found == view:
            log.warning("the backup of server %d has ended or cannot be reached: it goes on without one", number)
        elif who == "backup":
            log.warning("server %d goes on without its backup %s", number, here)
        else:
            log.warning("server %d, %s, has been replaced by its backup, and serves no more", number, here)

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
        self._closing = True
        if self._keeper is not None:
            self._keeper.close()
        if self._door is not None:
            self._door.close()
        with contextlib.suppress(BlockingIOError):
            self._wake.send(b"x")
        self._thread.join()
        for shard in list(self.shards.values()):
            for saving in list(shard.savings.values())[-1:]:  # earlier ones have ended
                saving.done.wait(_WRITING)
            shard.server.stop()
        for end in (self._wake, self._woken, self._listener):
            end.close()
        self._keeper, self.on_wish, self.on_change = None, lambda process, has: None, lambda: None

    def statistics(self) -> dict[str, Any]:
        """What `KeyValue.stats` says of this process's own server."""
        return self._statistics(next(iter(self.serving().values()), self._own))

    def _statistics(self, shard: Shard) -> dict[str, Any]:
        found = shard.server.statistics()
        workers = shard.server.workers()
        found["waits_for"] = [self._describe(shard, worker) for worker in sorted(found["waits_for"])]
        clocks = sorted(
            (worker, clock)
            for worker, clock in found["clocks"].items()
            if workers.get(worker, (OBSERVERS, ""))[0] != OBSERVERS
        )
        found["clocks"] = {self._describe(shard, worker): clock for worker, clock in clocks}
        return found | {"seconds": round(time.monotonic() - self._begun, 3)}

    def serving(self) -> dict[int, Shard]:
        """What is served here, by the server's number: what began here, and backups that took over."""
        return {number: shard for number, shard in list(self.shards.items()) if shard.server.serves}

    def wait_until_left(self, timeout: float) -> list[str]:
        """Waits until all workers have gone; returns who has not. Nobody waits for a reader."""
        deadline = time.monotonic() + timeout
        while (staying := self._staying()) and time.monotonic() < deadline:
            with self._left:
                self._left.wait(_LOOK)
        return list(staying.values())

    def wait_until_served(self, timeout: float | None) -> bool:
        """Waits until workers have come and all have gone; returns whether it is so."""
        deadline = None if timeout is None else time.monotonic() + timeout
        while True:
            served = self._served  # before it looks, since one may just be coming
            if not self._staying() and served:
                return True
            if deadline is not None and time.monotonic() >= deadline:
                return False
            with self._left:
                self._left.wait(_LOOK)

    def _staying(self) -> dict[int, str]:
        """Workers that take part in what is here, or have not closed their connections, as messages call them. Workers
        connect to backups that are reached by TCP, so there the connections tell all."""
        found = {each.worker: each.name for each in self._inside() if not each.observes}
        for shard in () if self.far_backup_at >= 0 else list(self.shards.values()):
            with contextlib.suppress(Aborted):  # it has been stopped
                workers = shard.server.workers().items()
                found |= {worker: name for worker, (group, name) in workers if group != OBSERVERS}
        self._served |= bool(found)
        return {worker: f"worker {worker} ({name})" for worker, name in found.items()}

    def _inside(self) -> list[_Visitor]:
        return [visitor for visitor in list(self._visitors.values()) if visitor.worker >= 0]

    def _describe(self, shard: Shard, worker: int) -> str:
        return f"worker {worker} ({shard.server.workers().get(worker, ('', '?'))[1]})"

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
            if visitor.is_partner:
                control.receive(visitor.connection)  # it says one thing only
                visitor.meaning = ""
                if visitor.shard is not None:
                    visitor.shard.takes_over_quietly = True
                return
            if visitor.far is None:
                self._respond(visitor, *control.receive(visitor.connection))
                return
            with contextlib.suppress(BlockingIOError):
                for message in visitor.far.arriving.take(visitor.connection):
                    self._respond(visitor, message, [])
        except (OSError, RingReduceError):
            selector.unregister(visitor.connection)
            if visitor.is_partner:
                if visitor.meaning and not self._closing and self.has_workers(visitor.shard):
                    log.warning("%s", visitor.meaning)
                self._forget(visitor)
                return self.on_change()
            if visitor.worker >= 0 and visitor.shard is not None:
                with contextlib.suppress(Aborted):  # it has been handed over
                    visitor.shard.server.lose(visitor.worker)  # no loss if it has left
            self._forget(visitor)

    @staticmethod
    def has_workers(shard: Shard | None) -> bool:
        """Readers do not count."""
        with contextlib.suppress(Aborted):
            return shard is not None and any(group != OBSERVERS for group, _ in shard.server.workers().values())
        return False

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
            return self._asked(visitor.shard or self._own, message), []
        except Aborted as error:  # the server is another process's now, or nobody's
            raise ConnectionError(str(error)) from None
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
            given = [os.dup(shard.server.bell), os.dup(shard.server.values), own_pidfd()]
            return proof | {"name": self._name_of_backup(worker)}, given
        if hello.get("wish"):
            self.on_wish(worker, int(hello["has"]))
            return proof, [os.dup(self._own.server.bell), os.dup(self._own.server.values), own_pidfd()]
        wanted = self.shards.get(int(hello.get("of", 0)))
        if wanted is None or not wanted.server.serves:
            return {"error": ["Moved", f"server {hello.get('of')} is not served here"]}, []
        shard = wanted
        if hello.get("again"):
            if worker not in shard.server.workers():
                raise InvalidArgument(f"worker {worker} is none of this server")
        else:
            self._let_in(shard, worker, hello, descriptors)
        visitor.worker, visitor.shard = worker, shard
        self._introduce(visitor, hello)
        reply = proof | {"capacity": shard.server.capacity, "turn": shard.server.turn}
        return reply, [os.dup(shard.server.values), os.dup(shard.server.bell), own_pidfd()]

    @staticmethod
    def _let_in(shard: Shard, worker: int, hello: dict[str, Any], descriptors: list[int]) -> None:
        window, pidfd, news = descriptors
        shard.server.join(
            id=worker,
            group=str(hello["group"]),
            window=os.dup(window),
            window_bytes=int(hello["window_bytes"]),
            servers=int(hello["servers"]),
            lane=int(hello["lane"]),
            pidfd=os.dup(pidfd),
            news=os.dup(news),
            name=_name_in(hello),
        )

    @staticmethod
    def _name_of_backup(number: int) -> str:
        return f"the backup of server {number} ({socket.gethostname()}, pid {os.getpid()})"

    def _follow(self, visitor: _Visitor, number: int, capacity: int, descriptors: list[int]) -> Shard:
        """Makes a backup of server `number`."""
        known = self.shards.get(number)
        if known is not None and known.server.serves and not known.server.has_ended:
            raise InvalidArgument(f"server {number} is here, so its backup has to be elsewhere")
        if self.is_leaving:
            raise InvalidArgument("this process leaves, and takes no backups any more")
        if len(descriptors) != 5:
            raise InvalidArgument(f"a server gave {len(descriptors)} descriptors to its backup; 5 are needed")
        shard = Shard(capacity, self._functions, self._backed_up)
        journal, bell, values, pidfd, passage = map(os.dup, descriptors)
        about = {"name": self._name_of_backup(number), "address": self.address.hex()}
        shard.follow(journal=journal, bell=bell, values=values, pidfd=pidfd, passage=passage, **about)
        with self._left:
            self.shards[number] = shard
        visitor.shard, visitor.is_partner = shard, True
        if known is not None:
            known.server.stop()
        return shard

    def _introduce(self, visitor: _Visitor, hello: dict[str, Any]) -> None:
        visitor.name, visitor.observes = _name_in(hello), hello["group"] == OBSERVERS
        self._served |= not visitor.observes

    def _welcome_far(self, visitor: _Visitor, far: _Far, hello: dict[str, Any]) -> dict[str, Any]:
        if far.number < self._servers:
            return self._follow_far(far, hello)
        window = int(hello["window"])
        if not 0 < window <= self._window:
            raise InvalidArgument(
                f"the window of a worker of another host has {window} bytes; this server keeps 1 to {self._window}"
            )
        worker, which = divmod(far.number - self._servers, self._servers + 1)
        shard = self.shards[which - 1] if which else self._own
        shard.server.join_far(id=worker, group=str(hello["group"]), window=window, name=_name_in(hello))
        visitor.worker, visitor.shard = worker, shard
        self._introduce(visitor, hello)
        self._hand_over(far, lambda descriptor, path: shard.server.connect(worker, descriptor, path))
        return {"capacity": shard.server.capacity}

    def _hand_over(self, far: _Far, take: Callable[[int, str], None]) -> None:
        with self._left:
            far.take = take
            sockets, far.sockets = far.sockets, []
        for descriptor, path in sockets:
            take(descriptor, path)

    def _follow_far(self, far: _Far, hello: dict[str, Any]) -> dict[str, Any]:
        """Makes the backup of a server of another host."""
        shard = Shard(int(hello["capacity"]), self._functions)
        shard.follow_far(lambda: self._decide_later(shard, far.number, "backup"))
        self.shards[far.number] = shard
        self._hand_over(far, shard.server.connect_partner)
        return {"name": self._name_of_backup(far.number)}

    def _asked(self, shard: Shard, message: dict[str, Any]) -> dict[str, Any]:
        if shard.server.has_ended:
            raise ConnectionError("this server has ended")
        if message["ask"] == "serves":
            return {"serves": shard.server.serves}
        shard.check_serving()
        match message["ask"]:
            case "create":
                return {"blocks": shard.create(str(message["key"]), message["blocks"], message["spec"])}
            case "create table":
                return {"block": shard.create_table(str(message["key"]), message["spec"])}
            case "awaited":
                return {"workers": [self._describe(shard, w) for w in shard.server.awaited(int(message["block"]))]}
            case "absent":
                return {"workers": [self._describe(shard, w) for w in shard.server.absent(str(message["group"]))]}
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


def _name_in(hello: dict[str, Any]) -> str:
    return f"{hello['host']}, pid {int(hello['pid'])}"


def connect(
    address: bytes, secret: bytes, hello: dict[str, Any], client: Any, timeout: float
) -> tuple[socket.socket, dict[str, Any], list[int]]:
    """Joins a worker to a server: the connection, what the server says, and its values, bell and pidfd.

    `hello` may have the number of the server, as "of". Raises `Refused` if that does not let it in, and another
    `OSError` if it does not work.
    """
    pidfd = own_pidfd()
    try:
        return _enter(address, secret, hello, [client.window, pidfd, client.news], timeout)
    finally:
        os.close(pidfd)


def connect_again(address: bytes, secret: bytes, hello: dict[str, Any], timeout: float) -> socket.socket:
    """A worker's connection to the door of a server that knows it, since its backup did. Raises as `connect`."""
    connection, _, descriptors = _enter(address, secret, hello | {"again": True}, [], timeout)
    for descriptor in descriptors:
        os.close(descriptor)
    return connection


class Refused(ConnectionError):
    """The server has said why, and will not let it in."""


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
            raise (ConnectionError if answer["error"][0] == "Moved" else Refused)(answer["error"][1])
        if len(descriptors) != 3 or not control.same(
            control.proof(secret, "server", ours, worker), answer.get("proof")
        ):
            for descriptor in descriptors:
                os.close(descriptor)
            raise ConnectionError("what answered does not know the secret")
        undo.pop_all()
    return connection, answer, descriptors
