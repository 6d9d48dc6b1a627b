"""Ranks killed at random moments of random programs: every survivor raises an error that names a killed rank, no rank
hangs, the survivors' new group works, and nothing is left over.

    cd tests && python -m distributed.test_trials --trials 500 --seed 7       # a table of what survivors saw, and when
    cd tests && python -m distributed.test_trials --seed 7 --only 123         # one of these trials again

A trial is given by its seed and number. All its ranks draw the same endless program of collectives, asynchronous calls
and messages, on one host or on several (told to be so by RINGREDUCE_HOST_ID).
"""

from __future__ import annotations

import argparse
import contextlib
import importlib
import os
import random
import signal
import statistics
import sys
import time
from collections.abc import Callable
from typing import Any

import psutil
import pytest
import torch
import torch.distributed as dist
from bodies.faults import joins, leftovers, regroup
from distributed.harness import Rank, Ranks, run

from ringreduce.errors import PeerLost, RingReduceError

NOTICED = 1.0
"""Seconds in which all survivors must know of a death."""
TIMEOUT = 20.0
"""Of every call: an error that comes so late says that a wait outlived the death."""
COUNTS = (1, 100, 3000, 20_000, 300_000, 3_000_000)
"""Float32 elements. The largest are rare, as they take long."""
WEIGHTS = (4, 4, 4, 4, 4, 1)

Pending = list[dist.Work]


# what a rank does in a turn; all ranks draw the same


def collective(me: Rank, draw: random.Random, turn: int, asynchronous: bool = False) -> Pending:
    count, root = draw.choices(COUNTS, WEIGHTS)[0], draw.randrange(me.size)
    one, all_of_them = torch.ones(count), torch.ones(me.size * count)
    calls: list[Callable[[], Any]] = [
        lambda: dist.all_reduce(one, async_op=asynchronous),
        lambda: dist.broadcast(one, root, async_op=asynchronous),
        lambda: dist.reduce(one, root, async_op=asynchronous),
        lambda: dist.all_gather_into_tensor(all_of_them, one, async_op=asynchronous),
        lambda: dist.reduce_scatter_tensor(one, all_of_them, async_op=asynchronous),
        lambda: dist.all_to_all_single(torch.empty_like(all_of_them), all_of_them, async_op=asynchronous),
        lambda: dist.gather(
            one, list(all_of_them.chunk(me.size)) if me.rank == root else None, root, None, asynchronous
        ),
        lambda: dist.barrier(async_op=asynchronous),
    ]
    work = draw.choice(calls)()
    return [work] if asynchronous else []


def asynchronous_collectives(me: Rank, draw: random.Random, turn: int) -> Pending:
    return [work for _ in range(draw.randint(1, 4)) for work in collective(me, draw, turn, asynchronous=True)]


def ring_of_messages(me: Rank, draw: random.Random, turn: int) -> Pending:
    tensor = torch.ones(draw.choices(COUNTS, WEIGHTS)[0])
    after, before = (me.rank + 1) % me.size, (me.rank - 1) % me.size
    return [_work(dist.isend(tensor, after, tag=turn)), _work(dist.irecv(torch.empty_like(tensor), before, tag=turn))]


def messages_of_pairs(me: Rank, draw: random.Random, turn: int) -> Pending:
    """A rank that has no partner goes on alone."""
    tensor, order = torch.ones(draw.choices(COUNTS, WEIGHTS)[0]), draw.sample(range(me.size), me.size)
    place = order.index(me.rank)
    if place ^ 1 < me.size:
        calls = [dist.send, dist.recv] if place % 2 == 0 else [dist.recv, dist.send]
        for call in calls:
            call(tensor, order[place ^ 1], tag=turn)
    return []


def messages_from_any(me: Rank, draw: random.Random, turn: int) -> Pending:
    tensor, root = torch.ones(draw.choices(COUNTS, WEIGHTS)[0]), draw.randrange(me.size)
    if me.rank != root:
        return [_work(dist.isend(tensor, root, tag=turn))]
    for _ in range(me.size - 1):
        dist.recv(tensor, tag=turn)
    return []


def _work(work: dist.Work | None) -> dist.Work:
    assert work is not None
    return work


TURNS: tuple[Callable[[Rank, random.Random, int], Pending], ...] = (
    collective,
    asynchronous_collectives,
    ring_of_messages,
    messages_of_pairs,
    messages_from_any,
)


