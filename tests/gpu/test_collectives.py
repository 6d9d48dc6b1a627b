"""Every collective on CUDA tensors: the cases of the CPU's tests, with torch's default device another.

Inputs differ by rank, by element and by call, and are so small that every result is exact in every dtype.
"""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Iterator
from importlib import import_module
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from bodies import collectives, grid
from distributed import harness
from distributed.cuda_ranks import MODES, on_ranks, options, run
from distributed.harness import Rank
from stand_in import torch_cuda

import ringreduce
from ringreduce import ops
from ringreduce.plan import BUILDERS, build

SMALL_SLOTS = {"gpu_bytes": 1024**2, "gpu_blocks": 8, "channels": 8, "least_slice_bytes": 64}
"""Of 16 KB at most; where ranks take steps, of 128 KB."""

ASYNCHRONOUS = (
    *("all_reduce", "all_reduce_coalesced", "broadcast", "reduce", "all_gather", "all_gather_into_tensor"),
    *("reduce_scatter", "reduce_scatter_tensor", "gather", "scatter", "all_to_all", "all_to_all_single", "barrier"),
)

MESSAGES = ("send_and_recv", "recv_from_any")


@contextlib.contextmanager
def asynchronously() -> Iterator[None]:
    """torch.distributed's collectives are asynchronous and are waited for."""

    def waited(collective: Any, *arguments: Any, **keywords: Any) -> None:
        collective(*arguments, async_op=True, **keywords).wait()

    with contextlib.ExitStack() as patches:
        for name in ASYNCHRONOUS:
            patches.enter_context(mock.patch.object(dist, name, functools.partial(waited, getattr(dist, name))))
        yield


# sizes and plans


def every_size(me: Rank, mode: str, asynchronous: bool) -> None:
    with (
        me.join(options=options(mode, **SMALL_SLOTS)),
        torch.device("cuda"),
        asynchronously() if asynchronous else contextlib.nullcontext(),
    ):
        for name, collective in collectives.COLLECTIVES.items():
            if me.size == 1 and name in MESSAGES:
                continue
            for call, count in enumerate(collectives.sizes(me.size)):
                try:
                    collective(me, count, call)
                except Exception as error:
                    error.add_note(f"{name} with {count} elements")
                    raise


@pytest.mark.parametrize("asynchronous", [False, True])
@pytest.mark.parametrize(("ranks", "mode"), [(1, "steps"), (2, "run"), (2, "steps"), (3, "steps"), (4, "run")])
def test_every_collective_and_size(ranks: int, mode: str, asynchronous: bool) -> None:
    run(every_size, ranks, mode, asynchronous)


def every_plan(me: Rank, mode: str, counts: tuple[int, ...]) -> None:
    with me.join(options=options(mode, **SMALL_SLOTS)), torch.device("cuda"):
        for name, algorithms in BUILDERS.items():
            for algorithm in algorithms:
                ringreduce.register_plan(build(name, algorithm, me.size))
                for call, count in enumerate(counts):
                    try:
                        collectives.COLLECTIVES[name](me, count, call)
                    except Exception as error:
                        error.add_note(f"{algorithm} {name} with {count} elements")
                        raise


@pytest.mark.parametrize(("ranks", "mode"), [(2, "run"), (3, "run"), (4, "steps"), (8, "steps")])
def test_every_plan(ranks: int, mode: str) -> None:
    run(every_plan, ranks, mode, (0, 1, 10_007) if ranks > 4 else (0, 1, ranks + 1, collectives.SEVERAL_SLICES))


def few_bytes(me: Rank) -> None:
    torch_cuda.activate()
    torch.cuda.set_device(0)
    with me.join(options=options("run")):
        for call in range(20):
            for count in (1, 64, 1000):
                x = torch.arange(count, device="cuda").mul_(me.rank + 1).add_(call)
                dist.all_reduce(x)
                assert torch.equal(x, torch.arange(count, device="cuda").mul_(3).add_(2 * call)), (call, count)


def test_two_processes_run_on_one_gpu() -> None:
    """Their kernels wait for each other while the GPU goes from one process to the other, so they are given little."""
    harness.run(few_bytes, 2)


# dtypes, operations, layouts


def every_combination(me: Rank, mode: str, api: str, cases: list[grid.Combination]) -> tuple[str, Any]:
    report = grid.Report()
    with me.join(options=options(mode)), torch.device("cuda"):
        for call, combination in enumerate(cases):
            case = grid.Case(me, import_module(api), dist.group.WORLD, combination, call)
            grid.attempt(report, combination, case)
    return report.text(), report.outcomes


def check(ranks: int, mode: str, api: str, cases: list[grid.Combination]) -> Any:
    """Rank 0's outcomes, if no rank has anything to report."""
    (_, outcomes), *_ = results = run(every_combination, ranks, mode, api, cases)
    texts = {text for text, _ in results if text}
    assert not texts, "\n".join(texts)
    return outcomes


PLAIN = [("contiguous", "contiguous"), ("by rank", "by rank")]


@pytest.mark.parametrize("mode", MODES)
def test_every_dtype_and_operation(mode: str) -> None:
    outcomes = check(2, mode, "ringreduce", grid.combinations(grid.REDUCING, grid.MOVING, PLAIN))
    assert outcomes["right"] > 600 and outcomes["refused"] > 300


def test_every_layout() -> None:
    cases = grid.combinations(grid.REDUCING[:2], grid.MOVING, grid.SAME, (torch.float32, torch.complex64))
    outcomes = check(3, "steps", "ringreduce", [c for c in cases if c.op in ("sum", "avg", "premul_sum")])
    assert outcomes["right"] > 200 and outcomes["refused"] > 20


def test_coalesced_and_through_torch() -> None:
    layouts = [("contiguous", "contiguous"), ("by rank", "by rank"), ("expanded", "contiguous")]
    cases = grid.combinations(
        grid.REDUCING_COALESCED, grid.MOVING + grid.MOVING_COALESCED, layouts, (torch.float32, torch.uint8)
    )
    outcomes = check(3, "steps", "torch.distributed", cases)
    assert outcomes["right"] > 60 and outcomes["refused"] > 20


@on_ranks(2)
def test_ops_of_compiled_graphs(me: Rank, mode: str) -> None:
    with me.join(options=options(mode)), torch.device("cuda"):
        assert dist.group.WORLD is not None
        group = dist.group.WORLD.group_name
        x = torch.arange(6.0) + me.rank
        ops.all_reduce_(x, group)
        assert torch.equal(x, me.size * torch.arange(6.0) + sum(range(me.size)))
        gathered, exchanged = torch.empty(me.size, 2), torch.empty(me.size)
        ops.all_gather_into(gathered, torch.full((2,), float(me.rank)), group)
        assert torch.equal(gathered, torch.arange(float(me.size)).view(-1, 1).expand(-1, 2))
        ops.all_to_all_into(exchanged, torch.full((me.size,), float(me.rank)), group)
        assert torch.equal(exchanged, torch.arange(float(me.size)))
