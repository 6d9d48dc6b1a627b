"""Reductions by operators other than torch's: `Op`, and the calls that combine the ranks' values in rank order.

The elements of a tensor are cut in a share for each rank. An all_to_all brings rank r the r-th share of every rank,
rank r combines them from rank 0 upwards, and an all_gather brings the results to all. So operands are combined in the
order of ranks on every transport and layout of hosts, and no rank sends more than twice its tensor. A scan sends each
partial result back to its rank by a second all_to_all.

On one host the engine itself makes an all_reduce of one tensor (`combiners`), in rank order too.

Before data moves, the ranks compare what they call. Before results move, they tell each other whether the operator has
raised an error. Both are small all_gathers. So every rank learns of a fault, and the group stays usable. A small tensor
travels with the first of them, and each rank combines all of it.
"""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable, Sequence
from typing import Any, TypeVar, cast

import torch
import torch.distributed as dist

from ringreduce import _C
from ringreduce.errors import InvalidArgument
from ringreduce.groups.lookup import backend_of
from ringreduce.operators.call import Block, Call, Group, Work, at_once
from ringreduce.operators.op import Op as Op
from ringreduce.operators.rows import Given, check_alike, rows_of, shown

F = TypeVar("F", bound=Callable[..., Any])


def _heard(call: F) -> F:
    """If this rank runs out of memory, the group fails, as the other ranks wait for it."""

    @functools.wraps(call)
    def heard(*arguments: Any, group: Group) -> Any:
        try:
            return call(*arguments, group=group)
        except (MemoryError, RuntimeError) as error:
            if isinstance(error, MemoryError) or "can't allocate memory" in str(error):  # torch's, of a tensor
                with contextlib.suppress(Exception):
                    backend_of(group).fail(f"{call.__name__.strip('_')} by an operator: {error!r}")
            raise

    return cast(F, heard)


# What the direct calls of ringreduce.api do where `op` is an Op.


@_heard
def all_reduce(op: Op, tensor: Given, async_op: bool, out: Given | None, *, group: Group) -> Work:
    if op.native and not async_op and not op.check:  # Call takes longer than a small call
        known = op.native.known(getattr(tensor, "dtype", None))
        if known and _C.all_reduce_now(group, tensor, known, out):
            return None
    call = Call("all_reduce", op, group, async_op, rows_of(op, "tensor", tensor), out)
    call.tell_autograd()
    if not call.all_reduced():
        for block in call.blocks():
            block.exchange()
            block.combine()
            block.to_all()
    for target in call.targets:
        target.finish()
    return None


def all_reduce_coalesced(op: Op, tensors: Sequence[Given], async_op: bool, *, group: Group) -> Work:
    for tensor in tensors:
        all_reduce(op, tensor, async_op, None, group=group)
    return None


@_heard
def reduce(op: Op, tensor: Given, root: int, async_op: bool, out: Given | None, *, group: Group) -> Work:
    call = Call(f"reduce to rank {root}", op, group, async_op, rows_of(op, "tensor", tensor), out)
    if call.rank == root:
        call.tell_autograd()
    for block in call.blocks():
        block.exchange()
        block.combine()
        block.to_root(root)
    for source, target in zip(call.sources, call.targets, strict=True):
        if call.rank == root:
            target.finish()
        elif target is not source:
            target.assign(source.rows)
    return None


@_heard
def reduce_scatter(op: Op, output: Given, inputs: Sequence[Given], async_op: bool, *, group: Group) -> Work:
    size = backend_of(group).size()
    if not isinstance(inputs, Sequence) or len(inputs) != size:
        raise InvalidArgument(
            f"input_list is {shown(inputs)}; it must be a list with what goes to each of the {size} ranks"
        )
    blocks = [rows_of(op, f"input_list[{r}]", each) for r, each in enumerate(inputs)]
    own = rows_of(op, "output", output, result=True)
    sizes = ", ".join(str(each[0].count) for each in blocks)
    call = Call(f"reduce_scatter of blocks of {sizes} elements", op, group, async_op, blocks[0], None, counted=False)
    check_alike(own, blocks[call.rank], "output", f"input_list[{call.rank}]")
    for each in blocks:
        check_alike(each, blocks[0], "a tensor of input_list", "the first", counted=False)
    call.agree()
    block = Block(call, 0, call.count, own[0].count)
    for index, target in enumerate(own):
        room = target.rows.new_empty((size, own[0].count, *target.rows.shape[1:]))
        received, sent = list(room.unbind(0)), [each[index].rows for each in blocks]
        call.backend.alltoall(received, sent, at_once(dist.AllToAllOptions))
        block.rooms.append(room)
    block.combine()
    for room, target in zip(block.rooms, own, strict=True):
        target.assign(room[0])
    return None


