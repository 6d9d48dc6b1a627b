"""What torch.distributed offers beside collectives: batches, coalescing, splitting, shrinking, monitored barriers."""

from __future__ import annotations

import time
from datetime import timedelta
from typing import Any

import pytest
import torch
import torch.distributed as dist
from distributed.harness import Rank

import ringreduce
from ringreduce.errors import Aborted, CollectiveTimeout, InvalidArgument, PeerLost

CPU = torch.device("cpu")


def backend() -> Any:
    return dist.group.WORLD._get_backend(CPU)  # type: ignore[union-attr]


def batches_of_messages(me: Rank) -> None:
    with me.join():
        right, left = (me.rank + 1) % me.size, (me.rank - 1) % me.size
        received = [torch.empty(n) for n in (1, 1000, 100_000)]
        ops = []
        for tag, tensor in enumerate(received):  # receives first: in order, a ring of blocking calls would hang
            ops.append(dist.P2POp(dist.irecv, tensor, left, tag=tag))
            ops.append(dist.P2POp(dist.isend, torch.full_like(tensor, me.rank * 10 + tag), right, tag=tag))
        works = dist.batch_isend_irecv(ops)
        assert len(works) == len(ops)
        for work in works:
            work.wait()
        for tag, tensor in enumerate(received):
            assert tensor.eq(left * 10 + tag).all()

        # The same as one work.
        received = [torch.zeros_like(tensor) for tensor in received]
        with dist._coalescing_manager(device=CPU, async_ops=True) as manager:
            for tag, tensor in enumerate(received):
                dist.irecv(tensor, left, tag=tag)
                dist.isend(torch.full_like(tensor, me.rank * 10 + tag), right, tag=tag)
        (work,) = manager.works
        work.wait()
        assert work.is_completed()
        for tag, tensor in enumerate(received):
            assert tensor.eq(left * 10 + tag).all()


def coalesced_collectives(me: Rank, asynchronous: bool) -> None:
    with me.join():
        tensors = [torch.full((n,), float(me.rank + n)) for n in (1, 10, 5000)]
        with dist._coalescing_manager(async_ops=asynchronous) as manager:
            for tensor in tensors:
                dist.all_reduce(tensor)
        if asynchronous:
            manager.wait()
        for n, tensor in zip((1, 10, 5000), tensors, strict=True):
            assert tensor.eq(sum(range(me.size)) + me.size * n).all()

        # With a device the calls go to the backend one by one, of any kind.
        gathered = [torch.empty(4) for _ in range(me.size)]
        total, whole = torch.full((3,), 1.0 + me.rank), torch.empty(me.size * 2)
        with dist._coalescing_manager(device=CPU, async_ops=asynchronous) as manager:
            works = [
                dist.all_gather(gathered, torch.full((4,), float(me.rank)), async_op=asynchronous),
                dist.broadcast(total, 1, async_op=asynchronous),
                dist.all_to_all_single(whole, torch.full((me.size * 2,), float(me.rank)), async_op=asynchronous),
            ]
        if asynchronous:
            manager.wait()
            assert all(work.is_completed() for work in works)
            (work,) = manager.works
            assert len(work.result()) == me.size + 2
            assert len(work.get_future().wait()) == me.size + 2
        assert [int(t[0]) for t in gathered] == list(range(me.size))
        assert total.eq(2).all()
        assert whole.tolist() == [float(r) for r in range(me.size) for _ in range(2)]


def missing_ranks(me: Rank) -> None:
    with me.join():
        ringreduce.monitored_barrier()
        if me.rank < 2:
            for wait_all, named in ((False, "Rank 2 failed to pass"), (True, "Ranks 2, 3 failed to pass")):
                start = time.monotonic()
                with pytest.raises(CollectiveTimeout, match=named) as caught:
                    ringreduce.monitored_barrier(timeout=timedelta(seconds=0.5), wait_all_ranks=wait_all)
                assert 0.4 < time.monotonic() - start < 5
                assert caught.value.culprit == 2
                assert "rank 3" in str(caught.value) and "pid" in str(caught.value)
        me.meet("others gave up")
        if me.rank >= 2:  # those that come later learn that nobody waits for them
            for _ in range(2):
                with pytest.raises(CollectiveTimeout, match="gave up"):
                    ringreduce.monitored_barrier(timeout=20)
        # The group lives on.
        ringreduce.monitored_barrier(timeout=20)
        tensor = torch.ones(5)
        dist.all_reduce(tensor)
        assert tensor.eq(me.size).all()


