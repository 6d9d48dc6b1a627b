"""torch.ops.ringreduce: by themselves, traced, and in a decoder layer that is compiled as one graph."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from distributed import harness
from distributed.harness import Rank, on_ranks
from frameworks.common import same
from torch import Tensor, nn
from torch._dynamo.backends.debugging import aot_eager

from ringreduce import ops
from ringreduce.errors import CollectiveMismatch, InvalidArgument

COMPILATION = 150.0  # seconds for the C++ compiler, at most
REDUCTIONS: dict[str, Callable[[Tensor], Tensor]] = {
    "sum": lambda xs: xs.sum(0),
    "avg": lambda xs: xs.sum(0) / len(xs),
    "product": lambda xs: xs.prod(0),
    "min": lambda xs: xs.amin(0),
    "max": lambda xs: xs.amax(0),
}


def world() -> str:
    assert dist.group.WORLD is not None
    return dist.group.WORLD.group_name


def given(rank: int, size: int, call: int) -> Tensor:
    """Whole numbers, so that every result is exact; a part for each rank of the group."""
    return ((torch.arange(12.0 * size) * 3 + 5 * rank + 7 * call) % 13).view(2 * size, 6)


def every_op(x: Tensor, group: str, size: int, counts: tuple[list[int], list[int]]) -> dict[str, Tensor]:
    """With arithmetic before and after, for the compiler to fuse; writes no argument."""
    x = x * 2
    results = {}
    for op in REDUCTIONS:
        y = x + 0
        ops.all_reduce_(y, group, op)
        results[op] = y + 1
    parts = x.new_empty(2, 6)
    ops.reduce_scatter_into(parts, x, group)
    gathered = x.new_empty(size, *x.shape)
    ops.all_gather_into(gathered, x, group)
    exchanged, uneven = torch.empty_like(x), x.new_empty(sum(counts[1]), 6)
    ops.all_to_all_into(exchanged, x, group)
    ops.all_to_all_into(uneven, x, group, counts[1], counts[0])
    sent = x + 0
    ops.broadcast_(sent, group, size - 1)
    return {
        **results,
        "reduce_scatter": parts + 1,
        "all_gather": gathered + 1,
        "all_to_all": exchanged + 1,
        "uneven": uneven + 1,
        "broadcast": sent + 1,
    }


def uneven_counts(rank: int, size: int) -> tuple[list[int], list[int]]:
    """Rows that a rank sends to each rank and gets from each: one to the next rank, all others to itself."""
    sends, takes = [0] * size, [0] * size
    sends[(rank + 1) % size], takes[(rank - 1) % size] = 1, 1
    sends[rank] += 2 * size - 1
    takes[rank] += 2 * size - 1
    return sends, takes


def expected(rank: int, size: int, call: int) -> dict[str, Tensor]:
    xs = 2 * torch.stack([given(r, size, call) for r in range(size)])
    mine = slice(2 * rank, 2 * rank + 2)
    uneven: list[Tensor] = []
    for r in range(size):
        sends, _ = uneven_counts(r, size)
        uneven.append(xs[r].split(sends)[rank])
    results = {
        **{op: reduce(xs) for op, reduce in REDUCTIONS.items()},
        "reduce_scatter": xs.sum(0)[mine],
        "all_gather": xs,
        "all_to_all": torch.cat([x[mine] for x in xs]),
        "uneven": torch.cat(uneven),
        "broadcast": xs[-1],
    }
    return {name: result + 1 for name, result in results.items()}


@pytest.mark.slow
@pytest.mark.parametrize("compiler", (None, "aot_eager"))
@on_ranks(2, 3)
def test_every_op(me: Rank, compiler: str | None) -> None:
    traced: list[str] = []

    def noted(graph: torch.fx.GraphModule, inputs: list[Tensor]) -> Callable[..., Any]:
        traced.extend(str(node.target) for node in graph.graph.nodes)
        return aot_eager(graph, inputs)

    function = torch.compile(every_op, backend=noted, fullgraph=True) if compiler else every_op
    with me.join():
        for call in range(3):
            counts = uneven_counts(me.rank, me.size)
            results = function(given(me.rank, me.size, call), world(), me.size, counts)
            wanted = expected(me.rank, me.size, call)
            assert results.keys() == wanted.keys()
            for name, result in results.items():
                same(result, wanted[name])
    if compiler:
        assert sum("all_reduce_" in each for each in traced) == len(REDUCTIONS), traced


@on_ranks(2)
def test_pass_opcheck(me: Rank) -> None:
    """torch's own check: of what is written, of fakes, and of compiled graphs."""
    with me.join():
        group, x = world(), given(me.rank, me.size, 0)
        kernels = torch.ops.ringreduce
        calls: list[tuple[Any, tuple[Any, ...]]] = [
            (kernels.all_reduce_, (x, group, "sum")),
            (kernels.broadcast_, (x, group, 1)),
            (kernels.all_gather_into, (x.new_empty(me.size, *x.shape), x, group)),
            (kernels.reduce_scatter_into, (x.new_empty(2, 6), x, group, "max")),
            (kernels.all_to_all_into, (torch.empty_like(x), x, group)),
        ]
        for kernel, arguments in calls:
            torch.library.opcheck(kernel.default, arguments)


