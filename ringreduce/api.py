"""Direct calls: the collectives on torch tensors and NumPy arrays, without `torch.distributed`'s dispatch.

Each takes what its namesake in `torch.distributed` takes, works in place the same way, and returns None or, with
`async_op`, a `Work` to `wait()` for. `group` is a process group of backend ringreduce (default: the world), and ranks
(`src`, `dst`) are ranks in that group. NumPy arrays are used in place through `torch.from_numpy`, so they must be
writable. Errors are those of `ringreduce.errors`.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from datetime import timedelta
from typing import TYPE_CHECKING, Any, TypeAlias, cast

import torch
import torch.distributed as dist
from torch._C._distributed_c10d import AllgatherOptions, _ProcessGroupWrapper
from torch.utils._python_dispatch import is_traceable_wrapper_subclass

from ringreduce import _C
from ringreduce import plan as plans
from ringreduce._C import ProcessGroupRing, nccl_device_of, nccl_version
from ringreduce.config import resolve
from ringreduce.errors import InvalidArgument
from ringreduce.gpu import arrays, nccl
from ringreduce.memory import open_arena

if TYPE_CHECKING:
    import numpy as np

    Array: TypeAlias = "torch.Tensor | np.ndarray[Any, Any]"

ReduceOp: TypeAlias = dist.ReduceOp | dist.ReduceOp.RedOpType
SUM = dist.ReduceOp.SUM
CPU = torch.device("cpu")
DEVICES = (CPU, torch.device("cuda"))


def all_reduce(
    tensor: Array, op: ReduceOp = SUM, group: dist.ProcessGroup | None = None, async_op: bool = False
) -> dist.Work | None:
    """Replaces `tensor` on every rank by the reduction over all ranks."""
    if not async_op and _C.all_reduce_now(group, tensor, op):
        return None
    options = _options(dist.AllreduceOptions, async_op, reduceOp=op)
    return _end(backend_of(group).allreduce([_tensor(tensor)], options), async_op)


def all_reduce_coalesced(
    tensors: Sequence[Array], op: ReduceOp = SUM, group: dist.ProcessGroup | None = None, async_op: bool = False
) -> dist.Work | None:
    """`all_reduce` of each of `tensors`, of any dtypes and sizes, in the same order on every rank; small ones together,
    on CPUs.

    Raises `InvalidArgument` if two of them share memory, `CollectiveMismatch` if the lists differ between ranks.
    """
    options = _options(dist.AllreduceCoalescedOptions, async_op, reduceOp=op)
    return _end(backend_of(group).allreduce_coalesced(_tensors(tensors), options), async_op)


def broadcast(
    tensor: Array, src: int = 0, group: dist.ProcessGroup | None = None, async_op: bool = False
) -> dist.Work | None:
    """Replaces `tensor` on every rank by that of rank `src`."""
    if not async_op and _C.broadcast_now(group, tensor, src):
        return None
    options = _options(dist.BroadcastOptions, async_op, rootRank=src)
    return _end(backend_of(group).broadcast([_tensor(tensor)], options), async_op)


def reduce(
    tensor: Array,
    dst: int = 0,
    op: ReduceOp = SUM,
    group: dist.ProcessGroup | None = None,
    async_op: bool = False,
) -> dist.Work | None:
    """Replaces `tensor` on rank `dst` by the reduction over all ranks; others keep theirs."""
    options = _options(dist.ReduceOptions, async_op, reduceOp=op, rootRank=dst)
    return _end(backend_of(group).reduce([_tensor(tensor)], options), async_op)


def all_gather(
    tensors: Sequence[Array], tensor: Array, group: dist.ProcessGroup | None = None, async_op: bool = False
) -> dist.Work | None:
    """Puts rank r's `tensor` into `tensors[r]` on every rank; sizes may differ between ranks."""
    options = _options(AllgatherOptions, async_op)
    return _end(backend_of(group).allgather([_tensors(tensors)], [_tensor(tensor)], options), async_op)


def all_gather_into_tensor(
    output: Array, tensor: Array, group: dist.ProcessGroup | None = None, async_op: bool = False
) -> dist.Work | None:
    """Puts the ranks' `tensor`s one after the other into `output`, which has size times as many elements."""
    if not async_op and _C.all_gather_now(group, output, tensor):
        return None
    options = _options(AllgatherOptions, async_op)
    return _end(backend_of(group)._allgather_base(_tensor(output), _tensor(tensor), options), async_op)


