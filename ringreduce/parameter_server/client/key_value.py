"""`KeyValue`: what a worker calls to make keys, push, pull, wait, take snapshots and leave."""

from __future__ import annotations

import contextlib
import os
import time
from collections.abc import Iterable, Mapping
from typing import Any

import torch
from torch import nn

from ringreduce import _C
from ringreduce.common.checks import check_bool, shown
from ringreduce.errors import CollectiveTimeout, InvalidArgument, ServerLost
from ringreduce.parameter_server.arguments import Timeout, check_key, check_rule, path_of
from ringreduce.parameter_server.client import pending, restoring
from ringreduce.parameter_server.client.calls import Calls
from ringreduce.parameter_server.client.keys import Array
from ringreduce.parameter_server.client.pending import Pending, Pulls
from ringreduce.parameter_server.client.readers import Follower
from ringreduce.parameter_server.modes import Mode, sync
from ringreduce.parameter_server.updates import UpdateRule, assign, changed_numbers


class KeyValue:
    """Named tensors, in blocks on all servers. Made by `join`. Not thread-safe, except for `abort`.

    A call that takes a key and a tensor also takes a dictionary of tensors by key. Tensors are dense CPU tensors or
    NumPy arrays. Calls that may wait take `timeout`, in seconds or as a timedelta (default: that of `join`). After it
    they raise `CollectiveTimeout`, which names the worker or server that is waited for. After `ServerLost`, the blocks
    of that server are gone, and those of others can still be read. Calls go on at the backup of a server that has one.
    """

    def __init__(self, calls: Calls) -> None:
        self.calls = calls
        """For the other modules of this package."""

    @property
    def timeout(self) -> float:
        """The timeout of calls that are given none, in seconds."""
        return self.calls.timeout

    @timeout.setter
    def timeout(self, timeout: float) -> None:
        self.calls.timeout = timeout

    @property
    def worker(self) -> int:
        """The number of this worker. For a founder it is its rank."""
        return self.calls.entry.worker

    @property
    def servers(self) -> int:
        return self.calls.servers

    @property
    def has_left(self) -> bool:
        return self.calls.has_left

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
        timeout: Timeout = None,
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
        self.calls.init(self._pairs(key, value), update, mode, (push_wire, pull_wire), timeout)

    def update_arguments(self, key: str | Iterable[str], *, timeout: float | None = None, **arguments: Any) -> None:
        """Changes arguments of the update of a key, or of several keys: `kv.update_arguments("w", lr=0.01)`.

        The names are those of the optimizer; those that can change are lr, betas, momentum, dampening, weight_decay,
        eps, lr_decay and alpha. In `sync` the change takes effect before the round of this worker's next push, and
        otherwise at once. It holds for the pushes of all workers, and snapshots and backups have it. One worker may
        call this, or all at the same point of their loops. Raises `InvalidArgument` if the update has no such argument,
        or if another worker has given another value for the same round.
        """
        deadline = self.calls.deadline(timeout)
        keys = [key] if isinstance(key, str) else list(key)
        if not keys:
            raise InvalidArgument("key is empty; it must be a key, or some")
        known = {name: self.calls.lookup(name, deadline) for name in keys}
        numbers = {name: changed_numbers(name, each.spec["update"], arguments) for name, each in known.items()}
        for name, each in numbers.items():
            self.calls.change({name: known[name].everywhere}, each, deadline)

    # ---- data --------------------------------------------------------------------------------------------------------

    def push(
        self,
        key: str | Mapping[str, Array],
        value: Array | None = None,
        *,
        weight: float = 1.0,
        priority: int = 0,
        timeout: Timeout = None,
    ) -> Pending:
        """Sends a contribution to the key's servers. Returns when it is on its way; may wait for room in the window.

        `wait()` of the result returns when the push is in the value. The caller may change the tensor at once, except
        one made by `empty`, which must not change before that. `weight` multiplies the contribution; only floating
        point and complex tensors take one. Of the updates that a server could carry out at the same time, those with
        the greatest `priority` go first.
        """
        return pending.push(self.calls, self._pairs(key, value), None, False, weight, priority, timeout)

    def pull(
        self, key: str | Mapping[str, Array], out: Array | None = None, *, timeout: Timeout = None
    ) -> dict[str, list[int]]:
        """Copies the value of `key` to `out`, or values to a dictionary's tensors. Returns blocks' versions, by key.

        The value contains all pushes of this worker. The key's mode says which pushes of other workers it contains.
        """
        calls = self.calls
        if isinstance(key, str) and (known := calls.keys.get(key)) and known.requested is None and not calls.has_left:
            memory = _C.memory_of(out, known.like, True)  # the fast path: often a copy is enough
            versions = None if memory is None else calls.client.read(known.here, memory, 0.0)
            if versions:
                return {key: versions}
        deadline = calls.deadline(timeout)
        return Pulls(calls, dict(self._pairs(key, out)), deadline).wait(deadline)

    def push_pull(
        self,
        values: str | Mapping[str, Array],
        value: Array | None = None,
        *,
        out: Array | Mapping[str, Array],
        weight: float = 1.0,
        priority: int = 0,
        start: bool = True,
        timeout: Timeout = None,
    ) -> Pending:
        """Pushes, then pulls the new values into `out`. They are there when `wait()` of the result has returned.

        `out` may change from this call on, because its first blocks can come back before the last ones are pushed.
        With `start=False` it does not change before `Pending.start()` or `wait()` is called. This is for hooks of a
        backward pass that still needs the old values.
        """
        if isinstance(values, Mapping) and not isinstance(out, Mapping):
            raise InvalidArgument("out is one tensor; for a dictionary of pushes give a dictionary of outputs")
        check_bool("start", start)
        targets = out if isinstance(out, Mapping) else {str(values): out}
        return pending.push(self.calls, self._pairs(values, value), targets, start, weight, priority, timeout)

    def wait(self, *pending: Pending, timeout: Timeout = None) -> list[str]:
        """Waits for several pushes; returns the keys of those that came late and were dropped."""
        deadline = self.calls.deadline(timeout)
        for each in pending:
            if not isinstance(each, Pending):
                raise InvalidArgument(
                    f"wait() was given a {type(each).__name__}; give what push() and push_pull() return, one by one"
                )
        return [key for each in pending for key in each.wait(max(0.0, deadline - time.monotonic()))]

    def empty(self, *size: Any, dtype: torch.dtype | None = None) -> torch.Tensor:
        """Returns a tensor in this worker's window, which is pushed without a copy. `size` is as for `torch.empty`.

        After a push it must not change before `wait()` has returned. Raises `SystemFailure` if there is no room.
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
        piece = self.calls.client.allocate(count * dtype.itemsize)
        return torch.frombuffer(piece, dtype=dtype, count=count).view(shape)

    # ---- time and membership -----------------------------------------------------------------------------------------

    def clock(self, timeout: Timeout = None) -> None:
        """Ends this worker's clock, to which its pushes since the last call belong, on all servers. For keys in ssp."""
        self.calls.tell("clock", list(range(self.servers)), self.calls.deadline(timeout))

    def barrier(self, timeout: Timeout = None) -> None:
        """Returns when all members of this worker's group have called it."""
        self.calls.tell("barrier", [0], self.calls.deadline(timeout))

    def leave(self, timeout: Timeout = None) -> None:
        """Takes this worker out: nobody waits for it any more. Idempotent; called at the end of a `with` block.

        If this process has a server, waits until all workers have left, then ends it. Raises `CollectiveTimeout` if
        they have not left in time; the server ends all the same.
        """
        if self.has_left:
            return
        self.calls.questions.check_caller()
        deadline = self.calls.deadline(timeout)
        self.calls.has_left = True
        try:
            with contextlib.suppress(ServerLost):  # a lost server does not wait for this worker
                self.calls.tell("leave", list(range(self.servers)), deadline)
        finally:
            self.calls.questions.close()
            local = self.calls.local
            staying = [] if local is None else local.wait_until_left(max(0.0, deadline - time.monotonic()))
            self.calls.close()
            if staying:
                raise CollectiveTimeout(f"leave: {', '.join(staying)} still use this process's server, which ends now")

    def abort(self) -> None:
        """Ends every wait of this worker, now and later, with `Aborted`. Call it from another thread."""
        self.calls.abort()

    def stats(self, timeout: Timeout = None) -> dict[str, Any]:
        """Returns what this worker and the servers know about themselves.

        For each server: `bytes`, `requests`, `updates`, `rows` and `memory` since it began `seconds` ago, the number of
        requests that wait for other workers (`waiting`), these workers (`waits_for`), and the workers' `clocks`.
        A server that has ended, or has not answered for `timeout` seconds, is None.
        """
        servers, questions = {}, self.calls.questions
        for server in range(self.servers):
            found = None
            with contextlib.suppress(ServerLost, CollectiveTimeout):
                found = questions.ask(server, {"ask": "statistics"}, self.calls.deadline(timeout))["statistics"]
            servers[questions.name_of(server)] = found  # the name is that of a backup, if one has answered
        return {"worker": self.worker, "outstanding": self.calls.client.outstanding, "servers": servers}

    def __enter__(self) -> KeyValue:
        return self

    def __exit__(self, kind: object, *_: object) -> None:
        if kind is None:
            self.leave()
        else:
            self.calls.close()

    def follow(self, model: nn.Module, *, at_most_behind: int = 1, prefix: str = "") -> Follower:
        """Makes `model` follow what workers train: all its parameters are of the same round, and before each forward
        pass it is at most `at_most_behind` rounds behind the servers.

        The key of a parameter is `prefix` followed by its name, as for `attach`, and its mode must be `sync`. The
        servers must be on this host. Raises `InvalidArgument` if a trainable parameter is no key, or if a mode is not
        `sync`. The forward pass raises `ServerLost` when a server has ended.
        """
        return Follower(self.calls, self.pull, model, at_most_behind, prefix)

    # ---- snapshots ---------------------------------------------------------------------------------------------------

    def snapshot(self, path: str | os.PathLike[str], *, timeout: Timeout = None) -> restoring.Snapshot:
        """Begins to write a snapshot of all servers to the folder `path`. Returns while it is being written; the folder
        appears when it is complete. One worker calls it.

        The snapshot contains everything that this worker has pushed. Keys in `sync` without a quorum, to which this
        worker pushes, are saved with all blocks of the same round. In other modes each server's blocks are of a moment
        of its own. Servers on several hosts need a shared file system. Raises `InvalidArgument` if `path` exists, if a
        snapshot is under way, or if Python updates a key (`function`, and optimizers that are not native).
        """
        deadline = self.calls.deadline(timeout)
        return restoring.begin(self.calls, path_of(path), deadline)

    def restore(self, path: str | os.PathLike[str], *, timeout: Timeout = None) -> list[str]:
        """Makes the keys and tables of a snapshot, with their values and optimizer states; returns their names.

        The number of servers may differ from that of the snapshot. Any worker may call this, and all of them may: the
        first one restores the snapshot, and the others wait until it is there. Call it before any `init` or `Embedding`
        of these names; those then keep what was restored, and may give the update other arguments, such as another lr.
        Versions count from 0 again. `timeout` is for the whole call. Raises `InvalidArgument` if the snapshot is
        incomplete or damaged, or if a key has a value already. If it fails, some keys may exist: use a new store.
        """
        deadline = self.calls.deadline(timeout)
        return restoring.restore(self.calls, path_of(path), deadline)

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
