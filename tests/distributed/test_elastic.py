"""Worlds whose members die, are stopped or leave, and that let other processes in."""

from __future__ import annotations

import contextlib
import errno
import gc
import json
import os
import random
import signal
import threading
import time
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from bodies.elastic import BATCH, STEPS, come, loss_of, start, tell
from distributed.harness import Rank, Ranks, run
from torch import nn
from torch.nn.parallel import DistributedDataParallel

import ringreduce
from ringreduce import elastic
from ringreduce.coordination import watch
from ringreduce.coordination.endpoint import Address
from ringreduce.coordination.join_queue import JoinQueue
from ringreduce.coordination.process import identity
from ringreduce.coordination.protocol import Member, View
from ringreduce.elastic import lateness
from ringreduce.elastic.context import WorldContext
from ringreduce.elastic.lateness import STEPS as COUNTED
from ringreduce.errors import (
    CollectiveMismatch,
    CollectiveTimeout,
    Expelled,
    InvalidArgument,
    SystemFailure,
    TooFewRanks,
)
from ringreduce.groups.lookup import backend_of


def alone(steps: int) -> nn.Module:
    """The model that a single process has after `steps` steps."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(8, 16), nn.Tanh(), nn.Linear(16, 1)).double()
    optimizer = torch.optim.Adam(model.parameters(), lr=0.01)
    for step in range(steps):
        optimizer.zero_grad()
        loss_of(model, step, 0, 1).backward()
        optimizer.step()
    return model


def train(me: Rank, first: int, end: dict[str, int], **other: Any) -> dict[str, Any]:
    """Trains for STEPS steps and checks the parameters. A rank from `first` on begins when the test tells it to.

    If `end` is not empty, the training goes on until there have been `size` members for 5 steps after step `step`, and,
    with `told`, after the test has said that it is over.
    """
    if me.rank >= first:
        while not me.store.check([f"come {me.rank}"]):
            time.sleep(0.005)
    world = start(me, first, **other)
    torch.manual_seed(me.rank)  # the state is the first rank's
    net = alone(0) if me.rank == 0 else nn.Sequential(nn.Linear(8, 16), nn.Tanh(), nn.Linear(16, 1)).double()
    model = DistributedDataParallel(net, init_sync=False)
    optimizer = torch.optim.Adam(model.parameters(), lr=0.01)
    state = world.state(model=model, optimizer=optimizer, step=0, together=0)
    changes: list[int] = []
    world.on_change(lambda world: changes.append(world.size))
    began = state.step
    attempts = 0

    def backward() -> bool:
        nonlocal attempts
        attempts += 1
        optimizer.zero_grad()
        loss_of(model, state.step, world.rank, world.size).backward()
        over = torch.tensor([int(not end.get("told") or me.store.check(["over"]))])
        dist.all_reduce(over, dist.ReduceOp.MAX)  # in which the dead have no part
        return bool(over) and world.size == end.get("size", world.size)

    me.report("begins")
    while state.step < STEPS or state.together < 5 * bool(end):
        right = world.attempt(backward)
        optimizer.step()
        state.step += 1
        right = right and state.step > end.get("step", 0)
        state.together = state.together + 1 if right else 0
        if not right:
            time.sleep(0.002)
    expected = alone(state.step)
    for mine, single in zip(net.parameters(), expected.parameters(), strict=True):
        assert torch.allclose(mine, single, rtol=0, atol=1e-10)
    dist.barrier()
    result = {"size": world.size, "rank": world.rank, "began": began, "changes": changes, "epoch": world.epoch}
    world.leave()
    return result | {"steps": state.step, "redone": attempts - (state.step - began)}


def test_a_training_without_faults() -> None:
    results = run(train, 3, 3, {})
    assert [each["rank"] for each in results] == [0, 1, 2]
    assert all((each["steps"], each["redone"], each["epoch"]) == (STEPS, 0, 0) for each in results)


@pytest.mark.parametrize("hosts", ["one host", "several hosts"])
def test_survivors_go_on(hosts: str) -> None:
    with Ranks(on_hosts, 4, hosts, 4, {"size": 2, "step": 0}) as ranks:
        ranks.reports()
        time.sleep(0.1)
        ranks.signal(0, signal.SIGKILL)
        time.sleep(0.3)
        ranks.signal(2, signal.SIGKILL)
        results = ranks.results(but=(0, 2))
        assert [(each["size"], each["rank"]) for each in results] == [(2, 0), (2, 1)]
        assert results[0]["changes"][-1] == 2 and results[0]["steps"] == results[1]["steps"]


def on_hosts(me: Rank, hosts: str, *rest: Any) -> Any:
    if hosts == "several hosts":
        os.environ["RINGREDUCE_HOST_ID"] = f"host {me.rank // 2}"
    return train(me, *rest)


@pytest.mark.parametrize("hosts", ["one host", "several hosts"])
def test_a_fresh_process_joins(hosts: str) -> None:
    with Ranks(on_hosts, 4, hosts, 3, {"size": 3, "step": 1}) as ranks:
        ranks.reports(but=(3,))
        ranks.signal(1, signal.SIGKILL)
        come(ranks, 3)
        results = ranks.results(but=(1,))
        assert sorted(each["rank"] for each in results) == [0, 1, 2]
        assert results[2]["rank"] == 2 and results[2]["began"] > 0  # joiners come last


def test_one_is_left_and_two_join() -> None:
    with Ranks(train, 5, 3, {"size": 3, "step": 1}) as ranks:
        ranks.reports(but=(3, 4))
        ranks.signal(0, signal.SIGKILL)
        ranks.signal(2, signal.SIGKILL)
        come(ranks, 3, 4)
        results = ranks.results(but=(0, 2))
        assert {each["size"] for each in results} == {3} and results[0]["rank"] == 0


def test_a_joiner_is_killed() -> None:
    with Ranks(train, 4, 2, {"size": 3, "step": 1}) as ranks:
        ranks.reports(but=(2, 3))
        come(ranks, 2)
        time.sleep(0.02)
        ranks.signal(2, signal.SIGKILL)
        come(ranks, 3)
        results = ranks.results(but=(2,))
        assert {each["size"] for each in results} == {3}


def stops(me: Rank) -> str:
    """Rank 1 is stopped and continues later."""
    try:
        train(me, 3, {"size": 2, "step": 0}, timeout=timedelta(seconds=2), expel_after=1.0)
    except Expelled:
        return "expelled"
    return "trained"


def test_a_rank_that_was_stopped_is_expelled() -> None:
    with Ranks(stops, 3) as ranks:
        ranks.reports()
        ranks.signal(1, signal.SIGSTOP)
        time.sleep(6)
        ranks.signal(1, signal.SIGCONT)
        assert ranks.results() == ["trained", "expelled", "trained"]


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
            pass
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
        time.sleep(6)
        ranks.signal(1, signal.SIGCONT)
        assert ranks.results() == [("trained", 1), ("expelled", 1), ("trained", 1)]


def leaves_without_a_group(me: Rank) -> int:
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


def no_group() -> None:
    time.sleep(0.05)
    raise SystemFailure("none today")


def ledgers() -> int:
    """The number of ledgers of worlds that this process has open."""
    return sum("memfd:ringreduce world" in os.path.realpath(each) for each in Path("/proc/self/fd").iterdir())


def test_a_member_without_a_group_can_leave() -> None:
    assert run(leaves_without_a_group, 1) == [0]


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


def waits_for_one_that_lives(me: Rank) -> int:
    """Rank 1 dies. Rank 2 is let in and dies before the group is made; rank 3 comes after it."""
    if me.rank >= 2:
        while not me.store.check([f"come {me.rank}"]):
            time.sleep(0.005)
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
        while not me.store.check(["come 2"]):
            time.sleep(0.005)
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


def raises_once(me: Rank) -> tuple[int, int]:
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


def test_an_exception_of_ones_own() -> None:
    assert run(raises_once, 3) == [(1, 0), (1, 1), (1, 0)]


def joins_with_other_options(me: Rank) -> Any:
    """Rank 2 joins with other options, and lives until the others have gone on."""
    if me.rank == 2:
        me.store.wait(["ready"], timedelta(seconds=60))
        with pytest.raises(InvalidArgument, match="options differ between ranks"):
            start(me, 2, options=ringreduce.Options(slices=2))
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


def test_a_joiner_with_other_options_does_not_stop_the_others() -> None:
    assert run(joins_with_other_options, 3) == [2, 2, "raised"]


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


def callbacks_make_other_calls(me: Rank) -> tuple[int, int]:
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


def wrong(world: elastic.World) -> None:
    raise InvalidArgument("the program's")


def test_a_change_is_not_repeated_after_a_callbacks_own_error() -> None:
    assert run(callbacks_make_other_calls, 2) == [(1, 2), (1, 1)]


def with_a_store_in_rank_2(me: Rank) -> dict[str, Any]:
    if me.rank == 2:
        store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
        me.store.set("port", str(store.port))
    else:
        store = dist.TCPStore("127.0.0.1", int(me.store.get("port")), is_master=False)
    me.store = store
    return train(me, 3, {"size": 2, "step": 1})


def test_the_launchers_store_dies_with_a_rank() -> None:
    with Ranks(with_a_store_in_rank_2, 3) as ranks:
        ranks.reports()
        ranks.signal(2, signal.SIGKILL)
        assert [each["size"] for each in ranks.results(but=(2,))] == [2, 2]


class Hangs(dist.Store):
    """A store that does not answer while `hangs` is set."""

    def __init__(self, inner: dist.Store) -> None:
        super().__init__()
        self.inner, self.hangs = inner, False

    def _asked(self) -> dist.Store:
        while self.hangs:
            time.sleep(0.05)
        return self.inner

    def set(self, *arguments: Any) -> None:
        self._asked().set(*arguments)

    def get(self, key: str) -> bytes:
        return self._asked().get(key)

    def add(self, *arguments: Any) -> int:
        return self._asked().add(*arguments)

    def check(self, keys: list[str]) -> bool:
        return self._asked().check(keys)

    def compare_set(self, *arguments: Any) -> bytes:
        return self._asked().compare_set(*arguments)

    def wait(self, *arguments: Any) -> None:
        self._asked().wait(*arguments)

    def has_extended_api(self) -> bool:
        return False


def with_a_store_that_hangs(me: Rank) -> tuple[int, int, bool]:
    """The store does not answer from step 5 on. `timeout` and `expel_after` are shorter than its requests."""
    store = Hangs(me.store)
    world = elastic.start(store=store, rank=me.rank, world_size=3, timeout=timedelta(seconds=4), expel_after=1.0)
    longest = 0.0
    for step in range(40):
        store.hangs = step >= 5
        began = time.monotonic()
        world.attempt(lambda: dist.all_reduce(torch.ones(1)))
        longest = max(longest, time.monotonic() - began)
        time.sleep(0.05)
    return world.epoch, world.size, longest < 3


def test_members_do_not_wait_for_the_launchers_store() -> None:
    assert run(with_a_store_that_hangs, 3) == [(0, 3, True)] * 3


def lets_in_without_a_store(me: Rank) -> int:
    """Rank 0's store does not answer any more once rank 3 waits. The others invite it."""
    store = Hangs(me.store)
    if me.rank == 3:
        me.store.wait(["begun"], timedelta(seconds=60))
    world = elastic.start(
        store=store, rank=me.rank % 3, world_size=3, timeout=timedelta(seconds=8), expel_after=1.0, patience=2.0
    )
    world.state(step=0)

    def body() -> None:
        me.store.set("begun", "")
        if world.rank == 0 and not world._joiners_wait:
            store.hangs = bool(world._join_watcher.found())
        dist.all_reduce(torch.ones(1))

    world.attempt(body)
    while world.size == 3:
        world.attempt(body)
    return world.size


