"""Training over slow networks: hooks that send gradients in fewer bytes, and keep what rounding cuts off for later.

    model = DistributedDataParallel(model)
    hook = ringreduce.hooks.compress_ddp(model, "int8")

    model = fully_shard(model)
    hook = ringreduce.hooks.compress_fsdp(model, "int8")

`hook.reset()` forgets what has been cut off.

docs/compression.md says when this pays, what each way costs, and how large the errors are.
"""

import math
from collections.abc import Callable, Sequence
from datetime import timedelta
from functools import partial
from typing import Any, cast

import torch
import torch.distributed as dist
from torch._C._distributed_c10d import GradBucket
from torch.nn.parallel import DistributedDataParallel

from ringreduce import _C
from ringreduce.api import all_gather_single, all_reduce, all_to_all_single
from ringreduce.common.checks import check_bool
from ringreduce.errors import InvalidArgument
from ringreduce.groups.between_hosts import PACKED
from ringreduce.groups.calling import Work

WIRE_DTYPES = tuple(name for name, share in PACKED.items() if share < 1)


class Compressed:
    """The hook that `compressed` makes."""

    def __init__(self, kind: str, feedback: bool, share: float) -> None:
        self._kind, self._feedback, self._share = kind, feedback, share
        self._buckets = _Buckets()
        self.__name__ = self.__qualname__ = f"ringreduce.hooks.compressed({kind!r})"  # which DDP asks for

    def __call__(self, group: dist.ProcessGroup, bucket: GradBucket) -> torch.futures.Future[torch.Tensor]:
        # DDP does not tell a hook the model's group. None would be the world, and average models of other groups too.
        if not isinstance(cast(Any, group), dist.ProcessGroup):
            raise InvalidArgument(
                f"the state of hook {self.__name__} is {group!r:.60}; it must be the model's group: "
                "model.register_comm_hook(model.process_group, hook)"
            )
        gradient = bucket.buffer()
        if self._kind == "topk":
            zeros = partial(torch.zeros_like, gradient, dtype=torch.float32)
            rest = self._buckets.state_of(bucket, zeros) if self._feedback else zeros()
            return _average_largest(gradient, rest, self._share, group)
        rests = self._buckets.state_of(bucket, _C.Feedback) if self._feedback else None
        work = all_reduce(gradient, dist.ReduceOp.AVG, group, async_op=True, wire_dtype=self._kind, feedback=rests)
        assert work is not None
        return work.get_future().then(lambda future: future.value()[0])

    def reset(self) -> None:
        """Forgets what was cut off. To be called after a step that is skipped, such as one whose gradients have
        overflowed, and when a checkpoint is loaded."""
        self._buckets.forget()


def compressed(kind: str = "int8", *, feedback: bool = True, share: float = 0.01) -> Compressed:
    """A communication hook for DistributedDataParallel that averages gradients in fewer bytes.

    `kind` is "bfloat16", "int8" or "int4": all_reduce with that `wire_dtype`, which rounds what goes to other hosts. Or
    it is "topk": each rank sends the `share` of its gradient that is largest in magnitude (at least one element of each
    bucket) to all others, as 8 bytes an element, and the rest counts as zero. Gradients are float32, float16 or
    bfloat16, on the CPU.

    With `feedback`, what a rank has cut off is added to its next gradient. It takes 4 bytes for each element that the
    rank rounds, with "topk" for each element of its gradients. It belongs to this hook and to DDP's buckets, so give
    each model a hook of its own; when DDP rebuilds its buckets, it is dropped. The hook's `reset()` drops it too: call
    that after a step that you skip, such as one whose gradients have overflowed, and when you load a checkpoint.

    `compress_ddp` registers it. To do that yourself, pass the model's group as the state that register_comm_hook takes:
    `model.register_comm_hook(model.process_group, hook)`. Raises `InvalidArgument` for another `kind` or `share`, and
    in the backward pass for another state and for gradients of other dtypes.
    """
    if kind not in (*WIRE_DTYPES, "topk"):
        raise InvalidArgument(f"kind is {kind!r}; it must be one of {', '.join(map(repr, WIRE_DTYPES))} or 'topk'")
    if not isinstance(share, int | float) or not 0 < share <= 1:
        raise InvalidArgument(f"share is {share!r:.60}; it must be a number above 0 and at most 1")
    check_bool("feedback", feedback)
    return Compressed(kind, feedback, share)


