"""Groups whose CUDA tensors go over NCCL: Options(gpu_transport='nccl') and ringreduce.use_nccl.

The stand-in for NCCL joins threads of one process, so ranks are threads here, in a process of their own. On several
real GPUs the same calls run over the real NCCL, with ranks that are processes.
"""

from __future__ import annotations

import contextlib
import ctypes
import os
import threading
import time
from collections.abc import Callable
from datetime import timedelta
from typing import Any

import pytest
import torch
import torch.distributed as dist
from distributed import cuda_threads
from distributed.cuda_threads import Member, all_collectives
from distributed.harness import Rank, on_ranks
from stand_in import build as stand_in
from stand_in import torch_cuda

import ringreduce
from ringreduce import Options
from ringreduce.errors import Aborted, CollectiveTimeout, InvalidArgument, SystemFailure

REAL = torch.version.cuda is not None
capturing = threading.Lock()
"""The stand-in for torch's device takes one capture of a process at a time."""

needs_stand_in = pytest.mark.skipif(REAL, reason="the stand-in for NCCL is for a torch without CUDA")


def run_threads(function: Callable[..., Any], size: int, *arguments: Any, timeout: float = 30, **options: Any) -> Any:
    """`cuda_threads.run_threads` over the stand-in for NCCL, with a device for each rank."""
    return cuda_threads.run_threads(
        function, size, *arguments, devices=size, timeout=timeout, prepare=_stand_in_nccl, **options
    )


def on_threads(size: int, **options: Any) -> Callable[[Callable[..., Any]], Callable[..., Any]]:
    """As `cuda_threads.on_threads`, by `run_threads`."""
    return lambda function: needs_stand_in(cuda_threads.on_threads(size, runs=run_threads, **options)(function))


def _stand_in_nccl() -> None:
    folder = stand_in.build(stand_in.ROOT / "build/stand_in", stand_in.NCCL)
    os.environ["RINGREDUCE_LIBNCCL"] = str(folder / "libnccl.so.2")


# ---- what both kinds of ranks do -------------------------------------------------------------------------------------


def replayed(rank: int, size: int, group: dist.ProcessGroup | None) -> None:
    """Of a call whose size, and so memory, is new."""
    ringreduce.all_reduce(torch.ones(4, device="cuda"), group=group)
    torch.cuda.synchronize()
    x = torch.zeros(5000, device="cuda")
    graph = torch.cuda.CUDAGraph()
    stream = torch.cuda.Stream()  # of this device: that of torch.cuda.graph is the first rank's
    with capturing, torch.cuda.graph(graph, stream=stream, capture_error_mode="thread_local"):
        ringreduce.all_reduce(x, group=group)
    ringreduce.barrier(group)
    for factor in (1, 2):
        x.fill_(factor * (rank + 1))
        graph.replay()
        torch.cuda.synchronize()
        assert x.unique().tolist() == [factor * size * (size + 1) / 2]


def member_calls(me: Member, n: int) -> None:
    all_collectives(me.rank, me.size, me.group, n)


# ---- with ranks that are threads -------------------------------------------------------------------------------------


@needs_stand_in
@pytest.mark.parametrize("transport", ["shared_memory", "gloo"])
@pytest.mark.parametrize(("size", "n"), [(2, 1), (2, 100_003), (4, 1001)])
def test_collectives(size: int, n: int, transport: str) -> None:
    run_threads(member_calls, size, n, gpu_transport="nccl", transport=transport)


@needs_stand_in
@pytest.mark.parametrize(
    "algorithms", ["all_reduce:ring;all_gather:ring;reduce_scatter:ring;broadcast:tree;reduce:tree"]
)
def test_collectives_in_rings_and_trees(algorithms: str) -> None:
    run_threads(member_calls, 4, 5000, gpu_transport="nccl", algorithms=algorithms)


@on_threads(2, gpu_transport="nccl")
def test_graph(me: Member) -> None:
    replayed(me.rank, me.size, me.group)


@on_threads(2, gpu_transport="host")
def test_adopted_communicator(me: Member) -> None:
    theirs = a_communicator(me)
    ringreduce.use_nccl(theirs, group=me.group)
    all_collectives(me.rank, me.size, me.group, 1001)
    before = communicators()
    me.meet("counted")
    me.backend.shutdown()
    me.meet("shut down")
    assert before > me.size
    assert communicators() == me.size  # theirs


@on_threads(2, gpu_transport="nccl")
def test_adopting_too_late(me: Member) -> None:
    ringreduce.all_reduce(torch.ones(4, device="cuda"), group=me.group)
    with pytest.raises(InvalidArgument, match="call it once, before its first call on them"):
        ringreduce.use_nccl(a_communicator(me), group=me.group)


NOT_THEIRS = (
    "use_nccl: rank 0: the NCCL communicator is of rank 1 of 2 on device 0, but the group's rank is 0"
    ".*; rank 1: the NCCL communicator is of rank 0 of 2 on device 1"
)


