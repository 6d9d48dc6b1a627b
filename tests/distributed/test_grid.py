"""Every dtype x operation x collective x layout: the right result, or an `InvalidArgument` that says what to do.

Never something wrong without a word, and never a group that does not work afterwards. A launch of processes runs
thousands of combinations and reports all that fail. Inputs differ by rank, by block, by element and by call, and every
(partial) result is exact in every dtype.
"""

from __future__ import annotations

import collections
import itertools
from collections.abc import Callable
from importlib import import_module
from typing import Any

import pytest
import torch
import torch.distributed as dist
from bodies.collectives import SMALL_SLOTS
from bodies.grid import (
    IN_PLACE,
    LAYOUTS,
    MOVED_DTYPES,
    MOVING,
    MOVING_COALESCED,
    REDUCING,
    REDUCING_COALESCED,
    REFUSED,
    SAME,
    Case,
    Combination,
    Report,
    all_reduce,
    all_reduce_coalesced,
    attempt,
    combinations,
    same,
)
from distributed.harness import Rank, on_ranks, run, run_cases

import ringreduce
from ringreduce.errors import InvalidArgument

# the grid

MIXED = [(g, t) for g, t in itertools.permutations(LAYOUTS, 2) if not {g, t} & {"no dimension", "empty"}]
# torch.distributed loses what any backend writes to a conjugate or negative view (its dispatcher hands on a copy), and
# refuses most of the former.
THROUGH_TORCH = [(g, t) for g, t in SAME if t not in ("conjugate", "negative")] + [("negative", "contiguous")]


def through_torch() -> list[Combination]:
    def possible(c: Combination) -> bool:
        if c.given == "negative" and c.collective in IN_PLACE:
            return False
        # torch.distributed itself refuses the others, and never again leaves a coalescing in which it has.
        all_reduces = c.collective in (all_reduce, all_reduce_coalesced)
        return not (all_reduces and c.dtype.is_complex) or c.op in ("sum", "avg", "premul_sum")

    every = combinations(REDUCING + REDUCING_COALESCED, MOVING + MOVING_COALESCED, THROUGH_TORCH)
    return [c for c in every if possible(c)]


def attempt_by_gloo(report: Report, combination: Combination, case: Case) -> None:
    """Reports where Gloo has another result than the one that ours was compared with."""
    try:
        results = combination.collective(case)
    except (RuntimeError, ValueError, TypeError):
        report.outcomes["not by Gloo"] += 1
        return
    report.outcomes["by Gloo"] += 1
    if not all(same(tensor, expected) for tensor, expected in results or ()):
        report.fail(combination, "Gloo has something else")


def grid(me: Rank, api: str, cases: list[Combination]) -> tuple[str, collections.Counter[str]]:
    report = Report()
    with me.join():
        gloo = dist.new_group(backend="gloo")
        for call, combination in enumerate(cases):
            attempt(report, combination, Case(me, import_module(api), dist.group.WORLD, combination, call))
            # Gloo refuses most of the other layouts, is wrong in some, and crashes in reduce_scatter with no dimension.
            by_gloo = api == "torch.distributed" and combination.given in ("contiguous", "offset")
            if by_gloo and not combination.refusal():
                attempt_by_gloo(report, combination, Case(me, dist, gloo, combination, call))
    return report.text(), report.outcomes


def check(ranks: int, api: str, cases: list[Combination]) -> collections.Counter[str]:
    """Rank 0's outcomes, if no rank has anything to report."""
    (_, outcomes), *_ = results = run(grid, ranks, api, cases)
    texts = {text for text, _ in results if text}
    assert not texts, "\n".join(texts)
    return outcomes


@pytest.mark.slow
@pytest.mark.parametrize("ranks", (2, 3))
def test_every_dtype_operation_and_layout(ranks: int) -> None:
    outcomes = check(ranks, "ringreduce", combinations(REDUCING, MOVING, SAME))
    assert outcomes["right"] > 4000 and outcomes["refused"] > 2000


def test_inputs_and_outputs_of_different_layouts() -> None:
    outcomes = check(2, "ringreduce", combinations(REDUCING, MOVING, MIXED, (torch.float32, torch.complex64)))
    assert outcomes["right"] > 2000


@pytest.mark.slow
def test_the_same_through_torch_and_by_gloo() -> None:
    outcomes = check(2, "torch.distributed", through_torch())
    assert outcomes["right"] > 5000 and outcomes["refused"] > 3000 and outcomes["by Gloo"] > 900


