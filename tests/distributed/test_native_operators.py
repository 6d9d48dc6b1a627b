"""Operators in machine code, which the engine calls itself: every size of element, in rank order, and their faults."""

from __future__ import annotations

import ctypes
import functools
import shutil
import signal
import subprocess
import threading
import time
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed as dist
from bodies.collectives import SMALL_SLOTS
from bodies.operators import (
    ELEMENT_BYTES,
    PLACEMENTS,
    folded,
    lives_on,
    logged_by_operators,
    matrices,
    placed,
    rightmost,
)
from distributed.harness import Rank, Ranks, on_ranks, run

import ringreduce
from ringreduce import Op
from ringreduce.errors import CollectiveMismatch, InvalidArgument, OperatorFailed, PeerLost

C_FUNCTIONS = """
#include <stddef.h>
#include <string.h>
#include <unistd.h>

volatile int broken = 0, inside = 0;  /* of this process */

int product(const long long* a, const long long* b, long long* out, size_t n) {
  for (; n > 0; --n, a += 4, b += 4, out += 4) {
    const long long c[4] = {a[0] * b[0] + a[1] * b[2], a[0] * b[1] + a[1] * b[3],
                            a[2] * b[0] + a[3] * b[2], a[2] * b[1] + a[3] * b[3]};
    memcpy(out, c, sizeof c);
  }
  return 0;
}

/* b, except where its first byte is 0 */
#define RIGHTMOST(SIZE)                                                                    \\
  int rightmost_##SIZE(const char* a, const char* b, char* out, size_t n) {                \\
    for (; n > 0; --n, a += SIZE, b += SIZE, out += SIZE) memmove(out, *b ? b : a, SIZE);  \\
    return 0;                                                                              \\
  }
RIGHTMOST(1) RIGHTMOST(3) RIGHTMOST(12) RIGHTMOST(24) RIGHTMOST(48) RIGHTMOST(4100) RIGHTMOST(524288)

/* fails also where its memory is not what is promised */
int sum(const int* a, const int* b, int* out, size_t n) {
  if (broken || (out < a + n && a < out + n && out != a) || (out < b + n && b < out + n && out != b)) return 1;
  for (size_t i = 0; i < n; ++i) out[i] = a[i] + b[i];
  return 0;
}

int refuses_seven(const int* a, const int* b, int* out, size_t n) {
  for (size_t i = 0; i < n; ++i) {
    if (a[i] == 7 || b[i] == 7) return 7;
    out[i] = a[i] + b[i];
  }
  return 0;
}

int sleeps(const int* a, const int* b, int* out, size_t n) {
  inside = 1;
  if (broken) sleep(60);
  return sum(a, b, out, n);
}
"""


@pytest.fixture(scope="module")
def c_library(tmp_path_factory: pytest.TempPathFactory) -> str:
    folder = tmp_path_factory.mktemp("operators")
    (folder / "f.c").write_text(C_FUNCTIONS)
    library = str(folder / "f.so")
    compiler = next(filter(None, map(shutil.which, ("cc", "gcc", "clang"))))
    subprocess.run([compiler, "-O2", "-shared", "-fPIC", str(folder / "f.c"), "-o", library], check=True)
    return library


def address(path: str, name: str) -> int:
    found = ctypes.cast(getattr(ctypes.CDLL(path), name), ctypes.c_void_p).value
    assert found
    return found


def flag(path: str, name: str) -> ctypes.c_int:
    return ctypes.c_int.in_dll(ctypes.CDLL(path), name)


def product_of(path: str, check: bool = False) -> Op:
    return Op.c(address(path, "product"), 32, "product of 2 x 2 integers", element=(2, 2), check=check)


def sum_of(path: str, function: str = "sum") -> Op:
    return Op.c(address(path, function), 4, function)


# results

COUNTS = (0, 1, 7, 600, 20_001)


