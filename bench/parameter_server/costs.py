"""What readers, snapshots and backups cost workers that go on."""

from __future__ import annotations

import functools
import statistics
import tempfile
import threading
import time
from collections.abc import Iterator
from multiprocessing.connection import Connection
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import nn

import ringreduce.parameter_server as ps
from bench import harness
from bench.harness import Bytes
from bench.parameter_server import join, step_of

STEPS = 5
"""Of a lap."""
FOLLOWED = 2
"""Workers, in `readers`."""


class Lap(NamedTuple):
    step: float = 0.0  # seconds
    copies: float = 0.0  # of rounds, a second
    cores: float = 0.0  # that readers used
    behind: int = 0  # rounds, at most


class Policy(nn.Module):
    """Its forward pass costs nothing, so what a reader takes is what following takes."""

    def __init__(self, count: int) -> None:
        super().__init__()
        self.w = nn.Parameter(torch.zeros(count))

    def forward(self) -> torch.Tensor:
        return self.w[:1]


def read_along(size: int, rate: float, seconds: float, laps: int) -> tuple[list[Lap], list[Lap]]:
    """Laps with idle readers, and with acting ones."""
    works = dist.get_rank() < FOLLOWED
    idle: list[Lap] = []
    acting: list[Lap] = []
    store = dist.distributed_c10d._get_default_store()
    if works:
        kv = ps.join(store, rank=dist.get_rank(), size=FOLLOWED, window=4 * size + (64 << 20))
        step = step_of(kv, size)
        step()
    dist.barrier()
    if not works:
        kv = ps.join(store, role="reader")
        follower = kv.follow(policy := Policy(size // 4), at_most_behind=1)
    done, steps = 1, 10
    for lap in range(-2, 2 * laps):  # the first two are thrown away
        dist.barrier()
        begin, mine = time.perf_counter(), Lap()
        if works:
            for _ in range(steps):
                step()
            mine = Lap(step=(time.perf_counter() - begin) / steps)
        elif lap % 2:
            mine = act(follower, policy, done + steps, rate)
        done += steps
        total = torch.tensor(mine, dtype=torch.float64)
        most = total.clone()
        dist.all_reduce(total)
        dist.all_reduce(most, dist.ReduceOp.MAX)
        found = Lap(float(most[0]), float(total[1]), float(total[2]), int(most[3]))
        if lap < 0:
            steps = max(3, int(seconds / found.step))
        else:
            (acting if lap % 2 else idle).append(found)
    kv.leave()
    dist.barrier()
    return idle, acting


def act(follower: ps.Follower, policy: Policy, last: int, rate: float) -> Lap:
    """Until the workers have ended round `last`."""
    begin, used, copies, behind = time.perf_counter(), time.process_time(), 0, 0
    due = begin
    while follower.version + follower.behind() < last:
        before = follower.version
        policy()
        if follower.version != before:
            copies += 1
            some = policy.w[::4096]
            if not (some == some[0]).all():
                raise ValueError(f"round {follower.version} is made of two")
        behind = max(behind, follower.behind()) if follower.version == before else behind
        due += 1 / rate
        time.sleep(max(0.0, due - time.perf_counter()))
    took = time.perf_counter() - begin
    return Lap(copies=copies / took, cores=(time.process_time() - used) / took, behind=behind)


def readers(
    readers: tuple[int, ...] = (1, 8),
    size: Bytes = 4 << 20,
    rate: float = 100.0,
    seconds: float = 1.0,
    laps: int = 5,
) -> Iterator[dict[str, Any]]:
    """What readers cost the two workers they follow: steps with readers that act and with the same readers idle.

    Every worker is a server too, and trains --size bytes with AdamW in `sync`, as fast as it can. A reader has a model
    that follows the workers (`at_most_behind=1`) and calls it --rate times a second, as an actor would; the call first
    copies the latest round if the reader is more than one round behind. Laps of --seconds with acting and with idle
    readers alternate; all figures are medians of laps. A row says how long a step took in both, how often a second all
    readers together copied a round, how much of one core they used for it, and by how many rounds at most a reader's
    model was behind when its forward pass began.

    Readers take nothing of the servers' time, but with fewer cores than processes they take turns with the workers on
    the cores, and push the workers' values out of the caches. In `sync` both workers wait for the one whose core a
    reader has. It fails if a reader saw parts of two rounds.
    """
    for count in readers:
        both = harness.start_ranks(FOLLOWED + count, read_along, size, rate, seconds, laps)
        idle, acting = (Lap(*map(statistics.median, zip(*each, strict=True))) for each in both)
        yield {
            "readers": count,
            "idle, ms": 1e3 * idle.step,
            "acting, ms": 1e3 * acting.step,
            "times": acting.step / idle.step,
            "copies/s": acting.copies,
            "cores": acting.cores,
            "behind": max(each.behind for each in both[1]),
        }


def save_along(size: int, folder: str, laps: int) -> tuple[list[float], list[float], list[float]]:
    """Seconds: a step of each lap, every step beside a snapshot, and until each snapshot was there."""
    quiet: list[float] = []
    busy: list[float] = []
    written: list[float] = []
    with join(size) as kv:
        step = step_of(kv, size)
        step()
        for lap in range(laps):
            quiet.append(harness.own_seconds(step, STEPS))
            saving = kv.snapshot(f"{folder}/{lap}") if dist.get_rank() == 0 else None
            asked, done = time.perf_counter(), torch.zeros(1)
            while not done:
                busy.append(harness.own_seconds(step, 1))
                done[0] = saving is not None and saving.done()
                if done:
                    written.append(time.perf_counter() - asked)
                dist.broadcast(done, 0)
        kv.barrier()
    return quiet, busy, written


def snapshots(workers: int = 2, size: Bytes = 64 << 20, laps: int = 7) -> Iterator[dict[str, Any]]:
    """What a snapshot costs workers that go on: steps of push_pull with and without one under way.

    --size bytes of parameters with AdamW, in sync. Laps alternate; a lap with a snapshot begins with it and has as many
    steps as fit in the time that it takes, at least one. Snapshots go to a temporary folder. "longest" is the
    step that copies most; "there after" is when the snapshot was complete.
    """
    with tempfile.TemporaryDirectory() as place:
        quiet, busy, written = harness.start_ranks(workers, save_along, size, place, laps)
    step = statistics.median(quiet)
    yield {
        "workers": workers,
        "bytes": size,
        "step, ms": 1e3 * step,
        "beside a snapshot, ms": 1e3 * statistics.median(busy),
        "times": statistics.median(busy) / step,
        "mean times": statistics.fmean(busy) / step,
        "longest, times": max(busy) / step,
        "there after, ms": 1e3 * statistics.median(written),
    }


def back_up_along(size: int, laps: int) -> tuple[list[float], list[float]]:
    """Seconds of a step without and with backups, by lap."""
    found: tuple[list[float], list[float]] = ([], [])
    kvs = [join(size, name=f"with {n}", backups=n, memory=8 * size + (1 << 20)) for n in (0, 1)]
    steps = [step_of(kv, size) for kv in kvs]
    for lap in range(laps + 1):
        for kv, step, times in zip(kvs, steps, found, strict=True):
            kv.barrier()
            took = harness.own_seconds(step, STEPS)
            if lap > 0:  # the first touches memory
                times.append(took)
    for kv in kvs:
        kv.barrier()
        kv.leave()
    return found


def backups(workers: int = 2, size: Bytes = 64 << 20, laps: int = 9) -> Iterator[dict[str, Any]]:
    """What a backup costs: steps of push_pull with backups=1 and without, by turns, in groups of their own.

    --size bytes of parameters with AdamW, in sync; every rank is a worker and a server. Medians of --laps laps.
    """
    alone, backed = harness.start_ranks(workers, back_up_along, size, laps)
    yield {
        "workers": workers,
        "bytes": size,
        "step, ms": 1e3 * statistics.median(alone),
        "with a backup, ms": 1e3 * statistics.median(backed),
        "times": statistics.median(b / a for a, b in zip(alone, backed, strict=True)),
    }


def late(size: Bytes = 64 << 20) -> Iterator[dict[str, Any]]:
    """A server with --size bytes of parameters and AdamW's states gets a backup while it is pushed to.

    The longest push and pull until then, beside the median of those before and of the last two.
    """
    with tempfile.TemporaryDirectory() as folder:
        store = dist.FileStore(f"{folder}/store", -1)
        serving = ps.serve(store, rank=0, size=1, memory=8 * size + (1 << 20), window=2 * size)
        with ps.join(store, role="worker", window=2 * size) as kv:
            step = step_of(kv, size)
            other, pipe = harness.forked(_hold, folder)
            pipe.recv()
            timed = functools.partial(harness.own_seconds, step, 1)
            before = statistics.median([timed() for _ in range(10)][2:])
            processes = serving._local.manager._directory.processes()
            arguments = (0, processes[max(processes)], 60.0)
            thread = threading.Thread(target=serving._local.have_backup, args=arguments)
            thread.start()
            times: list[float] = []
            while thread.is_alive() or len(times) < 5:
                times.append(timed())
            pipe.send("end")
            other.join()
        serving.close()
    yield {
        "bytes": size,
        "before, ms": 1e3 * before,
        "longest while it starts, ms": 1e3 * max(times),
        "with it, ms": 1e3 * statistics.median(times[-2:]),
    }


def _hold(folder: str, pipe: Connection) -> None:
    with ps.serve(dist.FileStore(f"{folder}/store", -1), joins=True):
        pipe.send("is there")
        pipe.recv()
