"""Operators that the library's own kernels have on records: which comes first, the first k of two lists, moments."""

from __future__ import annotations

from typing import Any

import numpy as np

from ringreduce import _C
from ringreduce.errors import InvalidArgument
from ringreduce.operators.combiners import Native
from ringreduce.operators.elements import Elements, Shape

Field = tuple[str, int]
"""Its dtype, and its offset in its record in bytes."""

KEYS = ("float32", "float64", "int8", "int16", "int32", "int64", "uint8", "bool")
INDICES = ("int32", "int64")


def first_of(what: str, key: str | int, highest: bool, indexed: bool) -> Native:
    """The record with the highest or lowest `key`; of equal keys that with the lowest second field, if `indexed`."""

    def make(elements: Elements, **identity: Any) -> _C.Operator:
        fields = _fields(what, elements, 2 if indexed else 1)
        if (isinstance(key, str) and key not in fields) or (isinstance(key, int) and key >= len(fields)):
            raise InvalidArgument(f"key is {key!r}; the records of {what} have the fields {', '.join(fields)}")
        names = list(fields)
        own = fields[key if isinstance(key, str) else names[key]]
        index = _field(what, "index", fields[names[1]], INDICES) if indexed else None
        return _C.Operator.first_of(key=_field(what, "key", own, KEYS), index=index, highest=highest, **identity)

    return Native(make)


def first_k_of(what: str, k: int, highest: bool) -> Native:
    """The k highest or lowest of two lists, which are in this order."""

    def make(elements: Elements, **identity: Any) -> _C.Operator:
        fields = list(_fields(what, elements, 2).values())
        key, index = _field(what, "key", fields[0], KEYS, (k,)), _field(what, "index", fields[1], INDICES, (k,))
        if len(fields) > 2:
            raise InvalidArgument(f"{what} takes records of keys and indices; they have {len(fields)} fields")
        return _C.Operator.first_k_of(key=key, index=index, highest=highest, k=k, **identity)

    return Native(make)


def moments(what: str) -> Native:
    """The size of two samples together, their mean, and the sum of their squared distances from it."""

    def make(elements: Elements, **identity: Any) -> _C.Operator:
        fields = [_field(what, "field", each, KEYS[:2]) for each in _fields(what, elements, 3).values()]
        dtype = fields[0][0]
        width = np.dtype(dtype).itemsize
        if fields != [(dtype, 0), (dtype, width), (dtype, 2 * width)] or elements.row_bytes != 3 * width:
            raise InvalidArgument(
                f"{what} takes records of three numbers of one dtype without gaps: size, mean, and sum of squared "
                f"distances; they are {elements}"
            )
        return _C.Operator.moments(dtype=dtype, **identity)

    return Native(make)


def _fields(what: str, elements: Elements, at_least: int) -> dict[str, tuple[np.dtype[Any], int]]:
    """The fields of the records, in the order of their offsets in their dtype's names."""
    records = elements.records
    if records is None or records.fields is None or len(records.fields) < at_least or elements.shape:
        raise InvalidArgument(
            f"{what} takes NumPy arrays of records with {at_least} fields or more, or a tuple with an array for each "
            f"field; the elements are {elements}"
        )
    return {name: records.fields[name][:2] for name in records.names or ()}


def _field(
    what: str, which: str, field: tuple[np.dtype[Any], int], allowed: tuple[str, ...], shape: Shape = ()
) -> Field:
    dtype, offset = field
    if dtype.base.name not in allowed or not dtype.base.isnative or dtype.shape != shape:
        wanted = f"{', '.join(allowed)}" + (f" of shape {shape}" if shape else "")
        raise InvalidArgument(f"the {which} of {what} is of dtype {dtype}; it must be one of {wanted}")
    return dtype.base.name, offset
