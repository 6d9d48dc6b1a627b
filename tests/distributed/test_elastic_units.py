"""Worlds whose members come in units, such as the ranks of one replica. A lost member takes its unit with it."""

from __future__ import annotations

import os
import signal
import time
from datetime import timedelta
from typing import Any

import pytest
import torch
import torch.distributed as dist
from bodies.elastic import tell
from distributed.harness import Rank, Ranks

from ringreduce import elastic
from ringreduce.errors import Expelled, InvalidArgument

UNIT = 2


def train(me: Rank, hosts: str, size: int) -> Any:
    """Trains until `size` members have done 5 steps after a change that let others in.

    The member at place p of a unit has a shard of its own, which grows by 1 + p in each step. Returns the member's last
    rank and the sizes of the world so far, or the text of its `Expelled`.
    """
    if hosts == "several hosts":
        os.environ["RINGREDUCE_HOST_ID"] = f"host {me.rank // UNIT}"
    while me.rank >= size and not me.store.check(["come"]):
        time.sleep(0.005)
    try:
        world = elastic.start(
            UNIT, store=me.store, rank=me.rank % size, world_size=size, timeout=timedelta(seconds=30), unit=UNIT
        )
    except elastic.Over:
        return "over"
    assert world.rank % UNIT == me.rank % UNIT
    state = world.state(step=0, shard=torch.zeros(3), together=0)
    sizes = [world.size]
    world.on_change(lambda world: sizes.append(world.size))

    def body() -> torch.Tensor:
        sums = torch.zeros(UNIT)
        sums[world.rank % UNIT] = 1 + world.rank % UNIT
        dist.all_reduce(sums)  # of a place's ranks, as of replicas
        return sums[world.rank % UNIT] / (world.size // UNIT)

    me.report("begins")
    try:
        while state.together < 5:
            state.shard += world.attempt(body)
            state.step += 1
            state.together += world.epoch >= 2 and world.size == size
            time.sleep(0.002)
    except Expelled as error:
        return str(error)
    assert state.shard.tolist() == [state.step * (1.0 + world.rank % UNIT)] * 3
    place = world.rank
    world.leave()
    return place, sizes


@pytest.mark.parametrize("hosts", ["one host", "several hosts"])
def test_a_unit_goes_and_another_one_comes(hosts: str) -> None:
    """Rank 1 is killed, so rank 0 is expelled, and ranks 2 and 3 go on. Of three later processes, two are let in."""
    late = (4, 5, 6)
    with Ranks(train, 7, hosts, 4) as ranks:
        ranks.reports(but=late)
        ranks.signal(1, signal.SIGKILL)
        assert " of its unit" in ranks.results(but=(1, 2, 3, *late))[0]
        tell(ranks, "come")
        two, three, *came = ranks.results(but=(0, 1))
        assert (two, three) == ((0, [4, 2, 4]), (1, [4, 2, 4]))
        assert sorted(came, key=str) == [(2, [4]), (3, [4]), "over"]


def test_units_that_do_not_fit() -> None:
    for wrong in (0, 3, 2.0):
        with pytest.raises(InvalidArgument, match=rf"unit is {wrong!r}; it must divide the 4 first members and"):
            elastic.start(store=dist.HashStore(), rank=0, world_size=4, unit=wrong)  # type: ignore[arg-type]
    with pytest.raises(InvalidArgument, match="the 2 first members and the 3 spares"):
        elastic.start(store=dist.HashStore(), rank=0, world_size=5, spares=3, unit=2)
