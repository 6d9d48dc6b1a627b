"""Embeddings whose rows are on the servers, as modules of torch.nn: `Embedding` and `EmbeddingBag`."""

from __future__ import annotations

import math
import time
from dataclasses import dataclass
from functools import partial
from typing import Any
from weakref import WeakKeyDictionary, WeakValueDictionary

import torch
from torch import nn
from torch.nn import functional

from ringreduce import _C
from ringreduce._C import ParameterCall, ParameterClient, ParameterRows
from ringreduce.common.checks import check_is, shown, whole
from ringreduce.errors import CollectiveTimeout, InvalidArgument, RingReduceError
from ringreduce.parameter_server.arguments import Timeout, check_priority, check_rule, check_weight
from ringreduce.parameter_server.client.calls import Calls
from ringreduce.parameter_server.client.key_value import KeyValue
from ringreduce.parameter_server.client.keys import parts_of_table
from ringreduce.parameter_server.client.pending import Pending
from ringreduce.parameter_server.modes import Mode, sync
from ringreduce.parameter_server.updates import UpdateRule, changed_numbers, check_for_rows, with_numbers

MOST_PREFETCHED = 4
"""The most prefetched batches of a table. When there are more, the oldest is dropped."""
_prefetched: WeakKeyDictionary[Calls, list[_Batch]] = WeakKeyDictionary()
"""By worker: the batches that its tables have prefetched, oldest first."""


@dataclass(eq=False)
class _Batch:
    """A pull of rows. If its rows are not taken, they are dropped together with this object."""

    client: ParameterClient
    name: str  # the name of the table
    ids: torch.Tensor
    rows: ParameterRows
    call: ParameterCall
    bytes: int  # the bytes that it takes in the window

    def __del__(self) -> None:
        self.client.cancel(self.call)


class _Computed(list[tuple[ParameterRows, torch.Tensor]]):
    """The rows whose gradients a backward pass has computed, and these. It lives as long as the pass, whose callback
    alone holds it."""


