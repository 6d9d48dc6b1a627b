"""Collectives that `torch.compile` keeps in its graphs, as `torch.ops.ringreduce`.

    from ringreduce import ops

    def row_parallel(x, weight, group):      # group: a name, such as dist.group.WORLD.group_name
        y = x @ weight
        ops.all_reduce_(y, group)
        return y

    compiled = torch.compile(row_parallel, fullgraph=True)

Each function here calls the op of the same name, `torch.ops.ringreduce.all_reduce_` and so on, which exists once this
module has been imported. Both work with and without a compiler. A compiled graph reads and writes the tensors that it
has, so it needs neither copies nor a wait.

**Groups.** `group` is the `group_name` of a process group that this rank is in and whose backend is ringreduce. A graph
stores the name, so it can be compiled before the group is made, and it goes on working if another group gets the name.

**Tensors.** All tensors of a call have one dtype and are on one device. Only numbers of elements must fit, not shapes.
A call that reduces takes the dtypes for which docs/support.md has the operation, and `op` is 'sum', 'avg', 'product',
'min', 'max', 'band', 'bor' or 'bxor'. With CPU tensors the call has ended when the function returns.

**Gradients.** These functions have none. They refuse tensors whose gradient is recorded, in forward mode and by
`torch.func` too: call them under `torch.no_grad()` or `torch.inference_mode()`, or in a `torch.autograd.Function`.
torch's functional collectives have gradients.

**Errors.** `InvalidArgument` for an unknown group or operation and for sizes, dtypes and devices that do not fit, and
the errors of a call that has failed, as the direct calls raise them. torch raises its own for arguments of a wrong
type, such as a process group in place of its name, and for sparse and quantized tensors. A compiler that finds a wrong
argument raises its own error, whose text has ours.

A compiler drops a call whose result the graph does not use, as it drops other computations. All ranks must compile the
same graph, so that all of them drop it.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch

from ringreduce import _C  # noqa: F401 (it registers the ops)


def all_reduce_(x: torch.Tensor, group: str, op: str = "sum") -> None:
    """Replaces `x` on every rank by the reduction over all ranks of `group`.

    The number of elements and the dtype are the same on all ranks, and all ranks get the same bits.
    """
    torch.ops.ringreduce.all_reduce_(x, group, op)


def broadcast_(x: torch.Tensor, group: str, root: int) -> None:
    """Replaces `x` on every rank by that of `root`, a rank in `group` from 0.

    The number of elements and the dtype are the same on all ranks.
    """
    torch.ops.ringreduce.broadcast_(x, group, root)


def all_gather_into(output: torch.Tensor, input: torch.Tensor, group: str) -> None:
    """Puts every rank's `input` into `output`, one after the other in the order of ranks.

    `input` has the same number of elements on all ranks. `output` has as many as all inputs together.
    """
    torch.ops.ringreduce.all_gather_into(output, input, group)


def reduce_scatter_into(output: torch.Tensor, input: torch.Tensor, group: str, op: str = "sum") -> None:
    """Reduces `input` over all ranks and puts the r-th of its equal parts into `output` of rank r.

    `input` has the same number of elements on all ranks, a multiple of the number of ranks. `output` has one part.
    """
    torch.ops.ringreduce.reduce_scatter_into(output, input, group, op)


def all_to_all_into(
    output: torch.Tensor,
    input: torch.Tensor,
    group: str,
    output_split_sizes: Sequence[int] | None = None,
    input_split_sizes: Sequence[int] | None = None,
) -> None:
    """Puts the r-th part of `input` of rank s into the s-th part of `output` of rank r.

    Parts are equal, or as many rows of the first dimension as the split sizes say, which have a number for each rank
    and add up to the tensor's rows. Either all ranks give split sizes or none does. Raises `CollectiveMismatch` if
    those of two ranks do not fit each other.
    """
    torch.ops.ringreduce.all_to_all_into(output, input, group, output_split_sizes, input_split_sizes)