@on_threads(2)
def test_adopting_what_does_not_fit(me: Member) -> None:
    with pytest.raises(InvalidArgument, match=NOT_THEIRS):
        ringreduce.use_nccl(a_communicator(me, 1 - me.rank), group=me.group)
    ringreduce.use_nccl(a_communicator(me), group=me.group)  # nothing is lost


@on_threads(2, gpu_transport="nccl")
def test_timeout(me: Member) -> None:
    x = torch.ones(1000, device="cuda")
    ringreduce.all_reduce(x, group=me.group)
    torch.cuda.synchronize()
    if me.rank == 0:
        options = dist.AllreduceOptions()
        options.timeout = timedelta(milliseconds=300)
        work = me.backend.allreduce([x], options)
        torch.cuda.synchronize()
        with pytest.raises(CollectiveTimeout):
            while not work.is_completed():
                time.sleep(0.001)
            work.wait()
    said = "of rank 0 within 300 ms. NCCL does not tell which rank it waits for"
    is_broken(me, CollectiveTimeout, rf"it has not ended on device 0 \(.*{said}.*NCCL_DEBUG=INFO")


@on_threads(3, gpu_transport="nccl")
def test_abort(me: Member) -> None:
    x = torch.ones(1000, device="cuda")
    ringreduce.all_reduce(x, group=me.group)
    torch.cuda.synchronize()
    me.meet("joined")
    if me.rank == 1:
        me.backend.abort()
    else:
        with contextlib.suppress(Aborted):  # if it comes after
            ringreduce.all_reduce(x, group=me.group)
    torch.cuda.synchronize()
    is_broken(me, Aborted, "rank 1 aborted the group")


def is_broken(me: Member, kind: type[Exception], said: str) -> None:
    """Calls fail by this when the group is broken, or will be."""
    while me.backend.get_error() == torch._C._distributed_c10d.ErrorType.SUCCESS:
        time.sleep(0.001)
    with pytest.raises(kind, match=said):
        ringreduce.all_reduce(torch.ones(4, device="cuda"), group=me.group)


# ---- with ranks that are processes -----------------------------------------------------------------------------------


@needs_stand_in
@on_ranks(2, through=(torch_cuda.activated,))
def test_no_library_on_one_rank(me: Rank) -> None:
    _stand_in_nccl()
    if me.rank == 1:
        os.environ["RINGREDUCE_LIBNCCL"] = "/nowhere/libnccl.so.2"
    torch.cuda.set_device(me.rank)
    with me.join(options=Options(gpu_transport="nccl")):
        said = "^gpu_transport is 'nccl', but NCCL does not join the group's GPUs: rank 1: no NCCL: "
        with pytest.raises(SystemFailure, match=rf"{said}.*pip install nvidia-nccl-cu13"):
            ringreduce.all_reduce(torch.ones(4, device="cuda"))
        x = torch.ones(4)
        dist.all_reduce(x)  # the group lives
        assert x.tolist() == [2] * 4


@pytest.mark.skipif(not REAL or torch.cuda.device_count() < 2, reason="NCCL takes a GPU for each rank, and 2 ranks")
@pytest.mark.parametrize("transport", ["shared_memory", "gloo"])
@on_ranks(min(torch.cuda.device_count(), 4))
def test_real_nccl(me: Rank, transport: str) -> None:
    torch.cuda.set_device(me.rank)
    with me.join(options=Options(gpu_transport="nccl", transport=transport)):
        for n in (1, 1001, 3_000_000):
            all_collectives(me.rank, me.size, None, n)
        replayed(me.rank, me.size, None)


# ---- the stand-in for NCCL, as somebody else uses it -----------------------------------------------------------------


class UniqueId(ctypes.Structure):
    _fields_ = (("internal", ctypes.c_char * 128),)


def a_communicator(me: Member, rank: int | None = None) -> int:
    """Of all ranks, in which this one is `rank`."""
    rank = me.rank if rank is None else rank
    nccl, cuda = ctypes.CDLL(os.environ["RINGREDUCE_LIBNCCL"]), ctypes.CDLL(os.environ["RINGREDUCE_LIBCUDA"])
    context, made, unique = ctypes.c_void_p(), ctypes.c_void_p(), UniqueId(b"theirs" + bytes([48 + (rank != me.rank)]))
    assert cuda.cuDevicePrimaryCtxRetain(ctypes.byref(context), me.rank) == 0
    assert cuda.cuCtxPushCurrent_v2(context) == 0
    assert nccl.ncclCommInitRank(ctypes.byref(made), me.size, unique, rank) == 0
    assert cuda.cuCtxPopCurrent_v2(ctypes.byref(context)) == 0
    assert made.value
    return made.value


def communicators() -> int:
    return ctypes.CDLL(os.environ["RINGREDUCE_LIBNCCL"]).stand_in_nccl_alive()
