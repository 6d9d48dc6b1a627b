"""Ranks and threads that flush denormal numbers or round otherwise get the bits that all would get without.

cd tests && python -m distributed.test_float_environment       1,000 calls of every kind of reduction
"""

from __future__ import annotations

import ctypes
import itertools
import platform
import random
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
from bodies.collectives import OPS
from distributed.harness import Rank, in_threads, on_ranks, run, run_cases
from unit.elements import CASES, FLOATS, as_bytes, operand

import ringreduce
import ringreduce.parameter_server as ps
from ringreduce import _C

LIBM = ctypes.CDLL("libm.so.6")
ROUNDINGS = (0, 0x400, 0x800, 0xC00) if platform.machine() == "x86_64" else (0, 0x800000, 0x400000, 0xC00000)
"""To nearest, downward, upward, toward zero."""
ENVIRONMENTS = [(flush, rounding) for flush in (False, True) for rounding in ROUNDINGS]
TINY = 5e-324


class Environment:
    """Changes the calling thread's floating-point environment, and finds it unchanged at the end."""

    def __init__(self, flush: bool, rounding: int) -> None:
        self.flush, self.rounding = flush, rounding

    def __enter__(self) -> None:
        if self.flush:
            torch.set_flush_denormal(True)
        LIBM.fesetround(self.rounding)

    def __exit__(self, *_: object) -> None:
        rounding, flushes = LIBM.fegetround(), TINY * 1.0 == 0.0
        LIBM.fesetround(ROUNDINGS[0])
        torch.set_flush_denormal(False)
        assert (flushes, rounding) == (self.flush, self.rounding)


def test_this_thread_can_change_its_environment() -> None:
    one = torch.tensor([1.0])
    with Environment(True, ROUNDINGS[1]):
        flushed, down = torch.tensor([1e-41]) * 1.0, one / 3
    assert flushed.item() == 0.0
    assert down.item() < (one / 3).item()


# ---- kernels ---------------------------------------------------------------------------------------------------------


def results(dtype: str, op: str, operands: list[torch.Tensor]) -> list[bytes]:
    """Of the sum, or another combination, of the operands, and of one times a third."""
    out = torch.empty_like(operands[0])
    found = []
    divisor = 3.0 if op == "avg" else 1.0
    _C.accumulate(dtype, op, [out.data_ptr()], [t.data_ptr() for t in operands], len(out), divisor)
    found.append(as_bytes(out).tobytes())
    if op == "premul_sum":
        _C.scale(dtype, out.data_ptr(), operands[0].data_ptr(), len(out), 1 / 3)
        found.append(as_bytes(out).tobytes())
    return found


@pytest.mark.parametrize(("dtype", "op"), CASES)
def test_kernels(dtype: str, op: str) -> None:
    operands = [operand(dtype, 1031, rank) for rank in range(3)]
    wanted = results(dtype, op, operands)
    for environment in ENVIRONMENTS:
        with Environment(*environment):
            found = results(dtype, op, operands)
        assert found == wanted, environment


@pytest.mark.parametrize("wire", ["bfloat16", "int8", "int4"])
def test_packing(wire: str) -> None:
    values = operand("float32", 1031, 0).clone()
    values[:320] = torch.randn(320) * 1e-40

    def both() -> tuple[bytes, bytes]:
        out = torch.empty_like(values)
        packed = torch.empty(_C.packed_bytes(wire, len(values)), dtype=torch.uint8)
        _C.pack(wire, packed.data_ptr(), values.data_ptr(), len(values))
        _C.unpack(wire, out.data_ptr(), packed.data_ptr(), len(values))
        return packed.numpy().tobytes(), as_bytes(out).tobytes()

    wanted = both()
    for environment in ENVIRONMENTS:
        with Environment(*environment):
            found = both()
        assert found == wanted, environment


# ---- collectives -----------------------------------------------------------------------------------------------------

COUNT = 37
"""Elements of a block; not of a whole vector."""

Reduction = Callable[[list[torch.Tensor], Any, bool], Any]
"""Of tensors, whose first is written, the operation and async_op."""


def reduce_scatter_list(tensors: list[torch.Tensor], op: Any, async_op: bool) -> Any:
    return dist.reduce_scatter(tensors[0], tensors[1:], op, async_op=async_op)


