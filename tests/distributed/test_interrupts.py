"""Ctrl-C ends a wait at once, as KeyboardInterrupt; the others hear who left, and no process hangs."""

from __future__ import annotations

import functools
import os
import signal
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from datetime import timedelta
from typing import Any

import pytest
import torch
import torch.distributed as dist
from distributed.harness import Rank, in_threads, on_ranks, run_cases

import ringreduce
from ringreduce import Op, data, elastic
from ringreduce import parameter_server as ps
from ringreduce.errors import PeerLost

SOON = 5.0
"""Seconds: a fifth of one on a machine that has nothing else to do, and no wait here would end within a minute."""


@contextmanager
def interrupted() -> Iterator[None]:
    """Ctrl-C comes, in a wait by then, which ends soon by it."""
    signal.signal(signal.SIGINT, signal.default_int_handler)  # a job in the background of a shell ignores it
    sent: list[float] = []

    def send() -> None:
        sent.append(time.monotonic())
        os.kill(os.getpid(), signal.SIGINT)

    timer = threading.Timer(0.5, send)
    timer.start()
    with pytest.raises(KeyboardInterrupt):
        yield
    assert time.monotonic() - sent[0] < SOON
    timer.join()


def waits_behind(x: torch.Tensor) -> None:
    ringreduce.all_reduce(x, async_op=True)
    time.sleep(0.1)  # for the group's thread to begin it
    ringreduce.all_reduce(x.clone())


def waits_while_another_thread_makes_the_call(x: torch.Tensor) -> None:
    work = ringreduce.all_reduce(x, async_op=True)
    time.sleep(0.1)
    work.wait()


WAITS: dict[str, Callable[[torch.Tensor], Any]] = {
    "a direct call": ringreduce.all_reduce,
    "torch's call": dist.all_reduce,
    "barrier": lambda _: ringreduce.barrier(),
    "monitored_barrier": lambda _: ringreduce.monitored_barrier(),
    "all_gather": lambda x: ringreduce.all_gather([torch.empty_like(x) for _ in range(3)], x),
    "recv": lambda x: ringreduce.recv(x, 2),
    "torch's recv": lambda x: dist.recv(x, 2),
    "wait": lambda x: ringreduce.all_reduce(x, async_op=True).wait(),
    "torch's wait": lambda x: dist.all_reduce(x, async_op=True).wait(),
    "wait with a timeout": lambda x: dist.all_reduce(x, async_op=True).wait(timedelta(seconds=60)),
    "wait for another thread": waits_while_another_thread_makes_the_call,
    "its turn": waits_behind,
    "an operator": lambda x: ringreduce.all_reduce(x, op=Op.torch(torch.fmax)),
}


def is_interrupted_in(me: Rank, wait: str, transport: str) -> None:
    """Rank 2 does not come until rank 0 has been interrupted."""
    with me.join(timeout=120.0, options=ringreduce.Options(transport=transport)):
        x = torch.ones(1000)
        ringreduce.all_reduce(x)
        if me.rank == 0:
            with interrupted():
                WAITS[wait](x)
        elif me.rank == 1:
            with pytest.raises(PeerLost, match=r"rank 0 .*was interrupted \(KeyboardInterrupt\)") as raised:
                WAITS[wait](x)
            assert raised.value.culprit == 0
        me.meet(f"over {wait} {transport}")
        with pytest.raises(PeerLost, match=r"rank 0 .*was interrupted"):  # the group is, for all
            ringreduce.all_reduce(x)  # rank 2 may have got from the others what it needs for this one
            ringreduce.all_reduce(x)


@pytest.mark.parametrize("transport", ["auto", "tcp"])
def test_ctrl_c_ends_a_call(transport: str) -> None:
    waits = [*WAITS]

    def some(number: int) -> None:
        run_cases(is_interrupted_in, 3, {wait: (wait, transport) for wait in waits[number::3]})

    in_threads([functools.partial(some, number) for number in range(3)])  # each waits most of the time


@on_ranks(2)
def test_a_handler_of_the_programs_own_waits_for_the_call(me: Rank) -> None:
    """It may make calls itself, so it runs when the call has ended."""
    heard: list[int] = []
    signal.signal(signal.SIGINT, lambda *_: (heard.append(1), ringreduce.barrier()))
    with me.join():
        x = torch.ones(10)
        if me.rank == 0:
            threading.Timer(0.3, os.kill, (os.getpid(), signal.SIGINT)).start()
        else:
            time.sleep(1.0)
        ringreduce.all_reduce(x)
        assert x.eq(me.size).all()
        if me.rank != 0:
            ringreduce.barrier()
        assert heard == ([1] if me.rank == 0 else [])
        ringreduce.all_reduce(x)


@on_ranks(3)
def test_ctrl_c_while_a_group_is_made(me: Rank) -> None:
    if me.rank == 0:
        with interrupted(), me.join(timeout=120.0):
            pass
    elif me.rank == 1:
        with pytest.raises(PeerLost, match=r"rank 0 .*KeyboardInterrupt"), me.join(timeout=120.0):
            pass
    me.meet("over")


class Slow:
    def __len__(self) -> int:
        return 10

    def __getitem__(self, _: int) -> int:
        time.sleep(300)
        return 0


@on_ranks(1)
def test_ctrl_c_while_a_loader_waits(me: Rank) -> None:
    with data.Loader(Slow(), data.Order(10, 2), timeout=120.0) as loader, interrupted():
        loader.get(0, 0, 1)


@on_ranks(2)
def test_ctrl_c_while_a_worker_waits_for_another(me: Rank) -> None:
    with ps.join(me.store, rank=me.rank, size=2, timeout=120.0) as kv:
        kv.init("w", torch.zeros(3), mode=ps.sync())
        if me.rank == 0:
            with interrupted():
                kv.push_pull("w", torch.ones(3), out=torch.zeros(3)).wait()
            with interrupted():
                kv.barrier()
        me.meet("over")


@on_ranks(2)
def test_ctrl_c_while_a_spare_waits(me: Rank) -> None:
    if me.rank == 1:
        with interrupted():
            elastic.start(1, spares=1, store=me.store, rank=1, world_size=2)
    else:
        world = elastic.start(1, spares=1, store=me.store, rank=0, world_size=2)
        me.meet("over")
        assert world.attempt(dist.get_world_size) == 1
        world.leave()
        return
    me.meet("over")
