"""A member of a world dies, or is stopped, at each point of a change of views: the others agree, and go on.

One of four members dies in a step, so that the other three go through a change. In it, one of them dies or stops right
before or right after a write, a compare-and-swap, a mapping, a message, a dial or a look. The points are counted as the
member meets them; those that it meets again in a row, as in a poll, count once.

cd tests && python -m distributed.test_elastic_failpoints      all of them, with a table
"""

from __future__ import annotations

import contextlib
import os
import signal
import socket
import sys
import threading
import time
from collections import Counter
from collections.abc import Callable
from datetime import timedelta
from typing import Any

import pytest
import torch
import torch.distributed as dist
from distributed.harness import Rank, Ranks, run

from ringreduce import backend, elastic, host_links, watch
from ringreduce.errors import Expelled
from ringreduce.membership.directory import OfStore
from ringreduce.membership.ledger import Ledger
from ringreduce.membership.rounds import Membership
from ringreduce.rendezvous import host, store
from ringreduce.survivors import KeyStore

SIZE, FIRST, STEPS = 4, 3, 12
DIES_IN, NOTICED = 4, 2.0
EXPEL_AFTER = 4.0
"""Seconds; longer than the timeout of a call, so that those who wait for it in turn are not given up."""
CALLS: list[tuple[Any, str]] = [
    (Ledger, "__init__"),  # maps it
    (Ledger, "_write"),  # a record; after it comes the compare-and-swap
    (Ledger, "change"),
    (OfStore, "get"),
    (OfStore, "compare_set"),
    (Membership, "leave"),
    (KeyStore, "set"),
    (KeyStore, "check"),
    (watch.Watch, "__init__"),
    (watch.Watch, "stop"),
    (host, "receive"),
    (host, "_send"),
    (socket.socket, "connect"),
    (socket.socket, "accept"),
    (host_links.Links, "learn"),
    (host_links.Links, "connect_all"),
    (backend._C, "ProcessGroupRing"),  # maps the regions
    (dist, "destroy_process_group"),
    (dist, "init_process_group"),
]


def at_each_point(reach: Callable[[str], None]) -> None:
    """Calls `reach` before and after each of CALLS, and at the stages of making a group, in the main thread."""

    def around(owner: Any, name: str) -> None:
        inner, label = getattr(owner, name), f"{getattr(owner, '__name__', owner)}.{name}".rpartition("ringreduce.")[2]

        def outer(*args: Any, **named: Any) -> Any:
            told = threading.current_thread() is threading.main_thread()
            if told:
                reach(f"before {label}")
            try:
                return inner(*args, **named)
            finally:
                if told:
                    reach(f"after {label}")

        setattr(owner, name, outer)

    for owner, name in CALLS:
        around(owner, name)
    for module in (store, host, backend):
        module.passed = reach  # type: ignore[attr-defined]


def changes(me: Rank, hosts: str, victim: int, stop: int, sign: int) -> Any:
    """Returns the points that it came through, and what it has seen: (epoch, members, step) of each commit."""
    if hosts == "several hosts":
        os.environ["RINGREDUCE_HOST_ID"] = f"host {me.rank % 2}"
    long = timedelta(seconds=30 if sign == signal.SIGKILL else 2)
    world = elastic.start(store=me.store, rank=me.rank, world_size=SIZE, timeout=long, expel_after=EXPEL_AFTER)
    state = world.state(step=0, sum=torch.zeros(1, dtype=torch.int64))
    points: list[str] = []

    def reach(point: str) -> None:
        if (world.epoch == 0 or len(seen) <= DIES_IN) and (not points or points[-1] != point):
            points.append(point)
            if me.rank == victim and len(points) == stop + 1:
                me.report(point)
                os.kill(os.getpid(), sign)

    def body() -> torch.Tensor:
        if state.step == DIES_IN and me.rank == FIRST:
            os.kill(os.getpid(), signal.SIGKILL)
        share = torch.arange(world.rank, 12, world.size).sum().reshape(1)  # of 0 + 1 + ... + 11
        dist.all_reduce(share)
        return share

    seen: list[tuple[int, tuple[str, ...], int]] = []
    try:
        while state.step < STEPS:
            if state.step == DIES_IN:
                at_each_point(reach)
            state.sum += world.attempt(body)
            state.step += 1
            seen.append((world.epoch, world.view.names, state.step))
        world.leave()
    except Expelled:
        return points, seen, "expelled"
    assert int(state.sum) == 66 * STEPS
    return points, seen, "trained"


