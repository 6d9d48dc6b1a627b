"""What calls on CUDA tensors promise: what comes after what, what waits, what may be freed; graphs, works, reports."""

from __future__ import annotations

import pickle
from collections.abc import Callable
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from distributed.cuda_ranks import on_ranks, options, run
from distributed.harness import Rank
from stand_in.torch_cuda import delay
from torch.profiler import ProfilerActivity, profile

import ringreduce
from ringreduce import Options
from ringreduce.errors import CollectiveMismatch, CollectiveTimeout, InvalidArgument

COUNT = 5000
SUM = {2: 3.0, 3: 6.0}
"""Of what ranks give, which is 1 more than their number."""


def ones(rank: int, count: int = COUNT) -> torch.Tensor:
    return torch.full((count,), rank + 1.0, device="cuda")


def check(tensor: torch.Tensor, value: float) -> None:
    assert tensor.unique().tolist() == [value]


def while_late(late: torch.cuda.Stream, attempt: Callable[[], Any]) -> Any:
    """What `attempt`, made when `late` is behind a delay, returns before that is over, on all ranks."""
    for milliseconds in (50, 500, 5000):
        torch.cuda.synchronize()
        dist.barrier()
        with torch.cuda.stream(late):
            delay(milliseconds)
            over = late.record_event()
        seen = attempt()
        in_time = torch.tensor([not over.query()])
        dist.all_reduce(in_time, dist.ReduceOp.BAND)
        if in_time.item():
            return seen
        torch.cuda.synchronize()
    pytest.fail("the delay was always over: what should not wait for it does")


# order


@on_ranks(2)
def test_calls_come_after_what_was_queued_and_nothing_waits_here(me: Rank, mode: str) -> None:
    with me.join(options=options(mode)):
        main, other = torch.cuda.current_stream(), torch.cuda.Stream()
        x = torch.zeros(COUNT, device="cuda")
        dist.all_reduce(x)

        def synchronous() -> torch.Tensor:
            x.fill_(me.rank + 1)
            dist.all_reduce(x)
            return x * 2

        check(while_late(main, synchronous), 2 * SUM[me.size])

        def asynchronous() -> tuple[torch.Tensor, dist.Work, list[bool]]:
            x.fill_(me.rank + 1)
            work = dist.all_reduce(x, async_op=True)
            completed = [work.is_completed()]
            work.wait()
            return x * 2, work, [*completed, work.is_completed()]

        doubled, work, completed = while_late(main, asynchronous)
        assert completed == [False, False]
        check(doubled, 2 * SUM[me.size])
        torch.cuda.synchronize()
        assert work.is_completed()

        def consumed_elsewhere() -> torch.Tensor:
            with torch.cuda.stream(other):
                x.fill_(me.rank + 1)
                work = dist.all_reduce(x, async_op=True)
            main.synchronize()  # which waits neither for the producer nor for the call
            with torch.cuda.stream(other):
                work.wait()
                doubled = x * 2
            main.synchronize()
            return doubled

        doubled = while_late(other, consumed_elsewhere)
        other.synchronize()
        check(doubled, 2 * SUM[me.size])


