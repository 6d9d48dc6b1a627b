"""Servers with backups, on one host or on several: what a worker sees when one of them is killed, at any step of it.

test_backups_step_by_step.py has what needs no other processes, test_far_backups.py what is different where backups are
reached by TCP.
"""

from __future__ import annotations

import os
import random
import re
import signal
import threading
import time
from pathlib import Path
from typing import Any

import pytest
import test_snapshots as saved
import torch
from bodies.parameter_server import SMALL, alone, gradient, placed
from distributed.harness import Rank, Ranks, run
from processes import Logged, until
from torch._C._distributed_c10d import HashStore

import ringreduce.parameter_server as ps
from ringreduce.errors import CollectiveTimeout, InvalidArgument, ServerLost, TopologyError
from ringreduce.parameter_server.client import failover

SERVERS, WORKERS = 3, 2
PUSHES = 40
PLACES = {"one host": (0, 0, 0, 0, 0), "apart": (0, 1, 2, 3, 4), "beside": (0, 0, 1, 0, 1)}
"""By server, then by worker: its host. In the last, servers 0 and 1 have their backups in server 2's process, and each
worker is on a host with servers."""
DEATHS = {"one host": ("taken", "logged", "updated", "carried out", "answered")}
DEATHS |= dict.fromkeys(("apart", "beside"), ("taken", "logged", "carried out", "answered"))
"""By place: at which steps a server is killed."""


def serve(me: Rank, *dooms: tuple[int, str, str, int]) -> list[str]:
    """Ranks 0 to SERVERS - 1: a server and a backup of the one before, which ends when all workers have left; returns
    what it logged. Of each doom (rank, which, step, times): this rank kills itself when its "server" or its "backup"
    comes to that step for the so-many-th time."""
    logged = Logged()
    with ps.serve(me.store, rank=me.rank, size=SERVERS, backups=1, **SMALL) as serving:
        for rank, which, step, times in dooms:
            if rank == me.rank:
                host = serving._local
                shard = host.shards[rank if which == "server" else (rank - 1) % SERVERS]
                shard.server.die_at(step, times)
        me.meet("servers")
        while not serving.wait(0.01):
            if logged.messages:
                me.store.set(f"server {me.rank} has logged something", "")
    return logged.messages


def worker(me: Rank, **options: Any) -> ps.KeyValue:
    me.meet("servers")
    return ps.join(me.store, role="worker", workers=me.size - SERVERS, timeout=30.0, **options)


def was_killed(ranks: Ranks, rank: int) -> bool:
    ranks._processes[rank].join(10)
    return ranks._processes[rank].exitcode == -signal.SIGKILL


# ---- bits ------------------------------------------------------------------------------------------------------------

COUNT, STEPS = 5000, 8


def train(me: Rank, kind: Any, arguments: dict[str, Any], *dooms: Any) -> list[Any]:
    if me.rank < SERVERS:
        return serve(me, *dooms)
    kept = []
    with worker(me) as kv:
        w = torch.linspace(-1, 1, COUNT)
        kv.init("w", w, update=ps.optimizer(kind, **arguments))
        for step in range(STEPS):
            assert kv.push_pull("w", gradient(kv.worker - SERVERS, step, COUNT), out=w).wait() == []
            kept.append(w.numpy().copy())
    return kept


SGD, ADAMW = (torch.optim.SGD, {"lr": 0.1, "momentum": 0.9}), (torch.optim.AdamW, {"lr": 0.01})


@pytest.mark.slow
@pytest.mark.parametrize(
    ("place", "optimizer", "step"),
    [
        (place, optimizer, step)
        for place, optimizer in (("one host", SGD), ("one host", ADAMW), ("beside", ADAMW))
        for step in DEATHS[place]
    ],
)
def test_training_has_the_same_bits_when_a_server_is_killed(place: str, optimizer: Any, step: str) -> None:
    wanted, doom = alone(*optimizer, WORKERS, steps=STEPS), (1, "server", step, 15)
    with Ranks(placed, SERVERS + WORKERS, PLACES[place], train, *optimizer, doom) as ranks:
        results = ranks.results(but=(1,))
        assert was_killed(ranks, 1)
    for kept in results[SERVERS - 1 :]:
        for i, (value, expected) in enumerate(zip(kept, wanted, strict=True)):
            assert value.tobytes() == expected.tobytes(), f"step {i}"


# ---- the value that is its own history -------------------------------------------------------------------------------

MODES = (ps.sync(), ps.asynchronous(), ps.ssp(1))


