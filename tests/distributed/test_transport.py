"""Plans over another backend's messages, Gloo's: all collectives, the same bits as in shared memory, faults."""

from __future__ import annotations

import dataclasses
import functools
import os
import signal
import time
from typing import Any

import pytest
import torch
import torch.distributed as dist
from bodies import collectives
from distributed.harness import Rank, Ranks, on_ranks, run, run_cases

import ringreduce
from ringreduce.errors import Aborted, CollectiveMismatch, CollectiveTimeout, InvalidArgument, PeerLost, RingReduceError
from ringreduce.plan import BUILDERS, Channel, Plan, Read, Step, build

RANKS = (2, 3, 4)
GLOO = ringreduce.Options(transport="gloo")
SMALL = ringreduce.Options(transport="gloo", engine="least_slice_bytes=64,slices=7")
IN_SHARED_MEMORY = ringreduce.Options(transport="shared_memory", engine="channel_bytes=64K,least_slice_bytes=64")
TIMEOUT = 3.0


# All collectives. Gloo itself refuses to receive nothing from anybody, so that one has cases of its own.


@pytest.mark.parametrize("ranks", RANKS)
def test_sizes(ranks: int) -> None:
    names = [name for name in collectives.COLLECTIVES if name != "recv_from_any"]
    run_cases(collectives.every_size, ranks, {name: (name, SMALL) for name in names})


@on_ranks(3)
def test_receives_from_any_rank(me: Rank) -> None:
    with me.join(options=GLOO):
        for call, count in enumerate((1, 10_007)):
            collectives.recv_from_any(me, count, call)


@pytest.mark.parametrize("ranks", RANKS)
def test_algorithms(ranks: int) -> None:
    options = functools.partial(ringreduce.Options, transport="gloo", engine="least_slice_bytes=64")
    cases = {
        f"{collective}:{name}": (collective, options(algorithms=f"{collective}:{name}"))
        for collective, names in BUILDERS.items()
        for name in names
        if len(names) > 1
    }
    run_cases(collectives.every_size, ranks, cases)


def all_by_default(me: Rank) -> None:
    with me.join():
        cases = [c for c in collectives.COLLECTIVES if c not in ("barrier", "recv_from_any")]
        for call, (collective, count) in enumerate((c, n) for c in cases for n in (5, 300_007)):
            collectives.COLLECTIVES[collective](me, count, call)


@on_ranks(2)
def test_the_variable_says_so_for_all_groups(me: Rank) -> None:
    os.environ["RINGREDUCE_TRANSPORT"] = "gloo"
    all_by_default(me)
    with me.join("again"), pytest.raises(InvalidArgument, match="share no memory"):
        ringreduce.monitored_barrier()


@on_ranks(1)
def test_a_group_of_one(me: Rank) -> None:
    with me.join(options=GLOO):
        for op in ("sum", "avg", "premul_sum"):
            tensor = torch.tensor([3.0, 4.0])
            ringreduce.all_reduce(tensor, collectives.OPS[op])
            collectives.same(tensor, torch.tensor([3.0, 4.0]) * (0.5 if op == "premul_sum" else 1))
        dist.barrier()


# The same bits as in shared memory


def bits(me: Rank, name: str, options: ringreduce.Options, plans: list[str]) -> list[bytes]:
    """What each plan makes of random numbers, and of ones whose sums are exact, for several operations and dtypes."""
    results = []
    with me.join(name, options=options):
        for number, text in enumerate(plans):
            plan = Plan.from_json(text)
            ringreduce.register_plan(plan)
            for dtype in (torch.float32, torch.bfloat16, torch.int32):
                for op in ("sum", "avg", "premul_sum"):
                    if not collectives.supported(dtype, op):
                        continue
                    for count in (1, 1_001, 20_011):
                        generator = torch.Generator().manual_seed(1 + me.rank + 17 * number)
                        exact = torch.randint(-3, 4, (count * me.size,), generator=generator)
                        rough = torch.randn(count * me.size, generator=generator) * 5
                        for values in (exact, rough):
                            results.append(result(plan.collective, values.to(dtype), collectives.OPS[op], me.size))
    return results


