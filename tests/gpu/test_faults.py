"""What every rank sees when another dies, stops, comes late or calls something else while CUDA tensors are under way:
the right error on all of them, streams that go on, and a new group that works.

Ranks take steps, all on one GPU, or run, on one each where there are enough.
"""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Callable
from datetime import timedelta
from typing import Any

import pytest
import torch
import torch.distributed as dist
from distributed.harness import Rank, Ranks, run
from stand_in import torch_cuda
from stand_in.torch_cuda import delay

from ringreduce import Options
from ringreduce.errors import Aborted, CollectiveMismatch, CollectiveTimeout, PeerLost, RingReduceError

RANKS = 3
VICTIM = 1
SURVIVORS = [0, 2]
COUNT = 100_003  # float32 elements
LONG = 60_000.0  # ms: nobody waits for its end

modes = pytest.mark.parametrize(
    "mode", ["steps", "run"] if torch.version.cuda is None or torch.cuda.device_count() >= RANKS else ["steps"]
)

Error = tuple[type[RingReduceError], str, int]


def on_devices(me: Rank, mode: str, body: Callable[..., Any], *arguments: Any) -> Any:
    """What `body(me, options, *arguments)` returns: all ranks on one GPU, or each on its own."""
    os.environ["RINGREDUCE_STAND_IN_DEVICES"] = str(RANKS)
    torch_cuda.activate()
    torch.cuda.set_device(0 if mode == "steps" else me.rank)
    return body(me, Options(gpu_transport="peer", engine=f"gpu_mode={mode}"), *arguments)


def error_of(call: Callable[[], Any]) -> Error:
    with pytest.raises(RingReduceError) as raised:
        call()
    return raised.type, str(raised.value), raised.value.culprit


def wait_for_it(tensor: torch.Tensor) -> None:
    dist.all_reduce(tensor, async_op=True).wait(timedelta(seconds=30))


def synchronize_then_call(tensor: torch.Tensor) -> None:
    dist.all_reduce(tensor)
    torch.cuda.synchronize()
    dist.all_reduce(tensor)


def call_again(tensor: torch.Tensor) -> None:
    while True:
        dist.all_reduce(tensor)
        time.sleep(0.01)


def until_it_fails(call: Callable[[], Any]) -> Error:
    def repeat() -> None:
        while True:
            call()
            torch.cuda.synchronize()

    return error_of(repeat)


def works(members: list[int], me: Rank) -> None:
    tensor = torch.full((COUNT,), float(me.rank + 1), device="cuda")
    dist.all_reduce(tensor)
    assert tensor.eq(float(sum(r + 1 for r in members))).all()


def afterwards(me: Rank, options: Options, members: list[int]) -> None:
    """Nothing runs on the GPU any more, and a new group works."""
    torch.cuda.synchronize()
    with me.join("afterwards", members, options=options):
        works(members, me)


# death


def loses_a_rank(me: Rank, options: Options, when: str, way: Callable[[torch.Tensor], None]) -> Error:
    with me.join(timeout=30, options=options):
        works([*range(me.size)], me)
        tensor = torch.ones(COUNT, device="cuda")
        if me.rank == VICTIM:
            if when == "during":  # its part of the call never begins
                delay(LONG)
                dist.all_reduce(tensor)
            me.report(None)
            signal.pause()
        if when == "before":
            me.report(None)
            time.sleep(0.5)
        error = error_of(lambda: way(tensor))
        torch.cuda.synchronize()
        assert error_of(lambda: dist.all_reduce(tensor)) == error
    afterwards(me, options, SURVIVORS)
    return error


@modes
@pytest.mark.parametrize(
    ("when", "way"), [("before", synchronize_then_call), ("during", wait_for_it), ("during", call_again)]
)
def test_survivors_name_the_dead_rank(mode: str, when: str, way: Callable[[torch.Tensor], None]) -> None:
    with Ranks(on_devices, RANKS, mode, loses_a_rank, when, way) as ranks:
        ranks.reports(but=(0, 2) if when == "during" else ())
        ranks.signal(VICTIM, signal.SIGKILL)
        for kind, message, culprit in ranks.results(but=(VICTIM,)):
            assert (kind, culprit) == (PeerLost, VICTIM), message
            assert "all_reduce" in message and f"rank {VICTIM} (" in message and str(ranks.pid(VICTIM)) in message


def queues_many_calls(me: Rank, options: Options) -> Error | None:
    with me.join(timeout=30, options=options):
        works([*range(me.size)], me)
        tensor = torch.ones(1, device="cuda")
        if me.rank == VICTIM:
            me.report(None)
            signal.pause()
        for _ in range(1200):
            dist.all_reduce(tensor)
        me.report(None)
        return until_it_fails(lambda: dist.all_reduce(tensor))


