"""A server: a process that makes the batches that readers ask for, in memory that they map."""

from __future__ import annotations

import contextlib
import errno
import mmap
import os
import random
import select
import socket
import stat
import time
import traceback
from collections import OrderedDict
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import numpy as np
import torch
from torch.utils.data import Subset

from ringreduce.common.descriptors import above_streams, make_above_streams
from ringreduce.common.failures import SystemFailure
from ringreduce.common.system import WANTS, explained
from ringreduce.data.batches import Failure, LaidOut, lay_out, lay_out_whole
from ringreduce.data.messages import ANEW, ASKED, DONE, FILLED, LAST, WANT, Filled, Key, accept, next_message
from ringreduce.data.order import Order
from ringreduce.data.permutation import mixed
from ringreduce.network.local import close_all, send, shared_memory

KEPT = 16
"""Batches that nobody reads any more and that are kept for a reader that is behind."""
NO_SHARE = (0, 0)
"""Of a reader that reads no part of the batches."""
ROOM = 1.25
"""A new slot has so many times the bytes of its first batch, for batches that are a little larger."""


class Recipe(NamedTuple):
    """What batches are made from, and how."""

    dataset: Any
    order: Order
    collate: Callable[[list[Any]], Any] | None
    seeded: bool | Callable[[int], Any]


class Reader:
    """A process that reads, or a Loader of it."""

    def __init__(self, connection: socket.socket) -> None:
        self.connection = connection
        self.latest = -1
        """The first position of the batch that it has asked for last."""
        self.share = NO_SHARE
        """Which part of each batch it reads, as `Server._share` says."""
        self.untold: dict[Key, int] = {}
        """Batches that are ready for it, with the numbers of its requests, while it has no room for messages."""


@dataclass
class Slot:
    """Memory for a batch. A slot that becomes too small is replaced by another one."""

    number: int
    fd: int
    memory: mmap.mmap
    readers: set[Reader] = field(default_factory=set)
    """That read its batch."""
    known_to: set[Reader] = field(default_factory=set)
    """That have its memory."""
    filled: Filled | None = None


