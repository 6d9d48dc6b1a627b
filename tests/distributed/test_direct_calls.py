"""The short way of direct calls: it remembers the latest group, and leaves much to the general way."""

from __future__ import annotations

import functools
import gc
import inspect
import pickle
import pydoc
import threading
import time
from collections.abc import Callable
from datetime import timedelta
from typing import Any

import numpy as np
import numpy.lib.recfunctions
import pytest
import torch
import torch.distributed as dist
from distributed.harness import Rank, in_threads, on_ranks

import ringreduce
from ringreduce import _C
from ringreduce.errors import CollectiveMismatch, InvalidArgument
from ringreduce.groups.tensors import OF_ML_DTYPES


def summed(me: Rank, group: dist.ProcessGroup | None = None) -> None:
    x = torch.full((5,), me.rank + 1.0)
    ringreduce.all_reduce(x, group=group)
    assert x.tolist() == [me.size * (me.size + 1) / 2] * 5


def test_functions_that_try_another_first_are_functions_to_python() -> None:
    tried: list[tuple[Any, ...]] = []

    class Owner:
        @_C.tries_first(lambda *given: tried.append(given) or given[0] == 1, "b", "a")
        def method(a: Any, b: int = 1, c: Any = None) -> Any:
            """What it does."""
            return a, b, c

    function = Owner.method
    assert (function(5), function(5, b=1), function(b=1, a=5), Owner.method(5, 1, None)) == (None,) * 4
    assert tried == [(1, 5)] * 4
    assert (function(5, 2), function(5, c=0), function(5, 1, 3)) == ((5, 2, None), (5, 1, 0), (5, 1, 3))
    assert tried[4:] == [(2, 5)]
    assert Owner().method(2, 7)[1:] == (2, 7)
    for wrong, given in (({}, ()), ({"a": 1}, (1,)), ({"d": 1}, (1,)), ({}, (1, 2, 3, 4))):
        with pytest.raises(TypeError, match=r"method\(\) (missing|got|takes)"):
            function(*given, **wrong)

    for each in (ringreduce.all_reduce, ringreduce.all_gather_single):
        assert pickle.loads(pickle.dumps(each)) is each and inspect.isroutine(each)
        help_text = pydoc.render_doc(each, renderer=pydoc.plaintext)
        assert f"{each.__name__}(" in help_text and (each.__doc__ or "none").split("\n")[0] in help_text


@on_ranks(2)
def test_a_group_that_has_ended_is_not_remembered(me: Rank) -> None:
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


@on_ranks(2)
def test_wrong_arguments_are_named_and_the_group_lives_on(me: Rank) -> None:
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


@on_ranks(2)
def test_threads_with_a_group_each(me: Rank) -> None:
    with me.join():
        groups = [dist.new_group(backend="ringreduce") for _ in range(2)]

        def work(group: dist.ProcessGroup) -> None:
            for _ in range(300):
                summed(me, group)

        in_threads([functools.partial(work, group) for group in groups])


