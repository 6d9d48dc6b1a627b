"""What a rank reads its batches from: the samples of a dataset, which servers of its host prepare."""

from __future__ import annotations

import contextlib
import gc
import itertools
import os
import secrets
import socket
import threading
import time
import weakref
from collections import deque
from collections.abc import Callable, Iterable
from datetime import timedelta
from typing import Any, NamedTuple

from torch.utils.data import Dataset, Subset

from ringreduce.common.failures import InvalidArgument, SampleFailed, SystemFailure
from ringreduce.common.system import WANTS, explained
from ringreduce.common.units import duration
from ringreduce.data import fresh, supervisor
from ringreduce.data.batches import Failure, Memory, read
from ringreduce.data.connections import Connections
from ringreduce.data.identity import full_name
from ringreduce.data.messages import ANEW, ASKED, DONE, KEEP, LAST, MOST_IN_ADVANCE, WANT, WHERE, Filled, Key
from ringreduce.data.order import Order
from ringreduce.data.server import Recipe
from ringreduce.data.stepwise import Stepwise, share

MOST_DEATHS = 3
"""How often a server may die while this reader waits for one batch."""
MOST_SERVERS = 256


class _Use(weakref.ref[Any]):
    """Of the memory of a batch that was handed out, by the tensors that view it."""

    key: Key
    request: int


class _Held(NamedTuple):
    """A batch that was handed out."""

    use: _Use
    step: int
    filled: Filled
    memory: Memory


