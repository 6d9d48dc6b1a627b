"""torchrun's agent restarts all ranks after one was killed at some point of its start: the next attempt must work.

The store of the agent outlives the restart, with all that the ranks of the first attempt have told. Points are right
before and after each message, dial and other step of making the default group and two more groups, and in the first
calls; see `test_elastic_failpoints`. The ranks are forked by a server, so a trial takes about a second, and the next
attempt begins some milliseconds after the last sign of the one before.

    cd tests && python -m distributed.test_restarts            all points, and a table of results
    cd tests && python -m distributed.test_restarts 4          every fourth point
"""

from __future__ import annotations

import functools
import itertools
import logging
import os
import signal
import sys
import time
from collections import Counter
from collections.abc import Iterator
from datetime import timedelta

import pytest
import torch
import torch.distributed as dist
from bodies.failpoints import at_each_point
from distributed.harness import Rank, run
from processes import forking_context, free_ports
from torch.distributed.launcher.api import LaunchConfig, elastic_launch

BACKENDS = ("static", "c10d")
SIZES = (2, 3)
Victims = dict[int, int]
"""By rank: the number of the point at which it is killed in the first attempt."""


def starts(victims: Victims, by_hosts: bool = False) -> tuple[str, list[str]]:
    """A rank. Returns the number of this attempt, and the points that it met."""
    points: list[str] = []
    rank, attempt = int(os.environ["RANK"]), os.environ["TORCHELASTIC_RESTART_COUNT"]
    if by_hosts:
        os.environ["RINGREDUCE_HOST_ID"] = f"host {rank % 2}"
    torch.set_num_threads(1)

    def reach(point: str) -> None:
        if point in points[-2:]:
            return
        points.append(point)
        if attempt == "0" and victims.get(rank) == len(points) - 1:
            os.kill(os.getpid(), signal.SIGKILL)

    reach("begins")
    at_each_point(reach)
    dist.init_process_group("ringreduce", timeout=timedelta(seconds=30))
    value = torch.ones(1)
    dist.all_reduce(value)
    reach("after the first call")
    everyone = list(range(dist.get_world_size()))
    for made in (dist.new_group, lambda: dist.new_group(everyone, use_local_synchronization=True)):
        reach("between groups")
        group = made()
        dist.all_reduce(value, group=group)
        reach("after a call of another group")
    assert value == len(everyone) ** 3
    dist.destroy_process_group()
    return attempt, points


def launches(
    backend: str, size: int, victims: Victims, by_hosts: bool, nodes: int, port: int
) -> dict[int, tuple[str, list[str]]]:
    """An agent, as torchrun runs it; one of `nodes`. Returns what each of its `size` ranks of the last attempt did."""
    forking_context()
    config = LaunchConfig(
        min_nodes=nodes,
        max_nodes=nodes,
        nproc_per_node=size,
        rdzv_backend=backend,
        rdzv_endpoint=f"127.0.0.1:{port}",
        rdzv_configs={"rank": 0, "timeout": 60} if backend == "static" else {},
        run_id="test",
        max_restarts=1,
        monitor_interval=0.02,
        # Not "fork": an agent has threads, which may hold a lock, and a handler of SIGTERM, which ranks would inherit.
        start_method="forkserver",
        local_addr="127.0.0.1",
    )
    handlers = {
        number: signal.getsignal(number) for number in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP, signal.SIGQUIT)
    }
    logging.disable(logging.ERROR)  # the agent's words on each death
    try:
        return dict(elastic_launch(config, starts)(victims, by_hosts))
    finally:
        logging.disable(logging.NOTSET)
        for number, handler in handlers.items():
            signal.signal(number, handler)


def one_agent(backend: str, size: int, victims: Victims, by_hosts: bool) -> dict[int, tuple[str, list[str]]]:
    """In this process, which has the server that forks ranks."""
    return launches(backend, size, victims, by_hosts, 1, free_ports(1)[0])


