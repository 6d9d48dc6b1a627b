"""The library's own operators, on tuples of tensors and on records, against torch and NumPy on all ranks' values."""

from __future__ import annotations

import re
from typing import Any

import numpy as np
import pytest
import torch
from bodies.operators import PLACEMENTS, later, lives_on, logged_by_operators, placed
from distributed.harness import Rank, on_ranks, run

import ringreduce
from ringreduce import Op
from ringreduce.errors import CollectiveMismatch, InvalidArgument

COUNTS = (1, 5, 300, 20_001)
KEYS = (torch.float32, torch.float64, torch.bfloat16, torch.float16, torch.float8_e5m2, torch.int8, torch.int16)
KEYS += (torch.int32, torch.int64, torch.uint8, torch.bool)


def values_of(ranks: int, count: int, dtype: torch.dtype) -> torch.Tensor:
    """Of all ranks: whole numbers, of which some are equal, and NaN."""
    generator = torch.Generator().manual_seed(count)
    values = torch.randint(0, 7, (ranks, count), generator=generator).to(torch.float32)
    if dtype.is_floating_point:
        values -= 3
        values[torch.rand(ranks, count, generator=generator) < 0.1] = torch.nan
    return values.to(dtype)


def assert_same(values: torch.Tensor, wanted: torch.Tensor) -> None:
    torch.testing.assert_close(values.double(), wanted.double(), rtol=0, atol=0, equal_nan=True)


# which comes first


def extremes(me: Rank) -> None:
    for dtype in KEYS:
        for index_dtype in (torch.int64, torch.int32):
            for count in COUNTS if dtype == torch.float32 else (300,):
                every = values_of(me.size, count, dtype)
                for op, best in ((Op.argmax(), torch.max), (Op.argmin(), torch.min)):
                    numbers = every.double()
                    wanted = best(numbers, 0).values
                    owners = torch.where(wanted.isnan(), numbers.isnan(), numbers == wanted)
                    indices = torch.tensor([2, 7, 4, 1, 6, 3, 0, 5])[: me.size]  # of each rank
                    value = every[me.rank].clone()
                    index = indices[me.rank].repeat(count).to(index_dtype)
                    ringreduce.all_reduce((value, index), op=op)
                    assert_same(value, wanted)
                    assert_same(index, torch.where(owners, indices[:, None], 8).amin(0))  # the lowest of equal ones


@on_ranks(1, 2, 3, 8, through=(placed, {}))
def test_the_highest_and_the_lowest(me: Rank) -> None:
    logged = logged_by_operators()
    extremes(me)
    assert not logged.messages


@pytest.mark.parametrize("placement", ["gloo", "2 x 2", pytest.param("interleaved", marks=pytest.mark.slow)])
def test_outside_of_the_engine(placement: str) -> None:
    run(placed, 4, PLACEMENTS[placement], everything)


def everything(me: Rank) -> None:
    extremes(me)
    lists(me)
    moments(me)


RECORD = np.dtype([("name", "S5"), ("loss", "f8"), ("step", "u2"), ("weights", "f4", (3,))])


def records_of(rank: int, count: int) -> np.ndarray[Any, Any]:
    rng = np.random.default_rng([rank, count])
    records = np.zeros(count, RECORD)
    records["name"], records["step"] = f"r{rank}", rng.integers(0, 9, count)
    records["loss"], records["weights"] = rng.integers(0, 4, count), rng.random((count, 3))
    return records


@on_ranks(3, through=(placed, {}))
def test_whole_records_follow_their_key(me: Rank) -> None:
    for count in COUNTS:
        every = np.stack([records_of(rank, count) for rank in range(me.size)])
        for op, owner in (
            (Op.min_by("loss"), every["loss"].argmin(0)),
            (Op.max_by("loss"), every["loss"].argmax(0)),
            (Op.min_by(1), every["loss"].argmin(0)),
        ):
            records = records_of(me.rank, count)
            ringreduce.all_reduce(records, op=op)
            assert records.tobytes() == every[owner, np.arange(count)].tobytes()
    spaced = np.repeat(records_of(me.rank, 10), 2)
    every = np.stack([records_of(rank, 10) for rank in range(me.size)])
    best = every[every["loss"].argmin(0), np.arange(10)]
    ringreduce.all_reduce(spaced[::2], op=Op.min_by("loss"))
    assert spaced[::2].tobytes() == best.tobytes() and spaced[1::2].tobytes() == records_of(me.rank, 10).tobytes()


