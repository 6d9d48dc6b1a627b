"""Servers that others take over while workers train: processes come, take their share, and leave again."""

from __future__ import annotations

import os
import random
import signal
import threading
import time
from typing import Any

import pytest
import torch
import torch.distributed as dist
from bodies.parameter_server import COUNT, alone, gradient
from distributed.harness import Rank, Ranks, run
from frameworks.launch import killed
from processes import deadline, free_ports, until
from test_serve import start
from torch._C._distributed_c10d import HashStore

import ringreduce.parameter_server as ps
from ringreduce.errors import InvalidArgument
from ringreduce.parameter_server.server.shard import Shard
from ringreduce.parameter_server.store import Directory

WORKERS, SERVERS, PROCESSES = 2, 4, 4
SIZES = {"memory": 32 << 20, "window": 1 << 20, "block_bytes": 4096}


def wait_for(me: Rank, key: str) -> None:
    until(lambda: me.store.check([key]), key)


def serves(me: Rank, founders: int) -> list[int]:
    """The founders begin with all servers. The others come one after the other; all but the first leave again. Returns
    the servers that this one had when all had come."""
    if me.rank < founders:
        serving = ps.serve(me.store, rank=me.rank, size=founders, servers=SERVERS, backups=founders - 1, **SIZES)
    else:
        wait_for(me, "trains" if me.rank == founders else f"came {me.rank - 1}")
        serving = ps.serve(me.store, joins=True)
    with serving:
        me.store.set(f"came {me.rank}", "")
        wait_for(me, f"came {PROCESSES - 1}")
        had = sorted(serving._local.serving())
        if me.rank == 0:
            assert serving.wait(deadline())
        else:
            wait_for(me, "may leave" if me.rank == 1 else f"left {me.rank - 1}")
            assert serving.give_away() and not serving._local.serving()
            me.store.set(f"left {me.rank}", "")
    return had


def trains(me: Rank, founders: int) -> Any:
    """What each step made; and who served when all had come, and when all but one had left."""
    if me.rank < PROCESSES:
        return serves(me, founders)
    kept: list[Any] = []
    ids, homes = torch.arange(100) * 65537, []
    with ps.join(me.store, role="worker", workers=WORKERS, timeout=60.0, window=1 << 20) as kv:
        first = kv.worker == SERVERS
        w = torch.linspace(-1, 1, COUNT)
        kv.init("w", w, update=ps.optimizer(torch.optim.AdamW, lr=0.01))
        rows = ps.Embedding(kv, "rows", 4, update=ps.reduce("sum"), initial=(0.0, 0.0))
        while not (me.store.check(["last"]) and len(kept) > int(me.store.get("last"))):
            pending = kv.push_pull("w", gradient(kv.worker - SERVERS, len(kept), COUNT), out=w)
            rows.push(ids, torch.ones(100, 4)).wait()
            assert pending.wait() == []
            kept.append(w.numpy().copy())
            me.store.set("trains", "")
            if first and not homes and me.store.check([f"came {PROCESSES - 1}"]):
                found = sorted(name.split("pid ")[1] for name in kv.stats()["servers"])
                if len(set(found)) == PROCESSES:  # a server answers for a moment after it has moved
                    homes.append(found)
                    me.store.set("may leave", "")
            if first and me.store.check([f"left {PROCESSES - 1}"]) and not me.store.check(["last"]):
                me.store.set("last", str(len(kept) + 1))
            kv.barrier()
        assert rows.pull(ids).unique().tolist() == [WORKERS * len(kept)]
        homes.append(sorted(name.split("pid ")[1] for name in kv.stats()["servers"]))
        kv.init("later", torch.zeros(9), update=ps.reduce("sum"))
        with ps.join(me.store, role="worker", timeout=30.0, group="late") as another:
            another.pull("w", again := torch.empty(COUNT))
            assert torch.equal(again, w)
        kv.barrier()
    return kept, homes