@on_ranks(2)
def test_wrong_arguments_are_named(me: Rank) -> None:
    x = torch.ones(4)
    with me.join():
        group = world()

        def reduced(x: torch.Tensor) -> torch.Tensor:
            y = x * 1
            ops.all_reduce_(y, group)
            return y.sum()

        for function, message in (
            (lambda: ops.all_reduce_(x, "nobody"), "group is 'nobody', and no process group has this name"),
            (lambda: ops.all_reduce_(x, group, "mean"), "op is 'mean'; it must be 'sum', 'avg'"),
            (lambda: ops.all_reduce_(x.to(torch.float8_e8m0fnu), group), "float8_e8m0fnu"),
            (lambda: ops.broadcast_(x, group, 2), "root is 2; it must be a rank of the group, from 0 to 1"),
            (lambda: ops.all_gather_into(x.new_empty(8).double(), x, group), "of float64 and the input of float32"),
            (lambda: ops.all_gather_into(x.new_empty(7), x, group), "7"),
            (lambda: ops.reduce_scatter_into(x.new_empty(3), x, group), "3"),
            (lambda: ops.all_reduce_(x.clone().requires_grad_(), group), "all_reduce_: .* this op has no gradient"),
            (lambda: torch.func.grad(reduced)(x), "this op has no gradient"),
            (lambda: torch.func.jvp(reduced, (x,), (x,)), "this op has no gradient"),
            (lambda: ops.all_gather_into(x.new_empty(8), x.clone().requires_grad_(), group), "has no gradient"),
        ):
            with pytest.raises(InvalidArgument, match=message):
                function()
        with pytest.raises(CollectiveMismatch):
            ops.all_to_all_into(x.clone(), x, group, [4, 0], [2, 2])
        compiled = torch.compile(lambda x: ops.all_reduce_(x, group, "mean"), backend="eager", fullgraph=True)
        with pytest.raises(Exception, match="op is 'mean'"):
            compiled(x)
        ops.all_reduce_(x, group)  # the group is in order
        assert x.tolist() == [2.0] * 4
        other = dist.new_group(backend="gloo")
        with pytest.raises(InvalidArgument, match="group's backend is 'gloo'; it must be 'ringreduce'"):
            ops.all_reduce_(x, other.group_name)
        dist.barrier()  # Gloo fails a peer that ends first
        del other
    with pytest.raises(InvalidArgument, match=r"group is .* or has been destroyed"):
        ops.all_reduce_(x, group)


@pytest.mark.parametrize("debug", (False, True))
@on_ranks(2)
def test_of_other_groups(me: Rank, debug: bool) -> None:
    """Behind torch's wrapper for debugging, in a group of fewer ranks, and under a name that an earlier group had."""
    if debug:
        dist.set_debug_level(dist.DebugLevel.DETAIL)
    for name in ("first", "second"):
        with me.join(name):
            halves = [dist.new_group([rank], backend="ringreduce") for rank in range(me.size)]
            for group, size in ((dist.group.WORLD, me.size), (halves[me.rank], 1)):
                assert isinstance(group, dist.ProcessGroup)
                x = torch.ones(3)
                ops.all_reduce_(x, group.group_name)
                assert x.tolist() == [float(size)] * 3
            del group, halves