def reduce_scatter(
    output: Array,
    tensors: Sequence[Array],
    op: ReduceOp = SUM,
    group: dist.ProcessGroup | None = None,
    async_op: bool = False,
) -> dist.Work | None:
    """Puts the reduction of all ranks' `tensors[r]` into `output` of rank r; sizes may differ between blocks."""
    options = _options(dist.ReduceScatterOptions, async_op, reduceOp=op)
    return _end(backend_of(group).reduce_scatter([_tensor(output)], [_tensors(tensors)], options), async_op)


def reduce_scatter_tensor(
    output: Array,
    tensor: Array,
    op: ReduceOp = SUM,
    group: dist.ProcessGroup | None = None,
    async_op: bool = False,
) -> dist.Work | None:
    """Reduces `tensor` over all ranks and puts the r-th of its equal parts into `output` of rank r."""
    if not async_op and _C.reduce_scatter_now(group, output, tensor, op):
        return None
    options = _options(dist.ReduceScatterOptions, async_op, reduceOp=op)
    return _end(backend_of(group)._reduce_scatter_base(_tensor(output), _tensor(tensor), options), async_op)


def gather(
    tensor: Array,
    tensors: Sequence[Array] | None = None,
    dst: int = 0,
    group: dist.ProcessGroup | None = None,
    async_op: bool = False,
) -> dist.Work | None:
    """Puts rank r's `tensor` into `tensors[r]` on rank `dst`; other ranks give no `tensors`."""
    options = _options(dist.GatherOptions, async_op, rootRank=dst)
    outputs = [] if tensors is None else [_tensors(tensors)]
    return _end(backend_of(group).gather(outputs, [_tensor(tensor)], options), async_op)


def scatter(
    tensor: Array,
    tensors: Sequence[Array] | None = None,
    src: int = 0,
    group: dist.ProcessGroup | None = None,
    async_op: bool = False,
) -> dist.Work | None:
    """Puts `tensors[r]` of rank `src` into `tensor` of rank r; other ranks give no `tensors`."""
    options = _options(dist.ScatterOptions, async_op, rootRank=src)
    inputs = [] if tensors is None else [_tensors(tensors)]
    return _end(backend_of(group).scatter([_tensor(tensor)], inputs, options), async_op)


def all_to_all(
    outputs: Sequence[Array], inputs: Sequence[Array], group: dist.ProcessGroup | None = None, async_op: bool = False
) -> dist.Work | None:
    """Puts `inputs[r]` of rank s into `outputs[s]` of rank r; sizes may all differ."""
    options = _options(dist.AllToAllOptions, async_op)
    return _end(backend_of(group).alltoall(_tensors(outputs), _tensors(inputs), options), async_op)


def all_to_all_single(
    output: Array,
    tensor: Array,
    output_split_sizes: Sequence[int] = (),
    input_split_sizes: Sequence[int] = (),
    group: dist.ProcessGroup | None = None,
    async_op: bool = False,
) -> dist.Work | None:
    """`all_to_all` of the parts of one tensor: equal ones, or as many rows as the split sizes say.

    Either all ranks give split sizes or none does.
    """
    splits = list(output_split_sizes), list(input_split_sizes)
    if not async_op and splits == ([], []) and _C.all_to_all_now(group, output, tensor):
        return None
    options = _options(dist.AllToAllOptions, async_op)
    return _end(backend_of(group).alltoall_base(_tensor(output), _tensor(tensor), *splits, options), async_op)


def barrier(group: dist.ProcessGroup | None = None, async_op: bool = False) -> dist.Work | None:
    """Ends when all ranks have called it."""
    return _end(backend_of(group).barrier(_options(dist.BarrierOptions, async_op)), async_op)


def monitored_barrier(
    group: dist.ProcessGroup | None = None, timeout: timedelta | float | None = None, wait_all_ranks: bool = False
) -> None:
    """A barrier that raises `CollectiveTimeout` on every rank that came, naming the ranks that did not.

    The same call as `torch.distributed.monitored_barrier`, which torch up to 2.13 lets Gloo alone serve. `timeout` (a
    number is in seconds) is the group's by default. `wait_all_ranks` decides whether the message begins with the first
    missing rank or with all of them. The group lives on. Ranks that are not in `group` return at once.
    """
    if cast(Any, group) is dist.GroupMember.NON_GROUP_MEMBER:
        return
    backend = backend_of(group)
    limit = backend.options._timeout if timeout is None else timeout
    try:
        limit = limit if isinstance(limit, timedelta) else timedelta(seconds=limit)
        if limit < timedelta():
            raise ValueError
    except (TypeError, ValueError, OverflowError):
        raise InvalidArgument(f"timeout is {timeout!r}; it must be a timedelta or seconds, not negative") from None
    backend.monitored_barrier(limit, wait_all_ranks)