def test_a_process_is_let_in_while_rank_0_gets_no_answer() -> None:
    assert run(lets_in_without_a_store, 4) == [4] * 4


def leaves_without_a_word(me: Rank) -> int:
    """Rank 1 goes on to the next view although its group is in order, like a member that could not make the group."""
    world = start(me, 3)
    if me.rank == 1:
        world._abort = lambda: None  # type: ignore[method-assign]
        world._change(SystemFailure("no descriptors are left"))
    for _ in range(3):  # where rank 1 is waited for first, the others come to the next epoch
        world.attempt(lambda: dist.all_reduce(torch.ones(1)))
    world.leave()
    return world.size


def fails_to_make(me: Rank) -> int:
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


def test_a_group_that_one_member_cannot_make_is_made_again() -> None:
    assert run(fails_to_make, 3) == [3, 3, 3]


def test_the_others_notice_a_member_that_could_not_come_along() -> None:
    assert run(leaves_without_a_word, 3) == [3, 3, 3]


def durable(me: Rank) -> int:
    world = start(me, 3)
    me.report("begins")
    for number in range(3):
        dist.barrier()
        assert world.commit(durable=number == 1)
    me.meet("committed")
    if me.rank == 2:
        time.sleep(60)
    while world.commit():  # until rank 2 is dead
        time.sleep(0.01)
    return world.view.step