def compress_ddp(
    model: DistributedDataParallel, kind: str = "int8", *, feedback: bool = True, share: float = 0.01
) -> Compressed:
    """Has `model` average its gradients over its process group by the hook `compressed(kind, ...)`, and returns the
    hook.

    Raises `InvalidArgument` for a model that is no DistributedDataParallel, and for what `compressed` refuses.
    """
    if not isinstance(cast(Any, model), DistributedDataParallel):
        raise InvalidArgument(
            f"model is a {type(model).__name__}; it must be a torch.nn.parallel.DistributedDataParallel"
        )
    hook = compressed(kind, feedback=feedback, share=share)
    model.register_comm_hook(model.process_group, hook)
    return hook


class CompressedShards:
    """What `compress_fsdp` returns: the `ReduceScatter` of each module."""

    def __init__(self, scatters: "list[ReduceScatter]") -> None:
        self._scatters = scatters

    def reset(self) -> None:
        """Forgets what was cut off, as `Compressed.reset` does."""
        for scatter in self._scatters:
            scatter.reset()


def compress_fsdp(
    model: torch.nn.Module, wire_dtype: str = "int8", *, gather: bool = False, feedback: bool = True
) -> CompressedShards:
    """Has the modules of `model` that fully_shard() was called on reduce their gradients by
    `ReduceScatter(wire_dtype, feedback=feedback)` and, with `gather`, gather their parameters by
    `AllGather(wire_dtype)`.

    Raises `InvalidArgument` if there is no such module, or for another `wire_dtype`.
    """
    sharded = [module for module in model.modules() if hasattr(module, "set_custom_reduce_scatter")]
    if not sharded:
        raise InvalidArgument("model has no module that fully_shard() was called on; call that first")
    scatters = [ReduceScatter(wire_dtype, feedback=feedback) for _ in sharded]
    for module, scatter in zip(cast(list[Any], sharded), scatters, strict=True):
        module.set_custom_reduce_scatter(scatter)
        if gather:
            module.set_custom_all_gather(AllGather(wire_dtype))
    return CompressedShards(scatters)


def all_to_all(
    input: torch.Tensor,
    output_split_sizes: Sequence[int] | None = None,
    input_split_sizes: Sequence[int] | None = None,
    *,
    wire_dtype: str = "int8",
    group: dist.ProcessGroup | None = None,
) -> torch.Tensor:
    """Sends each rank its part of `input`, rounded to `wire_dtype`: tokens to their experts, and back.

    Parts are along the first dimension, as for `torch.distributed.all_to_all_single`: equal ones, or those of the split
    sizes. Returns a new tensor of `input`'s dtype with what the ranks have sent to this one, in their order; a rank's
    part for itself is rounded, too. Gradients flow back the same way, rounded as well. Nothing is kept of what rounding
    cuts off, since the next call has other tokens.

    `input` is float32, float16 or bfloat16, on the CPU. Raises `InvalidArgument`.
    """
    _check_compressible(input)
    ranks = dist.get_world_size(group)
    comm = _Comm(wire_dtype)

    def splits(name: str, sizes: Sequence[int] | None) -> list[int]:
        if sizes is not None:
            if len(sizes) != ranks or min(sizes) < 0:
                raise InvalidArgument(f"{name} is {[*sizes]}; it must have {ranks} sizes, one for each rank")
            return [*sizes]
        if input.dim() == 0 or len(input) % ranks:
            raise InvalidArgument(
                f"input has shape {[*input.shape]} and {name} is None; then the first dimension must be a multiple of "
                f"{ranks}, the number of ranks"
            )
        return [len(input) // ranks] * ranks

    received, sent = splits("output_split_sizes", output_split_sizes), splits("input_split_sizes", input_split_sizes)
    if sum(sent) != len(input):
        raise InvalidArgument(
            f"input_split_sizes has the sum {sum(sent)}; it must be that of input's rows, {len(input)}"
        )
    return cast(torch.Tensor, _AllToAll.apply(input, received, sent, comm, group))  # type: ignore[no-untyped-call]


class _AllToAll(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, input: torch.Tensor, received: Any, sent: Any, comm: "_Comm", group: Any) -> torch.Tensor:
        ctx.backward_of = sent, received, comm, group
        shape, width = input.shape[1:], math.prod(input.shape[1:])
        parts = [comm.packed(part.reshape(1, -1).float().contiguous())[0] for part in torch.split(input.detach(), sent)]
        packed = torch.cat(parts)
        sizes = [_C.packed_bytes(comm.wire_dtype, rows * width) for rows in received]
        found = packed.new_empty(sum(sizes))
        all_to_all_single(found, packed, sizes, [len(part) for part in parts], group=group)
        rows = [
            comm.unpacked(part[None], count * width)[0]
            for part, count in zip(torch.split(found, sizes), received, strict=True)
        ]
        return torch.cat(rows).reshape(sum(received), *shape).to(input.dtype)

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor) -> Any:
        return _AllToAll.apply(gradients[0].contiguous(), *ctx.backward_of), None, None, None, None  # type: ignore[no-untyped-call]


