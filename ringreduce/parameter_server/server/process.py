"""`ServerProcess`: the servers of a process and the backups of others in it, and what its door answers."""

from __future__ import annotations

import contextlib
import errno
import logging
import math
import os
import socket
import time
from collections.abc import Callable, Sequence
from typing import Any, Protocol

from ringreduce.common.descriptors import above_streams, duplicate
from ringreduce.common.system import WANTS, explained
from ringreduce.coordination.process import own_pidfd
from ringreduce.errors import Aborted, InvalidArgument, RingReduceError, SystemFailure
from ringreduce.network.listener import Door
from ringreduce.network.local import close_all, proof
from ringreduce.parameter_server import control, doors
from ringreduce.parameter_server.exits import open_until_exit
from ringreduce.parameter_server.modes import READERS
from ringreduce.parameter_server.server.listener import Connection, DataConnections, Listener, name_in
from ringreduce.parameter_server.server.replication import Replication
from ringreduce.parameter_server.server.shard import Shard
from ringreduce.parameter_server.updates import Function

_WRITING = 60.0
"""A server that ends waits this many seconds for its part of a snapshot. After that the snapshot stays incomplete."""
_LOOK = 0.01
"""Seconds between checks for workers that have gone."""

log = logging.getLogger(__name__)


def _taken(names: Sequence[str], descriptors: list[int]) -> dict[str, Any]:
    """Returns descriptors by name, and leaves none: whoever gets them closes them."""
    taken: dict[str, Any] = dict(zip(names, descriptors, strict=True))
    descriptors.clear()
    return taken


def _given(*files: int) -> list[int]:
    """Returns what is passed with an answer: descriptors of these files, and one of this process."""
    with contextlib.ExitStack() as undo:
        given: list[int] = []
        undo.callback(close_all, given)
        given += [own_pidfd()]
        for file in files:
            given.insert(-1, duplicate(file))
        undo.pop_all()
    return given


class Manager(Protocol):
    """The `ReplicaManager` of a process."""

    def close(self) -> None: ...
    def give_away(self, timeout: float) -> bool: ...
    def hear_wish(self, process: int, has: int, number: int) -> None: ...


