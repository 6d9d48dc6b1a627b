"""What else c10d can ask of a backend: coalescing, sparse tensors, monitored barriers, smaller groups, works, hooks."""

from __future__ import annotations

import os
import signal
import threading
import time
from datetime import timedelta
from typing import Any

import pytest
import torch
import torch.distributed as dist
from bodies.surface import (
    CPU,
    backend,
    batches_of_messages,
    beside_a_hanging_call,
    coalesced_collectives,
    dead_at_the_barrier,
    shrinking_by_force,
)
from distributed.harness import Rank, Ranks, on_ranks, run
from torch._C._distributed_c10d import ErrorType, WorkResult
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.distributed.tensor import Shard, distribute_tensor
from torch.testing._internal.two_tensor import TwoTensor

import ringreduce
from ringreduce.errors import Aborted, CollectiveMismatch, CollectiveTimeout, InvalidArgument, PeerLost, SystemFailure

# coalescing


@pytest.mark.parametrize("ranks", [2, 3, 4])
def test_a_batch_of_messages_in_any_order(ranks: int) -> None:
    run(batches_of_messages, ranks)


@pytest.mark.parametrize("asynchronous", [False, True])
def test_collectives_are_coalesced(asynchronous: bool) -> None:
    run(coalesced_collectives, 3, asynchronous)


@on_ranks(2)
def test_an_error_in_a_coalesced_work_is_raised_by_its_wait(me: Rank) -> None:
    with me.join():
        with pytest.raises(InvalidArgument, match="has not called startCoalescing"):
            backend()._end_coalescing()
        for _ in range(2):  # as if an exception had kept torch from ending what it started
            backend()._start_coalescing()
        dist.all_reduce(torch.ones(3 + me.rank), async_op=True)
        work = backend()._end_coalescing()
        with pytest.raises(CollectiveMismatch):
            work.wait()
        assert work.is_completed() and not work.is_success()


@on_ranks(3)
def test_lists_of_tensors_are_gathered_together(me: Rank) -> None:
    with me.join():
        shapes = [(2, 3), (5,), (0,)]
        inputs = [torch.full(shape, float(me.rank * 10 + i)) for i, shape in enumerate(shapes)]
        outputs = [[torch.empty(shape) for shape in shapes] for _ in range(me.size)]
        dist.all_gather_coalesced(outputs, inputs)
        for rank, of_rank in enumerate(outputs):
            for i, tensor in enumerate(of_rank):
                assert tensor.eq(rank * 10 + i).all()


# sparse tensors


@on_ranks(1, 2, 4)
def test_sparse_tensors_are_summed(me: Rank) -> None:
    def sparse(rank: int, dtype: torch.dtype, dense: tuple[int, ...]) -> torch.Tensor:
        count = 3 * rank + (rank == 0)  # rank by rank another number of elements, some of them in the same place
        indices = torch.stack([torch.arange(count) % 5, torch.arange(count) * (rank + 1) % 7])
        values = (torch.arange(count).reshape(-1, *[1] * len(dense)) + rank + torch.zeros(count, *dense)).to(dtype)
        return torch.sparse_coo_tensor(indices, values, (5, 7, *dense))

    with me.join():
        for dtype in (torch.float32, torch.int64, torch.complex64):
            for dense in ((), (3,)):
                # torch's all_reduce takes a view of complex tensors as real ones, which sparse tensors do not have.
                all_reduce = ringreduce.all_reduce if dtype.is_complex else dist.all_reduce
                for asynchronous in (False, True):
                    tensor = sparse(me.rank, dtype, dense)
                    work = all_reduce(tensor, async_op=asynchronous)
                    if asynchronous:
                        work.wait()
                    expected = sum(sparse(rank, dtype, dense).to_dense() for rank in range(me.size))
                    torch.testing.assert_close(tensor.to_dense(), expected, rtol=0, atol=0)
        nothing = torch.sparse_coo_tensor(torch.empty(2, 0, dtype=torch.int64), torch.empty(0), (5, 7))
        dist.all_reduce(nothing)
        assert nothing._nnz() == 0


