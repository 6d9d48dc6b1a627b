"""The tensors of a call with an `Op` as rows, one for each element."""

from __future__ import annotations

import itertools
import math
from collections.abc import Sequence
from typing import Any, TypeAlias, cast

import numpy as np
import torch

from ringreduce import _C
from ringreduce.errors import InvalidArgument
from ringreduce.groups.tensors import from_numpy, refuse_masked, torch_dtype
from ringreduce.operators.combiners import Native
from ringreduce.operators.elements import Elements, Shape
from ringreduce.operators.op import Op

Array: TypeAlias = torch.Tensor | np.ndarray[Any, Any]
Given: TypeAlias = Array | Sequence[Array]


class Rows:
    """A tensor of a call as `rows`, one for each of its `elements`; a copy where the tensor is not contiguous."""

    def __init__(self, name: str, array: Array, element: Shape) -> None:
        if not isinstance(array, torch.Tensor | np.ndarray):
            raise InvalidArgument(
                f"{name} is a {type(array).__name__}; with an Op it must be a torch.Tensor or a NumPy array"
            )
        if isinstance(array, torch.Tensor):
            _C.check_tensor(name, array, written=False)
        refuse_masked(array, name)
        self.shape: tuple[Any, ...] = tuple(array.shape)
        shape = self.shape
        if shape[len(shape) - len(element) :] != element:
            raise InvalidArgument(
                f"{name} has shape {shape}; the operator's elements have {element}, which must end it"
            )
        self.count: int = math.prod(shape[: len(shape) - len(element)])
        self.array = array
        if isinstance(array, np.ndarray) and torch_dtype(array.dtype) is None:
            self.elements = Elements(element, array.dtype)
            self.rows = self._bytes(name, array)
            return
        tensor = array if isinstance(array, torch.Tensor) else from_numpy(array, name)
        if tensor.is_quantized:
            raise InvalidArgument(f"{name} has dtype {tensor.dtype}; pass {name}.dequantize()")
        if not tensor.is_cpu:
            raise InvalidArgument(f"{name} is on {tensor.device}; operators combine on CPUs: pass {name}.cpu()")
        if torch._debug_has_internal_overlap(tensor) == 1:
            copy = "copy" if isinstance(array, np.ndarray) else "contiguous"
            raise InvalidArgument(f"elements of {name} share memory, as after expand; pass a copy: {name}.{copy}()")
        self.elements = Elements(element, tensor.dtype)
        self.tensor = tensor.detach()
        self.rows = self.tensor.resolve_conj().resolve_neg().contiguous().view(self.count, *element)

    def _bytes(self, name: str, array: np.ndarray[Any, Any]) -> torch.Tensor:
        if array.dtype.hasobject or array.itemsize == 0:
            raise InvalidArgument(
                f"{name} is a NumPy array of dtype {array.dtype}, whose elements have no bytes of their own to send; "
                "give it a dtype of numbers or records"
            )
        if not array.flags.writeable:
            raise InvalidArgument(f"{name}, a NumPy array, is read-only; pass a writable copy: array.copy()")
        whole = getattr(array.base, "dtype", array.dtype)
        if array.dtype.names and whole.names and not set(whole.names) <= set(array.dtype.names):
            raise InvalidArgument(
                f"{name} is an index of records by some of their fields, and others lie between them; import "
                f"numpy.lib.recfunctions and pass numpy.lib.recfunctions.repack_fields({name})"
            )
        flat = np.ascontiguousarray(array).reshape(-1)
        return torch.from_numpy(flat.view(np.uint8)).view(self.count, *self.elements.row_shape)

    def assign(self, rows: torch.Tensor) -> None:
        """The tensor gets the values of `rows`."""
        if self.elements.records is not None:
            cast(Any, self.array)[...] = self.elements.operand(rows.contiguous()).reshape(self.array.shape)
        else:
            self.tensor.copy_(rows.view(self.tensor.shape))

    def tensors(self) -> list[torch.Tensor]:
        """Those of torch's autograd."""
        return [] if self.elements.records is not None else [self.tensor]

    def finish(self) -> None:
        """The tensor gets what was written to `rows`, where these are a copy."""
        own = self.tensor.data_ptr() if self.elements.records is None else cast(Any, self.array).ctypes.data
        if self.rows.data_ptr() != own:
            self.assign(self.rows)


class PackedRows(Rows):
    """Tensors of a call as records, of which each is a field."""

    def __init__(self, names: list[str], parts: list[Rows], dtype: np.dtype[Any] | None) -> None:
        self.parts, self.count = parts, parts[0].count
        self.shape = tuple(part.shape for part in parts)
        columns = [_column(name, part, dtype is None) for name, part in zip(names, parts, strict=True)]
        if dtype is None:
            dtype = np.dtype([(f"f{i}", each.dtype, each.shape[1:]) for i, each in enumerate(columns)])
        self.array = np.empty(self.count, dtype)
        for name, field, column in zip(names, dtype.names or (), columns, strict=True):
            if dtype[field].base != column.dtype or dtype[field].shape != column.shape[1:]:
                raise InvalidArgument(
                    f"{name} has elements of {column.dtype}{list(column.shape[1:]) or ''}; field {field!r} of the "
                    f"operator's records has {dtype[field]}"
                )
            self.array[field] = column
        self.elements = Elements((), dtype)
        self.elements.given = tuple(part.elements.name for part in parts)
        self.rows = self._bytes(names[0], self.array)

    def assign(self, rows: torch.Tensor) -> None:
        records = self.elements.operand(rows.contiguous())
        for field, part in zip(records.dtype.names, self.parts, strict=True):
            column = records[field]
            if part.elements.records is not None:
                part.elements.operand(part.rows)[...] = column
            elif _is_narrow(part.rows.dtype):
                part.rows.copy_(torch.from_numpy(column.copy()))
            else:
                part.rows.numpy()[...] = column
            part.finish()

    def tensors(self) -> list[torch.Tensor]:
        return [tensor for part in self.parts for tensor in part.tensors()]

    def finish(self) -> None:
        self.assign(self.rows)


