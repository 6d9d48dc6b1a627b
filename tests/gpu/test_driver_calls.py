"""What calls ask the driver for once and keep: events, modules. The stand-in for the driver counts."""

from __future__ import annotations

import ctypes
import os

import pytest
import torch
import torch.distributed as dist
from distributed.cuda_ranks import MODES, options, run
from distributed.harness import Rank

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
