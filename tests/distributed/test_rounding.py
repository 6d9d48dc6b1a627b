"""Reductions of 16-bit and 8-bit floats against float64: how often every plan rounds, and no average overflows."""

from __future__ import annotations

import os
from collections.abc import Iterator, Sequence
from typing import NamedTuple

import pytest
import torch
import torch.distributed as dist
from bodies.roundings import roundings
from distributed.harness import Rank, on_ranks, run

import ringreduce
from ringreduce.plan import BUILDERS, Plan, build
from ringreduce.plan.across_hosts import ACROSS
from ringreduce.plan.across_hosts import build as build_across

DTYPES = (torch.float16, torch.bfloat16, torch.float8_e4m3fn, torch.float8_e5m2)
COLLECTIVES = ("all_reduce", "reduce", "reduce_scatter")
PERIOD = 997
"""Values are repeated after so many, so that the right ones of long tensors are made at once."""
LONG = 100_000


class Case(NamedTuple):
    """An operation, and what each rank gives: rows of a period."""

    name: str
    op: dist.ReduceOp.RedOpType
    rows: torch.Tensor

    def right(self) -> tuple[torch.Tensor, torch.Tensor]:
        """The exact results, and the magnitudes that roundings are relative to."""
        rows = self.rows.double()
        if self.op == dist.ReduceOp.PRODUCT:
            return rows.prod(0), rows.prod(0).abs()
        parts = len(rows) if self.op == dist.ReduceOp.AVG else 1
        return rows.sum(0) / parts, rows.abs().sum(0) / parts


def cases(size: int, dtype: torch.dtype) -> Iterator[Case]:
    """No sum of them is too large but in averages, of which all are as large as can be."""
    random = torch.Generator().manual_seed(size)
    info = torch.finfo(dtype)
    normal = torch.randn(size, PERIOD, generator=random, dtype=torch.float64)
    tiny = torch.randint(-20, 21, (size, PERIOD), generator=random) * (info.smallest_normal * info.eps)
    signs = torch.randint(0, 2, (PERIOD,), generator=random) * 2 - 1
    large = (0.5 + 0.5 * torch.rand(size, PERIOD, generator=random, dtype=torch.float64)) * signs * info.max
    for op in (dist.ReduceOp.SUM, dist.ReduceOp.AVG):
        yield Case(f"{op.name} of normal numbers", op, normal.to(dtype))
        yield Case(f"{op.name} of the least numbers", op, tiny.to(dtype))
    yield Case("AVG of large numbers", dist.ReduceOp.AVG, large.to(dtype))
    yield Case("AVG of the largest", dist.ReduceOp.AVG, (signs * info.max).expand(size, -1).to(dtype))
    near_one = torch.exp2(torch.rand(size, PERIOD, generator=random, dtype=torch.float64) - 0.5)
    yield Case("PRODUCT", dist.ReduceOp.PRODUCT, near_one.to(dtype))