def reduce_scatter_single(tensors: list[torch.Tensor], op: Any, async_op: bool) -> Any:
    return ringreduce.reduce_scatter_single(tensors[0], tensors[1], op, async_op=async_op)


# What the tensors of each are: how many blocks each has, per size of the group.
REDUCTIONS: dict[str, tuple[Callable[[int], list[int]], Reduction]] = {
    "all_reduce": (lambda size: [1], lambda t, op, later: dist.all_reduce(t[0], op, async_op=later)),
    "all_reduce, direct": (lambda size: [1], lambda t, op, later: ringreduce.all_reduce(t[0], op, async_op=later)),
    "all_reduce_coalesced": (
        lambda size: [1, 2],
        lambda t, op, later: ringreduce.all_reduce_coalesced(t, op, async_op=later),
    ),
    "reduce": (lambda size: [1], lambda t, op, later: dist.reduce(t[0], 0, op, async_op=later)),
    "reduce_scatter": (lambda size: [1] * (size + 1), reduce_scatter_list),
    "reduce_scatter_single": (lambda size: [1, size], reduce_scatter_single),
}

OPTIONS = {
    "shared memory": ringreduce.Options(),
    "gloo": ringreduce.Options(transport="gloo"),
}


def tensors_of(me: Rank, blocks: list[int], dtype: str) -> list[torch.Tensor]:
    found = [operand(dtype, COUNT * n, 10 * i + me.rank) for i, n in enumerate(blocks)]
    return [t.view(torch.bool) if dtype == "bool" else t for t in found]


Kind = tuple[str, str, str]
"""The name of a reduction, dtype and operation."""


def reduces(me: Rank, transport: str, calls: int, kinds: list[Kind]) -> list[bytes]:
    """Every kind of call once in the default environment, then `calls` times in others. Returns what calls gave that
    give the same to all ranks."""

    def made(kind: Kind, later: bool, environment: tuple[bool, int]) -> list[bytes]:
        name, _, op = kind
        tensors = [t.clone() for t in given[kind]]
        with Environment(*environment):
            work = REDUCTIONS[name][1](tensors, OPS[op], later)
            if later:
                work.wait()
        return [t.view(torch.uint8).numpy().tobytes() for t in tensors]

    given = {(name, dtype, op): tensors_of(me, REDUCTIONS[name][0](me.size), dtype) for name, dtype, op in kinds}
    rng = random.Random(me.rank)
    with me.join(options=OPTIONS[transport]):
        wanted = {kind: made(kind, False, ENVIRONMENTS[0]) for kind in kinds}
        # The group's thread is made by the first asynchronous call, on some ranks in another environment.
        for call in range(calls):
            for number, kind in enumerate(kinds):
                environment = rng.choice(ENVIRONMENTS) if rng.random() < 0.7 else ENVIRONMENTS[0]
                later = (call + number) % 2 == 1
                assert made(kind, later, environment) == wanted[kind], (kind, later, environment)
    return [wanted[kind][0] for kind in kinds if kind[0].startswith("all_reduce")]


def check(transport: str, ranks: int, calls: int, cases: list[tuple[str, str]]) -> None:
    """`cases` are dtypes and operations, of each reduction."""
    refused = [("all_reduce", "complex64", "product"), ("all_reduce", "complex128", "product")]  # by torch itself
    kinds = {name: [(name, *case) for case in cases if (name, *case) not in refused] for name in REDUCTIONS}
    found = run_cases(reduces, ranks, {name: (transport, calls, kinds[name]) for name in REDUCTIONS})
    for name, (first, *others) in found.items():
        assert all(other == first for other in others), name


@pytest.mark.parametrize("transport", OPTIONS)
def test_reductions(transport: str) -> None:
    check(transport, 3, 4, [(dtype, op) for dtype, op in CASES if dtype in FLOATS or op == "sum"])


@pytest.mark.slow
@pytest.mark.parametrize("sixth", range(6))
@pytest.mark.parametrize("transport", OPTIONS)
def test_reductions_many_times(transport: str, sixth: int) -> None:
    check(transport, 2, 25, CASES[sixth::6])


def sparse(me: Rank) -> bytes:
    with me.join():
        indices = torch.tensor([[0, 3, 3, me.rank]])
        values = torch.stack([operand("float32", 4, 5 * me.rank + i).abs() * 1e-38 for i in range(4)])
        given = torch.sparse_coo_tensor(indices, values, (5, 4))
        found = []
        for environment in ENVIRONMENTS:
            tensor = given.clone()
            with Environment(*(environment if me.rank == 0 else ENVIRONMENTS[0])):
                dist.all_reduce(tensor)
            found.append(tensor.coalesce().values().view(torch.uint8).numpy().tobytes())
        assert found == [found[0]] * len(found)
        return found[0]