@pytest.mark.skipif(torch.version.cuda is not None, reason="a GPU's stream takes less before it holds up the host")
@pytest.mark.parametrize("mode", ["steps", "run"])
def test_survivors_with_many_calls_behind_the_dead_rank_s_name_it(mode: str) -> None:
    with Ranks(on_devices, RANKS, mode, queues_many_calls) as ranks:
        ranks.reports()
        ranks.signal(VICTIM, signal.SIGKILL)
        for kind, message, culprit in ranks.results(but=(VICTIM,)):
            assert (kind, culprit) == (PeerLost, VICTIM), message


# stopped and late ranks


def waits_in_vain(me: Rank, options: Options, stops: bool, way: Callable[[torch.Tensor], None]) -> Error:
    with me.join(timeout=1.5, options=options):
        works([*range(me.size)], me)
        tensor = torch.ones(COUNT, device="cuda")
        if me.rank == VICTIM and stops:
            os.kill(os.getpid(), signal.SIGSTOP)
        if me.rank != VICTIM:
            error = error_of(lambda: way(tensor))
            torch.cuda.synchronize()
            me.report(error)
        me.meet("the others have failed")
        error = until_it_fails(lambda: dist.all_reduce(tensor))
    afterwards(me, options, [*range(me.size)])
    return error


@modes
@pytest.mark.parametrize(("stops", "way"), [(False, wait_for_it), (False, call_again), (True, synchronize_then_call)])
def test_a_late_rank_is_named_by_the_timeout(mode: str, stops: bool, way: Callable[[torch.Tensor], None]) -> None:
    with Ranks(on_devices, RANKS, mode, waits_in_vain, stops, way) as ranks:
        reports = ranks.reports(but=(VICTIM,))
        ranks.signal(VICTIM, signal.SIGCONT)
        results = ranks.results()
        for kind, message, culprit in [*reports, *results]:
            assert (kind, culprit) == (CollectiveTimeout, VICTIM), message
            assert "all_reduce" in message and f"rank {VICTIM} (" in message, message
            assert all(word in message for word in ("channel", "step", "round")), message


# other calls


def calls_something_else(me: Rank, options: Options, what: str) -> Error:
    with me.join(timeout=10, options=options):
        works([*range(me.size)], me)
        odd = me.rank == VICTIM and what != "nothing"
        tensor = torch.ones(COUNT - (odd and what == "count"), device="cuda")
        if odd and what == "dtype":
            tensor = tensor.int()
        op = dist.ReduceOp.MAX if odd and what == "op" else dist.ReduceOp.SUM

        def call() -> None:
            if odd and what == "collective":
                dist.broadcast(tensor, VICTIM)
            else:
                dist.all_reduce(tensor, op)

        error = until_it_fails(call)
    afterwards(me, options, [*range(me.size)])
    return error


@modes
@pytest.mark.parametrize("what", ["op", "count", "dtype", "collective"])
def test_ranks_that_make_different_calls_find_out(mode: str, what: str) -> None:
    for kind, message, culprit in run(on_devices, RANKS, mode, calls_something_else, what):
        assert kind is CollectiveMismatch, message
        assert culprit in range(RANKS)
        assert "all_reduce" in message or "broadcast" in message
        assert f"rank {culprit} (" in message


def gives_another_device(me: Rank, options: Options, first: bool) -> Error:
    """The odd rank gives a CPU tensor where the others give CUDA tensors."""
    with me.join(timeout=30, options=options):
        if not first:
            works([*range(me.size)], me)
        if me.rank == VICTIM:
            dist.group.WORLD.set_timeout(timedelta(seconds=1.5))  # type: ignore[union-attr]
        tensor = torch.ones(COUNT, device="cpu" if me.rank == VICTIM else "cuda")
        error = until_it_fails(lambda: dist.all_reduce(tensor))
    afterwards(me, options, [*range(me.size)])
    return error


@modes
def test_a_cpu_tensor_where_others_set_up_for_cuda_tensors(mode: str) -> None:
    for kind, message, _ in run(on_devices, RANKS, mode, gives_another_device, True):
        assert kind is CollectiveMismatch, message
        assert "set-up for CUDA tensors (the group's first call on one)" in message and "all_reduce(" in message, (
            message
        )


@modes
def test_a_cpu_tensor_where_others_give_cuda_tensors(mode: str) -> None:
    for kind, message, culprit in run(on_devices, RANKS, mode, gives_another_device, False):
        assert kind is CollectiveTimeout and culprit != VICTIM, message
        assert "Its GPU waits for rank" in message and "in a call on CUDA tensors" in message, message


def on_one_rank_only(me: Rank, options: Options) -> Error:
    with me.join(timeout=1.5, options=options):
        error = error_of(lambda: dist.all_reduce(torch.ones(COUNT, device="cuda"))) if me.rank == 0 else None
        me.meet("rank 0 has failed")
    return error or (CollectiveTimeout, "set-up for CUDA tensors", VICTIM)


@modes
def test_a_rank_that_does_not_set_up_for_cuda_tensors(mode: str) -> None:
    for kind, message, culprit in run(on_devices, RANKS, mode, on_one_rank_only):
        assert kind is CollectiveTimeout and culprit != 0
        assert message.startswith("set-up for CUDA tensors"), message


