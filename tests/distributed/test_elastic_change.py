"""A change of views leaves no descriptors behind, and imports nothing."""

from __future__ import annotations

import gc
import os
import signal
import sys
from pathlib import Path

import torch
import torch.distributed as dist
from bodies.elastic import start
from distributed.harness import Rank, Ranks, on_ranks

from ringreduce import elastic
from ringreduce.errors import CollectiveTimeout
from ringreduce.groups.lookup import backend_of


@on_ranks(1, returns=[(2, 0)])
def test_a_group_that_could_not_be_entered_goes_at_once(me: Rank) -> tuple[int, int]:
    """It must not wait for Python's garbage collector, which may take hours in a process with torch."""
    gc.disable()
    world = start(me, 1)
    before = memfds()
    changes: list[int] = []

    def fails_once(world: elastic.World) -> None:
        group = backend_of(None)  # as a call on it has
        changes.append(group.size())
        if len(changes) == 1:
            raise CollectiveTimeout("as a call in a callback")

    world.on_change(fails_once)
    world._change(None)
    more = memfds() - before
    world.leave()
    return len(changes), more


def memfds() -> int:
    """The number of group regions that this process has open."""
    return [os.path.realpath(each) for each in Path("/proc/self/fd").iterdir()].count("/memfd:ringreduce (deleted)")


def test_nothing_is_imported_in_a_change() -> None:
    """Not even by rank 1, which becomes rank 0. Reading modules would take as long as the rest of the change."""
    with Ranks(becomes_smaller, 3) as ranks:
        assert ranks.results(but=(0,)) == [[], []]


def becomes_smaller(me: Rank) -> list[str]:
    world = start(me, 3)
    world.attempt(lambda: dist.all_reduce(torch.ones(1)))
    before = set(sys.modules)
    if me.rank == 0:
        os.kill(os.getpid(), signal.SIGKILL)
    while world.epoch == 0:
        world.attempt(lambda: dist.all_reduce(torch.ones(1)))
    more = sorted(set(sys.modules) - before)
    world.leave()
    return more
