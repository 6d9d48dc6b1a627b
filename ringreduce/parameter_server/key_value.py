"""`KeyValue`: what a worker calls to make keys, push, pull, wait, take snapshots and leave."""

from __future__ import annotations

import contextlib
import json
import math
import os
import secrets
import socket
import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from datetime import timedelta
from typing import TYPE_CHECKING, Any, TypeAlias
from weakref import WeakKeyDictionary, WeakValueDictionary

import numpy as np
import torch
from torch import nn

from ringreduce import _C
from ringreduce.errors import CollectiveTimeout, InvalidArgument, ServerLost, SystemFailure, UpdateFailed
from ringreduce.parameter_server.arguments import (
    check_average,
    check_key,
    check_like,
    check_priority,
    check_rule,
    check_weight,
    check_wire,
    path_of,
    readable,
    seconds,
)
from ringreduce.parameter_server.checks import shown
from ringreduce.parameter_server.modes import Mode, sync
from ringreduce.parameter_server.pending import Pending, Snapshot
from ringreduce.parameter_server.placement import cut, elements_per_block, place
from ringreduce.parameter_server.pulls import Pulls
from ringreduce.parameter_server.questions import Questions
from ringreduce.parameter_server.readers import Follower
from ringreduce.parameter_server.restoring import restore
from ringreduce.parameter_server.shard import OBSERVERS
from ringreduce.parameter_server.snapshots import check_absent
from ringreduce.parameter_server.updates import (
    CHANGEABLE,
    UpdateRule,
    assign,
    changed_numbers,
    check_dtype,
    numbers_of,
    same_but_numbers,
)

if TYPE_CHECKING:
    from ringreduce._C import ParameterCall, ParameterClient
    from ringreduce.parameter_server.attendant import Attendant
    from ringreduce.parameter_server.embedding import _Batch
    from ringreduce.parameter_server.host import Host

Array: TypeAlias = torch.Tensor | np.ndarray[Any, Any]

_CREATED_AT_ONCE = 1000
"""The most blocks in one control message."""
NOTHING = object()
"""Given to `KeyValue._push` instead of a tensor: the worker takes part in the round, and counts as zeros. If all
workers push nothing, the value and the optimizer's states stay as they are."""
_EXPLAINS = 0.2
"""How many seconds, after a timeout, a server may take to say who is waited for."""

Part = tuple[int, int, int, int, int]  # server, block, first byte in the tensor, bytes, offset in the server's values


@dataclass
class _Key:
    """What a worker knows about a key."""

    spec: dict[str, Any]
    dtype: torch.dtype
    shape: torch.Size
    parts: list[Part]
    """All blocks."""
    everywhere: _C.ParameterParts
    """All blocks, as C++ has them."""
    near: list[Part]
    """The blocks of servers on this host."""
    here: _C.ParameterParts
    """The same, as C++ has them."""
    asked: _C.ParameterParts | None
    """The blocks for which a pull sends requests: those on other hosts; in ssp all, to learn when they may be read."""
    like: torch.Tensor
    """A tensor without memory (device "meta") with the key's dtype and shape."""
    pushes: int = 0
    """The number of this worker's pushes to the key."""


@dataclass
class Membership:
    """What `join` found out: everything that a worker knows about the servers."""

    store: Any
    """A torch store or one that works like it, under a prefix of this parameter server."""
    worker: int
    group: str
    client: ParameterClient
    connections: list[socket.socket]
    """By server: the connection for control messages."""
    names: list[str]
    """By server: its name in messages."""
    host: Host | None
    """The servers of this process, if it has any."""
    block_bytes: int
    window: int
    turns: list[int]
    """By server: how many have served its blocks before the one that does now; if backups are reached by TCP, its
    replica number."""
    reach: Callable[[int, str, float], socket.socket]
    """Connects to the door of a server that was a backup, given its number, its address and a timeout in seconds.
    Raises `OSError`."""
    attendant: Attendant | None = None
    """Set if backups are reached by TCP."""
    loads: list[int] = field(default_factory=list)
    """By server: the bytes of the blocks there that this worker knows of, without tables."""


