"""Operators in machine code: a C function by its address, or a Python function that Numba compiles."""

from __future__ import annotations

import ctypes
from collections.abc import Callable
from typing import Any

import numpy as np
import torch

from ringreduce.errors import InvalidArgument

_C_FUNCTION = ctypes.CFUNCTYPE(ctypes.c_int, ctypes.c_void_p, ctypes.c_void_p, ctypes.c_void_p, ctypes.c_size_t)


def by_address(address: Any, meaning: str = "") -> Callable[[Any, Any], Any]:
    """What calls `int f(const void* a, const void* b, void* out, size_t n)` with `out` in the place of `a`."""
    if isinstance(address, bool) or not isinstance(address, int) or address <= 0:
        raise InvalidArgument(f"address is {address!r:.60}; it must be the address of a function, a number above 0")
    function = _C_FUNCTION(address)

    def combine(a: Any, b: Any) -> Any:
        code = function(_place(a), _place(b), _place(a), len(a))
        if code != 0:
            raise RuntimeError(meaning or f"the function returned {code}")
        return a

    return combine


def _place(operand: Any) -> int:
    return int(operand.data_ptr() if isinstance(operand, torch.Tensor) else operand.ctypes.data)


def compiled(f: Any, dtype: np.dtype[Any]) -> Any:
    """`f` as a C function with the loop around it, by Numba. The result has its `address`; keep it."""
    try:
        import numba
        from numba import carray, cfunc, from_dtype, types
    except ImportError:
        raise InvalidArgument("Op.numba needs Numba, which is not installed: pip install numba") from None
    element = from_dtype(dtype)
    inner = f if hasattr(f, "py_func") else numba.njit(f)
    pointer = types.CPointer(element)

    def numbers(a: Any, b: Any, out: Any, n: Any) -> int:
        try:
            left, right, result = carray(a, n), carray(b, n), carray(out, n)
            for i in range(n):
                result[i] = inner(left[i], right[i])
        except Exception:
            return 1
        return 0

    def records(a: Any, b: Any, out: Any, n: Any) -> int:
        try:
            left, right, result = carray(a, n), carray(b, n), carray(out, n)
            one = np.empty(1, dtype)  # since `out` is where `a` is
            for i in range(n):
                inner(left[i], right[i], one[0])
                result[i] = one[0]
        except Exception:
            return 1
        return 0

    try:
        return cfunc(types.int32(pointer, pointer, pointer, types.uintp))(records if dtype.names else numbers)
    except numba.core.errors.NumbaError as error:
        raise InvalidArgument(f"f cannot be compiled by Numba for elements of {dtype}: {error}") from None