def test_durable_commits() -> None:
    with Ranks(durable, 3) as ranks:
        ranks.reports()
        time.sleep(0.5)
        ranks.signal(2, signal.SIGKILL)
        assert ranks.results(but=(2,)) == [3, 3]


def with_forked_children(me: Rank) -> tuple[int, int, int]:
    """Every member has a child like a DataLoader's, which holds all descriptors that the member had when it forked."""
    world = start(me, 3)
    state = world.state(step=0)
    child = os.fork()
    if child == 0:
        signal.alarm(120)  # ends it where its parent was killed
        signal.pause()
    try:
        me.report("begins")
        while state.step < 30:
            world.attempt(lambda: (time.sleep(0.02), dist.all_reduce(torch.ones(1))))
            state.step += 1
        threads = [thread for thread in threading.enumerate() if thread.name == "ringreduce elastic"]
        return world.epoch, world.size, len(threads)
    finally:
        os.kill(child, signal.SIGKILL)
        os.waitpid(child, 0)


def test_forked_children_do_not_keep_an_old_view_alive() -> None:
    with Ranks(with_forked_children, 3) as ranks:
        ranks.reports()
        ranks.signal(2, signal.SIGKILL)
        assert ranks.results(but=(2,)) == [(1, 2, 1)] * 2