class ServerProcess:
    """The servers of this process, the backups of other servers in it, their threads in C++, and their door."""

    def __init__(
        self,
        capacity: int,
        secret: bytes,
        functions: dict[str, Function],
        founds: Sequence[int] = (0,),
        backed_up: bool = False,
    ) -> None:
        """`founds` has the numbers of the servers that begin here, each with room for `capacity` bytes. `backed_up`
        says that servers have backups on their own host."""
        self._functions, self._backed_up = functions, backed_up
        self.shards = {number: Shard(capacity, functions, backed_up) for number in founds}
        """The servers here and the backups of other servers, by the server's number."""
        self.leaving: list[tuple[int, Shard]] = []
        """Servers that have left their blocks to their backups, and wait for these to serve."""
        self.is_leaving = False
        self.manager: Manager | None = None  # closed before the servers are
        self.failed: int | None = None  # a server that has ended here, of which there is no backup
        self.on_change: Callable[[], None] = lambda: None
        """Called by the door's thread when a server or a backup has ended."""
        self._own = next(iter(self.shards.values()), None) or Shard(1 << 12, functions)
        self._secret = secret
        self._begun, self._served = time.monotonic(), False
        self._window = 0
        self.replication: Replication | None = None  # set if backups are reached by TCP
        self.listener = Listener(self)
        open_until_exit[self] = None

    @property
    def server(self) -> Any:
        """The C++ server that began in this process."""
        return self._own.server

    # ---- backups -----------------------------------------------------------------------------------------------------

    def lacks_backup(self, shard: Shard) -> bool:
        """Whether a server should be given a backup now."""
        if self.replication is not None:
            return self.replication.is_settled(shard)
        return not shard.server.has_backup

    def have_backup(self, number: int, its: dict[str, Any], timeout: float) -> None:
        """Gives server `number`, which is served here, a backup in the process that has told the store `its`. Raises
        `OSError` if that process cannot be reached or does not answer, and `InvalidArgument` if there can be none."""
        if self.replication is not None:
            return self.replication.lead(number, self.shards[number], its, timeout)
        address, server = bytes.fromhex(its["address"]), self.shards[number].server
        log_fd = server.log()
        ours, theirs = map(above_streams, socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET))
        try:
            hello = {"worker": number, "backup": True, "capacity": server.capacity}
            given = [log_fd, server.bell, server.values, theirs.fileno()]
            connection, answer, (bell, values, pidfd) = doors.enter(address, self._secret, hello, given, timeout, 3)
            name = str(answer["name"])
            about: dict[str, Any] = {"capacity": server.capacity, "name": name, "address": address.hex()}
            about |= {"bell": bell, "values": values, "pidfd": pidfd}
            with contextlib.ExitStack() as undo:
                undo.callback(connection.close)
                about |= {"log": duplicate(log_fd), "passage": duplicate(ours.fileno())}
                self.shards[number].lead(lambda: self.listener.is_closing, **about)
                undo.pop_all()
        finally:
            ours.close()
            theirs.close()
            os.close(log_fd)
        meaning = f"{name} has ended: server {number} goes on, and gets another one"
        self._part_quietly(number)
        self.listener.adopt(Connection(connection, shard=self.shards[number], is_partner=True, meaning=meaning))

    def hand_over(self, number: int) -> bool:
        """Lets server `number` leave its blocks to its backup; returns False if that has been lost. If it is lost while
        the server is in `leaving`, the server comes back."""
        shard = self.shards[number]
        self._part_quietly(number)
        if self.replication is not None:
            if not self.replication.hand_over(number, shard):
                return False
        else:
            try:
                shard.server.leave_to_backup()
            except InvalidArgument:
                return False
        with self.listener.changed:
            del self.shards[number]
            self.leaving.append((number, shard))
        return True

    def serve_alone(self, number: int) -> None:
        """Lets the designated primary of server `number` serve, although it can have no backup of its own."""
        if self.replication is None:
            self.shards[number].server.serve_alone()
        else:
            self.replication.serve_alone(number, self.shards[number])

    def has_left(self, number: int, shard: Shard) -> bool:
        """Whether a server in `leaving` is finished: its backup serves, or the server has come back."""
        if shard.server.leaves:
            return False
        self.leaving.remove((number, shard))
        if shard.server.has_ended:
            self._end(shard)
            return True
        with self.listener.changed:
            other = self.shards.get(number)
            self.shards[number] = shard
        if other is not None:  # a backup that had been made for the designated primary
            self._end(other)
        return True

    def wish_for_server(self, process: int, address: bytes, timeout: float) -> None:
        """Asks the process at `address` for one of its servers, for this process. Raises `OSError` if it has ended."""
        hello = {"worker": process, "wish": True, "has": len(self.serving())}
        doors.enter(address, self._secret, hello, [], timeout)[0].close()

    def drop(self, number: int, shard: Shard) -> None:
        """Forgets a server. Its workers' connections for control messages end here."""
        with self.listener.changed:
            if self.shards.get(number) is shard:  # it may have been replaced by a new backup
                del self.shards[number]
        self._end(shard)

    def _end(self, shard: Shard) -> None:
        self.listener.shut(shard)
        shard.server.stop()
        if self.replication is not None:
            self.replication.forget(shard)

    def _part_quietly(self, number: int) -> None:
        """Tells the partners of server `number` that this side ends on purpose, so that neither logs it."""
        for partner in self.listener.partners(self.shards[number]):
            partner.meaning = ""
            with contextlib.suppress(OSError):
                control.send(partner.socket, {"tell": "quietly"})

    def is_followed_by_nobody(self, number: int) -> bool:
        """Whether the partner of a server or backup in this process has closed its connection."""
        return not self.listener.partners(self.shards[number])

    # ---- until the end -----------------------------------------------------------------------------------------------

    def listen(self, door: Door, number: int, window: int, dead_after: int) -> None:
        """Opens `door` for other hosts. Each worker there has at most `window` bytes of pushes under way."""
        self._window = window
        self.listener.open(door, number, self._secret, dead_after)

    def close_in_child(self) -> None:
        self.listener.close_in_child()

    def close(self) -> None:
        """Ends the servers and all threads. Workers that still need these servers see them end."""
        if self not in open_until_exit:
            return
        self.listener.is_closing = True
        for other in (self.replication, self.manager):
            if other is not None:
                other.close()
        self.listener.stop()
        for shard in [*self.shards.values(), *(shard for _, shard in self.leaving)]:
            for saving in list(shard.savings.values())[-1:]:  # earlier ones have ended
                saving.done.wait(_WRITING)
            shard.server.stop()
        self.listener.close()  # last, since others see by it that this process is there
        open_until_exit.pop(self, None)
        self.manager, self.on_change = None, lambda: None

    def statistics(self, shard: Shard | None = None) -> dict[str, Any]:
        """Returns what `KeyValue.stats` has about a server of this process, or about one of them."""
        shard = shard or next(iter(self.serving().values()), self._own)
        found = shard.server.statistics()
        workers = shard.server.workers()
        found["waits_for"] = [self._describe(shard, worker) for worker in sorted(found["waits_for"])]
        counted = [each for each in sorted(found["clocks"]) if workers.get(each, (READERS, ""))[0] != READERS]
        found["clocks"] = {self._describe(shard, worker): found["clocks"][worker] for worker in counted}
        return found | {"seconds": round(time.monotonic() - self._begun, 3)}

    def serving(self) -> dict[int, Shard]:
        """Returns the servers that serve here, by number: those that began here, and backups that have taken over."""
        return {number: shard for number, shard in list(self.shards.items()) if shard.server.serves}

    def wait_until_left(self, timeout: float) -> list[str]:
        """Waits until all workers, not readers, have gone; returns the names of those that have not after `timeout`."""
        deadline = time.monotonic() + timeout
        while (staying := self._staying()) and time.monotonic() < deadline:
            self._wait_for_change()
        return list(staying.values())

    def wait_until_served(self, timeout: float | None) -> bool:
        """Waits until workers have come and all have gone; returns False after `timeout` seconds (None: no limit).
        Raises `SystemFailure` if the server has failed, and nobody takes over."""
        deadline = math.inf if timeout is None else time.monotonic() + timeout
        while True:
            if self.failed is not None:
                why = f"server {self.failed} of process {os.getpid()} has failed, as the log says"
                raise SystemFailure(f"{why}; start it again, from a snapshot if there is one")
            served = self._served  # read before _staying(), which sets it when a worker comes
            ended = any(shard.server.has_ended for shard in list(self.shards.values()))  # the manager will say why
            if not self._staying() and served and (self.listener.is_closing or not ended):
                return True
            if time.monotonic() >= deadline:
                return False
            self._wait_for_change()

    def _wait_for_change(self) -> None:
        with self.listener.changed:
            self.listener.changed.wait(_LOOK)

    def _staying(self) -> dict[int, str]:
        """Returns the workers that take part here or have not closed their connections, with their names. Where backups
        are reached by TCP, every worker has a connection here, so the connections are enough."""
        found = {each.worker: each.name for each in self.listener.all() if each.worker >= 0 and not each.is_reader}
        for shard in list(self.shards.values()):
            with contextlib.suppress(Aborted):  # it has been stopped
                if self.replication is not None:
                    found |= dict.fromkeys(shard.server.missing(), "which has not come yet")
                    continue
                workers = shard.server.workers().items()
                found |= {worker: name for worker, (group, name) in workers if group != READERS}
        self._served |= bool(found)
        return {worker: f"worker {worker} ({name})" for worker, name in found.items()}

    def _describe(self, shard: Shard, worker: int) -> str:
        return f"worker {worker} ({shard.server.workers().get(worker, ('', '?'))[1]})"

    # ---- what the door's thread calls --------------------------------------------------------------------------------

    def has_ended(self, connection: Connection) -> None:
        shard = connection.shard
        if shard is None:
            return
        if connection.is_partner:
            if connection.meaning and not self.listener.is_closing and shard.has_workers():
                log.warning("%s", connection.meaning)
        elif connection.worker >= 0:
            with contextlib.suppress(Aborted):  # the server has been stopped
                shard.server.lose(connection.worker)  # no effect if the worker has left

    def answer(
        self, connection: Connection, message: dict[str, Any], descriptors: list[int]
    ) -> tuple[dict[str, Any], list[int]]:
        try:
            if connection.worker < 0 and connection.data is not None:
                return self._welcome_far(connection, connection.data, message), []
            if connection.worker < 0:
                return self._welcome(connection, message, descriptors)
            return self._asked(connection.shard or self._own, message), []
        except Aborted as error:  # the server is another process's now, or nobody's
            raise ConnectionError(str(error)) from None
        except RingReduceError as error:
            if isinstance(error, SystemFailure):
                log.warning("the door of process %d: %s", os.getpid(), error)
            return {"error": [type(error).__name__, str(error)]}, []
        except (MemoryError, OSError) as error:
            if isinstance(error, OSError) and error.errno not in WANTS:
                raise
            text = explained(error) if isinstance(error, OSError) else f"memory ran out; {WANTS[errno.ENOMEM]}"
            log.warning("the door of process %d: %s", os.getpid(), text)
            return {"error": ["SystemFailure", f"process {os.getpid()}: {text}"]}, []
        except Exception as error:  # an invalid message must not end the door's thread
            return {"error": ["InvalidArgument", f"a message that says nothing known: {error!r}"]}, []
        finally:
            close_all(descriptors)

    def _welcome(
        self, connection: Connection, hello: dict[str, Any], descriptors: list[int]
    ) -> tuple[dict[str, Any], list[int]]:
        worker = int(hello["worker"])
        if not control.is_proof(hello.get("proof"), self._secret, b"worker", connection.nonce, worker):
            raise ConnectionError("it does not know the secret")
        ours = {"proof": proof(self._secret, b"server", bytes.fromhex(hello["nonce"]), worker).hex()}
        if hello.get("backup"):
            backup = self._follow(connection, worker, int(hello["capacity"]), descriptors).server
            return ours | {"name": self._name_of_backup(worker)}, _given(backup.bell, backup.values)
        if hello.get("wish"):
            self._hear_wish(worker, int(hello["has"]))
            return ours, []
        shard = self.shards.get(int(hello.get("of", 0)))
        if shard is None or not shard.server.serves:
            return {"error": ["Moved", f"server {hello.get('of')} is not served here"]}, []
        if hello.get("again"):
            if worker not in shard.server.workers():
                raise InvalidArgument(f"worker {worker} is none of this server")
        else:
            self._let_in(shard, worker, hello, descriptors)
        self._introduce(connection, worker, shard, hello)
        reply = ours | {"capacity": shard.server.capacity, "turn": shard.server.turn}
        if hello.get("again"):
            return reply, []
        return reply, _given(shard.server.values, shard.server.bell)

    @staticmethod
    def _let_in(shard: Shard, worker: int, hello: dict[str, Any], descriptors: list[int]) -> None:
        about: dict[str, Any] = {name: int(hello[name]) for name in ("window_bytes", "servers", "lane")}
        about |= {"id": worker, "group": str(hello["group"]), "name": name_in(hello)}
        shard.server.join(**_taken(("window", "news", "pidfd"), descriptors), **about)

    def _introduce(self, connection: Connection, worker: int, shard: Shard, hello: dict[str, Any]) -> None:
        connection.worker, connection.shard = worker, shard
        connection.name, connection.is_reader = name_in(hello), hello["group"] == READERS
        self._served |= not connection.is_reader

    def _hear_wish(self, process: int, has: int, number: int = -1) -> None:
        """Called when `process`, which serves `has` servers, would like to serve one more: `number`, or any (-1)."""
        if self.manager is not None:
            self.manager.hear_wish(process, has, number)

    @staticmethod
    def _name_of_backup(number: int) -> str:
        return f"the backup of server {number} ({socket.gethostname()}, pid {os.getpid()})"

    def _follow(self, connection: Connection, number: int, capacity: int, descriptors: list[int]) -> Shard:
        """Makes a backup of server `number`."""
        known = self._check_absent(number)
        if len(descriptors) != 5:
            raise InvalidArgument(f"a server gave {len(descriptors)} descriptors to its backup; 5 are needed")
        shard = Shard(capacity, self._functions, self._backed_up)
        about = {"name": self._name_of_backup(number), "address": self.listener.address.hex()}
        shard.follow(**_taken(("log", "bell", "values", "passage", "pidfd"), descriptors), **about)
        with self.listener.changed:
            self.shards[number] = shard
        connection.shard, connection.is_partner = shard, True
        if known is not None:
            known.server.stop()
        return shard

    def _welcome_far(self, connection: Connection, data: DataConnections, hello: dict[str, Any]) -> dict[str, Any]:
        if hello.get("backup"):
            of_whom = int(hello["of"]), int(hello["capacity"]), str(hello["view"]), int(hello["since"])
            return self._follow_far(data, *of_whom)
        if hello.get("wish"):
            self._hear_wish(int(hello["process"]), int(hello["has"]), int(hello["of"]))
            return {}
        window, worker = int(hello["window"]), int(hello["worker"])
        if not 0 < window <= self._window:
            raise InvalidArgument(
                f"the window of a worker of another host has {window} bytes; this server keeps 1 to {self._window}"
            )
        shard = self.shards.get(int(hello["of"]))
        replica = 0 if shard is None or self.replication is None else self.replication.replica(shard)
        if shard is None or shard.server.has_ended or replica != int(hello["replica"]):
            return {"error": ["Moved", f"server {hello['of']} is not here, nor its backup of that number"]}
        server = shard.server
        server.join_far(id=worker, group=str(hello["group"]), window=window, name=name_in(hello))
        self._introduce(connection, worker, shard, hello)
        self.listener.hand_over(data, lambda descriptor, path: server.connect(worker, descriptor, path))
        return {"capacity": server.capacity}

    def _follow_far(self, data: DataConnections, number: int, capacity: int, view: str, since: int) -> dict[str, Any]:
        """Makes the backup of a server that is reached by TCP."""
        if self.replication is None:
            raise InvalidArgument("backups of these servers are not reached by TCP")
        known = self._check_absent(number)
        shard = Shard(capacity, self._functions)
        self.replication.follow(number, shard, view, since, known)
        with self.listener.changed:
            self.shards[number] = shard
        if known is not None:
            self._end(known)
        self.listener.hand_over(data, shard.server.connect_partner)
        return {"name": self._name_of_backup(number)}

    def _check_absent(self, number: int) -> Shard | None:
        """Raises `InvalidArgument` if server `number` can have no backup here. Returns an earlier shard of it here."""
        known = self.shards.get(number)
        if known is not None and known.server.serves and not known.server.has_ended:
            raise InvalidArgument(f"server {number} is here, so its backup has to be elsewhere")
        if self.is_leaving:
            raise InvalidArgument("this process leaves, and takes no backups any more")
        return known

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
                return {"statistics": self.statistics(shard)}
        raise InvalidArgument(f"a worker asked for {message['ask']!r}")