def products(me: Rank, path: str) -> None:
    op = product_of(path)
    for count in COUNTS:
        x, y = matrices(me.rank, count), matrices(me.rank, count)
        wanted = folded(range(me.size), count)
        ringreduce.all_reduce(x, op=op)
        assert torch.equal(x, wanted)
        into = torch.empty_like(y)
        ringreduce.all_reduce(y, op=op, out=into)
        assert torch.equal(into, wanted) and torch.equal(y, matrices(me.rank, count))
        sideways = torch.zeros(2 * count, 2, 2, dtype=torch.int64)
        sideways[::2] = y
        ringreduce.all_reduce(sideways[::2], op=op)
        assert torch.equal(sideways[::2], wanted) and not sideways[1::2].any()
        shared = ringreduce.empty((count, 2, 2), dtype=torch.int64)  # which peers read, and write, in place
        shared.copy_(y)
        ringreduce.all_reduce(shared, op=op)
        assert torch.equal(shared, wanted)


def in_the_engine(me: Rank, path: str) -> None:
    logged = logged_by_operators()
    products(me, path)
    assert not logged.messages


@pytest.mark.parametrize("size", [1, 2, 3, 4, 8])
def test_operands_are_combined_in_rank_order(c_library: str, size: int) -> None:
    run(placed, size, {}, in_the_engine, c_library)


@pytest.mark.parametrize("algorithms", ["all_reduce:ring", "all_reduce:one_shot", "all_reduce:two_shot:0-:64"])
def test_rules_for_plans_that_are_not_in_rank_order_do_not_count(c_library: str, algorithms: str) -> None:
    run(placed, 4, {"RINGREDUCE_ALGORITHMS": algorithms}, in_the_engine, c_library)


@pytest.mark.parametrize(
    ("placement", "reason"),
    [
        ("gloo", "its calls go through another backend"),
        ("tcp", "its ranks share no memory"),
        ("2 x 2", "its ranks share no memory"),
    ],
)
def test_elsewhere_python_combines_and_the_log_says_why(c_library: str, placement: str, reason: str) -> None:
    run(placed, 4, PLACEMENTS[placement], elsewhere, c_library, reason)


def elsewhere(me: Rank, path: str, reason: str) -> None:
    logged = logged_by_operators()
    products(me, path)
    assert len(logged.messages) == 4 * len(COUNTS)
    assert all(f"does not run in the engine: {reason}" in text for text in logged.messages)


@on_ranks(3, through=(placed, {}))
def test_checks_and_scans_stay_in_python(me: Rank, c_library: str) -> None:
    logged, op = logged_by_operators(), product_of(c_library, check=True)
    x, y = matrices(me.rank, 20_001), matrices(me.rank, 20_001)
    ringreduce.all_reduce(x, op=op)
    assert torch.equal(x, folded(range(me.size), 20_001)) and logged.messages[0].endswith("engine: check=True")
    ringreduce.scan(y, op)
    assert torch.equal(y, folded(range(me.rank + 1), 20_001))
    with pytest.raises(InvalidArgument, match=r"elements of 16 bytes, of dtype int32; .* takes elements of 32 bytes"):
        ringreduce.all_reduce(x.int(), op=product_of(c_library))


@pytest.mark.parametrize(
    "options",
    [None, SMALL_SLOTS, ringreduce.Options(engine="stream_bytes=65536")],
    ids=["slots", "small slots", "streamed"],
)
@on_ranks(3, through=(placed, {}))
def test_elements_of_every_size(me: Rank, c_library: str, options: ringreduce.Options | None) -> None:
    group = dist.new_group(backend="ringreduce", pg_options=options) if options else None
    for size in ELEMENT_BYTES:
        op = Op.c(address(c_library, f"rightmost_{size}"), size, "rightmost")
        for count in (1, 5, 301, 70_001):
            if count * size > 8 << 20:
                continue
            inputs = []
            for rank in range(me.size):
                raw = np.random.default_rng(rank).integers(0, 3, (count, size), dtype=np.uint8)
                inputs.append(raw.view(f"V{size}").reshape(count))
            x = inputs[me.rank].copy()
            ringreduce.all_reduce(x, op=op, group=group)
            assert x.tobytes() == functools.reduce(rightmost, inputs).tobytes(), f"{count} of {size} bytes"


