"""Every collective and message, checked element by element on each rank, for one host, several hosts and GPUs."""

from __future__ import annotations

import functools
import operator

import numpy as np
import pytest
import torch
import torch.distributed as dist
from distributed.harness import Rank

import ringreduce
from ringreduce.errors import InvalidArgument
from ringreduce.plan import build

SMALL_SLOTS = ringreduce.Options(engine="channel_bytes=64K,mailbox_bytes=64K,least_slice_bytes=64")
SEVERAL_SLICES = 70_001  # elements; 280 KB, many times a small slot
DTYPES = (
    torch.float64,
    torch.float32,
    torch.float16,
    torch.bfloat16,
    torch.float8_e4m3fn,
    torch.float8_e5m2,
    torch.int8,
    torch.int16,
    torch.int32,
    torch.int64,
    torch.uint8,
    torch.bool,
    torch.complex64,
    torch.complex128,
)
OPS = {
    "sum": dist.ReduceOp.SUM,
    "avg": dist.ReduceOp.AVG,
    "product": dist.ReduceOp.PRODUCT,
    "min": dist.ReduceOp.MIN,
    "max": dist.ReduceOp.MAX,
    "band": dist.ReduceOp.BAND,
    "bor": dist.ReduceOp.BOR,
    "bxor": dist.ReduceOp.BXOR,
    "premul_sum": dist._make_nccl_premul_sum(0.5),
}


def sizes(ranks: int) -> tuple[int, ...]:
    return (0, 1, ranks - 1, ranks + 1, 10_007, SEVERAL_SLICES)


