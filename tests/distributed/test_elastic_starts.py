"""How processes come into a world: in a first start that fails, past a store that fails, and after their own leave."""

from __future__ import annotations

import os
import signal
import subprocess
import time
from pathlib import Path
from typing import Any

import etcd
import pytest
import torch
import torch.distributed as dist
from bodies.elastic import come, start, tell, wait_for
from distributed.harness import Rank, Ranks, on_ranks

from ringreduce import elastic
from ringreduce.coordination import process
from ringreduce.coordination.join_queue import JoinQueue
from ringreduce.coordination.process import identity
from ringreduce.coordination.protocol import View
from ringreduce.errors import CollectiveTimeout, InvalidArgument, PeerLost, SystemFailure
from ringreduce.groups import exchange

SOON = 20.0
"""Seconds, far below the timeout of 60 that these tests give to `start`."""


def sees_no_ends(me: Rank) -> None:
    """Makes this process one that is on a host and in a PID namespace of its own."""
    os.environ["RINGREDUCE_HOST_ID"] = f"host {me.rank}"
    process._pid_namespace = lambda: f"of {me.rank}"
    identity.cache_clear()


def founds(me: Rank) -> tuple[int, float]:
    """Rank 1 stops in the first start, and is killed. Rank 3 is the process that is started again in its place."""
    sees_no_ends(me)
    if me.rank == 3:
        wait_for(me, "come 3")
        me.rank = 1
    elif me.rank == 1:

        def stops(*arguments: Any) -> None:
            me.report("stops")
            time.sleep(1000)

        exchange.Exchange.tell = stops  # type: ignore[method-assign]
    began = time.monotonic()
    try:
        world = start(me, 3, timeout=60.0)
    except PeerLost as error:  # the launcher would start this process again
        assert "one of the first members has ended, or cannot go on" in str(error)
        world = start(me, 3, timeout=60.0)
    took = time.monotonic() - began
    world.attempt(lambda: dist.all_reduce(torch.ones(1)))
    world.leave()
    return world.size, took


def test_a_founder_dies_on_another_host_and_is_started_again() -> None:
    with Ranks(founds, 4) as ranks:
        assert ranks.reports(but=(0, 2, 3)) == ["stops"]
        time.sleep(1.0)  # the others are there, and wait
        ranks.signal(1, signal.SIGKILL)
        tell(ranks, "come 3")
        results = ranks.results(but=(1,))
    assert [size for size, _ in results] == [3] * 3 and max(took for _, took in results) < SOON


def joins_early(me: Rank) -> int:
    """Rank 2 comes with the rank of a process that lives. Rank 0 comes last, so there are no members before."""
    if me.rank == 2:
        wait_for(me, "come 2")
        me.report("comes")
        me.rank = 1
    elif me.rank == 0:
        wait_for(me, "come 0")
    world = start(me, 2, timeout=60.0)
    while world.attempt(lambda: world.size) < 3:
        time.sleep(0.01)
    world.leave()
    return world.size


def test_a_process_that_joins_before_there_are_members_ends_no_first_start() -> None:
    with Ranks(joins_early, 3) as ranks:
        time.sleep(0.5)
        come(ranks, 2)
        assert ranks.reports(but=(0, 1)) == ["comes"]
        time.sleep(0.5)
        come(ranks, 0)
        assert ranks.results() == [3] * 3


def publishes_late(me: Rank) -> int:
    """Rank 1 dies when it has the first group, before the store knows of it. Rank 2 is started in its place."""
    if me.rank == 0:
        publishes = JoinQueue.publish

        def when_told(self: JoinQueue, view: View) -> None:
            wait_for(me, "go on")
            publishes(self, view)

        JoinQueue.publish = when_told  # type: ignore[method-assign]
    elif me.rank == 2:
        wait_for(me, "come 2")
        me.report("comes")
        me.rank = 1
    world = start(me, 2, timeout=60.0)
    if me.rank == 1 and world.epoch == 0:
        me.report("founded")
        time.sleep(1000)
    while world.attempt(lambda: world.size) < 2 or world.epoch == 0:
        time.sleep(0.01)
    world.leave()
    return world.size


def test_a_founder_dies_before_the_store_knows_the_members() -> None:
    with Ranks(publishes_late, 3) as ranks:
        assert ranks.reports(but=(0, 2)) == ["founded"]
        ranks.signal(1, signal.SIGKILL)
        come(ranks, 2)
        assert ranks.reports(but=(0, 1)) == ["comes"]
        time.sleep(0.5)
        tell(ranks, "go on")
        assert ranks.results(but=(1,)) == [2, 2]