class Loader(Stepwise[Any]):
    """Batches of a dataset, prepared by server processes that all ranks of a host can share.

        order = data.Order(len(dataset), batch=256)
        loader = data.Loader(dataset, order, servers=2, name="digits")   # before init_process_group
        images, labels = loader.get(step)                                # this rank's part

    Loaders of the same name share the servers, which are started once and end with the last of these Loaders. They are
    of one host and user and, unless the name begins with "/", of one job. A batch that several of them read is prepared
    once. The memory of a batch is used again when nobody holds its tensors any more.

    - `dataset`: has `__getitem__(id)`, or `__getitems__(ids)`, which returns the samples in a list, or their whole
      batch. A sample is a tensor, an array, a number, or a tuple, list or mapping of samples. It is stacked with others
      of its shape; what is not numeric is handed on in a list. Servers have the dataset as it was when the Loader was
      made.
    - `order`: which ids are read in which step.
    - `servers`: processes; step k is prepared by server k % servers.
    - `ahead`: how many batches are prepared before they are asked for. None: two for each server, from 4 to 64.
    - `name`: whose servers to share. Loaders of one name whose `dataset`, `collate` or `seeded` differ, as far as their
      pickles show it, share nothing. None: servers of this Loader alone.
    - `collate`: makes one batch of a list of samples, instead of stacking.
    - `seeded`: before each sample, the generators of Python, NumPy and torch are seeded by (order.seed, epoch, id), so
      random augmentation of an id is the same, whoever prepares it. With `__getitems__`, other than that of torch's
      `Subset`, they are seeded once for each rank's part of a batch. False saves about 10 us a sample. A function is
      also called with a seed below 2**32, for libraries with generators of their own.
    - `timeout`: how long `get` waits for a batch; a timedelta, or seconds.
    - `multiprocessing_context`: None or "fork": servers are forked. "spawn": they are new processes, to which
      `dataset`, `collate` and `seeded` are pickled, for libraries whose threads do not survive a fork. The program is
      imported there, so it needs `if __name__ == "__main__":`. Or a context of `multiprocessing`, as DataLoader takes
      it.

    Raises `InvalidArgument`, also if Loaders that share servers differ in order, servers, seeded or the way to start.
    """

    def __init__(
        self,
        dataset: Any,
        order: Order,
        servers: int = 1,
        ahead: int | None = None,
        *,
        name: str | None = None,
        collate: Callable[[list[Any]], Any] | None = None,
        seeded: bool | Callable[[int], Any] = True,
        timeout: timedelta | float = 300.0,
        multiprocessing_context: Any = None,
    ) -> None:
        _check_dataset(dataset)
        if not isinstance(order, Order):
            raise InvalidArgument(f"Loader: order is {order!r:.60}; give a ringreduce.data.Order")
        if ahead is None and isinstance(servers, int):
            ahead = min(max(4, 2 * servers), MOST_IN_ADVANCE)
        for what, value, most in (("servers", servers, MOST_SERVERS), ("ahead", ahead, MOST_IN_ADVANCE)):
            if isinstance(value, bool) or not isinstance(value, int) or not 1 <= value <= most:
                raise InvalidArgument(f"Loader: {what} is {value!r}; give an integer from 1 to {most}")
        assert ahead is not None
        if not isinstance(seeded, bool) and not callable(seeded):
            raise InvalidArgument(
                f"Loader: seeded is {seeded!r:.60}; give True, False, or a function that takes a seed"
            )
        method = fresh.start_method(multiprocessing_context)
        self.order, self.servers, self.ahead, self.step = order, servers, ahead, 0
        self.name = name
        own_name = f"of one Loader: {secrets.token_hex(8)}"
        self._timeout = duration("Loader: timeout", timeout, positive=True).total_seconds()
        self._lock = threading.RLock()  # a signal's handler may close this Loader while it reads
        self._may_have_lost_messages = False
        """Whether an error or a signal's handler ended a call, so that messages may be lost."""
        self._asked: dict[Key, int] = {}
        """What servers have been asked for and not told to let go, with the numbers of the requests."""
        self._requests = itertools.count()
        self._ready: dict[Key, tuple[Filled, Memory]] = {}
        self._held: dict[Key, _Held] = {}
        self._released: deque[_Use] = deque()
        """Uses that have ended. Filled by the garbage collector, in any thread."""
        self._closed = False
        self._connections = Connections(
            "without a name" if name is None else f"named {name!r}",
            own_name if name is None else full_name(name, dataset, collate, callable(seeded) and seeded),
            {"order": order.state(), "servers": servers, "seeded": bool(seeded), "multiprocessing_context": method},
            Recipe(dataset, order, collate, seeded),
            self._timeout,
        )
        _open.add(self)
        try:
            self._connections.join(time.monotonic() + self._timeout)
        except BaseException:
            self.close()
            raise

    # reading

    def get(self, step: int, rank: int | None = None, size: int | None = None) -> Any:
        """The part of step `step`'s batch that belongs to rank `rank` of `size`; by default, of the default group.

        The tensors are views of shared memory. At most one earlier batch may still be held, or it raises
        `InvalidArgument`. Clone what is to stay. If several readers share the batch, do not write to it.

        The batches of the next steps are prepared meanwhile, so steps are best read in their order. Any step can be
        read at any time.

        Raises `SampleFailed` if the dataset raised an error or the timeout passed; the Loader stays usable, and a
        second call waits on. So it does if a signal's handler raises an error. Raises `SystemFailure` if servers die
        again and again, and `InvalidArgument` if another thread closes the Loader.
        """
        key, end = self.order.span(step, *share("Loader.get", rank, size)), time.monotonic() + self._timeout
        with self._lock:
            self._check_usable()
            if (held := self._held.get(key)) and (memory := held.use()) is not None:
                return read(memory, held.filled.tensors_end, held.filled.description_end)
            self._check_held(step)
            batch = self.order.batch
            self._ask([(key[0] + each * batch, key[1] + each * batch) for each in range(self.ahead + 1)], end)
            filled, memory = self._wait_for(key, end)
            batch_of_step = self._hand_out(key, step, filled, memory)
            self._may_have_lost_messages = False
            return batch_of_step

    def batch_of(self, step: int) -> Any:
        return self.get(step)

    def close(self) -> None:
        """Ends this Loader, and with the last one that shares them its servers. Tensors that are held stay valid.

        The next Loader of this name gets nothing from servers that have ended.
        """
        connections = getattr(self, "_connections", None)  # none after wrong arguments
        if connections is None or (self._closed and connections.supervisor is None):
            return
        self._closed = True  # a `get` in another thread sees it
        with self._lock:
            self._keep_what_is_held()
            self._ready.clear()
            self._held.clear()
            if connections.supervisor is not None:
                with contextlib.suppress(OSError):  # a program that another thread is just starting has a copy
                    connections.supervisor.shutdown(socket.SHUT_RDWR)
            connections.close()
        supervisor.reap()

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
        for key in [key for key, held in self._held.items() if held.use() is None]:
            del self._held[key]
        return [held.step for held in self._held.values()]

    def _hand_out(self, key: Key, step: int, filled: Filled, memory: Memory) -> Any:
        # What all tensors of the batch hold. When it goes, the slot may be filled again.
        holder = memory.view()
        batch = read(holder, filled.tensors_end, filled.description_end)
        use = _Use(holder, self._released.append)
        use.key, use.request = key, self._asked[key]
        if isinstance(batch, Failure):
            self._released.append(use)
            self._may_have_lost_messages = False  # so a second call lets it go first, and the dataset is asked again
            what = f"id {batch.id}" if batch.id >= 0 else f"ids {_some(self.order.ids_at(*key).tolist())}"
            raise SampleFailed(
                f"Loader.get: step {step}, {what}: in the server, the dataset raised\n{batch.text}", batch.id
            )
        self._held[key] = _Held(use, step, filled, memory)
        return batch

    # servers

    def _ask(self, keys: list[Key], end: float) -> None:
        """Asks for these batches, and lets all others go."""
        told = self._resync() if self._may_have_lost_messages else {}
        self._may_have_lost_messages = True
        while self._released:
            use = self._released.popleft()
            if self._asked.get(use.key) == use.request:
                self._forget(use.key, told)
        wanted = set(keys)
        for key in self._asked.keys() - wanted - self._held.keys() if len(self._asked) > len(keys) else ():
            self._forget(key, told)
        for key in keys:
            if key not in self._asked:
                self._asked[key] = next(self._requests)
                number = self._number(key)
                told[number] = told.get(number, b"") + ASKED.pack(WANT, self._asked[key], *key)
        for number, message in told.items():
            self._send(number, message, end)

    def _resync(self) -> dict[int, bytes]:
        """Begins messages to all servers that make what was asked for and has come so far meaningless."""
        self._ready.clear()
        self._asked = {key: request for key, request in self._asked.items() if key in self._held}
        told = dict.fromkeys(range(self.servers), ASKED.pack(ANEW, 0, 0, 0))
        for key in self._asked:
            told[self._number(key)] += ASKED.pack(KEEP, 0, *key)
        return told

    def _send(self, number: int, message: bytes, end: float) -> None:
        while True:
            try:
                self._connections.to(number).socket.send(message)
                return
            except BlockingIOError:
                self._check_time(number, "read what it was asked for", end)
            except OSError:
                self._reconnect(number, end)
                return

    def _check_time(self, number: int, what: str, end: float) -> None:
        """Raises `SampleFailed` if a server has not done `what` in time."""
        self._check_usable()
        if time.monotonic() < end:
            return
        where = self._connections.ask_supervisor("where", WHERE) or {}
        pid, current = where.get(str(number), (-1, -1))
        message = f"Loader.get: server {number}"
        if pid >= 0:
            message += f" (process {pid}{f', in dataset[{current}]' if current >= 0 else ''})"
        message += f" has not {what} in timeout={self._timeout:g} s"
        if pid >= 0:
            message += f"; see where it is: py-spy dump --pid {pid}"
        if (threads := self._connections.threads) > 1:
            message += (
                f". It was forked from a process with {threads} threads, and lacks them. If it waits for one, as "
                "Polars and Numba's omp layer do, give multiprocessing_context='spawn', or make the Loader before such "
                "a library is used"
            )
        raise SampleFailed(message, current) from None

    def _forget(self, key: Key, told: dict[int, bytes]) -> None:
        number = self._number(key)
        del self._asked[key]
        self._ready.pop(key, None)
        told[number] = told.get(number, b"") + ASKED.pack(DONE, 0, *key)

    def _number(self, key: Key) -> int:
        """Which server has it."""
        return key[0] // self.order.batch % self.servers

    def _wait_for(self, key: Key, end: float) -> tuple[Filled, Memory]:
        if found := self._ready.pop(key, None):
            return found
        number, deaths = self._number(key), 0
        while key not in self._ready:
            try:
                request, filled, memory = self._connections.to(number).next()
                if self._asked.get(filled[:2]) == request and memory is not None:
                    self._ready[filled[:2]] = filled, memory
            except BlockingIOError:
                self._check_time(number, f"prepared ids {_some(self.order.ids_at(*key).tolist())}", end)
            except OSError:
                deaths += 1
                if deaths > MOST_DEATHS:
                    how = ""
                    while died := self._connections.ask_supervisor("died"):
                        how = f", the last time {died[1]}" if died[0] == number else how
                    raise SystemFailure(
                        f"Loader.get: server {number} has died {deaths} times while it prepared ids "
                        f"{_some(self.order.ids_at(*key).tolist())}{how}"
                    ) from None
                self._reconnect(number, end)
        return self._ready.pop(key)

    def _reconnect(self, number: int, end: float) -> None:
        """Connects to the server that replaces number `number`, and asks it for what the old one owes."""
        self._check_usable()
        numbers: Iterable[int] = (number,)
        if not self._connections.replace(number):
            self._keep_what_is_held()
            self._connections.close()
            self._connections.join(end)
            numbers = range(self.servers)
        owed = sorted(self._asked.keys() - self._held.keys() - self._ready.keys())
        for each in numbers:
            wanted = [ASKED.pack(WANT, self._asked[key], *key) for key in owed if self._number(key) == each]
            try:
                if wanted:
                    self._connections.to(each).socket.send(b"".join(wanted))
            except OSError as error:  # if it died, too, `_wait_for` finds that
                if error.errno in WANTS:
                    raise SystemFailure(f"Loader.get: cannot ask server {each}: {explained(error)}") from None

    def _keep_what_is_held(self) -> None:
        """Leaves connections open until the batches that are held have gone, so that no server fills their slots."""
        holders = {key: holder for key, held in self._held.items() if (holder := held.use()) is not None}
        for number in {*map(self._number, holders)}:
            if (connection := self._connections.release(number)) is not None:
                held = {key: holder for key, holder in holders.items() if self._number(key) == number}
                anew = [ASKED.pack(ANEW, 0, 0, 0), *(ASKED.pack(KEEP, 0, *key) for key in held)]
                with contextlib.suppress(OSError):
                    connection.send(b"".join([*anew, ASKED.pack(LAST, 0, 0, 0)]))
                _kept.add(connection)
                left = [*held]
                for holder in held.values():
                    weakref.finalize(holder, _close_after_last, left, connection)