@on_ranks(2)
def test_sparse_tensors_that_cannot_be_summed(me: Rank) -> None:
    tensor = torch.eye(3).to_sparse()
    with me.join():
        with pytest.raises(InvalidArgument, match="only SUM"):
            dist.all_reduce(tensor, op=dist.ReduceOp.MAX)
        with pytest.raises(InvalidArgument, match="to_dense"):
            backend().allreduce([torch.eye(3).to_sparse_csr()], dist.AllreduceOptions())
        with pytest.raises(InvalidArgument, match="to_dense"):
            ringreduce.broadcast(tensor, 0)
        dist.all_reduce(tensor)
        torch.testing.assert_close(tensor.to_dense(), torch.eye(3) * me.size)
        with pytest.raises(CollectiveMismatch):
            dist.all_reduce(torch.eye(3 + me.rank).to_sparse())


# monitored barriers


def test_a_monitored_barrier_works_beside_a_call_that_hangs() -> None:
    run(beside_a_hanging_call, 3)


def test_a_monitored_barrier_names_a_dead_rank() -> None:
    with Ranks(dead_at_the_barrier, 3) as ranks:
        assert ranks.reports() == ["here"] * 3
        ranks.signal(1, signal.SIGKILL)
        assert ranks.results(but=(1,)) == [1, 1]


@on_ranks(3)
def test_a_monitored_barrier_of_other_ranks_returns_at_once(me: Rank) -> None:
    with me.join():
        group = dist.new_group([0, 1])
        ringreduce.monitored_barrier(group)
        with pytest.raises(InvalidArgument, match="timeout"):
            ringreduce.monitored_barrier(timeout=-1)


# smaller groups


def test_a_group_with_a_rank_that_hangs_shrinks_by_force() -> None:
    run(shrinking_by_force, 3)


# works


@on_ranks(2)
def test_what_a_work_can_be_asked(me: Rank) -> None:
    with me.join():
        group = backend()
        before = group._get_sequence_number_for_group()
        tensor = torch.ones(10)
        work = dist.all_reduce(tensor, async_op=True)
        work.wait()
        assert work.is_completed() and work.is_success()
        assert work.result()[0].data_ptr() == tensor.data_ptr()
        assert work.get_future().then(lambda f: f.value()[0] * 2).wait().eq(4).all()
        assert WorkResult(work.get_future_result().wait()) == WorkResult.SUCCESS
        assert group._get_sequence_number_for_group() == before + 1
        with pytest.raises(RuntimeError, match="enableCollectivesTiming"):
            work._get_duration()

        dist.group.WORLD._enable_collectives_timing()  # type: ignore[union-attr]
        work = dist.all_reduce(tensor, async_op=True)
        work.wait()
        assert 0 < work._get_duration() < 60_000


@on_ranks(2)
def test_a_work_that_fails_says_so_to_whoever_asks(me: Rank) -> None:
    with me.join(call_timeout=1):
        work = dist.all_reduce(torch.ones(1), async_op=True) if me.rank == 0 else None
        me.meet("posted")
        if work is not None:
            with pytest.raises(CollectiveTimeout):
                work.wait()
            assert work.is_completed() and not work.is_success()
            assert WorkResult(work.get_future_result().wait()) == WorkResult.TIMEOUT
            with pytest.raises(Exception, match="all_reduce seq 1"):
                work.get_future().wait()
        me.meet("timed out")


@on_ranks(2)
def test_error_of_a_group(me: Rank) -> None:
    with me.join(call_timeout=1):
        group = backend()
        assert group.get_error() == ErrorType.SUCCESS
        if me.rank == 0:
            with pytest.raises(CollectiveTimeout):
                dist.barrier()
        me.meet("timed out")
        assert group.get_error() == ErrorType.TIMEOUT


@on_ranks(2)
def test_hooks_hear_of_every_work(me: Rank) -> None:
    with me.join():
        heard: list[Any] = []
        group = dist.group.WORLD
        group._register_on_completion_hook(heard.append)  # type: ignore[union-attr]
        for size in (1, 1000, 1_000_000):
            dist.all_reduce(torch.ones(size), async_op=size > 1)
        dist.barrier()
        group._wait_for_pending_works()  # type: ignore[union-attr]
        heard.sort(key=lambda info: info.seq)  # several threads tell
        assert [info.op_type.name for info in heard] == ["ALLREDUCE"] * 3 + ["BARRIER"]
        assert [info.seq for info in heard] == [1, 2, 3, 4]
        assert all(info.time_finished >= info.time_started for info in heard)