def result(collective: str, tensor: torch.Tensor, op: Any, size: int) -> bytes:
    if collective == "all_reduce":
        ringreduce.all_reduce(tensor, op)
    elif collective == "reduce_scatter":
        output = tensor.new_zeros(len(tensor) // size)
        ringreduce.reduce_scatter_tensor(output, tensor, op)
        tensor = output
    else:
        ringreduce.reduce(tensor, size - 1, op)
    return bytes(tensor.view(torch.uint8).numpy())


def both(me: Rank, plans: list[str]) -> tuple[list[bytes], list[bytes]]:
    return bits(me, "gloo", SMALL, plans), bits(me, "shared", IN_SHARED_MEMORY, plans)


@pytest.mark.slow
@pytest.mark.parametrize("ranks", RANKS)
@pytest.mark.parametrize("collective", ["reduce_scatter", "reduce"])  # test_same_bits.py has all_reduce
def test_the_same_plan_gives_the_same_bits(collective: str, ranks: int) -> None:
    plans = [build(collective, algorithm, ranks).to_json() for algorithm in BUILDERS[collective]]
    for over_gloo, in_shared_memory in run(both, ranks, plans):
        assert len(over_gloo) > 100
        assert over_gloo == in_shared_memory


def late_rank(phase: int, partial: bool) -> Plan:
    """Three ranks, of which rank 0 comes to chunk 0 in `phase`, 1 or 2, when the result is on its way, or there.

    Ranks 1 and 2 each make the result of chunk 0; rank 2 needs what rank 0 sends so late (its input, or with `partial`
    what it makes of its own and rank 1's, and writes), and rank 0 gets rank 1's result over it. Chunk 1 is what delays.
    """
    take = Read.INPUT
    send_1 = [Step(1, take, send=(0,)), Step(1, take, send=(0,))] if phase == 1 else [Step(1, take, send=(2,))]
    late = [Step(1, take, recv=(1, 2) if phase == 1 else (2,), write=True, send=(1, 2))]
    rank_0, rank_1, rank_2 = [Step(0, take, send=(1,)), *late], send_1[:1], send_1[1:]
    if phase == 2:
        rank_2 = [Step(1, take, recv=(1,), send=(0,))]
    if partial:
        rank_0 += [Step(0, take, recv=(1,), write=True, send=(2,))]
        rank_1 = [Step(0, take, send=(0,)), *rank_1, Step(0, take, recv=(0,), write=True)]
        rank_1 += [Step(0, Read.OUTPUT, recv=(2,), write=True, send=(0,))]
        rank_2 = [Step(0, take, send=(1,)), *rank_2, Step(0, take, recv=(0,), write=True)]
    else:
        rank_0 += [Step(0, take, send=(2,))]
        rank_1 += [Step(0, take, send=(2,)), Step(0, take, recv=(0, 2), write=True, send=(0,))]
        rank_2 = [Step(0, take, send=(1,)), *rank_2, Step(0, take, recv=(0, 1), write=True)]
    rank_0 += [Step(0, recv=(1,), write=True)]
    first = Step(1, recv=(0,), write=True)
    # What rank 0 sends of chunk 1 comes before what it sends of chunk 0.
    rank_2.insert(len(rank_2) - 1, first)
    rank_1.append(first)
    return Plan("late", "all_reduce", 3, (Channel(1, 2, (tuple(rank_0), tuple(rank_1), tuple(rank_2))),))


def run_late(me: Rank, text: str) -> None:
    with me.join(options=ringreduce.Options(transport="gloo", engine="least_slice_bytes=64")):
        ringreduce.register_plan(Plan.from_json(text))
        for call, count in enumerate((100, 70_001, 3_000_001)):
            collectives.all_reduce(me, count, call)


@pytest.mark.slow
@pytest.mark.parametrize(("phase", "partial"), [(1, False), (2, False), (2, True)])
def test_what_is_being_sent_is_not_overwritten(phase: int, partial: bool) -> None:
    run(run_late, 3, late_rank(phase, partial).to_json())


@on_ranks(3)
def test_every_dtype_and_operation(me: Rank) -> None:
    with me.join(options=GLOO):
        for dtype in collectives.DTYPES:
            for op, reduce_op in collectives.OPS.items():
                rows = collectives.operands(me.size, dtype, op)
                tensor = rows[me.rank].to(dtype, copy=True)
                if collectives.supported(dtype, op):
                    ringreduce.all_reduce(tensor, reduce_op)
                    expected = collectives.reduced(rows, op).to(dtype)
                    assert torch.equal(tensor.view(torch.uint8), expected.view(torch.uint8)), f"{dtype} {op}"


@on_ranks(3)
def test_asynchronous_calls_and_groups_of_some(me: Rank) -> None:
    with me.join(options=GLOO):
        tensors = [collectives.values(me.rank, 5_003, call) for call in range(20)]
        works = [dist.all_reduce(tensor, async_op=True) for tensor in tensors]
        for work in reversed(works):
            work.wait()
        for call, tensor in enumerate(tensors):
            collectives.same(tensor, collectives.total(me.size, 5_003, call))
        half = dist.new_group([0, 2], pg_options=GLOO)
        if me.rank in (0, 2):
            tensor = torch.ones(3)
            dist.all_reduce(tensor, group=half)
            collectives.same(tensor, torch.full((3,), 2.0))


# What goes wrong


def failure(call: Any, *args: Any, **kwargs: Any) -> tuple[str, str, int, float]:
    """The class, text and culprit of what a call raises, and how long it took."""
    began = time.monotonic()
    with pytest.raises(RingReduceError) as caught:
        call(*args, **kwargs)
    took = time.monotonic() - began
    return type(caught.value).__name__, str(caught.value), caught.value.culprit, took


def different_calls(me: Rank, how: str) -> tuple[str, str, int, float]:
    with me.join(options=GLOO, timeout=TIMEOUT):
        dist.all_reduce(torch.ones(5))
        odd = me.rank == me.size - 1
        if how == "count":
            return failure(dist.all_reduce, torch.ones(200 if odd else 100))
        if how == "dtype":
            return failure(dist.all_reduce, torch.ones(100, dtype=torch.int32 if odd else torch.float32))
        if how == "op":
            return failure(dist.all_reduce, torch.ones(100), dist.ReduceOp.MAX if odd else dist.ReduceOp.SUM)
        if how == "collective":
            return failure(dist.barrier) if odd else failure(dist.all_reduce, torch.ones(100))
        return failure(dist.broadcast, torch.ones(100), 1 if odd else 0)


@pytest.mark.parametrize("ranks", [2, 4])
def test_different_calls_are_found_out(ranks: int) -> None:
    words = {"count": "count=200", "dtype": "dtype=int32", "op": "op=max", "collective": "barrier()", "root": "root=1"}
    for how, outcomes in run_cases(different_calls, ranks, {how: (how,) for how in words}).items():
        for kind, text, _, _ in outcomes:
            assert kind == CollectiveMismatch.__name__, how
            assert words[how] in text and "made different calls" in text
            assert "broadcast(count=100" in text or "all_reduce(count=100" in text


def waits_in_vain(me: Rank, algorithm: str) -> Any:
    options = ringreduce.Options(transport="gloo", algorithms=f"all_reduce:{algorithm}")
    dist.init_process_group(
        "ringreduce", store=dist.PrefixStore("x", me.store), rank=me.rank, world_size=me.size, pg_options=options
    )
    dist.all_reduce(torch.ones(5))
    me.report(None)
    if me.rank == 1:
        time.sleep(60)
    first = failure(dist.all_reduce, torch.ones(5))
    later = failure(dist.barrier)
    assert first[:3] == later[:3]
    return first


@pytest.mark.parametrize("algorithm", ["one_shot", "ring"])
def test_a_dead_peer_is_named_by_all(algorithm: str) -> None:
    with Ranks(waits_in_vain, 4, algorithm) as ranks:
        ranks.reports()
        ranks.signal(1, signal.SIGKILL)
        for kind, text, culprit, took in ranks.results(but=(1,)):
            assert (kind, culprit) == (PeerLost.__name__, 1), text
            assert "all_reduce seq 2" in text and "rank 1 (" in text and str(ranks.pid(1)) in text
            assert took < 20  # of a timeout of 30 minutes


def late(me: Rank) -> Any:
    with me.join(options=GLOO, timeout=TIMEOUT):
        dist.all_reduce(torch.ones(5))
        if me.rank == 1:
            me.meet("over")
            return None
        caught = failure(dist.all_reduce, torch.ones(5))
        me.meet("over")
        return caught


def test_a_timeout_names_whom_it_waited_for() -> None:
    first, _, third = run(late, 3)
    for kind, text, culprit, took in (first, third):
        assert (kind, culprit) == (CollectiveTimeout.__name__, 1), text
        assert "all_reduce seq 2" in text and "rank 1 (" in text and "count=5" in text
        assert took > TIMEOUT * 0.9


@on_ranks(3)
def test_abort_ends_all_ranks_calls(me: Rank) -> None:
    with me.join(options=GLOO):
        dist.all_reduce(torch.ones(5))
        if me.rank == 1:
            dist.group.WORLD._get_backend(torch.device("cpu")).abort()
        kind, text, _, _ = failure(dist.all_reduce, torch.ones(5))
        assert kind == Aborted.__name__ and "rank 1 aborted the group" in text


@on_ranks(2)
def test_what_cannot_be_done_is_refused_and_the_group_lives_on(me: Rank) -> None:
    with me.join(options=GLOO):
        with pytest.raises(InvalidArgument, match=r"monitored_barrier: .* share no memory"):
            ringreduce.monitored_barrier(timeout=1)
        with pytest.raises(InvalidArgument, match="the tag 2147483647"):
            dist.send(torch.ones(1), 1 - me.rank, tag=2**31 - 1)
        with pytest.raises(InvalidArgument, match="src is 2"):
            ringreduce.broadcast(torch.ones(1), 2)
        x = torch.ones(1000)
        asked: list[dict[str, Any]] = [{"wire_dtype": "int8"}, {"wire_dtype": "int4", "async_op": True}]
        for how in (*asked, {"feedback": ringreduce.Feedback()}):
            told = f"wire_dtype is '{how.get('wire_dtype', 'float32')}'.* transport is 'gloo', .* make the group with"
            with pytest.raises(InvalidArgument, match=told):
                ringreduce.all_reduce(x, **how)
        ringreduce.all_reduce(x, wire_dtype="float32")  # which it does
        assert torch.equal(x, torch.full((1000,), float(me.size)))
    rounded = me.join("rounded", options=dataclasses.replace(GLOO, wire_dtype="int8"))
    with pytest.raises(InvalidArgument, match=r"wire_dtype is 'int8' and transport is 'gloo', .* make the group with"):
        rounded.__enter__()


@pytest.mark.parametrize("first", ["gloo", "shared_memory"])
@on_ranks(2)
def test_all_ranks_must_take_the_same_transport(me: Rank, first: str) -> None:
    transport = first if me.rank == 0 else {"gloo": "shared_memory", "shared_memory": "gloo"}[first]

    def join() -> None:
        with me.join(options=ringreduce.Options(transport=transport), timeout=TIMEOUT):
            pass

    kind, text, _, _ = failure(join)
    assert kind == InvalidArgument.__name__ and "transport='gloo'" in text
