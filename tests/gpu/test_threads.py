"""Ranks of a group that are threads of one process, on one GPU or on several."""

from __future__ import annotations

import threading

import pytest
import torch
import torch.distributed as dist
from distributed.cuda_threads import Member, all_collectives, on_threads, run_threads

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


@on_threads(2, 8, devices=1, gpu_transport="peer", engine="gpu_mode=run,gpu_blocks=1024")
def test_kernels_of_all_ranks_have_room_at_once(me: Member) -> None:
    own = torch.arange(2**20, device="cuda").add_(me.rank).float()
    for _ in range(3):
        x = own.clone()
        ringreduce.all_reduce(x, group=me.group)
    expected = torch.arange(2**20, device="cuda").mul_(me.size).add_(sum(range(me.size))).float()
    assert int((x != expected).sum()) == 0


@on_threads(2, devices=1, gpu_transport="peer", engine="gpu_mode=run")
def test_calls_in_one_kernel_can_be_captured(me: Member) -> None:
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
    assert x.unique().tolist() == [20.0 * 3]


@on_threads(3, devices=1, timeout=3, gpu_transport="peer")
def test_a_thread_that_does_not_call_is_named(me: Member) -> None:
    x = torch.ones(1000, device="cuda")
    ringreduce.all_reduce(x, group=me.group)
    torch.cuda.synchronize()
    me.meet("joined")
    if me.rank != 2:
        with pytest.raises(CollectiveTimeout, match=r"for rank 2 \(.* shares its process"):
            ringreduce.all_reduce(x, group=me.group)
    me.meet("over")


@on_threads(3, devices=1, gpu_transport="peer")
def test_a_thread_that_has_left_is_named(me: Member) -> None:
    x = torch.ones(1000, device="cuda")
    ringreduce.all_reduce(x, group=me.group)
    me.meet("joined")
    if me.rank != 2:
        with pytest.raises(PeerLost, match=r"rank 2 \(.*is gone"):
            ringreduce.all_reduce(x, group=me.group)


DIFFERENT = "(?s)different calls.*same order"


@on_threads(2, devices=1, gpu_transport="peer")
def test_different_calls(me: Member) -> None:
    x = torch.ones(1000 + me.rank, device="cuda")
    with pytest.raises(CollectiveMismatch, match=DIFFERENT):
        ringreduce.all_reduce(x, group=me.group)
    with pytest.raises(RingReduceError):
        ringreduce.all_reduce(x, group=me.group)


def calls_something_new(me: Member) -> None:
    """A rank whose plan and kernel are there already, and another one that would have to load its own first."""
    x = torch.ones(1000, device="cuda")
    ringreduce.all_reduce(x, group=me.group)
    torch.cuda.synchronize()
    me.meet("joined")
    with pytest.raises(CollectiveMismatch, match=DIFFERENT):
        ringreduce.all_reduce(x, dist.ReduceOp.SUM if me.rank == 0 else dist.ReduceOp.MAX, group=me.group)
        torch.cuda.synchronize()
        ringreduce.all_reduce(x, group=me.group)


@pytest.mark.parametrize("devices", [1, 2])
def test_a_call_that_only_one_rank_has_made_before(devices: int) -> None:
    run_threads(calls_something_new, 2, devices=devices, gpu_transport="peer")


@on_threads(2, devices=1, gpu_transport="peer")
def test_a_capture_is_refused(me: Member) -> None:
    x = torch.ones(1000, device="cuda")
    ringreduce.all_reduce(x, group=me.group)
    torch.cuda.synchronize()
    me.meet("joined")
    if me.rank == 0:
        refused = pytest.raises(InvalidArgument, match=r"cannot capture.*a process for each rank")
        with torch.cuda.graph(torch.cuda.CUDAGraph(), stream=torch.cuda.Stream()), refused:
            ringreduce.all_reduce(x, group=me.group)
    me.meet("over")