def dies_before_the_state(me: Rank) -> tuple[int, int]:
    world = start(me, 3)
    me.report("is a member")
    if me.rank == 2:
        signal.pause()
    state = world.state(step=7 if me.rank == 0 else 0)
    return world.size, state.step


def test_a_death_before_anybody_has_the_state() -> None:
    with Ranks(dies_before_the_state, 3) as ranks:
        ranks.reports()
        ranks.signal(2, signal.SIGKILL)
        assert ranks.results(but=(2,)) == [(2, 7)] * 2


def leaves_and_lives(me: Rank) -> int:
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


def test_others_go_on_at_once_without_a_member_that_leaves() -> None:
    assert run(leaves_and_lives, 3) == [2, 2, -1]


def comes_when_all_is_over(me: Rank) -> str:
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


def test_a_process_that_starts_when_all_have_left_ends_well() -> None:
    assert run(comes_when_all_is_over, 3) == ["", "", "0"]


def comes_when_all_have_died(me: Rank) -> None:
    """Rank 2 comes when the others are dead, or is let in and finds them dead."""
    if me.rank == 2:
        while not me.store.check(["come 2"]):
            time.sleep(0.005)
        opens = WorldContext.open_a_ledger

        def when_told(self: WorldContext, *arguments: Any) -> bool:
            me.report("let in")
            while not me.store.check(["go on"]):
                time.sleep(0.005)
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


