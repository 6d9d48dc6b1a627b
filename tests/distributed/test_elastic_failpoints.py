"""A member of a world dies or is stopped at each point of a change of views. The others must agree and go on.

A change begins because one of four members dies in a step, or because a fifth process is let in. During the change, the
victim dies or stops. The victim is one of the members or the joiner.

The points are right before and right after each write, compare-and-set, mapping, message, dial and look. They lie in
the victim's main thread, or in the thread of its door, which makes the links between hosts. Points are numbered in the
order in which the victim meets them. A point that it meets several times in a row, as in a poll, counts once.

A stop is noticed only by a timeout, of a few seconds. On a slow machine another member may run into this timeout; then
the trial is repeated with timeouts SLOWER times as long. A disagreement or a hang is never repeated.

    cd tests && python -m distributed.test_elastic_failpoints            all points, and a table of results
    cd tests && python -m distributed.test_elastic_failpoints 4          only every fourth of the stops, which are slow
"""

from __future__ import annotations

import contextlib
import itertools
import os
import signal
import sys
import time
from collections import Counter
from concurrent.futures import ThreadPoolExecutor
from datetime import timedelta
from typing import Any

import pytest
import torch
import torch.distributed as dist
from bodies.elastic import wait_for
from bodies.failpoints import at_each_point, check
from distributed.harness import Rank, Ranks, run

from ringreduce import elastic
from ringreduce.errors import CollectiveTimeout, Expelled, PeerLost

SIZE, FIRST, STEPS = 4, 3, 12
DIES_IN, NOTICED = 4, 2.0
SLOWER = 6
TIMEOUT = {signal.SIGKILL: 30.0, signal.SIGSTOP: 2.0}
"""The timeout of a call in seconds, by signal. A stop is noticed by it alone. `expel_after` is EXPEL_LATER longer, so
that members that wait for one which waits for the stopped one are not given up."""
EXPEL_LATER = 2.0
LATE = "ran into a timeout"
CHANGE_BEGINS = ("before Membership.leave", "before Ledger.__init__", "before Watch.__init__")
"""The first points of a change, for a member and for a joiner. Earlier points, while it waits, do not count."""


def changes(me: Rank, hosts: str, joins: bool, victim: int, stop: int, sign: int, slower: int = 1) -> Any:
    """A member. Returns the points that it met, the (epoch, members, step) of each of its commits, and how it ended.

    `joins`: rank SIZE joins when the others have done DIES_IN steps. Without it, rank FIRST dies then. `victim` gets
    the signal `sign` at its point number `stop`. `slower`: factor for all timeouts.
    """
    if hosts == "several hosts":
        os.environ["RINGREDUCE_HOST_ID"] = f"host {me.rank % 2}"
    timeout = TIMEOUT[signal.Signals(sign)] * slower
    points: list[str] = []
    seen: list[tuple[int, tuple[str, ...], int]] = []
    counts = True

    def reach(point: str) -> None:
        nonlocal counts
        counts = counts or point in CHANGE_BEGINS
        if counts and len(seen) <= DIES_IN and point not in points[-2:]:
            points.append(point)
            if me.rank == victim and len(points) == stop + 1:
                me.report(point)
                os.kill(os.getpid(), sign)

    if me.rank == SIZE:
        counts = False
        at_each_point(reach)
        wait_for(me, "come")
    else:
        me.store.add("here", 1)
        while me.store.add("here", 0) < SIZE:  # how long processes take to begin is no part of a timeout
            time.sleep(0.005)
    try:
        world = elastic.start(
            store=me.store,
            rank=me.rank % SIZE,
            world_size=SIZE,
            timeout=timedelta(seconds=timeout),
            expel_after=timeout + EXPEL_LATER * slower,
        )
        state = world.state(step=0, sum=torch.zeros(1, dtype=torch.int64))
    except (elastic.Over, Expelled):  # a process that was stopped while it joined
        return points, seen, "expelled"
    except (CollectiveTimeout, PeerLost):
        if me.rank == SIZE or sign == signal.SIGKILL:
            raise
        me.report(LATE)
        return points, seen, LATE

    def body() -> tuple[torch.Tensor, int, tuple[str, ...]]:
        if state.step == DIES_IN and me.rank == FIRST and not joins:
            os.kill(os.getpid(), signal.SIGKILL)
        waits = joins and state.step == DIES_IN and world.epoch == 0
        share = torch.arange(world.rank, 12, world.size).sum().reshape(1)  # of 0 + 1 + ... + 11
        dist.all_reduce(share)
        time.sleep(0.005 * waits)
        return 0 * share if waits else share, world.epoch, world.view.names

    first = state.step
    try:
        while state.step < STEPS:
            if state.step == DIES_IN and not first and not points and counts:
                counts = not joins
                at_each_point(reach)
                me.store.set("come", "")
            share, epoch, names = world.attempt(body)
            if int(share):
                state.sum += share
                state.step += 1
                seen.append((epoch, names, state.step))
        world.leave()
    except Expelled:
        return points, seen, "expelled"
    assert int(state.sum) == 66 * STEPS
    return points, seen, "trained"


class Late(Exception):
    """A member that was not stopped ran into a timeout."""


