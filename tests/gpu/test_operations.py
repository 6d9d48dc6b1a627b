"""How much ranks that share a GPU put in their streams for a call, as far as the stand-in for the driver counts it."""

from __future__ import annotations

import ctypes
import math
import os

import pytest
import torch
import torch.distributed as dist
from distributed.cuda_ranks import options, run
from distributed.harness import Rank

import ringreduce
from ringreduce.plan import build, slot_depth

pytestmark = pytest.mark.skipif(torch.version.cuda is not None, reason="CUDA's driver does not count calls")

GPU_BYTES = 2**20
WORD_BYTES = 24 + 8
"""Of a region, for each rank and slot."""


def counted() -> list[int]:
    """Launches of kernels and calls that wait for values or write them, of this process."""
    counts = (ctypes.c_uint64 * 2)()
    ctypes.CDLL(os.environ["RINGREDUCE_LIBCUDA"]).stand_in_calls(counts)
    return list(counts)


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
    depth = slot_depth(size)
    slot = (GPU_BYTES - size * depth * WORD_BYTES) // depth // 128 * 128
    for added in run(sums, size, "steps", algorithm, counts):
        for count, (launches, values) in zip(counts, added, strict=True):
            rounds = math.ceil(count * 4 / chunks / slot)
            assert launches == rounds * batches
            assert values == rounds * batches + 1  # at the end: the stream waits no more