class Embedding(nn.Module):
    """A table with a row for every int64 id. The rows are on the servers, which update them. Every worker makes one.

        users = ps.Embedding(kv, "user", 64, update=ps.rowwise_adagrad(lr=0.05))
        loss(users(ids)).backward()    # pulls the rows of `ids`; backward pushes their gradients

    `dim` is the number of elements of a row, and `dtype` is float32 or float64. Before the first push to a row, its
    values are uniform in `initial`, which is (low, high) and by default (-1/sqrt(dim), 1/sqrt(dim)). They depend only
    on `seed`, the id and the column. A row and its optimizer state take memory from the first push to it. Each of n
    servers holds about 1/n of the rows.

    `update` is `rowwise_adagrad()`, `assign()`, `reduce("sum")` or `optimizer()` of SGD, Adagrad, Adam or AdamW without
    momentum. It changes only the rows of a push: other rows have no weight decay, and their Adam moments do not change.
    Adam's step number is that of the table. `mode` is as for `KeyValue.init` (default: `sync()`) and is that of the
    whole table: in `sync` every worker of the group pushes once a round, even if it has no ids.

    Raises `InvalidArgument` if another worker has made a table `name` with different arguments.
    """

    def __init__(
        self,
        kv: KeyValue,
        name: str,
        dim: int,
        *,
        update: UpdateRule,
        mode: Mode | None = None,
        initial: tuple[float, float] | None = None,
        seed: int = 0,
        dtype: torch.dtype = torch.float32,
    ) -> None:
        super().__init__()
        mode = sync() if mode is None else mode
        check_is("kv", kv, KeyValue, "what ps.join() returns")
        check_rule(mode, update)
        check_for_rows(update)
        dim = whole("dim", dim, 1, "the elements of a row, 1 or more and below 2**63")
        if not isinstance(dtype, torch.dtype) or dtype not in (torch.float32, torch.float64):
            raise InvalidArgument(f"dtype is {shown(dtype)}; rows of a table are torch.float32 or torch.float64")
        seed = whole("seed", seed, 0, "an integer from 0 to 2**63 - 1")
        low, high = _range((-1 / math.sqrt(dim), 1 / math.sqrt(dim)) if initial is None else initial)
        spec = {
            "dtype": str(dtype).removeprefix("torch."),
            "shape": ["rows", dim],
            "mode": mode.as_json(),
            "update": update.as_json(),
            "table": {"width": dim, "seed": seed, "low": low, "high": high},
        }
        self.name, self.dim, self.dtype = name, dim, dtype
        self._rule = update.as_json()
        self._calls, self._client = kv.calls, kv.calls.client
        self._prefetched = _prefetched.setdefault(self._calls, [])
        self._table = kv.calls.make_table(name, spec, kv.calls.deadline(None))
        self._computed: WeakValueDictionary[int, _Computed] = WeakValueDictionary()
        """By the backward pass under way; several are in several threads, or if one runs within another."""
        self._pushed: list[Pending] = []
        self._late = 0

    def extra_repr(self) -> str:
        return f"{self.name!r}, {self.dim}, dtype={self.dtype}"

    def update_arguments(self, *, timeout: float | None = None, **arguments: Any) -> None:
        """Changes arguments of the table's update, such as `lr`, as `KeyValue.update_arguments` does for a key."""
        numbers = changed_numbers(self.name, self._rule, arguments)
        check_for_rows(UpdateRule(**with_numbers(self._rule, numbers)))
        parts = {self.name: parts_of_table(self._table.blocks)}
        self._calls.change(parts, numbers, self._calls.deadline(timeout))

    # ---- rows --------------------------------------------------------------------------------------------------------

    def pull(self, ids: Any, out: torch.Tensor | None = None, *, timeout: Timeout = None) -> torch.Tensor:
        """Returns the rows of `ids`, in `out` if it is given: a tensor of shape `(*ids.shape, dim)`.

        `ids` is a tensor or an array of int64, of any shape and values; an id may occur several times. Which pushes the
        rows contain is the same as for `KeyValue.pull`. Pulling makes no rows.
        """
        deadline = self._calls.deadline(timeout)
        wanted = _ids(ids)
        values = torch.empty(*wanted.shape, self.dim, dtype=self.dtype, device="cpu") if out is None else out
        if not self._is_plain(values, wanted) or not values.is_contiguous() or values.is_neg():
            raise InvalidArgument(
                f"out is {_described(values)}; it must be a dense contiguous tensor of {self.dtype} of shape "
                f"{(*wanted.shape, self.dim)} on the CPU"
            )
        self._take(self._batch(wanted, deadline), values, deadline, distinct=False)
        return values

    def push(
        self, ids: Any, gradients: Any, *, weight: float = 1.0, priority: int = 0, timeout: Timeout = None
    ) -> Pending:
        """Pushes a row of `gradients` for each id, like `KeyValue.push`. Rows of equal ids are added in order.

        `gradients` has shape `(*ids.shape, dim)`. Waiting for the result raises `UpdateFailed` if a server has no
        memory for new rows; then that server has applied nothing of the push. Raises `InvalidArgument`, and sends
        nothing, if a server's part is larger than this worker's window.
        """
        deadline = self._calls.deadline(timeout)
        wanted = _ids(ids)
        source = _as_tensor("gradients", gradients).detach()
        if not self._is_plain(source, wanted):
            raise InvalidArgument(
                f"gradients are {_described(source)}; for ids of shape {tuple(wanted.shape)} they must be dense, of "
                f"{self.dtype} and shape {(*wanted.shape, self.dim)} on the CPU"
            )
        check_weight(weight)
        check_priority(priority)
        rows, values = self._table.rows(wanted.data_ptr(), wanted.numel()), source.resolve_neg().contiguous()
        return self._push(rows, values, deadline, distinct=False, weight=float(weight), priority=int(priority))

    def prefetch(self, ids: Any) -> None:
        """Requests the rows for a later `pull` or forward pass with the same `ids`. Waits only for room in the window.

        The rows contain what was pushed before this call, but nothing that is pushed later, so call it after
        `backward`. They stay in this worker's window until they are used. The oldest batches are dropped when a table
        has more than 4, or when those of all tables, with the next request, would take more than half of the window.
        """
        deadline = self._calls.deadline(None)
        waiting, mine = self._prefetched, self._positions()
        for position in reversed(mine[: max(0, len(mine) + 1 - MOST_PREFETCHED)]):
            del waiting[position]  # frees its room in the window before more is requested
        batch = self._ask(_ids(ids).clone(), deadline)
        waiting.append(batch)

    def _positions(self) -> list[int]:
        """Returns the positions of this table's batches in the list of prefetched ones, oldest first."""
        return [position for position, batch in enumerate(self._prefetched) if batch.name == self.name]

    def _make_room(self, rows: ParameterRows) -> int:
        """Drops the oldest prefetched batches until all fit half of the window; returns the bytes of this request."""
        size = rows.distinct * (8 + self.dim * self.dtype.itemsize)
        waiting = self._prefetched
        while waiting and size + sum(batch.bytes for batch in waiting) > self._client.window_bytes // 2:
            del waiting[0]
        return size

    def _push(self, rows: ParameterRows, values: torch.Tensor, deadline: float, **options: Any) -> Pending:
        self._make_room(rows)
        call = self._table.push(self._client, rows, values.data_ptr(), timeout=deadline - time.monotonic(), **options)
        return Pending(self._calls, {self.name: call})

    def _ask(self, ids: torch.Tensor, deadline: float) -> _Batch:
        rows = self._table.rows(ids.data_ptr(), ids.numel())
        size = self._make_room(rows)
        call = self._table.pull(self._client, rows, timeout=deadline - time.monotonic())
        return _Batch(self._client, self.name, ids, rows, call, size)

    def _batch(self, ids: torch.Tensor, deadline: float) -> _Batch:
        """Returns the pull of `ids` that `prefetch` has begun, or begins one."""
        waiting = self._prefetched
        for position in self._positions():
            if waiting[position].ids.shape == ids.shape and torch.equal(waiting[position].ids, ids):
                return waiting.pop(position)
        return self._ask(ids, deadline)

    def _take(self, batch: _Batch, out: torch.Tensor, deadline: float, *, distinct: bool) -> None:
        self._calls.finish(self.name, batch.call, deadline)
        self._table.take(self._client, batch.rows, batch.call, out.data_ptr(), distinct=distinct)

    # ---- as a module -------------------------------------------------------------------------------------------------

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        """Returns the rows of `ids`, like `torch.nn.Embedding`. `backward` pushes their gradients, in `eval` mode too.

        A backward pass pushes once, at its end, the gradients of all forward passes that it goes through. A forward
        pass under `torch.no_grad()` pushes nothing.
        """
        positions, values = self._values(ids)
        return functional.embedding(positions, values)

    def flush(self, timeout: Timeout = None) -> int:
        """Waits until the servers have applied everything that `backward` has pushed.

        Returns the number of pushes that came late and were dropped, which only happens if the mode has a quorum. If a
        push went wrong, raises its error; further calls raise further errors. `timeout` is in seconds for each push.
        """
        while self._pushed:
            pushed = self._pushed.pop(0)
            try:
                self._late += len(pushed.wait(timeout))
            except BaseException as error:
                if isinstance(error, CollectiveTimeout) or not isinstance(error, RingReduceError):
                    self._pushed.insert(0, pushed)  # it is still under way
                raise
        late, self._late = self._late, 0
        return late

    def _values(self, ids: Any) -> tuple[torch.Tensor, torch.Tensor]:
        """Returns the position of each id's row, and the distinct rows as a leaf tensor whose gradient is pushed."""
        deadline = self._calls.deadline(None)
        wanted = _ids(ids)
        batch = self._batch(wanted, deadline)
        values = torch.empty(batch.rows.distinct, self.dim, dtype=self.dtype, device="cpu")
        self._take(batch, values, deadline, distinct=True)
        positions = torch.empty_like(wanted)
        batch.rows.copy_positions(positions.data_ptr())
        for pushed in tuple(self._pushed):
            if not self._is_answered(pushed):
                break
            try:
                self._pushed.remove(pushed)
            except ValueError:  # another thread has taken it
                continue
            late = len(pushed.wait())  # raises the error of a push that went wrong
            self._late += late
        if torch.is_grad_enabled():
            values.requires_grad_()
            hooked: Any = values
            hooked.register_post_accumulate_grad_hook(partial(self._keep_gradient, batch.rows))
        return positions, values

    def _is_answered(self, pushed: Pending) -> bool:
        return self._client.wait(pushed.calls[self.name], timeout=0.0)

    def _is_plain(self, values: Any, ids: torch.Tensor) -> bool:
        """Whether `values` is a dense CPU tensor with a row for each of `ids`."""
        return (
            isinstance(values, torch.Tensor)
            and not values.is_nested
            and values.layout == torch.strided
            and values.device.type == "cpu"
            and values.dtype == self.dtype
            and values.shape == (*ids.shape, self.dim)
        )

    def _keep_gradient(self, rows: ParameterRows, values: torch.Tensor) -> None:
        assert values.grad is not None
        gradient, values.grad = values.grad.contiguous(), None
        backward = torch._C._current_graph_task_id()
        computed = self._computed.setdefault(backward, _Computed())
        computed.append((rows, gradient))
        if len(computed) == 1:
            engine: Any = torch.autograd.Variable._execution_engine
            engine.queue_callback(partial(self._push_computed, computed))

    def _push_computed(self, computed: _Computed) -> None:
        """Called at the end of a backward pass."""
        rows, gradient = computed[0]
        if len(computed) > 1:
            ids = torch.empty(sum(each.distinct for each, _ in computed), dtype=torch.int64, device="cpu")
            begin = ids.data_ptr()
            for each, _ in computed:
                each.copy_ids(begin)
                begin += each.distinct * ids.itemsize
            rows, gradient = self._table.rows(ids.data_ptr(), ids.numel()), torch.cat([each for _, each in computed])
        deadline = self._calls.deadline(None)
        self._pushed.append(self._push(rows, gradient, deadline, distinct=len(computed) == 1))


