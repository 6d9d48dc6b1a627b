"""A rank is killed at each stage of making a group: all others say so, with its name, and soon."""

from __future__ import annotations

import ctypes
import errno
import functools
import gc
import os
import platform
import resource
import signal
import socket
import struct
import time
from collections.abc import Callable
from datetime import timedelta
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from distributed.harness import Rank, Ranks, in_threads, on_ranks, run
from processes import Logged

import ringreduce
from ringreduce.coordination import process
from ringreduce.coordination.store import METHODS, lacks
from ringreduce.errors import (
    CollectiveMismatch,
    CollectiveTimeout,
    InvalidArgument,
    PeerLost,
    RingReduceError,
    SystemFailure,
)
from ringreduce.groups import arrivals, exchange, make, meet

SIZE = 3
NOTICED = 2.0
"""Seconds in which all must know."""

BOTH = ["arrival: told", "who: told"]
MEMBER = [*BOTH, "roster: known", "host: introduced", "host: joined", "group: met", "group: made"]
LEADER = [*BOTH, "who: collected", "roster: known", "host: leads", "host: invited", "host: admitted", "host: admitted"]
LEADER += ["host: handed out", "host: handed out", "group: met", "group: made"]
ALONE = [*BOTH, "roster: answered", "roster: known", "host: leads", "host: invited", "doors: told"]
ALONE += ["doors: answered", "group: met"]
FIRST = [*BOTH, "who: collected", "roster: published", "roster: known", "host: leads", "host: invited"]
FIRST += ["doors: told", "doors: collected", "doors: published", "group: met"]
STAGES = [("shared_memory", 0, LEADER), ("shared_memory", 2, MEMBER), ("tcp", 0, FIRST), ("tcp", 2, ALONE)]
"""By transport and rank: what it passes, up to its first call or, with links, to the first connection."""


def makes_a_group(me: Rank, transport: str, victim: int, stop: int) -> Any:
    """Kills itself at stage `stop` if this is `victim`. Returns the stages it came through, or its error and when."""
    stages: list[str] = []

    def passed(stage: str) -> None:
        stages.append(stage)
        if me.rank == victim and len(stages) == stop + 1:
            me.report(time.monotonic())
            os.kill(os.getpid(), signal.SIGKILL)

    for module in (arrivals, exchange, meet, make):
        module.passed = passed  # type: ignore[attr-defined]
    me.meet("all are started")  # what is older than its own process a rank takes for an earlier attempt's
    try:
        with me.join(options=ringreduce.Options(transport=transport)):
            value = torch.ones(1)
            dist.all_reduce(value)
            assert value == me.size
            return stages
    except RingReduceError as error:
        return type(error), error.culprit, str(error), time.monotonic()


@pytest.mark.parametrize("transport", ["shared_memory", "tcp"])
def test_these_are_all_stages(transport: str) -> None:
    found = run(makes_a_group, SIZE, transport, -1, 0)
    for of, rank, stages in STAGES:
        if of == transport:
            assert found[rank][: len(stages)] == stages
            assert transport == "tcp" or len(found[rank]) == len(stages)
    assert sum(len(stages) for _, _, stages in STAGES) >= 30


@pytest.mark.parametrize(
    ("transport", "victim", "stop"),
    [
        pytest.param(transport, victim, number, id=f"{transport}-rank {victim}-{number}-{stage}")
        for transport, victim, stages in STAGES
        for number, stage in enumerate(stages)
    ],
)
def test_others_name_who_is_killed(transport: str, victim: int, stop: int) -> None:
    with Ranks(makes_a_group, SIZE, transport, victim, stop) as ranks:
        killed = ranks.reports(but=tuple(rank for rank in range(SIZE) if rank != victim))[0]
        for kind, culprit, text, when in ranks.results(but=(victim,)):
            assert (kind, culprit) == (PeerLost, victim), text
            assert f"rank {victim} (" in text
            assert when < killed + NOTICED, text


def makes_another_group(me: Rank, how: str) -> Any:
    """Of all ranks, when the last has died."""
    with me.join(timeout=300.0):
        if me.rank == SIZE - 1:
            os.kill(os.getpid(), signal.SIGKILL)
        with pytest.raises(PeerLost):
            dist.barrier()
        with pytest.raises(PeerLost, match=f"rank {SIZE - 1}") as raised:
            if how == "new_group":
                dist.new_group()
            else:
                dist.group.WORLD.split_group(list(range(SIZE)))  # type: ignore[union-attr]
        return raised.value.culprit