@on_ranks(2)
def test_autograd_hears_what_calls_write(me: Rank) -> None:
    """Each call, and the tensors that it writes on this rank; all others keep their versions."""
    size, other = me.size, 1 - me.rank
    x, out, whole, part = torch.ones(4), torch.ones(4), torch.ones(4 * size), torch.ones(4)
    listed, parts = [torch.ones(4) for _ in range(size)], [torch.ones(4) for _ in range(size)]
    strided, sparse = torch.ones(8)[::2], torch.ones(4).to_sparse()
    maximum = ringreduce.Op.torch(torch.maximum)
    everything = [x, out, whole, part, strided, sparse, *listed, *parts]
    at_0 = me.rank == 0
    calls: list[tuple[Callable[..., Any], list[torch.Tensor]]] = [
        (lambda **how: ringreduce.all_reduce(x, **how), [x]),
        (lambda **how: ringreduce.all_reduce(strided, **how), [strided]),
        (lambda **how: ringreduce.all_reduce(sparse, **how), [sparse]),
        (lambda **how: ringreduce.all_reduce(x, out=out, **how), [out]),
        (lambda **how: ringreduce.all_reduce(x, wire_dtype="int8", **how), [x]),
        (lambda **how: ringreduce.all_reduce_coalesced([x, out], **how), [x, out]),
        (lambda **how: ringreduce.broadcast(x, 0, **how), [] if at_0 else [x]),
        (lambda **how: ringreduce.reduce(x, 0, **how), [x] if at_0 else []),
        (lambda **how: ringreduce.reduce(x, 0, out=out, **how), [out]),
        (lambda **how: ringreduce.all_gather(listed, x, **how), listed),
        (lambda **how: ringreduce.all_gather_single(whole, x, **how), [whole]),
        (lambda **how: ringreduce.reduce_scatter(x, listed, **how), [x]),
        (lambda **how: ringreduce.reduce_scatter_single(x, whole, **how), [x]),
        (lambda **how: ringreduce.gather(x, listed if at_0 else None, 0, **how), listed if at_0 else []),
        (lambda **how: ringreduce.scatter(x, listed if at_0 else None, 0, **how), [x]),
        (lambda **how: ringreduce.all_to_all(listed, parts, **how), listed),
        (lambda **how: ringreduce.all_to_all_single(x, part, **how), [x]),
        (lambda: ringreduce.recv(x, other) if at_0 else ringreduce.send(x, other), [x] if at_0 else []),
        (lambda: [(ringreduce.irecv if at_0 else ringreduce.isend)(x, other).wait()], [x] if at_0 else []),
        (lambda: ringreduce.all_reduce(x, maximum), [x]),
        (lambda: ringreduce.all_reduce(x, maximum, out=out), [out]),
        (lambda: ringreduce.all_reduce(x, ringreduce.Op.torch(torch.maximum, check=True)), [x]),
        (lambda: ringreduce.reduce(x, 0, maximum), [x] if at_0 else []),
        (lambda: ringreduce.reduce_scatter_single(x, whole, maximum), [x]),
        (lambda: ringreduce.scan(x), [x]),
        (lambda: ringreduce.exscan(x), [] if at_0 else [x]),
        (lambda: ringreduce.exscan(x, out=out), [] if at_0 else [out]),
        (ringreduce.barrier, []),
    ]
    with me.join():
        for number, (call, written) in enumerate(calls):
            for how in ({}, {"async_op": True}) if inspect.getfullargspec(call).varkw else ({},):
                before = [each._version for each in everything]
                work = call(**how)
                if how:
                    work.wait()
                changed = [each._version > version for each, version in zip(everything, before, strict=True)]
                wanted = [any(each is one for one in written) for each in everything]
                assert changed == wanted, (number, how)
        factor = torch.ones(4, requires_grad=True)
        loss = (x * factor).sum()  # whose gradient is x
        ringreduce.all_reduce(x)
        with pytest.raises(RuntimeError, match="modified by an inplace operation"):
            loss.backward()
        with torch.inference_mode():
            y = torch.ones(4)
            ringreduce.all_reduce(y)
            ringreduce.all_reduce(y, async_op=True).wait()  # type: ignore[union-attr]
        assert y.eq(size**2).all()


@on_ranks(2)
def test_a_call_of_a_second_thread_is_refused(me: Rank) -> None:
    with me.join():
        group: Any = dist.new_group(backend="ringreduce")
        summed(me, group)
        refusal = r"thread \d+ makes a call of the group while thread \d+ is in another"
        if me.rank == 1:
            me.meet("rank 0 has tried")
            with pytest.raises(CollectiveMismatch, match=refusal) as caught:
                summed(me, group)
            assert caught.value.culprit == 0
            return
        failed: list[BaseException] = []

        def begin() -> None:
            try:
                summed(me, group)
            except CollectiveMismatch as error:
                failed.append(error)

        first = threading.Thread(target=begin)
        first.start()
        while ringreduce.stats()[group.group_name]["all_reduce"].calls < 2:
            time.sleep(0.001)
        x = torch.ones(5)
        calls: tuple[Callable[[], Any], ...] = (
            lambda: ringreduce.all_reduce(x, group=group),
            lambda: dist.all_reduce(x, group=group),
            lambda: dist.all_reduce(x, group=group, async_op=True).wait(),
            lambda: dist.barrier(group),
        )
        for call in calls:
            with pytest.raises(CollectiveMismatch, match=refusal) as caught:
                call()
            assert f"thread {threading.get_ident()} makes" in str(caught.value)
        me.meet("rank 0 has tried")
        first.join()
        assert len(failed) == 1 and f"while thread {first.ident} is in another" in str(failed[0])


