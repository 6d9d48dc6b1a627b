"""How often calls ask the driver for events, modules and operations of streams, as the stand-in for it counts."""

from __future__ import annotations

import ctypes
import math
import os

import pytest
import torch
import torch.distributed as dist
from distributed.cuda_ranks import MODES, options, run
from distributed.harness import Rank

import ringreduce
from ringreduce.gpu.joining import shape_for
from ringreduce.plan import build

pytestmark = pytest.mark.skipif(torch.version.cuda is not None, reason="NVIDIA's driver does not count its calls")


def calls(function: str) -> int:
    count = ctypes.CDLL(os.environ["RINGREDUCE_LIBCUDA"]).stand_in_calls
    count.restype = ctypes.c_size_t
    return int(count(function.encode()))


def call_twice(x: torch.Tensor, timed: bool) -> None:
    dist.all_reduce(x)
    work = dist.all_reduce(x, async_op=True)
    assert work is not None
    work.wait()
    torch.cuda.synchronize()
    assert not timed or work._get_duration() >= 0


def makes_calls(me: Rank, mode: str) -> list[int]:
    made = []
    with me.join(options=options(mode)):
        x = torch.zeros(100, device="cuda")
        for timed in (False, True):
            if timed:
                dist.distributed_c10d._get_default_group()._enable_collectives_timing()
            for _ in range(20):
                call_twice(x, timed)
            before = calls("cuEventCreate")
            for _ in range(100):
                call_twice(x, timed)
            made.append(calls("cuEventCreate") - before)
    return made


@pytest.mark.parametrize("mode", MODES)
def test_events_of_calls_are_used_again(mode: str) -> None:
    for made in run(makes_calls, 2, mode):
        assert max(made) < 50, "of 200 calls with two events each, or three"


def makes_groups(me: Rank, mode: str) -> int:
    with me.join(options=options(mode)):
        x = torch.ones(100, device="cuda")
        dist.all_reduce(x)
        before = calls("cuModuleLoadData")
        assert before > 0
        other = dist.new_group(list(range(me.size)))
        dist.all_reduce(x, group=other)
        assert x.eq(me.size**2).all()
        return calls("cuModuleLoadData") - before


@pytest.mark.parametrize("mode", MODES)
def test_groups_share_their_kernels(mode: str) -> None:
    assert run(makes_groups, 2, mode) == [0, 0]


GPU_BYTES = 2**20


def counted() -> list[int]:
    """Launches of kernels and calls that wait for values or write them, of this process."""
    return [calls(function) for function in ("cuLaunchKernel", "cuStreamBatchMemOp_v2")]


def sums(me: Rank, mode: str, algorithm: str, counts: tuple[int, ...]) -> list[list[int]]:
    """What a sum of so many floats adds to `counted`, once the group is set up."""
    added = []
    with me.join(options=options(mode, gpu_bytes=GPU_BYTES)):
        ringreduce.register_plan(build("all_reduce", algorithm, me.size))
        for count in counts:
            x = torch.full((count,), me.rank + 1.0, device="cuda")
            for _ in range(2):  # the first call sets up the group, and loads the kernel and the plan
                torch.cuda.synchronize()
                before = counted()
                dist.all_reduce(x)
                torch.cuda.synchronize()
                after = counted()
            added.append([b - a for a, b in zip(before, after, strict=True)])
    return added


@pytest.mark.parametrize(("algorithm", "batches", "chunks"), [("one_shot", 2, 1), ("two_shot", 3, 4)])
def test_a_batch_is_a_launch_and_one_call_for_its_values(algorithm: str, batches: int, chunks: int) -> None:
    size, counts = 4, (2, 2**20)
    slot = shape_for(size, options("steps", gpu_bytes=GPU_BYTES, gpu_blocks=1), 1, True, 1).slot_bytes
    for added in run(sums, size, "steps", algorithm, counts):
        for count, (launches, values) in zip(counts, added, strict=True):
            rounds = math.ceil(count * 4 / chunks / slot)
            assert launches == rounds * batches
            assert values == rounds * batches + 1  # at the end: the stream waits no more