def values(rank: int, count: int, call: int, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    """What `rank` gives to `call`: whole numbers below 13."""
    return ((torch.arange(count) * 3 + rank * 5 + call * 7) % 13).to(dtype)


def total(ranks: int, count: int, call: int) -> torch.Tensor:
    return torch.stack([values(rank, count, call) for rank in range(ranks)]).sum(0)


def same(actual: torch.Tensor, expected: torch.Tensor) -> None:
    torch.testing.assert_close(actual, expected, rtol=0, atol=0)


# One function a collective: calls it once with blocks of about `count` elements, and checks the result on this rank.


def all_reduce(me: Rank, count: int, call: int) -> None:
    tensor = values(me.rank, count, call)
    dist.all_reduce(tensor)
    same(tensor, total(me.size, count, call))


def all_reduce_coalesced(me: Rank, count: int, call: int) -> None:
    tensors = [values(me.rank, count, call), values(me.rank, 7, call + 1)]
    dist.all_reduce_coalesced(tensors)
    same(tensors[0], total(me.size, count, call))
    same(tensors[1], total(me.size, 7, call + 1))


def broadcast(me: Rank, count: int, call: int) -> None:
    tensor = values(me.rank, count, call)
    dist.broadcast(tensor, src=call % me.size)
    same(tensor, values(call % me.size, count, call))


def reduce(me: Rank, count: int, call: int) -> None:
    root, tensor = call % me.size, values(me.rank, count, call)
    dist.reduce(tensor, dst=root)
    same(tensor, total(me.size, count, call) if me.rank == root else values(me.rank, count, call))


def all_gather(me: Rank, count: int, call: int) -> None:
    tensors = [torch.full((count + rank,), -1.0) for rank in range(me.size)]  # uneven
    dist.all_gather(tensors, values(me.rank, count + me.rank, call))
    for rank, tensor in enumerate(tensors):
        same(tensor, values(rank, count + rank, call))


def all_gather_into_tensor(me: Rank, count: int, call: int) -> None:
    output = torch.full((me.size * count,), -1.0)
    dist.all_gather_into_tensor(output, values(me.rank, count, call))
    same(output, torch.cat([values(rank, count, call) for rank in range(me.size)]))


def reduce_scatter(me: Rank, count: int, call: int) -> None:
    output = torch.full((count + me.rank,), -1.0)  # uneven
    dist.reduce_scatter(output, [values(me.rank, count + rank, call + rank) for rank in range(me.size)])
    same(output, total(me.size, count + me.rank, call + me.rank))


def reduce_scatter_tensor(me: Rank, count: int, call: int) -> None:
    output = torch.full((count,), -1.0)
    dist.reduce_scatter_tensor(output, values(me.rank, me.size * count, call))
    same(output, total(me.size, me.size * count, call)[me.rank * count :][:count])


def gather(me: Rank, count: int, call: int) -> None:
    root = call % me.size
    tensors = [torch.full((count,), -1.0) for _ in range(me.size)] if me.rank == root else None
    dist.gather(values(me.rank, count, call), tensors, dst=root)
    for rank, tensor in enumerate(tensors or ()):
        same(tensor, values(rank, count, call))


def gather_single(me: Rank, count: int, call: int) -> None:
    root = call % me.size
    output = torch.full((me.size * count,), -1.0) if me.rank == root else None
    dist.gather_single(values(me.rank, count, call), output, dst=root)
    if output is not None:
        same(output, torch.cat([values(rank, count, call) for rank in range(me.size)]))


def scatter(me: Rank, count: int, call: int) -> None:
    root, output = call % me.size, torch.full((count,), -1.0)
    inputs = [values(root, count, call + rank) for rank in range(me.size)] if me.rank == root else None
    dist.scatter(output, inputs, src=root)
    same(output, values(root, count, call + me.rank))


def all_to_all(me: Rank, count: int, call: int) -> None:
    outputs = [torch.full((count + rank,), -1.0) for rank in range(me.size)]  # rank r sends blocks of count + r
    dist.all_to_all(outputs, [values(me.rank, count + me.rank, call + to) for to in range(me.size)])
    for rank, output in enumerate(outputs):
        same(output, values(rank, count + rank, call + me.rank))


def all_to_all_single(me: Rank, count: int, call: int) -> None:
    output = torch.full((me.size * count,), -1.0)
    dist.all_to_all_single(output, values(me.rank, me.size * count, call))
    parts = [values(rank, me.size * count, call)[me.rank * count :][:count] for rank in range(me.size)]
    same(output, torch.cat(parts))


def all_to_all_single_uneven(me: Rank, count: int, call: int) -> None:
    def rows(source: int, to: int) -> int:
        return count if source == to else (source + 2 * to + call) % 3  # some are empty

    given, taken = [rows(me.rank, to) for to in range(me.size)], [rows(source, me.rank) for source in range(me.size)]
    output = torch.full((sum(taken), 2), -1.0)
    inputs = torch.cat([values(me.rank, 2 * n, call + to).view(n, 2) for to, n in enumerate(given)])
    dist.all_to_all_single(output, inputs, taken, given)
    parts = [values(source, 2 * n, call + me.rank).view(n, 2) for source, n in enumerate(taken)]
    same(output, torch.cat(parts))


def barrier(me: Rank, count: int, call: int) -> None:
    me.store.add("arrived", 1)
    dist.barrier()
    assert me.store.add("arrived", 0) >= me.size * (sizes(me.size).index(count) + 1)


def send_and_recv(me: Rank, count: int, call: int) -> None:
    """Around the ring, two messages a neighbor, received in the other order than sent."""
    after, before = (me.rank + 1) % me.size, (me.rank - 1) % me.size
    sends = [dist.isend(values(me.rank, count, call + tag), after, tag=tag) for tag in (1, 2)]
    for tag in (2, 1):
        tensor = torch.full((count,), -1.0)
        assert dist.recv(tensor, before, tag=tag) == before
        same(tensor, values(before, count, call + tag))
    for work in sends:
        work.wait()


def recv_from_any(me: Rank, count: int, call: int) -> None:
    if me.rank != 0:
        dist.send(values(me.rank, count, call), 0)
    else:
        sources = set()
        for _ in range(1, me.size):
            tensor = torch.full((count,), -1.0)
            source = dist.recv(tensor)
            same(tensor, values(source, count, call))
            sources.add(source)
        assert sources == set(range(1, me.size))
    dist.barrier()  # the next call's messages are told apart from these by their order only


COLLECTIVES = {
    f.__name__: f
    for f in (
        all_reduce,
        all_reduce_coalesced,
        broadcast,
        reduce,
        all_gather,
        all_gather_into_tensor,
        reduce_scatter,
        reduce_scatter_tensor,
        gather,
        *([gather_single] if hasattr(dist, "gather_single") else []),  # from torch 2.14 on
        scatter,
        all_to_all,
        all_to_all_single,
        all_to_all_single_uneven,
        barrier,
        send_and_recv,
        recv_from_any,
    )
}


def every_size(me: Rank, collective: str, options: ringreduce.Options) -> None:
    with me.join(options=options):
        for call, count in enumerate(sizes(me.size)):
            try:
                COLLECTIVES[collective](me, count, call)
            except Exception as error:
                error.add_note(f"with {count} elements")
                raise


FEW = 37  # elements for a pair of dtype and operation


def operands(ranks: int, dtype: torch.dtype, op: str) -> torch.Tensor:
    """Per rank a row, in a dtype wide enough to reduce them exactly; every partial result is exact in `dtype` too."""
    element, rank = torch.arange(FEW), torch.arange(ranks).view(-1, 1)
    whole = (element + rank * (element % 5 + 1)) % 3
    if dtype == torch.bool:
        return whole == 0
    if op == "product":
        whole = whole % 2 + 1
    if dtype.is_complex:
        return torch.complex(whole.double(), (whole.double() + rank) % 2)
    return whole.double() if dtype.is_floating_point else whole


def reduced(rows: torch.Tensor, op: str) -> torch.Tensor:
    pairs = {
        "sum": operator.or_ if rows.dtype == torch.bool else torch.add,
        "avg": torch.add,
        "premul_sum": torch.add,
        "product": operator.and_ if rows.dtype == torch.bool else torch.mul,
        "min": torch.minimum,
        "max": torch.maximum,
        "band": operator.and_,
        "bor": operator.or_,
        "bxor": operator.xor,
    }
    result = functools.reduce(pairs[op], rows)
    return result / len(rows) if op == "avg" else result * 0.5 if op == "premul_sum" else result


def supported(dtype: torch.dtype, op: str) -> bool:
    if op in ("sum", "product"):
        return True
    if op in ("min", "max"):
        return not dtype.is_complex
    fractional = dtype.is_floating_point or dtype.is_complex
    return fractional if op in ("avg", "premul_sum") else not fractional


def name_of(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


def every_operation(me: Rank, dtype: torch.dtype) -> None:
    """By direct calls, since torch.distributed itself refuses to multiply complex numbers."""
    with me.join():
        for op, reduce_op in OPS.items():
            rows = operands(me.size, dtype, op)
            tensor = rows[me.rank].to(dtype, copy=True)
            if supported(dtype, op):
                ringreduce.all_reduce(tensor, reduce_op)
                expected = reduced(rows, op).to(dtype)
                assert torch.equal(tensor.view(torch.uint8), expected.view(torch.uint8)), f"{op}: {tensor} {expected}"
            else:
                with pytest.raises(InvalidArgument, match=f"'{op}'.*{name_of(dtype)}"):
                    ringreduce.all_reduce(tensor, reduce_op)
                same(tensor, rows[me.rank].to(dtype))
        all_reduce(me, 100, 0)


def every_layout(me: Rank) -> None:
    """By direct calls, since torch.distributed itself refuses conjugate views."""
    with me.join(options=SMALL_SLOTS):
        both = [values(rank, 4 * 60 * 60, 0) for rank in range(me.size)]
        layouts = {
            "transposed": lambda t: t[:3600].view(60, 60).t(),
            "every third": lambda t: t[::3],
            "one column": lambda t: t.view(-1, 4)[:, 1],
            "four dimensions": lambda t: t[:3600].view(3, 4, 10, 30).permute(3, 1, 0, 2),
            "no dimension": lambda t: t[5],
            "conjugate": lambda t: torch.view_as_complex(t.view(-1, 2)).conj(),
            "negative": lambda t: torch.view_as_complex(t.view(-1, 2)).conj().imag,
        }
        for name, view in layouts.items():
            base = both[me.rank].clone()
            tensor, expected = view(base), sum(view(t) for t in both)
            ringreduce.all_reduce(tensor)
            assert torch.equal(tensor, expected), name
            untouched = base.clone()
            view(untouched).copy_(view(both[me.rank]))
            same(untouched, both[me.rank])  # no neighbor in memory has changed

            tensor = view(both[me.rank].clone())
            ringreduce.broadcast(tensor, src=1)
            assert torch.equal(tensor, view(both[1])), name

            if me.rank == 0:
                ringreduce.send(view(both[0]), 1)
            elif me.rank == 1:
                tensor = view(both[1].clone())
                ringreduce.recv(tensor, 0)
                assert torch.equal(tensor, view(both[0])), name

        output = torch.full((5, 2, me.size), -1.0).permute(2, 0, 1)
        inputs = [values(rank, 10, 1).view(2, 5).t() for rank in range(me.size)]
        ringreduce.all_gather_into_tensor(output, inputs[me.rank])
        same(output, torch.stack(inputs))


def futures_and_callbacks(me: Rank) -> None:
    with me.join():
        tensor = values(me.rank, 1000, 0)
        work = dist.all_reduce(tensor, async_op=True)
        halved = work.get_future().then(lambda future: future.value()[0] / 2)
        same(halved.wait(), total(me.size, 1000, 0) / 2)
        work.wait()
        assert work.is_completed() and work.is_success()
        same(work.result()[0], total(me.size, 1000, 0))

        tensors = [values(me.rank, 100 + call, call) for call in range(200)]
        works = [dist.all_reduce(tensor, async_op=True) for tensor in tensors]
        all_reduce(me, 1000, 300)  # a synchronous call takes its turn
        for work in reversed(works):
            work.wait()
        for call, tensor in enumerate(tensors):
            same(tensor, total(me.size, 100 + call, call))

        inbox = [torch.empty(50) for _ in range(20)]
        after, before = (me.rank + 1) % me.size, (me.rank - 1) % me.size
        messages = [dist.P2POp(dist.irecv, tensor, before, tag=call) for call, tensor in enumerate(inbox)]
        messages += [dist.P2POp(dist.isend, values(me.rank, 50, call), after, tag=call) for call in range(20)]
        for work in dist.batch_isend_irecv(messages):
            work.wait()
        for call, tensor in enumerate(inbox):
            same(tensor, values(before, 50, call))


def overlapping_groups(me: Rank) -> None:
    with me.join():
        groups = {members: dist.new_group(list(members)) for members in ((0, 2), (1, 3), (1, 2, 3), (3,))}
        for call, (members, group) in enumerate(groups.items()):
            if me.rank not in members:
                continue
            tensor = values(me.rank, 5000, call)
            dist.all_reduce(tensor, group=group)
            same(tensor, torch.stack([values(rank, 5000, call) for rank in members]).sum(0))
            tensor = values(me.rank, 10, call)
            dist.broadcast(tensor, src=members[-1], group=group)
            same(tensor, values(members[-1], 10, call))
            if me.rank in (members[0], members[-1]) and len(members) > 1:
                ends = members[0], members[-1]
                tensor = values(me.rank, 5, call)
                if me.rank == ends[0]:
                    dist.send(tensor, ends[1], group=group)
                else:
                    dist.recv(tensor, ends[0], group=group)
                    same(tensor, values(ends[0], 5, call))
            dist.barrier(group)
        all_reduce(me, 100, 9)


def many_lives(me: Rank) -> None:
    for call in range(3):
        with me.join("the same name"):
            all_reduce(me, 1000, call)
        me.meet(f"all have left {call}")


def direct_calls(me: Rank) -> None:
    mine, everyone = values(me.rank, 12, 0).numpy(), [values(rank, 12, 0).numpy() for rank in range(me.size)]
    summed, part = sum(everyone), slice(me.rank * 4, me.rank * 4 + 4)
    same_array = np.testing.assert_array_equal
    with me.join():
        array = mine.copy()
        assert ringreduce.all_reduce(array) is None
        same_array(array, summed)
        array = mine.copy()
        ringreduce.all_reduce(array, dist.ReduceOp.MAX, async_op=True).wait()
        same_array(array, np.max(everyone, 0))
        array = mine.copy()
        ringreduce.broadcast(array, src=2)
        same_array(array, everyone[2])
        array = mine.copy()
        ringreduce.reduce(array, dst=1)
        same_array(array, summed if me.rank == 1 else mine)
        arrays = [np.zeros_like(mine) for _ in everyone]
        ringreduce.all_gather(arrays, mine)
        same_array(arrays, everyone)
        array = np.zeros(12 * me.size, np.float32)
        ringreduce.all_gather_into_tensor(array, mine)
        same_array(array, np.concatenate(everyone))
        array = np.zeros(4, np.float32)
        ringreduce.reduce_scatter(array, [mine[:4], mine[4:8], mine[8:]])
        same_array(array, summed[part])
        ringreduce.reduce_scatter_tensor(array, mine)
        same_array(array, summed[part])
        ringreduce.gather(mine, arrays if me.rank == 1 else None, dst=1)
        same_array(arrays, everyone)
        ringreduce.scatter(array, [mine[:4], mine[4:8], mine[8:]] if me.rank == 2 else None, src=2)
        same_array(array, everyone[2][part])
        arrays = [np.zeros(4, np.float32) for _ in everyone]
        ringreduce.all_to_all(arrays, [mine[:4], mine[4:8], mine[8:]])
        same_array(arrays, [other[part] for other in everyone])
        array = np.zeros(12, np.float32)
        ringreduce.all_to_all_single(array, mine)
        same_array(array, np.concatenate(arrays))
        ringreduce.barrier()
        if me.rank == 0:
            assert ringreduce.recv(array, tag=3) == 1
            same_array(array, everyone[1])
        elif me.rank == 1:
            ringreduce.send(mine, 0, tag=3)


def own_plan(me: Rank) -> None:
    with me.join(options=SMALL_SLOTS):
        ringreduce.register_plan(ringreduce.Plan.from_json(build("all_reduce", "ring", 3).to_json()))
        ringreduce.register_plan(build("all_reduce", "tree", 3), most_bytes=4096)
        found = ringreduce.topology()
        assert found.registered == ("all_reduce of all sizes: ring", "all_reduce of blocks up to 4096 bytes: tree")
        assert "registered: all_reduce of blocks up to 4096 bytes: tree" in str(found)
        for call, count in enumerate(sizes(me.size)):
            all_reduce(me, count, call)
        with pytest.raises(InvalidArgument, match="is for 4 ranks; the group has 3"):
            ringreduce.register_plan(build("all_reduce", "ring", 4))
        with pytest.raises(InvalidArgument, match=r"plan is 'ring'; give a ringreduce\.Plan"):
            ringreduce.register_plan("ring")
        with pytest.raises(InvalidArgument, match="most_bytes is -1"):
            ringreduce.register_plan(build("all_reduce", "ring", 3), most_bytes=-1)
        all_reduce(me, 100, 9)


def call_in_callback(me: Rank) -> None:
    with me.join():

        def again(_: torch.futures.Future[list[torch.Tensor]]) -> torch.Tensor:
            tensor = torch.ones(4)
            dist.all_reduce(tensor, async_op=True).get_future().wait()
            dist.all_reduce(tensor)
            return tensor

        first = dist.all_reduce(torch.ones(4), async_op=True).get_future()
        assert first.then(again).wait().tolist() == [float(me.size**2)] * 4


def all_to_all_in_place(me: Rank) -> None:
    with me.join():
        tensor = torch.arange(me.size, dtype=torch.float32) + 10 * me.rank
        dist.all_to_all_single(tensor, tensor)
        assert tensor.tolist() == [10.0 * source + me.rank for source in range(me.size)]