class EmbeddingBag(Embedding):
    """An `Embedding` that returns sums, means or maxima of rows, as `torch.nn.EmbeddingBag` does."""

    def __init__(self, kv: KeyValue, name: str, dim: int, *, bag: str = "mean", **options: Any) -> None:
        if not isinstance(bag, str) or bag not in ("sum", "mean", "max"):
            raise InvalidArgument(f"bag is {shown(bag)}; it must be 'sum', 'mean' or 'max'")
        super().__init__(kv, name, dim, **options)
        self.bag = bag

    def forward(
        self, ids: torch.Tensor, offsets: torch.Tensor | None = None, per_sample_weights: torch.Tensor | None = None
    ) -> torch.Tensor:
        """Returns a row for each bag, like `torch.nn.EmbeddingBag`.

        Either `offsets` has the position in `ids` where each bag begins, or `ids` is 2-dimensional: a row for each bag.
        """
        positions, values = self._values(ids)
        try:
            return functional.embedding_bag(
                positions, values, offsets, mode=self.bag, per_sample_weights=per_sample_weights
            )
        except (AttributeError, RuntimeError, TypeError, ValueError) as error:
            raise InvalidArgument(
                f"ids of shape {tuple(positions.shape)}, offsets and per_sample_weights must be as for "
                f"torch.nn.EmbeddingBag: {error}"
            ) from None


