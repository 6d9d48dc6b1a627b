"""What the engine calls in an all_reduce by an `Op`: a kernel of the library, a function in machine code, given by its
address or compiled by Numba, or a function in Python.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable
from types import BuiltinFunctionType
from typing import Any

import numpy as np
import torch

from ringreduce import _C
from ringreduce.common.checks import whole
from ringreduce.errors import InvalidArgument
from ringreduce.operators.elements import Elements

NAME_BYTES = 127
"""What the engine keeps of a name."""
TILE_BYTES = 128 << 10
"""A function in Python gets this much of each operand at a time, so that what it allocates stays in the cache."""


class Native:
    """What combines without Python: a kernel of the library, or a function of the user's in machine code.

    `make(elements, **identity)` gives what the engine takes for such elements, or None where there is nothing. `kind`
    is what ranks must agree on apart from the operator's name, and `failure` what it means that it fails. `prepare`
    brings the records of a rank in the order that is needed.
    """

    def __init__(
        self,
        make: Callable[..., _C.Operator | None],
        kind: str = "",
        failure: str = "",
        prepare: Callable[[np.ndarray[Any, Any]], None] | None = None,
    ) -> None:
        self._make, self._kind, self._failure, self.prepare = make, kind, failure, prepare
        self._operators: dict[str, _C.Operator | None] = {}
        self._by_dtype: dict[Any, _C.Operator] = {}  # for tensors whose elements are numbers of torch

    def operator(self, name: str, elements: Elements) -> _C.Operator | None:
        """What the engine takes."""
        key = str(elements)
        if key not in self._operators:
            identity = _identity(f"{name}{self._kind and ', ' + self._kind}", elements)
            operator = self._operators[key] = self._make(elements, **identity)
            if operator is not None and not elements.shape and elements.records is None:
                self._by_dtype[elements.row_dtype] = operator
        return self._operators[key]

    def known(self, dtype: Any) -> _C.Operator | None:
        """That for numbers of this dtype of torch, if there has been a call on them."""
        return self._by_dtype.get(dtype)

    def function(self, name: str, elements: Elements) -> Callable[[Any, Any], Any] | None:
        """The same outside of the engine: writes to its first operand, and returns it."""
        operator = self.operator(name, elements)
        if operator is None:
            return None

        def combine(a: Any, b: Any) -> Any:
            if not operator.combine(_place(a), _place(b), _place(a), len(a)):
                raise RuntimeError(self._failure)
            return a

        return combine


def at_address(address: Any, failure: str = "the function returned another number than 0", kept: Any = None) -> Native:
    """`int f(const void* a, const void* b, void* out, size_t n)` at `address`. `failure` is what it means that it
    returns another number than 0, and `kept` what must live as long."""
    address = whole("address", address, 1, "the address of a function, a number above 0", 2**64 - 1)

    def make(elements: Elements, kept: Any = kept, **identity: Any) -> _C.Operator:
        return _C.Operator.at_address(function=address, failure=failure, **identity)

    return Native(make, failure=failure)


REDUCTIONS = {
    torch.add: "sum",
    torch.mul: "product",
    torch.minimum: "min",
    torch.maximum: "max",
    torch.bitwise_and: "band",
    torch.bitwise_or: "bor",
    torch.bitwise_xor: "bxor",
    torch.logaddexp: "logaddexp",
}
"""Functions of torch that the library has kernels for."""


def reduction(function: Any) -> Native | None:
    """The library's own kernel in place of a function of torch."""
    try:
        op = REDUCTIONS.get(function)
    except TypeError:  # it has no hash
        op = None
    if op is None:
        return None

    def make(elements: Elements, **identity: Any) -> _C.Operator | None:
        if elements.records is not None or not _C.kernel_supports(elements.name, op):
            return None
        return _C.Operator.reduction(dtype=elements.name, op=op, **identity)

    return Native(make, kind=op)


class Interpreted:
    """A function in Python, of two tensors or NumPy arrays. It gets copies, to which it may write and which it may
    keep, unless it is one of torch's own, which do neither."""

    def __init__(self, function: Callable[[Any, Any], Any]) -> None:
        self.function, self.copies = function, not _is_torchs(function)

    def operator(self, name: str, elements: Elements, errors: list[BaseException]) -> _C.Operator:
        """What the engine takes for one call; what the function raises is added to `errors`.

        It is no part of this object: Python's collector does not see what an operator refers to.
        """
        function, copies, operand, store = self.function, self.copies, elements.operand, elements.store

        def combine(a: torch.Tensor, b: torch.Tensor, out: torch.Tensor) -> None:
            if copies:
                a, b = a.clone(), b.clone()
            store(function(operand(a), operand(b)), out)

        return _C.Operator.in_python(
            function=combine,
            errors=errors,
            dtype=elements.row_dtype,
            row_shape=elements.row_shape,
            most_tile_bytes=TILE_BYTES,
            **_identity(name, elements),
        )


def _identity(name: str, elements: Elements) -> dict[str, Any]:
    """What ranks compare: they must call the same name on the same elements."""
    text = f"{name!r} on {elements}".encode(errors="backslashreplace")
    digest = hashlib.blake2b(text + b" of %d bytes" % elements.row_bytes, digest_size=8).digest()
    return {
        "name": text[:NAME_BYTES].decode(errors="ignore"),
        "digest": int.from_bytes(digest, "little"),
        "element_bytes": elements.row_bytes,
    }


def _is_torchs(function: Callable[[Any, Any], Any]) -> bool:
    """Whether it is such as torch.add; torch.add_ would write to its operand."""
    name = getattr(function, "__name__", "_")
    in_c = isinstance(function, BuiltinFunctionType) and getattr(torch, name, None) is function
    return in_c and not name.endswith("_")


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
            # LLVM vectorizes a loop only where it finds that what is written is apart from all that is read otherwise.
            if result.ctypes.data == left.ctypes.data:
                for i in range(n):
                    left[i] = inner(left[i], right[i])
            elif result.ctypes.data == right.ctypes.data:
                for i in range(n):
                    right[i] = inner(left[i], right[i])
            else:
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
