"""The short way of direct calls: it remembers the latest group, and leaves much to the general way."""

from __future__ import annotations

import functools
import gc
import threading
import time
from datetime import timedelta
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed as dist
from distributed.harness import Rank, in_threads, run

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
            with pytest.raises(InvalidArgument, match=f"src is {root}"):
                ringreduce.broadcast(x, root)
        if me.rank == 0:
            with pytest.raises(InvalidArgument, match="gather_list is None on rank 0"):
                ringreduce.gather(x)
        with pytest.raises(InvalidArgument, match="op is 'sum'"):
            ringreduce.all_reduce(x, "sum", async_op=True)  # type: ignore[arg-type]
        with pytest.raises(InvalidArgument, match="src is '0'"):
            ringreduce.broadcast(x, "0", async_op=True)  # type: ignore[arg-type]
        summed(me)


def test_wrong_arguments_are_named_and_the_group_lives_on() -> None:
    run(wrong_arguments, 2)


def groups_in_two_threads(me: Rank) -> None:
    with me.join():
        groups = [dist.new_group(backend="ringreduce") for _ in range(2)]

        def work(group: dist.ProcessGroup) -> None:
            for _ in range(300):
                summed(me, group)

        in_threads([functools.partial(work, group) for group in groups])


def test_threads_with_a_group_each() -> None:
    run(groups_in_two_threads, 2)


def other_threads_run_while_it_waits(me: Rank) -> None:
    with me.join():
        summed(me)
        if me.rank == 1:
            me.store.wait(["the call of rank 0 is under way"])
            return summed(me)
        begun = threading.Event()

        def tell() -> None:
            begun.wait()
            time.sleep(0.05)  # needs the GIL again
            me.store.set("the call of rank 0 is under way", "")

        in_threads([tell, lambda: (begun.set(), summed(me))])


def test_other_threads_run_while_a_small_call_waits() -> None:
    run(other_threads_run_while_it_waits, 2)


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


def global_ranks(me: Rank) -> None:
    with me.join():
        group = dist.new_group([1, 2], backend="ringreduce")
        if me.rank == 0:
            return
        other = 3 - me.rank
        for named in ({"src": 2}, {"group_src": 1}):
            x = torch.full((3,), float(me.rank))
            ringreduce.broadcast(x, group=group, **named)
            assert x.tolist() == [2.0] * 3
            work = ringreduce.broadcast(x, group=group, async_op=True, **named)
            assert work is not None and work.wait()
            part = torch.zeros(1)
            dealt = [torch.tensor([5.0]), torch.tensor([6.0])] if me.rank == 2 else None
            ringreduce.scatter(part, dealt, group=group, **named)
            assert part.item() == 4 + me.rank
        for named in ({"dst": 1}, {"group_dst": 0}):
            x = torch.full((3,), float(me.rank))
            ringreduce.reduce(x, group=group, **named)
            assert x.tolist() == [3.0 if me.rank == 1 else 2.0] * 3
            parts = [torch.zeros(1), torch.zeros(1)]
            ringreduce.gather(torch.tensor([float(me.rank)]), parts if me.rank == 1 else None, group=group, **named)
            assert [part.item() for part in parts] == ([1.0, 2.0] if me.rank == 1 else [0.0, 0.0])
        if me.rank == 1:
            ringreduce.send(torch.ones(2), 2, group, 7)
            ringreduce.send(torch.ones(2), group=group, group_dst=1)
            ringreduce.isend(torch.ones(2), 2, group).wait()
        else:
            x = torch.zeros(2)
            assert ringreduce.recv(x, None, group, 7) == 1 and x.tolist() == [1.0, 1.0]
            assert ringreduce.recv(x, group=group, group_src=0) == 1
            ringreduce.irecv(x, group=group).wait()
        with pytest.raises(InvalidArgument, match=r"src is 0; it must be the global rank of a member: \[1, 2\]"):
            ringreduce.broadcast(torch.zeros(1), 0, group)
        with pytest.raises(InvalidArgument, match="dst is 1 and group_dst is 0"):
            ringreduce.reduce(torch.zeros(1), 1, group=group, group_dst=0)
        with pytest.raises(InvalidArgument, match="dst is None"):
            ringreduce.send(torch.zeros(1), group=group)
        objects: list[object] = [None, None]
        ringreduce.all_gather_object(objects, {"rank": me.rank}, group)
        assert objects == [{"rank": 1}, {"rank": 2}]
        array = np.zeros(2, np.float32)
        messages = [
            ringreduce.P2POp(ringreduce.isend, np.full(2, me.rank, np.float32), other, group),
            ringreduce.P2POp(ringreduce.irecv, array, other, group),
        ]
        for each in ringreduce.batch_isend_irecv(messages):
            each.wait()
        assert array.tolist() == [other, other]


