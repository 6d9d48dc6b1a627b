"""What single functions take, on one process: `make bench-micro`.

pytest-benchmark measures them, keeps the figures of each run in build/benchmarks, and prints those of the run before
beside them. Whole collectives, with their ranks, are in the other files of bench/.
"""

from __future__ import annotations

from collections.abc import Iterator

import numpy
import pytest
import torch
import torch.distributed as dist
import torch.testing._internal.distributed.fake_pg  # registers `fake`
from pytest_benchmark.fixture import BenchmarkFixture

import ringreduce
from ringreduce import _C

MB = 1 << 20


@pytest.fixture(scope="module")
def alone() -> Iterator[None]:
    """A group of one rank: a call of it is the way from Python to the engine and back, without another rank."""
    dist.init_process_group("ringreduce", store=dist.HashStore(), rank=0, world_size=1)
    yield
    dist.destroy_process_group()


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("size", [4 << 10, MB])
def test_accumulate(benchmark: BenchmarkFixture, size: int, dtype: str) -> None:
    """`size` bytes of each of two sources."""
    to, one, other = (numpy.zeros(size, numpy.uint8) for _ in range(3))
    count = size // getattr(torch, dtype).itemsize
    benchmark(_C.accumulate, dtype, "sum", [to.ctypes.data], [one.ctypes.data, other.ctypes.data], count)


@pytest.mark.parametrize("wire_dtype", ["bfloat16", "int8", "int4"])
@pytest.mark.parametrize("what", ["pack", "pack with rest", "unpack", "round"])
def test_packing(benchmark: BenchmarkFixture, what: str, wire_dtype: str) -> None:
    """512 KB of float32, a slice: GB/s is 524 divided by the microseconds."""
    values = numpy.random.default_rng(0).standard_normal(131072).astype(numpy.float32)
    packed, rest = (numpy.zeros_like(values) for _ in range(2))
    at, packed_at, count = values.ctypes.data, packed.ctypes.data, len(values)
    _C.pack(wire_dtype, packed_at, at, count)
    if what == "unpack":
        benchmark(_C.unpack, wire_dtype, at, packed_at, count)
    elif what == "round":
        benchmark(_C.round, wire_dtype, at, count)
    else:
        benchmark(_C.pack, wire_dtype, packed_at, at, count, rest.ctypes.data if what == "pack with rest" else 0)


def test_direct_call(benchmark: BenchmarkFixture, alone: None) -> None:
    benchmark(ringreduce.all_reduce, torch.ones(16))


@pytest.mark.parametrize("backend", ["ringreduce", "fake"])
def test_dist_call(benchmark: BenchmarkFixture, alone: None, backend: str) -> None:
    """torch's backend `fake` does nothing, so it shows what torch itself takes."""
    group = dist.new_group(backend="fake") if backend == "fake" else None
    benchmark(dist.all_reduce, torch.ones(16), group=group)