def history(kv: ps.KeyValue, me: int, workers: int, mode: ps.Mode, alone: bool = False) -> list[list[float]]:
    """Worker w's i-th push adds 1 to element (w, i). Every pull is checked. `alone`: others may be killed."""
    value = torch.zeros(workers, PUSHES)
    kv.init("h", value, update=ps.reduce("sum"), mode=mode)
    before = value.clone()
    for i in range(PUSHES):
        push = torch.zeros(workers, PUSHES)
        push[me, i] = 1
        assert kv.push("h", push).wait() == []
        versions = kv.pull("h", value)["h"]
        assert value.max() <= 1, "a push was applied twice"
        assert (value >= before).all(), "what a pull had shown was lost"
        assert value[me].sum() == i + 1, "an acknowledged push was lost"
        assert all((row[:-1] >= row[1:]).all() for row in value) or alone, "pushes are out of order"
        if mode.mode == "sync":
            assert versions == [i + 1] * len(versions)
            assert (value.sum(1) == i + 1).all() or alone, "a round has not one push of every worker"
        if mode.mode == "ssp":
            assert (value.sum(1) >= i - mode.staleness).all() or alone, "the bound is broken"
            kv.clock()
        before = value.clone()
    kv.barrier()
    kv.pull("h", value)
    return value.tolist()


def tell_history(me: Rank, mode: ps.Mode, *dooms: Any) -> list[Any]:
    if me.rank < SERVERS:
        return serve(me, *dooms)
    with worker(me) as kv:
        return history(kv, kv.worker - SERVERS, WORKERS, mode)


@pytest.mark.slow
@pytest.mark.parametrize("mode", MODES, ids=lambda mode: mode.mode)
@pytest.mark.parametrize(("place", "step"), [(place, step) for place, steps in DEATHS.items() for step in steps])
def test_no_push_is_lost_or_applied_twice_at_any_step_of_a_servers_death(place: str, mode: ps.Mode, step: str) -> None:
    times = random.randrange(5, PUSHES)
    doom = (0, "server", step, times)
    with Ranks(placed, SERVERS + WORKERS, PLACES[place], tell_history, mode, doom) as ranks:
        _, *others = ranks.results(but=(0,))
        assert was_killed(ranks, 0)
    for final in others[1:]:
        assert final == [[1.0] * PUSHES] * WORKERS, f"killed at the {times}th"


def tell_history_when_it_is_logged(me: Rank, *dooms: Any) -> list[Any]:
    """Workers stay until then, since nothing is said when all have left."""
    if me.rank < SERVERS:
        return serve(me, *dooms)
    with worker(me) as kv:
        result = history(kv, kv.worker - SERVERS, WORKERS, ps.sync())
        me.store.wait([f"server {server} has logged something" for server in (0, 2)])
        return result


def test_a_killed_server_and_a_killed_backup_are_logged_by_those_that_go_on() -> None:
    times = random.randrange(1, PUSHES)
    with Ranks(tell_history_when_it_is_logged, SERVERS + WORKERS, (1, "backup", "carried out", times)) as ranks:
        of_0, of_2, *finals = ranks.results(but=(1,))
        assert was_killed(ranks, 1)
    assert finals == [[[1.0] * PUSHES] * WORKERS] * WORKERS, f"killed at the {times}th"
    (said,) = of_0
    assert said.startswith("the backup of server 0 (") and said.endswith("server 0 goes on, and gets another one")
    assert len(of_2) == 1 and of_2[0].startswith("server 1 has ended: its backup, in this process (pid ")


def waits_for_a_stopped_backup(me: Rank) -> Any:
    me.store.set(f"pid {me.rank}", str(os.getpid()))
    if me.rank < SERVERS:
        return serve(me)
    with worker(me) as kv:
        server, its_backup = (int(me.store.get(f"pid {rank}")) for rank in (0, 1))
        kv.init("w", torch.zeros(3), update=ps.reduce("sum"), mode=ps.asynchronous())
        os.kill(its_backup, signal.SIGSTOP)
        os.kill(server, signal.SIGKILL)
        pending = kv.push("w", torch.ones(3))
        with pytest.raises(CollectiveTimeout, match=r"the backup of server 0 .* has not taken over yet"):
            pending.wait(timeout=1.0)
        with pytest.raises(CollectiveTimeout, match=r"server 1 .* did not answer 'create' in time"):  # of that process
            kv.init("later", torch.zeros(3), timeout=1.0)
        os.kill(its_backup, signal.SIGCONT)
        assert pending.wait() == []
        kv.init("later", torch.zeros(3))
        kv.pull("w", out := torch.zeros(3))
        return out.tolist()