def send(tensor: Array, dst: int, tag: int = 0, group: dist.ProcessGroup | None = None) -> None:
    """Sends `tensor` to rank `dst`; returns when `tensor` may be changed."""
    work = backend_of(group).send([_tensor(tensor)], dst, tag)
    work.wait()
    _end(work, False)


def recv(tensor: Array, src: int | None = None, tag: int = 0, group: dist.ProcessGroup | None = None) -> int:
    """Receives into `tensor` from rank `src`, or from any; returns the sender's rank."""
    backend = backend_of(group)
    tensors = [_tensor(tensor)]
    work = backend.recv_anysource(tensors, tag) if src is None else backend.recv(tensors, src, tag)
    work.wait()
    _end(work, False)
    return work._source_rank() if src is None else src


def empty(
    *size: int | Sequence[int], dtype: torch.dtype | None = None, group: dist.ProcessGroup | None = None
) -> torch.Tensor:
    """A tensor in memory that all ranks of the host can read, for collectives without copies between ranks.

    `size` is given as to `torch.empty`: as numbers, or as one sequence of them. What a rank sends from such a tensor,
    and does not write over in the same call, is read where it is; everything else works as with any tensor. Each rank
    decides for itself. The memory is the process's: it serves every group, before or after the tensor was made, and is
    given back with the tensor. It is taken as it is first written, up to `Options.arena_bytes`.

    `group` decides nothing but errors: with it, or with a default group of backend ringreduce, a group that cannot use
    such memory raises `InvalidArgument`. Raises `SystemFailure` if no room is left, `InvalidArgument` for a size other
    than of whole numbers from 0 and for what is no dtype.
    """
    dtype = torch.get_default_dtype() if dtype is None else dtype
    if not isinstance(dtype, torch.dtype):
        raise InvalidArgument(f"dtype is {dtype!r}; it must be a torch.dtype")
    try:
        given = cast(Any, size[0] if len(size) == 1 and isinstance(size[0], Sequence) else size)
        shape = torch.Size(given)
    except (TypeError, ValueError, RuntimeError):  # RuntimeError: out of range
        raise InvalidArgument(f"size is {size!r}; it must be whole numbers, or one sequence of them") from None
    if any(n < 0 for n in shape):
        raise InvalidArgument(f"size is {tuple(shape)}; it must not be negative")
    if math.prod(shape) * dtype.itemsize >= 2**63:
        raise InvalidArgument(f"size is {tuple(shape)}; a tensor must have less than 2^63 bytes")
    if group is None and not _is_ours(dist.group.WORLD):
        if open_arena(resolve(None)[0]) < 0:
            raise InvalidArgument("RINGREDUCE_ARENA_BYTES is 0, so this process has no arena for shared tensors")
        return _C.empty_in_arena(shape.numel(), dtype).view(shape)
    return backend_of(group).allocate_tensor(shape.numel(), dtype=dtype, device=CPU).view(shape)


def share(tensor: torch.Tensor, group: dist.ProcessGroup | None = None) -> torch.Tensor:
    """Moves `tensor` to memory as `empty` gives it, and returns it: the same object with the same values.

    For parameters and other tensors that somebody else made. It is contiguous afterwards. Views made of it before keep
    the old memory. Raises `InvalidArgument` if it is a view itself or not a dense CPU tensor, `SystemFailure` if there
    is no room left. `group` means what it means to `empty`.
    """
    if not isinstance(tensor, torch.Tensor):
        raise InvalidArgument(f"tensor is a {type(tensor).__name__}; it must be a torch.Tensor")
    plain = not tensor.is_nested and not tensor.is_quantized and not bool(is_traceable_wrapper_subclass(tensor))
    if not plain or tensor.layout != torch.strided or tensor.device != CPU:
        raise InvalidArgument(
            f"tensor is a {type(tensor).__name__} of layout {tensor.layout} and dtype {tensor.dtype} on "
            f"{tensor.device}; it must be a dense torch.Tensor on the CPU"
        )
    if tensor._is_view():
        raise InvalidArgument("tensor is a view of another, which would keep the old memory; share that one")
    moved = empty(*tensor.shape, dtype=tensor.dtype, group=group)
    moved.copy_(tensor.detach())
    tensor.data = moved
    return tensor


