"""Tensors in memory that all ranks of a host can read: made there, or moved there."""

from __future__ import annotations

import math
from collections.abc import Sequence
from functools import lru_cache
from typing import Any, cast

import numpy as np
import torch
import torch.distributed as dist
from torch.utils._python_dispatch import is_traceable_wrapper_subclass

from ringreduce import _C
from ringreduce.config import resolve
from ringreduce.errors import InvalidArgument
from ringreduce.groups.arena import open_arena
from ringreduce.groups.lookup import backend_of, found_in

CPU = torch.device("cpu")
OF_ML_DTYPES = (
    "bfloat16",
    "complex32",
    "float8_e4m3fn",
    "float8_e4m3fnuz",
    "float8_e5m2",
    "float8_e5m2fnuz",
    "float8_e8m0fnu",
)
"""Dtypes that the package ml_dtypes gives NumPy, and that torch has under the same names."""


def empty(
    *size: int | Sequence[int], dtype: torch.dtype | None = None, group: dist.ProcessGroup | None = None
) -> torch.Tensor:
    """A tensor in memory that all ranks of the host can read, for collectives without copies between ranks.

    `size` is given as to `torch.empty`: as numbers, or as one sequence of them. Other ranks read in place what a rank
    sends from such a tensor, unless the same call writes over it. In all other ways it is an ordinary tensor. Each rank
    decides for itself. The memory belongs to the process. It serves every group, before or after the tensor was made,
    and is given back with the tensor. It is taken when it is first written, up to `Options.arena_bytes` in all.

    Where there is no such memory, the result is an ordinary tensor: if the process has no arena, or if the ranks of
    `group` share no memory. If no group is given, the default group counts, if its backend is ringreduce. Raises
    `SystemFailure` if no room is left, and `InvalidArgument` if `size` is not of whole numbers from 0, or `dtype` is
    not a dtype.
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
            return torch.empty(shape, dtype=dtype, device=CPU)
        return _C.empty_in_arena(shape.numel(), dtype).view(shape)
    return backend_of(group).allocate_tensor(shape.numel(), dtype=dtype, device=CPU).view(shape)


def share(tensor: torch.Tensor, group: dist.ProcessGroup | None = None) -> torch.Tensor:
    """Moves `tensor` to memory like that of `empty`, and returns the same object with the same values.

    Use it for parameters and other tensors that other code has made. The tensor is contiguous afterwards. Views that
    were made of it before keep the old memory. Raises `InvalidArgument` if `tensor` is itself a view, or not a dense
    CPU tensor, and `SystemFailure` if no room is left. `group` has the same meaning as for `empty`.
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


def zeros(
    *size: int | Sequence[int], dtype: torch.dtype | None = None, group: dist.ProcessGroup | None = None
) -> torch.Tensor:
    """`empty`, filled with zeros."""
    return empty(*size, dtype=dtype, group=group).zero_()


def empty_like(
    tensor: torch.Tensor, dtype: torch.dtype | None = None, group: dist.ProcessGroup | None = None
) -> torch.Tensor:
    """`empty` of the shape of `tensor`, and of its dtype unless another is given; contiguous."""
    if not isinstance(tensor, torch.Tensor):
        raise InvalidArgument(f"tensor is a {type(tensor).__name__}; it must be a torch.Tensor")
    return empty(*tensor.shape, dtype=dtype or tensor.dtype, group=group)


@lru_cache(256)
def torch_dtype(dtype: np.dtype[Any]) -> torch.dtype | None:
    """torch's dtype for these elements. None if it has none, or only one in the other byte order."""
    if dtype.name in OF_ML_DTYPES:
        found: torch.dtype = getattr(torch, dtype.name)
        return found
    try:
        return torch.from_numpy(np.empty(0, dtype)).dtype
    except (TypeError, ValueError):  # ValueError: the byte order
        return None


def viewed(array: np.ndarray[Any, Any]) -> torch.Tensor:
    """A tensor over the array's memory, for a dtype that torch has."""
    if array.dtype.name in OF_ML_DTYPES:
        return torch.from_numpy(array.view(f"i{array.itemsize}")).view(getattr(torch, array.dtype.name))
    return torch.from_numpy(array)