@on_ranks(2)
def test_the_timeout_of_a_group_can_be_changed(me: Rank) -> None:
    with me.join():
        dist.group.WORLD.set_timeout(timedelta(seconds=1))  # type: ignore[union-attr]
        assert backend().options._timeout == timedelta(seconds=1)
        if me.rank == 0:
            start = time.monotonic()
            with pytest.raises(CollectiveTimeout):
                dist.barrier()
            assert 0.9 < time.monotonic() - start < 10
        me.meet("timed out")
    with me.join("for ever", timeout=500_000 * 24 * 3600):
        dist.barrier()


@on_ranks(2)
def test_waiting_for_a_while(me: Rank) -> None:
    with me.join():
        works = [dist.all_reduce(torch.ones(3), async_op=True)] if me.rank == 0 else []
        works += [dist.irecv(torch.ones(3), 1)] if me.rank == 0 else []
        for work in works:
            with pytest.raises(CollectiveTimeout, match=r"wait\(\) was given"):
                work.wait(timedelta(seconds=0.2))
        me.meet("waited")  # the calls go on
        if me.rank == 1:
            dist.all_reduce(torch.ones(3))
            dist.send(torch.ones(3), 0)
        for work in works:
            work.wait()


@pytest.mark.parametrize("fault", ["timeout", "abort", "death"])
@on_ranks(2)
def test_the_future_of_a_message_hears_of_faults(me: Rank, fault: str) -> None:
    with me.join(call_timeout=1 if fault == "timeout" else None):
        if me.rank == 0:
            future = dist.irecv(torch.ones(3), 1).get_future()  # nobody waits for the work itself
            me.meet("posted")
            with pytest.raises((CollectiveTimeout, Aborted, PeerLost)):
                future.wait()
        else:
            me.meet("posted")
            if fault == "abort":
                backend().abort()
            if fault == "timeout":
                me.meet("timed out")
        if me.rank == 0 and fault == "timeout":
            me.meet("timed out")


@on_ranks(1)
def test_a_message_from_anybody_in_a_group_of_one(me: Rank) -> None:
    with me.join(), pytest.raises(InvalidArgument, match="no other rank"):
        dist.recv(torch.ones(3))


@on_ranks(2)
def test_threads_coalesce_apart(me: Rank) -> None:
    with me.join():
        backend()._start_coalescing()
        first = dist.isend(torch.ones(2), 1 - me.rank, tag=1)
        thread = threading.Thread(target=lambda: backend()._start_coalescing() or backend()._end_coalescing().wait())
        thread.start()
        thread.join()
        received = torch.zeros(2)
        dist.irecv(received, 1 - me.rank, tag=1)
        backend()._end_coalescing().wait()
        assert received.eq(1).all() and first.is_completed()


@on_ranks(2)
def test_hooks_and_futures_that_fail_do_no_harm(me: Rank) -> None:
    def fail(_: Any) -> None:
        raise ZeroDivisionError

    with me.join():
        group = dist.group.WORLD
        group._register_on_completion_hook(fail)  # type: ignore[union-attr]
        work = dist.all_reduce(torch.ones(3), async_op=True)
        work.get_future().add_done_callback(fail)
        work.wait()
        group._wait_for_pending_works()  # type: ignore[union-attr]
        dist.barrier()
        group.shutdown()  # type: ignore[union-attr]
        group._wait_for_pending_works()  # type: ignore[union-attr]


@on_ranks(3)
def test_options_of_a_group(me: Rank) -> None:
    with me.join(timeout=17):
        options = backend().options
        assert options.backend == "ringreduce" and options._timeout == timedelta(seconds=17)
        assert list(options.global_ranks_in_group) == [0, 1, 2]
        group = dist.new_group([0, 2], timeout=timedelta(seconds=5))
        if me.rank != 1:
            options = group._get_backend(CPU).options
            assert list(options.global_ranks_in_group) == [0, 2] and options._timeout == timedelta(seconds=5)
            assert options.group_name == group.group_name


# tensors that others read in place