def test_ranks_are_those_of_the_world_or_by_name_of_the_group() -> None:
    run(global_ranks, 3)


def as_torch_takes_it(me: Rank) -> None:
    with me.join():
        x, y = torch.arange(2.0) + me.rank, torch.zeros(2)
        ringreduce.all_to_all_single(y, x, None, None)
        assert y.tolist() == [me.rank, me.rank + 1.0]
        ringreduce.all_gather_single(output_tensor=(both := torch.zeros(4)), input_tensor=x)
        assert both.tolist() == [0.0, 1.0, 1.0, 2.0]
        ringreduce.reduce_scatter_single(output=(one := torch.zeros(1)), input=x)
        assert one.item() == 1 + 2 * me.rank
        ringreduce.barrier(None, False, None, timedelta(seconds=20))
        for out in (torch.zeros(2), np.zeros(2, np.float32)):
            ringreduce.all_reduce(x, out=out)
            assert out.tolist() == [1.0, 3.0] and x.tolist() == [me.rank, me.rank + 1.0]
        ringreduce.reduce(x, 1, out=y)
        assert y.tolist() == ([1.0, 3.0] if me.rank == 1 else x.tolist())
        with pytest.raises(InvalidArgument, match=r"out is \(3,\) of torch.float32"):
            ringreduce.all_reduce(x, out=torch.zeros(3))
        zeros = ringreduce.zeros(3, 2, dtype=torch.int32)
        like = ringreduce.empty_like(zeros)
        assert zeros.tolist() == [[0, 0]] * 3 and (like.shape, like.dtype) == (zeros.shape, zeros.dtype)
        counted = ringreduce.stats(dist.group.WORLD)
        assert counted == ringreduce.stats()[dist.group.WORLD.group_name] and counted["all_reduce"].calls == 2
        for size in (4, 100_000):  # fused with others, and alone
            t, u = torch.full((size,), me.rank + 1.0), torch.ones(size)
            ringreduce.all_reduce_coalesced([t, u, t])
            assert t.unique().tolist() == [3.0] and u.unique().tolist() == [2.0]
            with pytest.raises(InvalidArgument, match="share memory"):
                ringreduce.all_reduce_coalesced([t, t[1:]])


def test_what_torch_takes() -> None:
    run(as_torch_takes_it, 2)


def gathered_shards(me: Rank) -> list[float] | None:
    from torch.distributed._shard import sharded_tensor
    from torch.distributed._shard.sharding_spec import ChunkShardingSpec

    with me.join():
        spec = ChunkShardingSpec(dim=0, placements=[f"rank:{rank}/cpu" for rank in range(me.size)])
        sharded = sharded_tensor.ones(spec, 4)
        out = torch.zeros(4) if me.rank == 0 else None
        sharded.gather(0, out)
        return out.tolist() if out is not None else None


def test_torch_gathers_shards_on_a_device_that_it_has() -> None:
    assert run(gathered_shards, 2) == [[1.0] * 4, None]
