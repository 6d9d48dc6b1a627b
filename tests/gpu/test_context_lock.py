"""What a rank's death costs the others while their own calls hold the driver's context lock: nothing.

While a stream, or a kernel, waits for a peer, a launch of the program may wait for the GPU and hold a lock that every
other call of the process takes: a kernel's first launch, which loads it, and a launch on a full queue. What lets the
GPU go must not need the driver then. The stand-in has such a lock on demand (RINGREDUCE_STAND_IN_CONTEXT_LOCK). There
each test sees first that the lock is free, and then that it is held as long as the rank that dies lives. A GPU's driver
may not hold one.
"""

from __future__ import annotations

import functools
import os
import signal
import threading
import time
from collections.abc import Callable

import pytest
import torch
import torch.distributed as dist
from distributed.cuda_threads import Member, run_threads
from distributed.harness import Rank, Ranks
from stand_in import torch_cuda

import ringreduce
from ringreduce import _C, Options
from ringreduce.errors import PeerLost, RingReduceError
from ringreduce.gpu import joining as gpu_group

RANKS = 3
VICTIM = 1
COUNT = 100_003  # float32 elements
LAUNCHES = 2000
PROBES = 40  # of a second at most

modes = pytest.mark.parametrize(
    "mode", ["steps", "run"] if torch.version.cuda is None or torch.cuda.device_count() >= RANKS else ["steps"]
)


def hold_contexts() -> None:
    os.environ["RINGREDUCE_STAND_IN_CONTEXT_LOCK"] = "1"


def in_thread(call: Callable[[], object]) -> threading.Thread:
    thread = threading.Thread(target=call, daemon=True)
    thread.start()
    return thread


# what holds the lock


class Holder:
    """A thread that launches kernels, and how many it has launched."""

    def __init__(self, launch: Callable[[], object], launches: int) -> None:
        self.launched = 0

        def run() -> None:
            for _ in range(launches):
                launch()
                self.launched += 1

        self.thread = in_thread(run)


def load_a_kernel(x: torch.Tensor) -> Holder:
    """Sums two arrays by a kernel that this process has not launched, in a stream that waits for nothing."""
    device = _C.CudaDevice(x.device.index)
    fresh = _C.GpuKernels(device, functools.partial(gpu_group._image, device.capability))
    apart = torch.cuda.Stream().cuda_stream
    at = x.data_ptr()
    return Holder(lambda: _C.gpu_accumulate(device, fresh, "float32", "max", at, [at, at], x.numel(), apart), 1)


def fill_the_queue(x: torch.Tensor) -> Holder:
    """Launches kernels in the stream that waits for the peer."""
    stream = torch.cuda.current_stream()

    def launch() -> None:
        with torch.cuda.stream(stream):
            x.add_(1)

    return Holder(launch, LAUNCHES)


def is_held(x: torch.Tensor, stream: torch.cuda.Stream, holder: Holder | None = None) -> threading.Thread | None:
    """A launch in a stream of its own that does not come back, nor do those of the `holder`; None if all do."""

    def launch() -> None:
        with torch.cuda.stream(stream):
            x.add_(1)

    for _ in range(PROBES if torch.version.cuda is None else 4):
        before = holder.launched if holder else 0
        probe = in_thread(launch)
        probe.join(1)
        if probe.is_alive() and (holder is None or holder.launched == before):
            return probe
        if holder is None or not holder.thread.is_alive():
            return None
        time.sleep(0.25)
    return None


# a rank that dies


def outlives_a_rank(
    me: Rank, mode: str, obstacle: Callable[[torch.Tensor], Holder]
) -> tuple[type[RingReduceError], str, int]:
    os.environ["RINGREDUCE_STAND_IN_DEVICES"] = str(RANKS)
    hold_contexts()
    torch_cuda.activate()
    torch.cuda.set_device(0 if mode == "steps" else me.rank)
    with me.join(timeout=600, options=Options(gpu_transport="peer", engine=f"gpu_mode={mode}")):
        tensor, other = torch.ones(COUNT, device="cuda"), torch.zeros(8, device="cuda")
        side = torch.cuda.Stream()
        dist.all_reduce(tensor)
        torch.cuda.synchronize()
        assert tensor.eq(RANKS).all()
        if me.rank == VICTIM:
            me.report(None)
            signal.pause()
        assert is_held(other, side) is None or torch.version.cuda is not None
        dist.all_reduce(tensor)
        holder = obstacle(torch.zeros(8, device="cuda"))
        probe = is_held(other, side, holder)
        me.report((holder.thread.is_alive(), probe is not None and probe.is_alive()))
        holder.thread.join()
        if probe is not None:
            probe.join()
        torch.cuda.synchronize()
        with pytest.raises(RingReduceError) as raised:
            dist.all_reduce(tensor)
    return raised.type, str(raised.value), raised.value.culprit


@modes
@pytest.mark.parametrize("obstacle", [load_a_kernel, fill_the_queue])
def test_survivors_name_the_dead_rank(mode: str, obstacle: Callable[[torch.Tensor], Holder]) -> None:
    with Ranks(outlives_a_rank, RANKS, mode, obstacle) as ranks:
        held = ranks.reports()
        assert torch.version.cuda is not None or held == [(True, True), None, (True, True)]
        ranks.signal(VICTIM, signal.SIGKILL)
        for kind, message, culprit in ranks.results(but=(VICTIM,)):
            assert (kind, culprit) == (PeerLost, VICTIM), message
            assert "all_reduce" in message and f"rank {VICTIM} (" in message


# ranks of one process


def makes_first_calls(me: Member) -> None:
    """Calls of several kinds, each for the first time: its kernel and its plan are not on the GPU yet."""
    with torch.cuda.stream(torch.cuda.Stream()):  # of its own: kernels of ranks that run wait for one another
        sums = torch.full((COUNT,), me.rank + 1.0, device="cuda")
        largest = torch.full((COUNT,), me.rank, dtype=torch.int32, device="cuda")
        sent = torch.full((COUNT,), float(me.rank), device="cuda")
        torch.cuda.synchronize()
        ringreduce.all_reduce(sums, group=me.group)
        ringreduce.all_reduce(largest, dist.ReduceOp.MAX, group=me.group)
        for root in range(me.size):
            ringreduce.broadcast(sent, root, group=me.group)
        torch.cuda.synchronize()
        assert sums.eq(me.size * (me.size + 1) / 2).all()
        assert largest.eq(me.size - 1).all() and sent.eq(0).all()


@pytest.mark.parametrize("devices", [1, RANKS])
@pytest.mark.parametrize("mode", ["steps", "run"])
def test_no_rank_of_a_process_loads_anything_while_another_waits_for_it(mode: str, devices: int) -> None:
    run_threads(
        makes_first_calls,
        RANKS,
        devices=devices,
        prepare=hold_contexts,
        engine=f"gpu_mode={mode}",
        gpu_transport="peer",
        timeout=10,
    )
