"""Members that leave a world, or are expelled from it, and what becomes of those who stay or come later."""

from __future__ import annotations

import gc
import os
import signal
import time
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from bodies.elastic import come, start, tell, wait_for
from distributed.harness import Rank, Ranks, on_ranks

from ringreduce import elastic
from ringreduce.elastic.context import WorldContext
from ringreduce.errors import Expelled, SystemFailure, TooFewRanks


def leaves_when_it_is_expelled(me: Rank) -> tuple[str, int]:
    """Rank 1 is stopped, continues later, and leaves as a program does in a `finally`."""
    world = start(me, 3, timeout=timedelta(seconds=2), expel_after=1.0)
    me.report("begins")

    def body() -> bool:
        over = torch.tensor([int(me.store.check(["over"]))])
        dist.all_reduce(over, dist.ReduceOp.MAX)
        time.sleep(0.005)
        return bool(over)

    how = "trained"
    try:
        while not world.attempt(body):
            if world.epoch == 1:
                me.store.set("they are without it", "")
    except Expelled:
        how = "expelled"
    epoch = world.epoch
    world.leave()
    if how == "expelled":
        time.sleep(1)  # a watch looks into the ledger more often
        me.store.set("over", "")
    return how, epoch


def test_an_expelled_rank_that_leaves_disturbs_nobody() -> None:
    with Ranks(leaves_when_it_is_expelled, 3) as ranks:
        ranks.reports()
        ranks.signal(1, signal.SIGSTOP)
        ranks.store.wait(["they are without it"], timedelta(seconds=60))
        ranks.signal(1, signal.SIGCONT)
        assert ranks.results() == [("trained", 1), ("expelled", 1), ("trained", 1)]


def no_group() -> None:
    time.sleep(0.05)
    raise SystemFailure("none today")


def ledgers() -> int:
    """The number of ledgers of worlds that this process has open."""
    return sum("memfd:ringreduce world" in os.path.realpath(each) for each in Path("/proc/self/fd").iterdir())


@on_ranks(1, returns=[0])
def test_a_member_without_a_group_can_leave(me: Rank) -> int:
    """The ledgers of worlds that are gone are closed, also if the last change could not make a group."""
    before = ledgers()
    for number in range(2):
        world = elastic.start(store=dist.PrefixStore(str(number), me.store), rank=0, world_size=1, patience=0.01)
        world._settings.timeout = 0.01
        world._make_group = no_group  # type: ignore[method-assign]
        with pytest.raises(SystemFailure, match="none today"):
            world._change(None)
        world.leave()
        del world
        gc.collect()
    end = time.monotonic() + 10
    while ledgers() > before and time.monotonic() < end:  # the thread that watched a view maps the ledger until it ends
        time.sleep(0.05)
    return ledgers() - before


def too_few(me: Rank) -> str:
    world = start(me, 3, least=3, patience=0.5)
    state = world.state(step=0)
    me.report("begins")
    with pytest.raises(TooFewRanks, match="there are 2 ranks, and least is 3"):
        while True:
            world.attempt(lambda: dist.all_reduce(torch.ones(1000)))
            state.step += 1
    return "too few"


def test_too_few_ranks_say_so() -> None:
    with Ranks(too_few, 3) as ranks:
        ranks.reports()
        ranks.signal(2, signal.SIGKILL)
        assert ranks.results(but=(2,)) == ["too few"] * 2


@on_ranks(3, returns=[2, 2, -1])
def test_others_go_on_at_once_without_a_member_that_leaves(me: Rank) -> int:
    """Rank 2 leaves after its first step, and its process ends last. The others go on without it at once."""
    world = start(me, 3, timeout=timedelta(seconds=1000))
    for _ in range(2):
        world.attempt(lambda: dist.all_reduce(torch.ones(1)))
        if me.rank == 2:
            world.leave()
            me.meet("over")
            return -1
    size = world.size
    world.leave()
    me.meet("over")
    return size


@on_ranks(3, returns=["", "", "0"])
def test_a_process_that_starts_when_all_have_left_ends_well(me: Rank) -> str:
    if me.rank == 2:
        while not me.store.check(["left"]):
            time.sleep(0.01)
        with pytest.raises(elastic.Over) as over:
            start(me, 2)
        return str(over.value.code)
    world = start(me, 2)
    world.attempt(lambda: dist.all_reduce(torch.ones(1)))
    world.leave()
    if me.store.add("leavers", 1) == 2:
        me.store.set("left", "")
    return ""


def comes_when_all_have_died(me: Rank) -> None:
    """Rank 2 comes when the others are dead, or is let in and finds them dead."""
    if me.rank == 2:
        wait_for(me, "come 2")
        opens = WorldContext.open_a_ledger

        def when_told(self: WorldContext, *arguments: Any) -> bool:
            me.report("let in")
            wait_for(me, "go on")
            return opens(self, *arguments)

        WorldContext.open_a_ledger = when_told  # type: ignore[method-assign]
        with pytest.raises(TooFewRanks, match=r"all members have died, .* again from a checkpoint"):
            start(me, 2)
        return
    world = start(me, 2)
    me.report("begins")
    while True:
        world.attempt(lambda: dist.all_reduce(torch.ones(1)))


@pytest.mark.parametrize("when", ["before it comes", "after it was let in"])
def test_a_process_that_starts_when_all_have_died_says_so(when: str) -> None:
    with Ranks(comes_when_all_have_died, 3) as ranks:
        ranks.reports(but=(2,))
        if when == "after it was let in":
            come(ranks, 2)
            assert ranks.reports(but=(0, 1)) == ["let in"]
        ranks.signal(0, signal.SIGKILL)
        ranks.signal(1, signal.SIGKILL)
        for rank in (0, 1):
            ranks._processes[rank].join(60)
        tell(ranks, "come 2", "go on")
        ranks.results(but=(0, 1))


@on_ranks(2)
def test_a_member_may_leave_while_one_on_another_host_goes_on_to_its_next_call(me: Rank) -> None:
    os.environ["RINGREDUCE_HOST_ID"] = f"host {me.rank}"
    times = 20
    if me.rank == 0:
        world = start(me, 1)
        world.state(step=0)
        while world.epoch < 2 * times:
            world.attempt(lambda: dist.all_reduce(torch.ones(1)))
        world.leave()
        return
    for _ in range(times):
        world = start(me, 1)
        world.state(step=0)
        world.leave()
        assert not dist.is_initialized()