def _is_narrow(dtype: torch.dtype) -> bool:
    return dtype.is_floating_point and dtype.itemsize < 4


def _column(name: str, part: Rows, widens: bool) -> np.ndarray[Any, Any]:
    """The elements of a tensor as NumPy has them; torch's narrow floats as float32, if `widens`."""
    if part.elements.records is not None:
        records: np.ndarray[Any, Any] = part.elements.operand(part.rows)
        return records
    try:
        rows = part.rows.to(torch.float32) if widens and _is_narrow(part.rows.dtype) else part.rows
        return rows.numpy()
    except (TypeError, NotImplementedError):
        raise InvalidArgument(f"{name} has dtype {part.elements.name}, which no record can hold") from None


def rows_of(op: Op, name: str, given: Given, result: bool = False) -> list[Rows]:
    """The tensors that a call was given as one value, or for one `result`."""
    several = isinstance(given, Sequence)
    if op.packs:
        return [_records_of(op, name, given, result)]
    tensors = list(given) if several else [given]
    if len(tensors) != len(op.elements) or (several and len(tensors) == 1):
        wanted = "one array" if len(op.elements) == 1 else f"a tuple of {len(op.elements)} arrays"
        raise InvalidArgument(f"{name} is {shown(given)}; operator {op.name!r} takes {wanted} (see Op.torch, tensors)")
    names = [f"{name}[{index}]" for index in range(len(tensors))] if several else [name]
    found = [Rows(*each) for each in zip(names, cast(Any, tensors), op.elements, strict=True)]
    for its_name, each in zip(names, found, strict=True):
        _check_elements(op, its_name, each)
        if each.count != found[0].count:
            raise InvalidArgument(
                f"{its_name} has {each.count} elements and {names[0]} has {found[0].count}; they must have as many"
            )
    _check_apart(names, found)
    return found


def _records_of(op: Op, name: str, given: Given, result: bool) -> Rows:
    rows = _packed(op, name, given) if isinstance(given, Sequence) else Rows(name, given, ())
    _check_elements(op, name, rows)
    native = cast(Native, op.native)  # what takes tuples has no function in Python
    try:
        native.operator(op.name, rows.elements)
    except InvalidArgument as error:
        raise InvalidArgument(f"{name} cannot be combined: {error}") from None
    if native.prepare is not None and not result:
        rows.rows = rows.rows.clone()
        native.prepare(rows.elements.operand(rows.rows))
    return rows


def _packed(op: Op, name: str, given: Sequence[Array]) -> PackedRows:
    """A tuple whose tensors all begin with the shape of the first, without that of its element."""
    fields = [] if op.dtype is None else [op.dtype[field].shape for field in op.dtype.names or ()]
    if not given or (fields and len(fields) != len(given)):
        wanted = f"a tuple with an array for each field{f', {len(fields)}' if fields else ''}"
        raise InvalidArgument(f"{name} is {shown(given)}; operator {op.name!r} takes records, or {wanted}")
    names = [f"{name}[{index}]" for index in range(len(given))]
    element = fields[0] if fields else op.elements[0]
    shape = Rows(names[0], given[0], element).shape
    leading = shape[: len(shape) - len(element)]
    parts = []
    for its_name, each in zip(names, given, strict=True):
        whole = tuple(getattr(each, "shape", ()))
        if whole[: len(leading)] != leading:
            raise InvalidArgument(
                f"{its_name} has shape {whole} and {names[0]} has {shape}; it must begin with {leading}"
            )
        parts.append(Rows(its_name, each, whole[len(leading) :]))
    _check_apart(names, parts)
    return PackedRows(names, parts, op.dtype)


def _check_elements(op: Op, name: str, rows: Rows) -> None:
    kind = rows.elements
    if op.element_bytes not in (None, kind.row_bytes) or (op.dtype is not None and not kind.of(op.dtype)):
        wanted = f"{op.element_bytes} bytes" if op.dtype is None else f"dtype {op.dtype}"
        raise InvalidArgument(
            f"{name} has elements of {kind.row_bytes} bytes, of dtype {kind.name}; operator {op.name!r} takes "
            f"elements of {wanted}"
        )


def _check_apart(names: list[str], parts: list[Rows]) -> None:
    """Where results go, no two tensors may have memory in common. Those with gaps are not looked at."""
    places = sorted((rows.rows.data_ptr(), rows.rows.nbytes, name) for name, rows in zip(names, parts, strict=True))
    for (begin, size, one), (other_begin, other_size, other) in itertools.pairwise(places):
        if other_size and begin + size > other_begin:
            raise InvalidArgument(f"{one} and {other} have memory in common; pass a copy of {other}")


def shown(given: Any) -> str:
    return f"a {type(given).__name__}" + (f" of {len(given)}" if isinstance(given, Sequence) else "")


def check_alike(left: list[Rows], right: list[Rows], name: str, other: str, counted: bool = True) -> None:
    for a, b in zip(left, right, strict=True):
        if a.elements.name != b.elements.name or (counted and a.count != b.count):
            ours, theirs = (f"{each.count} elements of {each.elements.name}" for each in (a, b))
            raise InvalidArgument(f"{name} has {ours}, and {other} has {theirs}; they must be alike")
