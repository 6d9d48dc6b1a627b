"""Servers that are killed or cut off: how soon calls go on, and whether a push was lost or applied twice."""

from __future__ import annotations

import contextlib
import itertools
import logging
import os
import random
import signal
import statistics
import tempfile
import time
from collections.abc import Iterator
from multiprocessing.connection import Connection
from multiprocessing.context import ForkProcess
from typing import Any

import torch
import torch.distributed as dist
from net.network import Network, unavailable
from net.ranks import Rank, Ranks

import ringreduce.parameter_server as ps
from bench import harness
from ringreduce.errors import Aborted, RingReduceError

SERVERS, WORKERS, PUSHES = 3, 2, 4000
MODES = (ps.sync(), ps.asynchronous(), ps.ssp(1))
HOSTS = [1, 2, 0, 1, 2, 0]  # of three servers, then of three workers; the store is on host 0
DEAD_AFTER = 5
ROOM: dict[str, Any] = {"memory": 16 << 20, "window": 4 << 20, "block_bytes": 1024}


class Counter:
    """Adds 1 to a row of its own by every push, so that the row says how many pushes the servers have.

    `longest` is the longest time of a push and a pull, and `faults` says what was wrong.
    """

    def __init__(self, kv: ps.KeyValue, mode: ps.Mode, me: int, workers: int, columns: int) -> None:
        self.kv, self.mode, self.me = kv, mode, me
        self.done, self.longest, self.faults = 0, 0.0, ""
        self.value, self.ones = torch.zeros(workers, columns), torch.zeros(workers, columns)
        self.ones[me] = 1
        kv.init("h", self.value, update=ps.reduce("sum"), mode=mode)
        kv.barrier()

    def push(self) -> None:
        before, begin = self.value.clone(), time.perf_counter()
        self.kv.push("h", self.ones).wait()
        if self.mode.mode == "ssp":
            self.kv.clock()
        self.kv.pull("h", self.value)
        self.longest = max(self.longest, time.perf_counter() - begin)
        self.done += 1
        if (self.value[self.me] != self.done).any() or (self.value < before).any():
            self.faults += f"worker {self.me} has pushed {self.done} times and reads {self.value.unique(dim=1)}; "


def serve(folder: str, rank: int, pipe: Connection) -> None:
    """Says which of its servers have backups whenever it is asked, until it is told to end."""
    store = dist.FileStore(f"{folder}/store", -1)
    place: dict[str, Any] = {"rank": rank, "size": SERVERS, "backups": 1, **ROOM}
    serving = ps.serve(store, **(place if rank < SERVERS else {"joins": True}))
    while pipe.recv() != "end":
        served: list[int] = []
        with contextlib.suppress(Aborted):  # one has been given to another process
            served = [number for number, shard in serving._local.serving().items() if shard.server.has_backup]
        pipe.send(served)
    serving.close()


def work(folder: str, mode: ps.Mode, pipe: Connection) -> None:
    """Pushes until it is told to end. Before, it says what its longest call was since it was asked."""
    torch.set_num_threads(1)
    with ps.join(dist.FileStore(f"{folder}/store", -1), role="worker", workers=WORKERS, window=4 << 20) as kv:
        counter = Counter(kv, mode, kv.worker - SERVERS, WORKERS, PUSHES)
        pipe.send("begins")
        while True:
            if pipe.poll():
                if pipe.recv() == "end":
                    break
                pipe.send((counter.longest, counter.faults))
                counter.longest, counter.faults = 0.0, ""
            counter.push()


class Team:
    """Servers with backups, and workers, in processes of one host."""

    def __init__(self, folder: str, mode: ps.Mode, spare: int) -> None:
        self.folder, self.started = folder, 0
        self.servers: dict[int, tuple[ForkProcess, Connection]] = {}
        for _ in range(SERVERS + spare):
            self.add()
        self.workers = [harness.forked(work, folder, mode) for _ in range(WORKERS)]
        for _, pipe in self.workers:
            pipe.recv()

    def add(self) -> None:
        self.servers[self.started] = harness.forked(serve, self.folder, self.started)
        self.started += 1

    def wait_for_backups(self) -> list[int]:
        """Until all servers have backups; the processes that serve."""
        begun = time.monotonic()
        while time.monotonic() < begun + 60:
            for _, pipe in self.servers.values():
                pipe.send("which?")
            served = {rank: pipe.recv() for rank, (_, pipe) in self.servers.items()}
            if sorted(itertools.chain(*served.values())) == list(range(SERVERS)):
                return [rank for rank, some in served.items() if some]
            time.sleep(0.005)
        raise RuntimeError(f"after a minute only {served} have backups")

    def asked(self) -> tuple[float, str]:
        """The longest call of any worker since the last question, and what was wrong."""
        for _, pipe in self.workers:
            pipe.send("so far")
        longest, faults = zip(*(pipe.recv() for _, pipe in self.workers), strict=True)
        return max(longest), "".join(faults)

    def kill(self, chance: random.Random, within: float) -> tuple[float, str]:
        """Kills a process that serves, at a random moment. The longest call until all have backups again."""
        serving = self.wait_for_backups()
        _, before = self.asked()
        doomed = chance.choice(serving)
        time.sleep(chance.uniform(0, within))
        process, _ = self.servers.pop(doomed)
        os.kill(process.pid or 0, signal.SIGKILL)
        process.join()
        self.wait_for_backups()
        longest, after = self.asked()
        return longest, before + after

    def end(self) -> None:
        for some in (self.workers, [*self.servers.values()]):  # servers last
            for _, pipe in some:
                pipe.send("end")
            for process, _ in some:
                process.join()