def check(found: list[tuple[str, list[tuple[int, tuple[str, ...], int]]]]) -> None:
    """By how each member ended and what it has seen: an epoch has one view, and those who committed a step were in the
    same epoch then. The latest step of one that was left behind may be one that the others did again."""
    views: dict[int, tuple[str, ...]] = {}
    steps: dict[int, int] = {}
    for how, commits in sorted(found, key=lambda each: each[0] != "trained"):
        assert [step for _, _, step in commits] == list(range(1, len(commits) + 1))
        for epoch, names, step in commits:
            assert views.setdefault(epoch, names) == names
            assert steps.setdefault(step, epoch) == epoch or (how != "trained" and step == len(commits))


def trial(hosts: str, victim: int, stop: int, sign: int) -> tuple[str, float]:
    """Returns the point, and the seconds until the others had done all steps."""
    others = tuple(rank for rank in range(SIZE) if rank not in (FIRST, victim))
    with Ranks(changes, SIZE, hosts, victim, stop, sign) as ranks:
        point = ranks.reports(but=(FIRST, *others))[0]
        began = time.monotonic()
        results = ranks.results(but=(FIRST, victim))
        took = time.monotonic() - began
        assert [how for _, _, how in results] == ["trained"] * 2, point
        if sign == signal.SIGSTOP:
            with contextlib.suppress(ProcessLookupError):  # somebody else had it go on
                ranks.signal(victim, signal.SIGCONT)
            results += ranks.results(but=(FIRST, *others))
            assert results[-1][2] in ("expelled", "trained"), point
        check([(how, seen) for _, seen, how in results])
        return point, took


def tried(hosts: str, victim: int, stop: int, sign: int) -> bool:
    """Whether the member came to this point: polls may take fewer looks than they did when the points were counted."""
    try:
        trial(hosts, victim, stop, sign)
    except pytest.fail.Exception as error:
        if "exit code 0" in str(error):
            return False
        raise
    return True


def points_of(hosts: str, rank: int) -> list[str]:
    """What the member meets when nobody else dies."""
    with Ranks(changes, SIZE, hosts, -1, 0, signal.SIGKILL) as ranks:
        results = ranks.results(but=(FIRST,))
    check([(how, seen) for _, seen, how in results])
    points: list[str] = results[rank][0]
    return points


@pytest.mark.slow
@pytest.mark.parametrize("hosts", ["one host", "several hosts"])
def test_a_member_dies_at_some_points(hosts: str) -> None:
    """Each eighth, by turns of rank 0, which leads, and rank 1; all of them are for the command."""
    for rank in (0, 1):
        stops = range(4 * rank, len(points_of(hosts, rank)) - 5, 8)
        assert sum(tried(hosts, rank, stop, signal.SIGKILL) for stop in stops) >= len(stops) / 2


@pytest.mark.slow
def test_a_member_stops_at_some_points() -> None:
    stops = range(0, len(points_of("one host", 0)) - 5, 16)
    assert sum(tried("one host", 0, stop, signal.SIGSTOP) for stop in stops) >= len(stops) / 2


def test_points_are_met() -> None:
    points = run(changes_alone, 1)[0]
    assert {"before Ledger._write", "after Ledger._write", "before Membership.leave", "group: made"} <= set(points)


def changes_alone(me: Rank) -> list[str]:
    world = elastic.start(store=me.store, rank=0, world_size=1)
    points: list[str] = []
    at_each_point(points.append)
    world._change(None)
    world.leave()
    return points


def main() -> None:
    import importlib

    importlib.import_module("conftest")
    trials: Counter[tuple[str, str]] = Counter()
    wrong = 0
    slowest: dict[tuple[str, str], float] = {}
    signs = [("kill", signal.SIGKILL, 1), ("stop", signal.SIGSTOP, int(sys.argv[1]) if len(sys.argv) > 1 else 1)]
    for hosts in ("one host", "several hosts"):
        for rank in (0, 1):
            number = len(points_of(hosts, rank))
            for how, sign, every in signs:
                for stop in range(0, number, every):
                    try:
                        point, took = trial(hosts, rank, stop, sign)
                    except pytest.fail.Exception as error:
                        if "exit code 0" in str(error):  # it met fewer points this time
                            continue
                        point, took, wrong = f"? {error}", 0.0, wrong + 1
                    except AssertionError as error:
                        point, took, wrong = f"WRONG {error}", 0.0, wrong + 1
                    trials[hosts, how] += 1
                    slowest[hosts, how] = max(slowest.get((hosts, how), 0.0), took)
                    print(hosts, rank, how, stop, point, f"{took:.2f} s", flush=True)
    for key, count in trials.items():
        print(*key, f"{count} trials; the others had done all steps after {slowest[key]:.2f} s at the latest")
    print(f"wrong: {wrong}")


if __name__ == "__main__":
    main()