@pytest.mark.parametrize("how", ["new_group", "split_group"])
def test_a_group_with_a_rank_that_the_world_has_lost_is_not_waited_for(how: str) -> None:
    """The timeout is longer than a test may take."""
    with Ranks(makes_another_group, SIZE, how) as ranks:
        assert ranks.results(but=(SIZE - 1,)) == [SIZE - 1] * (SIZE - 1)


def runs_out_of_descriptors(me: Rank, victim: int) -> list[int]:
    """The victim has room for one more descriptor each time. Returns how many more are open after each."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    with me.join("first"):  # what a process opens once
        pass
    left: list[int] = []
    made = False
    while not made:
        before = set(os.listdir("/proc/self/fd"))
        if me.rank == victim:
            resource.setrlimit(resource.RLIMIT_NOFILE, (max(map(int, before)) + 1 + len(left), hard))
        try:
            with me.join(f"with {len(left)}"):
                made = True
        except (RingReduceError, OSError, RuntimeError):
            pass
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))
        me.meet(f"after {len(left)}")
        gc.collect()
        left.append(len(os.listdir("/proc/self/fd")) - len(before))
    return left


@pytest.mark.parametrize("victim", [0, 1])
def test_all_fail_where_one_has_no_descriptors_left_and_nothing_stays_open(victim: int) -> None:
    by_rank = run(runs_out_of_descriptors, 2, victim)
    assert len({len(left) for left in by_rank}) == 1  # attempts
    for left in by_rank:
        assert len(left) > 4
        assert left == [0] * len(left)


def fails(kind: type[RingReduceError], what: Callable[[], Any]) -> tuple[str, int, float]:
    """The error that `what` raises: its text and culprit, and after how many seconds."""
    began = time.monotonic()
    with pytest.raises(kind) as raised:
        what()
    return str(raised.value), raised.value.culprit, time.monotonic() - began


def groups_of_other_ranks(me: Rank) -> list[float]:
    """torch gives these groups one name: it counts the calls of `new_group`."""
    with me.join(timeout=300.0):
        value = torch.full((3,), float(me.rank + 1))
        dist.all_reduce(value, group=dist.new_group([0, 1] if me.rank < 2 else [2, 3]))
        wanted = {0: [0, 3], 1: [1, 2], 2: [1, 2, 3], 3: [0, 3]}[me.rank]
        if me.rank in (1, 2):
            text, _, _ = fails(CollectiveMismatch, lambda: dist.new_group(wanted))
            assert "[1, 2]" in text and "[1, 2, 3]" in text and "died" not in text
        else:
            dist.all_reduce(value, group=dist.new_group(wanted))
        me.meet("all have tried")
        again = dist.new_group([1, 2, 3])  # of which rank 1 and 2 have made as many attempts as rank 3
        if me.rank:
            dist.all_reduce(value, group=again)
        return value.tolist()


def test_each_gets_the_group_it_asked_for_or_an_error_that_names_both_lists() -> None:
    sums = [10.0, 3.0 + 7.0 + 10.0, 3.0 + 7.0 + 10.0, 3.0 + 7.0 + 10.0]
    assert run(groups_of_other_ranks, 4) == [[value] * 3 for value in sums]


def groups_in_other_orders(me: Rank) -> tuple[list[tuple[str, int]], float]:
    """Odd ranks make their groups in another order. With two threads each they come together all the same; returns
    the errors of those with one thread, numbered and by local synchronization, and a sum over the threads' groups.

    No group is made before all have begun theirs: torch names a group by how many its process has.
    """
    made: dict[int, Any] = {}

    def by_thread(ranks: list[int], other: int = 0, count: int = 0, pause: float = 0.0) -> None:
        """Begins a while after the other rank has begun so many groups."""
        while me.store.add(f"begun by {other}", 0) < count:
            time.sleep(0.01)
        time.sleep(pause)
        made[len(ranks)] = dist.new_group(ranks, use_local_synchronization=True)

    def passed(stage: str) -> None:
        if stage == "arrival: told":
            me.store.add(f"begun by {me.rank}", 1)

    def in_order(*lists: list[int], local: bool = False) -> None:
        for ranks in lists[:: -1 if me.rank % 2 else 1]:
            dist.new_group(ranks, use_local_synchronization=local)

    with me.join(timeout=300.0):
        with mock.patch("ringreduce.groups.arrivals.passed", passed):
            if me.rank == 0:
                in_threads([lambda: by_thread([0, 1]), lambda: by_thread([0, 1, 2], 1, 1, pause=1.5)])
            elif me.rank == 1:
                in_threads([lambda: by_thread([0, 1, 2]), lambda: by_thread([0, 1], 0, 2)])
            elif me.rank == 2:
                by_thread([0, 1, 2], 1, 2)
        value = torch.full((3,), float(me.rank + 1))
        for size in sorted(made):
            if made[size] is not None:
                dist.all_reduce(value, group=made[size])

        found = [fails(CollectiveMismatch, lambda: in_order([0, 1], [2, 3]))[:2]]
        if me.rank < 2:
            found.append(fails(CollectiveMismatch, lambda: in_order([0, 1], [0, 1, 2], local=True))[:2])
        me.meet("all have failed")
        if me.rank in (0, 3):  # in their first group, and the others in their second
            dist.new_group([1, 2])
        time.sleep(1.5 if me.rank == 3 else 0.0)  # rank 2 waits for it, and rank 0 for rank 2, as they should
        for ranks in ([2, 3], [0, 2]):
            if (group := dist.new_group(ranks)) is not dist.GroupMember.NON_GROUP_MEMBER:
                dist.barrier(group)
        return found, float(value[0])


def test_ranks_that_make_their_groups_in_other_orders_do_not_wait_for_each_other() -> None:
    """The timeout is longer than a test may take."""
    found = run(groups_in_other_orders, 4)
    assert [value for _, value in found] == [9.0, 9.0, 9.0, 4.0]
    for rank, ([(text, culprit), *_], _) in enumerate(found):
        assert culprit == 1 - rank % 2
        both = sorted((rank, rank ^ 1))
        for number in (1, 2):
            assert f"makes a group of the ranks {both} as number {number}" in text, text
        assert all(f"rank {each} (" in text for each in both)
    for errors, _ in found[:2]:
        assert "ranks [0, 1]" in errors[1][0] and "ranks [0, 1, 2]" in errors[1][0]


@on_ranks(3)
def test_a_group_that_a_rank_has_given_up_is_not_held_against_it(me: Rank) -> None:
    with me.join():
        if me.rank == 1:
            new_group = functools.partial(dist.new_group, [0, 1], timedelta(seconds=1), use_local_synchronization=True)
            fails(CollectiveTimeout, new_group)
        me.meet("given up")
        time.sleep(1.0 if me.rank == 1 else 0.0)  # the others look what it makes meanwhile
        dist.barrier(dist.new_group([0, 1, 2], use_local_synchronization=True))


def has_a_wrong_variable(me: Rank) -> tuple[str, int]:
    if me.rank == 1:
        os.environ["RINGREDUCE_ENGINE"] = "slices=many"
    kind = InvalidArgument if me.rank == 1 else PeerLost

    def join() -> None:
        with me.join(timeout=300.0):
            pass

    text, culprit, _ = fails(kind, join)
    os.environ.pop("RINGREDUCE_ENGINE", None)
    with me.join(timeout=300.0):
        dist.barrier()
    return text, culprit


def test_the_others_hear_of_a_rank_that_fails_before_it_meets_them() -> None:
    found = run(has_a_wrong_variable, SIZE)
    assert all("slices in RINGREDUCE_ENGINE" in text and "many" in text for text, _ in found)
    assert {culprit for rank, (_, culprit) in enumerate(found) if rank != 1} == {1}


def without_proc(me: Rank, files: list[str], options: ringreduce.Options) -> tuple[str, str, list[int]]:
    """Rank 2 dies before the second group. Returns what the ranks share."""

    def unreadable(*_: Any) -> Any:
        raise FileNotFoundError(2, "No such file or directory")

    if "boot_id" in files:
        process.boot_id = lambda: ""  # type: ignore[assignment]
    if "stat" in files:
        process._began = unreadable
    if "ns" in files:
        process._namespace = lambda kind: ""  # type: ignore[assignment]
    for kept in (process.identity, process.kernel, process.process_began):
        kept.cache_clear()
    with me.join(timeout=300.0, options=options):
        value = torch.full((3,), float(me.rank))
        dist.all_reduce(value)
        stats = ringreduce.stats()["0"]
        if me.rank == 2:
            os.kill(os.getpid(), signal.SIGKILL)
        fails(PeerLost, dist.new_group)
    return process.kernel(), str(len(stats.links)), value.tolist()


@pytest.mark.parametrize("transport", ["auto", "tcp"])
@pytest.mark.parametrize("files", [["boot_id"], ["boot_id", "ns", "stat"]], ids=["no boot id", "no proc"])
def test_ranks_meet_where_proc_says_little(files: list[str], transport: str) -> None:
    """Under gVisor there is no boot id. A death is seen all the same once the ranks have met."""
    with Ranks(without_proc, SIZE, files, ringreduce.Options(transport=transport)) as ranks:
        links = "2" if transport == "tcp" else "0"
        assert ranks.results(but=(2,)) == [(socket.gethostname(), links, [3.0] * 3)] * 2


def is_refused(me: Rank, name: str) -> str:
    """The kernel's filter for rank 1 refuses a system call of this number."""
    libc = ctypes.CDLL(None, use_errno=True)
    if me.rank == 1:
        refuse = (
            (0x20, 0, 0, 0),
            (0x15, 0, 1, REFUSED[name]),
            (0x06, 0, 0, 0x50000 | errno.EPERM),
            (0x06, 0, 0, 0x7FFF0000),
        )
        program = ctypes.create_string_buffer(b"".join(struct.pack("=HBBI", *line) for line in refuse))
        line = ctypes.create_string_buffer(struct.pack("@HP", len(refuse), ctypes.addressof(program)))
        assert libc.prctl(PR_SET_NO_NEW_PRIVS, 1, 0, 0, 0) == libc.prctl(PR_SET_SECCOMP, 2, line, 0, 0) == 0

    def join() -> None:
        with me.join(timeout=300.0, options=ringreduce.Options(transport="tcp")):
            dist.barrier()

    if name == "sched_getaffinity":  # all cores are taken then
        join()
        return ""
    return fails(SystemFailure if me.rank == 1 else PeerLost, join)[0]