@on_ranks(2)
def test_a_process_starts_again_after_it_has_left(me: Rank) -> None:
    """Rank 1 leaves and joins again. When all have left, the world of this store is over, and another one is made."""
    world = start(me, 2)
    world.attempt(lambda: dist.all_reduce(torch.ones(1)))
    if me.rank == 1:
        world.leave()
        world = start(me, 2)
        assert world.epoch > 0
    while world.attempt(lambda: world.size) < 2 or world.epoch == 0:
        time.sleep(0.01)
    world.leave()
    with pytest.raises(InvalidArgument, match=r"start: this process has left the world of this store, .* PrefixStore"):
        start(me, 2)
    store = dist.PrefixStore("phase 2", me.store)
    world = elastic.start(store=store, rank=me.rank, world_size=2, timeout=30.0)
    assert world.epoch == 0 and world.size == 2
    world.leave()


def test_a_rank_of_the_environment_that_cannot_be(monkeypatch: pytest.MonkeyPatch) -> None:
    server = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    for name, value in {"MASTER_PORT": server.port, "RANK": 2, "WORLD_SIZE": 2}.items():
        monkeypatch.setenv(name, str(value))
    monkeypatch.setenv("MASTER_ADDR", "127.0.0.1")
    says = "start: RANK is 2 and WORLD_SIZE 2; .* takes any RANK below WORLD_SIZE that was used before"
    for store in (None, "etcd://127.0.0.1:1/job"):
        with pytest.raises(InvalidArgument, match=says):
            elastic.start(store=store)


def starts_twice(me: Rank) -> str:
    """Two processes have rank 1, of which the first one is stopped; rank 0 never comes."""
    if me.rank == 0:
        return ""
    if me.rank == 2:
        wait_for(me, "come 2")
    me.report("comes")
    with pytest.raises(CollectiveTimeout) as raised:
        elastic.start(store=me.store, rank=1, world_size=2, timeout=60.0 if me.rank == 1 else 1.0, patience=1.0)
    return str(raised.value)


def test_a_rank_that_another_process_has_is_waited_for_no_longer_than_the_timeout() -> None:
    with Ranks(starts_twice, 3) as ranks:
        assert ranks.reports(but=(0, 2)) == ["comes"]
        time.sleep(1.0)
        ranks.signal(1, signal.SIGSTOP)
        come(ranks, 2)
        pid = ranks.pid(1)
        assert ranks.reports(but=(0, 1)) == ["comes"]
        _, said = ranks.results(but=(1,))
        assert "start: rank 1 is taken by another process (" in said and f"pid {pid}) that lives; end it" in said
        ranks.signal(1, signal.SIGKILL)


def waits_in_vain(me: Rank) -> str:
    """Rank 0 holds the store, and rank 1 is a spare of a world that rank 0 says there is."""
    if me.rank == 0:
        server = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
        me.store.set("port", str(server.port))
        time.sleep(1000)
    store = dist.TCPStore("127.0.0.1", int(me.store.get("port")), is_master=False)
    me.report("waits")
    with pytest.raises(SystemFailure, match="start: the store has closed the connection while this process waited"):
        elastic.start(store=store, rank=1, world_size=2, spares=1)
    return "says so"


def test_a_spare_whose_store_dies_says_so() -> None:
    with Ranks(waits_in_vain, 2) as ranks:
        assert ranks.reports(but=(0,)) == ["waits"]
        time.sleep(0.5)
        ranks.signal(0, signal.SIGKILL)
        assert ranks.results(but=(0,)) == ["says so"]


def replaces(me: Rank, address: str) -> int:
    world = elastic.start(
        store=address, rank=me.rank, world_size=3, least=2, spares=1, timeout=30.0, expel_after=10.0, patience=30.0
    )
    if me.rank < 2:
        me.report("begins")
    while world.attempt(lambda: world.epoch) == 0 or world.size < 2:
        time.sleep(0.01)
    world.leave()
    return world.size


@etcd.installed
def test_a_spare_waits_while_etcd_is_started_again(tmp_path: Path) -> None:
    with etcd.servers(1, tmp_path) as (address, processes), Ranks(replaces, 3, address) as ranks:
        ranks.reports(but=(2,))
        time.sleep(0.5)  # the spare waits
        processes[0].kill()
        processes[0].wait()
        time.sleep(1.0)
        again = subprocess.Popen(processes[0].args, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
        try:
            ranks.signal(1, signal.SIGKILL)
            assert ranks.results(but=(1,)) == [2, 2]
        finally:
            again.kill()
            again.wait()
