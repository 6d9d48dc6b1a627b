"""`Op`, an operator of the user's own: what it is called with, and the checks of its arguments."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from ringreduce.common.checks import check_bool, check_is, whole
from ringreduce.errors import InvalidArgument
from ringreduce.operators import records
from ringreduce.operators.combiners import Interpreted, Native, at_address, compiled, reduction
from ringreduce.operators.elements import Shape


class Op:
    """An associative operator for `all_reduce`, `reduce`, `reduce_scatter`, `reduce_scatter_single`, `scan` and
    `exscan`: one of the library's, `Op.argmax`, `Op.argmin`, `Op.max_by`, `Op.min_by`, `Op.top_k` and `Op.welford`, or
    one of your own, by `Op.torch`, `Op.numba` or `Op.c`. Operands are combined in rank order, so it need not be
    commutative."""

    def __init__(
        self,
        function: Callable[[Any, Any], Any] | None,
        elements: Sequence[Shape] | None = None,
        name: str = "",
        commutative: bool = False,
        check: bool = False,
        native: Native | None = None,
        element_bytes: int | None = None,
        dtype: np.dtype[Any] | None = None,
        packs: bool = False,
    ) -> None:
        if elements is None:  # a call of the program, which cannot know what is meant by `function`
            raise InvalidArgument(
                f"Op({function!r:.60}) does not say what computes it; write Op.torch(f), Op.numba(f, ...) or Op.c(...)"
            )
        check_bool("commutative", commutative)
        check_bool("check", check)
        self.name = name
        self.elements = tuple(elements)
        self.commutative = commutative
        self.check = check
        self.function = function
        """In Python; None if there is only `native`."""
        self.native = native
        """What combines without Python, if it has something for the elements."""
        self.interpreted = Interpreted(function) if function is not None and len(self.elements) == 1 else None
        """What the engine calls otherwise; it combines one tensor only."""
        self.element_bytes = element_bytes
        """Bytes of an element, where the operator takes no others."""
        self.dtype = dtype
        """The dtype of elements, where the operator takes no other."""
        self.packs = packs
        """Whether a tuple of tensors is combined as records, of which each tensor is a field."""

    def __repr__(self) -> str:
        return f"ringreduce.Op({self.name!r})"

    @staticmethod
    def torch(
        f: Callable[[Any, Any], Any],
        tensors: int = 1,
        commutative: bool = False,
        name: str | None = None,
        check: bool = False,
        element: Sequence[int] | Sequence[Sequence[int]] = (),
    ) -> Op:
        """An operator that torch computes for many elements at once: `f(a, b)` returns `a[i] op b[i]` for all i.

        `a` and `b` are tensors of shape `(n, *element)`, of the dtype of the call's tensor, and so is the result; n may
        differ between calls of `f`. `element` is the shape of an element, which ends the shape of the call's tensor: ()
        for numbers, (2, 2) for matrices that `torch.matmul` multiplies. NumPy arrays of a dtype that torch does not
        have, such as records, reach `f` as NumPy arrays.

        With `tensors=k` above 1 a call gets a tuple of k tensors, `f` gets two such tuples and returns one: a value and
        its index, say. Their dtypes may differ. `element` is then one shape for all of them, or k shapes.

        `f` must be associative, do the same on all ranks, and leave `b` unchanged; it may write its result to `a`. It
        must make no calls of a group, nor wait for a thread that makes one. If it raises an error, the call raises
        `OperatorFailed` on all ranks, and the group stays usable.

        `name` is what messages and other ranks know the operator by. The default is the name of `f` with the line that
        defines it. With `check=True` each call first tests on a few thousand elements that `f` treats each on its own
        and is associative and, where `commutative` says so, commutative. What differs in more than the lower half of
        the dtype's digits is `OperatorFailed`. Without `check`, `commutative` changes nothing.

        Raises `InvalidArgument` for arguments that cannot be served.
        """
        if not callable(f):
            raise InvalidArgument(f"f is {f!r:.60}; it must be a function of two operands")
        tensors = whole("tensors", tensors, 1, "how many tensors f combines, 1 or more")
        native = reduction(f) if tensors == 1 else None
        return Op(f, _shapes(element, tensors), _name_of(f, name), commutative, check, native)

    @staticmethod
    def numba(
        f: Callable[..., Any],
        element: Any,
        commutative: bool = False,
        name: str | None = None,
        check: bool = False,
    ) -> Op:
        """An operator on single elements that Numba compiles, which must be installed.

        `element` is the NumPy dtype of an element. For a dtype of numbers `f(a, b)` returns the combination of two. For
        records `f(a, b, out)` writes it to the fields of `out`. The call's tensor must have this dtype. `commutative`,
        `name` and `check` are those of `Op.torch`. An error that `f` raises is `OperatorFailed`, without its text.

        Raises `InvalidArgument` if Numba is missing or cannot compile `f`, or for another argument.
        """
        if not callable(f):
            raise InvalidArgument(f"f is {f!r:.60}; it must be a function of two elements")
        try:
            dtype = np.dtype(element)
        except TypeError:
            raise InvalidArgument(f"element is {element!r:.60}; it must be a NumPy dtype") from None
        if element is None or dtype.hasobject or dtype.itemsize == 0 or dtype.subdtype:
            raise InvalidArgument(f"element is {element!r:.60}; it must be a NumPy dtype of numbers or records")
        name = _name_of(getattr(f, "py_func", f), name)
        function = compiled(f, dtype)
        failure = "f raised an error; it shows in Python: f.py_func, or f itself"
        native = at_address(function.address, failure, kept=function)
        packs = dtype.names is not None
        return Op(None, [()], name, commutative, check, native, dtype.itemsize, dtype, packs)

    @staticmethod
    def c(
        address: int,
        element_bytes: int,
        name: str,
        element: Sequence[int] = (),
        commutative: bool = False,
        check: bool = False,
    ) -> Op:
        """An operator in C: `int f(const void* a, const void* b, void* out, size_t n)`, given by its address.

        `f` combines n elements of `element_bytes` bytes each and writes them to `out`, which may be `a` or `b`, and has
        no memory in common with them otherwise. It returns 0; any other number is `OperatorFailed`. It runs without the
        GIL and must stay loaded as long as the operator is used. `name` tells other ranks which operator it is, and
        `element` is the shape of an element, as in `Op.torch`. Elements may have any size, and be aligned to their
        dtype only.

        Raises `InvalidArgument` for arguments that cannot be served. What `address` leads to cannot be checked.
        """
        element_bytes = whole("element_bytes", element_bytes, 1, "a number of bytes, 1 or more")
        check_is("name", name, str, "a text of 1 to 100 characters")
        native = at_address(address)
        return Op(None, _shapes(element, 1), _name_of(native, name), commutative, check, native, element_bytes)

    @staticmethod
    def argmax() -> Op:
        """The highest value and its index. Of equal values the lowest index wins, and NaN is higher than all numbers.

        A call takes a tuple `(value, index)` of two tensors of one shape, or a NumPy array of records whose first two
        fields they are. Values are float32, float64, int8 to int64, uint8 or bool, in tensors also float16, bfloat16
        and float8; indices are int32 or int64. Further tensors or fields go with them, whatever their dtype. Such a
        tensor may have more dimensions than the first one, which go with each value.
        """
        return _on_records("argmax", records.first_of("argmax", 0, highest=True, indexed=True))

    @staticmethod
    def argmin() -> Op:
        """The lowest value and its index; as `Op.argmax` otherwise. NaN is lower than all numbers, as in torch."""
        return _on_records("argmin", records.first_of("argmin", 0, highest=False, indexed=True))

    @staticmethod
    def max_by(key: str | int = 0) -> Op:
        """The record with the highest `key`, whatever else is in it. Of equal keys the lowest rank's wins, and NaN is
        higher than all numbers.

        `key` is the name of a field of NumPy records, or the number of a field or of a tensor of a tuple, from 0. Keys
        are what values are to `Op.argmax`, and tuples too. Raises `InvalidArgument` if `key` is neither.
        """
        return _on_records(f"max_by({key!r})", records.first_of("max_by", _key(key), highest=True, indexed=False))

    @staticmethod
    def min_by(key: str | int = 0) -> Op:
        """The record with the lowest `key`; as `Op.max_by` otherwise. NaN is lower than all numbers."""
        return _on_records(f"min_by({key!r})", records.first_of("min_by", _key(key), highest=False, indexed=False))

    @staticmethod
    def top_k(k: int, largest: bool = True) -> Op:
        """The k highest values over all ranks and their indices, or with `largest=False` the k lowest, in this order.

        A call takes a tuple `(values, indices)` of two tensors of shape `(..., k)`, such as `torch.topk(x, k)` returns,
        or NumPy records of two such fields. Of equal values the lowest index comes first, and NaN before all numbers. A
        rank that has fewer than k values fills up with -inf, or inf. Dtypes are those of argmax. Raises
        `InvalidArgument` if k is no number from 1 up.
        """
        k = whole("k", k, 1, "how many values are kept, 1 or more")
        check_bool("largest", largest)
        native = records.first_k_of("top_k", k, largest)
        return _on_records(f"top_k({k}, largest={largest})", native, shape=(k,))

    @staticmethod
    def welford() -> Op:
        """The moments of samples that ranks have parts of, as Welford's algorithm merges them.

        A call takes a tuple `(size, mean, squares)` of three tensors, or NumPy records of three such fields: how many
        samples there are, their mean, and the sum of their squared distances from it. All are float32, or all float64.
        `squares / size` is then the variance. Of a part of size 0 the others are not looked at.
        """
        return _on_records("welford", records.moments("welford"))


def _on_records(name: str, native: Native, shape: Shape = ()) -> Op:
    """One of the library's, on records or on tuples of tensors with elements of `shape`."""
    return Op(None, [shape], name, native=native, packs=True)