_open: weakref.WeakSet[Loader] = weakref.WeakSet()
_kept: weakref.WeakSet[socket.socket] = weakref.WeakSet()
"""Connections of closed Loaders, to the servers whose batches are still held."""


def _close_after_last(left: list[Key], connection: socket.socket) -> None:
    """One of the batches that are `left` is not held any more."""
    left.pop()
    if not left:
        connection.close()


def _close_in_child() -> None:
    """In a forked child: its parent's servers must not take it for the parent."""
    supervisor.started.clear()
    for connection in _kept:
        connection.close()
    for loader in _open:
        loader._closed, loader._lock = True, threading.RLock()  # another thread may have had it
        loader._connections.close()


os.register_at_fork(after_in_child=_close_in_child)


def _some(ids: list[int]) -> str:
    return f"{', '.join(map(str, ids[:8]))}{', ...' if len(ids) > 8 else ''}"


def _check_dataset(dataset: Any) -> None:
    """Raises `InvalidArgument` for a dataset without ids."""
    whole = dataset
    while type(whole) is Subset:
        whole = whole.dataset
    own = getattr(type(whole), "__getitem__", None) not in (None, Dataset.__getitem__)
    if not own and not hasattr(whole, "__getitems__"):
        instead = "an object that has one"
        if isinstance(whole, Iterable):
            instead = "list(dataset)" if whole is dataset else "a Subset of list(dataset.dataset)"
        raise InvalidArgument(
            f"Loader: dataset is {'' if whole is dataset else 'a Subset of '}a {type(whole).__name__}, without "
            f"__getitem__ or __getitems__, so its samples have no ids to order; give {instead}"
        )