def beside_a_hanging_call(me: Rank) -> None:
    with me.join():
        work = dist.all_reduce(torch.ones(4), async_op=True) if me.rank != 2 else None
        ringreduce.monitored_barrier(timeout=20)
        if work is None:
            dist.all_reduce(torch.ones(4))
        else:
            work.wait()


def dead_at_the_barrier(me: Rank) -> int | None:
    with me.join():
        me.report("here")
        if me.rank == 1:
            time.sleep(60)
        with pytest.raises(PeerLost, match="rank 1") as caught:
            ringreduce.monitored_barrier(timeout=20)
        return caught.value.culprit


def shrinking(me: Rank) -> None:
    with me.join():
        if me.rank == 1:
            return  # destroys the group on its way out, as an excluded rank should
        group = dist.shrink_group([1])
        assert group.size() == 3 and dist.get_world_size() == 3
        assert dist.get_rank() == [0, None, 1, 2][me.rank]
        tensor = torch.full((10,), float(me.rank))
        dist.all_reduce(tensor)
        assert tensor.eq(0 + 2 + 3).all()


def shrinking_by_force(me: Rank) -> None:
    with me.join():
        if me.rank == 2:
            me.meet("shrunk")
            return
        work = dist.all_reduce(torch.ones(10), async_op=True)
        dist.shrink_group([2], shrink_flags=1)
        with pytest.raises(Aborted):
            work.wait()
        tensor = torch.ones(10)
        dist.all_reduce(tensor)
        assert tensor.eq(2).all()
        me.meet("shrunk")


def splitting(me: Rank) -> None:
    with me.join():
        assert backend().supports_splitting
        ranks = [0, 2] if me.rank % 2 == 0 else [1, 3]
        for attempt in range(2):
            group = dist.group.WORLD.split_group(ranks, group_name=f"half{attempt}", group_desc="half")  # type: ignore[union-attr]
            tensor = torch.full((7,), float(me.rank))
            group.allreduce(tensor).wait()
            assert tensor.eq(sum(ranks)).all()
            group.shutdown()
        # Splits of which some ranks know nothing; and the same ranks again.
        for ranks in ([0, 1], [0, 2], [0, 2]):
            group = dist.group.WORLD.split_group(ranks, group_name=f"pair{ranks}", group_desc="")  # type: ignore[union-attr]
            assert (group is not None) == (me.rank in ranks)
            if group is not None:
                group.allreduce(torch.ones(3)).wait()
                group.shutdown()
        with pytest.raises(InvalidArgument, match="split: the ranks are 0 7"):
            dist.group.WORLD.split_group([0, 7])  # type: ignore[union-attr]


def subgroups_and_meshes(me: Rank) -> None:
    with me.join():
        own, groups = dist.new_subgroups(2)
        assert len(groups) == 2 and dist.get_backend(own) == "ringreduce"
        tensor = torch.full((3,), float(me.rank))
        dist.all_reduce(tensor, group=own)
        assert tensor.eq(me.rank // 2 * 4 + 1).all()

        mesh = dist.init_device_mesh("cpu", (2, 2), mesh_dim_names=("rows", "columns"))
        for dimension, expected in (("rows", me.rank % 2 * 2 + 2), ("columns", me.rank // 2 * 4 + 1)):
            tensor = torch.full((3,), float(me.rank))
            dist.all_reduce(tensor, group=mesh.get_group(dimension))
            assert tensor.eq(expected).all()

        objects: list[Any] = [None] * me.size
        dist.all_gather_object(objects, {"rank": me.rank, "text": "x" * (1000 * me.rank)})
        assert [o["rank"] for o in objects] == list(range(me.size))
        mine: list[Any] = [None]
        dist.scatter_object_list(mine, [f"for {r}" for r in range(me.size)] if me.rank == 3 else None, src=3)
        assert mine == [f"for {me.rank}"]