def _key(key: Any) -> str | int:
    return key if isinstance(key, str) else whole("key", key, 0, "the name of a field, or its number from 0")


def _shapes(element: Any, tensors: int) -> list[Shape]:
    """The shape of an element of each tensor."""
    given = list(element) if isinstance(element, Sequence) and not isinstance(element, str) else None
    several = given is not None and any(isinstance(each, Sequence) for each in given)
    shapes = given if several else [element] * tensors
    if given is None or shapes is None or len(shapes) != tensors or not all(map(_is_shape, shapes)):
        wanted = "a shape such as (2, 2)" + (f", or {tensors} shapes, one for each tensor" if tensors > 1 else "")
        raise InvalidArgument(f"element is {element!r:.60}; it must be {wanted}")
    return [tuple(shape) for shape in shapes]


def _is_shape(shape: Any) -> bool:
    return isinstance(shape, Sequence) and all(type(length) is int and length > 0 for length in shape)


def _name_of(f: Any, name: str | None) -> str:
    if name is None:
        name = getattr(f, "qualified_name", getattr(f, "__name__", None))  # the first of functions of torch.jit
        if not isinstance(name, str):
            raise InvalidArgument(f"name is None, and f, a {type(f).__name__}, has no name of its own; give name='...'")
        code = getattr(inspect.unwrap(f), "__code__", None)
        return name if code is None else f"{name}:{code.co_firstlineno}"
    if not isinstance(name, str) or not 0 < len(name) <= 100:
        raise InvalidArgument(f"name is {name!r:.60}; it must be a text of 1 to 100 characters")
    return name