def calls_another_thing(me: Rank) -> None:
    world = start(me, 2)
    with pytest.raises(CollectiveMismatch):
        world.attempt(lambda: dist.all_reduce(torch.ones(1 + me.rank)))


def test_a_mismatch_is_raised_and_not_repeated() -> None:
    run(calls_another_thing, 2)


def nobody_lets_in(me: Rank) -> None:
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


def test_arguments_and_a_world_that_is_not_there() -> None:
    run(nobody_lets_in, 1)


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


def waits_as_a_spare(me: Rank) -> str:
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


def test_a_spare_that_is_not_needed() -> None:
    assert run(waits_as_a_spare, 3) == ["2", "2", "over"]


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


def waits_for_rank_1(me: Rank) -> tuple[int, bool]:
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


def test_the_members_know_for_whom_they_have_waited() -> None:
    assert run(waits_for_rank_1, 3) == [(1, True)] * 3


def joins_again_and_again(me: Rank) -> int:
    """Ranks join one after the other and leave. In the end the join queue has no number left to ask the store about."""
    if me.rank >= 2:
        while not me.store.check([f"left {me.rank - 1}"]):
            time.sleep(0.005)
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


def joins_when_its_host_has_died(me: Rank) -> int:
    """Rank 2 is let in. The member whose ledger it would open first is dead by then."""
    if me.rank == 2:
        while not me.store.check(["ready"]):
            time.sleep(0.005)
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
        while not me.store.check([f"come {me.rank}"]):
            time.sleep(0.005)
    if me.rank == 2:
        opens = WorldContext.open_a_ledger

        def when_told(self: WorldContext, name: str, view: View, seconds: float) -> bool:
            if not me.store.check(["go on"]):
                me.report("let in")
            while not me.store.check(["go on"]):
                time.sleep(0.005)
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


def trial(number: int) -> None:
    """Random kills and joins. All ranks that are left end with the parameters of a single process."""
    draw = random.Random(number)
    first, joiners = draw.randint(2, 4), draw.randint(0, 2)
    doomed = draw.sample(range(first + joiners), draw.randint(1, first - 1))
    size = first + joiners - len(doomed)
    with Ranks(train, first + joiners, first, {"size": size, "step": 1, "told": 1}) as ranks:
        ranks.reports(but=tuple(range(first, first + joiners)))
        events = [("kill", rank) for rank in doomed] + [("come", rank) for rank in range(first, first + joiners)]
        draw.shuffle(events)
        for what, rank in sorted(events, key=lambda event: event[0] == "kill" and event[1] >= first):
            if what == "come":
                come(ranks, rank)
            else:
                ranks.signal(rank, signal.SIGKILL)
            time.sleep(draw.choice((0, 0.001, 0.01, 0.05, 0.2)))
        tell(ranks, "over")
        results = ranks.results(but=tuple(doomed))
        assert {each["size"] for each in results} == {size}, (number, results)
        assert sorted(each["rank"] for each in results) == list(range(size)), (number, results)


@pytest.mark.slow
def test_random_kills_and_joins() -> None:
    for number in range(10):
        trial(number)


def main() -> None:
    """cd tests && python -m distributed.test_elastic FIRST LAST: these trials, here and in test_survivors."""
    import importlib
    import sys

    from distributed import test_survivors

    importlib.import_module("conftest")
    for number in range(int(sys.argv[1]), int(sys.argv[2])):
        for one in (trial, test_survivors.trial):
            began = time.monotonic()
            try:
                one(number)
                print(number, one.__module__, f"right {time.monotonic() - began:.1f} s", flush=True)
            except (AssertionError, pytest.fail.Exception) as error:
                print(number, one.__module__, "WRONG", error, flush=True)


if __name__ == "__main__":
    main()