def one_of_two_agents(me: Rank, victims: Victims) -> dict[int, tuple[str, list[str]]]:
    if me.rank == 0:
        me.store.set("port", str(free_ports(1)[0]))
    return launches("c10d", 1, victims, False, me.size, int(me.store.get("port")))


def trial(backend: str, size: int, victims: Victims, by_hosts: bool = False) -> None:
    """Fails unless all ranks of the attempt after the deaths have made their groups and right sums."""
    found = one_agent(backend, size, victims, by_hosts)
    attempts = [attempt for attempt, _ in found.values()]
    # Where hosts connect, the number of points varies, so a victim may end before it meets its point.
    met = any(point < len(found[rank][1]) for rank, point in victims.items())
    assert attempts == ["1"] * size or (attempts == ["0"] * size and not met), (attempts, victims)


@pytest.mark.slow
def test_agents_that_count_restarts_differently() -> None:
    """Rank 1 ends before its group is made. Only its agent counts that; the other one sees a node that comes again."""
    found = run(one_of_two_agents, 2, {1: 0})
    assert sorted(attempt for of_agent in found for attempt, _ in of_agent.values()) == ["0", "1"]


@functools.cache
def points(size: int, by_hosts: bool) -> list[list[str]]:
    """What each rank meets if nobody dies."""
    found = one_agent(BACKENDS[0], size, {}, by_hosts)
    return [found[rank][1] for rank in range(size)]


def trials(size: int, by_hosts: bool, every: int = 1) -> Iterator[Victims]:
    """Each rank alone at each point, and each with the next rank: at the same share of its way, and at its first.

    Where some of these are the same, as for a rank that is at its first point itself, they are one trial.
    """
    met = [len(each) for each in points(size, by_hosts)]
    given: list[Victims] = []
    for rank, point in itertools.chain.from_iterable(((r, p) for p in range(0, met[r], every)) for r in range(size)):
        other = (rank + 1) % size
        for victims in ({rank: point}, {rank: point, other: point * met[other] // met[rank]}, {rank: point, other: 0}):
            if victims not in given:
                given.append(victims)
                yield victims


@pytest.mark.parametrize("by_hosts", [False, True])
def test_there_are_40_points(by_hosts: bool) -> None:
    assert all(len(met) >= 40 for met in points(2, by_hosts))


@pytest.mark.slow
@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("where", ["begins", "arrival: told", "who: told", "host: joined", "between groups"])
def test_the_next_attempt_works(backend: str, where: str) -> None:
    trial(backend, 2, {1: points(2, False)[1].index(where)})


@pytest.mark.slow
@pytest.mark.timeout(3600)
@pytest.mark.parametrize(
    ("backend", "size", "by_hosts"),
    [("static", 2, True), ("static", 3, False), ("c10d", 2, False), ("c10d", 3, True)],  # each two of them meet
)
def test_the_next_attempt_works_after_some_points(backend: str, size: int, by_hosts: bool) -> None:
    for victims in trials(size, by_hosts, every=45):
        trial(backend, size, victims, by_hosts)


def sweep(every: int) -> int:
    """Prints a line for each kind; returns the number of trials that failed."""
    failed = 0
    for backend, size, by_hosts in itertools.product(BACKENDS, SIZES, (False, True)):
        counts: Counter[str] = Counter()
        began = time.monotonic()
        for victims in trials(size, by_hosts, every):
            try:
                trial(backend, size, victims, by_hosts)
                counts["works"] += 1
            except (Exception, pytest.fail.Exception) as error:
                counts["fails"] += 1
                print(f"{backend}, {size} ranks, {victims}: {str(error)[-1500:]}", flush=True)
        failed += counts["fails"]
        hosts = "2 hosts" if by_hosts else "1 host"
        print(f"{backend}, {size} ranks, {hosts}: {dict(counts)} in {time.monotonic() - began:.0f} s", flush=True)
    return failed


if __name__ == "__main__":
    sys.exit(sweep(int(sys.argv[1]) if len(sys.argv) > 1 else 1) > 0)
