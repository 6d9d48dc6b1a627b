"""What a rank reads its batches from: the samples of a dataset, which servers of its host prepare."""

from __future__ import annotations

import contextlib
import gc
import itertools
import json
import mmap
import os
import secrets
import socket
import struct
import threading
import time
import weakref
from collections import deque
from collections.abc import Callable
from typing import Any

import numpy as np
import torch.distributed as dist

from ringreduce.common.failures import InvalidArgument, SampleFailed, SystemFailure
from ringreduce.common.launcher import check_alone
from ringreduce.data import supervisor
from ringreduce.data.batches import Failure, Memory, read
from ringreduce.data.messages import (
    ASKED,
    DONE,
    FILLED,
    LAST,
    MOST_IN_ADVANCE,
    WANT,
    Filled,
    Key,
    connect,
    listen,
    next_message,
)
from ringreduce.data.order import Order
from ringreduce.data.server import Recipe
from ringreduce.data.steps import Steps

MOST_DEATHS = 3
"""How often a server may die while this reader waits for one batch."""
MOST_SERVERS = 256


class Loader(Steps[Any]):
    """Batches of a dataset, prepared by server processes that all ranks of a host can share.

        order = data.Order(len(dataset), batch=256)
        loader = data.Loader(dataset, order, servers=2, name="train")    # before threads and init_process_group
        images, labels = loader.get(step)                                # this rank's part of the step's batch

    Processes of one host and user whose Loaders have the same name share the servers, which are started once and end
    with the last of these Loaders. A batch that several of them read is prepared once. The memory of a batch is used
    again when nobody holds its tensors any more.

    - `dataset`: has `__getitem__(id)`, or `__getitems__(ids)`, which returns the samples in a list, or their whole
      batch. A sample is a tensor, an array, a number, or a tuple, list or dict of samples. It is stacked with others of
      its shape; what is not numeric is handed on in a list.
    - `order`: which ids are read in which step.
    - `servers`: processes; step k is prepared by server k % servers.
    - `ahead`: how many batches are prepared before they are asked for.
    - `name`: whose servers to share. Loaders whose samples differ (path, augmentation, collate) need different names.
      None: servers of this Loader alone.
    - `collate`: makes one batch of a list of samples, instead of stacking.
    - `seeded`: before each sample, the generators of Python, NumPy and torch are seeded by (order.seed, epoch, id), so
      random augmentation of an id is the same, whoever prepares it. With `__getitems__` they are seeded once for each
      rank's part of a batch. False saves about 10 us a sample.
    - `timeout`: seconds that `get` waits for a batch.

    Raises `InvalidArgument`, also if other Loaders of this name differ in order, servers, seeded, collate's name or
    kind of dataset.
    """

    def __init__(
        self,
        dataset: Any,
        order: Order,
        servers: int = 1,
        ahead: int = 4,
        *,
        name: str | None = None,
        collate: Callable[[list[Any]], Any] | None = None,
        seeded: bool = True,
        timeout: float = 300.0,
    ) -> None:
        self._closed = True  # until there is something to close
        if not hasattr(dataset, "__getitem__") and not hasattr(dataset, "__getitems__"):
            raise InvalidArgument(f"Loader: dataset is a {type(dataset).__name__}, without __getitem__ or __getitems__")
        if not isinstance(order, Order):
            raise InvalidArgument(f"Loader: order is {order!r:.60}; give a ringreduce.data.Order")
        for what, value, most in (("servers", servers, MOST_SERVERS), ("ahead", ahead, MOST_IN_ADVANCE)):
            if isinstance(value, bool) or not isinstance(value, int) or not 1 <= value <= most:
                raise InvalidArgument(f"Loader: {what} is {value!r}; give an integer from 1 to {most}")
        if not timeout > 0:
            raise InvalidArgument(f"Loader: timeout is {timeout!r}; give seconds, more than 0")
        self.order, self.servers, self.ahead, self.step = order, servers, ahead, 0
        self.name = name if name is not None else f"of one Loader: {secrets.token_hex(8)}"
        self._timeout, self._recipe = timeout, Recipe(dataset, order, collate, seeded)
        self._terms = {"order": order.state(), "servers": servers, "seeded": seeded, "dataset": _kind_of(dataset)}
        self._terms["collate"] = collate and _name_of(collate if hasattr(collate, "__qualname__") else type(collate))
        self._lock = threading.Lock()
        self._asked: dict[Key, int] = {}
        """What servers have been asked for and not told to let go, with the numbers of the requests."""
        self._requests = itertools.count()
        self._ready: dict[Key, tuple[Filled, Memory]] = {}
        self._held: dict[Key, tuple[weakref.ref[Any], int, tuple[Filled, Memory]]] = {}
        self._released: deque[tuple[Key, int]] = deque()
        """Requests whose tensors have gone. Filled by the garbage collector, in any thread."""
        self._supervisor: socket.socket | None = None
        self._servers: list[_Server | None] = [None] * servers
        self._join()
        self._closed = False
        _open.add(self)

    # reading

    def get(self, step: int, rank: int | None = None, size: int | None = None) -> Any:
        """The part of step `step`'s batch that belongs to rank `rank` of `size`; by default, of the default group.

        The tensors are views of shared memory. At most one earlier batch may still be held, or it raises
        `InvalidArgument`. Clone what is to stay. If several readers share the batch, do not write to it.

        The batches of the next steps are prepared meanwhile, so steps are best read in their order. Any step can be
        read at any time.

        Raises `SampleFailed` if the dataset raised an error or the timeout passed; the Loader stays usable, and a
        second call waits on. Raises `SystemFailure` if servers die again and again.
        """
        if rank is None or size is None:
            if not (in_group := dist.is_initialized()):
                check_alone("get", "give rank= and size=, or make the default group first")
            ranks = (dist.get_rank(), dist.get_world_size()) if in_group else (0, 1)
            rank, size = ranks[0] if rank is None else rank, ranks[1] if size is None else size
        key = self.order.span(step, rank, size)
        with self._lock:
            self._check_usable()
            if (held := self._held.get(key)) and (memory := held[0]()) is not None:
                filled = held[2][0]
                return read(memory, filled.tensors_end, filled.description_end)
            self._check_held(step)
            batch = self.order.batch
            self._ask([(key[0] + each * batch, key[1] + each * batch) for each in range(self.ahead + 1)])
            filled, memory = self._wait_for(key)
            return self._hand_out(key, step, filled, memory)

    def batch_of(self, step: int) -> Any:
        return self.get(step)

    def close(self) -> None:
        """Ends this Loader, and with the last Loader of its name the servers. Tensors that are held stay valid."""
        if self._closed:
            return
        self._closed = True
        self._keep_what_is_held()
        self._disconnect()
        _reap()

    def __enter__(self) -> Loader:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def __del__(self) -> None:
        self.close()

    def _check_usable(self) -> None:
        if self._closed:
            raise InvalidArgument(
                "Loader.get: this Loader is closed, or this process was forked from the one that made it; make another"
            )

    def _check_held(self, step: int) -> None:
        """Raises `InvalidArgument` if more than one batch is held."""
        if len(alive := self._alive()) > 1:
            gc.collect()  # some may be held by cycles alone
            if len(alive := self._alive()) > 1:
                raise InvalidArgument(
                    f"Loader.get: step is {step}, and the batch of step {alive[0]} is still held, by a tensor, a view "
                    "of one or a graph of autograd; clone() what is to outlast the next batch"
                )

    def _alive(self) -> list[int]:
        """The steps whose batches are held."""
        for key in [key for key, (reference, _, _) in self._held.items() if reference() is None]:
            del self._held[key]
        return [step for _, step, _ in self._held.values()]

    def _hand_out(self, key: Key, step: int, filled: Filled, memory: Memory) -> Any:
        # What all tensors of the batch hold. When it goes, the slot may be filled again.
        holder = memory.view()
        batch = read(holder, filled.tensors_end, filled.description_end)
        if isinstance(batch, Failure):
            self._released.append((key, self._asked[key]))
            what = f"id {batch.id}" if batch.id >= 0 else f"ids {_some(self.order.ids_at(*key).tolist())}"
            raise SampleFailed(
                f"Loader.get: step {step}, {what}: in the server, the dataset raised\n{batch.text}", batch.id
            )
        release, request = self._released.append, self._asked[key]
        self._held[key] = weakref.ref(holder, lambda _: release((key, request))), step, (filled, memory)
        return batch

    # servers

    def _ask(self, keys: list[Key]) -> None:
        """Asks for these batches, and lets all others go."""
        told: dict[int, bytes] = {}
        while self._released:
            key, request = self._released.popleft()
            if self._asked.get(key) == request:
                self._forget(key, told)
        wanted = set(keys)
        for key in self._asked.keys() - wanted - self._held.keys() if len(self._asked) > len(keys) else ():
            self._forget(key, told)
        for key in keys:
            if key not in self._asked:
                self._asked[key] = next(self._requests)
                number = self._number(key)
                told[number] = told.get(number, b"") + ASKED.pack(WANT, self._asked[key], *key)
        for number, message in told.items():
            server = self._servers[number]
            try:
                if server is None:
                    raise ConnectionError
                server.connection.send(message)
            except OSError:
                self._reconnect(number)

    def _forget(self, key: Key, told: dict[int, bytes]) -> None:
        number = self._number(key)
        del self._asked[key]
        self._ready.pop(key, None)
        told[number] = told.get(number, b"") + ASKED.pack(DONE, 0, *key)

    def _number(self, key: Key) -> int:
        """Which server has it."""
        return key[0] // self.order.batch % self.servers

    def _wait_for(self, key: Key) -> tuple[Filled, Memory]:
        if found := self._ready.pop(key, None):
            return found
        number, deaths, end = self._number(key), 0, time.monotonic() + self._timeout
        while key not in self._ready:
            try:
                server = self._servers[number]
                if server is None:
                    raise ConnectionError
                request, filled, memory = server.next()
                if self._asked.get(filled[:2]) == request:
                    self._ready[filled[:2]] = filled, memory
            except BlockingIOError:
                if time.monotonic() >= end:
                    raise SampleFailed(
                        f"Loader.get: server {number} has not prepared ids {_some(self.order.ids_at(*key).tolist())} "
                        f"in timeout={self._timeout:g} s"
                    ) from None
            except OSError:
                deaths += 1
                if deaths > MOST_DEATHS:
                    del self._asked[key]
                    raise SystemFailure(
                        f"Loader.get: server {number} has died {deaths} times while it prepared ids "
                        f"{_some(self.order.ids_at(*key).tolist())}{self._how_died(number)}"
                    ) from None
                self._reconnect(number)
        return self._ready.pop(key)

    def _how_died(self, number: int) -> str:
        """What the supervisor says about it."""
        how = ""
        with contextlib.suppress(OSError):
            while self._supervisor and (message := self._supervisor.recv(4096)):
                if (said := json.loads(message)).get("died") == number:
                    how = f", the last time {said['how']}"
        return how

    def _reconnect(self, number: int) -> None:
        """Connects to the server that replaces number `number`, and asks it for what the old one owes."""
        if (old := self._servers[number]) is not None:
            old.connection.close()
        connection = connect(supervisor.server_name(self._servers_name, number))
        if connection is None:  # the supervisor has gone, and with it all servers
            self._disconnect()
            self._join()
            return
        self._servers[number] = self._greeted(connection, number)

    def _greeted(self, connection: socket.socket, number: int) -> _Server:
        owed = self._asked.keys() - self._held.keys() - self._ready.keys()
        seconds = max(0.05, self._timeout / 20)
        connection.setsockopt(
            socket.SOL_SOCKET, socket.SO_RCVTIMEO, struct.pack("ll", int(seconds), int(seconds % 1 * 1e6))
        )
        with contextlib.suppress(OSError):  # if it died, too, `_wait_for` finds that
            if keys := sorted(key for key in owed if self._number(key) == number):
                connection.send(b"".join(ASKED.pack(WANT, self._asked[key], *key) for key in keys))
        return _Server(connection)

    def _keep_what_is_held(self) -> None:
        """Leaves connections open until the batches that are held have gone, so that no server fills their slots."""
        holders = {key: holder for key, (reference, _, _) in self._held.items() if (holder := reference()) is not None}
        told: dict[int, bytes] = {}
        for key in self._asked.keys() - holders:
            self._forget(key, told)
        for number in {*map(self._number, holders)}:
            if (server := self._servers[number]) is not None:
                with contextlib.suppress(OSError):
                    server.connection.send(told.get(number, b"") + ASKED.pack(LAST, 0, 0, 0))
                for key, holder in holders.items():
                    if self._number(key) == number:
                        kept = server.connection.dup()
                        _kept.add(kept)
                        weakref.finalize(holder, kept.close)

    def _disconnect(self) -> None:
        for server in self._servers:
            if server is not None:
                server.connection.close()
        self._servers = [None] * self.servers
        if self._supervisor is not None:
            self._supervisor.close()
            self._supervisor = None

    def _join(self) -> None:
        """Connects to the supervisor of this name and to its servers. Starts the supervisor if there is none.

        Raises `SystemFailure`, and `InvalidArgument` if the others of this name differ.
        """
        end = time.monotonic() + self._timeout
        try:
            while not self._has_joined():
                if time.monotonic() >= end:
                    raise TimeoutError(f"none was there for timeout={self._timeout:g} s")
                time.sleep(0.001)
        except OSError as error:
            self._disconnect()
            raise SystemFailure(
                f"Loader: cannot start or reach servers={self.servers} of {self.name!r}: {error}"
            ) from None

    def _has_joined(self) -> bool:
        """False if the supervisor ends just now, or another process starts one."""
        _reap()
        connection = connect(self.name)
        if is_new := connection is None:
            connection = self._started()
        if connection is None:
            return False
        connection.settimeout(self._timeout)
        try:
            with contextlib.suppress(ConnectionError):  # of one that has ended, and may have said why
                connection.send(b"welcome?")
            welcome = _welcome(connection)
        except OSError as error:
            connection.close()
            if not isinstance(error, ConnectionError):
                raise
            if is_new:  # it had this reader
                raise OSError("their supervisor was killed") from None
            return False  # its last reader has gone
        for what, theirs in welcome["terms"].items():
            if self._terms[what] != theirs:
                connection.close()
                raise InvalidArgument(
                    f"Loader: {what} is {self._terms[what]}, and a Loader named {self.name!r} on this host has "
                    f"{theirs}; give this one another name"
                )
        connection.settimeout(0.5)  # longer than the supervisor takes to see a server's end
        self._supervisor, self._servers_name = connection, welcome["name"]
        for number in range(self.servers):
            found = connect(supervisor.server_name(self._servers_name, number))
            if found is None:
                self._disconnect()
                return False
            self._servers[number] = self._greeted(found, number)
        return True

    def _started(self) -> socket.socket | None:
        """A connection to a new supervisor; None if another process starts one."""
        if (listener := listen(self.name)) is None:
            return None
        connection, pid = supervisor.start(self.name, listener, self._terms, self._recipe)
        _supervisors.append(pid)
        return connection


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