class Server:
    """Serves `recipe` to whoever connects to `listener`. One thread, which never waits for a reader.

    starter: a pidfd of the process that made the first Loader; see `release_output`. current[0]: where it notes the id
    that the dataset is asked for, or -1, so that the supervisor can name it.

    Parts of batches take turns. Of the same part, the batch that is the earliest in the order is made first. So a
    reader that has fallen behind others of its part catches up, and then each batch is made once for all of them.
    """

    def __init__(self, recipe: Recipe, listener: socket.socket, starter: int, current: memoryview) -> None:
        self._recipe, self._listener, self._starter, self._current = recipe, listener, starter, current
        self._readers: dict[int, Reader] = {}
        self._wanted: dict[Key, dict[Reader, int]] = {}
        """Who waits for a batch, with the numbers of their requests."""
        self._slots: dict[Key, Slot] = {}
        self._kept: OrderedDict[Key, None] = OrderedDict()
        self._free: list[Slot] = []
        self._slots_made = 0
        self._batches_made = 0
        self._served: dict[Key, int] = {}
        """By part: when, in batches made, it had its latest turn."""
        self._poll = select.poll()
        self._poll.register(listener, select.POLLIN)
        self._poll.register(starter, select.POLLIN)

    def run(self) -> None:
        """Returns never: the process ends with its supervisor."""
        while True:
            for fd, events in self._poll.poll(0 if self._wanted else None):
                if fd == self._listener.fileno():
                    if (connection := accept(self._listener)) is not None:
                        connection.setblocking(False)
                        self._readers[connection.fileno()] = Reader(connection)
                        self._poll.register(connection, select.POLLIN)
                elif fd == self._starter:
                    self._poll.unregister(fd)
                    release_output()
                elif (reader := self._readers.get(fd)) is not None:
                    if events & select.POLLOUT:
                        self._send(reader)
                    if events & ~select.POLLOUT:
                        self._take(reader)
            if self._wanted:
                self._make(min(self._wanted, key=lambda key: (self._served.get(self._share(key), 0), key)))

    def _take(self, reader: Reader) -> None:
        """Takes a message of a reader."""
        try:
            message, fds = next_message(reader.connection)
        except BlockingIOError:
            return
        except (OSError, SystemFailure):
            self._lose(reader)
            return
        close_all(fds)
        unnamed: set[Key] = set()
        for kind, request, begin, end in ASKED.iter_unpack(message):
            unnamed.discard((begin, end))
            if kind == WANT:
                reader.latest, reader.share = begin, self._share((begin, end))
                if slot := self._slots.get((begin, end)):
                    self._kept.pop((begin, end), None)
                    self._tell(reader, request, slot)
                else:
                    self._wanted.setdefault((begin, end), {})[reader] = request
            elif kind == DONE:
                self._let_go(reader, (begin, end))
            elif kind == ANEW:
                unnamed = {*self._wanted, *self._slots}
                reader.untold.clear()
                self._forget_memory(reader)
            elif kind == LAST:
                reader.share = NO_SHARE
                self._free_unawaited()
        for key in unnamed:
            self._let_go(reader, key)

    def _lose(self, reader: Reader) -> None:
        """A reader has gone."""
        del self._readers[reader.connection.fileno()]
        self._poll.unregister(reader.connection)
        reader.connection.close()
        for key in {*self._wanted, *self._slots}:
            self._let_go(reader, key)
        self._forget_memory(reader)
        self._free_unawaited()

    def _forget_memory(self, reader: Reader) -> None:
        """This reader may have no slot's memory."""
        for slot in [*self._slots.values(), *self._free]:
            slot.known_to.discard(reader)

    def _let_go(self, reader: Reader, key: Key) -> None:
        """This reader does not need this batch any more."""
        reader.untold.pop(key, None)
        waiting = self._wanted.get(key, {})
        if waiting.pop(reader, None) is not None and not waiting:
            del self._wanted[key]
        slot = self._slots.get(key)
        if slot is None or reader not in slot.readers:
            return
        slot.readers.remove(reader)
        if slot.readers:
            return
        if not self._is_awaited(key):
            self._free_slot(key)
            return
        self._kept[key] = None
        if len(self._kept) > KEPT:
            self._free_slot(next(iter(self._kept)))

    def _is_awaited(self, key: Key) -> bool:
        """Whether a reader of this part of the batches has not come so far yet."""
        share = self._share(key)
        return any(each.latest < key[0] and each.share == share for each in self._readers.values())

    def _free_unawaited(self) -> None:
        for key in [key for key in self._kept if not self._is_awaited(key)]:
            self._free_slot(key)

    def _share(self, key: Key) -> Key:
        """Which part of a batch it is: where that begins in the batch, and how long it is."""
        return key[0] % self._recipe.order.batch, key[1] - key[0]

    def _free_slot(self, key: Key) -> None:
        self._kept.pop(key, None)
        self._free.append(self._slots.pop(key))

    def _make(self, key: Key) -> None:
        """Prepares a batch and tells those who want it."""
        try:
            with torch.no_grad():
                laid_out = self._prepared(key)
                slot = self._written(laid_out)
        except BaseException as error:  # a dataset may raise SystemExit, and what Rust calls a panic
            laid_out = lay_out_whole(_failure(error))
            slot = self._written(laid_out)
        self._batches_made += 1
        self._served[self._share(key)] = self._batches_made
        slot.filled = Filled(*key, slot.number, len(slot.memory), laid_out.end, laid_out.bytes)
        self._slots[key] = slot
        for reader, request in self._wanted.pop(key).items():
            self._tell(reader, request, slot)

    def _prepared(self, key: Key) -> LaidOut:
        dataset, order, collate, seeded = self._recipe
        ids = order.ids_at(*key).tolist()
        samples: Any
        if prepares_many(dataset):
            if seeded:
                _seed(order.seed, *key, own=seeded)
            samples = dataset.__getitems__(ids)
            if not isinstance(samples, list):
                return lay_out_whole(collate(samples) if collate else samples)
            if len(samples) != len(ids):
                raise ValueError(f"__getitems__ returned {len(samples)} samples for {len(ids)} ids")
        else:
            samples, number = [], -1
            try:
                for position, number in enumerate(ids, key[0]):
                    if seeded:
                        _seed(order.seed, position // order.n, number, own=seeded)
                    self._current[0] = number
                    samples.append(dataset[number])
            except BaseException as error:
                raise _OfId(number) from error
            finally:
                self._current[0] = -1
        return lay_out_whole(collate(samples)) if collate else lay_out(samples)

    def _written(self, laid_out: LaidOut) -> Slot:
        slot = self._slot_for(laid_out)
        try:
            laid_out.write(np.frombuffer(slot.memory, np.uint8))
        except BaseException:
            self._free.append(slot)
            raise
        return slot

    def _slot_for(self, laid_out: LaidOut) -> Slot:
        """A free slot that is large enough. Closes one that is not."""
        for place, slot in enumerate(self._free):
            if len(slot.memory) >= laid_out.bytes:
                return self._free.pop(place)
        number = self._slots_made
        if self._free:
            small = self._free.pop()
            number = small.number
            os.close(small.fd)
        else:
            self._slots_made += 1
        size = -(-int(laid_out.bytes * ROOM) // mmap.PAGESIZE) * mmap.PAGESIZE
        fd = shared_memory(size)
        return Slot(number, fd, make_above_streams(lambda: mmap.mmap(fd, size)))

    def _tell(self, reader: Reader, request: int, slot: Slot) -> None:
        assert slot.filled is not None
        slot.readers.add(reader)
        reader.untold[slot.filled[:2]] = request
        self._send(reader)

    def _send(self, reader: Reader) -> None:
        """Tells a reader as much as it has room for."""
        for key, request in [*reader.untold.items()]:
            slot = self._slots[key]
            assert slot.filled is not None
            try:
                fds = [] if reader in slot.known_to else [slot.fd]
                send(reader.connection, FILLED.pack(request, *slot.filled), fds, deadline=0)
            except BlockingIOError:
                break
            except OSError as error:
                if error.errno in (errno.ETOOMANYREFS, errno.ENOBUFS, errno.ENOMEM):
                    # Until others have received theirs, or there is memory. `poll` finds room in this connection, so it
                    # is tried again after each millisecond.
                    time.sleep(0.001)
                else:
                    reader.untold.clear()  # it has gone, as `poll` will say
                break
            slot.known_to.add(reader)
            del reader.untold[key]
        self._poll.modify(reader.connection, select.POLLIN | (select.POLLOUT if reader.untold else 0))


def prepares_many(dataset: Any) -> bool:
    """Whether it makes its samples itself when it is asked for several.

    A `Subset` only hands such a call on, if what it is a part of has a `__getitems__`.
    """
    while isinstance(dataset, Subset) and type(dataset).__getitems__ is Subset.__getitems__:
        dataset = dataset.dataset
    return hasattr(dataset, "__getitems__")


def release_output() -> None:
    """Gives up the output of the process that this one was forked from, now that it has ended.

    Whoever reads it from a pipe, as `program | tee log` does, waits until nobody can write there any more.
    """
    for fd in (1, 2):
        with contextlib.suppress(OSError):
            if is_pipe_or_socket(fd):
                point_at_dev_null(fd)


def is_pipe_or_socket(fd: int) -> bool:
    """Whether it is a socket or pipe, so that somebody may wait for its end."""
    mode = os.fstat(fd).st_mode
    return stat.S_ISSOCK(mode) or stat.S_ISFIFO(mode)


def point_at_dev_null(fd: int) -> None:
    """Closes what the descriptor stands for, and keeps its number taken."""
    nothing = above_streams(os.open(os.devnull, os.O_RDWR | os.O_CLOEXEC))
    os.dup2(nothing, fd, inheritable=fd <= 2)
    os.close(nothing)


class _OfId(Exception):
    """Its cause is what the dataset raised for an id."""

    def __init__(self, number: int) -> None:
        super().__init__(number)
        self.id = number


def _failure(error: BaseException) -> Failure:
    number = -1
    if isinstance(error, _OfId) and error.__cause__ is not None:
        number, error = error.id, error.__cause__
    text = "".join(traceback.format_exception(error))
    if isinstance(error, OSError) and error.errno in WANTS:
        text += f"{explained(error)}\n"
    return Failure(text, number)


def _seed(*numbers: int, own: bool | Callable[[int], Any] = True) -> None:
    """Seeds what a dataset may draw its augmentation from, so that the same example gets the same again."""
    seed = mixed(*numbers)
    random.seed(seed)
    np.random.seed(seed & 0xFFFFFFFF)
    torch.default_generator.manual_seed(seed)
    if callable(own):
        own(seed & 0xFFFFFFFF)
