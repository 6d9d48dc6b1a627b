"""What the error of a wrong input advises is carried out on this very input, and works."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import numpy.lib.recfunctions
import pytest
import torch
import torch.distributed as dist
from bodies.grid import MOVED_DTYPES
from bodies.parameter_server import SMALL
from distributed.harness import Rank, on_ranks
from torch import nn
from torch.distributed.tensor import Shard, distribute_tensor
from torch.masked import masked_tensor
from torch.testing._internal.two_tensor import TwoTensor
from torch.utils.data import IterableDataset

import ringreduce
import ringreduce.parameter_server as ps
from ringreduce import data, hooks
from ringreduce.data.batches import lay_out, lay_out_whole
from ringreduce.elastic.state import State
from ringreduce.errors import InvalidArgument

Row = tuple[Callable[[], Any], Callable[..., None], str] | tuple[Callable[[], Any], Callable[..., None], str, Any]
"""What is given, to which call, and what its error advises: an expression, or words and a function that does it."""


def carry_out(row: Row) -> None:
    make, call, advice = row[:3]
    given: Any = make()
    with pytest.raises(InvalidArgument, match=re.escape(advice)):
        call(given)
    if len(row) == 4:
        better = row[3](given)
    else:
        names = dict.fromkeys(("tensor", "array", "scalar", "dataset", "ids"), given) | {"numpy": np, "torch": torch}
        better = eval(advice if any(name in advice for name in names) else f"tensor.{advice}", names)
    call(better)


def masked() -> np.ma.MaskedArray:
    return np.ma.array([1.0, 2.0, 3.0], mask=[0, 1, 0])


def masked_of_torch() -> torch.Tensor:
    tensor: torch.Tensor = masked_tensor(torch.ones(2), torch.eye(2)[0] > 0)
    return tensor


def read_only() -> np.ndarray:
    return np.broadcast_to(np.arange(3.0), (2, 3))


def columns(dtype: Any) -> np.ndarray:
    return np.arange(12).astype(dtype).reshape(3, 4)[:, ::2]


def records() -> np.ndarray:
    return np.zeros(2, [("a", "f4"), ("b", "i8")])


def sharded() -> torch.Tensor:
    return distribute_tensor(torch.arange(4.0), dist.device_mesh.init_device_mesh("cpu", (2,)), [Shard(0)])


def nested(layout: torch.layout = torch.strided) -> torch.Tensor:
    return torch.nested.nested_tensor([[1.0], [2.0, 3.0]], layout=layout)


def jagged() -> torch.Tensor:
    return nested(torch.jagged)


def quantized() -> torch.Tensor:
    return torch.quantize_per_tensor(torch.ones(3), 0.5, 0, torch.qint8)


def two() -> torch.Tensor:
    return TwoTensor(torch.ones(2), torch.zeros(2))


def inner(tensor: Any) -> tuple[torch.Tensor, ...]:
    return tensor.a, tensor.b


def conjugate() -> torch.Tensor:
    return torch.ones(3, dtype=torch.complex64).conj()


def overlapping() -> list[torch.Tensor]:
    line = torch.ones(4)
    return [line[:3], line[1:]]


FIRST = ringreduce.Op.torch(lambda a, b: a, name="first")


def first(given: Any) -> None:
    ringreduce.all_reduce(given, op=FIRST)


def each(given: Any) -> None:
    for tensor in given if isinstance(given, tuple) else [given]:
        ringreduce.all_reduce(tensor)


def with_op(given: Any) -> None:
    array, op = given
    ringreduce.all_reduce(array, op=op)


def kept(given: Any) -> None:
    State({"p": given})


BETWEEN_RANKS: list[Row] = [
    (lambda: np.float32(1), ringreduce.all_reduce, "numpy.array(scalar)"),
    (lambda: [1.0, 2.0], ringreduce.all_reduce, "must be a torch.Tensor", torch.tensor),
    (read_only, ringreduce.all_reduce, "array.copy()"),
    (lambda: np.arange(4.0)[::-1], ringreduce.all_reduce, "array.copy()"),
    (lambda: np.arange(4.0)[::-1], first, "array.copy()"),
    (lambda: np.zeros(3, [("a", "i1"), ("b", "f4")])["b"], ringreduce.all_reduce, "array.copy()"),
    (lambda: np.lib.stride_tricks.as_strided(np.ones(4), (3,), (0,)), first, "tensor.copy()"),
    (lambda: columns(">f4"), ringreduce.all_reduce, 'array.astype(array.dtype.newbyteorder("="))'),
    (lambda: read_only().astype(">i8"), ringreduce.all_reduce, 'array.astype(array.dtype.newbyteorder("="))'),
    (masked, ringreduce.all_reduce, "array.filled(0)"),
    (masked, ringreduce.all_reduce, "array.data"),
    (masked, first, "array.data"),
    (records, ringreduce.all_reduce, "array['a']"),
    (records, ringreduce.broadcast, "array.view(numpy.uint8)"),
    (
        lambda: (records(), dist.ReduceOp.SUM),
        with_op,
        "an operator of your own (op=ringreduce.Op.torch(f))",
        lambda given: (given[0], FIRST),
    ),
    (lambda: records()[["a"]], first, "numpy.lib.recfunctions.repack_fields(tensor)"),
    (lambda: columns(np.longdouble), ringreduce.broadcast, "numpy.ascontiguousarray(array).view(numpy.uint8)"),
    (lambda: np.array("text"), ringreduce.broadcast, "numpy.ascontiguousarray(array).view(numpy.uint8)"),
    (lambda: np.array([1, 2], object), ringreduce.all_reduce, "a dtype of numbers", lambda array: array.astype(float)),
    (jagged, ringreduce.all_reduce, "values()"),
    (jagged, first, "values()"),
    (nested, each, "unbind()"),
    (lambda: torch.eye(3).to_sparse_csr(), ringreduce.all_reduce, "to_dense()"),
    (lambda: torch.eye(3).to_sparse(), first, "to_dense()"),
    (lambda: torch.eye(3).to_sparse(), ringreduce.broadcast, "to_dense()"),
    (lambda: torch.eye(3).to_mkldnn(), first, "to_dense()"),
    (lambda: torch._efficientzerotensor((3,)), ringreduce.all_reduce, "clone()"),
    (quantized, ringreduce.all_reduce, "dequantize()"),
    (quantized, first, "tensor.dequantize()"),
    (lambda: torch.ones(1).expand(4), first, "tensor.contiguous()"),
    (lambda: torch.ones(1).expand(4), ringreduce.all_reduce, "pass a contiguous copy", torch.Tensor.contiguous),
    (lambda: torch.ones(1).expand(4), dist.all_reduce, "pass a contiguous copy", torch.Tensor.contiguous),
    (overlapping, ringreduce.all_reduce_coalesced, "pass separate ones", lambda given: [given[0].clone(), given[1]]),
    (sharded, ringreduce.all_reduce, "to_local()"),
    (sharded, lambda given: ringreduce.all_reduce(torch.ones(2), out=given), "to_local()"),
    (sharded, kept, "to_local()"),
    (masked_of_torch, ringreduce.all_reduce, "get_data()"),
    (two, each, "it stands for other tensors; pass those", inner),
    *(
        (lambda given=x: given, lambda op: ringreduce.all_reduce(torch.ones(3), op=op), advice)
        for x, advice in (
            ("sum", "torch.distributed.ReduceOp.SUM"),
            ("max", "torch.distributed.ReduceOp.MAX"),
            (None, "torch.distributed.ReduceOp.SUM"),
        )
    ),
    (
        lambda: np.arange(4.0),
        lambda rows: data.exchange(rows, data.Order(8, 2), 0),
        "rows must be a tensor",
        torch.from_numpy,
    ),
]


@on_ranks(2)
def test_what_an_error_of_a_call_between_ranks_advises_works(me: Rank) -> None:
    with me.join():
        for row in BETWEEN_RANKS:
            carry_out(row)
        for name in MOVED_DTYPES:
            tensor = torch.zeros(4, dtype=getattr(torch, name))
            with pytest.raises(InvalidArgument, match=r"convert .* float32 or complex64; .* pass view\(torch\.uint8\)"):
                ringreduce.all_reduce(tensor)
            try:
                converted = tensor.to(torch.complex64)
            except NotImplementedError:
                converted = tensor.view(torch.uint8)
            ringreduce.all_reduce(converted)
        in_place, sums = np.ma.array([1.0, 2.0], mask=[0, 1]), records()
        sums["a"] = me.rank + 1
        ringreduce.all_reduce(in_place.data)
        ringreduce.all_reduce(sums["a"])
        assert in_place.data.tolist() == [2, 4] and sums["a"].tolist() == [3, 3]
        parts = jagged()
        ringreduce.all_reduce(parts.values())
        assert [part.tolist() for part in parts.unbind()] == [[2], [4, 6]]


def initialised(given: Any, mode: ps.Mode | None = None) -> None:
    with ps.join(**SMALL) as kv:
        for number, value in enumerate(given if isinstance(given, tuple) else [given]):
            kv.init(f"x{number}", value, mode=mode or ps.sync())


def pulled(given: Any) -> None:
    with ps.join(**SMALL) as kv:
        kv.init("x", torch.full(given.shape, 7, dtype=given.dtype))
        kv.pull("x", given)
        assert given.flatten().tolist() == [7] * given.numel()


def looked_up(given: Any) -> None:
    with ps.join(**SMALL) as kv:
        ps.Embedding(kv, "t", 2, update=ps.optimizer(torch.optim.SGD, lr=0.1)).pull(given)


def summed(given: Any) -> None:
    initialised(given, ps.sync(average=False))


def sample(given: Any) -> None:
    lay_out([given, given])


class Stream(IterableDataset[int]):
    def __iter__(self) -> Iterator[int]:
        return iter(range(4))


def loaded(given: Any) -> None:
    with data.Loader(given, data.Order(4, 2, shuffle=False)) as loader:
        assert loader.get(1).tolist() == [2, 3]


def compressed(given: Any) -> None:
    hooks._check_compressible(given)


IN_ONE_PROCESS: list[Row] = [
    (lambda: torch.ones(4)[1:], ringreduce.share, "share that one", lambda view: view._base),
    (lambda: columns(">f4"), initialised, 'array.astype(array.dtype.newbyteorder("="))'),
    (lambda: np.arange(4.0)[::-1], initialised, "array.copy()"),
    (lambda: np.float32(1), initialised, "numpy.array(scalar)"),
    (lambda: [1.0, 2.0], initialised, "must be a torch.Tensor", torch.tensor),
    (masked, initialised, "array.filled(0)"),
    (records, initialised, "array['a']"),
    (records, summed, "array.view(numpy.uint8)"),
    (lambda: np.ones(3, np.longdouble), summed, "array.view(numpy.uint8)"),
    (lambda: np.array([1, 2], object), initialised, "give it a dtype of numbers", lambda array: array.astype(float)),
    (
        lambda: (torch.ones(3).int(), ps.sync()),
        lambda given: initialised(*given),
        "sync(average=False)",
        lambda given: (given[0], ps.sync(average=False)),
    ),
    (jagged, initialised, "values()"),
    (nested, initialised, "unbind()"),
    (lambda: torch.eye(3).to_sparse(), initialised, "to_dense()"),
    (lambda: torch.eye(3).to_mkldnn(), initialised, "to_dense()"),
    (quantized, summed, "dequantize()"),
    (masked_of_torch, initialised, "get_data()"),
    (two, initialised, "it stands for other tensors; pass those", inner),
    (lambda: torch._efficientzerotensor((3,)), initialised, "clone()"),
    (conjugate, pulled, "resolve_conj().resolve_neg()"),
    (lambda: conjugate().imag, pulled, "resolve_conj().resolve_neg()"),
    (lambda: torch.ones(1).expand(4), pulled, "clone()"),
    (lambda: torch.ones(1).expand(4), kept, "contiguous()"),
    (lambda: torch.ones(1).expand(4), kept, "clone()"),
    (
        lambda: nn.Linear(2, 2, device="meta"),
        kept,
        "to_empty()",
        lambda module: module.to_empty(device="cpu"),
    ),
    (lambda: [nn.Linear(2, 2)], kept, "torch.nn.ModuleList", nn.ModuleList),
    (lambda: torch.eye(2).to_sparse(), kept, "it must be dense", torch.Tensor.to_dense),
    (quantized, kept, "nor quantized", torch.Tensor.dequantize),
    (nested, kept, "neither nested", lambda tensor: list(tensor.unbind())),
    (lambda: torch.ones(3).to(torch.uint16), summed, "convert the tensor", torch.Tensor.int),
    (lambda: torch.ones(3, dtype=torch.complex32), initialised, "convert the tensor", torch.Tensor.cfloat),
    (lambda: np.arange(3, dtype=np.int32), looked_up, "torch.as_tensor(ids).long()"),
    (lambda: torch.arange(3).to_sparse(), looked_up, "to_dense()"),
    *(
        row
        for call in (sample, lay_out_whole)
        for row in (
            (jagged, call, "values()"),
            (nested, call, "unbind()"),
            (lambda: torch.eye(2).to_sparse(), call, "to_dense()"),
            (quantized, call, "dequantize()"),
            (masked, call, "array.filled(0)"),
            (masked_of_torch, call, "get_data()"),
            (two, call, "it stands for other tensors; pass those", inner),
        )
    ),
    (Stream, loaded, "list(dataset)"),
    (lambda: torch.ones(3).double(), compressed, "must be float32", torch.Tensor.float),
]


@pytest.mark.filterwarnings("ignore:.*quantized")
@pytest.mark.parametrize("row", IN_ONE_PROCESS, ids=lambda row: f"{row[1].__name__} {row[2]}")
def test_what_an_error_in_one_process_advises_works(row: Row) -> None:
    carry_out(row)
