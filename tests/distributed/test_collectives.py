"""Every collective on real processes, through `torch.distributed`: sizes, dtypes, operations, strides, algorithms.

Inputs differ by rank, by element and by call, and are so small that every result is exact in every dtype.
"""

from __future__ import annotations

import functools
import hashlib

import numpy as np
import pytest
import torch
import torch.distributed as dist
from bodies.collectives import (
    COLLECTIVES,
    DTYPES,
    OPS,
    SEVERAL_SLICES,
    SMALL_SLOTS,
    all_reduce,
    every_operation,
    every_size,
    name_of,
    reduced,
    same,
    supported,
    values,
)
from distributed.harness import Rank, on_ranks, run, run_cases
from hypothesis import HealthCheck, Phase, given, settings
from hypothesis import strategies as st

import ringreduce
from ringreduce.errors import InvalidArgument
from ringreduce.plan import BUILDERS

RANKS = (2, 3, 4)
RULES = [(c, f"{c}:{a}") for c, algorithms in BUILDERS.items() for a in algorithms if len(algorithms) > 1]


@pytest.mark.parametrize("ranks", RANKS)
def test_sizes(ranks: int) -> None:
    run_cases(every_size, ranks, {collective: (collective, SMALL_SLOTS) for collective in COLLECTIVES})


@on_ranks(4)
def test_all_collectives_in_one_group_with_default_options(me: Rank) -> None:
    with me.join():
        for call, (collective, count) in enumerate((c, n) for c in COLLECTIVES if c != "barrier" for n in (5, 300_007)):
            COLLECTIVES[collective](me, count, call)


@pytest.mark.parametrize("ranks", RANKS)
def test_algorithms(ranks: int) -> None:
    options = functools.partial(ringreduce.Options, engine="channel_bytes=64K,least_slice_bytes=64")
    run_cases(every_size, ranks, {rule: (collective, options(algorithms=rule)) for collective, rule in RULES})


def large_first_call(me: Rank, options: ringreduce.Options) -> None:
    with me.join(options=options):
        for call in range(3):
            all_reduce(me, 5 * SEVERAL_SLICES, call)


@pytest.mark.parametrize("ranks", RANKS)
def test_first_call_of_a_group_may_need_all_slots_many_times(ranks: int) -> None:
    options = functools.partial(ringreduce.Options, engine="channel_bytes=64K,slices=64,least_slice_bytes=64")
    cases = {name: (options(algorithms=f"all_reduce:{name}"),) for name in BUILDERS["all_reduce"]}
    run_cases(large_first_call, ranks, cases)


# dtypes and operations


@pytest.mark.parametrize("ranks", (2, 4))  # whose averages are exact
def test_dtypes_and_operations(ranks: int) -> None:
    run_cases(every_operation, ranks, {name_of(dtype): (dtype,) for dtype in DTYPES})


def inexact_hashes(me: Rank, options: ringreduce.Options) -> list[tuple[str, str]]:
    """What this rank has after reductions whose result depends on their order."""
    hashes = []
    with me.join(options=options):
        for dtype in DTYPES:
            for op, reduce_op in OPS.items():
                if not supported(dtype, op):
                    continue
                noise = torch.Generator().manual_seed(me.rank)
                for _ in range(2):  # the same inputs again
                    real = torch.randn(5003, 2, generator=noise.manual_seed(me.rank), dtype=torch.float64)
                    real[:20] *= 0  # zeros of both signs
                    if dtype.is_floating_point or dtype.is_complex:  # NaN of both signs, with other bits on each rank
                        of_nan = real.view(torch.int64)[20:40]
                        of_nan.copy_(of_nan & (-1 << 63) | 0x7FF8 << 48 | me.rank << 40)
                    noisy = torch.view_as_complex(real) if dtype.is_complex else real[:, 0] * 3
                    tensor = noisy.abs().to(dtype) if dtype in (torch.uint8, torch.bool) else noisy.to(dtype)
                    ringreduce.all_reduce(tensor, reduce_op)
                    data = tensor.view(torch.uint8).numpy().tobytes()
                    hashes.append((f"{name_of(dtype)} {op}", hashlib.sha256(data).hexdigest()))
    return hashes


