"""Dtypes that torch computes little or nothing with: every call that does not reduce moves their bits."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
import torch.distributed as dist
from bodies.collectives import DTYPES
from distributed.harness import Rank, on_ranks, run

import ringreduce
from ringreduce.errors import CollectiveMismatch, InvalidArgument

MOVED = sorted(
    {d for d in vars(torch).values() if isinstance(d, torch.dtype) and not str(d).startswith("torch.q")} - {*DTYPES},
    key=str,
)
OPTIONS = {
    "shared memory": ringreduce.Options(engine="channel_bytes=64K,least_slice_bytes=64"),
    "gloo": ringreduce.Options(transport="gloo"),
}
COUNTS = (1, 7, 300)


def codes(tensor: torch.Tensor) -> torch.Tensor:
    """The same elements as integers, which torch copies and compares."""
    return tensor.view({1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}[tensor.element_size()])


def make(dtype: torch.dtype, count: int, seed: int, strided: bool = False) -> torch.Tensor:
    """Random bits."""
    generator = torch.Generator().manual_seed(seed)
    bits = torch.randint(0, 256, (2 * count * dtype.itemsize,), dtype=torch.uint8, generator=generator)
    return bits.view(dtype)[::2] if strided else bits.view(dtype)[:count]


class Calls:
    """The calls of one dtype: each fills tensors, which must then have the codes of others."""

    def __init__(self, me: Rank, dtype: torch.dtype, count: int, strided: bool) -> None:
        self.me, self.dtype, self.count, self.strided = me, dtype, count, strided

    def of(self, rank: int, times: int = 1) -> torch.Tensor:
        """What a rank gives."""
        return make(self.dtype, self.count * times, rank, self.strided)

    def out(self, times: int = 1) -> torch.Tensor:
        return make(self.dtype, self.count * times, 99, self.strided)

    def check(self, name: str, actual: list[torch.Tensor], expected: list[torch.Tensor]) -> None:
        for a, e in zip(actual, expected, strict=True):
            assert torch.equal(codes(a), codes(e)), f"{name} of {self.count} {self.dtype}, strided: {self.strided}"

    def every(self) -> None:
        me, size = self.me, self.me.size
        tensor = self.of(me.rank)
        dist.broadcast(tensor, src=1)
        self.check("broadcast", [tensor], [self.of(1)])
        outputs = [self.out() for _ in range(size)]
        dist.all_gather(outputs, self.of(me.rank))
        self.check("all_gather", outputs, [self.of(r) for r in range(size)])
        flat = self.out(size)
        ringreduce.all_gather_single(flat, self.of(me.rank))
        self.check("all_gather_single", list(flat.chunk(size)), [self.of(r) for r in range(size)])
        outputs = [self.out() for _ in range(size)] if me.rank == 0 else []
        dist.gather(self.of(me.rank), outputs or None, dst=0)
        self.check("gather", outputs, [self.of(r) for r in range(size)] if me.rank == 0 else [])
        tensor = self.out()
        dist.scatter(tensor, [self.of(r + 10) for r in range(size)] if me.rank == 1 else None, src=1)
        self.check("scatter", [tensor], [self.of(me.rank + 10)])
        outputs = [self.out() for _ in range(size)]
        dist.all_to_all(outputs, [self.of(10 * me.rank + r) for r in range(size)])
        self.check("all_to_all", outputs, [self.of(10 * r + me.rank) for r in range(size)])
        flat = self.out(size)
        dist.all_to_all_single(flat, self.of(me.rank, size))
        self.check(
            "all_to_all_single", list(flat.chunk(size)), [self.of(r, size).chunk(size)[me.rank] for r in range(size)]
        )
        group = dist.group.WORLD
        assert group is not None
        pair = [self.out(size), self.out(size)]
        group.allgather_into_tensor_coalesced(pair, [self.of(me.rank), self.of(me.rank + 20)]).wait()
        expected = [[self.of(r + more) for r in range(size)] for more in (0, 20)]
        for of_pair, wanted in zip(pair, expected, strict=True):
            self.check("all_gather_into_tensor_coalesced", list(of_pair.chunk(size)), wanted)

    def messages(self) -> None:
        me, received = self.me, self.out()
        before, after = (me.rank - 1) % me.size, (me.rank + 1) % me.size
        ops = [dist.P2POp(dist.isend, self.of(me.rank), after), dist.P2POp(dist.irecv, received, before)]
        for work in dist.batch_isend_irecv(ops):
            work.wait()
        self.check("isend and irecv", [received], [self.of(before)])


def moved(me: Rank, transport: str) -> None:
    with me.join(options=OPTIONS[transport]):
        for dtype in MOVED:
            for count in COUNTS:
                for strided in (False, True):
                    calls = Calls(me, dtype, count, strided)
                    calls.every()
                    calls.messages()


@pytest.mark.slow
@pytest.mark.parametrize("transport", OPTIONS)
def test_bits_are_moved(transport: str) -> None:
    assert {"torch.uint16", "torch.uint64", "torch.float8_e8m0fnu", "torch.uint4"} <= {str(d) for d in MOVED}
    run(moved, 3, transport)


REDUCTIONS: dict[str, Callable[[torch.Tensor], object]] = {
    "all_reduce": dist.all_reduce,
    "reduce": lambda t: dist.reduce(t, 0),
    "reduce_scatter": lambda t: ringreduce.reduce_scatter_single(t[: len(t) // 2].clone(), t),
    "all_reduce of one in a list": lambda t: ringreduce.all_reduce_coalesced([t]),
    "all_reduce without torch's dispatch": ringreduce.all_reduce,
    "all_reduce, asynchronous": lambda t: dist.all_reduce(t, async_op=True),
}


@pytest.mark.parametrize("transport", OPTIONS)
@on_ranks(2)
def test_reductions_are_refused(me: Rank, transport: str) -> None:
    with me.join(options=OPTIONS[transport]):
        for dtype in (torch.uint16, torch.uint32, torch.uint64, torch.float8_e5m2fnuz, torch.bits8):
            name = str(dtype).removeprefix("torch.")
            for call, reduction in REDUCTIONS.items():
                with pytest.raises(InvalidArgument, match=f"of dtype {name} can be moved, but not reduced; convert"):
                    reduction(make(dtype, 4, 1))
                assert True, call
        sparse = torch.sparse_coo_tensor([[0, 2]], torch.ones(2).to(torch.uint16), (4,))
        with pytest.raises(InvalidArgument, match="uint16 can be moved, but not reduced"):
            dist.all_reduce(sparse)
        with pytest.raises(InvalidArgument, match=r"dequantize\(\)"):
            ringreduce.broadcast(torch.quantize_per_tensor(torch.ones(2), 0.5, 0, torch.quint8), 0)
        dist.barrier()  # the group is as it was


@on_ranks(2)
def test_dtypes_of_one_size_are_not_mixed(me: Rank) -> None:
    with me.join():
        tensor = make(torch.uint16 if me.rank == 0 else torch.int16, 4, 1)
        with pytest.raises(CollectiveMismatch, match=r"dtype=u?int16.*dtype=u?int16"):
            dist.broadcast(tensor, 0)
            dist.barrier()