def test_a_stopped_backup_is_named_and_waited_for() -> None:
    with Ranks(waits_for_a_stopped_backup, SERVERS + 1) as ranks:
        assert ranks.results(but=(0,))[-1] == [1.0] * 3


@pytest.mark.parametrize("place", ["one host", "apart"])
def test_nothing_is_logged_when_all_leave(place: str) -> None:
    logged = run(placed, SERVERS + WORKERS, PLACES[place], tell_history, ps.asynchronous())[:SERVERS]
    assert logged == [[]] * SERVERS


def loses(me: Rank, *dooms: Any) -> Any:
    if me.rank < SERVERS:
        return serve(me, *dooms)
    kv = worker(me)
    with pytest.raises(ServerLost) as raised:
        history(kv, 0, 1, ps.sync())
    kv.leave()
    return str(raised.value)


@pytest.mark.parametrize("step", ("taking over", "serving"))
def test_a_server_is_lost_when_its_backup_dies_too(step: str) -> None:
    dooms = (0, "server", "answered", 5), (1, "backup", step, 1)
    with Ranks(loses, SERVERS + 1, *dooms) as ranks:
        _, said = ranks.results(but=(0, 1))
    assert "server 0" in said and "has ended" in said


def ranks_that_are_both(me: Rank, mode: ps.Mode) -> list[list[float]] | None:
    """Every rank is worker and server; rank 1 is killed at some moment."""
    with ps.join(me.store, rank=me.rank, size=me.size, backups=1, **(SMALL | {"block_bytes": 1024})) as kv:
        me.report("founded")
        finals = history(kv, me.rank, me.size, mode, alone=True)
        if me.rank == 1:
            time.sleep(60)  # it is killed by then
        return finals


@pytest.mark.slow
@pytest.mark.parametrize("place", ["one host", "apart"])
@pytest.mark.parametrize("mode", MODES, ids=lambda mode: mode.mode)
def test_the_others_go_on_when_a_rank_is_killed_that_is_worker_and_server(mode: ps.Mode, place: str) -> None:
    with Ranks(placed, 3, PLACES[place], ranks_that_are_both, mode) as ranks:
        ranks.reports()
        time.sleep(random.uniform(0.0, 0.02))
        ranks.signal(1, signal.SIGKILL)
        first, second = ranks.results(but=(1,))
    assert first == second and first[0] == first[2] == [1.0] * PUSHES
    assert first[1] == sorted(first[1], reverse=True) or mode.mode == "sync"


# ---- one after the other ---------------------------------------------------------------------------------------------

KILLS = 5


def hosts_of(me: Rank) -> None:
    """A server's process, which tells who serves what and who has a backup, and ends when it is told to."""
    with ps.serve(me.store, rank=me.rank, size=me.size - WORKERS, backups=1, **SMALL) as serving:
        me.meet("servers")
        while not me.store.check(["done"]):
            looked = time.monotonic()
            serves = [number for number, shard in serving._local.serving().items() if shard.server.has_backup]
            me.store.set(f"serves {me.rank}", " ".join(map(str, [looked, *serves])))
            time.sleep(0.002)


def kill(me: Rank, dooms: tuple[int, ...], servers: int) -> None:
    """Kills these processes, each when all servers have backups, as the processes say that are left."""
    alive = list(range(servers))
    for doomed in (*dooms, None):
        begun, served = time.monotonic(), [-1]
        while served != list(range(servers)):
            assert time.monotonic() < begun + 60, f"{served} have backups; {alive} are left"
            time.sleep(0.005)
            said = [me.store.get(f"serves {rank}").split() for rank in alive]
            served = sorted(int(number) for when, *numbers in said if float(when) > begun for number in numbers)
        if doomed is not None:
            os.kill(int(me.store.get(f"pid {doomed}")), signal.SIGKILL)
            alive.remove(doomed)
    me.store.set("all killed", "")


