"""Ranks of a group that are threads of one process, on one GPU or on several."""

from __future__ import annotations

import threading

import pytest
import torch
import torch.distributed as dist
from distributed.cuda_threads import Member, all_collectives, run_threads

import ringreduce
from ringreduce.errors import CollectiveMismatch, CollectiveTimeout, InvalidArgument, PeerLost, RingReduceError

one_at_a_time = threading.Lock()
"""A thread's capture does not see what another's does."""


def collectives(me: Member) -> None:
    for n in (1, 1000, 70_001):
        all_collectives(me.rank, me.size, me.group, n)


@pytest.mark.parametrize(("size", "devices"), [(2, 1), (4, 1), (8, 1), (4, 2), (3, 3)])
def test_collectives(size: int, devices: int) -> None:
    run_threads(collectives, size, devices=devices, gpu_transport="peer")


@pytest.mark.parametrize("size", [2, 4, 8])
def test_collectives_in_one_kernel_a_call(size: int) -> None:
    """`gpu_mode=run` on one GPU: every rank's kernel waits for those of the others, so all must have room at once."""
    run_threads(collectives, size, devices=1, gpu_transport="peer", engine="gpu_mode=run")


def fills_the_gpu(me: Member) -> int:
    own = torch.arange(2**20, device="cuda").add_(me.rank).float()
    for _ in range(3):
        x = own.clone()
        ringreduce.all_reduce(x, group=me.group)
    expected = torch.arange(2**20, device="cuda").mul_(me.size).add_(sum(range(me.size))).float()
    return int((x != expected).sum())


@pytest.mark.parametrize("size", [2, 8])
def test_kernels_of_all_ranks_have_room_at_once(size: int) -> None:
    found = run_threads(fills_the_gpu, size, devices=1, gpu_transport="peer", engine="gpu_mode=run,gpu_blocks=1024")
    assert found == [0] * size


def replays(me: Member) -> list[float]:
    source, x = torch.zeros(1000, device="cuda"), torch.empty(1000, device="cuda")
    ringreduce.all_reduce(x, group=me.group)
    torch.cuda.current_stream().synchronize()
    me.meet("idle")  # a capture begins by waiting for the whole GPU
    graph = torch.cuda.CUDAGraph()
    with one_at_a_time, torch.cuda.graph(graph, stream=torch.cuda.Stream(), capture_error_mode="thread_local"):
        source.add_(me.rank + 1)
        x.copy_(source)
        ringreduce.all_reduce(x, group=me.group)
    me.meet("captured")
    for _ in range(20):
        graph.replay()
    torch.cuda.current_stream().synchronize()
    return x.unique().tolist()


def test_calls_in_one_kernel_can_be_captured() -> None:
    found = run_threads(replays, 2, devices=1, gpu_transport="peer", engine="gpu_mode=run")
    assert found == [[20.0 * 3]] * 2


def goes_on_without_rank_2(me: Member) -> str:
    x = torch.ones(1000, device="cuda")
    ringreduce.all_reduce(x, group=me.group)
    torch.cuda.synchronize()
    me.meet("joined")
    if me.rank == 2:
        me.meet("over")
        return ""
    with pytest.raises(CollectiveTimeout) as raised:
        ringreduce.all_reduce(x, group=me.group)
    me.meet("over")
    return str(raised.value)


def test_a_thread_that_does_not_call_is_named() -> None:
    for text in run_threads(goes_on_without_rank_2, 3, devices=1, timeout=3, gpu_transport="peer")[:2]:
        assert "for rank 2 (" in text and "shares its process" in text


def goes_on_after_rank_2(me: Member) -> str:
    x = torch.ones(1000, device="cuda")
    ringreduce.all_reduce(x, group=me.group)
    me.meet("joined")
    if me.rank == 2:
        return ""
    with pytest.raises(PeerLost) as raised:
        ringreduce.all_reduce(x, group=me.group)
    return str(raised.value)


def test_a_thread_that_has_left_is_named() -> None:
    for text in run_threads(goes_on_after_rank_2, 3, devices=1, gpu_transport="peer")[:2]:
        assert "rank 2 (" in text and "is gone" in text


def calls_something_else(me: Member) -> str:
    x = torch.ones(1000 + me.rank, device="cuda")
    with pytest.raises(CollectiveMismatch) as raised:
        ringreduce.all_reduce(x, group=me.group)
    with pytest.raises(RingReduceError):
        ringreduce.all_reduce(x, group=me.group)
    return str(raised.value)


def test_different_calls() -> None:
    for text in run_threads(calls_something_else, 2, devices=1, gpu_transport="peer"):
        assert "different calls" in text and "same order" in text


def calls_something_new(me: Member) -> str:
    """A rank whose plan and kernel are there already, and another one that would have to load its own first."""
    x = torch.ones(1000, device="cuda")
    ringreduce.all_reduce(x, group=me.group)
    torch.cuda.synchronize()
    me.meet("joined")
    with pytest.raises(CollectiveMismatch) as raised:
        ringreduce.all_reduce(x, dist.ReduceOp.SUM if me.rank == 0 else dist.ReduceOp.MAX, group=me.group)
        torch.cuda.synchronize()
        ringreduce.all_reduce(x, group=me.group)
    return str(raised.value)


@pytest.mark.parametrize("devices", [1, 2])
def test_a_call_that_only_one_rank_has_made_before(devices: int) -> None:
    for text in run_threads(calls_something_new, 2, devices=devices, gpu_transport="peer"):
        assert "different calls" in text and "same order" in text


def captures(me: Member) -> str:
    x = torch.ones(1000, device="cuda")
    ringreduce.all_reduce(x, group=me.group)
    torch.cuda.synchronize()
    me.meet("joined")
    refused = ""
    if me.rank == 0:
        stream = torch.cuda.Stream()
        with torch.cuda.graph(torch.cuda.CUDAGraph(), stream=stream), pytest.raises(InvalidArgument) as raised:
            ringreduce.all_reduce(x, group=me.group)
        refused = str(raised.value)
    me.meet("over")
    return refused


def test_a_capture_is_refused() -> None:
    refused, _ = run_threads(captures, 2, devices=1, gpu_transport="peer")
    assert "cannot capture" in refused and "a process for each rank" in refused
