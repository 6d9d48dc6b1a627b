"""Calls with operators of the user's own: in rank order, over every transport and layout of hosts, and their faults."""

from __future__ import annotations

import ctypes
import functools
import os
import shutil
import signal
import subprocess
import time
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed as dist
from distributed.harness import Rank, Ranks, run

import ringreduce
from ringreduce import Op
from ringreduce.errors import CollectiveMismatch, InvalidArgument, OperatorFailed, PeerLost
from ringreduce.operators import call as calls_of_operators

COUNTS = (0, 1, 2, 5, 1009)
PLACEMENTS: dict[str, dict[str, str | Sequence[int]]] = {
    "one host": {},
    "gloo": {"RINGREDUCE_TRANSPORT": "gloo"},
    "tcp": {"RINGREDUCE_TRANSPORT": "tcp"},
    "2 x 2": {"RINGREDUCE_HOST_ID": (0, 0, 1, 1)},
    "interleaved": {"RINGREDUCE_HOST_ID": (0, 1, 0, 1)},
    "uneven": {"RINGREDUCE_HOST_ID": (0, 1, 1, 1)},
}


def product(a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
    """Of 2 x 2 matrices of whole numbers: it does not commute, and is exact."""
    return a @ b


PRODUCT = Op.torch(product, element=(2, 2), check=True)


def matrices(rank: int, count: int) -> torch.Tensor:
    generator = torch.Generator().manual_seed(100 * count + rank)
    return torch.randint(-3, 4, (count, 2, 2), generator=generator)


def folded(ranks: Sequence[int], count: int) -> torch.Tensor:
    return functools.reduce(product, (matrices(rank, count) for rank in ranks))


def placed(me: Rank, placement: dict[str, Any], body: Callable[..., Any], *args: Any) -> Any:
    for name, value in placement.items():
        os.environ[name] = value if isinstance(value, str) else f"host {value[me.rank]}"
    with me.join():
        return body(me, *args)


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


def built_in_scans(me: Rank) -> None:
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


def test_scans_of_the_built_in_operations() -> None:
    run(placed, 3, {}, built_in_scans)


def in_small_blocks(me: Rank) -> None:
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


def test_many_blocks_and_tiles() -> None:
    run(placed, 3, {}, in_small_blocks)


# what a tensor may be


def later(a: tuple[torch.Tensor, ...], b: tuple[torch.Tensor, ...]) -> tuple[torch.Tensor, ...]:
    """The larger value with its index; of equal ones the lower index."""
    wins = (b[0] > a[0]) | ((b[0] == a[0]) & (b[1] < a[1]))
    return torch.where(wins, b[0], a[0]), torch.where(wins, b[1], a[1])


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


def rightmost(a: np.ndarray[Any, Any], b: np.ndarray[Any, Any]) -> np.ndarray[Any, Any]:
    """b, except where its first byte is 0: associative, and not commutative."""
    first = b.view(np.uint8).reshape(len(b), -1)[:, 0]
    return np.where(first == 0, a, b)


ELEMENT_BYTES = (1, 3, 12, 24, 48, 4100, 512 * 1024)


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


WELFORD = np.dtype([("count", "<i8"), ("mean", "<f8"), ("squares", "<f8")])


def welford(a: np.ndarray[Any, Any], b: np.ndarray[Any, Any]) -> np.ndarray[Any, Any]:
    """Counts, means and sums of squared differences from the mean (Chan, Golub and LeVeque, 1979)."""
    out = np.empty_like(a)
    out["count"] = a["count"] + b["count"]
    gap = b["mean"] - a["mean"]
    out["mean"] = a["mean"] + gap * b["count"] / out["count"]
    out["squares"] = a["squares"] + b["squares"] + gap**2 * a["count"] * b["count"] / out["count"]
    return out


def named_fields(me: Rank) -> None:
    samples = [np.random.default_rng(rank).normal(rank, 1 + rank, (10 + rank, 6)) for rank in range(me.size)]
    own = samples[me.rank]
    state = np.zeros((2, 3), WELFORD)
    state["count"], state["mean"] = len(own), own.mean(0).reshape(2, 3)
    state["squares"] = ((own - own.mean(0)) ** 2).sum(0).reshape(2, 3)
    ringreduce.all_reduce(state, op=Op.torch(welford, commutative=True, check=True))
    everything = np.concatenate(samples)
    np.testing.assert_allclose(state["mean"].ravel(), everything.mean(0))
    np.testing.assert_allclose((state["squares"] / state["count"]).ravel(), everything.var(0))


def test_records_of_named_fields() -> None:
    run(placed, 3, {}, named_fields)


C_FUNCTIONS = """
#include <stddef.h>
#include <string.h>

int product(const long long* a, const long long* b, long long* out, size_t n) {
  for (; n > 0; --n, a += 4, b += 4, out += 4) {
    const long long c[4] = {a[0] * b[0] + a[1] * b[2], a[0] * b[1] + a[1] * b[3],
                            a[2] * b[0] + a[3] * b[2], a[2] * b[1] + a[3] * b[3]};
    memcpy(out, c, sizeof c);
  }
  return 0;
}

int refused(const void* a, const void* b, void* out, size_t n) { return n > 0 ? 7 : 0; }
"""


@pytest.fixture(scope="module")
def c_library(tmp_path_factory: pytest.TempPathFactory) -> str:
    folder = tmp_path_factory.mktemp("operators")
    (folder / "f.c").write_text(C_FUNCTIONS)
    library = str(folder / "f.so")
    compiler = next(filter(None, map(shutil.which, ("cc", "gcc", "clang"))))
    subprocess.run([compiler, "-O2", "-shared", "-fPIC", str(folder / "f.c"), "-o", library], check=True)
    return library


def in_c(me: Rank, path: str) -> None:
    library = ctypes.CDLL(path)

    def address(name: str) -> int:
        found = ctypes.cast(getattr(library, name), ctypes.c_void_p).value
        assert found
        return found

    op = Op.c(address("product"), 32, "product of 2 x 2 integers", element=(2, 2), check=True)
    for count in (1, 7, 20_001):
        x, y = matrices(me.rank, count), matrices(me.rank, count)
        ringreduce.all_reduce(x, op=op)
        assert torch.equal(x, folded(range(me.size), count))
        ringreduce.scan(y, op)
        assert torch.equal(y, folded(range(me.rank + 1), count))
    with pytest.raises(InvalidArgument, match=r"elements of 16 bytes, of dtype int32; .* takes elements of 32 bytes"):
        ringreduce.all_reduce(x.int(), op=op)
    for count in (3, 5000):
        with pytest.raises(OperatorFailed, match="RuntimeError: the function returned 7"):
            ringreduce.all_reduce(torch.zeros(count), op=Op.c(address("refused"), 4, "refused"))
    lives_on(me)


def test_an_operator_in_c(c_library: str) -> None:
    run(placed, 3, {}, in_c, c_library)


def no_seven(a: int, b: int) -> int:
    if a == 7:
        raise ValueError
    return a + b


def larger(a: Any, b: Any, out: Any) -> None:
    best = b if b.value > a.value else a
    out.value, out.index = best.value, best.index


def by_numba(me: Rank) -> None:
    pair = np.dtype([("value", "<f8"), ("index", "<i4")])
    values = [np.random.default_rng(rank).normal(size=30_001) for rank in range(me.size)]
    x = np.empty(30_001, pair)
    x["value"], x["index"] = values[me.rank], me.rank
    ringreduce.all_reduce(x, op=Op.numba(larger, pair, commutative=True, check=True))
    assert (x["value"] == np.max(values, axis=0)).all() and (x["index"] == np.argmax(values, axis=0)).all()
    plus = Op.numba(no_seven, np.int64)
    total = torch.arange(20_000) * 10
    ringreduce.all_reduce(total, op=plus)
    assert torch.equal(total, torch.arange(20_000) * 10 * me.size)
    with pytest.raises(OperatorFailed, match="f raised an error"):
        ringreduce.all_reduce(torch.full((20_000,), 7 if me.rank == 0 else 0), op=plus)
    with pytest.raises(
        InvalidArgument, match=r"of dtype float64; operator 'no_seven:.*' takes elements of dtype int64"
    ):
        ringreduce.all_reduce(total.double(), op=plus)
    lives_on(me)


def test_operators_that_numba_compiles() -> None:
    pytest.importorskip("numba")
    run(placed, 3, {}, by_numba)


def layouts(me: Rank) -> None:
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


def test_layouts_dtypes_and_groups() -> None:
    run(placed, 3, {}, layouts)


def writes_to_its_operand(a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
    return torch.matmul(a, b, out=a.clone()) if len(a) % 2 else a.copy_(a @ b)


def in_place(me: Rank) -> None:
    op = Op.torch(writes_to_its_operand, element=(2, 2))
    for count in (3, 20_001):  # more than a tile
        x, y = matrices(me.rank, count), matrices(me.rank, count)
        ringreduce.all_reduce(x, op=op)
        assert torch.equal(x, folded(range(me.size), count))
        ringreduce.scan(y, op)
        assert torch.equal(y, folded(range(me.rank + 1), count))


def test_an_operator_may_write_to_its_first_operand() -> None:
    run(placed, 3, {}, in_place)


# faults


def lives_on(me: Rank) -> None:
    x = matrices(me.rank, 3)
    ringreduce.all_reduce(x, op=PRODUCT)
    assert torch.equal(x, folded(range(me.size), 3))
    dist.barrier()


def raises_on_one_rank(me: Rank, count: int) -> None:
    def fragile(a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
        if me.rank == 1:
            raise ValueError("no such element: 17")
        return a + b

    op, x = Op.torch(fragile, name="fragile"), torch.zeros(count)
    calls = {
        "all_reduce": lambda: ringreduce.all_reduce(x, op=op),
        "reduce to rank 2": lambda: ringreduce.reduce(x, 2, op),
        "scan": lambda: ringreduce.scan(x, op),
        "exscan": lambda: ringreduce.exscan(x, op),
        "reduce_scatter_single": lambda: ringreduce.reduce_scatter_single(x.clone(), x.repeat(me.size), op),
        "reduce_scatter": lambda: ringreduce.reduce_scatter(x.clone(), [x] * me.size, op),
    }
    for name, call in calls.items():
        message = f"{name} .*by operator 'fragile' .*failed on rank 1: ValueError: no such element: 17; the group can"
        with pytest.raises(OperatorFailed, match=message) as raised:
            call()
        assert raised.value.culprit == 1
        assert isinstance(raised.value.__cause__, ValueError) is (me.rank == 1)
        assert not x.any(), "the result of a failed call"
    lives_on(me)


@pytest.mark.parametrize("placement", ["one host", "gloo", "2 x 2"])
@pytest.mark.parametrize("count", [4, 100_000])
def test_an_error_on_one_rank_is_raised_on_all(placement: str, count: int) -> None:
    run(placed, 4, PLACEMENTS[placement], raises_on_one_rank, count)


class Mute(Exception):
    def __str__(self) -> str:
        raise RuntimeError("no words")


def odd_errors(me: Rank) -> None:
    """Errors that are hard to tell, and those that end a program."""
    for error, said in (
        (FileNotFoundError("no such file: \udcff"), r"FileNotFoundError: no such file: \\udcff"),
        (Mute(), "rank 1: Mute; "),
        (KeyboardInterrupt(), "rank 1: KeyboardInterrupt: "),
        (SystemExit(3), "rank 1: SystemExit: 3"),
    ):

        def fragile(a: torch.Tensor, b: torch.Tensor, error: BaseException = error) -> torch.Tensor:
            if me.rank == 1:
                raise error
            return a + b

        ends = me.rank == 1 and not isinstance(error, Exception)
        with pytest.raises(type(error) if ends else OperatorFailed, match=None if ends else said):
            ringreduce.all_reduce(torch.zeros(1000), op=Op.torch(fragile))
        lives_on(me)


def test_every_error_is_told() -> None:
    run(placed, 2, {}, odd_errors)


def wrong_results(me: Rank) -> None:
    x = torch.zeros(8)
    for f, message in (
        (lambda a, b: (a + b).double(), r"returned a Tensor, \(8,\) of torch.float64; .* \(8,\) of torch.float32"),
        (lambda a, b: (a + b).sum(), r"returned a Tensor, \(\) of torch.float32"),
        (lambda a, b: (a + b).numpy(), "returned a ndarray"),
        (lambda a, b: None, "returned a NoneType, None; it must return a Tensor"),
        (lambda a, b: (a, b), "returned a tuple"),
    ):
        with pytest.raises(OperatorFailed, match=message):
            ringreduce.all_reduce(x, op=Op.torch(f))
    with pytest.raises(OperatorFailed, match="returned a Tensor; it must return a tuple of 2"):
        ringreduce.all_reduce((x, x.clone()), op=Op.torch(lambda a, b: a[0], tensors=2))
    with pytest.raises(OperatorFailed, match="failed on rank 0: "):  # torch has no sum of 8-bit floats
        ringreduce.all_reduce(x.to(torch.float8_e5m2), op=Op.torch(torch.bitwise_and))
    lives_on(me)


def test_wrong_results_of_an_operator() -> None:
    run(placed, 2, {}, wrong_results)


def false_claims(me: Rank) -> None:
    x = torch.arange(12.0) + me.rank
    for f, commutative, message in (
        (lambda a, b: a, True, r"it is not so that f\(a, b\) is f\(b, a\), as commutative=True says"),
        (lambda a, b: (a + b) / 2, True, r"it is not so that f\(f\(a, b\), c\) is f\(a, f\(b, c\)\)"),
        (torch.sub, False, r"it is not so that f\(f\(a, b\), c\) is"),
        (lambda a, b: a + b - a.mean(), False, "it is not so that elements are combined each on its own"),
    ):
        op = Op.torch(f, commutative=commutative, check=True)
        with pytest.raises(OperatorFailed, match=message):
            ringreduce.all_reduce(x.clone(), op=op)
    matrix = matrices(me.rank, 40)
    with pytest.raises(OperatorFailed, match="as commutative=True says"):
        ringreduce.all_reduce(matrix, op=Op.torch(product, element=(2, 2), commutative=True, check=True))
    large = torch.tensor([1e8, 1.0, -1e8]).roll(me.rank)
    for op in (torch.add, torch.logaddexp, torch.maximum):  # rounding is no false claim
        ringreduce.all_reduce(large, op=Op.torch(op, commutative=True, check=True))
    bits = np.full(40, me.rank, "V3")
    ringreduce.all_reduce(bits, op=Op.torch(rightmost, check=True))
    with pytest.raises(OperatorFailed, match="as commutative=True says"):
        records = np.zeros(9, WELFORD)
        records["count"] = me.rank + 1
        ringreduce.all_reduce(records, op=Op.torch(lambda a, b: a.copy(), commutative=True, check=True))
    lives_on(me)


@pytest.mark.parametrize("size", [2, 3])
def test_check_finds_false_claims(size: int) -> None:
    run(placed, size, {}, false_claims)


def different_calls(me: Rank) -> None:
    x, last = torch.ones(10), me.rank == me.size - 1
    plus, times = Op.torch(torch.add), Op.torch(torch.mul)
    calls: list[tuple[Callable[[], object], str]] = [
        (lambda: ringreduce.all_reduce(x, op=times if last else plus), "rank 0 .*'add'.* rank 2 .*'mul'"),
        (lambda: ringreduce.scan(x, times if last else plus), "rank 0 .*'add'.* rank 2 .*'mul'"),
        (lambda: ringreduce.all_reduce(torch.ones(9 + last), op=plus), "'add' on 9 elements.* 'add' on 10 elements"),
        (lambda: ringreduce.all_reduce(x.double() if last else x, op=plus), "of float32, .* of float64"),
        (lambda: (ringreduce.scan if last else ringreduce.exscan)(x, plus), "called exscan by .* scan by"),
        (lambda: ringreduce.reduce(x, int(last), plus), "called reduce to rank 0 .* reduce to rank 1"),
        (
            lambda: ringreduce.all_reduce(torch.ones(4, 2), op=Op.torch(torch.add, element=(2,) if last else ())),
            r"on 8 elements of float32, .* on 4 elements of float32\[2\]",
        ),
        (
            lambda: ringreduce.reduce_scatter(
                x[:0], [x[:0]] * 3, Op.torch(torch.add, name="x" * 100 if last else None)
            ),
            "'add' on float32.* 'xxx",
        ),
    ]
    for call, message in calls:
        with pytest.raises(CollectiveMismatch, match=message) as raised:
            call()
        assert raised.value.culprit == 2 and "the group can be used again" in str(raised.value)
        assert x.eq(1).all()
    lives_on(me)


@pytest.mark.parametrize("placement", ["one host", "tcp"])
def test_different_calls_are_named_on_all_ranks(placement: str) -> None:
    run(placed, 3, PLACEMENTS[placement], different_calls)


def another_collective(me: Rank) -> None:
    with pytest.raises(CollectiveMismatch):
        ringreduce.all_reduce(torch.ones(3), op=Op.torch(torch.add) if me.rank else dist.ReduceOp.SUM)


def test_an_operator_against_a_sum() -> None:
    run(placed, 2, {}, another_collective)


def dies_inside(me: Rank) -> None:
    def slow(a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
        if me.rank == 1:
            me.report("inside")
            time.sleep(60)
        return a + b

    if me.rank != 1:
        me.report("before")
    with pytest.raises(PeerLost) as raised:
        ringreduce.all_reduce(torch.ones(1000), op=Op.torch(slow))
    assert raised.value.culprit == 1


@pytest.mark.parametrize("placement", ["one host", "tcp"])
def test_a_rank_killed_inside_an_operator_is_lost(placement: str) -> None:
    with Ranks(placed, 3, PLACEMENTS[placement], dies_inside) as ranks:
        ranks.reports()
        ranks.signal(1, signal.SIGKILL)
        ranks.results(but=(1,))


def wrong_arguments(me: Rank) -> None:
    x, plus, pair = torch.ones(4), Op.torch(torch.add), Op.torch(later, tensors=2)
    read_only = np.ones(3, WELFORD)
    read_only.flags.writeable = False
    calls: list[tuple[Callable[[], object], str]] = [
        (
            lambda: ringreduce.all_reduce(x, op=plus, async_op=True),
            r"async_op is True; .*leave it out for ringreduce.Op",
        ),
        (lambda: ringreduce.all_reduce((x, x), op=plus), "tensor is a tuple of 2; operator 'add' takes one array"),
        (lambda: ringreduce.all_reduce((x,), op=plus), "tensor is a tuple of 1; operator 'add' takes one array"),
        (lambda: ringreduce.all_reduce(x, op=pair), "tensor is a Tensor; .*takes a tuple of 2 arrays"),
        (lambda: ringreduce.all_reduce((x, x[:3]), op=pair), r"tensor\[1\] has 3 elements and tensor\[0\] has 4"),
        (lambda: ringreduce.all_reduce((x, 3), op=pair), r"tensor\[1\] is a int; .* a torch.Tensor or a NumPy array"),
        (
            lambda: ringreduce.all_reduce(x, op=PRODUCT),
            r"tensor has shape \(4,\); the operator's elements have \(2, 2\)",
        ),
        (
            lambda: ringreduce.all_reduce(x, op=plus, out=x.double()),
            "out has 4 elements of float64, .* must be alike",
        ),
        (lambda: ringreduce.all_reduce(x, op=plus, out=x[:2]), "out has 2 elements"),
        (
            lambda: ringreduce.all_reduce(x, op=plus, out=x.view(2, 2)),
            r"out has shape \(2, 2\), and tensor has \(4,\); they must be alike",
        ),
        (lambda: ringreduce.all_reduce(torch.ones(1).expand(4), op=plus), "elements of tensor share memory"),
        (lambda: ringreduce.all_reduce(x.to_sparse(), op=plus), "tensor is of layout torch.sparse_coo"),
        (
            lambda: ringreduce.scan(x.to("meta"), plus),
            r"tensor is on meta; operators combine on CPUs: pass tensor.cpu\(\)",
        ),
        (lambda: ringreduce.scan([], plus), "tensor is a list of 0"),
        (lambda: ringreduce.scan(read_only, plus), r"tensor, a NumPy array, is read-only; .*tensor.copy\(\)"),
        (lambda: ringreduce.scan(np.array([None]), plus), "tensor is a NumPy array of dtype object, whose elements"),
        (lambda: ringreduce.reduce_scatter(x, [x], plus), "input_list is a list of 1; .* each of the 2 ranks"),
        (lambda: ringreduce.reduce_scatter(x, [x[:3]] * 2, plus), r"output has 4 .* input_list\[\d\] has 3"),
        (lambda: ringreduce.reduce_scatter(x, [x, x.int()], plus), "they must be alike"),
        (lambda: ringreduce.reduce_scatter_single(x, x, plus), "input has 4 elements and output 4; .* 2 times as many"),
        (lambda: ringreduce.reduce_scatter_single(x, x.repeat(2).int(), plus), "they must be alike"),
        (lambda: ringreduce.reduce(x, 7, plus), "dst is 7"),
        (lambda: ringreduce.scan(x, plus, group=3), "group is 3"),  # type: ignore[arg-type]
        (
            lambda: ringreduce.all_reduce(x, op=torch.add),
            r"op is .*; it must be .*, or a ringreduce.Op, such as Op.torch",
        ),  # type: ignore[arg-type]
        # NumPy arrays that no built-in operation takes
        (
            lambda: ringreduce.all_reduce(np.zeros(3, WELFORD)),
            r"tensor is a NumPy array of dtype \[.*; .*Op.torch\(f\)",
        ),
        (
            lambda: ringreduce.all_reduce(np.array([None])),
            "tensor is a NumPy array of dtype object, .*all_gather_object",
        ),
        (lambda: ringreduce.all_reduce([[1.0], [2.0, 3.0]]), "tensor is a list; it must be a torch.Tensor"),  # type: ignore[arg-type]
        (
            lambda: ringreduce.all_reduce(np.arange(3.0)[::-1]),
            "tensor is a NumPy array that torch cannot use: .* a copy",
        ),
    ]
    for call, message in calls:
        with pytest.raises(InvalidArgument, match=message):
            call()
        assert x.eq(1).all()
    lives_on(me)


def test_wrong_arguments_are_named_and_the_group_lives_on() -> None:
    run(placed, 2, {}, wrong_arguments)
