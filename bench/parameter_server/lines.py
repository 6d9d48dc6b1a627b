"""The parameter server between hosts, which are network namespaces: what the lines allow, and servers that move."""

from __future__ import annotations

import statistics
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
from net.network import UNITS, Network, unavailable
from net.ranks import Rank, Ranks, run

import ringreduce.parameter_server as ps
from bench import harness
from bench.harness import Bytes

HEADERS = 1538 / 1448
"""Bytes on an Ethernet for those of a TCP stream, in full packets with timestamps."""


def work(me: Rank, servers: int, workers: int, size: int, steps: int, wires: list[str]) -> list[float]:
    """Of a worker: seconds, bytes sent, bytes received. `wires` are those of pushes and of pulls."""
    block = max(1 << 16, size // 64)
    sizes: dict[str, Any] = {"window": 2 * size + (8 << 20), "timeout": 120.0, "block_bytes": block}
    if me.rank < servers:
        with ps.serve(me.store, rank=me.rank, size=servers, memory=8 * size + (8 << 20), **sizes) as serving:
            serving.wait()
        return [0.0, 0.0, 0.0]
    with ps.join(me.store, role="worker", workers=workers, **sizes) as kv:
        w, gradient = torch.zeros(size // 4), torch.ones(size // 4)
        kv.init("w", w, update=ps.optimizer(torch.optim.SGD, lr=0.1), push_wire=wires[0], pull_wire=wires[1])
        times, moved = [], []
        for _ in range(steps + 1):
            kv.barrier()
            begin, before = time.perf_counter(), line_bytes()
            kv.push_pull("w", gradient, out=w).wait()
            times.append(time.perf_counter() - begin)
            moved.append([after - some for after, some in zip(line_bytes(), before, strict=True)])
        return [statistics.median(times[1:]), *map(statistics.median, zip(*moved[1:], strict=True))]


def line_bytes() -> tuple[int, int]:
    """That this host has sent and received."""
    text = Path("/proc/net/dev").read_text()
    (words,) = (line.split() for line in text.splitlines() if line.lstrip().startswith("eth0:"))
    return int(words[9]), int(words[1])


def seconds_for(size: float, rate: str) -> float:
    """That a line of such a rate needs for so many bytes of a TCP stream."""
    if why := unavailable():
        raise harness.CannotRun(f"it needs network namespaces: {why}")
    unit = next((unit for unit in UNITS if rate.endswith(unit)), None)
    if unit is None:
        raise harness.CannotRun(f"--rate {rate}: write 100mbit or 1gbit")
    return size * HEADERS * 8 / (float(rate.removesuffix(unit)) * UNITS[unit])


def lines(
    workers: tuple[int, ...] = (1, 2, 4),
    servers: tuple[int, ...] = (1, 2, 4),
    rate: str = "100mbit",
    size: Bytes = 8 << 20,
    steps: int = 5,
    push_wire: str = "float32",
    pull_wire: str = "float32",
) -> Iterator[dict[str, Any]]:
    """m workers and n servers on hosts of their own, against what the lines allow. Needs root.

    Every worker and every server is alone on a host (a network namespace) with a line of --rate in each direction.
    Milliseconds of a push_pull of the whole tensor in `sync`, on the slowest worker; the median of --steps. `bound` is
    the time that the busiest line needs, pushes and pulls being under way at once: the greater of B (a worker's) and
    m B / n (a server's), B with the headers of TCP and below; `of bound` is its share of the time. Blocks are 1/64 of
    the tensor: what a worker gets back at the end waits for the last of them. `sent` and `received` are the bytes of a
    step, as that worker's line has counted them. With --push-wire or --pull-wire (bfloat16 or int8) `bound` stays that
    of float32.
    """
    for m in workers:
        for n in servers:
            bound = seconds_for(max(1, m / n) * size, rate)
            with Network(n + m, rate=rate) as network:
                found, sent, received = max(
                    run(network, 1, work, n, m, size, steps, [push_wire, pull_wire], timeout=170)
                )
            yield {
                "workers": m,
                "servers": n,
                "bytes": size,
                "time, ms": 1e3 * found,
                "bound, ms": 1e3 * bound,
                "of bound": bound / found,
                "sent, MB": sent / 1e6,
                "received, MB": received / 1e6,
            }


# ---- servers that come and go ----------------------------------------------------------------------------------------

SERVERS, FOUNDERS, PROCESSES = 4, 2, 4
"""Servers; processes that begin with them; processes that serve in the end."""

Steps = list[tuple[float, float]]
"""When each began, and when it ended, by the clock that all processes of this machine share."""


def take_part(me: Rank, workers: int, size: int) -> Any:
    """Of a worker: its steps, and the least and the greatest element that it has pulled at the end."""
    sizes: dict[str, Any] = {"window": 2 * size + (8 << 20), "timeout": 120.0, "block_bytes": max(1 << 16, size // 64)}
    if me.rank < FOUNDERS:
        memory = 8 * size + (8 << 20)
        founded = {"rank": me.rank, "size": FOUNDERS, "servers": SERVERS, "backups": 1, "memory": memory}
        with ps.serve(me.store, **founded, **sizes) as serving:
            serving.wait()
        return None
    if me.rank < PROCESSES:
        me.hear()
        with ps.serve(me.store, joins=True, timeout=120.0) as serving:
            me.report(len(serving._local.serving()))
            me.hear()
            serving.give_away()
            me.report("has left")
        return None
    told = threading.Event()
    threading.Thread(target=lambda: (me.hear(), told.set()), daemon=True).start()
    steps: Steps = []
    with ps.join(me.store, role="worker", workers=workers, window=sizes["window"], timeout=120.0) as kv:
        one, w, ends = torch.ones(size // 4), torch.empty(size // 4), torch.zeros(1)
        kv.init("w", torch.zeros(size // 4), update=ps.reduce("sum"))
        kv.init("ends", torch.zeros(1), update=ps.reduce("sum"))  # how many have been told to: all end at the same step
        kv.barrier()
        me.report("begins")
        while not ends.item():
            begin = time.monotonic()
            kv.push_pull("w", one, out=w).wait()
            steps.append((begin, time.monotonic()))
            kv.push_pull("ends", torch.full((1,), float(told.is_set())), out=ends).wait()
        return steps, (w.min().item(), w.max().item())


def moves(
    workers: int = 4, rate: str = "100mbit", size: Bytes = 4 << 20, seconds: float = 10.0
) -> Iterator[dict[str, Any]]:
    """Servers that come and go while workers train, between hosts: how the time of a step follows. Needs root.

    Every process is alone on a host (a network namespace) with a line of --rate in each direction. Two processes begin
    with two servers each, and with each other's backups. Two more join, one after the other, and leave again by
    `give_away`. The workers push and pull without a pause; every push adds 1, so the value tells whether a push was
    lost or applied twice. A row is one phase of --seconds: on how many hosts servers are, the median time of a step
    then, what the busiest line needs for that (a server's host takes the pushes for its servers, and the logs of
    the backups that it has), and the longest step between this phase and the next one.
    """
    seconds_for(0, rate)
    total = PROCESSES + workers
    moments = [time.monotonic()]
    with (
        Network(total, rate=rate) as network,
        Ranks(network, list(range(total)), take_part, workers, size, timeout=120) as ranks,
    ):
        ranks.reports(but=range(PROCESSES))
        comes = list(range(FOUNDERS, PROCESSES))
        for rank in (*comes, *reversed(comes)):
            time.sleep(seconds)
            moments.append(time.monotonic())
            ranks._pipes[rank].send("come, or go")
            ranks.reports(but=[other for other in range(total) if other != rank])
            moments.append(time.monotonic())
        time.sleep(seconds)
        moments.append(time.monotonic())
        for pipe in ranks._pipes[PROCESSES:]:
            pipe.send("end")
        results = ranks.results()[PROCESSES:]
    pushed = workers * len(results[0][0])
    wrong = [found for _, found in results if found != (pushed, pushed)]
    every = [step for steps, _ in results for step in steps]
    for phase, hosts in enumerate((2, 3, 4, 3, 2)):
        begin, end = moments[2 * phase], moments[2 * phase + 1]
        inside = [after - before for before, after in every if begin < before and after < end]
        until = moments[2 * phase + 2] if phase < 4 else end
        beside = [after - before for before, after in every if before < until and after > end]
        most = -(-SERVERS // hosts) / SERVERS
        yield {
            "hosts": hosts,
            "median, ms": 1e3 * statistics.median(inside),
            "line, ms": 1e3 * seconds_for(2 * most * workers * size, rate),
            "then the longest, ms": 1e3 * max(beside, default=0.0),
            "wrong": len(wrong),
        }