def through_many_kills(
    me: Rank, kind: Any, arguments: dict[str, Any], dooms: tuple[int, ...], looks_every: float
) -> Any:
    """KILLS + 2 servers, of which KILLS are killed one after the other. While they are, all workers train and push a
    history; afterwards there is a new key, and a worker that joins. Between hosts, workers look for backups now and
    then."""
    failover._LOOK = looks_every
    servers = me.size - WORKERS
    me.store.set(f"pid {me.rank}", str(os.getpid()))
    if me.rank < servers:
        return hosts_of(me)
    me.meet("servers")
    kept = []
    with ps.join(me.store, role="worker", workers=WORKERS, timeout=60.0) as kv:
        w = torch.linspace(-1, 1, COUNT)
        kv.init("w", w, update=ps.optimizer(kind, **arguments))
        killer = threading.Thread(target=kill, args=(me, dooms, servers))
        if me.rank == servers:
            killer.start()
        for step in range(STEPS):
            kv.push_pull("w", gradient(kv.worker - servers, step, COUNT), out=w).wait()
            kept.append(w.numpy().copy())
        value, i = torch.zeros(WORKERS, 1), 0
        kv.init("h", value, update=ps.reduce("sum"), mode=ps.asynchronous())
        push = torch.zeros(WORKERS, 1)
        push[kv.worker - servers] = 1
        while not me.store.check(["all killed"]) and (killer.is_alive() or me.rank > servers):
            i += 1
            kv.push("h", push).wait()
            kv.pull("h", value)
            assert value[kv.worker - servers] == i, "a push was lost, or was applied twice"
        if me.rank == servers:
            killer.join()
        kv.barrier()
        kv.init("later", torch.zeros(3000), update=ps.reduce("sum"), mode=ps.asynchronous())
        kv.push("later", torch.ones(3000)).wait()
        kv.barrier()
        with ps.join(me.store, role="worker", timeout=30.0) as another:
            out, again = torch.empty(3000), torch.empty(COUNT)
            another.pull({"later": out, "w": again})
            assert out.tolist() == [WORKERS] * 3000 and again.numpy().tobytes() == kept[-1].tobytes()
            backups = [its["backup"] for its in another.stats()["servers"].values()]
            assert len(backups) == servers and all("the backup of server" in each for each in backups)
        kv.barrier()
    me.store.set("done", "")
    return kept


@pytest.mark.slow
@pytest.mark.parametrize(
    ("hosts", "looks_every", "optimizer"),
    [(1, 0.0, SGD), (1, 0.0, ADAMW), (3, 0.1, ADAMW), (3, 1.5, ADAMW)],
    ids=["one host, SGD", "one host, AdamW", "workers come to backups at once", "workers come late to backups"],
)
def test_servers_get_new_backups_and_may_be_killed_one_after_the_other(
    hosts: int, looks_every: float, optimizer: Any
) -> None:
    """Also before workers have heard of the backups."""
    wanted, servers = alone(*optimizer, WORKERS, steps=STEPS), KILLS + 2
    dooms = tuple(random.sample(range(servers), KILLS))
    places = (*(i % hosts for i in range(servers)), 0, 0 if hosts == 1 else hosts)
    body = (through_many_kills, *optimizer, dooms, looks_every)
    with Ranks(placed, servers + WORKERS, places, *body) as ranks:
        results = ranks.results(but=dooms)
        assert all(was_killed(ranks, rank) for rank in dooms)
    for kept in [each for each in results if each]:
        for i, (value, expected) in enumerate(zip(kept, wanted, strict=True)):
            assert value.tobytes() == expected.tobytes(), f"step {i}, {dooms} were killed"


# ---- all that servers have -------------------------------------------------------------------------------------------


def everything(me: Rank, path: str, *dooms: Any) -> Any:
    """Dense keys and tables of many rules, with optimizer states; then a snapshot, and a worker and a key that come
    later. All of it is asked of a backup, if a server has been killed."""
    if me.rank < SERVERS:
        return serve(me, *dooms)
    with worker(me) as kv:
        first = me.rank == SERVERS
        tables = saved.make(kv)
        for number in range(5):
            saved.step(kv, tables, kv.worker - SERVERS, number)
        at = saved.state(kv, tables)
        kv.barrier()
        if first:
            assert kv.snapshot(path).wait().is_dir()
            kv.init("later", torch.arange(3000.0), update=ps.reduce("sum"), mode=ps.asynchronous())
            with ps.join(me.store, role="worker", timeout=30.0) as another:
                of_another = saved.state(another, saved.make(another))
                another.push("later", torch.ones(3000)).wait()
            saved.same(of_another, at)
        kv.barrier()
        out = torch.empty(3000)
        kv.pull("later", out)
        assert torch.equal(out, torch.arange(3000.0) + 1)
        assert all(its is not None for its in kv.stats()["servers"].values())
        return at


