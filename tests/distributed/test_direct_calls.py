"""The short way of direct calls: it remembers the latest group, and leaves much to the general way."""

from __future__ import annotations

import gc
import threading
from typing import Any

import pytest
import torch
import torch.distributed as dist
from distributed.harness import Rank, run

import ringreduce
from ringreduce.errors import InvalidArgument


def summed(me: Rank, group: dist.ProcessGroup | None = None) -> None:
    x = torch.full((5,), me.rank + 1.0)
    ringreduce.all_reduce(x, group=group)
    assert x.tolist() == [me.size * (me.size + 1) / 2] * 5


def groups_that_end(me: Rank) -> None:
    for name in ("first", "second"):
        with me.join(name):
            summed(me)
            group: Any = dist.new_group(backend="ringreduce")
            summed(me, group)
            summed(me)
            dist.destroy_process_group(group)
            del group
            gc.collect()
            summed(me)
            group = dist.new_group(backend="ringreduce")
            summed(me, group)
            del group
        with pytest.raises(InvalidArgument, match="there is no default group"):
            ringreduce.all_reduce(torch.zeros(5))
        gc.collect()
        with pytest.raises(InvalidArgument, match="there is no default group"):
            ringreduce.broadcast(torch.zeros(5), 0)


def test_a_group_that_has_ended_is_not_remembered() -> None:
    run(groups_that_end, 2)


def wrong_arguments(me: Rank) -> None:
    with me.join():
        x = torch.ones(4)
        with pytest.raises(InvalidArgument, match="PREMUL_SUM"):
            ringreduce.all_reduce(x, dist.ReduceOp.PREMUL_SUM)
        for group in (0, False, ""):
            with pytest.raises(InvalidArgument, match="group is"):
                ringreduce.all_reduce(x, group=group)  # type: ignore[arg-type]
        for root in (2**40, -1, 2):
            with pytest.raises(InvalidArgument, match="root is"):
                ringreduce.broadcast(x, root)
        summed(me)


def test_wrong_arguments_are_named_and_the_group_lives_on() -> None:
    run(wrong_arguments, 2)


def groups_in_two_threads(me: Rank) -> None:
    with me.join():
        groups = [dist.new_group(backend="ringreduce") for _ in range(2)]
        failures: list[BaseException] = []

        def work(group: dist.ProcessGroup) -> None:
            try:
                for _ in range(300):
                    summed(me, group)
            except BaseException as failure:
                failures.append(failure)

        threads = [threading.Thread(target=work, args=(group,)) for group in groups]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        assert not failures, failures


def test_threads_with_a_group_each() -> None:
    run(groups_in_two_threads, 2)


def test_tensors_that_take_the_place_of_others() -> None:
    """The engine keeps calls that it has bound to tensors: other tensors at the same address are other calls."""
    run(same_addresses, 2)


def same_addresses(me: Rank) -> None:
    with me.join():
        memory = torch.zeros(4096, dtype=torch.uint8)
        for dtype in (torch.float32, torch.int64, torch.float16, torch.int8):
            for count in (1, 7, 64, 256):
                x = memory[: count * dtype.itemsize].view(dtype)
                for op in (dist.ReduceOp.SUM, dist.ReduceOp.MAX, dist.ReduceOp.SUM):
                    x.fill_(me.rank + 1)
                    ringreduce.all_reduce(x, op)
                    wanted = me.size * (me.size + 1) // 2 if op == dist.ReduceOp.SUM else me.size
                    assert x.tolist() == [wanted] * count
                x.fill_(me.rank)
                ringreduce.broadcast(x, 1)
                assert x.tolist() == [1] * count
