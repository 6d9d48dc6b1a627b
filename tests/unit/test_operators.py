"""Arguments of `Op.torch`, and which names operators get; tests/distributed/test_operators.py has the calls."""

from __future__ import annotations

import functools
import sys
from typing import Any

import numpy as np
import pytest
import torch

import ringreduce
from ringreduce import Op
from ringreduce.errors import InvalidArgument


def product(a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
    return a @ b


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"f": "sum"}, "f is 'sum'; it must be a function of two operands"),
        ({"tensors": 0}, "tensors is 0; .* 1 or more"),
        ({"tensors": True}, "tensors is True"),
        ({"tensors": 1.5}, "tensors is 1.5"),
        ({"commutative": 1}, "commutative is 1; it must be True or False"),
        ({"check": None}, "check is None; it must be True or False"),
        ({"name": ""}, "name is ''; it must be a text of 1 to 100 characters"),
        ({"name": "x" * 101}, "name is 'xxx.*; it must be a text of 1 to 100 characters"),
        ({"name": 3}, "name is 3; it must be a text"),
        ({"f": functools.partial(torch.add, alpha=2)}, "f, a partial, has no name of its own; give name="),
        ({"element": 2}, r"element is 2; it must be a shape such as \(2, 2\)"),
        ({"element": "22"}, "element is '22'"),
        ({"element": (2, 0)}, r"element is \(2, 0\)"),
        ({"element": (2, 2.0)}, r"element is \(2, 2.0\)"),
        ({"element": ((), (2,)), "tensors": 3}, r"element is .*, or 3 shapes, one for each tensor"),
        ({"element": ((), 2), "tensors": 2}, "element is"),
    ],
)
def test_wrong_arguments_are_named(arguments: dict[str, Any], message: str) -> None:
    with pytest.raises(InvalidArgument, match=message):
        Op.torch(**{"f": product, **arguments})


def test_what_computes_it_must_be_said() -> None:
    with pytest.raises(InvalidArgument, match=r"does not say what computes it; write Op.torch\(f\)"):
        Op(torch.logaddexp)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"address": 0}, "address is 0; it must be the address of a function"),
        ({"address": "f"}, "address is 'f'"),
        ({"address": True}, "address is True"),
        ({"element_bytes": 0}, "element_bytes is 0; it must be a number of bytes, 1 or more"),
        ({"element_bytes": 2.0}, "element_bytes is 2.0"),
        ({"name": None}, "name is None; it must be a text"),
        ({"name": ""}, "name is ''"),
        ({"element": 3}, "element is 3"),
        ({"commutative": 0}, "commutative is 0"),
        ({"check": "yes"}, "check is 'yes'"),
    ],
)
def test_wrong_arguments_of_c(arguments: dict[str, Any], message: str) -> None:
    with pytest.raises(InvalidArgument, match=message):
        Op.c(**{"address": 1, "element_bytes": 8, "name": "f", **arguments})


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"f": 3}, "f is 3; it must be a function of two elements"),
        ({"element": "nothing"}, "element is 'nothing'; it must be a NumPy dtype"),
        ({"element": None}, "element is None; it must be a NumPy dtype of numbers or records"),
        ({"element": object}, "it must be a NumPy dtype of numbers or records"),
        ({"element": ("f4", 3)}, "it must be a NumPy dtype of numbers or records"),
        ({"name": 1}, "name is 1"),
    ],
)
def test_wrong_arguments_of_numba(arguments: dict[str, Any], message: str) -> None:
    with pytest.raises(InvalidArgument, match=message):
        Op.numba(**{"f": product, "element": "f4", **arguments})


def test_without_numba(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "numba", None)
    with pytest.raises(InvalidArgument, match=r"Op.numba needs Numba, which is not installed: pip install numba"):
        Op.numba(product, "f4")


def test_what_numba_cannot_compile() -> None:
    pytest.importorskip("numba")
    with pytest.raises(InvalidArgument, match="f cannot be compiled by Numba for elements of int64"):
        Op.numba(lambda a, b: a.nothing, np.int64)


def test_elements_of_each_tensor() -> None:
    assert Op.torch(product).elements == ((),)
    assert Op.torch(product, element=[2, 2]).elements == ((2, 2),)
    assert Op.torch(product, tensors=2, element=(3,)).elements == ((3,), (3,))
    assert Op.torch(product, tensors=2, element=((), (3,))).elements == ((), (3,))
    assert Op.torch(product, element=((3,),)).elements == ((3,),)


def test_names_tell_operators_apart() -> None:
    first, second = (
        Op.torch(lambda a, b: a),
        Op.torch(lambda a, b: b),
    )
    assert first.name != second.name and first.name.startswith("<lambda>:")
    assert Op.torch(torch.logaddexp).name == Op.torch(np.logaddexp).name == "logaddexp"
    assert Op.torch(functools.partial(product), name="mine").name == "mine"
    assert repr(Op.torch(product, name="mine")) == "ringreduce.Op('mine')"


@pytest.mark.parametrize("call", [ringreduce.scan, ringreduce.exscan])
@pytest.mark.parametrize("op", [torch.distributed.ReduceOp.AVG, "sum", None, torch.add, torch.zeros(2)])
def test_scans_name_the_operations_that_they_take(call: Any, op: Any) -> None:
    with pytest.raises(InvalidArgument, match=r"op is (.|\n)*; (ex)?scan takes a ringreduce.Op, or SUM, PRODUCT"):
        call(torch.zeros(1), op)