# giving up


def gpu_backend() -> Any:
    return dist.distributed_c10d._get_default_group()._get_backend(torch.device("cuda"))


def aborts(me: Rank, options: Options) -> Error:
    with me.join(timeout=30, options=options):
        works([*range(me.size)], me)
        tensor = torch.ones(COUNT, device="cuda")
        if me.rank != VICTIM:
            dist.all_reduce(tensor)
            assert not torch.cuda.current_stream().query()
        me.meet("the call is stuck")
        if me.rank == 0:
            gpu_backend().abort()
        torch.cuda.synchronize()
        me.meet("it is not any more")
        error = error_of(lambda: dist.all_reduce(tensor))
    afterwards(me, options, [*range(me.size)])
    return error


@modes
def test_abort_ends_a_call_that_is_stuck(mode: str) -> None:
    for kind, message, _ in run(on_devices, RANKS, mode, aborts):
        assert kind is Aborted
        assert "rank 0 aborted the group" in message


def leaves_a_call(me: Rank, options: Options) -> Error | None:
    error = None
    with me.join(timeout=1.5, options=options):
        works([*range(me.size)], me)
        tensor = torch.ones(COUNT, device="cuda")
        if me.rank == 0:
            dist.all_reduce(tensor)
    torch.cuda.synchronize()
    me.meet("rank 0 has left")
    afterwards(me, options, [*range(me.size)])
    return error


@modes
def test_a_group_can_be_destroyed_while_a_call_is_under_way(mode: str) -> None:
    run(on_devices, RANKS, mode, leaves_a_call)


def raises_an_exception(me: Rank, options: Options) -> Error | None:
    error = None
    tensor = torch.ones(COUNT, device="cuda")
    try:
        with me.join(timeout=30, options=options):
            works([*range(me.size)], me)
            if me.rank == VICTIM:
                raise ValueError("of the program")
            error = until_it_fails(lambda: dist.all_reduce(tensor))
    except ValueError:
        assert me.rank == VICTIM
    afterwards(me, options, [*range(me.size)])
    return error


@modes
def test_a_rank_that_leaves_by_an_exception_is_named(mode: str) -> None:
    errors = run(on_devices, RANKS, mode, raises_an_exception)
    for error in (errors[0], errors[2]):
        kind, message, culprit = error
        assert (kind, culprit) == (PeerLost, VICTIM), message
        assert f"rank {VICTIM} (" in message


# leaving


def leaves_at_once(me: Rank, options: Options, turns: int) -> None:
    late = torch.cuda.Stream()
    for turn in range(turns):
        with me.join(f"turn {turn}", options=options):
            source = turn % me.size
            tensor = torch.full((COUNT,), float(turn if me.rank == source else -1), device="cuda")
            dist.all_reduce(torch.ones(1, device="cuda"))
            late.wait_stream(torch.cuda.current_stream())
            with torch.cuda.stream(late):
                if me.rank != source:
                    delay(5)
                dist.broadcast(tensor, source)
        late.synchronize()
        assert tensor.eq(float(turn)).all()


@modes
def test_a_rank_that_leaves_after_its_last_call_leaves_nothing_unread(mode: str) -> None:
    run(on_devices, 2, mode, leaves_at_once, 50)


# graphs


def captured(tensor: torch.Tensor) -> torch.cuda.CUDAGraph:
    dist.all_reduce(tensor)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        dist.all_reduce(tensor)
    return graph


def replays_alone(me: Rank, options: Options, how: str) -> Error:
    with me.join(timeout=3, options=options):
        tensor = torch.zeros(COUNT, device="cuda")
        graph = captured(tensor)
        graph.replay()
        torch.cuda.synchronize()
        me.meet("replayed")
        if me.rank == VICTIM:
            if how == "abort":
                me.meet("aborted")
            elif how == "death":
                os.kill(os.getpid(), signal.SIGKILL)
        else:
            graph.replay()
            if how == "abort":
                if me.rank == 0:
                    gpu_backend().abort()
                me.meet("aborted")
            torch.cuda.synchronize()
        error = error_of(lambda: dist.all_reduce(tensor))
        graph.replay()  # does nothing any more
        torch.cuda.synchronize()
        assert error_of(lambda: dist.all_reduce(tensor)) == error
    afterwards(me, options, SURVIVORS if how == "death" else [*range(me.size)])
    return error


@modes
def test_a_replay_that_a_dead_rank_does_not_join_ends(mode: str) -> None:
    with Ranks(on_devices, RANKS, mode, replays_alone, "death") as ranks:
        for kind, message, culprit in ranks.results(but=(VICTIM,)):
            assert kind in (PeerLost, CollectiveTimeout), message
            assert culprit == VICTIM and "all_reduce" in message and f"rank {VICTIM} (" in message, message


@modes
def test_abort_ends_a_replay(mode: str) -> None:
    for kind, message, _ in run(on_devices, RANKS, mode, replays_alone, "abort"):
        assert kind is Aborted
        assert "rank 0 aborted the group" in message