def test_results_are_the_same_bits_on_all_ranks_and_every_time() -> None:
    cases = {name: (ringreduce.Options(algorithms=f"all_reduce:{name}"),) for name in BUILDERS["all_reduce"]}
    for algorithm, (first, *others) in run_cases(inexact_hashes, 3, cases).items():
        for other in others:
            assert other == first, algorithm
        assert first[::2] == first[1::2], algorithm


# groups


@on_ranks(2)
def test_device_map(me: Rank) -> None:
    with me.join(backend="cpu:ringreduce"):
        all_reduce(me, 1000, 0)
        assert dist.get_backend_config() == "cpu:ringreduce"


@on_ranks(1)
def test_group_of_one(me: Rank) -> None:
    with me.join():
        for collective in COLLECTIVES.keys() - {"send_and_recv", "recv_from_any", "barrier"}:
            COLLECTIVES[collective](me, 1000, 0)
        dist.barrier()


# properties

CASES = st.lists(
    st.tuples(st.integers(0, 20_000), st.sampled_from(DTYPES[:4]), st.sampled_from(["sum", "min", "max"])), min_size=1
)


def drawn_calls(me: Rank, cases: list[tuple[int, torch.dtype, str]]) -> None:
    with me.join(options=SMALL_SLOTS):
        for call, (count, dtype, op) in enumerate(cases):
            tensor = values(me.rank, count, call, dtype)
            dist.all_reduce(tensor, OPS[op])
            same(tensor, reduced(torch.stack([values(r, count, call, dtype) for r in range(me.size)]), op))


@settings(max_examples=8, phases=(Phase.reuse, Phase.generate), suppress_health_check=[HealthCheck.too_slow])
@given(cases=CASES, ranks=st.sampled_from(RANKS))
def test_any_sequence_of_all_reduces(cases: list[tuple[int, torch.dtype, str]], ranks: int) -> None:
    run(drawn_calls, ranks, cases)


# training


def model() -> torch.nn.Module:
    torch.manual_seed(0)
    return torch.nn.Sequential(torch.nn.Linear(8, 16), torch.nn.Tanh(), torch.nn.Linear(16, 1)).double()


def step(net: torch.nn.Module, batch: torch.Tensor) -> list[torch.Tensor]:
    optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
    for _ in range(3):
        optimizer.zero_grad()
        net(batch).square().mean().backward()
        optimizer.step()
    return [parameter.detach() for parameter in net.parameters()]


def train(me: Rank, batch: torch.Tensor) -> list[np.ndarray]:
    with me.join():
        net = torch.nn.parallel.DistributedDataParallel(model())
        return [parameter.numpy() for parameter in step(net, batch.chunk(me.size)[me.rank])]


def test_ddp_steps_as_one_process_does() -> None:
    batch = torch.sin(torch.arange(96.0).double()).view(12, 8)
    expected = step(model(), batch)
    for parameters in run(train, 3, batch):
        for parameter, by_one in zip(parameters, expected, strict=True):
            torch.testing.assert_close(torch.from_numpy(parameter), by_one)


# what users hang on a call, and what they pass that cannot be


def many_messages(me: Rank) -> float:
    with me.join():
        tensor = torch.ones(1 << 20)

        def exchange() -> None:
            if me.rank == 0:
                dist.send(tensor.clone(), 1)
            else:
                dist.recv(torch.empty_like(tensor), 0)

        def resident() -> int:
            with open("/proc/self/statm") as file:
                return int(file.read().split()[1]) * 4096

        for _ in range(5):
            exchange()
        before = resident()
        for _ in range(30):
            exchange()
        return (resident() - before) / tensor.nbytes


def test_messages_let_go_of_their_tensors() -> None:
    assert max(run(many_messages, 2)) < 15  # of 30


def read_only(me: Rank) -> str:
    with me.join():
        try:
            ringreduce.all_reduce(np.frombuffer(b"12345678", dtype=np.float32))
        except InvalidArgument as error:
            return str(error)
        return "no error"


def test_a_read_only_array_is_refused() -> None:
    assert all("read-only" in text for text in run(read_only, 2))


@on_ranks(3, returns=[[3.0] * 6] * 3)
def test_parameters_that_are_not_contiguous(me: Rank) -> list[float]:
    with me.join():
        parameter = torch.nn.Parameter(torch.ones(2, 3).t())
        dist.all_reduce(parameter)
        return parameter.detach().flatten().tolist()