def parts_of_table(blocks: list[int]) -> _C.ParameterParts:
    return _C.ParameterParts([(server, block, 0, 0, 0) for server, block in enumerate(blocks)])


def _first_difference(name: str, here: Any, there: Any) -> tuple[str, Any, Any]:
    """Where two values, as JSON has them, differ first: the name of the innermost field, and what it is in each."""
    if isinstance(here, dict) and isinstance(there, dict):
        inner = next(key for key in (*here, *there) if here.get(key) != there.get(key))
        return _first_difference(inner, here.get(inner), there.get(inner))
    return name, here, there


class KeyValue:
    """Named tensors, in blocks on all servers. Made by `join`. Not thread-safe, except for `abort`.

    A call that takes a key and a tensor also takes a dictionary of tensors by key. Tensors are dense CPU tensors or
    NumPy arrays. Calls that may wait take `timeout`, in seconds or as a timedelta (default: that of `join`). After it
    they raise `CollectiveTimeout`, which names the worker or server that is waited for. After `ServerLost`, the blocks
    of that server are gone, and those of others can still be read. When a server with a backup ends, calls go on at the
    backup.
    """

    def __init__(self, membership: Membership, timeout: float) -> None:
        self.timeout = timeout
        self._with = membership
        self._client = membership.client
        self._keys: dict[str, _Key] = {}
        self._left = False
        self._attached: WeakValueDictionary[str, Any] = WeakValueDictionary()
        self._detached: dict[str, bytes] = {}
        """For keys of models that were detached: some of the elements of each parameter; nothing of what was shared."""
        self._last_told: WeakKeyDictionary[Any, list[dict[str, Any]]] = WeakKeyDictionary()
        """For optimizers of models that were detached: the settings that the servers had last."""
        """What `attach` has made, by key."""
        self._prefetched: list[_Batch] = []
        """Batches that tables have prefetched, oldest first."""
        self._questions = Questions(membership)
        membership.loads = [0] * len(membership.connections)

    @property
    def worker(self) -> int:
        """The number of this worker. For a founder it is its rank."""
        return self._with.worker

    @property
    def servers(self) -> int:
        return len(self._with.connections)

    @property
    def has_left(self) -> bool:
        return self._left

    # ---- keys --------------------------------------------------------------------------------------------------------

    def init(
        self,
        key: str | Mapping[str, Array],
        value: Array | None = None,
        *,
        update: UpdateRule | None = None,
        mode: Mode | None = None,
        push_wire: str = "float32",
        pull_wire: str = "float32",
        timeout: timedelta | float | None = None,
    ) -> None:
        """Makes a key, or several, whose first value is `value`. Returns when the servers have it.

        `update` is its rule (default: `assign()`) and `mode` its mode (default: `sync()`). Every worker may call this;
        the first one's value is kept. Raises `InvalidArgument` if workers give different rules, modes, wires, dtypes or
        shapes, or if the servers have no room.

        `push_wire` and `pull_wire` say how float32 tensors are sent to and from servers on other hosts: as "float32",
        "bfloat16" (half of the bytes) or "int8" (about a quarter; 32 elements share a power of two). What is rounded
        off a push is added to this worker's next push. Raises `InvalidArgument` for tensors of other dtypes.
        """
        update, mode = assign() if update is None else update, sync() if mode is None else mode
        check_rule(mode, update)
        self._init(self._pairs(key, value), update, mode, [push_wire, pull_wire], self._deadline(timeout))

    def _init(
        self,
        pairs: list[tuple[str, Any]],
        update: UpdateRule,
        mode: Mode,
        wires: list[str],
        deadline: float,
        saved: bool = True,
    ) -> None:
        """Makes keys. `saved`: snapshots have them."""
        sources = {}
        for name, tensor in pairs:
            check_key(name)
            source = readable(name, tensor)
            spec: dict[str, Any] = {
                "dtype": str(source.dtype).removeprefix("torch."),
                "shape": list(source.shape),
                "mode": mode.as_json(),
                "update": update.as_json(),
                "wire": wires,
            }
            if not saved:
                spec["saved"] = False
            check_wire(name, source, spec["wire"])
            if update.kind == "rowwise_adagrad":
                raise InvalidArgument(f"update of {name!r} is rowwise_adagrad(), which is for rows: use ps.Embedding")
            check_dtype(name, source.dtype, update)
            check_average(name, source, mode, update)
            sources[name] = spec, source
        calls, renumbered = {}, []
        for name, (spec, source) in sources.items():
            if self._place(name, spec, source, deadline):
                renumbered.append(name)
            parts = self._keys[name].everywhere
            calls[name] = self._client.send("initialise", parts, source.data_ptr(), timeout=deadline - time.monotonic())
        for name, call in calls.items():
            self._finish(name, call, deadline)
        self._change({name: self._keys[name].everywhere for name in renumbered}, numbers_of(update.as_json()), deadline)

    def update_arguments(self, key: str | Iterable[str], *, timeout: float | None = None, **arguments: Any) -> None:
        """Changes arguments of the update of a key, or of several keys: `kv.update_arguments("w", lr=0.01)`.

        The names are those of the optimizer; those that can change are lr, betas, momentum, dampening, weight_decay,
        eps, lr_decay and alpha. In `sync` the change takes effect before the round of this worker's next push, and
        otherwise at once. It holds for the pushes of all workers, and snapshots and backups have it. One worker may
        call this, or all at the same point of their loops. Raises `InvalidArgument` if the update has no such argument,
        or if another worker has given another value for the same round.
        """
        deadline = self._deadline(timeout)
        keys = [key] if isinstance(key, str) else list(key)
        if not keys:
            raise InvalidArgument("key is empty; it must be a key, or some")
        numbers = {name: changed_numbers(name, self._lookup(name, deadline).spec["update"], arguments) for name in keys}
        for name, each in numbers.items():
            self._change({name: self._keys[name].everywhere}, each, deadline)

    def _change(self, parts: dict[str, _C.ParameterParts], numbers: dict[str, float], deadline: float) -> None:
        """Changes numbers of the rules of keys, of which `parts` are the blocks."""
        calls = [
            (name, self._client.change(each, CHANGEABLE.index(which), number, timeout=deadline - time.monotonic()))
            for name, each in parts.items()
            for which, number in numbers.items()
        ]
        for name, call in calls:
            self._finish(name, call, deadline, "update_arguments")

    def _place(self, key: str, spec: dict[str, Any], source: torch.Tensor, deadline: float) -> bool:
        per_block = elements_per_block(source.element_size(), self._with.block_bytes)
        sizes = [count * source.element_size() for _, count in cut(source.numel(), per_block)]
        wanted = spec | {"per_block": per_block, "servers": place(sizes, self._with.loads)}
        placed, renumbers = self._agree(key, spec, wanted)
        self._create(key, placed, deadline)
        return renumbers

    def _agree(self, key: str, spec: dict[str, Any], wanted: dict[str, Any]) -> tuple[dict[str, Any], bool]:
        """Returns what the first worker that made the key has told the store. Raises `InvalidArgument` if that differs
        from `spec`. If this is the first worker, it tells the store `wanted`. The first one after `restore` may give
        the rule other numbers, and then has to send them to the servers; also returns whether that is so."""
        wanted = wanted | {"made": secrets.token_hex(4)}
        place, asked = f"place/{key}", json.loads(json.dumps(spec))
        placed: dict[str, Any] = json.loads(self._with.store.compare_set(place, "", json.dumps(wanted)))
        renumbers = False
        if (
            placed.get("restored")
            and not wanted.get("restored")
            and same_but_numbers(placed["update"], asked["update"])
        ):
            other = placed | {"update": asked["update"], "restored": None, "by": secrets.token_hex(4)}
            placed = json.loads(self._with.store.compare_set(place, json.dumps(placed), json.dumps(other)))
            renumbers = placed == other
        for name, mine in asked.items():
            if placed.get(name) != mine:
                field, here, there = _first_difference(name, mine, placed.get(name))
                where = f"{name} of {key!r}" if field == name else f"{name} of {key!r} differs: its {field}"
                raise InvalidArgument(
                    f"{where} is {here!r} here, and {there!r} on the worker that made the key: give all workers the "
                    "same"
                )
        return placed, renumbers

    @contextlib.contextmanager
    def _making(self, key: str, placed: dict[str, Any]) -> Iterator[None]:
        """Frees the name of a key again if a server refuses to make it."""
        try:
            yield
        except InvalidArgument:
            self._with.store.compare_set(f"place/{key}", json.dumps(placed), "")
            raise

    def _make_table(self, key: str, spec: dict[str, Any], deadline: float, restored: bool = False) -> _C.ParameterTable:
        """Makes each server's part of a table, unless it exists."""
        check_key(key)
        placed, renumbers = self._agree(key, spec, spec | ({"restored": True} if restored else {}))
        with self._making(key, placed):
            blocks = [
                int(self._questions.ask(server, {"ask": "create table", "key": key, "spec": placed}, deadline)["block"])
                for server in range(self.servers)
            ]
        if renumbers:
            self._change({key: parts_of_table(blocks)}, numbers_of(spec["update"]), deadline)
        return _C.ParameterTable(blocks, placed["dtype"], placed["table"]["width"])

    def _is_key(self, key: str) -> bool:
        return key in self._keys or bool(
            self._with.store.check([f"place/{key}"]) and self._with.store.get(f"place/{key}")
        )

    def _lookup(self, key: str, deadline: float) -> _Key:
        if key not in self._keys:
            check_key(key)
            if not self._is_key(key):
                raise InvalidArgument(
                    f"there is no key {shown(key)} yet: init() makes it on any worker, or attach(), by prefix= and name"
                )
            self._create(key, json.loads(self._with.store.get(f"place/{key}")), deadline)
        return self._keys[key]

    def _create(self, key: str, placed: dict[str, Any], deadline: float) -> None:
        """Makes the blocks of a key on the servers, unless they exist, and learns where they are."""
        if key in self._keys:
            self._keys[key].spec = placed
            return
        if "table" in placed:
            raise InvalidArgument(f"{key!r} is a table of rows: use the ps.Embedding of that name")
        dtype: torch.dtype = getattr(torch, placed["dtype"])
        size = dtype.itemsize
        blocks = cut(math.prod(placed["shape"]), placed["per_block"])
        parts: list[Part | None] = [None] * len(blocks)
        spec = {name: value for name, value in placed.items() if name != "servers"}  # may be too long for a message
        for server in range(self.servers):
            mine = [i for i, owner in enumerate(placed["servers"]) if owner == server]
            for first in range(0, len(mine), _CREATED_AT_ONCE):
                some = mine[first : first + _CREATED_AT_ONCE]
                question = {"ask": "create", "key": key, "blocks": [blocks[i] for i in some], "spec": spec}
                with self._making(key, placed):
                    made = self._questions.ask(server, question, deadline)
                for i, (block, offset) in zip(some, made["blocks"], strict=True):
                    begin, count = blocks[i]
                    parts[i] = (server, block, begin * size, count * size, offset)
                    self._with.loads[server] += count * size
        shape = torch.Size(placed["shape"])
        known = [part for part in parts if part is not None]
        push_wire, pull_wire = placed["wire"]
        everywhere = _C.ParameterParts(known, push_wire=push_wire, pull_wire=pull_wire)
        like = torch.empty(shape, dtype=dtype, device="meta")
        self._keys[key] = self._split(_Key(placed, dtype, shape, known, everywhere, [], everywhere, None, like))

    def _split(self, known: _Key) -> _Key:
        """Notes which blocks are served on this host now."""
        near, far = ([part for part in known.parts if self._client.is_near(part[0]) is it] for it in (True, False))
        push_wire, pull_wire = known.spec["wire"]
        known.near = near
        known.here, there = (_C.ParameterParts(some, push_wire=push_wire, pull_wire=pull_wire) for some in (near, far))
        known.asked = known.everywhere if known.spec["mode"]["mode"] == "ssp" else there if far else None
        return known

    # ---- data --------------------------------------------------------------------------------------------------------

    def push(
        self,
        key: str | Mapping[str, Array],
        value: Array | None = None,
        *,
        weight: float = 1.0,
        priority: int = 0,
        timeout: timedelta | float | None = None,
    ) -> Pending:
        """Sends a contribution to the key's servers. Returns when it is on its way; if the window is full, waits for
        room first.

        `wait()` of the result returns when the push is in the value. The caller may change the tensor at once, except
        one made by `empty`, which must not change before that. `weight` multiplies the contribution; only floating
        point and complex tensors take one. Of the updates that a server could carry out at the same time, those with
        the greatest `priority` go first.
        """
        return self._push(self._pairs(key, value), None, False, weight, priority, timeout)

    def _push(
        self,
        pairs: list[tuple[str, Any]],
        out: Mapping[str, Array] | None,
        start: bool,
        weight: float,
        priority: int,
        timeout: timedelta | float | None,
    ) -> Pending:
        """Pushes, and prepares the pull into `out`. Checks all arguments of both before anything is sent."""
        if self._with.group == OBSERVERS:
            raise InvalidArgument("a reader does not push; join with role='worker' to take part in training")
        check_weight(weight)
        check_priority(priority)
        deadline = self._deadline(timeout)
        sources = [self._source(name, tensor, weight, deadline) for name, tensor in pairs]
        pulls = None if out is None else Pulls(self, out, deadline)
        places = pulls.places() if pulls is not None and start else {}
        tensors = [(parts, memory, places.get(name, 0)) for name, parts, memory, _ in sources]
        for name, *_ in sources:
            self._keys[name].pushes += 1
        left = deadline - time.monotonic()
        try:
            sent = self._client.push(tensors, priority=int(priority), weight=float(weight), timeout=left)
        except CollectiveTimeout as error:
            raise CollectiveTimeout(f"{error}; {self._what_fills_the_window()}") from None
        calls = {name: call for (name, *_), call in zip(sources, sent, strict=True)}
        if pulls is not None:
            pulls.follow({name: calls[name] for name in places if name in calls})
        return Pending(self, calls, pulls)

    def _source(
        self, name: str, tensor: Any, weight: float, deadline: float
    ) -> tuple[str, _C.ParameterParts, int, Any]:
        """Returns the key, its blocks, the address of the values, and the tensor that owns that memory."""
        known = self._keys.get(name) or self._lookup(name, deadline)
        if tensor is NOTHING:
            return name, known.everywhere, 0, tensor
        memory = _C.memory_of(tensor, known.like, False)
        if memory is None:
            tensor = readable(name, tensor)
            check_like(name, known, tensor)
            memory = tensor.data_ptr()
        if weight != 1 and not (known.dtype.is_floating_point or known.dtype.is_complex):
            raise InvalidArgument(f"weight is {weight}; a push of {known.dtype} ({name!r}) takes none but 1")
        return name, known.everywhere, memory, tensor

    def pull(
        self, key: str | Mapping[str, Array], out: Array | None = None, *, timeout: timedelta | float | None = None
    ) -> dict[str, list[int]]:
        """Copies the value of `key` to `out`, or values to the tensors of a dictionary. Returns the versions of all
        blocks, by key.

        The value contains all pushes of this worker. The key's mode says which pushes of other workers it contains.
        """
        if isinstance(key, str) and (known := self._keys.get(key)) and known.asked is None and not self._left:
            memory = _C.memory_of(out, known.like, True)  # the fast path: often a copy is enough
            versions = None if memory is None else self._client.read(known.here, memory, 0.0)
            if versions:
                return {key: versions}
        deadline = self._deadline(timeout)
        return Pulls(self, dict(self._pairs(key, out)), deadline).wait(deadline)

    def push_pull(
        self,
        values: str | Mapping[str, Array],
        value: Array | None = None,
        *,
        out: Array | Mapping[str, Array],
        weight: float = 1.0,
        priority: int = 0,
        start: bool = True,
        timeout: timedelta | float | None = None,
    ) -> Pending:
        """Pushes, then pulls the new values into `out`. They are there when `wait()` of the result has returned.

        `out` may change from this call on, because its first blocks can come back before the last ones are pushed.
        With `start=False` it does not change before `Pending.start()` or `wait()` is called. This is for hooks of a
        backward pass that still needs the old values.
        """
        if isinstance(values, Mapping) and not isinstance(out, Mapping):
            raise InvalidArgument("out is one tensor; for a dictionary of pushes give a dictionary of outputs")
        if not isinstance(start, bool):
            raise InvalidArgument(f"start is {shown(start)}; it must be True or False")
        targets = out if isinstance(out, Mapping) else {str(values): out}
        return self._push(self._pairs(values, value), targets, start, weight, priority, timeout)

    def wait(self, *pending: Pending, timeout: timedelta | float | None = None) -> list[str]:
        """Waits for several pushes; returns the keys of those that came late and were dropped."""
        deadline = self._deadline(timeout)
        for each in pending:
            if not isinstance(each, Pending):
                raise InvalidArgument(
                    f"wait() was given a {type(each).__name__}; give what push() and push_pull() return, one by one"
                )
        return [key for each in pending for key in each.wait(max(0.0, deadline - time.monotonic()))]

    def empty(self, *size: Any, dtype: torch.dtype | None = None) -> torch.Tensor:
        """Returns a tensor in this worker's window, which is pushed without a copy. `size` is as for `torch.empty`.

        After a push it must not be changed before `wait()` has returned. Raises `SystemFailure` if the window has no
        room.
        """
        dtype = torch.get_default_dtype() if dtype is None else dtype
        if not isinstance(dtype, torch.dtype):
            raise InvalidArgument(f"dtype is {shown(dtype)}; it must be a torch.dtype, such as torch.float32")
        try:
            shape = torch.empty(*size, dtype=dtype, device="meta").shape
        except (TypeError, OverflowError, RuntimeError) as error:
            raise InvalidArgument(f"size is {shown(size)}, which torch.empty does not take: {error}") from None
        if (count := shape.numel()) < 1:
            raise InvalidArgument(f"size is {tuple(shape)}; a tensor that can be pushed has 1 element or more")
        piece = self._client.allocate(count * dtype.itemsize)
        return torch.frombuffer(piece, dtype=dtype, count=count).view(shape)

    # ---- time and membership -----------------------------------------------------------------------------------------

    def clock(self, timeout: timedelta | float | None = None) -> None:
        """Ends this worker's current clock on all servers. Only keys in `ssp` use it: the pushes since the last call
        belong to the clock that ends."""
        self._tell("clock", list(range(self.servers)), self._deadline(timeout))

    def barrier(self, timeout: timedelta | float | None = None) -> None:
        """Returns when all members of this worker's group have called it."""
        self._tell("barrier", [0], self._deadline(timeout))

    def leave(self, timeout: timedelta | float | None = None) -> None:
        """Takes this worker out: nobody waits for it any more. Idempotent; called at the end of a `with` block.

        If this process has a server, waits until all workers have left, then ends it. Raises `CollectiveTimeout` if
        they have not left in time; the server ends all the same.
        """
        if self._left:
            return
        self._questions.check_process()
        deadline = self._deadline(timeout)
        self._left = True
        try:
            with contextlib.suppress(ServerLost):  # a lost server does not wait for this worker
                self._tell("leave", list(range(self.servers)), deadline)
        finally:
            self._disconnect()
            self._end_server(max(0.0, deadline - time.monotonic()))

    def _end_server(self, timeout: float) -> None:
        if self._with.host is None:
            return
        staying = self._with.host.wait_until_left(timeout)
        self._with.host.close()
        if staying:
            raise CollectiveTimeout(f"leave: {', '.join(staying)} still use this process's server, which ends now")

    def abort(self) -> None:
        """Ends every wait of this worker, now and later, with `Aborted`. Call it from another thread."""
        self._client.abort()
        self._questions.abort()

    def stats(self, timeout: timedelta | float | None = None) -> dict[str, Any]:
        """Returns what this worker and the servers know about themselves.

        For each server: `bytes`, `requests`, `updates`, `rows` and `memory` since it began `seconds` ago, the number of
        requests that wait for other workers (`waiting`), these workers (`waits_for`), and the workers' `clocks`.
        A server that has ended, or has not answered for `timeout` seconds, is None.
        """
        servers = {}
        for server in range(self.servers):
            found = None
            with contextlib.suppress(ServerLost, CollectiveTimeout):
                found = self._questions.ask(server, {"ask": "statistics"}, self._deadline(timeout))["statistics"]
            servers[self._with.names[server]] = found  # the name is that of a backup, if one has answered
        return {"worker": self.worker, "outstanding": self._client.outstanding, "servers": servers}

    def __enter__(self) -> KeyValue:
        return self

    def __exit__(self, kind: object, *_: object) -> None:
        if kind is None:
            self.leave()
        else:
            self._close()

    def _close(self) -> None:
        """Ends this worker and its server without waiting. The others see them end."""
        self._left = True
        self._disconnect()
        if self._with.host is not None:
            self._with.host.close()

    def _disconnect(self) -> None:
        if self._with.attendant is not None:  # first, so that its thread connects to nobody meanwhile
            self._with.attendant.close()
        self._client.close_news()
        for connection in self._with.connections:
            connection.close()

    def follow(self, model: nn.Module, *, at_most_behind: int = 1, prefix: str = "") -> Follower:
        """Makes `model` follow what workers train: all its parameters are of the same round, and before each forward
        pass it is at most `at_most_behind` rounds behind the servers.

        The key of a parameter is `prefix` followed by its name, as for `attach`, and its mode must be `sync`. The
        servers must be on this host. Raises `InvalidArgument` if a trainable parameter is no key, or if a mode is not
        `sync`. The forward pass raises `ServerLost` when a server has ended.
        """
        return Follower(self, model, at_most_behind, prefix)

    # ---- snapshots ---------------------------------------------------------------------------------------------------

    def snapshot(self, path: str | os.PathLike[str], *, timeout: timedelta | float | None = None) -> Snapshot:
        """Begins to write a snapshot of all servers to the folder `path`. Returns while it is being written; the folder
        appears when it is complete. One worker calls it.

        The snapshot contains everything that this worker has pushed. Keys in `sync` without a quorum, to which this
        worker pushes, are saved with all blocks of the same round. In other modes each server's blocks are of a moment
        of its own. Servers on several hosts need a shared file system. Raises `InvalidArgument` if `path` exists, if a
        snapshot is under way, or if Python updates a key (`function`, and optimizers that are not native).
        """
        deadline = self._deadline(timeout)
        target = path_of(path)
        check_absent(target)
        if not self._client.drain(timeout=max(0.0, deadline - time.monotonic())):
            raise CollectiveTimeout("snapshot: what this worker has pushed was not applied in time")
        folder = f"{target}.partial-{secrets.token_hex(4)}"
        for server in range(self.servers):
            question = {"ask": "snapshot", "folder": folder, "part": f"{server}-of-{self.servers}"}
            self._questions.ask(server, question, deadline)
        return Snapshot(self, target, folder)

    def restore(self, path: str | os.PathLike[str], *, timeout: timedelta | float | None = None) -> list[str]:
        """Makes the keys and tables of a snapshot, with their values and optimizer states; returns their names.

        The number of servers may differ from that of the snapshot. Any worker may call this, and all of them may: the
        first one restores the snapshot, and the others wait until it is there. Call it before any `init` or `Embedding`
        of these names; those then keep what was restored, and may give the update other arguments, such as another lr.
        Versions count from 0 again. `timeout` is for the whole call. Raises `InvalidArgument` if the snapshot is
        incomplete or damaged, or if a key has a value already. If it fails, some keys may exist: begin with a new
        store.
        """
        deadline = self._deadline(timeout)
        return restore(self, path_of(path), deadline)

    # ---- waiting, and saying for whom --------------------------------------------------------------------------------

    def _deadline(self, timeout: timedelta | float | None) -> float:
        if self._left:
            raise InvalidArgument("this worker has left; join again")
        return self._until(timeout)

    def _until(self, timeout: timedelta | float | None) -> float:
        timeout = self.timeout if timeout is None else timeout
        return time.monotonic() + seconds(timeout)

    def _tell(self, kind: str, servers: list[int], deadline: float) -> None:
        call = self._client.tell(kind, servers, timeout=deadline - time.monotonic())
        self._finish("", call, deadline, kind)

    def _finish(self, key: str, call: ParameterCall, deadline: float, kind: str = "") -> bool:
        """Waits for a call about `key`, or one of `kind` "clock", "barrier" or "leave". Returns whether a push came
        late for some block. Raises the error of a call that went wrong."""
        if not self._client.wait(call, timeout=max(0.0, deadline - time.monotonic())):
            answered = {(server, block) for server, block, _, _ in call.answers}
            waiting = next((each for each in call.asked if each not in answered), (0, 0))
            raise CollectiveTimeout(self._who_is_late(key, *waiting, kind))
        if call.went_well:
            return False
        late = False
        for server, block, outcome, _ in call.answers:
            if outcome == "failed":
                text = self._questions.ask(server, {"ask": "failure", "block": block}, deadline)["text"]
                raise UpdateFailed(f"the update of {key!r} on {self._with.names[server]} raised: {text}", server)
            if outcome == "refused" and kind == "update_arguments":
                raise InvalidArgument(
                    f"update_arguments() of {key!r}: another worker has given another value for the same round; give "
                    "all workers the same at the same point of their loops"
                )
            if outcome == "refused":
                raise InvalidArgument(
                    f"{self._with.names[server]} refused a request about {key!r}: the key has no value yet, or this "
                    "worker is no member any more"
                )
            late |= outcome == "late"
        return late

    def _who_is_late(self, key: str, server: int, block: int, kind: str = "") -> str:
        """Returns a text that says for whom an unanswered request waits."""
        name = self._with.names[server]
        what = {"": f"{key!r} on {name}", "barrier": "the barrier"}.get(kind, f"{kind}() on {name}")
        question: dict[str, dict[str, Any]] = {
            "": {"ask": "awaited", "block": block},
            "barrier": {"ask": "absent", "group": self._with.group},
        }
        why = f"{name} or its backup is busy or stopped"
        if kind in question:
            try:
                workers = self._questions.ask(server, question[kind], time.monotonic() + _EXPLAINS)["workers"]
                if workers := [each for each in workers if not each.startswith(f"worker {self.worker} ")]:
                    return f"{what} waits for {', '.join(workers)}"
                why = f"no other worker is missing: it has no value yet, or is being updated, or {why}"
            except (CollectiveTimeout, ServerLost, SystemFailure) as error:
                why = str(error)
        return f"{what} was not ready in time; {why}"

    def _what_fills_the_window(self) -> str:
        """Returns a text that says why a push has found no room in the window, and what to do."""
        advice = (
            "some of its blocks may have gone out: wait() for earlier pushes before new ones, push keys in the same "
            "order on all workers, or join with a larger window="
        )
        if waiting := self._client.unanswered_push():
            for key, known in self._keys.items():
                if any(part[:2] == waiting for part in known.parts):
                    return f"{self._who_is_late(key, *waiting)}; {advice}"
        return advice

    @staticmethod
    def _pairs(key: Any, value: Any) -> list[tuple[str, Any]]:
        if isinstance(key, Mapping):
            if value is not None:
                raise InvalidArgument("a dictionary and a tensor were given; give one of them")
            return list(key.items())
        if not isinstance(key, str):
            check_key(key)
        if value is None:
            raise InvalidArgument(f"no tensor was given for key {key!r:.60}")
        return [(key, value)]