def trial(hosts: str, joins: bool, victim: int, stop: int, sign: int) -> tuple[str, float]:
    """Returns the point, and the seconds until the others had done all steps.

    The point is '' if the victim did not meet it, because its polls took fewer looks than when points were counted.
    """
    try:
        return attempt(hosts, joins, victim, stop, sign)
    except Late:
        if sign == signal.SIGKILL:
            raise
        return attempt(hosts, joins, victim, stop, sign, SLOWER)


def attempt(hosts: str, joins: bool, victim: int, stop: int, sign: int, slower: int = 1) -> tuple[str, float]:
    dead = () if joins else (FIRST,)
    others = tuple(rank for rank in range(SIZE + joins) if rank not in (*dead, victim))
    with Ranks(changes, SIZE + joins, hosts, joins, victim, stop, sign, slower) as ranks:
        try:
            point = ranks.reports(but=(*dead, *others))[0]
        except pytest.fail.Exception as error:
            if "exit code 0" in str(error):
                return "", 0.0
            raise
        began = time.monotonic()
        unsure = (SIZE,) if joins else dead  # one that would join may find that all is over
        results = ranks.results(but=(*unsure, victim))
        took = time.monotonic() - began
        if sign == signal.SIGSTOP:
            with contextlib.suppress(ProcessLookupError):  # somebody else had it go on
                ranks.signal(victim, signal.SIGCONT)
        if any(how != "trained" for _, _, how in results):
            raise Late(f"{point}: {[how for _, _, how in results]}")
        if sign == signal.SIGSTOP:
            results += ranks.results(but=(*dead, *others))
            assert results[-1][2] in ("expelled", "trained"), point
        check([(how, seen) for _, seen, how in results])
        return point + " (slower)" * (slower > 1), took


def tried(hosts: str, joins: bool, victim: int, stop: int, sign: int) -> bool:
    """Makes a trial; returns whether the victim met this point."""
    return trial(hosts, joins, victim, stop, sign)[0] != ""


def points_of(hosts: str, joins: bool, rank: int) -> list[str]:
    """The points that the member meets in a change without a victim."""
    with Ranks(changes, SIZE + joins, hosts, joins, -1, 0, signal.SIGKILL) as ranks:
        results = ranks.results(but=() if joins else (FIRST,))
    check([(how, seen) for _, seen, how in results])
    points: list[str] = results[rank if joins or rank < FIRST else rank - 1][0]
    return points


@pytest.mark.slow
@pytest.mark.parametrize("hosts", ["one host", "several hosts"])
@pytest.mark.parametrize("joins", [False, True], ids=["after a death", "in a join"])
def test_a_member_dies_at_some_points(hosts: str, joins: bool) -> None:
    """A few points of rank 0, which leads, rank 1, and the joiner. The command goes through all points."""
    for turn, rank in enumerate((0, 1, SIZE)[: 2 + joins]):
        stops = range(3 * turn, len(points_of(hosts, joins, rank)) - 5, 16 if joins else 8)
        assert sum(tried(hosts, joins, rank, stop, signal.SIGKILL) for stop in stops) >= len(stops) / 2


@pytest.mark.slow
@pytest.mark.parametrize(
    ("hosts", "joins", "rank"),
    [("one host", False, 0), ("one host", True, 1), ("one host", True, SIZE), ("several hosts", False, 0)],
)
def test_a_member_stops_at_some_points(hosts: str, joins: bool, rank: int) -> None:
    stops = range(6, len(points_of(hosts, joins, rank)) - 5, 12 if hosts == "several hosts" else 24)
    with ThreadPoolExecutor(2) as threads:  # trials wait for their timeouts most of the time
        met = list(threads.map(lambda stop: tried(hosts, joins, rank, stop, signal.SIGSTOP), stops))
    assert sum(met) >= len(stops) / 2


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
    every = int(sys.argv[1]) if len(sys.argv) > 1 else 1
    trials: Counter[tuple[str, ...]] = Counter()
    wrong: Counter[tuple[str, ...]] = Counter()
    slowest: dict[tuple[str, ...], float] = {}
    for hosts, joins in itertools.product(("one host", "several hosts"), (False, True)):
        for rank in (0, 1, SIZE)[: 2 + joins]:
            number = len(points_of(hosts, joins, rank))
            for how, sign in ("kill", signal.SIGKILL), ("stop", signal.SIGSTOP):
                key = (hosts, "join" if joins else "death", "joiner" if rank == SIZE else "member", how)
                for stop in range(0, number, every if how == "stop" else 1):
                    try:
                        point, took = trial(hosts, joins, rank, stop, sign)
                    except (AssertionError, Late, pytest.fail.Exception) as error:
                        point, took = f"WRONG {error}", 0.0
                        wrong[key] += 1
                    trials[key] += point != ""
                    slowest[key] = max(slowest.get(key, 0.0), took)
                    print(*key, rank, stop, point, f"{took:.2f} s", flush=True)
    print("hosts, change, victim, how: trials, wrong, seconds until the others had done all steps at the latest")
    for key, count in trials.items():
        print(f"{', '.join(key)}: {count}, {wrong[key]}, {slowest[key]:.2f}")
    print(f"{sum(trials.values())} trials, wrong: {sum(wrong.values())}")


if __name__ == "__main__":
    main()
