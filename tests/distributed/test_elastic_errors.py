"""Errors of one member: in the program, in its callbacks, or because it cannot make the group."""

from __future__ import annotations

import contextlib
import errno
import os
import signal
from datetime import timedelta

import pytest
import torch
import torch.distributed as dist
from bodies.elastic import start
from distributed.harness import Rank, Ranks, on_ranks

from ringreduce import elastic
from ringreduce.coordination.endpoint import Address
from ringreduce.coordination.process import identity
from ringreduce.coordination.protocol import Member, View
from ringreduce.errors import CollectiveMismatch, CollectiveTimeout, InvalidArgument, SystemFailure
from ringreduce.groups.lookup import backend_of


@on_ranks(3, returns=[(1, 0), (1, 1), (1, 0)])
def test_an_exception_of_ones_own(me: Rank) -> tuple[int, int]:
    """Rank 1's function raises once; then rank 1 calls `attempt` again."""
    world = start(me, 3)
    raised = 0

    def body() -> float:
        nonlocal raised
        tensor = torch.ones(10)
        if me.rank == 1 and not raised:
            raised += 1
            raise MemoryError("no memory")
        dist.all_reduce(tensor)
        return float(tensor[0])

    with contextlib.suppress(MemoryError):
        assert world.attempt(body) == 3
    if me.rank == 1:
        assert world.attempt(body) == 3
    epoch = world.epoch
    world.leave()
    return epoch, raised


def raises_in_a_callback(me: Rank) -> str:
    """Rank 2 dies, and rank 1's callback raises. Rank 1 does not come again, and lives until rank 0 has gone on."""
    world = start(me, 3, timeout=timedelta(seconds=1000), expel_after=0.5)

    def callback(world: elastic.World) -> None:
        if me.rank == 1:
            raise KeyError("of the program")

    world.on_change(callback)
    me.report("begins")
    try:
        while world.size > 1:
            world.attempt(lambda: dist.all_reduce(torch.ones(1)))
    except KeyError:
        me.store.wait(["gone on"], timedelta(seconds=60))
        return "raised"
    me.store.set("gone on", "")
    return "gone on"


def test_the_others_do_not_wait_for_a_member_whose_callback_raises() -> None:
    with Ranks(raises_in_a_callback, 3) as ranks:
        ranks.reports()
        ranks.signal(2, signal.SIGKILL)
        assert ranks.results(but=(2,)) == ["gone on", "raised"]


def wrong(world: elastic.World) -> None:
    raise InvalidArgument("the program's")


@on_ranks(2, returns=[(1, 2), (1, 1)])
def test_a_change_is_not_repeated_after_a_callbacks_own_error(me: Rank) -> tuple[int, int]:
    """The callbacks of two members make different calls, and then rank 0's raises `InvalidArgument`, as a call does."""
    world = start(me, 2)
    called = 0

    def other_calls(world: elastic.World) -> None:
        nonlocal called
        called += 1
        dist.all_reduce(torch.ones(1 + me.rank))

    world.on_change(other_calls)
    with pytest.raises(CollectiveMismatch):
        world._change(None)
    if me.rank == 1:
        return called, world.epoch
    with pytest.raises(InvalidArgument, match="the program's"):
        world._callbacks[0] = wrong
        world._change(None)
    return called, world.epoch


@on_ranks(3, returns=[3, 3, 3])
def test_a_group_that_one_member_cannot_make_is_made_again(me: Rank) -> int:
    """Rank 1 cannot make the second group. The others have made it by then, or fail as well."""
    world = start(me, 3)
    if me.rank == 1:
        enter = world._enter

        def failing() -> None:
            world._enter = enter  # type: ignore[method-assign]
            count = dist.distributed_c10d._world
            enter()
            dist.destroy_process_group()
            count.group_count += 1  # as torch leaves it
            raise SystemFailure("no descriptors are left")

        world._enter = failing  # type: ignore[method-assign]
        backend_of(None).abort()
    for _ in range(3):
        world.attempt(lambda: dist.all_reduce(torch.ones(1)))
    world.leave()
    return world.size


@on_ranks(3, returns=[3, 3, 3])
def test_the_others_notice_a_member_that_could_not_come_along(me: Rank) -> int:
    """Rank 1 goes on to the next view although its group is in order, like a member that could not make the group."""
    world = start(me, 3)
    if me.rank == 1:
        world._abort = lambda: None  # type: ignore[method-assign]
        world._change(SystemFailure("no descriptors are left"))
    for _ in range(3):  # where rank 1 is waited for first, the others come to the next epoch
        world.attempt(lambda: dist.all_reduce(torch.ones(1)))
    world.leave()
    return world.size


@on_ranks(2)
def test_a_mismatch_is_raised_and_not_repeated(me: Rank) -> None:
    world = start(me, 2)
    with pytest.raises(CollectiveMismatch):
        world.attempt(lambda: dist.all_reduce(torch.ones(1 + me.rank)))


@on_ranks(1)
def test_arguments_and_a_world_that_is_not_there(me: Rank) -> None:
    founder = Member("founder", Address(identity(), None, None, {}).dump())
    me.store.set("ringreduce/elastic/0/members now", View(0, (founder,)).dump())  # the founders have begun
    with pytest.raises(CollectiveTimeout, match="no member has looked who waits"):
        start(me, 1, timeout=timedelta(seconds=0.3))
    with pytest.raises(InvalidArgument, match="least is 0"):
        start(me, 1, least=0)
    with pytest.raises(InvalidArgument, match="spares is 2; of 2 processes, 1 must be left: 0 <= spares <= 1"):
        elastic.start(spares=2, store=me.store, rank=0, world_size=2)
    for wrong in (dict(least=1.5), dict(patience=-1), dict(expel_after=float("nan")), dict(expel_after="x")):
        with pytest.raises(InvalidArgument, match=f"start: {next(iter(wrong))} is "):
            start(me, 1, **wrong)
    with pytest.raises(InvalidArgument, match="rank is 3 and world_size 2"):
        elastic.start(store=me.store, rank=3, world_size=2)


def without_descriptors(me: Rank) -> int:
    """Rank 0 has no descriptor left when it begins to watch the members. It notices a death all the same."""
    world = start(me, 3)
    if me.rank == 0:
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(os, "pidfd_open", no_descriptors)
            world._watch.stop()
            world._watch = world._settings.watch(world.view)
            world._watch.attach(backend_of(None))
    me.report("begins")
    while world.size == 3:
        world.attempt(lambda: dist.all_reduce(torch.ones(1)))
    size = world.size
    world.leave()
    return size


def no_descriptors(pid: int) -> int:
    raise OSError(errno.EMFILE, "Too many open files")


def test_a_watch_without_descriptors() -> None:
    with Ranks(without_descriptors, 3) as ranks:
        ranks.reports()
        ranks.signal(2, signal.SIGKILL)
        assert ranks.results(but=(2,)) == [2, 2]