@_heard
def reduce_scatter_single(op: Op, output: Given, input: Given, async_op: bool, *, group: Group) -> Work:
    size = backend_of(group).size()
    whole, own = rows_of(op, "input", input), rows_of(op, "output", output, result=True)
    if whole[0].count != own[0].count * size:
        raise InvalidArgument(
            f"input has {whole[0].count} elements and output {own[0].count}; input must have {size} times as many, "
            "one part for each rank"
        )
    check_alike(own, whole, "output", "input", counted=False)
    call = Call("reduce_scatter_single", op, group, async_op, whole, None)
    call.agree()
    block = Block(call, 0, call.count)
    block.exchange()
    block.combine()
    for room, target in zip(block.rooms, own, strict=True):
        target.assign(room[0])
    return None


def scan(tensor: Given, op: Any = dist.ReduceOp.SUM, group: Group = None, out: Given | None = None) -> None:
    """Replaces `tensor` on rank r by the reduction over ranks 0 to r, its own included, in rank order; with `out`,
    writes the result there instead.

    `op` is an `Op`, or SUM, PRODUCT, MIN, MAX, BAND, BOR or BXOR of `torch.distributed.ReduceOp`. The number of
    elements and the dtype are the same on all ranks, and in `out`. Tensors are on CPUs. MPI has the same call as
    MPI_Scan. Raises the errors of the direct calls, and `OperatorFailed`.
    """
    _scan("scan", tensor, op, out, group=group)


def exscan(tensor: Given, op: Any = dist.ReduceOp.SUM, group: Group = None, out: Given | None = None) -> None:
    """Replaces `tensor` on rank r by the reduction over ranks 0 to r - 1, in rank order, like `scan` otherwise.

    Rank 0 has no rank before it: there nothing is written. MPI has the same call as MPI_Exscan.
    """
    _scan("exscan", tensor, op, out, group=group)


@_heard
def _scan(what: str, tensor: Given, given: Any, out: Given | None, *, group: Group) -> None:
    op = given if isinstance(given, Op) else None
    if isinstance(given, dist.ReduceOp | dist.ReduceOp.RedOpType):
        op = next((ours for theirs, ours in _BUILT_IN if theirs == given), None)
    if op is None:
        names = ", ".join(ours.name for _, ours in _BUILT_IN)
        raise InvalidArgument(f"op is {given!r:.60}; {what} takes a ringreduce.Op, or {names} of ReduceOp")
    rows = rows_of(op, "tensor", tensor)
    if not isinstance(given, Op) and op.name in ("BAND", "BOR", "BXOR") and rows[0].rows.is_floating_point():
        raise InvalidArgument(f"tensor has dtype {rows[0].elements.name}; {op.name} is of integers and bool")
    call = Call(what, op, group, False, rows, out)
    if call.rank > 0 or what == "scan":
        call.tell_autograd()
    for block in call.blocks():
        block.exchange(before=1)
        block.combine(prefixes=True)
        block.to_each(behind=int(what == "exscan"))
    for target in call.targets:
        target.finish()


_BUILT_IN: list[tuple[Any, Op]] = [
    (theirs, Op.torch(cast(Any, f), commutative=True, name=theirs.name))
    for theirs, f in {
        dist.ReduceOp.SUM: torch.add,
        dist.ReduceOp.PRODUCT: torch.mul,
        dist.ReduceOp.MIN: torch.minimum,
        dist.ReduceOp.MAX: torch.maximum,
        dist.ReduceOp.BAND: torch.bitwise_and,
        dist.ReduceOp.BOR: torch.bitwise_or,
        dist.ReduceOp.BXOR: torch.bitwise_xor,
    }.items()
]