PR_SET_NO_NEW_PRIVS, PR_SET_SECCOMP = 38, 22
REFUSED = {"memfd_create": 319, "ioctl": 16, "sched_getaffinity": 204}


@pytest.mark.skipif(platform.machine() != "x86_64", reason="the numbers of system calls are those of x86-64")
@pytest.mark.parametrize("name", REFUSED)
def test_a_system_call_that_a_filter_refuses_is_named(name: str) -> None:
    said = f"{name}: Operation not permitted; let the container's or service's seccomp filter allow {name}"
    for text in run(is_refused, 2, name):
        assert said in text or name == "sched_getaffinity", text


def computes_with(me: Rank, threads: int) -> list[str]:
    """What the world and a group of two of its ranks log."""
    torch.set_num_threads(threads)
    log = Logged()
    with me.join():
        dist.new_group([0, 1])
        return [text for text in log.messages if "threads" in text]


def test_one_rank_warns_once_of_more_threads_than_cores() -> None:
    cores = len(os.sched_getaffinity(0))
    assert run(computes_with, 3, 1) == [[]] * 3
    [[warning], *others] = run(computes_with, 3, 2 * cores)
    assert f"3 ranks x {2 * cores} threads on {cores} cores: they" in warning
    assert f"; set OMP_NUM_THREADS={max(1, cores // 3)}, or call torch.set_num_threads" in warning
    assert others == [[], []]


