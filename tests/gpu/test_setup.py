"""How the GPUs of a group come together where something is in the way: all ranks then go through the host's memory, one
warning says why, and every collective is right; or SystemFailure on all, if the options insist.
"""

from __future__ import annotations

import functools
import logging
import os
import re
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
from distributed.harness import Rank, on_ranks, run
from processes import Logged
from stand_in import torch_cuda
from stand_in.torch_cuda import delay

import ringreduce
from ringreduce import _C, Options
from ringreduce.errors import InvalidArgument, SystemFailure
from ringreduce.gpu import joining as gpu_group
from ringreduce.gpu import kernels

RANKS = 2


def refuse_to_compile(me: Rank) -> None:
    if me.rank == 1:

        def image(*_: Any, **__: Any) -> bytes:
            raise SystemFailure("no compiler on this rank")

        kernels.image = image


def ask_for_too_much(_: Rank) -> None:
    os.environ["RINGREDUCE_ENGINE"] = "gpu_bytes=16G"  # the stand-in has 8 GB


def lose_shared_memory(_: Rank) -> None:
    os.environ["RINGREDUCE_STAND_IN_NO_IPC"] = os.environ["RINGREDUCE_STAND_IN_NO_VMM"] = "1"


def lose_registration(me: Rank) -> None:
    if me.rank == 1:
        os.environ["RINGREDUCE_STAND_IN_NO_HOST_REGISTER"] = "1"


def spoil_the_trial(me: Rank) -> None:
    tell_all = gpu_group._tell_all

    def with_an_error(group: Any, said: str, error: str) -> list[str]:
        return tell_all(group, said, error or ("a sum is wrong" if me.rank == 1 and not said else ""))

    gpu_group._tell_all = with_an_error


OBSTACLES: dict[str, tuple[Callable[[Rank], None], str]] = {
    "kernels": (refuse_to_compile, "rank 1: .*no compiler on this rank"),
    "trial": (spoil_the_trial, "rank 1: a sum is wrong"),
}
if torch.version.cuda is None:
    OBSTACLES["memory"] = (ask_for_too_much, "rank 0: .*16 GB.*out of memory.*rank 1: ")
    OBSTACLES["sharing"] = (lose_shared_memory, "rank 0: .*; rank 1: ")
    OBSTACLES["registration"] = (lose_registration, "rank 1: .*cuMemHostRegister of .*ranks that share a GPU need it")


def behind(me: Rank, obstacle: str, body: Callable[..., Any], *arguments: Any) -> Any:
    if obstacle in ("memory", "sharing", "registration"):
        OBSTACLES[obstacle][0](me)
        torch_cuda.activate()
    else:
        torch_cuda.activate()
        OBSTACLES[obstacle][0](me)
    torch.cuda.set_device(0)
    return body(me, *arguments)


def all_collectives(me: Rank) -> None:
    """On tensors that another stream has just written, and that are read late."""
    size, rank = me.size, me.rank

    def mine(*shape: int) -> torch.Tensor:
        x = torch.zeros(*shape, device="cuda")
        delay(5)
        return x.fill_(rank + 1.0)

    total = size * (size + 1) / 2
    x = mine(1000)
    dist.all_reduce(x)
    assert x.eq(total).all()
    x = mine(30, 20).t()
    before = torch.empty_like(x)
    late = torch.cuda.Stream()
    late.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(late):
        delay(5)
        before.copy_(x)
    torch.cuda.current_stream().wait_stream(late)
    dist.all_reduce(x, async_op=True).wait()
    assert x.eq(total).all() and before.eq(rank + 1.0).all()
    x = mine(100)
    dist.broadcast(x, 1)
    assert x.eq(2).all()
    x = mine(100)
    dist.reduce(x, 0)
    assert rank != 0 or x.eq(total).all()
    every = torch.zeros(size * 10, device="cuda")
    dist.all_gather_into_tensor(every, mine(10))
    assert every.view(size, 10)[:, 3].tolist() == [r + 1.0 for r in range(size)]
    part = torch.zeros(10, device="cuda")
    dist.reduce_scatter_tensor(part, mine(size * 10))
    assert part.eq(total).all()
    gathered = [torch.zeros(5, device="cuda") for _ in range(size)] if rank == 0 else None
    dist.gather(mine(5), gathered, 0)
    assert gathered is None or [t[4].item() for t in gathered] == [r + 1.0 for r in range(size)]
    x = torch.zeros(5, device="cuda")
    dist.scatter(x, [torch.full((5,), 10.0 + r, device="cuda") for r in range(size)] if rank == 1 else None, 1)
    assert x.eq(10.0 + rank).all()
    y = torch.zeros(size * 3, device="cuda")
    dist.all_to_all_single(y, mine(size * 3))
    assert y.view(size, 3)[:, 0].tolist() == [r + 1.0 for r in range(size)]
    x = mine(7)
    if rank == 0:
        for other in range(1, size):
            dist.send(x, other)
    else:
        dist.recv(x, 0)
        assert x.eq(1).all()
    x = torch.ones(3)
    dist.all_reduce(x)
    assert x.eq(size).all()