def _range(initial: Any) -> tuple[float, float]:
    try:
        low, high = (float(each) for each in initial)
    except (ArithmeticError, RuntimeError, TypeError, ValueError):
        low = high = math.nan
    if not (math.isfinite(low) and math.isfinite(high) and low <= high and max(-low, high) < 1e38):
        raise InvalidArgument(f"initial is {shown(initial)}; it must be (low, high), low no greater than high")
    return low, high


def _described(values: Any) -> str:
    if not isinstance(values, torch.Tensor):
        return f"a {type(values).__name__}"
    if values.is_nested:
        return "a nested tensor"
    return f"{values.dtype} of shape {tuple(values.shape)} and layout {values.layout} on {values.device}"


def _as_tensor(name: str, values: Any) -> torch.Tensor:
    try:
        return values if isinstance(values, torch.Tensor) else torch.as_tensor(values, device="cpu")
    except (TypeError, ValueError, RuntimeError) as error:
        raise InvalidArgument(f"{name} are a {type(values).__name__}, and no tensor or array: {error}") from None


def _ids(ids: Any) -> torch.Tensor:
    tensor = _as_tensor("ids", ids)
    if tensor.dtype != torch.int64 or tensor.device.type != "cpu":
        raise InvalidArgument(
            f"ids are {tensor.dtype} on {tensor.device}; they must be torch.int64, on the CPU: give "
            "torch.as_tensor(ids).long()"
        )
    _C.check_tensor("ids", tensor, written=False)
    return tensor.contiguous()
