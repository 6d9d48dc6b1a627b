"""Servers on three hosts, each with its backup on the next one, and workers on all of them: a server is killed, or its
host cut off. No push that was acknowledged is lost, and none is applied twice."""

from __future__ import annotations

import contextlib
import random
import signal
import threading
import time
from typing import Any

import pytest
import torch
from net.network import Network
from net.ranks import Rank, Ranks
from processes import Logged

import ringreduce.parameter_server as ps
from ringreduce.errors import CollectiveTimeout, ServerLost

SERVERS, WORKERS = 3, 3
HOSTS = [1, 2, 0, 1, 2, 0]
"""Of servers, then of workers. The store is on host 0, so host 1, with server 0, can be cut off."""
MODES = (ps.sync(), ps.asynchronous(), ps.ssp(1))
MOST = 4000
"""Pushes of a worker, which pauses between them if it is told when to end."""
SMALL: dict[str, Any] = {"window": 4 << 20, "memory": 64 << 20, "block_bytes": 4096, "timeout": 60.0}


def serve(me: Rank, until: str = "") -> list[str]:
    """Returns what it logged when all workers have left, and it has logged `until`."""
    logged = Logged()
    with ps.serve(me.store, rank=me.rank, size=SERVERS, backups=1, **SMALL) as serving:
        me.report("serves")
        serving.wait()
        if until:
            me.hear()
        deadline = time.monotonic() + 60
        while until and not any(until in said for said in logged.messages) and time.monotonic() < deadline:
            time.sleep(0.1)
    return logged.messages


class History:
    """Of one worker: its i-th push adds 1 to element (worker, i) of a value, and every pull is checked."""

    def __init__(self, kv: ps.KeyValue, mode: ps.Mode, mine: int) -> None:
        self.kv, self.mode, self.mine = kv, mode, mine
        self.value = torch.zeros(WORKERS, MOST)
        self.done = 0
        """Pushes that were acknowledged."""
        kv.init("h", self.value, update=ps.reduce("sum"), mode=mode)
        kv.barrier()

    def push(self) -> None:
        push, before = torch.zeros(WORKERS, MOST), self.value.clone()
        push[self.mine, self.done] = 1
        assert self.kv.push("h", push).wait() == []
        self.done += 1
        self.kv.pull("h", self.value)
        assert self.value.max() <= 1, "a push was applied twice"
        assert (self.value >= before).all(), "what a pull had shown was lost"
        assert self.value[self.mine].sum() == self.done, "an acknowledged push was lost"
        if self.mode.mode == "ssp":
            self.kv.clock()


def tell_history(me: Rank, mode: ps.Mode, pushes: int, until: str = "") -> Any:
    """Worker w's i-th push adds 1 to element (w, i), until it is told to end. Every pull is checked. Returns how many
    pushes were acknowledged, and the last value; of a worker of host 1 that has lost the others, no value."""
    if me.rank < SERVERS:
        return serve(me, until if me.rank == 0 else "")
    told = threading.Event()
    if pushes == MOST:
        threading.Thread(target=lambda: (me.hear(), told.set()), daemon=True).start()
    kv = ps.join(me.store, role="worker", workers=WORKERS, timeout=60.0)
    history = History(kv, mode, HOSTS[SERVERS:].index(me.host))
    try:
        while history.done < pushes and not told.is_set():
            if history.done == 20:
                me.report("pushes")
            history.push()
            if pushes == MOST:
                time.sleep(0.02)
    except (ServerLost, CollectiveTimeout):
        assert until and me.host == 1
        kv.calls.close()
        assert told.wait(60)
        return history.done, None
    if not until:
        kv.barrier()
        kv.pull("h", history.value)
    kv.leave()
    return history.done, history.value.sum(1).tolist()


@pytest.mark.parametrize("mode", MODES, ids=lambda mode: mode.mode)
def test_no_push_is_lost_or_applied_twice_when_a_server_is_killed(network: Network, mode: ps.Mode) -> None:
    with Ranks(network, HOSTS, tell_history, mode, 100) as ranks:
        ranks.reports()
        time.sleep(random.uniform(0.0, 0.1))
        ranks.signal(0, signal.SIGKILL)
        of_backup, _, *results = ranks.results(but=(0,))
    assert results == [(100, [100.0] * WORKERS)] * WORKERS
    assert any("server 0 has ended or cannot be reached: its backup" in said for said in of_backup) or not of_backup