class _Server:
    """A connection to a server, and the slots of it that this process has mapped."""

    def __init__(self, connection: socket.socket) -> None:
        self.connection = connection
        self._slots: dict[int, Memory] = {}

    def next(self) -> tuple[int, Filled, Memory]:
        """The number of a request, and its batch. Raises `BlockingIOError` if there is none for long, and other
        `OSError`s.
        """
        message, fds = next_message(self.connection)
        request, *where = FILLED.unpack(message)
        filled = Filled(*where)
        for fd in fds:
            try:
                self._slots[filled.slot] = np.frombuffer(mmap.mmap(fd, filled.bytes), np.uint8)
            finally:
                os.close(fd)
        return request, filled, self._slots[filled.slot]


_open: weakref.WeakSet[Loader] = weakref.WeakSet()
_kept: weakref.WeakSet[socket.socket] = weakref.WeakSet()
"""Connections of closed Loaders, one for each batch that is still held."""
_supervisors: list[int] = []
"""Processes that this one has started."""


def _reap() -> None:
    """Takes notice of supervisors that have ended."""
    for pid in [*_supervisors]:
        try:
            over = os.waitpid(pid, os.WNOHANG)[0] == pid
        except ChildProcessError:
            over = True
        if over:
            _supervisors.remove(pid)


def _close_in_child() -> None:
    """In a forked child: its parent's servers must not take it for the parent."""
    _supervisors.clear()
    for connection in _kept:
        connection.close()
    for loader in _open:
        loader._closed = True
        loader._disconnect()


os.register_at_fork(after_in_child=_close_in_child)


def _name_of(what: Any) -> str:
    """Of a function or class. The same in all processes."""
    return f"{what.__module__}.{what.__qualname__}"


def _kind_of(dataset: Any) -> str:
    kind = _name_of(type(dataset))
    return f"{kind} of {len(dataset)}" if hasattr(type(dataset), "__len__") else kind


def _some(ids: list[int]) -> str:
    return f"{', '.join(map(str, ids[:8]))}{', ...' if len(ids) > 8 else ''}"