def sums(me: Rank, path: str) -> None:
    op = sum_of(path)
    for count in (3, 5000, 70_001, 1_000_001):
        x = torch.arange(count, dtype=torch.int32) * (me.rank + 1)
        ringreduce.all_reduce(x, op=op)  # it fails where memory overlaps
        assert torch.equal(x, torch.arange(count, dtype=torch.int32) * sum(range(1, me.size + 1)))


@pytest.mark.parametrize(
    "environment",
    [{}, {"RINGREDUCE_FETCH": "0"}, {"RINGREDUCE_ENGINE": "stream_bytes=65536"}],
    ids=["fetched", "copied", "streamed"],
)
@pytest.mark.parametrize("size", [2, 3])
def test_the_result_is_an_operand_or_apart_from_both(c_library: str, size: int, environment: dict[str, str]) -> None:
    run(placed, size, environment, sums, c_library)


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
    for check in (False, True):
        x = np.empty(30_001, pair)
        x["value"], x["index"] = values[me.rank], me.rank
        ringreduce.all_reduce(x, op=Op.numba(larger, pair, commutative=True, check=check))
        assert (x["value"] == np.max(values, axis=0)).all() and (x["index"] == np.argmax(values, axis=0)).all()
    plus = Op.numba(no_seven, np.int64)
    total = torch.arange(20_000) * 10
    ringreduce.all_reduce(total, op=plus)
    assert torch.equal(total, torch.arange(20_000) * 10 * me.size)
    with pytest.raises(OperatorFailed, match="f raised an error") as raised:
        ringreduce.all_reduce(torch.full((20_000,), 7 if me.rank == 0 else 0), op=plus)
    assert raised.value.culprit in range(me.size)
    with pytest.raises(
        InvalidArgument, match=r"of dtype float64; operator 'no_seven:.*' takes elements of dtype int64"
    ):
        ringreduce.all_reduce(total.double(), op=plus)
    lives_on(me)


def test_operators_that_numba_compiles() -> None:
    pytest.importorskip("numba")
    run(placed, 3, {}, by_numba)


# faults


@on_ranks(4, through=(placed, {}))
def test_an_operator_that_fails_on_one_rank_is_named_on_all(me: Rank, c_library: str) -> None:
    op, broken = sum_of(c_library), flag(c_library, "broken")
    other = dist.new_group([0, 2, 3], backend="ringreduce")
    for group, culprit, name in ((None, 1, "rank 1: "), (other, 1, r"rank 2 \(rank 1 of the group\): ")):
        if group is other and me.rank == 1:  # it is not in it
            continue
        size, rank = dist.get_world_size(group), dist.get_rank(group)
        for count in (100_000, 1_000_000):
            broken.value = int(rank == culprit)
            x = torch.ones(count, dtype=torch.int32)
            message = rf"all_reduce seq \d+ by operator 'sum' on int32: it failed on {name}the function returned"
            with pytest.raises(OperatorFailed, match=message) as raised:
                ringreduce.all_reduce(x, op=op, group=group)
            assert raised.value.culprit == culprit and "the group can be used again" in str(raised.value)
            broken.value = 0
            for _ in range(20):  # no slot says any more that something failed
                x = torch.ones(count, dtype=torch.int32)
                ringreduce.all_reduce(x, op=op, group=group)
                assert x.eq(size).all()
                ringreduce.all_reduce(x, group=group)
                assert x.eq(size * size).all()
    lives_on(me)