def tell_history_through_kills(me: Rank, mode: ps.Mode) -> Any:
    """As `tell_history`, until it is told to end. The first worker says when all servers have backups, if it is told to
    look."""
    if me.rank < SERVERS:
        return serve(me)
    told: list[str] = []
    threading.Thread(target=lambda: [told.append(me.hear()) for _ in range(3)], daemon=True).start()  # at most so many
    kv = ps.join(me.store, role="worker", workers=WORKERS, timeout=60.0)
    history, looked = History(kv, mode, me.rank - SERVERS), 0
    while told[-1:] != ["end"]:
        history.push()
        if history.mine == 0 and looked < len(told):
            found = kv.stats()["servers"].values()
            if all(its and its["backup"] for its in found):
                looked += 1
                me.report("all have backups")
        time.sleep(0.01)
    kv.leave()
    return history.done, history.value.sum(1).tolist()


@pytest.mark.parametrize("mode", MODES, ids=lambda mode: mode.mode)
def test_servers_get_new_backups_and_are_killed_one_after_the_other(network: Network, mode: ps.Mode) -> None:
    """The last one, on the host with the store, serves all."""
    others = [rank for rank in range(SERVERS + WORKERS) if rank != SERVERS]
    with Ranks(network, HOSTS, tell_history_through_kills, mode) as ranks:
        ranks.reports(but=range(SERVERS, SERVERS + WORKERS))
        for doomed in (0, 1):
            ranks._pipes[SERVERS].send("look")
            ranks.reports(but=others)
            time.sleep(random.uniform(0.0, 0.02))
            ranks.signal(doomed, signal.SIGKILL)
        time.sleep(1)
        for pipe in ranks._pipes[SERVERS:]:
            pipe.send("end")
        _, *results = ranks.results(but=(0, 1))
    for mine, (done, sums) in enumerate(results):
        assert done > 0 and sums[mine] == done, results


def tell_history_while_servers_move(me: Rank, mode: ps.Mode) -> Any:
    """Two processes begin with two servers each, and a third one comes when it is told to."""
    if me.rank == 2:
        me.hear()
        serving = ps.serve(me.store, joins=True)
    elif me.rank < 2:
        serving = ps.serve(me.store, rank=me.rank, size=2, servers=4, backups=1, **SMALL)
    else:
        return tell_history_through_kills(me, mode)
    with serving:
        me.report(len(serving._local.serving()))
        serving.wait()
    return None


@pytest.mark.parametrize("doomed", [None, 0, 1, 2])
def test_a_process_on_another_host_takes_its_share(network: Network, doomed: int | None) -> None:
    """One of the three is killed while servers move, unless all is to go well."""
    others = [rank for rank in range(SERVERS + WORKERS) if rank != SERVERS]
    with Ranks(network, HOSTS, tell_history_while_servers_move, random.choice(MODES)) as ranks:
        ranks.reports(but=range(2, SERVERS + WORKERS))
        time.sleep(0.5)
        ranks._pipes[2].send("come")
        if doomed is not None:
            time.sleep(random.uniform(0.2, 2.0))
            ranks.signal(doomed, signal.SIGKILL)
        if doomed != 2:
            (took,) = ranks.reports(but=[rank for rank in range(SERVERS + WORKERS) if rank != 2])
            assert took == 1 or doomed is not None
        with contextlib.suppress(BrokenPipeError):  # reports() raises what it ended with
            ranks._pipes[SERVERS].send("look")
        ranks.reports(but=others)
        for pipe in ranks._pipes[SERVERS:]:
            with contextlib.suppress(BrokenPipeError):  # as results() does
                pipe.send("end")
        results = ranks.results(but=() if doomed is None else (doomed,))
    for mine, (done, sums) in enumerate(results[-WORKERS:]):
        assert done > 0 and sums[mine] == done, results


@pytest.mark.slow
@pytest.mark.parametrize("mode", MODES, ids=lambda mode: mode.mode)
def test_a_host_that_is_cut_off_and_comes_back_is_replaced(network: Network, mode: ps.Mode) -> None:
    """For longer than both sides wait. Server 0 is then refused, and the worker of its host is lost."""

    def cut(it: bool) -> None:
        for other in (0, 2):
            network.cut(1, other, it)
            network.cut(other, 1, it)

    env = {"RINGREDUCE_DEAD_AFTER": "2"}
    with Ranks(network, HOSTS, tell_history, mode, MOST, "serves no more", env=env, timeout=120) as ranks:
        ranks.reports()
        cut(True)
        time.sleep(8)
        cut(False)
        time.sleep(2)
        ranks.tell("end")
        of_replaced, of_backup, _, (of_lost, nothing), *others = ranks.results()
    assert nothing is None
    assert any("has been replaced by its backup, and serves no more" in said for said in of_replaced), of_replaced
    assert any("server 0 has ended or cannot be reached: its backup" in said for said in of_backup), of_backup
    done = [of_lost, *(done for done, _ in others)]
    for mine, (_, sums) in enumerate(others, 1):
        assert sums[mine] == done[mine]
        assert sums[0] in (of_lost, of_lost + 1), "a push of the worker that was cut off was lost, or applied twice"
