"""Long and large loads, and whether anything grows: memory, descriptors, threads, zombies, keys in the store, time.

    cd tests && PYTHONPATH=../bench python -m soak                      all loads; `make soak` runs this, too
    PYTHONPATH=../bench python -m soak --only groups worlds --scale 0.1      two of them, a tenth as long
    PYTHONPATH=../bench python -m soak --only groups --backend gloo          the same loop without ringreduce

A load is a step that all its ranks repeat. A cell is `x` if it was the same after the first tenth of the steps and at
the end, else `x > y (slope)`, with the growth in 1,000 steps, on the rank where it is greatest. Times are those of the
first tenth and of the last; what else the machine does shows less in `CPU us`. `heap` is what malloc has given and not
taken back, `blocks` what Python has: they show a leak before the process grows. The store belongs to the launcher, and
`keys` are all that it has. Ranks are on hosts that are network namespaces, which needs root.
"""

from __future__ import annotations

import contextlib
import ctypes
import functools
import gc
import importlib
import os
import signal
import sys
import time
import warnings
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager
from datetime import timedelta
from pathlib import Path
from typing import Any

import harness
import psutil
import torch
import torch.distributed as dist
from net.network import Network, unavailable
from net.ranks import Rank, run
from processes import forking_context

import ringreduce
import ringreduce.parameter_server as ps
from ringreduce import elastic

TENTHS = 10
TIMEOUT = 24 * 3600.0
"""Seconds: whatever stops a rank for a while, as a debugger does, ends no run."""
Step = Callable[[int], object]
Load = Callable[[Rank, str], AbstractContextManager[Step]]

# the loads


@contextlib.contextmanager
def calls(me: Rank, backend: str) -> Iterator[Step]:
    """Every collective in four sizes, with and without waiting for it, by torch and directly, and messages."""
    with me.join(backend=backend, timeout=TIMEOUT):
        each = [call for count in (1, 60, 1000, 12_000) for call in _calls(me, count, backend == "ringreduce")]
        yield lambda number: each[number % len(each)]()


def _calls(me: Rank, count: int, direct: bool) -> list[Callable[[], object]]:
    n, most = me.size, dist.ReduceOp.MAX
    one, whole = torch.ones(count), torch.ones(n * count)
    parts, inbox = list(torch.ones(n, count)), torch.ones(count)
    after, before = (me.rank + 1) % n, (me.rank - 1) % n
    root: Any = parts if me.rank == 0 else None

    def messages() -> None:
        for work in (dist.isend(one, after, tag=count), dist.irecv(inbox, before, tag=count)):
            work.wait()

    def batch() -> None:
        ends = [dist.P2POp(dist.isend, one, after), dist.P2POp(dist.irecv, inbox, before)]
        for work in dist.batch_isend_irecv(ends):
            work.wait()

    found: list[Callable[[], object]] = []
    for module in (dist, ringreduce)[: 1 + direct]:
        found += [
            functools.partial(module.all_reduce, one, most),
            functools.partial(module.broadcast, one, 0),
            functools.partial(module.reduce, one, 0, most),
            functools.partial(module.all_gather, parts, one),
            functools.partial(module.all_gather_into_tensor, whole, one),
            functools.partial(module.reduce_scatter, one, parts, most),
            functools.partial(module.reduce_scatter_tensor, one, whole, most),
            functools.partial(module.all_to_all_single, whole.clone(), whole),
            functools.partial(module.gather, one, root, 0),
            functools.partial(module.scatter, one, root, 0),
            module.barrier,
        ]
    waited = [functools.partial(lambda call: call(async_op=True).wait(), call) for call in found]
    if direct:
        found.append(functools.partial(ringreduce.all_reduce_coalesced, parts, most))
        found.append(functools.partial(ringreduce.all_reduce, one, ringreduce.Op.torch(torch.maximum)))
    return [*found, *waited, functools.partial(dist.all_reduce, whole, most, async_op=True), messages, batch]