def many_at_once(me: Rank, mode: str) -> None:
    with me.join(options=options(mode)):
        xs = [ones(me.rank) * factor for factor in range(1, 9)]
        for work in reversed([dist.all_reduce(x, async_op=True) for x in xs]):
            work.wait()
        for factor, x in enumerate(xs, 1):
            check(x, factor * SUM[me.size])

        # Ranks have the delays at different calls, in different streams.
        streams = [torch.cuda.Stream() for _ in range(3)]
        xs = []
        for call in range(24):
            with torch.cuda.stream(streams[(call + call // 5) % 3]):
                if call % 4 == me.rank:
                    delay(5)
                xs.append(ones(me.rank, 100 + call))
                if call % 2:
                    dist.all_reduce(xs[-1])
                else:
                    dist.all_reduce(xs[-1], async_op=True).wait()
        torch.cuda.synchronize()
        for x in xs:
            check(x, SUM[me.size])


@pytest.mark.parametrize(("ranks", "mode"), [(3, "steps"), (2, "run")])
def test_many_calls_from_many_streams(ranks: int, mode: str) -> None:
    run(many_at_once, ranks, mode)


# memory


@on_ranks(2)
def test_tensors_may_be_freed_before_an_asynchronous_call_reads_them(me: Rank, mode: str) -> None:
    """The tensor of a call is freed before the call gets to it, since an earlier one is late."""
    with me.join(options=options(mode)):
        main, side, other = torch.cuda.current_stream(), torch.cuda.Stream(), torch.cuda.Stream()
        x = ones(me.rank)
        dist.all_reduce(x)
        torch.cuda.synchronize()

        def call_and_free(waits: str, strided: bool) -> tuple[torch.Tensor, Any]:
            with torch.cuda.stream(side):
                late = dist.all_reduce(x, async_op=True)
            part = torch.full((COUNT, 2), me.rank + 1.0, device="cuda")
            given = part[:, 0] if strided else part
            gathered = torch.zeros(me.size * given.numel(), device="cuda")
            main.synchronize()
            work = dist.all_gather_into_tensor(gathered, given, async_op=True)
            if waits == "elsewhere":
                with torch.cuda.stream(other):
                    work.wait()
            del part, given
            rubbish = [torch.full((COUNT, 2), 99.0, device="cuda") for _ in range(4)]
            if waits != "elsewhere":
                work.wait()
            late.wait()
            return gathered, rubbish

        for strided in (False, True):
            for waits in ("here", "elsewhere"):
                gathered, rubbish = while_late(side, lambda w=waits, s=strided: call_and_free(w, s))
                torch.cuda.synchronize()
                for rank, block in enumerate(gathered.view(me.size, -1)):
                    check(block, rank + 1.0)
                del rubbish


# works


@on_ranks(2)
def test_what_a_work_can_be_asked(me: Rank, mode: str) -> None:
    main = torch.cuda.current_stream()
    with me.join(options=options(mode)):
        x = ones(me.rank)
        dist.all_reduce(x)

        def asynchronous() -> tuple[dist.Work, Any]:
            x.fill_(me.rank + 1)
            work = dist.all_reduce(x, async_op=True)
            return work, work.get_future().then(lambda future: [future.value()[0] + 1])

        work, plus_one = while_late(main, asynchronous)
        assert work.get_future().done()
        (value,) = plus_one.wait()
        check(value, SUM[me.size] + 1)
        assert work.result()[0].data_ptr() == x.data_ptr()

        # Rank 1 calls only after rank 0 has lost its patience.
        x = ones(me.rank)
        if me.rank == 0:
            work = dist.all_reduce(x, async_op=True)
            with pytest.raises(CollectiveTimeout, match=r"all_reduce number \d+ .* waited the 50 ms"):
                work.wait(timedelta(milliseconds=50))
            assert not work.is_completed()
        me.meet("impatient")
        if me.rank == 1:
            work = dist.all_reduce(x, async_op=True)
        work.wait(timedelta(seconds=30))
        assert work.is_completed() and work.is_success()
        check(x, SUM[me.size])

        dist.group.WORLD._enable_collectives_timing()  # type: ignore[union-attr]
        work = dist.all_reduce(x, async_op=True)
        work.wait()
        torch.cuda.synchronize()
        assert work._get_duration() > 0


@on_ranks(2)
def test_a_wait_on_the_host_hears_of_a_call_that_failed(me: Rank, mode: str) -> None:
    with me.join(options=options(mode), timeout=20):
        dist.all_reduce(ones(me.rank))
        work = dist.all_reduce(ones(me.rank, 100 + me.rank), async_op=True)
        with pytest.raises(CollectiveMismatch):
            work.wait(timedelta(seconds=30))
        with pytest.raises(CollectiveMismatch):
            dist.all_reduce(ones(me.rank))


# graphs


def graphs(me: Rank, mode: str) -> None:
    with me.join(options=options(mode)):
        x, y, part = (torch.zeros(COUNT, device="cuda") for _ in range(3))
        gathered = torch.zeros(me.size * COUNT, device="cuda")
        dist.all_reduce(x)
        first, second = torch.cuda.CUDAGraph(), torch.cuda.CUDAGraph()
        with torch.cuda.graph(first):
            x.add_(me.rank + 1)
            dist.all_reduce(x)
            work = dist.all_gather_into_tensor(gathered, part, async_op=True)
            y.copy_(x)
            work.wait()
            gathered.mul_(2)
        with torch.cuda.graph(second):
            dist.all_reduce(y, dist.ReduceOp.MAX)
            dist.reduce_scatter_tensor(part, gathered)
        check(x, 0)  # nothing has run yet

        for replay in range(1, 5):
            x.fill_(replay)
            part.fill_(me.rank + replay)
            first.replay()
            check(y, me.size * replay + SUM[me.size])
            for rank, block in enumerate(gathered.view(me.size, -1)):
                check(block, 2 * (rank + replay))
            z = ones(me.rank)
            dist.all_reduce(z)
            check(z, SUM[me.size])
            y.fill_(me.rank)
            second.replay()
            check(y, me.size - 1)
            check(part, me.size * 2 * (me.rank + replay))
            z = ones(me.rank)
            dist.all_reduce(z, async_op=True).wait()
            check(z, SUM[me.size])
        for _ in range(20):  # without a pause
            first.replay()
            second.replay()
        torch.cuda.synchronize()


@pytest.mark.parametrize(("ranks", "mode"), [(3, "steps"), (2, "run")])
def test_graphs_are_replayed_between_other_calls(ranks: int, mode: str) -> None:
    run(graphs, ranks, mode)


@on_ranks(2)
def test_tensors_may_be_freed_within_a_graph(me: Rank, mode: str) -> None:
    """As without a graph; within one, where memory is taken again as well."""
    with me.join(options=options(mode)):
        x = ones(me.rank)
        gathered = torch.zeros(me.size * COUNT, device="cuda")
        dist.all_reduce(x)
        graph, side = torch.cuda.CUDAGraph(), torch.cuda.Stream()
        torch.cuda.synchronize()
        with torch.cuda.graph(graph):
            main = torch.cuda.current_stream()
            side.wait_stream(main)
            with torch.cuda.stream(side):
                delay(50)
                late = dist.all_reduce(x, async_op=True)
            part = torch.full((COUNT,), me.rank + 1.0, device="cuda")
            work = dist.all_gather_into_tensor(gathered, part, async_op=True)
            del part
            rubbish = [torch.full((COUNT,), 99.0, device="cuda") for _ in range(4)]
            work.wait()
            late.wait()
            main.wait_stream(side)
        for _ in range(2):
            graph.replay()
            for rank, block in enumerate(gathered.view(me.size, -1)):
                check(block, rank + 1.0)
        del rubbish


@on_ranks(2)
def test_the_first_call_of_a_group_may_be_captured(me: Rank, mode: str) -> None:
    with me.join(options=options(mode)):
        x = ones(me.rank)
        graph = torch.cuda.CUDAGraph()
        torch.cuda.synchronize()
        with torch.cuda.graph(graph):
            dist.all_reduce(x)
        check(x, me.rank + 1)
        graph.replay()
        check(x, SUM[me.size])


def through_the_host(me: Rank, mode: str, transport: str) -> None:
    with me.join(options=Options(gpu_transport=transport, engine=f"gpu_mode={mode}")):
        x = ones(me.rank)
        calls = [lambda: dist.send(x, 1) if me.rank == 0 else dist.recv(x, 0)]
        if transport == "host":
            calls += [lambda: dist.all_reduce(x), lambda: dist.broadcast(x, 0, async_op=True)]
        for call in calls:
            torch.cuda.synchronize()
            with (
                pytest.raises(InvalidArgument, match=r"captured.* host's memory.* outside of the capture"),
                torch.cuda.graph(torch.cuda.CUDAGraph()),
            ):
                call()
        dist.all_reduce(x)
        check(x, SUM[me.size])


@pytest.mark.parametrize("transport", ["peer", "host"])
def test_what_goes_through_the_host_cannot_be_captured(transport: str) -> None:
    run(through_the_host, 2, "steps", transport)


# what can be seen from outside


@on_ranks(2)
def test_calls_are_profiled_recorded_counted_and_told_to_hooks(me: Rank, mode: str, tmp_path: Path) -> None:
    with me.join(options=options(mode)):
        group, heard = dist.group.WORLD, []
        assert group is not None
        dist.all_reduce(ones(me.rank))
        with profile(activities=[ProfilerActivity.CPU], record_shapes=True) as profiler:
            dist.all_reduce(ones(me.rank, 11))
            dist.broadcast(ones(me.rank, 12), 0, async_op=True).wait()
        events = {e.name: e.input_shapes for e in profiler.events() if e.name.startswith("ringreduce:")}
        assert events == {"ringreduce:all_reduce": [[11]], "ringreduce:broadcast": [[12]]}

        group._register_on_completion_hook(heard.append)
        dist.all_reduce(ones(me.rank, 13))
        dist.all_reduce(ones(me.rank, 14), async_op=True).wait()
        group._wait_for_pending_works()
        heard.sort(key=lambda info: info.seq)  # several threads tell
        assert [info.op_type.name for info in heard] == ["ALLREDUCE"] * 2
        assert heard[0].seq + 1 == heard[1].seq
        assert all(info.time_finished >= info.time_started for info in heard)

        path = tmp_path / f"rank{me.rank}"
        ringreduce.dump_flight_record(path)
        entries = [e for e in pickle.loads(path.read_bytes())["entries"] if e["collective_seq_id"] > 0]
        assert [e["input_sizes"] for e in entries[-5:]] == [[[count]] for count in (COUNT, 11, 12, 13, 14)]
        assert {e["state"] for e in entries} == {"completed"}
        stats = ringreduce.stats()[group.group_name]
        assert (stats["all_reduce"].calls, stats["broadcast"].calls) == (4, 1)
        assert stats["all_reduce"].bytes == 4 * (COUNT + 11 + 13 + 14)


@on_ranks(2)
def test_tensors_that_cannot_be_served_are_refused(me: Rank, mode: str) -> None:
    with me.join(options=options(mode)):
        with pytest.raises(InvalidArgument, match=r"different devices: (cpu and cuda|cuda.* and cpu)"):
            ringreduce.all_gather_into_tensor(ones(0, 2 * COUNT), torch.ones(COUNT))
        with pytest.raises(InvalidArgument, match="on meta"):
            ringreduce.all_reduce(torch.ones(3, device="meta"))
        dist.all_reduce(ones(me.rank))
        if torch.cuda.device_count() > 1:
            elsewhere = torch.ones(3, device=f"cuda:{1 - torch.cuda.current_device()}")
            with pytest.raises(InvalidArgument, match=r"this rank's calls of the group are on cuda:\d"):
                ringreduce.all_reduce(elsewhere)
        x = ones(me.rank)
        dist.all_reduce(x)
        check(x, SUM[me.size])
