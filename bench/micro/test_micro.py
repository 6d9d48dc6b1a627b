"""What single functions take, on one process: `make bench-micro`.

pytest-benchmark measures them, keeps the figures of each run in build/benchmarks, and prints those of the run before
beside them. Whole collectives, with their ranks, are in the other files of bench/.
"""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Iterator

import numpy
import pytest
import torch
import torch.distributed as dist
import torch.testing._internal.distributed.fake_pg  # registers `fake`
from pytest_benchmark.fixture import BenchmarkFixture

import ringreduce
from ringreduce import _C, plan
from ringreduce.coordination import protocol
from ringreduce.topology import planner, presets

MB = 1 << 20


@pytest.fixture(scope="module")
def alone() -> Iterator[None]:
    """A group of one rank: a call of it is the way from Python to the engine and back, without another rank."""
    dist.init_process_group("ringreduce", store=dist.HashStore(), rank=0, world_size=1)
    yield
    dist.destroy_process_group()


@pytest.mark.parametrize("size", [8, 64])
@pytest.mark.parametrize("algorithm", ["ring", "tree"])
def test_lower(benchmark: BenchmarkFixture, algorithm: str, size: int) -> None:
    made = plan.build("all_reduce", algorithm, size)
    assert benchmark(plan.lower, made)


@pytest.mark.parametrize("size", [8, 64])
@pytest.mark.parametrize("algorithm", ["ring", "tree"])
def test_verify(benchmark: BenchmarkFixture, algorithm: str, size: int) -> None:
    benchmark(plan.verify, plan.build("all_reduce", algorithm, size))


@pytest.mark.parametrize("machine", ["dgx1-v100", "dgx2"])
def test_plan_for(benchmark: BenchmarkFixture, machine: str) -> None:
    """The first time in a process."""

    def fresh() -> tuple[tuple[object, ...], dict[str, object]]:
        ours = [module for name, module in sys.modules.items() if name.startswith("ringreduce.")]
        for each in [value for module in ours for value in vars(module).values() if hasattr(value, "cache_clear")]:
            each.cache_clear()
        return (presets.preset(machine), "all_reduce", 160 * MB), {}

    benchmark.pedantic(lambda *arguments: planner.plan_for(*arguments).plan, setup=fresh, rounds=9)


def test_membership_read(benchmark: BenchmarkFixture) -> None:
    """The log of a round of 64 members, of whom one is lost."""
    members = tuple(protocol.Member(f"member{number}") for number in range(64))
    lost = (members[-1].name,)
    log = "".join(protocol.Report(3, lost=lost).line(member.name) for member in members[:-1])
    read = protocol.read.__wrapped__  # not its cache
    assert set(benchmark(read, protocol.View(7, members), log).lost) == set(lost)


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


@pytest.mark.parametrize("words", ["-c pass", "-m ringreduce --help", "-m ringreduce plan dgx1-v100"])
def test_start(benchmark: BenchmarkFixture, words: str) -> None:
    """How long a command takes, beside Python itself."""
    command = [sys.executable, *words.split()]
    benchmark.pedantic(subprocess.run, (command,), {"check": True, "stdout": subprocess.DEVNULL}, rounds=9)
