"""The tensors of a call with an `Op` as rows, one for each element, and what the operator gets to see of them."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any, TypeAlias, cast

import numpy as np
import torch

from ringreduce.errors import InvalidArgument
from ringreduce.groups.tensors import from_numpy
from ringreduce.operators.op import Op, Shape

Array: TypeAlias = torch.Tensor | np.ndarray[Any, Any]
Given: TypeAlias = Array | Sequence[Array]


class Rows:
    """A tensor of a call as `rows`, one an element. `rows` is a copy where the tensor is not contiguous; elements of a
    dtype that torch does not have are rows of bytes."""

    def __init__(self, name: str, array: Array, element: Shape) -> None:
        self.element = element
        self.records: np.dtype[Any] | None = None
        if not isinstance(array, torch.Tensor | np.ndarray):
            raise InvalidArgument(
                f"{name} is a {type(array).__name__}; with an Op it must be a torch.Tensor or a NumPy array"
            )
        shape = tuple(array.shape)
        if shape[len(shape) - len(element) :] != element:
            raise InvalidArgument(
                f"{name} has shape {shape}; the operator's elements have {element}, which must end it"
            )
        self.count = math.prod(shape[: len(shape) - len(element)])
        self.dtype = str(array.dtype).removeprefix("torch.")
        self.array = array
        if isinstance(array, np.ndarray) and not _torch_has(array.dtype):
            self.records = array.dtype
            self.rows = self._bytes(name, array)
            return
        tensor = array if isinstance(array, torch.Tensor) else from_numpy(array, name)
        if tensor.layout != torch.strided or tensor.is_quantized or tensor.is_nested:
            raise InvalidArgument(f"{name} is of layout {tensor.layout} and dtype {tensor.dtype}; it must be dense")
        if not tensor.is_cpu:
            raise InvalidArgument(f"{name} is on {tensor.device}; operators combine on CPUs: pass {name}.cpu()")
        if torch._debug_has_internal_overlap(tensor) == 1:
            raise InvalidArgument(f"elements of {name} share memory, as after expand; pass a copy: {name}.contiguous()")
        self.tensor = tensor.detach()
        self.rows = self.tensor.resolve_conj().resolve_neg().contiguous().view(self.count, *element)

    def _bytes(self, name: str, array: np.ndarray[Any, Any]) -> torch.Tensor:
        if array.dtype.hasobject or array.itemsize == 0:
            raise InvalidArgument(
                f"{name} is a NumPy array of dtype {array.dtype}, whose elements have no bytes of their own to send; "
                "give it a dtype of numbers or records"
            )
        if not array.flags.writeable:
            raise InvalidArgument(f"{name}, a NumPy array, is read-only; pass a writable copy: {name}.copy()")
        flat = np.ascontiguousarray(array).reshape(-1)
        return torch.from_numpy(flat.view(np.uint8)).view(self.count, array.itemsize * math.prod(self.element))

    def operand(self, rows: torch.Tensor) -> Any:
        """What the operator gets for some rows."""
        if self.records is None:
            return rows
        return rows.numpy().reshape(-1).view(self.records).reshape(len(rows), *self.element)

    def store(self, result: Any, rows: torch.Tensor) -> None:
        """Writes what the operator has returned to `rows`."""
        target = self.operand(rows)
        alike = type(result) is type(target) and result.shape == target.shape
        if alike and self.records is not None:
            alike = np.can_cast(result.dtype, target.dtype, "equiv")  # NumPy returns bytes in the machine's order
        elif alike:
            alike = result.dtype == target.dtype
        if not alike:
            got = f"{tuple(result.shape)} of {result.dtype}" if hasattr(result, "dtype") else f"{result!r:.60}"
            raise TypeError(
                f"it returned a {type(result).__name__}, {got}; it must return a {type(target).__name__}, "
                f"{tuple(target.shape)} of {target.dtype}, like its operands"
            )
        if self.records is None:
            rows.copy_(result)
        else:
            target[...] = result

    def close(self, x: torch.Tensor, y: torch.Tensor, operands: list[torch.Tensor]) -> bool:
        """Whether rows are equal, or differ in the lower half of the digits of the largest number there is."""
        pairs = zip(*(_fields(self.operand(rows)) for rows in (x, y, *operands)), strict=True)
        return all(_close(*fields) for fields in pairs)

    def assign(self, rows: torch.Tensor) -> None:
        """The tensor gets the values of `rows`."""
        if self.records is not None:
            cast(Any, self.array)[...] = self.operand(rows.contiguous()).reshape(self.array.shape)
        else:
            self.tensor.copy_(rows.view(self.tensor.shape))

    def finish(self) -> None:
        """The tensor gets what was written to `rows`, where these are a copy."""
        own = self.tensor.data_ptr() if self.records is None else cast(Any, self.array).ctypes.data
        if self.rows.data_ptr() != own:
            self.assign(self.rows)

    def has_dtype(self, dtype: np.dtype[Any]) -> bool:
        return self.records == dtype if self.records is not None else self.dtype == dtype.name

    @property
    def row_bytes(self) -> int:
        return self.rows.itemsize * math.prod(self.rows.shape[1:])


def _torch_has(dtype: np.dtype[Any]) -> bool:
    try:
        torch.from_numpy(np.empty(0, dtype))
    except (TypeError, ValueError):  # ValueError: the bytes of a number are in the other order
        return False
    return True


def _fields(operand: Any) -> list[Any]:
    """The arrays of numbers that an operand has."""
    names = getattr(operand.dtype, "names", None)
    if names is None:
        return [operand if isinstance(operand, torch.Tensor) else np.ascontiguousarray(operand)]
    return [each for name in names for each in _fields(operand[name])]


def _close(x: Any, y: Any, *operands: Any) -> bool:
    if isinstance(x, np.ndarray) and not _torch_has(x.dtype):
        return bool(np.array_equal(x, y))
    values = [torch.as_tensor(each) for each in (x, y, *operands)]
    if not (values[0].is_floating_point() or values[0].is_complex()):
        return torch.equal(values[0], values[1])
    digits, wide = math.sqrt(torch.finfo(values[0].dtype).eps), torch.promote_types(values[0].dtype, torch.float64)
    x, y, *_ = values = [each.to(wide) for each in values]
    largest = max((float(each[each.isfinite()].abs().max()) for each in values if each.isfinite().any()), default=0.0)
    return torch.allclose(x, y, rtol=0, atol=digits * largest, equal_nan=True)


def rows_of(op: Op, name: str, given: Given) -> list[Rows]:
    """The tensors that a call was given as one value."""
    several = isinstance(given, Sequence)
    tensors = list(given) if several else [given]
    if len(tensors) != len(op.elements) or (several and len(tensors) == 1):
        wanted = "one array" if len(op.elements) == 1 else f"a tuple of {len(op.elements)} arrays"
        raise InvalidArgument(f"{name} is {shown(given)}; operator {op.name!r} takes {wanted} (see Op.torch, tensors)")
    names = [f"{name}[{index}]" for index in range(len(tensors))] if several else [name]
    found = [Rows(*each) for each in zip(names, cast(Any, tensors), op.elements, strict=True)]
    for each, its_name in zip(found, names, strict=True):
        if op.element_bytes not in (None, each.row_bytes) or (op.dtype is not None and not each.has_dtype(op.dtype)):
            wanted = f"{op.element_bytes} bytes" if op.dtype is None else f"dtype {op.dtype}"
            raise InvalidArgument(
                f"{its_name} has elements of {each.row_bytes} bytes, of dtype {each.dtype}; operator {op.name!r} takes "
                f"elements of {wanted}"
            )
        if each.count != found[0].count:
            raise InvalidArgument(
                f"{its_name} has {each.count} elements and {names[0]} has {found[0].count}; they must have as many"
            )
    return found


def shown(given: Any) -> str:
    return f"a {type(given).__name__}" + (f" of {len(given)}" if isinstance(given, Sequence) else "")


def check_alike(left: list[Rows], right: list[Rows], name: str, other: str, counted: bool = True) -> None:
    for a, b in zip(left, right, strict=True):
        if a.dtype != b.dtype or (counted and a.count != b.count):
            ours, theirs = (f"{each.count} elements of {each.dtype}" for each in (a, b))
            raise InvalidArgument(f"{name} has {ours}, and {other} has {theirs}; they must be alike")
