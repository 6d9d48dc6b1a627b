"""Functional collectives, in eager mode and inside compiled graphs, and DDP compiled."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.distributed._functional_collectives as funcol
from distributed import harness
from distributed.harness import Rank, on_ranks, run
from frameworks.common import batch, close, loss_of, network, same, sgd, trained_alone
from torch import Tensor, nn
from torch._dynamo.backends.debugging import aot_eager
from torch.nn.parallel import DistributedDataParallel

STEPS = 3
COMPILATION = 150.0  # seconds for the C++ compiler, at most


def given(rank: int, call: int) -> Tensor:
    """Whole numbers, so that every result is exact."""
    return ((torch.arange(24.0) * 3 + 5 * rank + 7 * call) % 13).view(6, 4)


def every_collective(x: Tensor, group: dist.ProcessGroup) -> tuple[Tensor, ...]:
    """With arithmetic before and after, for the compiler to fuse; results that reduce, gather, scatter and exchange."""
    x = x * 2
    return (
        funcol.all_reduce(x, "sum", group) + 1,
        funcol.all_reduce(x, "avg", group) + 1,
        funcol.all_gather_tensor(x, 0, group) + 1,
        funcol.all_gather_tensor(x, 1, group) + 1,
        funcol.reduce_scatter_tensor(x, "sum", 0, group) + 1,
        funcol.broadcast(x, 1, group) + 1,
        funcol.all_to_all_single(x, None, None, group) + 1,
        *(y + 1 for y in funcol.all_reduce_coalesced([x, x[0]], "max", group)),
        *(y + 1 for y in funcol.all_gather_into_tensor_coalesced([x, x[0]], group)),
        *(y + 1 for y in funcol.reduce_scatter_tensor_coalesced([x, x], "sum", [0, 0], group)),
    )


def expected(rank: int, size: int, call: int) -> tuple[Tensor, ...]:
    xs = [2 * given(r, call) for r in range(size)]
    total, part = sum(xs), slice(rank * 6 // size, (rank + 1) * 6 // size)
    results = (
        total,
        total / size,
        torch.cat(xs),
        torch.cat(xs, 1),
        total[part],
        xs[1],
        torch.cat([x[part] for x in xs]),
        torch.stack(xs).amax(0),
        torch.stack(xs).amax(0)[0],
        torch.cat(xs),
        torch.cat([x[0] for x in xs]),
        total[part],
        total[part],
    )
    return tuple(result + 1 for result in results)


@pytest.mark.slow
@pytest.mark.parametrize("compiler", ("eager", "aot_eager"))
@on_ranks(2, 3)
def test_functional_collectives(me: Rank, compiler: str) -> None:
    with me.join():
        function = torch.compile(every_collective, backend=compiler, fullgraph=True)
        for call in range(3):
            results = function(given(me.rank, call), dist.group.WORLD)
            for actual, wanted in zip(results, expected(me.rank, me.size, call), strict=True):
                same(actual, wanted)


def fused(x: Tensor, group: dist.ProcessGroup) -> Tensor:
    return funcol.all_reduce(x * 2, "sum", group) + 1


def inductor(me: Rank, cache: Path) -> None:
    """The ranks share the cache, so that one compiles for all."""
    os.environ["TORCHINDUCTOR_CACHE_DIR"] = str(cache)
    torch._inductor.config.compile_threads = 1
    torch._inductor.config.cpp.vec_isa_ok = True  # or it compiles a program for each instruction set to find out
    torch._inductor.config.cpp_cache_precompile_headers = False
    with me.join(timeout=COMPILATION):
        function = torch.compile(fused, backend="inductor", fullgraph=True)
        for call in range(3):
            result = function(given(me.rank, call), dist.group.WORLD)
            same(result, expected(me.rank, me.size, call)[0])


@pytest.mark.slow
def test_functional_collectives_with_inductor(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(harness, "deadline", lambda: COMPILATION)
    run(inductor, 2, tmp_path)


class Model(nn.Module):
    """A class of our own, as torch does not compile the `forward` of its own classes by themselves."""

    def __init__(self) -> None:
        super().__init__()
        self.net = network()

    def forward(self, x: Tensor) -> Tensor:
        return self.net(x)


@pytest.mark.slow
@on_ranks(2)
def test_compiled_ddp(me: Rank) -> None:
    """Of small buckets, at whose borders torch cuts the graph."""
    graphs = []

    def counted(graph: torch.fx.GraphModule, inputs: list[Tensor]) -> Callable[..., Any]:
        graphs.append(graph)
        return aot_eager(graph, inputs)

    dist._DEFAULT_FIRST_BUCKET_BYTES = 1024
    with me.join():
        model = torch.compile(DistributedDataParallel(Model(), bucket_cap_mb=1024 / 2**20), backend=counted)
        optimizer = sgd(model)
        for step in range(STEPS):
            optimizer.zero_grad()
            loss_of(model, *batch(step, me.rank)).backward()
            optimizer.step()
        assert len(graphs) > 1
        close(model, trained_alone(me.size, STEPS))