class Reduced(torch.autograd.Function):
    """What a row-parallel layer does to its result; the gradient is the same on all ranks already."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, group: str) -> Tensor:
        y = x.clone()
        ops.all_reduce_(y, group)
        return y

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None]:
        return grads[0], None


@on_ranks(2)
def test_with_gradients_of_ones_own(me: Rank) -> None:
    def loss(x: Tensor, weight: Tensor, group: str) -> Tensor:
        return Reduced.apply(x * weight, group).square().sum()

    with me.join():
        weight = torch.full((3,), me.rank + 1.0, requires_grad=True)
        x = torch.arange(3.0)
        torch.compile(loss, backend="aot_eager", fullgraph=True)(x, weight, world()).backward()
        assert weight.grad is not None
        same(weight.grad, 2 * 3 * x * x)
        # Autograd hears of what is written.
        saved = x * weight
        ops.all_reduce_(x, world())
        with pytest.raises(RuntimeError, match="modified by an inplace operation"):
            saved.sum().backward()


HEADS, WIDTH = 4, 32


class Decoder(nn.Module):
    """A decoder layer, cut over `size` ranks by heads and by features of its network; whole if `size` is 1."""

    def __init__(self, rank: int, size: int, group: str) -> None:
        super().__init__()
        self.group, self.size, self.heads = group, size, HEADS // size
        torch.manual_seed(0)

        def cut(rows: int, columns: int, dim: int) -> nn.Parameter:
            whole = torch.randn(rows, columns, dtype=torch.float64) / 8
            return nn.Parameter(whole.chunk(size, dim)[rank].contiguous(), requires_grad=False)

        self.q, self.k, self.v = (cut(WIDTH, WIDTH, 0) for _ in range(3))
        self.out = cut(WIDTH, WIDTH, 1)
        self.gate, self.up = cut(2 * WIDTH, WIDTH, 0), cut(2 * WIDTH, WIDTH, 0)
        self.down = cut(WIDTH, 2 * WIDTH, 1)
        self.vocabulary = cut(2 * WIDTH, WIDTH, 0)

    def summed(self, x: Tensor) -> Tensor:
        if self.size > 1:
            ops.all_reduce_(x, self.group)
        return x

    def forward(self, x: Tensor) -> Tensor:
        """(tokens, WIDTH) -> the scores of all words."""
        y = nn.functional.rms_norm(x, (WIDTH,))
        q, k, v = (
            nn.functional.linear(y, w).view(len(x), self.heads, -1).transpose(0, 1) for w in (self.q, self.k, self.v)
        )
        attended = nn.functional.scaled_dot_product_attention(q, k, v, is_causal=True).transpose(0, 1).flatten(1)
        x = x + self.summed(nn.functional.linear(attended, self.out))
        y = nn.functional.rms_norm(x, (WIDTH,))
        y = nn.functional.silu(nn.functional.linear(y, self.gate)) * nn.functional.linear(y, self.up)
        x = x + self.summed(nn.functional.linear(y, self.down))
        scores = nn.functional.linear(x, self.vocabulary)
        if self.size == 1:
            return scores
        gathered = scores.new_empty(self.size, *scores.shape)
        ops.all_gather_into(gathered, scores, self.group)
        return gathered.transpose(0, 1).flatten(1)


@pytest.mark.parametrize("compiler", ("aot_eager", pytest.param("inductor", marks=pytest.mark.slow)))
@pytest.mark.usefixtures("patient")
@on_ranks(2)
def test_decoder_layer_as_one_graph(me: Rank, compiler: str, tmp_path: Path) -> None:
    os.environ["TORCHINDUCTOR_CACHE_DIR"] = str(tmp_path / str(me.rank))
    torch._inductor.config.compile_threads = 1
    torch._inductor.config.cpp.vec_isa_ok = True  # or it compiles a program for each instruction set to find out
    torch._inductor.config.cpp_cache_precompile_headers = False
    with me.join(timeout=COMPILATION), torch.inference_mode():
        layer, whole = Decoder(me.rank, me.size, world()), Decoder(0, 1, "")
        compiled = torch.compile(layer, backend=compiler, fullgraph=True, dynamic=False)
        for call in range(3):
            x = torch.randn(5, WIDTH, generator=torch.Generator().manual_seed(call), dtype=torch.float64)
            result = compiled(x)
            torch.testing.assert_close(result, layer(x), rtol=0, atol=1e-12)
            torch.testing.assert_close(result, whole(x), rtol=0, atol=1e-12)
            assert len(result.unique()) > 100


@pytest.fixture
def patient(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.setattr(harness, "deadline", lambda: COMPILATION)
    yield