def program(me: Rank, draw: random.Random) -> None:
    """Ends with an error only. Up to three turns are under way at once."""
    kinds = draw.sample(TURNS, draw.randint(1, len(TURNS)))
    under_way: list[Pending] = []
    try:
        for turn in range(10**9):
            under_way.append(draw.choice(kinds)(me, draw, turn))
            while len(under_way) > draw.randint(0, 2):
                for work in under_way.pop(0):
                    work.wait()
    finally:
        for work in [work for works in under_way for work in works]:
            with contextlib.suppress(RingReduceError):  # all of them end
                work.wait()


def rank_of_a_trial(me: Rank, seed: str, hosts: list[int], survivors: list[int]) -> Any:
    os.environ["RINGREDUCE_HOST_ID"] = f"host {hosts[me.rank]}"
    with me.join(timeout=TIMEOUT):
        dist.barrier()
        me.report("in the loop")
        try:
            program(me, random.Random(seed))
        except RingReduceError as error:
            me.report((type(error), str(error), error.culprit, time.monotonic()))
    if me.rank in survivors:
        regroup(me, survivors)


# a trial


def leftovers_if_settled() -> dict[str, list[str]] | None:
    try:
        return leftovers()
    except (FileNotFoundError, ProcessLookupError, psutil.NoSuchProcess):  # a process ended in the midst
        return None


class Wrong(AssertionError):
    """What a trial should not have shown."""


def trial(seed: int, number: int) -> list[float]:
    """The seconds from the first kill to each survivor's error."""
    name = f"{seed}/{number}"
    draw = random.Random(f"{name} kills")
    size = draw.randint(2, 5)
    hosts = [draw.randrange(3) for _ in range(size)] if draw.random() < 0.3 else [0] * size
    doomed = tuple(draw.sample(range(size), draw.randint(1, min(2, size - 1))))
    survivors = [rank for rank in range(size) if rank not in doomed]
    before = leftovers_if_settled()
    took = []
    with Ranks(rank_of_a_trial, size, name, hosts, survivors) as ranks:
        ranks.reports()
        time.sleep(draw.uniform(0, 0.15))
        killed = []
        for rank in doomed:
            with contextlib.suppress(ProcessLookupError):  # it has heard of the first death, and ended
                killed.append(ranks.signal(rank, signal.SIGKILL))
            time.sleep(draw.uniform(0, 0.03))
        what = f"trial {name}: {size} ranks on hosts {hosts}, {doomed} killed"
        for rank, (kind, message, culprit, when) in zip(survivors, ranks.reports(but=doomed), strict=True):
            took.append(when - killed[0])
            if kind is not PeerLost or culprit not in doomed or f"rank {culprit} (" not in message:
                raise Wrong(f"{what}: rank {rank} raised after {took[-1]:.3f} s {kind.__name__}: {message}")
        ranks.results(but=doomed)
    deadline = time.monotonic() + 5.0  # the server of the forks waits for the processes that have ended
    while (left := leftovers_if_settled()) != before:
        if time.monotonic() > deadline:
            raise Wrong(f"{what}: left over: {left}, before: {before}")
        time.sleep(0.001)
    if max(took) > NOTICED:
        raise Wrong(f"{what}: survivors raised after {[round(each, 3) for each in took]} s")
    return took


@pytest.mark.slow
@pytest.mark.timeout(300)
def test_survivors_of_random_programs() -> None:
    run(joins, 1)  # now the server that all ranks are forked from is there, with a directory of its own
    for number in range(1, 51):
        trial(1, number)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--trials", type=int, default=50)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--only", type=int, help="only this trial, with its errors")
    arguments = parser.parse_args()
    importlib.import_module("conftest")  # the settings of all tests
    os.environ["PYTHONWARNINGS"] = "ignore"
    numbers = range(1, arguments.trials + 1) if arguments.only is None else [arguments.only]
    run(joins, 1)
    began, took, wrong = time.monotonic(), list[float](), 0
    for number in numbers:
        try:
            times = trial(arguments.seed, number)
        except (Wrong, pytest.fail.Exception) as error:
            wrong += 1
            print(f"seed {arguments.seed} trial {number} WRONG {error}", flush=True)
        else:
            took += times
    print(f"{len(numbers) - wrong} of {len(numbers)} right, in {time.monotonic() - began:.0f} s")
    if took:
        print(f"seconds to a survivor's error: median {statistics.median(took):.3f}, worst {max(took):.3f}")
    return wrong > 0


if __name__ == "__main__":
    sys.exit(main())
