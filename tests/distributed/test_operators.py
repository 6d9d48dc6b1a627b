"""Calls with operators of the user's own: in rank order, over every transport and layout of hosts."""

from __future__ import annotations

import functools
import gc
import operator
import weakref
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed as dist
from bodies.operators import (
    ELEMENT_BYTES,
    PLACEMENTS,
    PRODUCT,
    WELFORD,
    Merge,
    folded,
    later,
    lives_on,
    logged_by_operators,
    matrices,
    placed,
    product,
    rightmost,
)
from distributed.harness import Rank, on_ranks, run

import ringreduce
from ringreduce import Op
from ringreduce.errors import InvalidArgument, OperatorFailed
from ringreduce.operators import call as calls_of_operators

COUNTS = (0, 1, 2, 5, 1009)


def every_call(me: Rank) -> None:
    everyone, below = range(me.size), range(me.rank)
    for count in COUNTS:
        x = matrices(me.rank, count)
        ringreduce.all_reduce(x, op=PRODUCT)
        assert torch.equal(x, folded(everyone, count))
        for root in everyone:
            x = matrices(me.rank, count)
            ringreduce.reduce(x, root, PRODUCT)
            assert torch.equal(x, folded(everyone, count) if me.rank == root else matrices(me.rank, count))
        x = matrices(me.rank, count)
        ringreduce.scan(x, PRODUCT)
        assert torch.equal(x, folded([*below, me.rank], count))
        x = matrices(me.rank, count)
        ringreduce.exscan(x, PRODUCT)
        assert torch.equal(x, folded(below, count) if me.rank else matrices(0, count))
        whole, part = matrices(me.rank, count * me.size), torch.empty((count, 2, 2), dtype=torch.int64)
        ringreduce.reduce_scatter_single(part, whole, PRODUCT)
        assert torch.equal(part, folded(everyone, count * me.size).chunk(me.size)[me.rank] if count else part)
        sizes = [(count + r) % 7 for r in everyone]
        part = torch.empty((sizes[me.rank], 2, 2), dtype=torch.int64)
        ringreduce.reduce_scatter(part, list(matrices(me.rank, sum(sizes)).split(sizes)), PRODUCT)
        assert torch.equal(part, folded(everyone, sum(sizes)).split(sizes)[me.rank])


@pytest.mark.parametrize("placement", PLACEMENTS.values(), ids=PLACEMENTS)
def test_every_call_combines_in_rank_order(placement: dict[str, Any]) -> None:
    run(placed, 4, placement, every_call)


@pytest.mark.parametrize("size", [1, 2, 3, 5])
def test_every_number_of_ranks(size: int) -> None:
    run(placed, size, {}, every_call)


BUILT_IN: dict[Any, Callable[..., torch.Tensor]] = {
    dist.ReduceOp.SUM: torch.add,
    dist.ReduceOp.PRODUCT: torch.mul,
    dist.ReduceOp.MIN: torch.minimum,
    dist.ReduceOp.MAX: torch.maximum,
    dist.ReduceOp.BAND: torch.bitwise_and,
    dist.ReduceOp.BOR: torch.bitwise_or,
    dist.ReduceOp.BXOR: torch.bitwise_xor,
}


@on_ranks(3, through=(placed, {}))
def test_scans_of_the_built_in_operations(me: Rank) -> None:
    for op, f in BUILT_IN.items():
        inputs = [matrices(rank, 37).to(torch.int32) for rank in range(me.size)]
        x, y = inputs[me.rank].clone(), inputs[me.rank].clone()
        out = torch.empty_like(x)
        ringreduce.scan(x, op, out=out)
        assert torch.equal(x, inputs[me.rank])
        assert torch.equal(out, functools.reduce(f, inputs[: me.rank + 1]))
        ringreduce.exscan(y, op)
        assert torch.equal(y, functools.reduce(f, inputs[: me.rank]) if me.rank else inputs[0])
    x = torch.ones(())
    ringreduce.scan(x)
    assert x.item() == me.rank + 1