class _Comm:
    """What FSDP2 asks of its custom communication, and the packing of float32 rows for one rank each."""

    def __init__(self, wire_dtype: str) -> None:
        if wire_dtype not in WIRE_DTYPES:
            raise InvalidArgument(
                f"wire_dtype is {wire_dtype!r}; it must be one of {', '.join(map(repr, WIRE_DTYPES))}"
            )
        self.wire_dtype = wire_dtype

    def allocate(self, size: Any, *, dtype: torch.dtype, device: torch.device) -> torch.Tensor:
        return torch.empty(*size, dtype=dtype, device=device)

    def packed(self, rows: torch.Tensor, rests: torch.Tensor | None = None) -> torch.Tensor:
        count = rows.shape[1]
        packed = torch.empty(len(rows), _C.packed_bytes(self.wire_dtype, count), dtype=torch.uint8, device="cpu")
        for row, to in enumerate(packed):
            rest = 0 if rests is None else rests[row].data_ptr()
            _C.pack(self.wire_dtype, to.data_ptr(), rows[row].data_ptr(), count, rest)
        return packed

    def unpacked(self, packed: torch.Tensor, count: int) -> torch.Tensor:
        rows = torch.empty(len(packed), count, dtype=torch.float32, device="cpu")
        for row, values in zip(packed, rows, strict=True):
            _C.unpack(self.wire_dtype, values.data_ptr(), row.data_ptr(), count)
        return rows


class ReduceScatter(_Comm):
    """For FSDP2's `set_custom_reduce_scatter`: each rank rounds its gradients once, and they are added in float32.

    What it has cut off is added to the next gradients, so each module needs an object of its own. Gradients are
    float32, float16 or bfloat16, on the CPU; the operation is a sum or an average.
    """

    def __init__(self, wire_dtype: str = "int8", *, feedback: bool = True) -> None:
        super().__init__(wire_dtype)
        check_bool("feedback", feedback)
        self.feedback = feedback
        self._rests: torch.Tensor | None = None

    def reset(self) -> None:
        """Forgets what was cut off."""
        self._rests = None

    def __call__(
        self,
        output_tensor: torch.Tensor,
        input_tensor: torch.Tensor,
        group: dist.ProcessGroup,
        op: Any = dist.ReduceOp.SUM,
        async_op: bool = False,
    ) -> Work:
        _check_compressible(input_tensor)
        if op not in (dist.ReduceOp.SUM, dist.ReduceOp.AVG):
            raise InvalidArgument(f"op is {op}; a compressed reduce_scatter has SUM and AVG")
        if input_tensor.numel() != output_tensor.numel() * group.size():
            raise InvalidArgument(
                f"input_tensor has {input_tensor.numel()} elements and output_tensor {output_tensor.numel()}; "
                f"input_tensor must have {group.size()} times as many, a part for each rank"
            )
        rows = input_tensor.reshape(group.size(), -1).float()
        if self.feedback and (self._rests is None or self._rests.shape != rows.shape):
            self._rests = torch.zeros_like(rows)
        sent = self.packed(rows, self._rests)
        received = torch.empty_like(sent)
        work = all_to_all_single(received, sent, group=group, async_op=True)

        def add() -> None:
            total = self.unpacked(received, rows.shape[1]).sum(0)
            output_tensor.copy_(total.div_(group.size()) if op == dist.ReduceOp.AVG else total)

        return _finished(work, add, async_op)


