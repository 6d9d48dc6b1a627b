"""Lists of tensors that all_reduce_coalesced reduces as few: cut alike on all ranks, and put back where they were."""

from __future__ import annotations

import numpy as np
import pytest
import torch
import torch.distributed as dist
from distributed.harness import Rank, on_ranks, run
from torch import Tensor

import ringreduce
from ringreduce.errors import CollectiveMismatch, InvalidArgument

# Nothing, one, primes, what is just fused and just alone (64 KB), and enough for several bundles of 512 KB.
COUNTS = (0, 1, 7, 1021, 16383, 16384, 16385, 200_003, *(12_289,) * 30, 0, 3)
DTYPES = (torch.float32, torch.int64, torch.bfloat16, torch.float64)


def given(rank: int) -> list[Tensor]:
    """Of all counts in mixed dtypes; small whole numbers, exact in each, that differ by rank, tensor and element."""
    tensors = []
    for i, count in enumerate(COUNTS):
        noise = torch.Generator().manual_seed(100 * i + rank)
        tensors.append(torch.randint(-20, 21, (count,), generator=noise).to(DTYPES[i % len(DTYPES)]))
    return tensors


def strided(tensors: list[Tensor]) -> list[Tensor]:
    """The same values, in every second place of memory."""
    spread = [torch.zeros(t.numel(), 2, dtype=t.dtype) for t in tensors]
    for wide, tensor in zip(spread, tensors, strict=True):
        wide[:, 0] = tensor
        wide[:, 1] = 99
    return [wide[:, 0] for wide in spread]


@pytest.mark.parametrize("asynchronous", [False, True])
@on_ranks(1, 2, 3)
def test_a_list_of_many_dtypes_and_sizes(me: Rank, asynchronous: bool) -> None:
    with me.join():
        sums = [sum(tensors) for tensors in zip(*(given(r) for r in range(me.size)), strict=True)]
        for layout in (list, strided):
            tensors = layout(given(me.rank))
            work = ringreduce.all_reduce_coalesced(tensors, async_op=asynchronous)
            if asynchronous:
                work.wait()
                assert all(a is b or torch.equal(a, b) for a, b in zip(work.result(), tensors, strict=True))
            for actual, expected in zip(tensors, sums, strict=True):
                torch.testing.assert_close(actual, expected, rtol=0, atol=0)
            if layout is strided:
                assert all((t._base[:, 1] == 99).all() for t in tensors)


def rounded(me: Rank) -> list[bytes]:
    with me.join():
        noise = torch.Generator().manual_seed(me.rank)
        tensors = [torch.randn(count, generator=noise) for count in (1, 5, 3000, 16384, 12_000, 9)]
        dist.all_reduce_coalesced(tensors, dist.ReduceOp.AVG)
        return [tensor.numpy().tobytes() for tensor in tensors]


def test_all_ranks_have_the_same_bits() -> None:
    first, *others = run(rounded, 4)
    assert all(other == first for other in others)


@on_ranks(2)
def test_arrays_and_no_tensors_at_all(me: Rank) -> None:
    with me.join():
        tensors = [np.full(n, me.rank + 1.0) for n in (2, 3)]
        ringreduce.all_reduce_coalesced(tensors, dist.ReduceOp.MAX)
        assert [t.tolist() for t in tensors] == [[2.0] * 2, [2.0] * 3]
        assert ringreduce.all_reduce_coalesced([]) is None


@pytest.mark.parametrize(
    "lists",
    [
        ([torch.zeros(3), torch.zeros(5)], [torch.zeros(5), torch.zeros(3)]),
        ([torch.zeros(3), torch.zeros(5)], [torch.zeros(8)]),
        ([torch.zeros(3), torch.zeros(0)], [torch.zeros(3)]),
        ([torch.zeros(20_000), torch.zeros(5)], [torch.zeros(20_000), torch.zeros(6)]),
        ([torch.zeros(4), torch.zeros(4)], [torch.zeros(4), torch.zeros(4, dtype=torch.int32)]),
    ],
    ids=["order", "number", "an empty one", "after a large one", "dtype"],
)
@on_ranks(2)
def test_lists_that_differ_between_ranks(me: Rank, lists: tuple[list[Tensor], list[Tensor]]) -> None:
    with me.join(), pytest.raises(CollectiveMismatch):
        ringreduce.all_reduce_coalesced(lists[me.rank])


@on_ranks(2)
def test_tensors_that_share_memory(me: Rank) -> None:
    with me.join():
        whole = torch.ones(10)
        with pytest.raises(InvalidArgument, match="share memory"):
            dist.all_reduce_coalesced([whole[:6], whole[5:]])
        twice = torch.ones(10)
        dist.all_reduce_coalesced([twice, twice])  # once, as with Gloo
        assert twice.eq(2).all()
        with pytest.raises(InvalidArgument, match="share memory"):
            ringreduce.all_reduce_coalesced([whole[:5], whole.view(torch.int32)[4:]])
        dist.all_reduce_coalesced([whole[:5], whole[5:]])
        assert whole.eq(2).all()
        pairs = torch.ones(10, 2)  # of each, a float and an integer
        pairs[:, 1] = torch.full((10,), 7, dtype=torch.int32).view(torch.float32)
        ringreduce.all_reduce_coalesced([pairs[:, 0], pairs[:, 1].view(torch.int32)])
        assert pairs[:, 0].eq(2).all() and pairs[:, 1].view(torch.int32).eq(14).all()