@on_ranks(2, 3)
def test_shared_tensors_are_read_in_place(me: Rank) -> None:
    size = 300_001  # several slots
    with me.join():

        def shared(*shape: int, fill: float = 0.0) -> torch.Tensor:
            return ringreduce.empty(*shape).fill_(fill)

        def lent(collective: str) -> int:
            return ringreduce.stats()[dist.group.WORLD.group_name][collective].lent  # type: ignore[union-attr]

        for attempt in range(3):  # the same memory again, with other values
            mine = shared(size, fill=me.rank + attempt)
            ranks = [rank + attempt for rank in range(me.size)]
            gathered = shared(me.size * size)
            dist.all_gather_into_tensor(gathered, mine)
            assert gathered.view(me.size, size).eq(torch.tensor(ranks).view(-1, 1)).all()

            scattered = shared(size)
            dist.reduce_scatter_tensor(scattered, gathered)
            assert scattered.eq((me.rank + attempt) * me.size).all()

            exchanged = shared(me.size * size)
            dist.all_to_all_single(exchanged, shared(me.size * size, fill=me.rank + attempt))
            assert exchanged.view(me.size, size).eq(torch.tensor(ranks).view(-1, 1)).all()

            total = mine.clone() if me.rank == 1 else mine  # not of all ranks need it be shared
            dist.all_reduce(total)
            assert total.eq(sum(ranks)).all()
            total = shared(size, fill=me.rank)
            dist.broadcast(total, 1)
            assert total.eq(1).all()
            total.fill_(me.rank)  # at once: nobody may still be reading
            dist.reduce(total, 0)
            assert total.eq(sum(range(me.size)) if me.rank == 0 else me.rank).all()
        assert lent("all_gather") == 3 * size * 4
        assert lent("reduce_scatter") == 3 * (me.size - 1) * size * 4
        assert lent("all_to_all") == 3 * (me.size - 1) * size * 4
        assert lent("broadcast") == (3 * size * 4 if me.rank == 1 else 0)
        assert lent("reduce") > 0
        assert lent("all_reduce") > 0 or me.rank == 1


@on_ranks(2, 3)
def test_sharing_what_is_there_already(me: Rank) -> None:
    with me.join():
        layer = torch.nn.Linear(300, 200)
        torch.nn.init.constant_(layer.weight, me.rank + 1)
        before = layer.weight
        assert ringreduce.share(layer.weight) is before and layer.weight is before and before.requires_grad
        assert before.eq(me.rank + 1).all()
        dist.all_reduce(layer.weight.data)
        assert before.eq(me.size * (me.size + 1) / 2).all()
        statistics = ringreduce.stats()[dist.group.WORLD.group_name]["all_reduce"]  # type: ignore[union-attr]
        own, rest = divmod(before.numel() * 4, me.size)
        assert statistics.lent >= own * (me.size - 1) - 64 * me.size and rest == 0
        (layer(torch.ones(1, 300)).sum()).backward()
        assert before.grad is not None and before.grad.eq(1).all()

        transposed = torch.arange(6.0).view(2, 3).clone().t().contiguous().clone()
        assert torch.equal(ringreduce.share(transposed.clone()), transposed)
        with pytest.raises(InvalidArgument, match="share that one"):
            ringreduce.share(layer.weight.detach()[1:])
        mesh = dist.device_mesh.init_device_mesh("cpu", (me.size,))
        for wrong, named in (
            (torch.eye(2).to_sparse(), "layout torch.sparse_coo"),
            (torch.empty(2, device="meta"), "on meta"),
            (torch.quantize_per_tensor(torch.ones(2), 1.0, 0, torch.qint8), "torch.qint8"),
            (distribute_tensor(torch.ones(me.size), mesh, [Shard(0)]), "a DTensor"),
            ([1.0], "a list"),
        ):
            with pytest.raises(InvalidArgument, match=named):
                ringreduce.share(wrong)


@on_ranks(2)
def test_the_memory_of_shared_tensors(me: Rank) -> None:
    options = ringreduce.Options(arena_bytes=1024 * 1024)
    with me.join(options=options):
        assert backend().supports_tensor_alloc(CPU)
        for _ in range(100):  # what is dropped is used again
            tensor = None
            tensor = ringreduce.empty(1024, 128, dtype=torch.int64).fill_(7)
        assert tensor.shape == (1024, 128) and tensor.dtype == torch.int64 and tensor.eq(7).all()
        with pytest.raises(SystemFailure, match="RINGREDUCE_ARENA_BYTES"):
            ringreduce.empty(1)
        for wrong in ((2, -1), (2.5,), ("2",), (None,), ((2, 3), 4), (2**63,), (2**32, 2**32), (2**61,)):
            with pytest.raises(InvalidArgument, match="size is"):
                ringreduce.empty(*wrong)
        with pytest.raises(InvalidArgument, match="dtype is 'float'"):
            ringreduce.empty(2, dtype="float")
        del tensor
        for size in ((2, 3), torch.Size((2, 3)), [2, 3]):
            assert ringreduce.empty(size).shape == (2, 3)
        assert ringreduce.empty(0).shape == (0,) and ringreduce.empty(dtype=torch.bool).shape == ()
        assert backend().allocate_tensor(5, dtype=torch.int8, device=CPU).shape == (5,)
        kept = ringreduce.empty(1000).fill_(3)
        pid = os.fork()
        if pid == 0:
            del kept  # leaves the parent's memory alone
            os._exit(0)
        assert os.waitpid(pid, 0)[1] == 0
        me.meet("child gone")
        assert kept.eq(3).all()
    assert kept.eq(3).all()  # and it outlives its group
    for without in (ringreduce.Options(arena_bytes=0), ringreduce.Options(transport="gloo")):
        with me.join(options=without):
            total = ringreduce.empty(3, dtype=torch.int64).fill_(1)  # an ordinary tensor
            ringreduce.all_reduce(total)
            assert total.eq(me.size).all()