def test_all_reduce_of_sparse_tensors() -> None:
    first, second = run(sparse, 2)
    assert first == second


@on_ranks(2)
def test_threads_that_wait_for_calls(me: Rank) -> None:
    """Calls of one group from threads whose environments differ; each waits for calls of the others too."""
    with me.join():
        given = operand("float32", 1001, me.rank) * 1e-38
        wanted = given.clone()
        dist.all_reduce(wanted)
        for environment in ENVIRONMENTS:
            with Environment(*environment):
                tensors = [given.clone() for _ in range(8)]
                works = [dist.all_reduce(t, async_op=True) for t in tensors]

            def wait(number: int, works: list[Any] = works) -> None:
                with Environment(*ENVIRONMENTS[(number + me.rank) % len(ENVIRONMENTS)]):
                    for work in works[number::4]:
                        work.wait()

            in_threads([lambda number=number: wait(number) for number in range(4)])  # type: ignore[misc]
            for tensor in tensors:
                assert as_bytes(tensor).tobytes() == as_bytes(wanted).tobytes()


# ---- the parameter server --------------------------------------------------------------------------------------------

RULES: list[tuple[Any, dict[str, Any]]] = [
    (torch.optim.SGD, {"lr": 0.1, "momentum": 0.9, "weight_decay": 1e-3}),
    (torch.optim.Adam, {"lr": 1e-3, "eps": 1e-38}),
    (torch.optim.ASGD, {"lr": 1e-3}),  # by torch, in the server's process
]


def pushes(me: Rank, changed: bool) -> list[bytes]:
    """What workers, whose process is a server too, pull after pushes in their environments."""
    rng, weight = random.Random(me.rank), 1.0 + me.rank / 3
    found = []

    def environment() -> Environment:
        return Environment(*(rng.choice(ENVIRONMENTS) if changed else ENVIRONMENTS[0]))

    # Python reads and prints numbers correctly in the default environment only, so its threads begin in that.
    memory: dict[str, Any] = {"window": 4 << 20, "memory": 16 << 20, "block_bytes": 4096}
    with ps.join(me.store, rank=me.rank, size=me.size, timeout=30.0, **memory) as kv:
        count, dtypes = 3001, (torch.float32, torch.float64)
        for number, (kind, arguments) in enumerate(RULES):
            for dtype in dtypes:
                name = f"{number} {dtype}"
                value = torch.linspace(-1, 1, count, dtype=dtype) * torch.finfo(dtype).tiny
                kv.init(name, value, update=ps.optimizer(kind, **arguments), mode=ps.sync())
                for step in range(4):
                    generator = torch.Generator().manual_seed(100 * me.rank + step)
                    gradient = torch.randn(count, dtype=dtype, generator=generator) * torch.finfo(dtype).tiny * 3
                    with environment():
                        failed = kv.push_pull(name, gradient, out=value, weight=weight).wait()
                    assert failed == []
                    found.append(as_bytes(value).tobytes())
        table = ps.Embedding(kv, "rows", 8, update=ps.optimizer(torch.optim.SGD, lr=0.5), mode=ps.sync())
        ids = torch.tensor([3, 1, 3, 3, me.rank])
        for step in range(4):
            generator = torch.Generator().manual_seed(100 * me.rank + step)
            gradient = torch.randn(5, 8, generator=generator) * torch.finfo(torch.float32).tiny
            with environment():
                table.push(ids, gradient)
                rows = table.pull(ids)
            found.append(as_bytes(rows.flatten()).tobytes())
    return found


def test_the_parameter_server() -> None:
    wanted, changed = run(pushes, 2, False), run(pushes, 2, True)
    assert len(wanted[0]) == 4 * (2 * len(RULES) + 1)
    for rank in range(2):
        assert [a == b for a, b in zip(changed[rank], wanted[rank], strict=True)] == [True] * len(wanted[rank])


if __name__ == "__main__":
    for case, transport in itertools.product(CASES, OPTIONS):
        check(transport, 2, 1000, [case])
        print(f"{' '.join(case)}, {transport}: equal bits", flush=True)
