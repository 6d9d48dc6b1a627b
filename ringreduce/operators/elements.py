"""`Elements`: what the elements of a tensor are that a call with an `Op` combines, and how the operator gets them."""

from __future__ import annotations

import math
from typing import Any, TypeAlias

import numpy as np
import torch

from ringreduce.groups.tensors import torch_dtype, viewed

Shape: TypeAlias = tuple[int, ...]


class Elements:
    """What the elements of a tensor are: numbers of torch in some `shape`, or `records` of a dtype that torch does not
    have. As rows, one an element, they have `row_shape` and `row_dtype`; records are rows of bytes."""

    def __init__(self, shape: Shape, dtype: torch.dtype | np.dtype[Any]) -> None:
        self.shape = self.row_shape = shape
        self.name = str(dtype).removeprefix("torch.")
        self.given: tuple[str, ...] = ()
        """Of a tuple of tensors: their dtypes, which may be narrower than the fields of the records."""
        self.records: np.dtype[Any] | None = None
        if isinstance(dtype, torch.dtype):
            self.row_dtype = dtype
        else:
            self.records, self.row_dtype = dtype, torch.uint8
            self.row_shape = (dtype.itemsize * math.prod(shape),)
        self.row_bytes: int = self.row_dtype.itemsize * math.prod(self.row_shape)

    def __str__(self) -> str:
        given = f" for {', '.join(self.given)}" if self.given else ""
        return f"{self.name}{list(self.shape) or ''}{given}"

    def operand(self, rows: torch.Tensor) -> Any:
        """What the operator gets for some rows."""
        if self.records is None:
            return rows
        return rows.numpy().reshape(-1).view(self.records).reshape(len(rows), *self.shape)

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

    def of(self, dtype: np.dtype[Any]) -> bool:
        return self.records == dtype if self.records is not None else self.name == dtype.name


def _fields(operand: Any) -> list[Any]:
    """The arrays of numbers that an operand has."""
    names = getattr(operand.dtype, "names", None)
    if names is None:
        return [operand if isinstance(operand, torch.Tensor) else np.ascontiguousarray(operand)]
    return [each for name in names for each in _fields(operand[name])]


def _close(x: Any, y: Any, *operands: Any) -> bool:
    if isinstance(x, np.ndarray) and torch_dtype(x.dtype) is None:
        return bool(np.array_equal(x, y))
    values = [viewed(each) if isinstance(each, np.ndarray) else each for each in (x, y, *operands)]
    if not (values[0].is_floating_point() or values[0].is_complex()):
        return torch.equal(values[0], values[1])
    digits, wide = math.sqrt(torch.finfo(values[0].dtype).eps), torch.promote_types(values[0].dtype, torch.float64)
    x, y, *_ = values = [each.to(wide) for each in values]
    largest = max((float(each[each.isfinite()].abs().max()) for each in values if each.isfinite().any()), default=0.0)
    return torch.allclose(x, y, rtol=0, atol=digits * largest, equal_nan=True)