class AllGather(_Comm):
    """For FSDP2's `set_custom_all_gather`: each rank rounds its parameters, its own copy of them too, so that all ranks
    compute with the same. The parameters that the optimizer updates are not rounded."""

    def __call__(
        self, output_tensor: torch.Tensor, input_tensor: torch.Tensor, group: dist.ProcessGroup, async_op: bool = False
    ) -> Work:
        _check_compressible(input_tensor)
        own = self.packed(input_tensor.reshape(1, -1).float())
        everything = own.new_empty(group.size(), own.shape[1])
        work = all_gather_single(everything, own, group=group, async_op=True)

        def unpack() -> None:
            output_tensor.copy_(self.unpacked(everything, input_tensor.numel()).reshape(output_tensor.shape))

        return _finished(work, unpack, async_op)


class _Buckets:
    """What a hook keeps of each of DDP's buckets, until DDP puts the parameters into other ones."""

    def __init__(self) -> None:
        self._of: dict[int, tuple[tuple[int, ...], Any]] = {}

    def forget(self) -> None:
        self._of.clear()

    def state_of(self, bucket: GradBucket, make: Callable[[], Any]) -> Any:
        parameters = tuple(map(id, bucket.parameters()))
        known, state = self._of.get(bucket.index(), (None, None))
        if known != parameters:
            if known is not None:
                self._of.clear()
            state = make()
            self._of[bucket.index()] = parameters, state
        return state


def _average_largest(
    gradient: torch.Tensor, rest: torch.Tensor, share: float, group: dist.ProcessGroup | None
) -> torch.futures.Future[torch.Tensor]:
    """Replaces `gradient` by the average over all ranks of its largest elements; `rest` is added first, and keeps the
    others."""
    _check_compressible(gradient)
    rest += gradient
    places = rest.abs().topk(math.ceil(share * len(rest)), sorted=False).indices
    own = torch.stack((places.int(), rest[places].view(torch.int32)))
    rest[places] = 0
    rest.nan_to_num_(0, 0, 0)
    everything = own.new_empty(dist.get_world_size(group), *own.shape)
    work = all_gather_single(everything, own, group, async_op=True)
    assert work is not None

    def average(future: torch.futures.Future[Any]) -> torch.Tensor:
        future.value()  # raises what has failed
        total = torch.zeros_like(rest)
        for where, values in everything:  # in the order of ranks, so that all get the same bits
            total.index_add_(0, where, values.view(torch.float32))
        gradient.copy_(total.div_(len(everything)))
        return gradient

    return work.get_future().then(average)


def _check_compressible(tensor: torch.Tensor) -> None:
    if tensor.device.type != "cpu" or tensor.dtype not in (torch.float32, torch.float16, torch.bfloat16):
        raise InvalidArgument(
            f"a tensor of {tensor.dtype} on {tensor.device} cannot be compressed; it must be float32, float16 or "
            "bfloat16, on the CPU"
        )


class _Then(dist.Work):
    """A call whose result `finish` still has to be made of; the thread that waits does that."""

    def __init__(self, work: dist.Work, finish: Callable[[], None]) -> None:
        super().__init__()
        self._work, self._finish = work, finish

    def wait(self, timeout: timedelta = timedelta(0)) -> bool:
        self._work.wait(timeout)
        self._finish()
        return True


def _finished(work: Work, finish: Callable[[], None], async_op: bool) -> Work:
    both = _Then(cast(dist.Work, work), finish)
    if async_op:
        return both
    both.wait()
    return None