def goes_through_the_host(me: Rank) -> list[str]:
    warnings = Logged(level=logging.WARNING)
    with me.join():
        all_collectives(me)
    return warnings.messages


@pytest.mark.parametrize("obstacle", OBSTACLES)
def test_what_keeps_one_rank_from_it_sends_all_through_the_host(obstacle: str) -> None:
    for messages in run(behind, RANKS, obstacle, goes_through_the_host):
        (message,) = messages
        assert "go through the host's memory" in message
        assert re.search(OBSTACLES[obstacle][1], message), message


def insists(me: Rank) -> str:
    with me.join(options=Options(gpu_transport="peer")):
        with pytest.raises(SystemFailure) as raised:
            dist.all_reduce(torch.ones(3, device="cuda"))
        x = torch.ones(3)
        dist.all_reduce(x)
        assert x.eq(me.size).all()
    return str(raised.value)


@pytest.mark.parametrize("obstacle", OBSTACLES)
def test_or_it_is_an_error_on_all(obstacle: str) -> None:
    one, other = run(behind, RANKS, obstacle, insists)
    assert one == other
    assert "gpu_transport is 'peer'" in one


@on_ranks(RANKS, returns=[[], []], through=(torch_cuda.activated,))
def test_the_host_on_request(me: Rank) -> list[str]:
    torch.cuda.set_device(0)
    warnings = Logged(level=logging.WARNING)
    with me.join(options=Options(gpu_transport="host")):
        all_collectives(me)
    return warnings.messages


@pytest.mark.parametrize(
    ("option", "value"),
    [("gpu_transport", "wire"), ("engine", "gpu_mode=jump"), ("engine", "gpu_bytes=1"), ("engine", "gpu_blocks=0")],
)
def test_values_that_no_option_has(option: str, value: Any) -> None:
    from ringreduce.config import resolve

    with pytest.raises(InvalidArgument, match=r"gpu_.* is .*; it must be"):
        resolve(Options(**{option: value}))


@on_ranks(3, through=(torch_cuda.activated,))
def test_new_groups(me: Rank) -> None:
    torch.cuda.set_device(0)
    with me.join(options=Options(gpu_transport="peer")):
        all_collectives(me)
        part = dist.new_group([0, 1])
        if me.rank < 2:
            x = torch.full((100,), me.rank + 1.0, device="cuda")
            dist.all_reduce(x, group=part)
            assert x.eq(3).all()


def shared_by(me: Rank, descriptors_first: bool) -> None:
    region = functools.partial(_C.GpuRegion, descriptors_first=descriptors_first)
    ways = []

    def make(*arguments: Any) -> _C.GpuRegion:
        made = region(*arguments)
        ways.append(made.shared_by)
        return made

    _C.GpuRegion = make  # type: ignore[assignment, misc]
    torch.cuda.set_device(0)
    with me.join(options=Options(gpu_transport="peer")):
        all_collectives(me)
    assert ways == ["file descriptors" if descriptors_first else "IPC handles"]


@pytest.mark.parametrize("descriptors_first", [False, True], ids=["ipc", "descriptors"])
def test_both_ways_to_share_memory(descriptors_first: bool) -> None:
    run(torch_cuda.activated, RANKS, shared_by, descriptors_first)


@pytest.mark.skipif(torch.version.cuda is not None, reason="a process of this machine's sees all its GPUs")
@pytest.mark.parametrize("descriptors_first", [False, True], ids=["ipc", "descriptors"])
@on_ranks(3)
def test_ranks_that_see_only_their_own_gpu(me: Rank, descriptors_first: bool) -> None:
    """As under Slurm: every rank sees its own GPU only, as device 0."""
    os.environ["RINGREDUCE_STAND_IN_DEVICES"] = str(me.size)
    os.environ["RINGREDUCE_STAND_IN_VISIBLE"] = str(me.rank)
    torch_cuda.activate()
    assert torch.cuda.device_count() == 1
    shared_by(me, descriptors_first)


@on_ranks(2, through=(torch_cuda.activated,))
def test_over_gloo(me: Rank) -> None:
    torch.cuda.set_device(0)
    with me.join(options=Options(transport="gloo")):
        x = torch.full((1000,), me.rank + 1.0, device="cuda")
        dist.all_reduce(x)
        assert x.eq(3).all()


@on_ranks(2, through=(torch_cuda.activated,))
def test_lists_of_tensors_on_different_devices(me: Rank) -> None:
    torch.cuda.set_device(0)
    gpu, cpu = torch.ones(4, device="cuda"), torch.ones(4)
    with me.join():
        dist.all_reduce(gpu)
        messages = []
        for tensors in ([gpu, cpu], [cpu, gpu]):
            with pytest.raises(InvalidArgument) as raised:
                ringreduce.all_reduce_coalesced(tensors)
            messages.append(str(raised.value))
        dist.all_reduce(gpu)
        assert gpu.tolist() == [me.size**2] * 4
    for message in messages:
        assert "different devices" in message and "cuda:0" in message and "cpu" in message