@on_ranks(2, 3, through=(placed, {}))
def test_an_operator_that_fails_on_a_value_fails_on_every_rank(me: Rank, c_library: str) -> None:
    op = sum_of(c_library, "refuses_seven")
    for count in (1, 5000, 300_000):
        x = torch.zeros(count, dtype=torch.int32)
        x[count // 2] = 7 if me.rank == 1 else 0
        with pytest.raises(OperatorFailed) as raised:
            ringreduce.all_reduce(x, op=op)
        assert raised.value.culprit in range(me.size)
        x = torch.ones(count, dtype=torch.int32)
        ringreduce.all_reduce(x, op=op)
        assert x.eq(me.size).all()
    lives_on(me)


@on_ranks(3, through=(placed, {}))
def test_in_a_small_call_only_the_failing_rank_raises(me: Rank, c_library: str) -> None:
    """Each rank combines all of a small call, so that nobody gets what another's operator has failed on."""
    op, broken = sum_of(c_library), flag(c_library, "broken")
    broken.value = int(me.rank == 1)
    x = torch.ones(5, dtype=torch.int32)
    if me.rank == 1:
        with pytest.raises(OperatorFailed, match="failed on rank 1"):
            ringreduce.all_reduce(x, op=op)
    else:
        ringreduce.all_reduce(x, op=op)
        assert x.eq(me.size).all()
    lives_on(me)


@pytest.mark.parametrize("case", ["operators", "dtypes", "counts", "sum"])
@on_ranks(3, through=(placed, {}))
def test_calls_that_differ_are_both_named(me: Rank, c_library: str, case: str) -> None:
    last, x = me.rank == me.size - 1, torch.ones(1000, dtype=torch.int32)
    plus, other = sum_of(c_library), sum_of(c_library, "refuses_seven")
    calls: dict[str, tuple[Callable[[], object], str, str]] = {
        "operators": (
            lambda: ringreduce.all_reduce(x, op=other if last else plus),
            "op='sum' on int32",
            "op='refuses_seven' on int32",
        ),
        "dtypes": (
            lambda: ringreduce.all_reduce(x.float() if last else x, op=plus),
            "op='sum' on int32",
            "op='sum' on float32",
        ),
        "counts": (lambda: ringreduce.all_reduce(x[: 999 + last], op=plus), "bytes=3996", "bytes=4000"),
        "sum": (
            lambda: ringreduce.all_reduce(x, op=dist.ReduceOp.SUM if last else plus),
            "op='sum' on int32",
            "dtype=int32, op=sum",
        ),
    }
    call, ours, theirs = calls[case]
    ringreduce.all_reduce(torch.ones(1000, dtype=torch.int32), op=plus)
    with pytest.raises(CollectiveMismatch) as raised:
        call()
    assert ours in str(raised.value) and theirs in str(raised.value)


def dies_inside(me: Rank, path: str, count: int) -> None:
    op, broken, inside = sum_of(path, "sleeps"), flag(path, "broken"), flag(path, "inside")
    broken.value = int(me.rank == 1)

    def look() -> None:
        while not inside.value:
            time.sleep(0.01)
        me.report("inside")

    watch = threading.Thread(target=look, daemon=True)
    if me.rank == 1:
        watch.start()
    else:
        me.report("before")
    with pytest.raises(PeerLost) as raised:
        ringreduce.all_reduce(torch.ones(count, dtype=torch.int32), op=op)
        ringreduce.all_reduce(torch.ones(count, dtype=torch.int32), op=op)
    assert raised.value.culprit == 1


@pytest.mark.parametrize("count", [5, 300_000])
def test_a_rank_killed_inside_an_operator_is_lost(c_library: str, count: int) -> None:
    with Ranks(placed, 3, {}, dies_inside, c_library, count) as ranks:
        ranks.reports()
        ranks.signal(1, signal.SIGKILL)
        ranks.results(but=(1,))