@pytest.mark.parametrize("place", ["one host", "beside"])
def test_a_backup_has_all_that_its_server_had(place: str, tmp_path: Path) -> None:
    *_, wanted, other = run(everything, SERVERS + WORKERS, str(tmp_path / "whole"))
    saved.same(wanted, other)
    times = random.randrange(1, 40)
    path, doom = str(tmp_path / "after"), (1, "server", "carried out", times)
    with Ranks(placed, SERVERS + WORKERS, PLACES[place], everything, path, doom) as ranks:
        *_, found, other = ranks.results(but=(1,))
        assert was_killed(ranks, 1), f"killed at the {times}th"
    saved.same(found, wanted)
    saved.same(other, wanted)
    for restored, _ in run(saved.restores, 2, path, False):
        saved.same(restored, wanted)


def serve_with_snapshots(me: Rank, folder: str) -> None:
    """As `ringreduce serve --snapshots` does. Rank 0 asks for one when server 1 has ended and the worker is done."""
    logged = Logged()
    with ps.serve(me.store, rank=me.rank, size=SERVERS, backups=1, **SMALL) as serving:
        if me.rank == 1:
            serving._local.server.die_at("answered", 7)
        me.meet("servers")
        asked = False
        while not serving.wait(0.02):
            if me.rank == 0 and logged.messages and not asked and Path(folder, "trained").exists():
                assert serving.may_ask()
                serving.ask_for_snapshot()
                asked = True
            serving.take_snapshots(folder)
        assert asked or me.rank != 0
        deadline = time.monotonic() + 30
        while not serving.may_ask():  # for the next one, when all parts of this one have ended
            assert time.monotonic() < deadline, "an ended server's part is waited for"
            serving.take_snapshots(folder)


def trains_until_there_is_one(me: Rank, folder: str) -> Any:
    if me.rank < SERVERS:
        return serve_with_snapshots(me, folder)
    with worker(me) as kv:
        w = torch.linspace(-1, 1, COUNT)
        kv.init("w", w, update=ps.optimizer(torch.optim.AdamW, lr=0.01))
        for step in range(STEPS):
            kv.push_pull("w", gradient(0, step, COUNT), out=w).wait()
        Path(folder, "trained").touch()
        until(lambda: any(Path(folder).glob("*[0-9]/index.json")), "a whole snapshot")
    return w.numpy()


def test_servers_write_snapshots_of_what_they_took_over(tmp_path: Path) -> None:
    with Ranks(trains_until_there_is_one, SERVERS + 1, str(tmp_path)) as ranks:
        *_, wanted = ranks.results(but=(1,))
        assert was_killed(ranks, 1)
    (path,) = tmp_path.glob("*[0-9]")
    with ps.join(**SMALL) as kv:
        kv.restore(path)
        w = torch.empty(COUNT)
        kv.pull("w", w)
    assert w.numpy().tobytes() == wanted.tobytes()


# ---- what is refused -------------------------------------------------------------------------------------------------


def disagrees(me: Rank) -> str:
    with pytest.raises(InvalidArgument) as raised:
        ps.join(me.store, rank=me.rank, size=2, backups=me.rank, **SMALL)
    return str(raised.value)


def updates_by_python(me: Rank) -> list[str]:
    said, functions = list[str](), {"f": lambda value, push, state, info: None}
    with ps.join(me.store, rank=me.rank, size=2, backups=1, functions=functions, **SMALL) as kv:
        for update in (ps.optimizer(torch.optim.NAdam), ps.function("f")):
            with pytest.raises(InvalidArgument) as raised:
                kv.init(f"w{len(said)}", torch.zeros(5), update=update)
            said.append(str(raised.value))
        kv.barrier()
    return said


def comes_from_another_host(me: Rank) -> str:
    if me.rank < 2:
        with ps.join(me.store, rank=me.rank, size=2, backups=1, **SMALL) as kv:
            me.meet("tried")
            kv.barrier()
        return ""
    with pytest.raises(TopologyError) as raised:
        ps.join(me.store, role="worker", timeout=30.0)
    me.meet("tried")
    return str(raised.value)


def test_what_cannot_have_a_backup_is_refused() -> None:
    for options in ({"size": 1, "backups": 1}, {"size": 2, "backups": 2}):
        with pytest.raises(InvalidArgument, match=f"backups is {options['backups']}"):
            ps.join(HashStore(), rank=0, **options)
    for rank, said in enumerate(run(disagrees, 2)):
        assert re.match(f"backups is {rank} here and {1 - rank} on (another rank|rank [01]); give all the same", said)
    for said in run(updates_by_python, 2):
        assert len(said) == 2 and all("an update that Python computes has no backup" in each for each in said)
    assert "listens to none" in run(placed, 3, (0, 0, 1), comes_from_another_host)[2]