# the first k


def lists(me: Rank) -> None:
    for k in (1, 4, 33):
        for largest in (True, False):
            every = values_of(me.size, 7 * 40, torch.float32).view(me.size, 7, 40)
            order = every if largest else every.nan_to_num(-torch.inf)  # sort() takes NaN as the largest
            best = order[me.rank].sort(dim=1, descending=largest, stable=True).indices[:, :k]
            best = best[:, torch.randperm(k, generator=torch.Generator().manual_seed(k))]  # in any order
            values, indices = every[me.rank].gather(1, best), best + 40 * me.rank
            ringreduce.all_reduce((values, indices), op=Op.top_k(k, largest=largest))
            order, every = (each.permute(1, 0, 2).reshape(7, -1) for each in (order, every))
            owners = order.sort(dim=1, descending=largest, stable=True).indices[:, :k]
            assert_same(values, every.gather(1, owners))
            assert_same(indices, owners)


@pytest.mark.parametrize("size", [2, 5])
def test_the_first_k_of_all(size: int) -> None:
    run(placed, size, {}, lists)


# moments


def moments(me: Rank) -> None:
    for dtype, digits in ((torch.float64, 1e-12), (torch.float32, 1e-4)):
        every = torch.randn(me.size, 100, 6, generator=torch.Generator().manual_seed(3)).to(dtype) + 50
        own = every[me.rank, : 0 if me.rank == 1 else 100 - me.rank]  # rank 1 has no samples
        size = torch.full((6,), len(own), dtype=dtype)
        mean = own.mean(0)  # of no samples it is NaN
        squares = own.var(0, unbiased=False) * len(own)
        ringreduce.all_reduce((size, mean, squares), op=Op.welford())
        rows = [every[rank, : 0 if rank == 1 else 100 - rank] for rank in range(me.size)]
        together = torch.cat(rows)
        assert size.tolist() == [len(together)] * 6
        torch.testing.assert_close(mean, together.mean(0), rtol=digits, atol=0)
        torch.testing.assert_close(squares / size, together.var(0, unbiased=False), rtol=digits, atol=0)


@pytest.mark.parametrize("size", [1, 2, 4])
def test_moments_of_all_samples(size: int) -> None:
    run(placed, size, {}, moments)


# functions of torch that the library has kernels for


@on_ranks(3, through=(placed, {}))
def test_functions_of_torch_by_kernels(me: Rank) -> None:
    logged = logged_by_operators()
    functions: list[Any] = [torch.add, torch.mul, torch.minimum, torch.maximum, torch.logaddexp]
    for dtype in (torch.float32, torch.bfloat16, torch.int16):
        for f in functions if dtype != torch.int16 else [*functions[:4], torch.bitwise_xor]:
            for count in COUNTS:
                every = values_of(me.size, count, dtype)
                wanted = every[0].double()
                for row in every[1:]:
                    wanted = f(wanted, row.double()) if dtype.is_floating_point else f(wanted.to(dtype), row).double()
                x = every[me.rank].clone()
                ringreduce.all_reduce(x, op=Op.torch(f))
                digits = 2e-2 if dtype == torch.bfloat16 else 1e-6
                torch.testing.assert_close(x.double(), wanted, rtol=digits, atol=digits, equal_nan=True)
    odd = torch.full((7,), 1 << me.rank, dtype=torch.uint16)  # of which only torch knows operations
    ringreduce.all_reduce(odd, op=Op.torch(torch.bitwise_or))
    assert odd.tolist() == [(1 << me.size) - 1] * 7
    assert not logged.messages


# other calls, and what cannot be combined