# torch's own debugging mode


@on_ranks(3)
def test_debug_mode_detail(me: Rank) -> None:
    os.environ["TORCH_DISTRIBUTED_DEBUG"] = "DETAIL"
    dist.set_debug_level_from_env()
    with me.join():
        tensor = torch.full((5,), float(me.rank))
        dist.all_reduce(tensor)
        assert tensor.eq(3).all()
        ringreduce.all_reduce(tensor)
        assert tensor.eq(9).all()
        ringreduce.monitored_barrier()
        gathered = torch.empty(3 * me.size)
        dist.all_gather_into_tensor(gathered, torch.full((3,), float(me.rank)))
        group = dist.new_group([0, 1])
        if me.rank < 2:
            dist.broadcast(tensor, 0, group=group)
        stats = ringreduce.stats()
        assert stats[dist.group.WORLD.group_name]["all_reduce"].calls == 2  # type: ignore[union-attr]
        assert me.rank == 2 or stats[group.group_name]["broadcast"].calls == 1
        with pytest.raises(RuntimeError, match=r"[Mm]ismatch"):
            dist.all_reduce(torch.ones(3 + me.rank))


# odd tensors


@on_ranks(2)
def test_inference_tensors(me: Rank) -> None:
    with me.join():
        for asynchronous in (False, True):
            with torch.inference_mode():
                tensors = [torch.ones(4, 6), torch.ones(6, 4).t(), torch.ones(4, 12)[:, ::2]]
                for tensor in tensors:
                    work = dist.all_reduce(tensor, async_op=asynchronous)
                    if asynchronous:
                        work.wait()
            for tensor in tensors:
                ringreduce.all_reduce(tensor)
                assert tensor.eq(4).all()


@on_ranks(2)
def test_tensors_without_memory_are_refused(me: Rank) -> None:
    with me.join():
        with FakeTensorMode():
            fake = torch.ones(3)
        for tensor in (fake, TwoTensor(torch.ones(3), torch.ones(3))):
            with pytest.raises(InvalidArgument, match="has no memory"):
                ringreduce.all_reduce(tensor)
        dist.barrier()


@on_ranks(2)
def test_one_tensor_as_input_and_output(me: Rank) -> None:
    with me.join():
        tensor = torch.arange(4.0) + 10 * me.rank
        for call in (ringreduce.all_gather_into_tensor, ringreduce.reduce_scatter_tensor):
            with pytest.raises(InvalidArgument, match="elements, must have"):
                call(tensor, tensor)
        ringreduce.all_to_all_single(tensor, tensor)
        assert tensor.tolist() == ([0, 1, 10, 11] if me.rank == 0 else [2, 3, 12, 13])


@on_ranks(2)
def test_outputs_that_overlap_in_strides_are_refused(me: Rank) -> None:
    with me.join():
        matrix = torch.zeros(6, 8)
        mine = torch.full((6, 4), float(me.rank))
        ringreduce.all_gather([matrix[:, ::2], matrix[:, 1::2]], mine)  # interleaved, but apart
        assert matrix[:, ::2].eq(0).all() and matrix[:, 1::2].eq(1).all()
        for overlapping in ([matrix[:, :4], matrix[:, 3:7]], [matrix.t()[:4].t()] * 2):
            with pytest.raises(InvalidArgument, match="share memory"):
                ringreduce.all_gather(overlapping, mine)