@on_ranks(2)
def test_other_threads_run_while_a_small_call_waits(me: Rank) -> None:
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


@on_ranks(2)
def test_tensors_that_take_the_place_of_others(me: Rank) -> None:
    """The engine keeps calls that it has bound to tensors: other tensors at the same address are other calls."""
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


@on_ranks(3)
def test_ranks_are_those_of_the_world_or_by_name_of_the_group(me: Rank) -> None:
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


@on_ranks(2)
def test_what_torch_takes(me: Rank) -> None:
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


@on_ranks(2, returns=[[1.0] * 4, None])
def test_torch_gathers_shards_on_a_device_that_it_has(me: Rank) -> list[float] | None:
    from torch.distributed._shard import sharded_tensor
    from torch.distributed._shard.sharding_spec import ChunkShardingSpec

    with me.join():
        spec = ChunkShardingSpec(dim=0, placements=[f"rank:{rank}/cpu" for rank in range(me.size)])
        sharded = sharded_tensor.ones(spec, 4)
        out = torch.zeros(4) if me.rank == 0 else None
        sharded.gather(0, out)
        return out.tolist() if out is not None else None


def freed() -> torch.Tensor:
    tensor = torch.ones(4)
    tensor.untyped_storage().resize_(0)
    return tensor


@on_ranks(1)
def test_what_cannot_be_written_as_out(me: Rank) -> None:
    with me.join():
        for out, message in (
            (freed(), "out: a tensor has no memory: .* its storage was freed"),
            (torch.ones(1).expand(4), "out: a tensor to be written has several elements in one place"),
            (torch.ones(4).to_mkldnn(), "out: a tensor has layout Mkldnn"),
            (torch.nested.nested_tensor([[1.0], [2.0]]), "out: a tensor is nested"),
            (torch.ones(4).to_sparse(), "out is .* torch.sparse_coo, on cpu; it must be .* torch.strided"),
        ):
            for call in (ringreduce.all_reduce, ringreduce.reduce):
                with pytest.raises(InvalidArgument, match=message):
                    call(torch.ones(4), out=out)
        with pytest.raises(InvalidArgument, match=r"tensor: a tensor has no memory: .* its storage was freed"):
            ringreduce.all_reduce(freed(), out=torch.ones(4))


@on_ranks(2)
def test_arrays_of_ml_dtypes_are_used_in_place(me: Rank) -> None:
    ml_dtypes = pytest.importorskip("ml_dtypes")
    add = ringreduce.Op.torch(torch.add, name="add")
    with me.join():
        for name in OF_ML_DTYPES:
            ones = np.ones(8, getattr(ml_dtypes, name))
            own = (ones * (me.rank + 1))[::2]
            ringreduce.broadcast(own, 1)
            assert own.dtype == ones.dtype and own.tolist() == [2] * 4
            if name in ("bfloat16", "float8_e4m3fn", "float8_e5m2"):
                own[0] = me.rank
                ringreduce.all_reduce(own)
                assert own.tolist() == [1, 4, 4, 4]
                mixed: Any = torch.ones(4, dtype=getattr(torch, name)) if me.rank else ones[:4]
                ringreduce.all_reduce(mixed, op=add)  # their elements are of one kind
                assert mixed.tolist() == [2] * 4
        with pytest.raises(InvalidArgument, match="dtype float8_e3m4; reduce it by an operator of your own"):
            ringreduce.all_reduce(np.ones(3, ml_dtypes.float8_e3m4))