@on_ranks(3, through=(placed, {}))
def test_scan_reduce_and_reduce_scatter_take_tuples_too(me: Rank) -> None:
    every = values_of(me.size, 21, torch.float64).nan_to_num(9)
    index = torch.full((21,), me.rank)
    value = every[me.rank].clone()
    ringreduce.scan((value, index), Op.argmax())
    assert torch.equal(value, every[: me.rank + 1].max(0).values)
    value, index = every[me.rank].clone(), torch.full((21,), me.rank)
    ringreduce.reduce((value, index), dst=1, op=Op.argmax())
    assert torch.equal(value, every.max(0).values if me.rank == 1 else every[me.rank])
    whole = every[me.rank].clone(), torch.full((21,), me.rank)
    part = torch.empty(7, dtype=torch.float64), torch.empty(7, dtype=torch.int64)
    ringreduce.reduce_scatter_single(part, whole, op=Op.argmax())
    assert torch.equal(part[0], every.max(0).values[7 * me.rank : 7 * me.rank + 7])
    out = torch.empty(21, dtype=torch.float64), torch.empty(21, dtype=torch.int64)
    ringreduce.all_reduce(whole, op=Op.argmax(), out=out)
    assert torch.equal(out[0], every.max(0).values) and torch.equal(whole[0], every[me.rank])


@on_ranks(2, through=(placed, {}))
def test_what_cannot_be_combined_is_named_and_the_group_lives(me: Rank) -> None:
    ones, whole, again = torch.ones(3), torch.ones(3, dtype=torch.int64), torch.ones(3)
    line, records = torch.arange(4), np.zeros(3, [("a", "f4"), ("b", "i8"), ("c", "i8")])
    titled = np.zeros(3, np.dtype({"names": ["a"], "formats": ["f4"], "titles": ["T"]}))
    pairs = np.zeros(3, [("value", "f4"), ("index", "i8")])
    for op, given, message in (
        (Op.argmax(), ones, "tensor cannot be combined: argmax takes NumPy arrays of records with 2 fields or more"),
        (Op.argmax(), (ones,), "argmax takes .* 2 fields or more, .* the elements are"),
        (Op.argmax(), (ones, again), "the index of argmax, field 'f1', is of dtype float32; .* one of int32, int64"),
        (
            Op.argmin(),
            (ones.cfloat(), whole),
            "the key of argmin, field 'f0', is of dtype complex64; .* one of float32",
        ),
        (Op.argmin(), (ones.to(torch.uint16), whole), "the key of argmin, field 'f0', is of dtype uint16"),
        (Op.argmax(), (ones, whole[:2]), r"tensor\[1\] has shape \(2,\) and tensor\[0\] has \(3,\); .* begin with"),
        (Op.argmax(), (line[:3], line[1:]), r"tensor\[0\] and tensor\[1\] have memory in common"),
        (Op.argmax(), pairs.astype([("value", ">f4"), ("index", "i8")]), "the key of argmax, field 'value', is .* >f4"),
        (Op.max_by("a"), records[["a", "c"]], "tensor is an index of records by some of their fields"),
        (Op.argmax(), titled, "argmax takes NumPy arrays of records with 2 fields or more"),
        (Op.max_by("c"), pairs, "key is 'c'; there are 2 fields: value, index"),
        (Op.min_by(2), pairs, "key is 2; there are 2 fields: value, index"),
        (Op.top_k(2), (ones, whole), r"tensor\[0\] has shape \(3,\); the operator's elements have \(2,\)"),
        (Op.top_k(3), (ones, again), "the index of top_k, field 'f1', is of dtype .* int32, int64 of shape"),
        (Op.welford(), (ones, again, whole), "the sum of squares of welford, field 'f2', is of dtype int64"),
        (Op.welford(), (ones, again, ones.double()), "a sum of squares of one dtype, without gaps"),
        (Op.welford(), (ones.half(), again.half(), torch.ones(3).half()), "welford takes float32 or float64"),
    ):
        with pytest.raises(InvalidArgument, match=message):
            ringreduce.all_reduce(given, op=op)
        with pytest.raises(InvalidArgument, match=message):
            ringreduce.scan(given, op)
    lives_on(me)


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: Op.top_k(0), "k is 0; it must be how many values are kept, 1 or more"),
        (lambda: Op.top_k(True), "k is True"),
        (lambda: Op.top_k(2, largest=1), "largest is 1; it must be True or False"),  # type: ignore[arg-type]
        (lambda: Op.max_by(-1), "key is -1; it must be the name of a field, or its number from 0"),
        (lambda: Op.min_by(None), "key is None"),  # type: ignore[arg-type]
    ],
)
def test_wrong_arguments_are_named(make: Any, message: str) -> None:
    with pytest.raises(InvalidArgument, match=re.escape(message)):
        make()