def test_tensors_that_are_not_served_are_refused() -> None:
    cases = [Combination(f, torch.float32, refused=name) for f in REDUCING for name in REFUSED]
    cases += [
        Combination(f, torch.float32, refused=name) for f in MOVING for name in REFUSED if name not in MOVED_DTYPES
    ]
    served = Combination(all_reduce, torch.float32, refused="sparse")
    assert check(3, "ringreduce", [case for case in cases if case != served])["refused"] > 150


def test_dtypes_that_are_not_reduced_are_refused_through_torch() -> None:
    # Of the others, torch.distributed passes complex32 on as pairs of float16, and refuses most itself.
    dtypes = [name for name in MOVED_DTYPES if name != "complex32"]
    cases = [Combination(f, torch.float32, refused=name) for f in REDUCING + REDUCING_COALESCED for name in dtypes]
    assert check(3, "torch.distributed", cases)["refused"] > 90


# memory that tensors share, and what is hardly a tensor


def numbers(rank: int, count: int = 40_000) -> torch.Tensor:
    return ((torch.arange(count) * 3 + rank * 5) % 13).float()


@on_ranks(3)
def test_inputs_may_lie_anywhere_in_outputs(me: Rank) -> None:
    """Wherever in the output the input lies: at its own place, at another rank's, or across two."""
    everything = torch.cat([numbers(rank) for rank in range(me.size)])
    count = len(everything) // me.size
    with me.join(options=SMALL_SLOTS):
        for start in (*range(0, len(everything), count), count // 2, 17):
            output = torch.full_like(everything, -1)
            mine = output[(me.rank * count + start) % len(everything) :][:count]
            if len(mine) < count:
                mine = output[start:][:count]
            mine.copy_(numbers(me.rank))
            ringreduce.all_gather_into_tensor(output, mine)
            assert torch.equal(output, everything), f"all_gather_into_tensor, input at {start}"

            inputs = everything + me.rank
            output = inputs[start:][:count]
            ringreduce.reduce_scatter_tensor(output, inputs)
            expected = everything[me.rank * count :][:count] * me.size + sum(range(me.size))
            assert torch.equal(output, expected), f"reduce_scatter_tensor, output at {start}"


ODD: dict[str, tuple[Callable[[torch.Tensor], Any], str]] = {
    "one output twice": (lambda t: ringreduce.all_gather([torch.zeros(6)] * 3, t), "share memory"),
    "outputs that overlap": (lambda t: ringreduce.all_gather([*torch.zeros(14).unfold(0, 6, 4)], t), "share memory"),
    "elements that overlap": (lambda t: ringreduce.all_reduce(torch.zeros(8).unfold(0, 3, 1)), "several elements"),
    "no memory": (lambda t: ringreduce.all_reduce(torch._efficientzerotensor(6)), "clone"),
    "nested": (lambda t: ringreduce.all_reduce(torch.nested.nested_tensor([t, t[:2]])), "[Nn]ested"),
    "None": (lambda t: ringreduce.all_reduce(None), "None"),
    "a list": (lambda t: ringreduce.broadcast([1.0, 2.0]), "list"),
    "no input": (lambda t: ringreduce.all_gather([t, t.clone(), t.clone()], None), "None"),
    "an operation's name": (lambda t: ringreduce.all_reduce(t, "sum"), "'sum'.*ReduceOp"),
    "no operation": (lambda t: ringreduce.all_reduce(t, None), "None.*ReduceOp"),
    "a complex factor": (lambda t: ringreduce.all_reduce(t, dist._make_nccl_premul_sum(torch.tensor(1j))), "factor"),
}


def odd_arguments(me: Rank, name: str) -> None:
    call, pattern = ODD[name]
    with me.join():
        with pytest.raises(InvalidArgument, match=pattern):
            call(torch.ones(6))
        tensor = torch.ones(6)
        ringreduce.all_reduce(tensor)
        assert torch.equal(tensor, torch.full((6,), float(me.size)))


def test_odd_arguments_are_refused() -> None:
    run_cases(odd_arguments, 3, {name: (name,) for name in ODD})


@on_ranks(3)
def test_premul_sum_takes_numbers_and_tensors(me: Rank) -> None:
    with me.join():
        for factor in (2.0, 0.5, torch.tensor(0.5), torch.tensor([2])):
            tensor = torch.full((100,), 1.0 + me.rank)
            ringreduce.all_reduce(tensor, dist._make_nccl_premul_sum(factor))
            assert torch.equal(tensor, torch.full((100,), 6.0 * float(factor))), factor