@pytest.mark.parametrize("founders", [1, 2], ids=["without backups", "with backups"])
def test_training_has_the_same_bits_while_servers_come_and_go(founders: int) -> None:
    results = run(trains, PROCESSES + WORKERS, founders)
    assert sorted(number for had in results[:PROCESSES] for number in had) == list(range(SERVERS))
    assert [len(had) for had in results[:PROCESSES]] == [1] * PROCESSES, "each has its share"
    for kept, homes in results[PROCESSES:]:
        wanted = alone(torch.optim.AdamW, {"lr": 0.01}, WORKERS, steps=len(kept))
        for i, (value, expected) in enumerate(zip(kept, wanted, strict=True)):
            assert value.tobytes() == expected.tobytes(), f"step {i} of {len(kept)}"
        assert len(set(homes[-1])) == 1, "one process serves all in the end"


def moves_and_dies(me: Rank, doomed: int, after: float, step: str, times: int, backups: int) -> Any:
    """Two founders, and a process that comes; one of them is killed so many seconds after that, or when one of its
    servers comes to a step for the so-many-th time. Returns whether every pull of a worker had what it should have."""
    if me.rank == doomed and step:
        make = Shard.__init__

        def make_doomed(shard: Shard, *args: Any) -> None:
            make(shard, *args)
            shard.server.die_at(step, times)

        Shard.__init__ = make_doomed  # type: ignore[method-assign]
    elif me.rank == doomed:
        dies = threading.Timer(0, lambda: (wait_for(me, "moves"), time.sleep(after), os.kill(os.getpid(), 9)))
        dies.daemon = True
        dies.start()
    if me.rank == 2:
        wait_for(me, "trains 1")
        me.store.set("moves", "")
        serving = ps.serve(me.store, joins=True)
    elif me.rank < 2:
        serving = ps.serve(me.store, rank=me.rank, size=2, servers=SERVERS, backups=backups, **SIZES)
    else:
        return pushes_meanwhile(me, backups)
    with serving:
        wait_for(me, "done")
    return None


def pushes_meanwhile(me: Rank, backups: int) -> bool:
    """Until all servers have backups after the kill, if they are to have some."""
    with ps.join(me.store, role="worker", workers=WORKERS, timeout=60.0, window=1 << 20) as kv:
        mine, i, is_right = kv.worker - SERVERS, 0, True
        value, push = torch.zeros(WORKERS, COUNT), torch.zeros(WORKERS, COUNT)
        mode = ps.asynchronous()
        kv.init("h", value, update=ps.reduce("sum"), mode=mode)
        rows = ps.Embedding(kv, "rows", 4, update=ps.reduce("sum"), initial=(0.0, 0.0), mode=mode)
        push[mine], ids = 1, torch.arange(50) * 65537 + mine
        while not me.store.check(["killed and whole"]):
            pending = kv.push("h", push)
            rows.push(ids, torch.ones(50, 4)).wait()
            pending.wait()
            kv.pull("h", value)
            i += 1
            is_right &= bool((value[mine] == i).all()) and rows.pull(ids).unique().tolist() == [i]
            if i == 20:
                me.store.set(f"trains {mine}", "")
            looks = mine == 0 and i % 10 == 0 and me.store.check(["killed"])
            if looks and all(its and bool(its["backup"]) >= bool(backups) for its in kv.stats()["servers"].values()):
                me.store.set("killed and whole", "")
        kv.barrier()
        me.store.set("done", "")
    return is_right


def check_that_nothing_is_lost(doomed: int, after: float, step: str = "", times: int = 1, backups: int = 1) -> None:
    with Ranks(moves_and_dies, 3 + WORKERS, doomed, after, step, times, backups) as ranks:
        ranks._processes[doomed].join(60)
        assert ranks._processes[doomed].exitcode == -9, f"the process that was to die {step} has not"
        ranks.store.set("killed", "")
        *_, first, second = ranks.results(but=(doomed,))
    assert first and second, f"after {after} s"


@pytest.mark.parametrize("doomed", [0, 1, 2])
def test_nothing_is_lost_when_a_process_is_killed_while_servers_move(doomed: int) -> None:
    check_that_nothing_is_lost(doomed, random.uniform(0, 0.1))


