"""What a program may get wrong in a world: the mistake is named, and no member goes on a step apart from the others."""

from __future__ import annotations

import contextlib
import os
import signal
import time
from typing import Any

import pytest
import torch
import torch.distributed as dist
from bodies.elastic import come, start, wait_for
from distributed.harness import Rank, Ranks, on_ranks, run
from torch import nn

from ringreduce import elastic
from ringreduce.elastic.lateness import Late
from ringreduce.errors import Expelled, InvalidArgument


def steps_agree(world: elastic.World, me: Rank) -> None:
    """Does a few steps, in each of which all members must have done as many steps as this one."""
    for _ in range(3):
        done = torch.tensor([world._committed])
        most = world.attempt(lambda done=done: maximum(done))  # type: ignore[misc]
        assert most == world._committed - 1, (most, world._committed)


def maximum(value: torch.Tensor) -> int:
    result = value.clone()
    dist.all_reduce(result, dist.ReduceOp.MAX)
    return int(result)


@on_ranks(2)
def test_a_commit_counts_although_the_next_group_cannot_be_prepared(me: Rank) -> None:
    world = start(me, 2)
    if me.rank == 0:

        def no_descriptors(_: object) -> None:
            raise OSError("too many open files")

        world._settings.get_ready = no_descriptors  # type: ignore[method-assign]
    world.attempt(lambda: dist.all_reduce(torch.ones(1)))
    steps_agree(world, me)
    world.leave()


@on_ranks(2)
def test_a_callback_for_stragglers_fails(me: Rank) -> None:
    world = start(me, 2)
    told: list[Late] = []

    def on_straggler(late: Late) -> bool:
        told.append(late)
        if me.rank == 0 and len(told) == 1:
            raise KeyError("the program's")
        return False

    world.on_straggler(on_straggler)
    world.attempt(lambda: dist.all_reduce(torch.ones(1)))
    world._late = Late(1, "here", 1, 1.0, 0.5)
    if me.rank == 0:
        with pytest.raises(KeyError, match="the program's"):
            world.attempt(lambda: dist.all_reduce(torch.ones(1)))
    steps_agree(world, me)
    assert len(told) == 1
    world.leave()


@on_ranks(2)
def test_an_attempt_is_interrupted(me: Rank) -> None:
    world = start(me, 2)
    calls: list[int] = []

    def twice() -> None:
        dist.all_reduce(torch.ones(1))
        calls.append(1)
        if me.rank == 0 and len(calls) == 1:
            raise KeyboardInterrupt
        dist.all_reduce(torch.ones(2))

    if me.rank == 0:
        with pytest.raises(KeyboardInterrupt):
            world.attempt(twice)
    world.attempt(twice)
    steps_agree(world, me)
    world.leave()


@on_ranks(2)
def test_a_second_start(me: Rank) -> None:
    world = start(me, 2)
    with pytest.raises(InvalidArgument, match=r"start: this process has a default group; call world.leave\(\)"):
        start(me, 2)
    steps_agree(world, me)
    world.leave()


@on_ranks(2)
def test_a_forked_child_is_no_member(me: Rank) -> None:
    world = start(me, 2)
    world.attempt(lambda: dist.all_reduce(torch.ones(1)))
    if (child := os.fork()) == 0:
        code = 1
        with contextlib.suppress(BaseException):
            for call in (world.commit, lambda: world.attempt(int)):
                with pytest.raises(InvalidArgument, match=r"process \d+ is the member, and this one was forked"):
                    call()
            world.leave()  # as in a `finally` around all
            code = 0
        os._exit(code)
    assert os.waitpid(child, 0)[1] == 0
    steps_agree(world, me)
    assert world.epoch == 0
    world.leave()


@on_ranks(1)
def test_a_class_as_a_part_of_the_state(me: Rank) -> None:
    world = start(me, 1)
    with pytest.raises(InvalidArgument, match="state: net is the class Linear; give an object"):
        world.state(net=nn.Linear)
    assert world.state(net=nn.Linear(2, 2), step=0).step == 0
    world.leave()
    with pytest.raises(InvalidArgument, match="state: this process has left the world"):
        world.state(step=0)


def declares_other_parts(me: Rank) -> int:
    """Rank 2 joins with other parts than the members have."""
    if me.rank == 2:
        wait_for(me, "come 2")
        world = start(me, 2)
        with pytest.raises(InvalidArgument, match=r"its parts are \['other'\] here and \['step'\] on the members"):
            world.state(other=3)
        world.leave()
        return 0
    world = start(me, 2)
    me.report("begins")
    state = world.state(step=0)
    while world.epoch < 2 or world.size > 2:  # the joiner comes and goes; a member may miss a view
        world.attempt(lambda: dist.all_reduce(torch.ones(1)))
        state.step += 1
    steps_agree(world, me)
    world.leave()
    return world.size


def test_a_joiner_with_other_parts() -> None:
    with Ranks(declares_other_parts, 3) as ranks:
        ranks.reports(but=(2,))
        come(ranks, 2)
        assert ranks.results() == [2, 2, 0]


