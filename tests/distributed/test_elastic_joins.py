"""Processes that a world lets in, and deaths, of them or of members, while it does."""

from __future__ import annotations

import json
import os
import signal
import time
from datetime import timedelta
from typing import Any

import pytest
import torch
import torch.distributed as dist
from bodies.elastic import come, start, tell, wait_for
from distributed.harness import Rank, Ranks, on_ranks, run

import ringreduce
from ringreduce import elastic
from ringreduce.coordination import watch
from ringreduce.coordination.join_queue import JoinQueue
from ringreduce.coordination.protocol import View
from ringreduce.elastic.context import WorldContext
from ringreduce.errors import Expelled, InvalidArgument


def waits_for_one_that_lives(me: Rank) -> int:
    """Rank 1 dies. Rank 2 is let in and dies before the group is made; rank 3 comes after it."""
    if me.rank >= 2:
        wait_for(me, f"come {me.rank}")
    if me.rank == 2:
        elastic.World._make_group = lambda self: os.kill(os.getpid(), signal.SIGKILL)  # type: ignore[method-assign]
    world = start(me, 2, least=2)
    state = world.state(step=0)
    me.report("begins")
    while state.step < 10 or world.epoch == 0:
        world.attempt(lambda: dist.all_reduce(torch.ones(1)))
        state.step += 1
    size = world.size
    world.leave()
    return size


def test_a_joiner_that_is_needed_dies() -> None:
    with Ranks(waits_for_one_that_lives, 4) as ranks:
        ranks.reports(but=(2, 3))
        ranks.signal(1, signal.SIGKILL)
        come(ranks, 2)
        ranks._processes[2].join(60)
        come(ranks, 3)
        assert ranks.results(but=(1, 2)) == [2, 2]


def loses_a_joiner_elsewhere(me: Rank) -> int:
    """Rank 2 is let in and dies before the group is made. To the others it seems to be on another machine."""
    os.environ["RINGREDUCE_HOST_ID"] = f"host {me.rank}"
    watch.who_here = lambda member: None
    if me.rank == 2:
        wait_for(me, "come 2")
        elastic.World._make_group = lambda self: os.kill(os.getpid(), signal.SIGKILL)  # type: ignore[method-assign]
    world = start(me, 2, timeout=timedelta(seconds=1000))
    state = world.state(step=0)
    me.report("begins")
    while world.epoch < 2:
        world.attempt(lambda: dist.all_reduce(torch.ones(1)))
        state.step += 1
    size = world.size
    world.leave()
    return size


def test_a_joiner_on_another_machine_dies() -> None:
    """Its machine refuses connections, so the others need not wait for the timeout of a call."""
    with Ranks(loses_a_joiner_elsewhere, 3) as ranks:
        ranks.reports(but=(2,))
        come(ranks, 2)
        assert ranks.results(but=(2,)) == [2, 2]


@on_ranks(3, returns=[2, 2, "raised"])
def test_a_joiner_with_other_options_does_not_stop_the_others(me: Rank) -> Any:
    """Rank 2 joins with other options, and lives until the others have gone on."""
    if me.rank == 2:
        me.store.wait(["ready"], timedelta(seconds=60))
        with pytest.raises(InvalidArgument, match="options differ between ranks"):
            start(me, 2, options=ringreduce.Options(engine="slices=2"))
        me.store.wait(["gone on"], timedelta(seconds=60))
        return "raised"
    world = start(me, 2, timeout=timedelta(seconds=1000))
    while world.epoch < 2:
        world.attempt(lambda: dist.all_reduce(torch.ones(1)))
        me.store.set("ready", "")
    me.store.set("gone on", "")
    size = world.size
    world.leave()
    return size