def on_one_host(mode: ps.Mode, kills: int, in_a_row: bool, chance: random.Random) -> Iterator[tuple[float, str]]:
    for _ in range(1 if in_a_row else kills):
        with tempfile.TemporaryDirectory() as folder:
            team = Team(folder, mode, spare=int(in_a_row))
            for _ in range(kills if in_a_row else 1):
                yield team.kill(chance, 0.02 if in_a_row else 0.15)
                if in_a_row:
                    team.add()
            team.end()


def between_hosts(me: Rank, mode: ps.Mode, lasts: float) -> tuple[float, str]:
    """The longest call of a worker, which pushes for so many seconds, and what was wrong."""
    if me.rank < SERVERS:
        logging.getLogger("ringreduce").setLevel(logging.ERROR)  # who takes over is no news here
        with ps.serve(me.store, rank=me.rank, size=SERVERS, backups=1, **ROOM) as serving:
            me.report("serves")
            serving.wait(lasts + 60)
        return 0.0, ""
    kv = ps.join(me.store, role="worker", workers=3, window=4 << 20, timeout=20.0)
    counter = Counter(kv, mode, me.rank - SERVERS, 3, 500)  # six blocks
    me.report("begins")
    until = time.monotonic() + lasts
    try:
        while time.monotonic() < until:
            counter.push()
    except RingReduceError as error:  # of a worker that was cut off
        kv.calls.close()
        return counter.longest, "" if me.host == 1 else str(error)
    kv.leave()
    return counter.longest, counter.faults


def end_one(network: Network, mode: ps.Mode, chance: random.Random, cut: bool) -> tuple[float, str]:
    """Kills server 0, or cuts its host off for good; then the calls of its host's worker do not count."""

    def cut_off(whether: bool) -> None:
        for other in (0, 2):
            network.cut(1, other, whether)
            network.cut(other, 1, whether)

    env = {"RINGREDUCE_DEAD_AFTER": str(DEAD_AFTER)}
    with Ranks(network, HOSTS, between_hosts, mode, 15.0 if cut else 1.0, env=env) as ranks:
        ranks.reports()
        time.sleep(chance.uniform(0.1, 0.4))
        if cut:
            cut_off(True)
        else:
            ranks.signal(0, signal.SIGKILL)
        results = ranks.results(but=(0, SERVERS) if cut else (0,))[2:]
    cut_off(False)
    return max(longest for longest, _ in results), "".join(faults for _, faults in results)


def row(mode: ps.Mode, what: str, trials: list[tuple[float, str]]) -> dict[str, Any]:
    took = sorted(longest for longest, _ in trials)
    wrong = [faults for _, faults in trials if faults]
    print(*(f"WRONG: {faults}" for faults in wrong), sep="\n", end="\n" * bool(wrong))
    return {
        "mode": mode.mode,
        "times": len(trials),
        "what": what,
        "median, ms": 1e3 * statistics.median(took),
        "95%, ms": 1e3 * took[int(0.95 * len(took))],
        "worst, ms": 1e3 * took[-1],
        "wrong": len(wrong),
    }


def kills(
    kills: int = 99, in_a_row: bool = False, hosts: bool = False, cuts: int = 9, seed: int = 1
) -> Iterator[dict[str, Any]]:
    """How soon calls go on when a server is killed. On one host, or with --hosts between hosts (needs root).

    Three servers, in turn with backups, and two workers, in processes of their own. A worker's push adds 1 to its row,
    and it pulls after every push; so a push that was lost or applied twice shows. A process is killed by SIGKILL at a
    random moment. The figures are of the longest time that any worker's push and pull took, over --kills, a third of
    them in each mode.

    --in-a-row: all of one parameter server, --kills in each of two modes. A process is killed when all servers have
    backups again, and another one joins in its place, as `ringreduce serve --join` does.
    --hosts: three servers and three workers on three hosts, which are network namespaces. Server 0 is killed, or, in
    --cuts further trials, its host is cut off for good with RINGREDUCE_DEAD_AFTER=5.
    """
    chance = random.Random(seed)
    if not hosts:
        for mode in MODES[:2] if in_a_row else MODES:
            trials = list(on_one_host(mode, kills if in_a_row else kills // len(MODES), in_a_row, chance))
            yield row(mode, "killed, in a row" if in_a_row else "killed", trials)
        return
    if why := unavailable():
        raise harness.CannotRun(f"--hosts needs network namespaces: {why}")
    with Network(hosts=3) as network:
        for what, count in (("killed", kills), (f"cut off, dead after {DEAD_AFTER} s", cuts)):
            for mode in MODES if count >= len(MODES) else ():
                trials = [end_one(network, mode, chance, what != "killed") for _ in range(count // len(MODES))]
                yield row(mode, what, trials)