def from_numpy(array: Any, name: str = "tensor", takes_op: bool = True) -> torch.Tensor:
    """A tensor over the memory of the argument `name`, a NumPy array; `takes_op`: of a call between ranks."""
    if isinstance(array, np.generic):
        raise InvalidArgument(f"{name} is a NumPy scalar; pass an array: numpy.array(scalar)")
    refuse_masked(array, name)
    if torch_dtype(array.dtype) is None:
        if array.dtype.hasobject or torch_dtype(array.dtype.newbyteorder("=")) is None:
            raise InvalidArgument(f"{name} is a NumPy array of dtype {array.dtype}; {_instead_of(array, takes_op)}")
        raise InvalidArgument(
            f"{name} is a NumPy array of dtype {array.dtype}, whose byte order is not the machine's; pass "
            'array.astype(array.dtype.newbyteorder("="))'
        )
    if not array.flags.writeable:
        raise InvalidArgument(f"{name} is a NumPy array that is read-only; pass a writable copy: array.copy()")
    try:
        return viewed(array)
    except ValueError:  # negative strides, say
        raise InvalidArgument(
            f"{name} is a NumPy array with strides {array.strides}, which torch cannot use; pass a copy: array.copy()"
        ) from None


def check_dense(tensor: torch.Tensor, name: str) -> None:
    """Raises `InvalidArgument` unless the values of the argument `name` can be read where they lie."""
    if tensor.is_quantized:
        raise InvalidArgument(f"{name}: a tensor is {tensor.dtype}; pass its dequantize()")
    _C.check_tensor(name, tensor, written=False)


def refuse_masked(array: object, name: str) -> None:
    if isinstance(array, np.ma.MaskedArray):
        raise InvalidArgument(
            f"{name} is a masked NumPy array, and its mask would be ignored; pass array.filled(0), or array.data"
        )


def _instead_of(array: np.ndarray[Any, Any], takes_op: bool) -> str:
    """What to do with an array of a dtype that torch lacks."""
    if array.dtype.hasobject or array.itemsize == 0:
        return "give it a dtype of numbers" + (", or use a call such as all_gather_object" if takes_op else "")
    field = f"pass a field of its records (array[{array.dtype.names[0]!r}]), " if array.dtype.names else ""
    move = "move its bytes (array.view(numpy.uint8))"
    if array.ndim == 0 or not array.flags.c_contiguous:
        move = "move the bytes of a copy (numpy.ascontiguousarray(array).view(numpy.uint8))"
    reduce = "reduce it by an operator of your own (op=ringreduce.Op.torch(f)), " if takes_op else ""
    return f"{reduce}{field}{'or ' if reduce or field else ''}{move}"


def copy_values(source: torch.Tensor, target: torch.Tensor) -> None:
    """Gives `target`, the argument out of a call, the values of `source`, its argument tensor."""
    for name, given in (("tensor", source), ("out", target)):
        if given.layout != torch.sparse_coo:
            _C.check_tensor(name, given, written=given is target)
    ours, wanted = ((tuple(each.shape), each.dtype, each.layout, each.device) for each in (target, source))
    if ours != wanted:
        shown = ("{} of {}, {}, on {}".format(*each) for each in (ours, wanted))
        raise InvalidArgument("out is {}; it must be as tensor, {}".format(*shown))
    # torch copies between tensors that overlap in part with an error, or wrongly.
    apart = source is target or not share_memory(source, target)
    target.detach().copy_(source if apart else source.clone())


def share_memory(a: torch.Tensor, b: torch.Tensor) -> bool:
    """Whether memory of the one may be memory of the other."""
    if a.layout != torch.strided or b.layout != torch.strided:
        return False
    left, right = a.untyped_storage(), b.untyped_storage()
    first = max(left.data_ptr(), right.data_ptr())
    return first < min(left.data_ptr() + left.nbytes(), right.data_ptr() + right.nbytes())


def _is_ours(group: dist.ProcessGroup | None) -> bool:
    return group is not None and found_in(group) is not None
