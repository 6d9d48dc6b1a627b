"""Fewer bytes between hosts, call by call, and error feedback: with it nothing is lost, only late."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed as dist
from distributed.harness import Rank, on_ranks, run
from distributed.test_hosts import Hosts, normal, placed

import ringreduce
from ringreduce.errors import CollectiveMismatch, InvalidArgument
from ringreduce.groups.lookup import backend_of

COUNT = 40_007
RING = ringreduce.Options(algorithms="all_reduce:ring")


def small_beside_large(me: Rank, feedback: bool) -> np.ndarray:
    """The sum of 200 averages of 0.003 in blocks whose largest value is 1, which int8 rounds to multiples of 1/64."""
    total = torch.zeros(COUNT)
    with me.join(options=RING):
        rests = ringreduce.Feedback() if feedback else None
        for _ in range(200):
            values = torch.full((COUNT,), 0.003)
            values[::32] = 1.0
            ringreduce.all_reduce(values, dist.ReduceOp.AVG, wire_dtype="int8", feedback=rests)
            total += values
    small = torch.ones(COUNT, dtype=torch.bool)
    small[::32] = False
    small[-64:] = False  # the end of a chunk may be too short to be packed
    small[COUNT // 2 - 64 : COUNT // 2 + 64] = False
    return total[small].numpy()


def test_int8_loses_small_values_beside_large_ones() -> None:
    for found in run(placed, 2, None, small_beside_large, False):
        assert (found == 0).all()


def test_with_feedback_they_arrive() -> None:
    for found in run(placed, 2, None, small_beside_large, True):
        assert np.abs(found - 0.6).max() <= 1 / 64


def memory_of_rests(me: Rank, count: int) -> int:
    with me.join():
        rests = ringreduce.Feedback()
        ringreduce.all_reduce(normal(me.rank, count), wire_dtype="int8", feedback=rests)
        return rests.bytes


def test_a_rank_keeps_rests_of_what_it_rounds_alone() -> None:
    """Each host rounds every element once: as its part of the sum, or as the result."""
    count = 1_000_007
    assert run(placed, 2, None, memory_of_rests, count) == [4 * count] * 2
    found = run(placed, 4, [0, 0, 1, 1], memory_of_rests, count)
    assert sum(found[:2]) == sum(found[2:]) == 4 * count and min(found) > 0


CALLS = 16
BITS = {"bfloat16": 2.0**-8, "int8": 1 / 127, "int4": 1 / 7}
"""By wire_dtype: the error of one rounding, as a part of the largest value that is packed with it."""


def errors_of_sums(me: Rank, wire_dtype: str, op: dist.ReduceOp.RedOpType) -> dict[tuple[str, bool], Any]:
    """By algorithm, with and without feedback: the sum of many results, for inputs that do not change."""
    found = {}
    for algorithm in ("ring", "two_shot", "tree", "halving_doubling"):
        with me.join(algorithm, options=ringreduce.Options(algorithms=f"all_reduce:{algorithm}")):
            for rests in (None, ringreduce.Feedback()):
                total = torch.zeros(COUNT, dtype=torch.float64)
                for _ in range(CALLS):
                    values = normal(me.rank, COUNT)
                    ringreduce.all_reduce(values, op, wire_dtype=wire_dtype, feedback=rests)
                    total += values
                found[algorithm, rests is not None] = total.numpy()
            assert rests is not None and rests.bytes <= 4 * COUNT  # of one tensor
    return found


@pytest.mark.slow
@pytest.mark.parametrize("wire_dtype", BITS)
@pytest.mark.parametrize("hosts", (None, [0, 0, 1, 1], [0, 1, 1, 1]), ids=("tcp", "2 x 2", "uneven"))
def test_the_error_of_many_calls_is_that_of_one(hosts: Hosts, wire_dtype: str) -> None:
    found = run(placed, 4, hosts, errors_of_sums, wire_dtype, dist.ReduceOp.SUM)
    inputs = torch.stack([normal(rank, COUNT) for rank in range(4)]).double()
    most = torch.nn.functional.max_pool1d(inputs.abs().sum(0)[None], 63, 1, 31)[0]
    bound = (2 * 4 * BITS[wire_dtype] * most).numpy()  # of 4 roundings, whose inputs have the rests of 4 others
    for (algorithm, fed), total in found[0].items():
        assert all(np.array_equal(total, other[algorithm, fed]) for other in found[1:]), f"{algorithm}: ranks differ"
        error = np.abs(total - CALLS * inputs.sum(0).numpy())
        if fed:
            assert (error <= bound + 1e-3).all(), algorithm
        else:
            assert error.mean() > 4 * np.abs(found[0][algorithm, True] - CALLS * inputs.sum(0).numpy()).mean(), (
                algorithm
            )


@on_ranks(2, through=(placed, None))
def test_rests_are_dropped_with_the_call_that_left_them(me: Rank) -> None:
    zeros = torch.zeros(COUNT)

    def arrives(op: dist.ReduceOp.RedOpType = dist.ReduceOp.SUM, count: int = COUNT, group: Any = None) -> bool:
        values = zeros[:count].clone()
        ringreduce.all_reduce(values, op, group, wire_dtype="int8", feedback=rests)
        return bool(values.any())

    with me.join(options=RING):
        rests = ringreduce.Feedback()
        other = dist.new_group(backend="ringreduce")

        def leaves_rests() -> None:
            ringreduce.all_reduce(normal(me.rank, COUNT), wire_dtype="int8", feedback=rests)

        leaves_rests()
        assert arrives()
        leaves_rests()
        assert not arrives(op=dist.ReduceOp.AVG)
        leaves_rests()
        assert not arrives(count=COUNT - 32)
        leaves_rests()
        assert not arrives(group=other)
        leaves_rests()
        rests.reset()
        assert rests.bytes == 0
        assert not arrives()


@on_ranks(2, through=(placed, None))
def test_what_is_not_finite_does_not_come_back(me: Rank) -> None:
    with me.join(options=RING):
        rests = ringreduce.Feedback()
        values = torch.ones(COUNT)
        values[1000] = torch.inf
        ringreduce.all_reduce(values, wire_dtype="int8", feedback=rests)
        assert not values[1000].isfinite()
        values = torch.ones(COUNT)
        ringreduce.all_reduce(values, wire_dtype="int8", feedback=rests)
        found = values.numpy()
        assert (found == 2).all()


def narrow(me: Rank, dtype: torch.dtype) -> Any:
    with me.join(options=RING):
        values = normal(me.rank, COUNT).to(dtype)
        apart = normal(me.rank, 2 * COUNT)[::2].to(dtype).repeat_interleave(2)[::2]  # not contiguous
        work = ringreduce.all_reduce(values, async_op=True, wire_dtype="int8", feedback=ringreduce.Feedback())
        work.wait()
        ringreduce.all_reduce(apart, wire_dtype="int8")
        assert values.dtype == apart.dtype == dtype
        return values.float().numpy(), apart.float().numpy()


@pytest.mark.parametrize("dtype", (torch.bfloat16, torch.float16))
def test_narrow_floats(dtype: torch.dtype) -> None:
    (first, apart), second = run(placed, 2, None, narrow, dtype)
    assert np.array_equal(first, second[0]) and np.array_equal(apart, second[1])
    right = sum(normal(rank, COUNT).to(dtype).float() for rank in range(2)).numpy()
    assert 1e-3 < np.abs(first - right).max() < 2 * 8 / 127


def sent(me: Rank, group_dtype: str, wire_dtype: str | None) -> int:
    with me.join(options=ringreduce.Options(wire_dtype=group_dtype)):
        before = sum(link.bytes_out for link in backend_of(None).links())
        ringreduce.all_reduce(torch.ones(2_000_000), wire_dtype=wire_dtype)
        return sum(link.bytes_out for link in backend_of(None).links()) - before


@pytest.mark.parametrize(
    ("group_dtype", "wire_dtype", "share"),
    (("int4", None, 17 / 128), ("float32", "int4", 17 / 128), ("int4", "bfloat16", 1 / 2), ("int8", "float32", 1)),
)
def test_each_call_may_have_its_own(group_dtype: str, wire_dtype: str | None, share: float) -> None:
    bytes_sent = sum(run(placed, 2, None, sent, group_dtype, wire_dtype))
    assert share <= bytes_sent / (2 * 8_000_000) < 1.03 * share


@on_ranks(2, through=(placed, None))
def test_one_feedback_in_two_groups(me: Rank) -> None:
    """Calls of two groups with one Feedback, at the same time."""
    with me.join(options=RING):
        groups = [dist.group.WORLD, dist.new_group(backend="ringreduce")]
        feedback = ringreduce.Feedback()
        for _ in range(20):
            tensors = [normal(me.rank, COUNT) for _ in groups]
            works = [
                ringreduce.all_reduce(x, group=group, async_op=True, wire_dtype="int8", feedback=feedback)
                for x, group in zip(tensors, groups, strict=True)
            ]
            for work in works:
                assert work is not None
                work.wait()
            right = sum(normal(rank, COUNT) for rank in range(2))
            assert all((x - right).abs().max() < 0.5 for x in tensors)


@on_ranks(2, through=(placed, None))
def test_ranks_with_different_wire_dtypes(me: Rank) -> None:
    with me.join(), pytest.raises(CollectiveMismatch) as caught:
        ringreduce.all_reduce(torch.ones(COUNT), wire_dtype=("int8", "int4")[me.rank])
    message = str(caught.value)
    assert "wire_dtype=int8" in message and "wire_dtype=int4" in message


@on_ranks(2, through=(placed, None))
def test_bad_arguments(me: Rank) -> None:
    with me.join():
        for tensor in (torch.ones(100, dtype=torch.int32), torch.ones(100, dtype=torch.float64)):
            with pytest.raises(InvalidArgument, match=r"tensor has dtype .* must be float32, float16 or bfloat16"):
                ringreduce.all_reduce(tensor, wire_dtype="int8")
        for wrong, said in (
            ({"wire_dtype": torch.int8}, "wire_dtype is torch.int8; it must be a name"),
            ({"feedback": True}, "feedback is True; it must be a ringreduce.Feedback"),
            ({"wire_dtype": "int8", "op": ringreduce.Op.torch(torch.add)}, "it must be a torch.distributed.ReduceOp"),
        ):
            with pytest.raises(InvalidArgument, match=said):
                ringreduce.all_reduce(torch.ones(64), **wrong)
        with pytest.raises(InvalidArgument, match="op is no sum"):
            ringreduce.all_reduce(torch.ones(64), dist.ReduceOp.MAX, wire_dtype="int8", feedback=ringreduce.Feedback())
        with pytest.raises(InvalidArgument, match="wire_dtype is 'int5'"):
            ringreduce.all_reduce(torch.ones(100), wire_dtype="int5")
        values = torch.ones(100)
        ringreduce.all_reduce(values)
        assert (values == 2).all()