def joins_again_and_again(me: Rank) -> int:
    """Ranks join one after the other and leave. In the end the join queue has no number left to ask the store about."""
    if me.rank >= 2:
        wait_for(me, f"left {me.rank - 1}")
    world = start(me, 2)
    state = world.state(over=0)
    me.store.set("left 1", "")

    def body() -> int:
        over = torch.tensor([int(me.store.check(["left 4"]))])
        dist.all_reduce(over, dist.ReduceOp.MIN)
        return int(over)

    while not state.over:
        state.over = world.attempt(body)
        if me.rank >= 2:
            epoch = world.epoch
            world.leave()
            me.store.set(f"left {me.rank}", "")
            return epoch
        time.sleep(0.002)
    queue = world._settings.context.queue
    assert queue.waiting(world._join_watcher._seen.but) == ()
    if me.rank == 0:  # another one, as after rank 0's end
        assert JoinQueue(world._settings.context.store).waiting(()) == ()
    world.leave()
    return len(queue._waiting) + len(queue._nameless)


def test_those_who_were_let_in_are_not_looked_for_again() -> None:
    results = run(joins_again_and_again, 5)
    assert results[:2] == [0, 0] and results[2] < results[3] < results[4]


def joins_when_its_host_has_died(me: Rank) -> int:
    """Rank 2 is let in. The member whose ledger it would open first is dead by then."""
    if me.rank == 2:
        wait_for(me, "ready")
        opens = WorldContext.open_a_ledger

        def when_rank_0_is_dead(self: WorldContext, name: str, view: View, seconds: float) -> bool:
            me.report("let in")
            while os.path.exists(json.loads(view.members[0].address)["ledger"][0]):
                time.sleep(0.005)
            return opens(self, name, view, seconds)

        WorldContext.open_a_ledger = when_rank_0_is_dead  # type: ignore[method-assign]
    world = start(me, 2)
    state = world.state(step=0)
    me.store.set("ready", "")
    while state.step < 20 or world.size < 2:
        world.attempt(lambda: (dist.all_reduce(torch.ones(1)), time.sleep(0.01)))
        state.step += 1
    size = world.size
    world.leave()
    return size


def test_a_member_dies_that_has_let_others_in() -> None:
    with Ranks(joins_when_its_host_has_died, 3) as ranks:
        ranks.reports(but=(0, 1))
        ranks.signal(0, signal.SIGKILL)
        assert ranks.results(but=(0,)) == [2, 2]


def is_slow_to_join(me: Rank) -> str:
    """Rank 2 is let in and is slow, so the others give it up. Rank 3 joins, and is the only member left in the end."""
    if me.rank >= 2:
        wait_for(me, f"come {me.rank}")
    if me.rank == 2:
        opens = WorldContext.open_a_ledger

        def when_told(self: WorldContext, name: str, view: View, seconds: float) -> bool:
            if not me.store.check(["go on"]):
                me.report("let in")
            wait_for(me, "go on")
            return opens(self, name, view, seconds)

        WorldContext.open_a_ledger = when_told  # type: ignore[method-assign]
    try:
        world = start(me, 2, timeout=timedelta(seconds=30 if me.rank == 3 else 2), expel_after=1.0)
    except Expelled:
        me.report("expelled")
        return "expelled"
    world.state(step=0)
    me.report("is in")

    def body() -> bool:
        over = torch.tensor([int(me.store.check(["over"]))])
        dist.all_reduce(over, dist.ReduceOp.MAX)
        return bool(over)

    while not world.attempt(body):
        time.sleep(0.005)
    world.leave()
    return "trained"


def test_a_joiner_that_comes_when_all_who_let_it_in_have_died() -> None:
    with Ranks(is_slow_to_join, 4) as ranks:
        ranks.reports(but=(2, 3))
        come(ranks, 2)
        assert ranks.reports(but=(0, 1, 3)) == ["let in"]
        come(ranks, 3)
        assert ranks.reports(but=(0, 1, 2)) == ["is in"]
        ranks.signal(0, signal.SIGKILL)
        ranks.signal(1, signal.SIGKILL)
        tell(ranks, "go on")
        assert ranks.reports(but=(0, 1, 3)) == ["expelled"]
        tell(ranks, "over")
        assert ranks.results(but=(0, 1)) == ["expelled", "trained"]
