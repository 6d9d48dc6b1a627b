"""Operators that the library's own kernels have on records: which comes first, the first k of two lists, moments."""

from __future__ import annotations

import functools
from typing import Any, cast

import numpy as np

from ringreduce import _C
from ringreduce.errors import InvalidArgument
from ringreduce.operators.combiners import Native
from ringreduce.operators.elements import Elements, Shape

Field = tuple[str, int]
"""Its dtype, and its offset in its record in bytes."""

FLOATS = ("float32", "float64")
KEYS = (*FLOATS, "int8", "int16", "int32", "int64", "uint8", "bool")
INDICES = ("int32", "int64")


def first_of(what: str, key: str | int, highest: bool, indexed: bool) -> Native:
    """The record with the highest or lowest `key`; of equal keys that with the lowest second field, if `indexed`."""

    def make(elements: Elements, **identity: Any) -> _C.Operator:
        names = _names(what, elements, 2 if indexed else 1)
        found = dict(enumerate(names)).get(key) if isinstance(key, int) else key
        if found not in names:
            known = f"{', '.join(names[:8])}{', ...' if len(names) > 8 else ''}"
            raise InvalidArgument(f"key is {key!r:.60}; there are {len(names)} fields: {known}")
        index = _field(f"the index of {what}", elements, names[1], INDICES) if indexed else None
        own = _field(f"the key of {what}", elements, found, KEYS)
        return _C.Operator.first_of(key=own, index=index, highest=highest, **identity)

    return Native(make)


def first_k_of(what: str, k: int, highest: bool) -> Native:
    """The k highest or lowest of two lists."""

    def make(elements: Elements, **identity: Any) -> _C.Operator:
        names = _names(what, elements, 2, exactly=True)
        key = _field(f"the key of {what}", elements, names[0], KEYS, (k,))
        index = _field(f"the index of {what}", elements, names[1], INDICES, (k,))
        return _C.Operator.first_k_of(key=key, index=index, highest=highest, k=k, **identity)

    return Native(make, prepare=functools.partial(_sort_lists, highest=highest))


def _sort_lists(records: np.ndarray[Any, Any], highest: bool) -> None:
    """Brings the lists of all records in order: those of torch.topk are in any where values are equal, and NaN is not
    always the first."""
    keys, indices = (records[name] for name in records.dtype.names or ())
    flipped = keys if not highest else -keys if keys.dtype.kind == "f" else ~keys
    order = np.lexsort((indices, flipped, ~np.isnan(keys)))
    if (order != np.arange(order.shape[-1])).any():
        for column in (keys, indices):
            column[...] = np.take_along_axis(column, order, -1)


def moments(what: str) -> Native:
    """The size of two samples together, their mean, and the sum of their squared distances from it."""

    def make(elements: Elements, **identity: Any) -> _C.Operator:
        names = _names(what, elements, 3, exactly=True)
        parts = ("size", "mean", "sum of squares")
        found = [
            _field(f"the {part} of {what}", elements, name, FLOATS) for part, name in zip(parts, names, strict=True)
        ]
        dtype, width = found[0][0], np.dtype(found[0][0]).itemsize
        if found != [(dtype, 0), (dtype, width), (dtype, 2 * width)] or elements.row_bytes != 3 * width:
            raise InvalidArgument(
                f"{what} takes a size, a mean and a sum of squares of one dtype, without gaps; there is {elements}"
            )
        if set(elements.given) - {dtype}:
            raise InvalidArgument(f"{what} takes float32 or float64; there is {', '.join(elements.given)}")
        return _C.Operator.moments(dtype=dtype, **identity)

    return Native(make)


def _names(what: str, elements: Elements, least: int, exactly: bool = False) -> tuple[str, ...]:
    """Those of the records' fields."""
    names = (elements.records.names or ()) if elements.records is not None and not elements.shape else ()
    if len(names) < least or (exactly and len(names) > least):
        number = f"{least} fields" if exactly else f"{least} fields or more"
        raise InvalidArgument(
            f"{what} takes NumPy arrays of records with {number}, or a tuple with an array for each field; the "
            f"elements are {elements}"
        )
    return names


def _field(what: str, elements: Elements, name: str, allowed: tuple[str, ...], shape: Shape = ()) -> Field:
    dtype, offset = cast(Any, elements.records).fields[name][:2]
    if dtype.base.name not in allowed or not dtype.base.isnative or dtype.shape != shape:
        wanted = f"{', '.join(allowed)}" + (f" of shape {shape}" if shape else "")
        raise InvalidArgument(f"{what}, field {name!r}, is of dtype {dtype}; it must be one of {wanted}")
    return dtype.base.name, offset
