"""Operators that fail, differ between ranks or are given what they do not take: every rank hears, the group lives."""

from __future__ import annotations

import gc
import signal
import time
import traceback
import weakref
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor

import numpy as np
import pytest
import torch
import torch.distributed as dist
from bodies.operators import PLACEMENTS, PRODUCT, WELFORD, Merge, later, lives_on, matrices, placed, product, rightmost
from distributed.harness import Rank, Ranks, on_ranks, run

import ringreduce
from ringreduce import Op
from ringreduce.errors import CollectiveMismatch, InvalidArgument, OperatorFailed, PeerLost


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
@pytest.mark.parametrize("count", [4, 2000, 100_000])
def test_an_error_on_one_rank_is_raised_on_all(placement: str, count: int) -> None:
    run(placed, 4, PLACEMENTS[placement], raises_on_one_rank, count)


class Mute(Exception):
    def __str__(self) -> str:
        raise RuntimeError("no words")


@on_ranks(2, through=(placed, {}))
def test_every_error_is_told(me: Rank) -> None:
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


@pytest.mark.parametrize("count", [1000, 100_000, 1_000_000])
@on_ranks(2, through=(placed, {}))
def test_a_signal_in_the_function_is_an_error_of_it(me: Rank, count: int) -> None:
    def signalled(a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
        if me.rank == 1:
            signal.raise_signal(signal.SIGINT)
        return torch.fmax(a, b)

    expected = KeyboardInterrupt if me.rank == 1 else OperatorFailed
    with pytest.raises(expected, match=None if me.rank == 1 else "rank 1: KeyboardInterrupt"):
        ringreduce.all_reduce(torch.zeros(count), op=Op.torch(signalled))
    lives_on(me)


@on_ranks(2, through=(placed, {}))
def test_an_operator_of_two_threads_fails_where_its_function_fails(me: Rank) -> None:
    merge, groups = Merge(wrong=-1.0), [dist.new_group(backend="ringreduce") for _ in range(2)]

    def calls(group: dist.ProcessGroup, value: float) -> list[float]:
        found = []
        for _ in range(100):
            x = torch.full((2000,), value)
            try:
                ringreduce.all_reduce(x, op=merge.op, group=group)
            except OperatorFailed as error:
                assert "ValueError: wrong" in str(error)
            else:
                found.append(x[0].item())
        return found

    with ThreadPoolExecutor(2) as threads:
        failing, good = threads.map(calls, groups, (-1.0, 3.0))
    assert not failing and good == [3.0 * me.size] * 100


@on_ranks(2, through=(placed, {}))
def test_a_failed_call_keeps_no_tensor(me: Rank) -> None:
    alive = []
    for _ in range(3):
        x = torch.full((5000,), 1.0)
        alive.append(weakref.ref(x))
        with pytest.raises(OperatorFailed):
            ringreduce.all_reduce(x, op=Merge(wrong=1.0).op)
    del x
    gc.collect()
    assert not any(each() is not None for each in alive)


@on_ranks(2, through=(placed, {}))
def test_the_traceback_of_an_error_is_that_of_the_function(me: Rank) -> None:
    for count in (2000, 100_000):
        with pytest.raises(OperatorFailed) as raised:
            ringreduce.all_reduce(torch.full((count,), 1.0), op=Merge(wrong=1.0).op)
        frames = traceback.extract_tb(raised.value.__cause__.__traceback__)  # type: ignore[union-attr]
        assert [frame.name for frame in frames] == ["merge"]


@on_ranks(2, through=(placed, {}))
def test_a_function_that_makes_calls_of_a_group_is_an_error(me: Rank) -> None:
    x = torch.ones(2000)
    for call in (
        lambda: ringreduce.all_reduce(torch.ones(1)),
        lambda: dist.all_reduce(torch.ones(1)),
        lambda: dist.broadcast(torch.ones(1), 0, async_op=True),
        lambda: ringreduce.all_reduce(torch.ones(1), op=Op.torch(torch.add)),
        dist.barrier,
        dist.destroy_process_group,
    ):

        def calls(a: torch.Tensor, b: torch.Tensor, call: Callable[[], object] = call) -> torch.Tensor:
            call()
            return a + b

        for op in (Op.torch(calls), Op.torch(calls, check=True)):  # in the engine, and outside
            with pytest.raises(OperatorFailed, match=r"InvalidArgument: .*may not make calls of a group or destroy"):
                ringreduce.all_reduce(x, op=op)
    lives_on(me)


@on_ranks(2, through=(placed, {}))
def test_wrong_results_of_an_operator(me: Rank) -> None:
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


@on_ranks(2, 3, through=(placed, {}))
def test_check_finds_false_claims(me: Rank) -> None:
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


def different_calls(me: Rank) -> None:
    x, last = torch.ones(10), me.rank == me.size - 1
    larger, smaller = Op.torch(torch.fmax), Op.torch(torch.fmin)
    calls: list[tuple[Callable[[], object], str]] = [
        (lambda: ringreduce.all_reduce(x, op=smaller if last else larger), "rank 0 .*'fmax'.* rank 2 .*'fmin'"),
        (lambda: ringreduce.scan(x, smaller if last else larger), "rank 0 .*'fmax'.* rank 2 .*'fmin'"),
        (
            lambda: ringreduce.all_reduce(torch.ones(9 + last), op=larger),
            "'fmax' on 9 elements.* 'fmax' on 10 elements",
        ),
        (lambda: ringreduce.all_reduce(x.double() if last else x, op=larger), "of float32, .* of float64"),
        (lambda: (ringreduce.scan if last else ringreduce.exscan)(x, larger), "called exscan by .* scan by"),
        (lambda: ringreduce.reduce(x, int(last), larger), "called reduce to rank 0 .* reduce to rank 1"),
        (
            lambda: ringreduce.all_reduce(torch.ones(4, 2), op=Op.torch(torch.fmax, element=(2,) if last else ())),
            r"on 8 elements of float32, .* on 4 elements of float32\[2\]",
        ),
        (
            lambda: ringreduce.reduce_scatter(
                x[:0], [x[:0]] * 3, Op.torch(torch.fmax, name="x" * 100 if last else None)
            ),
            "'fmax' on float32.* 'xxx",
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


@on_ranks(2, through=(placed, {}))
def test_an_operator_against_a_sum(me: Rank) -> None:
    with pytest.raises(CollectiveMismatch):
        ringreduce.all_reduce(torch.ones(3), op=Op.torch(torch.add) if me.rank else dist.ReduceOp.SUM)


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


@on_ranks(2, through=(placed, {}))
def test_wrong_arguments_are_named_and_the_group_lives_on(me: Rank) -> None:
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
        (lambda: ringreduce.all_reduce(x.to_sparse(), op=plus), r"a tensor has layout Sparse; .* its to_dense\(\)"),
        (lambda: ringreduce.scan(x.to("meta"), plus), "a tensor is on meta; .* on CPUs"),
        (lambda: ringreduce.scan([], plus), "tensor is a list of 0"),
        (lambda: ringreduce.scan(read_only, plus), r"tensor, a NumPy array, is read-only; .*array.copy\(\)"),
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
            "tensor is a NumPy array of dtype object; .*all_gather_object",
        ),
        (lambda: ringreduce.all_reduce([[1.0], [2.0, 3.0]]), "tensor is a list; it must be a torch.Tensor"),  # type: ignore[arg-type]
        (lambda: ringreduce.all_reduce(np.arange(3.0)[::-1]), r"a NumPy array with strides \(-8,\), .* a copy"),
    ]
    for call, message in calls:
        with pytest.raises(InvalidArgument, match=message):
            call()
        assert x.eq(1).all()
    lives_on(me)