@contextlib.contextmanager
def groups(me: Rank, backend: str) -> Iterator[Step]:
    """A subgroup of all ranks is made, used and destroyed."""
    tensor = torch.ones(8)

    def step(number: int) -> None:
        group = dist.new_group()
        dist.all_reduce(tensor, dist.ReduceOp.MAX, group)
        dist.destroy_process_group(group)

    with me.join(backend=backend, timeout=TIMEOUT):
        yield step


@contextlib.contextmanager
def worlds(me: Rank, backend: str) -> Iterator[Step]:
    """The default group is made, used and destroyed. Of many ranks, a group of every second one, too."""
    tensor = torch.ones(8 if me.size == 2 else 1 << 18)

    def step(number: int) -> None:
        with me.join(f"world {number}", backend=backend, timeout=TIMEOUT):
            dist.all_reduce(tensor[:8], dist.ReduceOp.MAX)
            half = dist.new_group(list(range(0, me.size, 2))) if me.size > 2 else None
            for group in (None, half) if me.size > 2 else (None,):
                if group != dist.GroupMember.NON_GROUP_MEMBER:
                    dist.all_reduce(tensor, dist.ReduceOp.MAX, group)

    yield step


@contextlib.contextmanager
def views(me: Rank, backend: str) -> Iterator[Step]:
    """Rank 0 stays in a world. Rank 1 joins it and leaves again, or starts a process that joins and is killed."""
    world = _world(me.store, me.rank) if me.rank == 0 else None

    def step(number: int) -> None:
        if world:
            while world.epoch < 2 * number + 2:
                world.attempt(functools.partial(dist.all_reduce, torch.ones(8)))
        elif number % 10:
            _world(me.store, 0).leave()
        else:
            doomed = forking_context().Process(target=_joins_and_dies, args=(os.environ["MASTER_PORT"],))
            doomed.start()
            doomed.join()
            doomed.close()

    yield step
    if world:
        world.leave()


def _world(store: dist.Store, rank: int) -> elastic.World:
    world = elastic.start(store=store, rank=rank, world_size=1, least=1, timeout=timedelta(seconds=TIMEOUT))
    world.state(step=0)
    return world


def _joins_and_dies(port: str) -> None:
    _world(dist.TCPStore(os.environ["MASTER_ADDR"], int(port), is_master=False), 0)
    os.kill(os.getpid(), signal.SIGKILL)


@contextlib.contextmanager
def parameter_server(me: Rank, backend: str) -> Iterator[Step]:
    """Pushes, pulls and rows of a table; with every 1,000th step another worker joins, pulls and leaves."""
    with ps.join(me.store, rank=me.rank, size=me.size, timeout=TIMEOUT) as kv:
        value, ids = torch.zeros(1000), torch.arange(32)
        kv.init("w", value, update=ps.reduce("max"), mode=ps.asynchronous())
        rows = ps.Embedding(kv, "rows", 8, update=ps.reduce("sum"), initial=(0.0, 0.0), mode=ps.asynchronous())

        def step(number: int) -> None:
            if number % 2:
                kv.pull("w", value)
            elif number % 16:
                kv.push("w", value)
            else:
                rows.push(ids, torch.zeros(32, 8)).wait()
                rows.pull(ids)
            if number % 1000 == 999:
                with ps.join(me.store, role="worker", group="late", timeout=TIMEOUT) as late:
                    late.pull("w", torch.empty(1000))

        yield step


