"""How long it takes to make a group, next to Gloo, in ranks forked from a process that has loaded torch.

    python bench/groups.py                          2, 8, 16, 32 and 64 ranks, 5 rounds of each
    python bench/groups.py --ranks 128 --rounds 1
    python bench/groups.py --json groups.json

`first`: from init_process_group to the end of the first all_reduce, of 8 bytes. `new_group`: the same for
dist.new_group of all ranks in a group that is there, the median of 5. Both count until the slowest rank is done; `cpu`
is what a rank takes for the first, on average. The backends take turns; the table has medians of the rounds.
"""

from __future__ import annotations

import gc
import os
import statistics
import sys
import tempfile
import time
from collections.abc import Iterator
from datetime import timedelta
from multiprocessing.connection import Connection
from typing import Any

import harness
import torch
import torch.distributed as dist

BACKENDS = ("ringreduce", "gloo")
NEW_GROUPS = 5
TIMEOUT = timedelta(minutes=10)
COLUMNS = ("first", "cpu", "new_group")

Times = dict[str, float]
"""Seconds, by the names of COLUMNS."""


def measure(ranks: int, backend: str) -> Times:
    """The times of one group of fresh processes."""
    hold, start = os.pipe()
    started = [harness.forked(_rank, rank, ranks, backend, hold, start) for rank in range(ranks)]
    store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)  # its threads must not be forked
    for _, pipe in started:  # one by one, since of many at once some are refused, and try again after 5 s
        pipe.send(store.port)
        pipe.recv()
    begin = time.monotonic()
    os.close(start)
    os.close(hold)
    found = [pipe.recv() for _, pipe in started]
    for process, _ in started:
        process.join()
    new_groups = [max(rank["new_group"][number] for rank in found) for number in range(NEW_GROUPS)]
    return {
        "first": max(rank["end"] for rank in found) - begin,
        "cpu": statistics.mean(rank["cpu"] for rank in found),
        "new_group": statistics.median(new_groups),
    }


def _rank(rank: int, ranks: int, backend: str, hold: int, start: int, pipe: Connection) -> None:
    torch.set_num_threads(1)
    os.close(start)
    store = dist.TCPStore("127.0.0.1", pipe.recv(), is_master=False)
    pipe.send("ready")
    os.read(hold, 1)  # returns when the parent has closed the other end
    cpu = time.process_time()
    dist.init_process_group(backend, store=store, rank=rank, world_size=ranks, timeout=TIMEOUT)
    _all_reduce(dist.group.WORLD, rank, ranks)
    end, cpu = time.monotonic(), time.process_time() - cpu
    took = []
    for _ in range(NEW_GROUPS):
        dist.barrier()
        before = time.perf_counter()
        _all_reduce(dist.new_group(), rank, ranks)
        took.append(time.perf_counter() - before)
    pipe.send({"end": end, "cpu": cpu, "new_group": took})
    dist.barrier()
    dist.destroy_process_group()


def _all_reduce(group: dist.ProcessGroup | None, rank: int, ranks: int) -> None:
    tensor = torch.tensor([rank, 1.0])
    dist.all_reduce(tensor, group=group)
    if tensor.tolist() != [ranks * (ranks - 1) / 2, ranks]:
        raise ValueError(f"rank {rank}: the sum is {tensor.tolist()}")


def groups(ranks: tuple[int, ...] = (2, 8, 16, 32, 64), rounds: int = 5) -> Iterator[dict[str, Any]]:
    with tempfile.TemporaryDirectory() as folder:  # so that no rank compiles Python, wherever this runs
        sys.pycache_prefix, sys.dont_write_bytecode = folder, False
        for count in (1, 2):
            measure(count, "ringreduce")  # after which the machine is probed, too
        gc.collect()
        gc.freeze()  # else a rank's first full collection, whenever it comes, writes to all that torch has made: 0.1 s
        for count in ranks:
            found = [{backend: measure(count, backend) for backend in BACKENDS} for _ in range(rounds)]
            row: dict[str, Any] = {"ranks": count, "rounds": found}
            for backend in BACKENDS:
                for column in COLUMNS:
                    row[f"{column}, {backend}, ms"] = 1e3 * statistics.median(each[backend][column] for each in found)
            yield row


if __name__ == "__main__":
    sys.exit(harness.main(groups))