class OwnStore(dist.Store):
    """The least that torch needs, written in Python."""

    def __init__(self, store: dist.Store) -> None:
        super().__init__()
        self._store = store

    def set(self, key: str, value: str) -> None:
        self._store.set(key, value)

    def get(self, key: str) -> bytes:
        return self._store.get(key)

    def add(self, key: str, value: int) -> int:
        return self._store.add(key, value)

    def wait(self, keys: list[str], *timeout: timedelta) -> None:
        self._store.wait(keys, *timeout)

    def set_timeout(self, timeout: timedelta) -> None:
        self._store.set_timeout(timeout)


class CheckedStore(OwnStore):
    def check(self, keys: list[str]) -> bool:
        return self._store.check(keys)


class NamedStore(dist.HashStore):
    """torch's own with all that it can do."""


@on_ranks(2)
def test_a_store_in_python_needs_no_compare_set(me: Rank) -> None:
    assert not any(lacks(NamedStore(), method) for method in ("compare_set", *METHODS))
    store = me.store
    me.store = OwnStore(store)

    def join() -> None:
        with me.join():
            value = torch.ones(3)
            dist.all_reduce(value)
            assert value.tolist() == [me.size] * 3

    assert "the store, a OwnStore, has no check()" in fails(InvalidArgument, join)[0]
    me.store = CheckedStore(store)
    join()