@on_ranks(3, through=(placed, {}))
def test_many_blocks_and_tiles(me: Rank) -> None:
    calls_of_operators.BLOCK_BYTES, calls_of_operators.TILE_BYTES = 1000, 70
    every_call(me)
    tuples(me)

    def fragile(a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
        if bool((a == 7).any()):
            raise ValueError("a seven")
        return a + b

    x = torch.zeros(1000)
    x[900] = 7 if me.rank == 0 else 0
    with pytest.raises(OperatorFailed, match="ValueError: a seven"):
        ringreduce.all_reduce(x, op=Op.torch(fragile))
    lives_on(me)


@on_ranks(2, 3, 8, through=(placed, {}))
def test_the_engine_calls_functions_in_python(me: Rank) -> None:
    logged = logged_by_operators()
    op, kept = Op.torch(product, element=(2, 2)), []

    def keeps_its_operands(a: np.ndarray[Any, Any], b: np.ndarray[Any, Any]) -> np.ndarray[Any, Any]:
        kept.append((a, b, b.tobytes()))
        return rightmost(a, b)

    for count in (300, 3000, 100_003):  # combined by all ranks, by one rank each, in several tiles
        x, into = matrices(me.rank, count), torch.empty((count, 2, 2), dtype=torch.int64)
        ringreduce.all_reduce(x, op=op, out=into)
        assert torch.equal(x, matrices(me.rank, count)) and torch.equal(into, folded(range(me.size), count))
        inputs = [np.random.default_rng(rank).integers(0, 3, count).astype("i4").view("V4") for rank in range(me.size)]
        y = inputs[me.rank].copy()
        ringreduce.all_reduce(y, op=Op.torch(keeps_its_operands, name="rightmost"))
        assert y.tobytes() == functools.reduce(rightmost, inputs).tobytes()
        for add in (torch.add, operator.iadd, torch.Tensor.add_):  # the first gets no copies
            z = torch.full((count,), 1.0)
            ringreduce.all_reduce(z, op=Op.torch(add, name="add"))
            assert z.eq(me.size).all()
    assert kept and all(b.tobytes() == then and len(then) <= 128 << 10 for _, b, then in kept)
    assert not logged.messages


@on_ranks(2, through=(placed, {}))
def test_the_engine_keeps_no_function(me: Rank) -> None:
    merge = Merge()
    alive = weakref.ref(merge)
    ringreduce.all_reduce(torch.ones(5000), op=merge.op)
    del merge
    gc.collect()
    assert alive() is None


# what a tensor may be


def merged(a: tuple[torch.Tensor, ...], b: tuple[torch.Tensor, ...]) -> tuple[torch.Tensor, ...]:
    """Of partial sums of rows of three: the count and the sums."""
    return a[0] + b[0], a[1] + b[1]


def tuples(me: Rank) -> None:
    values = [torch.arange(50.0).roll(7 * rank) for rank in range(me.size)]
    value, index = values[me.rank].clone(), torch.full((50,), me.rank)
    ringreduce.all_reduce((value, index), op=Op.torch(later, tensors=2, commutative=True, check=True))
    best = torch.stack(values).max(0)
    assert torch.equal(value, best.values) and torch.equal(index, best.indices)

    op = Op.torch(merged, tensors=2, element=((), (3,)))
    count, sums = torch.ones(5, 2, dtype=torch.int32), torch.full((5, 2, 3), float(me.rank))
    into = torch.empty_like(count), torch.empty_like(sums)
    ringreduce.all_reduce([count, sums], op=op, out=into)
    assert count.eq(1).all() and into[0].eq(me.size).all() and into[1].eq(sum(range(me.size))).all()
    ringreduce.reduce((count, sums), 1, op, out=into)
    assert into[0].eq(me.size if me.rank == 1 else 1).all()


def test_tuples_of_tensors() -> None:
    run(placed, 3, {}, tuples)


def records(me: Rank, placement: str) -> None:
    op = Op.torch(rightmost)
    for size in ELEMENT_BYTES:
        count = 5 if size > 5000 else 301
        inputs = []
        for rank in range(me.size):
            raw = np.random.default_rng(rank).integers(0, 3, (count, size), dtype=np.uint8)
            inputs.append(raw.view(f"V{size}").reshape(count))
        expected = functools.reduce(rightmost, inputs)
        x = inputs[me.rank].copy()
        ringreduce.all_reduce(x, op=op)
        assert x.tobytes() == expected.tobytes(), f"{size} bytes"
        strided = np.zeros((count, 2), f"V{size}")
        strided[:, 0] = inputs[me.rank]
        ringreduce.scan(strided[:, 0], op)
        assert strided[:, 0].tobytes() == functools.reduce(rightmost, inputs[: me.rank + 1]).tobytes()
        assert not any(strided[:, 1].tobytes())


@pytest.mark.parametrize("placement", ["one host", "tcp"])
def test_elements_of_every_size(placement: str) -> None:
    run(placed, 3, PLACEMENTS[placement], records, placement)


def welford(a: np.ndarray[Any, Any], b: np.ndarray[Any, Any]) -> np.ndarray[Any, Any]:
    """Counts, means and sums of squared differences from the mean (Chan, Golub and LeVeque, 1979)."""
    out = np.empty_like(a)
    out["count"] = a["count"] + b["count"]
    gap = b["mean"] - a["mean"]
    out["mean"] = a["mean"] + gap * b["count"] / out["count"]
    out["squares"] = a["squares"] + b["squares"] + gap**2 * a["count"] * b["count"] / out["count"]
    return out


@on_ranks(3, through=(placed, {}))
def test_records_of_named_fields(me: Rank) -> None:
    samples = [np.random.default_rng(rank).normal(rank, 1 + rank, (10 + rank, 6)) for rank in range(me.size)]
    own = samples[me.rank]
    state = np.zeros((2, 3), WELFORD)
    state["count"], state["mean"] = len(own), own.mean(0).reshape(2, 3)
    state["squares"] = ((own - own.mean(0)) ** 2).sum(0).reshape(2, 3)
    ringreduce.all_reduce(state, op=Op.torch(welford, commutative=True, check=True))
    everything = np.concatenate(samples)
    np.testing.assert_allclose(state["mean"].ravel(), everything.mean(0))
    np.testing.assert_allclose((state["squares"] / state["count"]).ravel(), everything.var(0))


@on_ranks(3, through=(placed, {}))
def test_layouts_dtypes_and_groups(me: Rank) -> None:
    for dtype in (torch.float64, torch.float32, torch.bfloat16, torch.complex64, torch.bool):
        x = torch.full((9, 4), 1).to(dtype)
        sideways = x.t()[1:3]  # neither contiguous nor all of its memory
        ringreduce.all_reduce(sideways, op=Op.torch(torch.maximum if dtype == torch.float32 else torch.add))
        expected = torch.full((9, 4), 1).to(dtype)
        total = functools.reduce(torch.add, [expected[:, 1:3]] * (1 if dtype == torch.float32 else me.size))
        expected[:, 1:3] = total
        assert torch.equal(x, expected), dtype
    x = torch.zeros(7, dtype=torch.complex64) + complex(0, 1)
    ringreduce.all_reduce(x.conj(), op=Op.torch(torch.mul))
    assert torch.allclose(x, torch.full_like(x, complex(0, -1) ** me.size).conj())
    array = np.arange(6, dtype=np.float32)[::2]
    ringreduce.all_reduce(array, op=Op.torch(torch.add))
    assert array.tolist() == [0, 2 * me.size, 4 * me.size]
    one = torch.ones(1, 2).t()[0]  # an element whose stride is 2
    ringreduce.all_reduce(one, op=Op.torch(torch.add))
    assert one.item() == me.size
    several = [torch.ones(3), torch.ones(2, 2, dtype=torch.int64)]
    ringreduce.all_reduce_coalesced(several, op=Op.torch(torch.add))
    assert all(each.eq(me.size).all() for each in several)
    numbers = torch.arange(5_000_001.0) % 1000  # of several blocks
    wanted = numbers[:-1] * me.size
    ringreduce.all_reduce(numbers[:-1], op=Op.torch(torch.add), out=numbers[1:])
    assert torch.equal(numbers[1:], wanted)
    swapped = np.arange(3, dtype=">f8")
    ringreduce.all_reduce(swapped, op=Op.torch(np.add, name="add"))
    assert swapped.tolist() == [0, me.size, 2 * me.size]
    ringreduce.all_reduce(np.zeros(0, WELFORD), op=Op.torch(np.maximum, name="maximum"))
    with torch.device("meta"):  # where new tensors go by default
        ringreduce.all_reduce(several[0], op=Op.torch(lambda a, b: b, name="last"))
    with pytest.raises(InvalidArgument, match="tensor has dtype float32; BAND is of integers and bool"):
        ringreduce.scan(torch.ones(3), dist.ReduceOp.BAND)
    weight = torch.ones(3, requires_grad=True)
    ringreduce.all_reduce(weight, op=Op.torch(torch.add))
    assert weight.requires_grad and weight.tolist() == [me.size] * 3
    other = dist.new_group([0, 2], backend="ringreduce")
    if me.rank != 1:
        x = matrices(me.rank, 100)
        ringreduce.scan(x, PRODUCT, group=other)
        assert torch.equal(x, folded([0, 2][: me.rank // 2 + 1], 100))


def writes_to_its_operand(a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
    return torch.matmul(a, b, out=a.clone()) if len(a) % 2 else a.copy_(a @ b)


@on_ranks(3, through=(placed, {}))
def test_an_operator_may_write_to_its_first_operand(me: Rank) -> None:
    op = Op.torch(writes_to_its_operand, element=(2, 2))
    for count in (3, 20_001):  # more than a tile
        x, y = matrices(me.rank, count), matrices(me.rank, count)
        ringreduce.all_reduce(x, op=op)
        assert torch.equal(x, folded(range(me.size), count))
        ringreduce.scan(y, op)
        assert torch.equal(y, folded(range(me.rank + 1), count))