def reduced(me: Rank, collective: str, case: Case, count: int) -> torch.Tensor | None:
    """What this rank gets, which begins with the first value of the period."""
    row = case.rows[me.rank]
    given = row.repeat(-(-count // PERIOD))[:count]
    if collective == "all_reduce":
        dist.all_reduce(given, case.op)
    elif collective == "reduce":
        dist.reduce(given, 0, case.op)
        return given if me.rank == 0 else None
    else:
        result = torch.empty_like(given)
        ringreduce.reduce_scatter_single(result, given.repeat(me.size), case.op)
        return result
    return given


def check(me: Rank, collective: str, count: int, most: int) -> None:
    """`most`: so many roundings, one after the other. Of long tensors only sums and averages of large numbers."""
    for dtype in DTYPES:
        half_unit, least = torch.finfo(dtype).eps / 2, torch.finfo(dtype).smallest_normal * torch.finfo(dtype).eps
        for case in cases(me.size, dtype):
            if count > LONG and case.name not in ("SUM of normal numbers", "AVG of large numbers"):
                continue
            result = reduced(me, collective, case, count)
            if result is None:
                continue
            right, magnitude = (each.repeat(-(-count // PERIOD))[:count] for each in case.right())
            # Each input of a product is rounded so often at most, but any of its partial products once, too.
            times = me.size - 1 if case.op == dist.ReduceOp.PRODUCT else most
            in_float32 = me.size * 2.0**-23
            bound = ((1 + half_unit) ** times - 1 + in_float32) * magnitude + times * least / 2
            error = (result.double() - right).abs()
            what = f"{collective} of {count} {dtype}, {case.name}: off by {error.max()} ({times} roundings)"
            assert (error <= bound).all(), what  # also of what is not finite
            if case.name == "AVG of the largest":
                assert torch.equal(result.double(), right), what


def by_plans(me: Rank, texts: Sequence[str], hosts: Sequence[int], counts: Sequence[int]) -> None:
    os.environ["RINGREDUCE_HOST_ID"] = f"host {hosts[me.rank]}"
    with me.join(options=ringreduce.Options(engine="channels=8,channel_bytes=64K")):
        for plan in map(Plan.from_json, texts):
            ringreduce.register_plan(plan)
            for count in counts:
                check(me, plan.collective, count, roundings(plan))


def by_default(me: Rank, collective: str, hosts: Sequence[int], counts: Sequence[int]) -> None:
    os.environ["RINGREDUCE_HOST_ID"] = f"host {hosts[me.rank]}"
    others = hosts[-1]
    most = 1
    if others > 0:  # several hosts
        most = (others if collective == "reduce" else 1) + (len(hosts) > others + 1)
    with me.join():
        for count in counts:
            check(me, collective, count // me.size + 1 if collective == "reduce_scatter" else count, most)


def on_hosts(number: int, ranks: int) -> list[list[int]]:
    return [list(range(host * ranks, host * ranks + ranks)) for host in range(number)]


def host_of_each(hosts: Sequence[Sequence[int]]) -> list[int]:
    return [number for number, host in enumerate(hosts) for _ in host]


def test_by_every_plan_on_one_host() -> None:
    plans = [build(collective, name, 3) for collective in COLLECTIVES for name in BUILDERS[collective]]
    run(by_plans, 3, [plan.to_json() for plan in plans], [0, 0, 0], (1, 1003))


def test_by_every_plan_between_two_hosts() -> None:
    hosts = on_hosts(2, 2)
    plans = [build_across(collective, name, hosts) for collective in COLLECTIVES for name in ACROSS[collective]]
    run(by_plans, 4, [plan.to_json() for plan in plans], host_of_each(hosts), (1, 1003))


SHAPES = [
    pytest.param(on_hosts(number, ranks), id=f"{number}x{ranks}") for number in (1, 2, 3, 4) for ranks in (1, 2, 3)
]


@pytest.mark.slow
@pytest.mark.parametrize("hosts", SHAPES[1:])
@pytest.mark.parametrize("collective", COLLECTIVES)
def test_by_the_plans_that_are_chosen(collective: str, hosts: list[list[int]]) -> None:
    ranks = sum(map(len, hosts))
    counts = (1, 1000, 50_000, 200_001, 3_000_000 if ranks <= 4 else 1_000_000)
    run(by_default, ranks, collective, host_of_each(hosts), counts)


@pytest.mark.slow
@pytest.mark.parametrize("hosts", SHAPES[3:])
def test_by_every_plan_between_hosts(hosts: list[list[int]]) -> None:
    plans = [build_across(collective, name, hosts) for collective in COLLECTIVES for name in ACROSS[collective]]
    run(by_plans, sum(map(len, hosts)), [plan.to_json() for plan in plans], host_of_each(hosts), (1003, 20_011))


def signs_of_zeros(me: Rank) -> None:
    with me.join():
        for op in (dist.ReduceOp.MIN, dist.ReduceOp.MAX):
            for dtype in (*DTYPES, torch.float32, torch.float64):
                for count in (1, 100_003):
                    for negative in range(me.size):  # the highest rank decides
                        zeros = torch.zeros(count).copysign(torch.tensor(-1.0 if me.rank == negative else 1.0))
                        zeros = zeros.to(dtype)
                        dist.all_reduce(zeros, op)
                        assert (torch.signbit(zeros.float()) == (negative == me.size - 1)).all()


def too_large(me: Rank) -> None:
    with me.join():
        for dtype in DTYPES:
            for sign in (1, -1):
                most = torch.full((3,), sign * torch.finfo(dtype).max).to(dtype)
                dist.all_reduce(most)
                expected = sign * (448 if dtype == torch.float8_e4m3fn else torch.inf)
                assert (most.float() == expected).all()
        for dtype in (torch.float32, torch.float64, torch.complex64, torch.complex128):  # the sum comes first
            most = torch.full((3,), torch.finfo(dtype).max, dtype=dtype)
            dist.all_reduce(most, dist.ReduceOp.AVG)
            assert torch.isinf(most.real if dtype.is_complex else most).all()


@on_ranks(3)
def test_signs_of_zeros_and_sums_that_are_too_large(me: Rank) -> None:
    signs_of_zeros(me)
    too_large(me)