def by_numba(me: Rank) -> None:
    def larger(a: Any, b: Any, out: Any) -> None:
        best = b if b.value > a.value else a
        out.value, out.index = best.value, best.index

    op = Op.numba(larger, element=np.dtype([("value", "f8"), ("index", "i8")]))
    value, index = torch.tensor([1.0, 2.0]) * (me.rank + 1), torch.full((2,), me.rank)
    with pytest.raises(InvalidArgument, match=r"tensor\[0\] has elements of float32; field 'value' .* has float64"):
        ringreduce.all_reduce((value, index), op=op)
    with pytest.raises(InvalidArgument, match=r"takes records, or a tuple with an array for each field, 2"):
        ringreduce.all_reduce((value, index, index), op=op)
    value = value.double()
    ringreduce.all_reduce((value, index), op=op)
    assert value.tolist() == [me.size, 2 * me.size] and index.tolist() == [me.size - 1] * 2


def test_an_operator_on_records_takes_a_tuple() -> None:
    pytest.importorskip("numba")
    run(placed, 2, {}, by_numba)


@on_ranks(4, through=(placed, {}))
def test_argmax_is_what_a_function_of_torch_gives(me: Rank) -> None:
    """On two tensors, which Python combines."""
    value, index = torch.arange(50.0) % (me.rank + 2), torch.full((50,), me.rank)
    again = value.clone(), index.clone()
    ringreduce.all_reduce((value, index), op=Op.argmax())
    ringreduce.all_reduce(again, op=Op.torch(later, tensors=2))
    assert torch.equal(value, again[0]) and torch.equal(index, again[1])


# the rest of a record, and other fields


@on_ranks(3, through=(placed, {}))
def test_what_goes_with_a_key_may_have_more_dimensions(me: Rank) -> None:
    weights = torch.arange(24.0).view(2, 3, 4) + 100 * me.rank
    loss = torch.tensor([1.0 + me.rank, 5.0 - me.rank])
    ringreduce.all_reduce((loss, weights), op=Op.min_by())
    assert loss.tolist() == [1.0, 6.0 - me.size]
    assert torch.equal(weights[0], torch.arange(12.0).view(3, 4))
    assert torch.equal(weights[1], torch.arange(12.0, 24.0).view(3, 4) + 100 * (me.size - 1))
    loss, parameters = torch.tensor(float(-me.rank)), torch.full((5, 7), float(me.rank), dtype=torch.bfloat16)
    ringreduce.all_reduce((loss, parameters), op=Op.min_by())
    assert loss.item() == 1 - me.size and parameters.eq(me.size - 1).all()


@pytest.mark.parametrize("what", ["narrow dtypes", "long keys", "functions of torch of one name"])
@on_ranks(2, through=(placed, {}))
def test_ranks_that_differ_find_out(me: Rank, what: str) -> None:
    first, owner, long = me.rank == 0, torch.full((2,), me.rank), "x" * 70
    records = np.zeros(2, [(long + "1", "f4"), (long + "2", "f4")])
    value = torch.ones(2).to(torch.bfloat16 if first else torch.float32)
    with pytest.raises(CollectiveMismatch):
        if what == "narrow dtypes":
            ringreduce.all_reduce((value, owner), op=Op.argmax())
        elif what == "long keys":
            ringreduce.all_reduce(records, op=Op.max_by(long + ("1" if first else "2")))
        else:
            ringreduce.all_reduce(torch.ones(2), op=Op.torch(torch.add if first else torch.mul, name="x"))


def outside(me: Rank) -> None:
    x = torch.full((700,), me.rank + 1.0).to(torch.float8_e5m2)  # for which torch has no sum
    ringreduce.all_reduce(x, op=Op.torch(torch.add))
    assert x.float().eq(sum(range(1, me.size + 1))).all()


@pytest.mark.parametrize("placement", ["one host", "tcp"])
def test_kernels_serve_outside_of_the_engine_too(placement: str) -> None:
    run(placed, 3, PLACEMENTS[placement], outside)
