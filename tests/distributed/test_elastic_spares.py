"""Spares, and stragglers that they replace."""

from __future__ import annotations

import os
import signal
import time
from datetime import timedelta

import pytest
import torch
import torch.distributed as dist
from bodies.elastic import BATCH, start
from distributed.harness import Rank, Ranks, on_ranks, run
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from ringreduce import elastic
from ringreduce.elastic import lateness
from ringreduce.elastic.lateness import STEPS as COUNTED
from ringreduce.errors import Expelled


def with_a_spare(me: Rank) -> tuple[int, list[int], float, list[str]]:
    """The last rank waits until one of the others dies. Every step is done by three ranks."""
    world = elastic.start(least=3, spares=1, store=me.store, rank=me.rank, world_size=4, timeout=timedelta(seconds=30))
    torch.manual_seed(0)
    net = nn.Sequential(nn.Linear(8, 16), nn.Tanh(), nn.Linear(16, 1))  # float32: another order of sums would show
    model = DistributedDataParallel(net, init_sync=False)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    state = world.state(model=model, optimizer=optimizer, step=0)
    if state.step == 0:
        me.report("begins")
    sizes: list[int] = []

    def backward() -> int:
        optimizer.zero_grad()
        x = torch.randn(BATCH, 8, generator=torch.Generator().manual_seed(state.step))[world.rank :: world.size]
        nn.functional.mse_loss(model(x), x.sin().sum(1, keepdim=True)).backward()
        time.sleep(0.001)
        return world.size

    while state.step < 300:
        sizes.append(world.attempt(backward))  # who dies after its vote is missing only when `attempt` returns
        optimizer.step()
        state.step += 1
    digest = [each.detach().numpy().tobytes().hex() for each in net.parameters()]
    world.leave()
    return world.epoch, sorted(set(sizes)), state.step, digest


@pytest.mark.slow
def test_a_spare_changes_no_bit() -> None:
    def parameters(victim: int) -> list[list[str]]:
        with Ranks(with_a_spare, 4) as ranks:
            ranks.reports(but=(3,))
            if victim >= 0:
                time.sleep(0.1)
                ranks.signal(victim, signal.SIGKILL)
            results = ranks.results(but=(victim if victim >= 0 else 3,))
            assert [sizes for _, sizes, _, _ in results] == [[3]] * 3
            assert all(epoch > 0 for epoch, _, _, _ in results) == (victim >= 0)
            return [digest for _, _, _, digest in results]

    plain = parameters(-1)
    assert plain == [plain[0]] * 3
    for victim in range(3):
        assert parameters(victim) == plain


@on_ranks(3, returns=["2", "2", "over"])
def test_a_spare_that_is_not_needed(me: Rank) -> str:
    if me.rank == 2:
        with pytest.raises(elastic.Over):
            elastic.start(spares=1, store=me.store, rank=2, world_size=3, timeout=timedelta(seconds=2))
        return "over"
    world = elastic.start(spares=1, store=me.store, rank=me.rank, world_size=3, timeout=timedelta(seconds=30))
    for _ in range(60):  # longer than the spare waits for a member to look
        world.attempt(lambda: (dist.all_reduce(torch.ones(1)), time.sleep(0.06)))
    size = world.size
    world.leave()
    return str(size)


def has_a_straggler(me: Rank) -> tuple[int, list[int], list[tuple[int, int]], str]:
    """The others wait for rank 1 in each step, and go on without it.

    The waits are made up: on a busy machine other members would really be late, too.
    """
    waited = 0.0
    lateness._waited = lambda: waited
    world = start(me, 3)
    heard: list[tuple[int, int]] = []

    def without_it(late: elastic.Late) -> bool:
        heard.append((late.rank, late.pid))
        return True

    world.on_straggler(without_it)
    for _ in range(COUNTED):
        assert not heard
        waited += me.rank != 1
        world.attempt(lambda: dist.all_reduce(torch.ones(1)))
    ranks = [late.rank for late in world.lateness()]
    try:
        world.attempt(lambda: dist.all_reduce(torch.ones(1)))
    except Expelled:
        return os.getpid(), ranks, heard, "expelled"
    world.leave()
    return os.getpid(), ranks, heard, str(world.size)


def test_a_straggler_is_named_and_left_behind() -> None:
    results = run(has_a_straggler, 3)
    assert [each[3] for each in results] == ["2", "expelled", "2"]
    assert all(each[1:3] == ([1], [(1, results[1][0])]) for each in results)


@on_ranks(3, returns=[(1, True)] * 3)
def test_the_members_know_for_whom_they_have_waited(me: Rank) -> tuple[int, bool]:
    """Rank 1 comes half a second after the others."""
    world = start(me, 3)

    def body() -> None:
        if me.rank != 1:
            me.store.add("came", 1)
        else:
            while me.store.add("came", 0) < 2:
                time.sleep(0.005)
            time.sleep(0.5)
        dist.all_reduce(torch.ones(1))

    world.attempt(body)
    late = world.lateness()[0]
    world.leave()
    return late.rank, late.seconds > 0.1