def register_plan(plan: plans.Plan, group: dist.ProcessGroup | None = None, most_bytes: int | None = None) -> None:
    """Makes `plan` serve the group's calls of its collective up to `most_bytes` of a block (None: of all sizes).

    A later plan takes its sizes from earlier ones and from the built-in algorithms.

    Collective: all ranks must register the same plans in the same order. Raises `PlanError` if the plan is not proved
    right by `ringreduce.verify`, `InvalidArgument` if it is for another number of ranks or has too many channels.
    """
    backend = backend_of(group)
    if plan.size != backend.size():
        raise InvalidArgument(f"plan {plan.name!r} is for {plan.size} ranks; the group has {backend.size()}")
    if most_bytes is not None and most_bytes < 0:
        raise InvalidArgument(f"most_bytes is {most_bytes}; it must be 0 or more, or None")
    limit = 2**64 - 1 if most_bytes is None else most_bytes
    backend.register_plan(plan.collective, plans.lower(plan), plans.digest(plan), limit)


def use_nccl(communicator: object, group: dist.ProcessGroup | None = None) -> None:
    """Lets the group's calls on CUDA tensors go over communicators of NCCL that are split off `communicator`.

    That one must have the group's ranks, in their order, on the GPUs that they use: nccl4py's `Communicator`, CuPy's
    `NcclCommunicator`, vLLM's `PyNcclCommunicator`, torch's `ProcessGroupNCCL`, or an ncclComm_t as an int. It remains
    its owner's, who may use it again when this has returned, and survives errors of the group. (NCCL before 2.18 cannot
    split: there the group uses `communicator` itself, which nobody else may then, and which must outlive the group.)

    Collective, once, before the group's first call on CUDA tensors; whatever the option gpu_transport says. Raises
    `InvalidArgument` if it is too late, or if some rank's communicator is none or does not fit the group,
    `SystemFailure` if NCCL cannot split it or the new communicators do not work.
    """
    backend = backend_of(group)
    address = nccl.handle_of(communicator)
    nccl_version(nccl.places())  # opens the library
    backend.use_nccl(nccl_device_of(address), address)


def backend_of(group: dist.ProcessGroup | None) -> ProcessGroupRing:
    group = dist.group.WORLD if group is None else group
    if group is None:
        raise InvalidArgument(
            "there is no default group; call torch.distributed.init_process_group('ringreduce') first"
        )
    if not isinstance(group, dist.ProcessGroup):
        raise InvalidArgument(f"group is {group!r}; it must be a process group that this rank is in")
    backend = _found_in(group)
    if backend is None:
        raise InvalidArgument(f"group's backend is {group.name()!r}; it must be 'ringreduce' for CPU or CUDA tensors")
    return backend


def _is_ours(group: dist.ProcessGroup | None) -> bool:
    return group is not None and _found_in(group) is not None


def _found_in(group: dist.ProcessGroup) -> ProcessGroupRing | None:
    for device in DEVICES:
        try:
            backend = group._get_backend(device)
        except RuntimeError:  # the group has none for it
            continue
        if isinstance(backend, _ProcessGroupWrapper):  # TORCH_DISTRIBUTED_DEBUG=DETAIL
            backend = backend.wrapped_pg
        if isinstance(backend, ProcessGroupRing):
            return backend
    return None


def _options(kind: Callable[[], Any], async_op: bool, **values: Any) -> Any:
    options = kind()
    options.asyncOp = async_op
    for name, value in values.items():
        try:
            setattr(options, name, value)
        except TypeError:
            wanted = "torch.distributed.ReduceOp" if name == "reduceOp" else "whole number"
            raise InvalidArgument(f"{name} is {value!r:.60}; it must be a {wanted}") from None
    return options


def _end(work: dist.Work, async_op: bool) -> dist.Work | None:
    if arrays.lent():
        return arrays.give_back(work, async_op)
    return work if async_op else None  # a synchronous call has ended, or is in its stream, or has raised


def _tensor(array: Array) -> torch.Tensor:
    if isinstance(array, torch.Tensor):
        return array
    if hasattr(array, "__cuda_array_interface__"):
        return arrays.borrow(array)
    if not hasattr(array, "__array_interface__"):
        raise InvalidArgument(
            f"tensor is a {type(array).__name__}; it must be a torch.Tensor, a NumPy array, or a GPU array with "
            "__cuda_array_interface__, such as CuPy's"
        )
    if not array.flags.writeable:
        raise InvalidArgument("the NumPy array is read-only; pass a writable copy: array.copy()")
    return torch.from_numpy(array)


def _tensors(arrays: Sequence[Array]) -> list[torch.Tensor]:
    return [_tensor(array) for array in arrays]