@on_ranks(1)
def test_arguments_of_start(me: Rank) -> None:
    os.environ["RANK"] = "a"
    with pytest.raises(InvalidArgument, match="start: RANK is 'a'; it must be a whole number"):
        elastic.start(store="etcd://nowhere:1/job")
    for wrong, message in {
        "store": "start: store is 5; it must be a store of torch, or an address in etcd",
        "rank": "start: rank is '0' and world_size 2",
        "least": "start: least is 5; it must be a whole number from 1 to world_size, 2",
        "world_size": "start: world_size is 1000000000; it must be at most 65536",
    }.items():
        given: dict[str, Any] = {"store": me.store, "rank": 0, "world_size": 2}
        with pytest.raises(InvalidArgument, match=message):
            elastic.start(**{**given, wrong: {"store": 5, "rank": "0", "least": 5, "world_size": 10**9}[wrong]})
    os.environ.update(RANK="0", WORLD_SIZE="7", MASTER_ADDR="127.0.0.1", MASTER_PORT="0")
    world = elastic.start(rank=0, world_size=1)  # not what the variables say
    assert world.size == 1
    world.leave()


def waits(me: Rank) -> int:
    """Ranks 0 and 1 are members, and rank 2 a spare."""
    world = elastic.start(store=me.store, rank=me.rank, world_size=3, least=2, spares=1, timeout=2.0)
    if me.rank < 2:
        me.report("begins")
    while True:
        world.attempt(lambda: dist.all_reduce(torch.ones(1)))
        if world.epoch > 0:
            break
        time.sleep(0.01)
    steps_agree(world, me)
    size = world.size
    world.leave()
    return size


def test_a_spare_replaces_a_member_that_was_stopped() -> None:
    """The members notice it after two timeouts. The spare hears nothing for as long, and must not give up."""
    with Ranks(waits, 3) as ranks:
        ranks.reports(but=(2,))
        ranks.signal(0, signal.SIGSTOP)
        assert ranks.results(but=(0,)) == [2, 2]


class Interrupt(Exception):
    """What a signal handler raises, such as that for Ctrl-C."""


def votes_in_vain(me: Rank, after: bool) -> tuple[str, int]:
    """A vote of rank 1 is interrupted, before it can complete or after the others have got its outcome."""
    world = start(me, 3)
    done = 0
    for _ in range(2):
        world.attempt(lambda: dist.all_reduce(torch.ones(1)))
        done += 1
    vote = world._vote

    def interrupted(step: int, durable: bool) -> bool:
        if after:
            vote(step, durable)
        raise Interrupt

    interrupts = [interrupted]
    try:
        while done < 5:
            if me.rank == 1 and done == 2 and interrupts:
                world._vote = interrupts.pop()  # type: ignore[method-assign]
            with contextlib.suppress(Interrupt):
                most = world.attempt(lambda done=done: maximum(torch.tensor([done])))  # type: ignore[misc]
                assert most == done
                done += 1
            world._vote = vote  # type: ignore[method-assign]
    except Expelled as error:
        return str(error), world.size
    world.leave()
    return "", world.size


@pytest.mark.parametrize("after", [False, True], ids=["before", "after"])
def test_an_error_that_interrupts_a_vote(after: bool) -> None:
    """If the others have completed the step, the interrupted member is out: its program does not know of the step."""
    found = run(votes_in_vain, 3, after)
    if after:
        assert "while step 3 was voted on, and the others have completed the step" in found.pop(1)[0]
        assert found == [("", 2)] * 2
    else:
        assert found == [("", 3)] * 3


def fails_without_a_group() -> None:
    dist.destroy_process_group()
    raise Interrupt


@on_ranks(3, returns=[1, 0, 0])
def test_an_error_that_interrupts_a_change(me: Rank) -> int:
    world = start(me, 3)
    world.attempt(lambda: dist.all_reduce(torch.ones(1)))
    if me.rank == 2:
        world.leave()
        return 0

    def interrupted() -> None:
        raise Interrupt

    if me.rank == 1:
        world._make_group = interrupted  # type: ignore[method-assign]
        with pytest.raises(Interrupt):
            steps_agree(world, me)
        with pytest.raises(InvalidArgument, match=r"has left the world, by leave\(\) or because an error"):
            world.attempt(int)
        return 0
    steps_agree(world, me)
    with pytest.raises(Interrupt):
        world.attempt(fails_without_a_group)
    return world.size


@on_ranks(2)
def test_attempts_and_commits_within_an_attempt(me: Rank) -> None:
    world = start(me, 2)
    world.state(step=0)
    for call in (world.commit, lambda: world.attempt(int)):
        with pytest.raises(InvalidArgument, match="the function that attempt calls must not call it"):
            world.attempt(call)  # type: ignore[arg-type]
        steps_agree(world, me)
    world.leave()


def hides_the_failure(me: Rank) -> int:
    """An error of the program's own that a failure of the group has caused ends no member."""
    world = start(me, 3)
    tries = 0

    def step() -> None:
        nonlocal tries
        tries += 1
        if me.rank == 2 and tries == 1:
            os.kill(os.getpid(), signal.SIGKILL)
        try:
            dist.all_reduce(torch.ones(1))
        except RuntimeError:
            raise KeyError("something else") from None

    world.attempt(step)
    world.leave()
    return tries


def test_an_error_of_the_programs_own_because_of_a_lost_member() -> None:
    with Ranks(hides_the_failure, 3) as ranks:
        assert ranks.results(but=(2,)) == [2, 2]


@on_ranks(2)
def test_different_patience(me: Rank) -> None:
    with pytest.raises(
        InvalidArgument, match=r"start: patience is \d here and \d on rank \d; give all processes the same"
    ):
        start(me, 2, patience=1.0 + me.rank)
