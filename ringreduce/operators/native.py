"""Operators in machine code: a C function by its address, or a Python function that Numba compiles.

The engine calls them itself in an all_reduce on one host. Elsewhere `Native.combine` does.
"""

from __future__ import annotations

import ctypes
import hashlib
from typing import Any

import numpy as np
import torch

from ringreduce import _C
from ringreduce.errors import InvalidArgument

NAME_BYTES = 127
"""What the engine keeps of a name."""

_C_FUNCTION = ctypes.CFUNCTYPE(ctypes.c_int, ctypes.c_void_p, ctypes.c_void_p, ctypes.c_void_p, ctypes.c_size_t)


class Native:
    """`int f(const void* a, const void* b, void* out, size_t n)` at `address`. `failure` is what it means that it
    returns another number than 0, and `kept` what must live as long."""

    def __init__(
        self, address: Any, failure: str = "the function returned another number than 0", kept: Any = None
    ) -> None:
        if isinstance(address, bool) or not isinstance(address, int) or address <= 0:
            raise InvalidArgument(f"address is {address!r:.60}; it must be the address of a function, a number above 0")
        self.address, self.failure, self.kept = address, failure, kept
        self._function = _C_FUNCTION(address)
        self._operators: dict[tuple[str, str], _C.Operator] = {}
        self.by_dtype: dict[Any, _C.Operator] = {}
        """For tensors whose elements are those of torch, and which were checked once."""

    def combine(self, a: Any, b: Any) -> Any:
        if self._function(_place(a), _place(b), _place(a), len(a)) != 0:
            raise RuntimeError(self.failure)
        return a

    def operator(self, name: str, elements: str, element_bytes: int) -> _C.Operator:
        """What the engine takes. `elements` says what they are; other ranks must call the same name on the same."""
        if (name, elements) not in self._operators:
            text = f"{name!r} on {elements}".encode(errors="backslashreplace")
            digest = hashlib.blake2b(text + b" of %d bytes" % element_bytes, digest_size=8).digest()
            self._operators[name, elements] = _C.Operator(
                function=self.address,
                element_bytes=element_bytes,
                digest=int.from_bytes(digest, "little"),
                name=text[:NAME_BYTES].decode(errors="ignore"),
                failure=self.failure,
            )
        return self._operators[name, elements]


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