def cannot_map(me: Rank, victim: int, room: int, options: ringreduce.Options) -> tuple[str, int]:
    """The victim has met the others, and has `room` more bytes of address space: too little for what they share."""
    if me.rank == victim:
        soft, hard = resource.getrlimit(resource.RLIMIT_AS)

        def passed(stage: str) -> None:
            if stage == "group: met":
                with open("/proc/self/statm") as file:
                    used = int(file.read().split()[0]) * resource.getpagesize()
                resource.setrlimit(resource.RLIMIT_AS, (used + room, hard))

        make.passed = passed  # type: ignore[assignment]

    def join_and_call() -> None:
        with me.join(timeout=300.0, options=options):
            dist.barrier()

    found = fails(SystemFailure if me.rank == victim else PeerLost, join_and_call)[:2]
    if me.rank == victim:
        resource.setrlimit(resource.RLIMIT_AS, (soft, hard))
        me.meet("all have seen it")  # the victim lives until then
    else:
        me.meet("all have seen it")
    return found


MAPPED = {
    "the group's memory": (16 << 20, ringreduce.Options(engine="channel_bytes=1G")),
    "the arenas of peers": (600 << 20, ringreduce.Options()),
}


@pytest.mark.parametrize("mapped", MAPPED)
@pytest.mark.parametrize("victim", [0, 2])
def test_the_others_hear_of_a_rank_that_cannot_map(victim: int, mapped: str) -> None:
    for rank, (text, culprit) in enumerate(run(cannot_map, SIZE, victim, *MAPPED[mapped])):
        assert "cannot map" in text, text
        assert rank == victim or (culprit == victim and f"rank {victim} (" in text)


def names_in_a_part(me: Rank) -> Any:
    """Rank 3, which is rank 1 of the group, makes no call, makes another one, and does not come to a new group."""
    names = []
    with me.join(timeout=300.0):
        group = dist.new_group([1, 3])
        short = dist.new_group([1, 3], timeout=timedelta(seconds=4))
        processes: list[Any] = [None] * me.size
        dist.all_gather_object(processes, os.getpid())
        them = f"rank 3 (rank 1 of the group, {socket.gethostname()}, pid {processes[3]})"
        if me.rank == 1:
            texts = [fails(CollectiveTimeout, lambda: dist.all_reduce(torch.ones(1), group=short))[0]]
            texts.append(fails(CollectiveMismatch, lambda: dist.all_reduce(torch.ones(1), group=group))[0])
            texts.append(fails(CollectiveTimeout, lambda: dist.new_group([1, 3], timeout=timedelta(seconds=1)))[0])
            assert "rank 1 (rank 0 of the group) waited the timeout" in texts[0], texts[0]
            names = [them in text for text in texts]
            if not names[1]:  # rank 3 was the first to see it
                this = f"rank 1 (rank 0 of the group, {socket.gethostname()}, pid {os.getpid()})"
                names[1] = "rank 3 (rank 1 of the group) called all_reduce(count=7" in texts[1] and this in texts[1]
            else:
                assert "rank 1 (rank 0 of the group) called all_reduce" in texts[1], texts[1]
            names += [text for text, named in zip(texts, names, strict=True) if not named]
        elif me.rank == 3:
            fails(CollectiveMismatch, lambda: dist.all_reduce(torch.ones(7), group=group))
        me.meet("all have tried")
    return names


def test_errors_of_a_part_of_the_ranks_name_global_ranks() -> None:
    assert run(names_in_a_part, 4)[1] == [True] * 3