@pytest.mark.parametrize(("doomed", "step"), [(0, "leaves"), (2, "inherits"), (2, "taking over"), (2, "serving")])
def test_nothing_is_lost_when_a_process_is_killed_at_a_step_of_a_move(doomed: int, step: str) -> None:
    check_that_nothing_is_lost(doomed, 0, step)


@pytest.mark.parametrize("times", [1, 2])
def test_nothing_is_lost_when_a_newcomer_is_killed_that_has_some_of_the_blocks(times: int) -> None:
    check_that_nothing_is_lost(2, 0, "takes", times, backups=0)


def test_what_cannot_be_is_refused() -> None:
    with pytest.raises(InvalidArgument, match="servers is 1 with size 2"):
        ps.serve(HashStore(), rank=0, size=2, servers=1)
    with pytest.raises(InvalidArgument, match="servers is 'x'; it must be a number"):
        ps.serve(HashStore(), rank=0, size=1, servers="x")  # type: ignore[arg-type]
    with pytest.raises(InvalidArgument, match="memory is '1G'; it must be bytes"):
        ps.serve(HashStore(), rank=0, size=1, memory="1G")  # type: ignore[arg-type]
    with pytest.raises(InvalidArgument, match="joins is True: rank, size, memory"):
        ps.serve(HashStore(), joins=True, servers=3)
    with pytest.raises(InvalidArgument, match="joins is True without a store"):
        ps.serve(joins=True)


def test_the_last_process_keeps_what_it_has() -> None:
    store = HashStore()
    with ps.serve(store, rank=0, size=1, servers=2, memory=1 << 20) as serving:
        assert not serving.give_away(timeout=5.0)
        assert sorted(serving._local.serving()) == [0, 1]
        with ps.join(store, role="worker") as kv:
            kv.init("w", torch.zeros(3), update=ps.reduce("sum"))
            kv.push("w", torch.ones(3)).wait()


@pytest.mark.slow
def test_the_command_joins_and_gives_away_what_it_has_at_sigterm() -> None:
    (port,) = free_ports(1)
    words = ["--store", f"127.0.0.1:{port}", "--timeout", "60"]
    processes = [start(*words, "--servers", "2", "--memory", "32M"), start(*words, "--join")]
    with killed(processes):
        store, until = dist.TCPStore("127.0.0.1", port, is_master=False), time.monotonic() + deadline()
        with ps.join(store, role="worker", timeout=60.0) as kv:
            kv.init("w", out := torch.zeros(COUNT), update=ps.reduce("sum"), mode=ps.asynchronous())

            def homes() -> int:
                assert time.monotonic() < until
                kv.push_pull("w", torch.ones(COUNT), out=out).wait()
                return len({name.split("pid ")[1] for name in kv.stats()["servers"]})

            pushed = 1
            while homes() < 2:
                pushed += 1
            processes[1].send_signal(signal.SIGTERM)
            assert processes[1].wait(deadline()) == 0
            assert homes() == 1 and out.unique().tolist() == [pushed + 1]
        assert processes[0].wait(deadline()) == 0


class Ending:
    """A store that ends."""

    def __init__(self) -> None:
        self._store = HashStore()
        self.has_ended = False

    def __getattr__(self, name: str) -> Any:
        request = getattr(self._store, name)  # raises where a store of torch has no such request

        def call(*arguments: Any) -> Any:
            if self.has_ended:
                raise dist.DistNetworkError("Broken pipe")
            return request(*arguments)

        return call


def test_what_the_store_knew_of_processes_is_known_when_it_has_ended() -> None:
    store = Ending()
    directory = Directory(store, 2)
    for process in range(2):
        store.set(f"server/{process}", f'{{"address": "{process:02}"}}')
    known = directory.processes()
    assert list(known) == [0, 1]
    assert directory.begin_to_leave(0, lambda _: True, time.monotonic())
    assert not directory.begin_to_leave(1, lambda _: True, time.monotonic())  # one after the other
    store.has_ended = True
    assert directory.processes() == known
    assert directory.begin_to_leave(1, lambda _: True, time.monotonic())
    directory.stay(1)
    directory.put(0, 1)
