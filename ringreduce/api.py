"""The collectives on torch tensors and NumPy arrays, without `torch.distributed`'s dispatch.

Each function takes the same arguments as its namesake in `torch.distributed`, by the same names and in the same order.
It works in place in the same way. It returns None or, with `async_op`, a `Work` to `wait()` for. `group` is a process
group of backend ringreduce (default: the world). `src` and `dst` are global ranks, `group_src` and `group_dst` ranks in
`group`; give one of the two.

**Tensors.** The tensors of a call have one dtype and are on one device, on all ranks. Only numbers of elements must
fit, not shapes. Any strides will do: a tensor that is not contiguous is copied to memory that is, and back, so a
contiguous one is faster. Outputs whose elements share memory, as after `expand`, are refused. Calls that reduce take
the dtypes for which docs/support.md has the operation; all others move elements of every dtype that is not quantized.
NumPy arrays are used in place through `torch.from_numpy`, so they must be writable and not masked; those of dtypes that
the package ml_dtypes adds are torch's of the same name. Autograd hears of every tensor that a call writes, so a
backward pass that needs the old values raises an error. The calls of `torch.distributed` leave it as torch has it: most
of them tell autograd nothing, with any backend.

**Threads.** A group is for one thread at a time: other ranks cannot know in which order two threads of this one make
their calls, and equal calls would then be paired wrongly. A collective that begins while another thread is in one of
the same group breaks the group: all ranks raise `CollectiveMismatch`, since some may have paired the wrong calls. Give
each thread a group of its own. Messages with tags may be sent and received in all threads, and any thread may wait for
a `Work`.

**Operators.** Where a call takes `op`, this may be a `ringreduce.Op`, for reductions of your own in rank order. The
tensors are then what the operator takes, and there is no `async_op`. Such calls may also raise `OperatorFailed`.

**Errors.** Every call raises `InvalidArgument` for arguments that cannot be served, before data moves;
`CollectiveMismatch` if the ranks make different calls; `PeerLost` if a process of the group has died or left;
`CollectiveTimeout` if the group's timeout passes; and `Aborted` if a rank has aborted the group. A `Work` raises them
in its `wait()`. They are classes of `ringreduce.errors`, which says after which ones the group can still be used. A
rank that is not in `group` gets `InvalidArgument`, where torch's functions warn and return.

`torch.compile` does not know these functions: compiled code calls those of `ringreduce.ops`, or torch's. Collectives of
objects, and `batch_isend_irecv`, are torch's own functions. What differs from torch, call by call, is listed with its
reason in tests/unit/test_signatures.py.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from datetime import timedelta
from typing import Any, TypeAlias, cast

import torch.distributed as dist
from torch._C._distributed_c10d import AllgatherOptions

from ringreduce import _C, operators
from ringreduce import plan as plans
from ringreduce.common.units import duration
from ringreduce.errors import InvalidArgument
from ringreduce.gpu import nccl
from ringreduce.groups.calling import (
    Array,
    Group,
    Many,
    Work,
    call_backend,
    copied,
    lists_of_root,
    message,
    options_of,
    rank_in,
    tensor_of,
)
from ringreduce.groups.lookup import backend_of, registered

ReduceOp: TypeAlias = dist.ReduceOp | dist.ReduceOp.RedOpType | operators.Op
Rank: TypeAlias = int | None
SUM = dist.ReduceOp.SUM

log = logging.getLogger(__name__)


@_C.tries_first(_C.all_reduce_now, "group", "tensor", "op", "out")
def all_reduce(
    tensor: Array,
    op: ReduceOp = SUM,
    group: Group = None,
    async_op: bool = False,
    out: Array | None = None,
    wire_dtype: str | None = None,
    feedback: _C.Feedback | None = None,
) -> Work:
    """Replaces `tensor` on every rank by the reduction over all ranks; with `out`, writes the result there instead.

    The number of elements and the dtype are the same on all ranks, and all ranks get the same bits. `out` has the
    shape, dtype and device of `tensor`. A sparse COO tensor on CPUs is summed; it may have other indices on each rank,
    but must have the same shape.

    `wire_dtype` is "float32", "bfloat16", "int8" or "int4": how values go to other hosts, as docs/compression.md says;
    the default is the group's option. Small tensors go unrounded. With `feedback`, what this rank cuts off by that is
    kept there and added the next time. Each tensor needs a `Feedback` of its own, and `op` is SUM or AVG. With one of
    the two, `tensor` is float32, float16 or bfloat16, on the CPU; the last two are reduced as float32.
    """
    if wire_dtype is not None or feedback is not None:
        _check_wire(op, wire_dtype, feedback)
        options = options_of(dist.AllreduceOptions, async_op, reduceOp=op)
        given = Many((tensor if out is None else copied(tensor, out),))
        return call_backend(group, "allreduce_packed", given, options=options, others=(wire_dtype, feedback))
    if isinstance(op, operators.Op):
        return operators.all_reduce(op, tensor, async_op, out, group=group)
    options = options_of(dist.AllreduceOptions, async_op, reduceOp=op)
    return call_backend(group, "allreduce", Many((tensor if out is None else copied(tensor, out),)), options=options)


def all_reduce_coalesced(
    tensors: Sequence[Array], op: ReduceOp = SUM, group: Group = None, async_op: bool = False
) -> Work:
    """Reduces each of `tensors` like `all_reduce`. They may differ in dtype and size, and must come in the same order
    on every rank. On CPUs, small ones are sent together.

    A tensor that is in the list twice is reduced once. Raises `InvalidArgument` if two different tensors share part of
    their memory, and `CollectiveMismatch` if the lists differ between ranks.
    """
    if isinstance(op, operators.Op):
        return operators.all_reduce_coalesced(op, tensors, async_op, group=group)
    options = options_of(dist.AllreduceCoalescedOptions, async_op, reduceOp=op)
    return call_backend(group, "allreduce_coalesced", Many(tensors), options=options)


@_C.tries_first(_C.broadcast_now, "group", "tensor", "src", "group_src")
def broadcast(
    tensor: Array, src: Rank = None, group: Group = None, async_op: bool = False, group_src: Rank = None
) -> Work:
    """Replaces `tensor` on every rank by that of the source (default: rank 0 of the world).

    The number of elements and the dtype are the same on all ranks.
    """
    options = options_of(dist.BroadcastOptions, async_op, rootRank=rank_in(group, "src", src, group_src))
    return call_backend(group, "broadcast", Many((tensor,)), options=options)


def reduce(
    tensor: Array,
    dst: Rank = None,
    op: ReduceOp = SUM,
    group: Group = None,
    async_op: bool = False,
    group_dst: Rank = None,
    out: Array | None = None,
) -> Work:
    """Replaces `tensor` on the destination (default: rank 0 of the world) by the reduction over all ranks; with `out`,
    writes the result there instead. On other ranks `tensor` is unchanged, and `out` becomes a copy of it.

    The number of elements and the dtype are the same on all ranks. `out` has the shape, dtype and device of `tensor`.
    """
    root = rank_in(group, "dst", dst, group_dst)
    if isinstance(op, operators.Op):
        return operators.reduce(op, tensor, root, async_op, out, group=group)
    options = options_of(dist.ReduceOptions, async_op, reduceOp=op, rootRank=root)
    return call_backend(group, "reduce", Many((tensor if out is None else copied(tensor, out),)), options=options)


def all_gather(tensor_list: Sequence[Array], tensor: Array, group: Group = None, async_op: bool = False) -> Work:
    """Puts rank r's `tensor` into `tensor_list[r]` on every rank.

    `tensor_list` has a tensor for each rank, in the order of ranks in `group`. Sizes may differ between ranks:
    `tensor_list[r]` has as many elements as rank r's `tensor`.
    """
    options = options_of(AllgatherOptions, async_op)
    return call_backend(group, "allgather", Many((Many(tensor_list),)), Many((tensor,)), options=options)


@_C.tries_first(_C.all_gather_now, "group", "output_tensor", "input_tensor")
def all_gather_single(output_tensor: Array, input_tensor: Array, group: Group = None, async_op: bool = False) -> Work:
    """Puts every rank's `input_tensor` into `output_tensor`, one after the other in the order of ranks.

    `input_tensor` has the same number of elements on all ranks. `output_tensor` has as many as all inputs together.

    torch up to 2.12 calls this function `all_gather_into_tensor`; that name works here too.
    """
    options = options_of(AllgatherOptions, async_op)
    return call_backend(group, "_allgather_base", output_tensor, input_tensor, options=options)


all_gather_into_tensor = all_gather_single


def reduce_scatter(
    output: Array, input_list: Sequence[Array], op: ReduceOp = SUM, group: Group = None, async_op: bool = False
) -> Work:
    """Puts the reduction of all ranks' `input_list[r]` into `output` of rank r.

    `input_list` has a tensor for each rank. Sizes may differ between blocks: `input_list[r]` of all ranks and `output`
    of rank r have the same number of elements.
    """
    if isinstance(op, operators.Op):
        return operators.reduce_scatter(op, output, input_list, async_op, group=group)
    options = options_of(dist.ReduceScatterOptions, async_op, reduceOp=op)
    return call_backend(group, "reduce_scatter", Many((output,)), Many((Many(input_list),)), options=options)


@_C.tries_first(_C.reduce_scatter_now, "group", "output", "input", "op")
def reduce_scatter_single(
    output: Array, input: Array, op: ReduceOp = SUM, group: Group = None, async_op: bool = False
) -> Work:
    """Reduces `input` over all ranks and puts the r-th of its equal parts into `output` of rank r.

    `input` has the same number of elements on all ranks, a multiple of the number of ranks. `output` has one part.

    torch up to 2.12 has it as `reduce_scatter_tensor`, which works here too.
    """
    if isinstance(op, operators.Op):
        return operators.reduce_scatter_single(op, output, input, async_op, group=group)
    options = options_of(dist.ReduceScatterOptions, async_op, reduceOp=op)
    return call_backend(group, "_reduce_scatter_base", output, input, options=options)


reduce_scatter_tensor = reduce_scatter_single


def gather(
    tensor: Array,
    gather_list: Sequence[Array] | None = None,
    dst: Rank = None,
    group: Group = None,
    async_op: bool = False,
    group_dst: Rank = None,
) -> Work:
    """Puts rank r's `tensor` into `gather_list[r]` on the destination (default: rank 0 of the world).

    The destination gives a tensor for each rank, with as many elements as `tensor`; other ranks give no list. All
    ranks' `tensor` have the same number of elements.
    """
    root = rank_in(group, "dst", dst, group_dst)
    lists = lists_of_root(group, root, "gather_list", gather_list)
    return call_backend(
        group, "gather", lists, Many((tensor,)), options=options_of(dist.GatherOptions, async_op, rootRank=root)
    )


def scatter(
    tensor: Array,
    scatter_list: Sequence[Array] | None = None,
    src: Rank = None,
    group: Group = None,
    async_op: bool = False,
    group_src: Rank = None,
) -> Work:
    """Puts `scatter_list[r]` of the source (default: rank 0 of the world) into `tensor` of rank r.

    The source gives a tensor for each rank, with as many elements as `tensor`; other ranks give no list. All ranks'
    `tensor` have the same number of elements.
    """
    root = rank_in(group, "src", src, group_src)
    lists = lists_of_root(group, root, "scatter_list", scatter_list)
    return call_backend(
        group, "scatter", Many((tensor,)), lists, options=options_of(dist.ScatterOptions, async_op, rootRank=root)
    )


def all_to_all(
    output_tensor_list: Sequence[Array], input_tensor_list: Sequence[Array], group: Group = None, async_op: bool = False
) -> Work:
    """Puts `input_tensor_list[r]` of rank s into `output_tensor_list[s]` of rank r.

    Both lists have a tensor for each rank. Sizes may all differ, as long as the two tensors of each pair have the same
    number of elements. Raises `CollectiveMismatch` if they do not; the group stays usable then.
    """
    options = options_of(dist.AllToAllOptions, async_op)
    return call_backend(group, "alltoall", Many(output_tensor_list), Many(input_tensor_list), options=options)


@_C.tries_first(_C.all_to_all_now, "group", "output", "input")
def all_to_all_single(
    output: Array,
    input: Array,
    output_split_sizes: Sequence[int] | None = None,
    input_split_sizes: Sequence[int] | None = None,
    group: Group = None,
    async_op: bool = False,
) -> Work:
    """Does what `all_to_all` does, for the parts of one tensor: equal parts, or as many rows as the split sizes say.

    Rows are along the first dimension. Split sizes have a number for each rank and add up to the tensor's rows. Either
    all ranks give split sizes or none does. Raises `CollectiveMismatch` if those of two ranks do not fit each other;
    the group stays usable then.
    """
    splits = list(output_split_sizes or ()), list(input_split_sizes or ())
    options = options_of(dist.AllToAllOptions, async_op)
    return call_backend(group, "alltoall_base", output, input, options=options, others=splits)


def barrier(
    group: Group = None,
    async_op: bool = False,
    device_ids: Sequence[int] | None = None,
    timeout: timedelta | float | None = None,
) -> Work:
    """Returns when all ranks have called it.

    `timeout` is a timedelta or seconds; the default is the group's timeout. `device_ids`, which tells NCCL its GPU, is
    not used.
    """
    options = options_of(dist.BarrierOptions, async_op)
    if timeout is not None:
        options.timeout = duration("timeout", timeout)
    return call_backend(group, "barrier", options=options)


def monitored_barrier(
    group: Group = None, timeout: timedelta | float | None = None, wait_all_ranks: bool = False
) -> None:
    """A barrier that raises `CollectiveTimeout` on every rank that came, naming the ranks that did not.

    The same call as `torch.distributed.monitored_barrier`, which torch up to 2.13 lets only Gloo serve. `timeout` may
    be a number of seconds; the default is the group's timeout. With `wait_all_ranks` the message names all missing
    ranks first, else the first of them. The group stays usable. Ranks that are not in `group` return at once.
    """
    if cast(Any, group) is dist.GroupMember.NON_GROUP_MEMBER:
        return
    backend = backend_of(group)
    backend.monitored_barrier(
        backend.options._timeout if timeout is None else duration("timeout", timeout), wait_all_ranks
    )


def isend(tensor: Array, dst: Rank = None, group: Group = None, tag: int = 0, group_dst: Rank = None) -> dist.Work:
    """Begins to send `tensor` to the destination; `wait()` for the `Work` before `tensor` is changed.

    `tag` is a whole number from 0. Messages between two ranks with the same tag arrive in the order of the calls.
    """
    return message(group, "send", tensor, rank_in(group, "dst", dst, group_dst, required=True), tag)


def irecv(tensor: Array, src: Rank = None, group: Group = None, tag: int = 0, group_src: Rank = None) -> dist.Work:
    """Begins to receive into `tensor` from the source, or from any rank if none is given; `wait()` for the `Work`
    before `tensor` is used.

    Takes messages with the same `tag` only. `wait()` raises `CollectiveMismatch` if the message has another number of
    elements or another dtype than `tensor`; the group stays usable then.
    """
    if src is None and group_src is None:
        return message(group, "recv_anysource", tensor, tag)
    return message(group, "recv", tensor, rank_in(group, "src", src, group_src), tag)


def send(tensor: Array, dst: Rank = None, group: Group = None, tag: int = 0, group_dst: Rank = None) -> None:
    """Sends `tensor` to the destination with `tag`; returns when `tensor` may be changed, which may be before it is
    received."""
    isend(tensor, dst, group, tag, group_dst).wait()


def recv(tensor: Array, src: Rank = None, group: Group = None, tag: int = 0, group_src: Rank = None) -> int:
    """Receives into `tensor` from the source, or from any rank if none is given; returns the sender's rank in the
    world.

    Takes messages with the same `tag` only. Raises `CollectiveMismatch` if the message has another number of elements
    or another dtype than `tensor`; the group stays usable then.
    """
    work = irecv(tensor, src, group, tag, group_src)
    work.wait()
    if src is not None:
        return src
    sender = work._source_rank() if group_src is None else group_src
    return int(backend_of(group).options.global_ranks_in_group[sender])


class P2POp(dist.P2POp):
    """A message of `batch_isend_irecv`, like torch's class. `op` may also be `ringreduce.isend` or `irecv`, and
    `tensor` a NumPy array. Arrays of other GPU libraries are not accepted."""

    def __new__(cls, op: Callable[..., Any], tensor: Array, *others: Any, **named: Any) -> P2POp:
        return cast(P2POp, super().__new__(cls, _OF_TORCH.get(op, op), tensor_of(tensor, None), *others, **named))

    def __init__(self, op: Callable[..., Any], tensor: Array, *others: Any, **named: Any) -> None:
        super().__init__(_OF_TORCH.get(op, op), tensor_of(tensor, None), *others, **named)


_OF_TORCH: dict[Callable[..., Any], Callable[..., Any]] = {isend: dist.isend, irecv: dist.irecv}


def register_plan(plan: plans.Plan, group: dist.ProcessGroup | None = None, most_bytes: int | None = None) -> None:
    """Makes `plan` serve the group's calls of its collective whose blocks have at most `most_bytes` (None: all sizes).

    For these sizes it replaces plans that were registered before, and the built-in algorithms.

    Collective: all ranks must register the same plans in the same order. Raises `PlanError` if `ringreduce.verify`
    finds the plan wrong, and `InvalidArgument` if it is for another number of ranks or has too many channels.
    `ringreduce.topology(group)` shows what is registered, and RINGREDUCE_DEBUG logs it.
    """
    backend = backend_of(group)
    if not isinstance(plan, plans.Plan):
        raise InvalidArgument(f"plan is {plan!r:.60}; give a ringreduce.Plan, as ringreduce.plan.build makes them")
    if plan.size != backend.size():
        raise InvalidArgument(f"plan {plan.name!r} is for {plan.size} ranks; the group has {backend.size()}")
    if most_bytes is not None and most_bytes < 0:
        raise InvalidArgument(f"most_bytes is {most_bytes}; it must be 0 or more, or None")
    limit = 2**64 - 1 if most_bytes is None else most_bytes
    backend.register_plan(plan.collective, plans.lower(plan), plans.digest(plan), limit)
    what = (
        f"{plan.collective} of {'all sizes' if most_bytes is None else f'blocks up to {most_bytes} bytes'}: {plan.name}"
    )
    registered.setdefault(cast(dist.ProcessGroup, group or dist.group.WORLD).group_name, []).append(what)
    log.info("[rank %d] registered a plan for %s", backend.options.global_ranks_in_group[backend.rank()], what)


def use_nccl(communicator: object, group: dist.ProcessGroup | None = None) -> None:
    """Sends the group's calls on CUDA tensors over NCCL communicators that are split off `communicator`.

    `communicator` must have the group's ranks, in their order, on the GPUs that they use. It may be nccl4py's
    `Communicator`, CuPy's `NcclCommunicator`, vLLM's `PyNcclCommunicator`, torch's `ProcessGroupNCCL`, or an ncclComm_t
    as an int. The caller keeps it, may use it again when this function has returned, and can go on using it after
    errors of the group. NCCL before 2.18 cannot split. There the group uses `communicator` itself: nobody else may use
    it then, and it must outlive the group.

    Collective. Call it once, before the group's first call on CUDA tensors. It overrides the option gpu_transport.
    Raises `InvalidArgument` if it is too late, or if some rank passes no communicator, or one that does not fit the
    group. Raises `SystemFailure` if NCCL cannot split it, or if the new communicators do not work.
    """
    backend = backend_of(group)
    address = nccl.handle_of(communicator)
    _C.nccl_version(nccl.places())  # opens the library
    backend.use_nccl(_C.nccl_device_of(address), address)


def _check_wire(op: Any, wire_dtype: Any, feedback: Any) -> None:
    if isinstance(op, operators.Op):
        raise InvalidArgument(f"op is {op!r}; with wire_dtype or feedback it must be a torch.distributed.ReduceOp")
    if not isinstance(wire_dtype, str | None):
        raise InvalidArgument(f"wire_dtype is {wire_dtype!r:.60}; it must be a name, such as 'int8'")
    if not isinstance(feedback, _C.Feedback | None):
        raise InvalidArgument(f"feedback is {feedback!r:.60}; it must be a ringreduce.Feedback(), kept between calls")
