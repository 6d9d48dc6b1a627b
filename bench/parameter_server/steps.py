"""Steps of the parameter server, next to Gloo, all_reduce and other libraries."""

from __future__ import annotations

import functools
import math
import statistics
from collections.abc import Callable, Iterator
from typing import Any, Literal

import torch
import torch.distributed as dist

import ringreduce
import ringreduce.parameter_server as ps
from bench import harness
from bench.harness import Bytes
from bench.parameter_server import join
from bench.parameter_server import peers as libraries

WAYS = ("push_pull", "in place", "gloo", "all_reduce")
LAPS = 5


class Step:
    """One way to exchange and update; `w` is the result."""

    def __init__(self, way: str, kv: ps.KeyValue, ours: dist.ProcessGroup, optimizer: str, count: int) -> None:
        kind, arguments = getattr(torch.optim, optimizer), libraries.ARGUMENTS[optimizer]
        self.way, self.kv, self.ours, self.key = way, kv, ours, f"{way} {count}"
        self.gradient = (kv.empty(count) if way == "in place" else torch.empty(count)).fill_(dist.get_rank() + 1)
        self.part = libraries.Part(count, optimizer)
        self.w = self.part.w
        if way in ("push_pull", "in place"):
            kv.init(self.key, self.w, update=ps.optimizer(kind, **arguments), mode=ps.sync(average=False))
            kv.barrier()

    def __call__(self) -> None:
        if self.way in ("push_pull", "in place"):
            self.kv.push_pull(self.key, self.gradient, out=self.w).wait()
            return
        total = self.part.sum.copy_(self.gradient)  # both collectives work in place
        if self.way == "gloo":
            dist.reduce(total, 0)
        else:
            ringreduce.all_reduce(total, group=self.ours)
        if self.way == "all_reduce" or dist.get_rank() == 0:
            self.part.update()
        if self.way == "gloo":
            dist.broadcast(self.w, 0)


def milliseconds(call: Callable[[], object], seconds: float) -> float:
    """Of a call, on the slowest rank: the median of LAPS laps of equal numbers of calls."""
    times = min(2000, max(2, int(seconds / harness.seconds(call, 3))))
    return 1e3 * statistics.median(harness.seconds(call, times) for _ in range(LAPS))


def measure_peer(name: str, optimizer: str, count: int, seconds: float) -> float:
    """As `milliseconds`. Raises `ValueError` if the first three steps from zeros do not end where torch's do."""
    gradient, w = torch.full((count,), float(dist.get_rank() + 1)), torch.zeros(count)
    with libraries.PEERS[name](count, optimizer) as step:
        for _ in range(3):
            step(gradient, w)
        ended, expected = float(w[0]), libraries.Part(1, optimizer)
        for _ in range(3):
            expected.step([torch.full((1,), float(rank + 1)) for rank in range(dist.get_world_size())])
        if not math.isclose(ended, float(expected.w), rel_tol=1e-3):
            raise ValueError(f"{name}: {ended}, torch: {float(expected.w)}")
        return milliseconds(functools.partial(step, gradient, w), seconds)


def measure(sizes: list[int], optimizer: str, seconds: float, names: list[str]) -> list[dict[str, Any]]:
    ours = dist.new_group(backend="ringreduce")
    rows = []
    with join(max(sizes)) as kv:
        for size in sizes:
            steps = {way: Step(way, kv, ours, optimizer, size // 4) for way in WAYS}
            laps: dict[str, list[float]] = {way: [] for way in (*WAYS, *names)}
            for _ in range(3):
                for way, step in steps.items():
                    laps[way].append(milliseconds(step, seconds))
                for name in names:
                    laps[name].append(measure_peer(name, optimizer, size // 4, seconds))
            key, out, other = steps["push_pull"].key, steps["push_pull"].w, torch.empty(size // 4)
            medians = {way: statistics.median(each) for way, each in laps.items()}
            medians["pull"] = milliseconds(functools.partial(kv.pull, key, out), seconds)
            medians["memcpy"] = milliseconds(functools.partial(other.copy_, out), seconds)
            rows.append({"bytes": size, **medians})
            kv.barrier()
        check({way: Step(way, kv, ours, optimizer, 1001) for way in WAYS})
    return rows


def check(steps: dict[str, Step]) -> None:
    """All ways compute the same from zeros, so after three steps they have the same bits."""
    for _ in range(3):
        for step in steps.values():
            step()
    for way, step in steps.items():
        if not torch.equal(step.w, steps["gloo"].w):
            raise ValueError(f"{way}: {step.w[:3].tolist()}, gloo: {steps['gloo'].w[:3].tolist()}")


def steps(
    workers: int = 2,
    sizes: tuple[Bytes, ...] = (4 << 10, 1 << 20, 64 << 20),
    optimizer: Literal["SGD", "AdamW"] = "SGD",
    seconds: float = 0.3,
    peers: tuple[str, ...] = (),
) -> Iterator[dict[str, Any]]:
    """A synchronous step's exchange and update: through the parameter server, and by what one would use instead.

    Milliseconds per step on the slowest worker, each way in the same run and in turn; medians of laps of --seconds.

        push_pull    kv.push_pull(g, out=w).wait(): every worker is a server with its part of the blocks
        in place     the same with gradients in memory of kv.empty()
        gloo         dist.reduce to rank 0, the optimizer there, dist.broadcast, all by Gloo
        all_reduce   ringreduce.all_reduce, then the optimizer on every rank
        pull, memcpy  a pull alone, and a copy of as many bytes in one process

    --peers are libraries that one would build a store with (bench/parameter_server/peers.py), `all` or names of
    them, which are installed in bench/.peers. Each is started for its laps and ended after them. It fails if the ways
    end with different values.
    """
    names = list(libraries.PEERS) if "all" in peers else list(peers)
    if unknown := set(names) - libraries.PEERS.keys():
        raise harness.CannotRun(f"--peers: there is no {' '.join(unknown)}; there are all {' '.join(libraries.PEERS)}")
    for name in names:
        libraries.install(name)
    for row in harness.start_ranks(workers, measure, list(sizes), optimizer, seconds, names):
        yield {"workers": workers, "optimizer": optimizer, **row}