# load, number of steps, host of each rank
LOADS: dict[str, tuple[Load, int, list[int]]] = {
    "calls": (calls, 10_000_000, [0, 0]),
    "calls-links": (calls, 500_000, [0, 0, 1, 1]),
    "groups": (groups, 50_000, [0, 0]),
    "groups-links": (groups, 2_000, [0, 1]),
    "worlds": (worlds, 50_000, [0, 0]),
    "worlds-links": (worlds, 2_000, [0, 1]),
    "worlds-64-ranks": (worlds, 50, [rank // 8 for rank in range(64)]),
    "views": (views, 2_000, [0, 0]),
    "views-links": (views, 1_000, [0, 1]),
    "parameter-server": (parameter_server, 1_000_000, [0, 0]),
    "parameter-server-links": (parameter_server, 200_000, [0, 1]),
}

# what is measured


class _Mallinfo(ctypes.Structure):
    names = "arena ordblks smblks hblks hblkhd usmblks fsmblks uordblks fordblks keepcost"
    _fields_ = [(name, ctypes.c_size_t) for name in names.split()]


def held(store: dist.Store) -> dict[str, float]:
    """What this process has now."""
    gc.collect()
    rollup = dict(line.split(":") for line in Path("/proc/self/smaps_rollup").read_text().splitlines()[1:])
    mallinfo = ctypes.CDLL(None).mallinfo2
    mallinfo.restype = _Mallinfo
    heap = mallinfo()
    return {
        "RSS MB": int(rollup["Rss"].split()[0]) / 1024,
        "PSS MB": int(rollup["Pss"].split()[0]) / 1024,
        "heap KB": (heap.uordblks + heap.hblkhd) / 1024,
        "blocks": sys.getallocatedblocks(),
        "descriptors": len(os.listdir("/proc/self/fd")),
        "threads": len(os.listdir("/proc/self/task")),
        "zombies": sum(child.status() == psutil.STATUS_ZOMBIE for child in psutil.Process().children()),
        "/dev/shm": len(os.listdir("/dev/shm")),
        "keys": store.num_keys(),
    }


def repeated(me: Rank, name: str, count: int, backend: str) -> list[dict[str, float]]:
    """Repeats the load's step so often, and returns what this rank had after each tenth."""
    found = []
    warnings.simplefilter("ignore", FutureWarning)  # torch has new names for calls that older versions do not know
    with LOADS[name][0](me, backend) as step:
        for tenth in range(TENTHS):
            me.meet(f"tenth {tenth}")
            start, cpu = time.perf_counter(), time.process_time()
            for number in range(tenth * count, (tenth + 1) * count):
                step(number)
            took, cpu = (time.perf_counter() - start) / count, (time.process_time() - cpu) / count
            me.meet(f"measured {tenth}")
            found.append({"us a step": took * 1e6, "CPU us": cpu * 1e6, **held(me.store)})
            if me.rank == 0:
                print(f"# {name} {tenth + 1}/{TENTHS}: {harness.words(found[-1])}", file=sys.stderr, flush=True)
    return found


def cell(ranks: list[list[dict[str, float]]], what: str, steps: int) -> str:
    """The measure at the first tenth and at the last, on the rank where it grew most."""
    first, last = max(((rank[0][what], rank[-1][what]) for rank in ranks), key=lambda ends: ends[1] - ends[0])
    shown = [format(each, ".0f" if each >= 1e4 else ".4g") for each in (first, last)]
    return f"{shown[0]} > {shown[1]} ({1000 * (last - first) / steps:+.2g})" if first != last else shown[1]


def soak(scale: float = 1.0, only: tuple[str, ...] = (), backend: str = "ringreduce") -> Iterator[dict[str, Any]]:
    if why := unavailable():
        raise harness.CannotRun(why)
    importlib.import_module("conftest")
    for name in only or LOADS:
        _, count, hosts = LOADS[name]
        tenth = max(1, round(count * scale / TENTHS))
        with Network(hosts=max(hosts) + 1) as network:
            ranks = run(network, hosts, repeated, name, tenth, backend, timeout=TIMEOUT)
        cells = {what: cell(ranks, what, tenth * (TENTHS - 1)) for what in ranks[0][0]}
        yield {"load": name, "ranks": len(hosts), "steps": TENTHS * tenth, **cells, "all": ranks}


if __name__ == "__main__":
    sys.exit(harness.main(soak))
