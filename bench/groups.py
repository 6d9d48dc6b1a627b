"""How long it takes to make a group, next to Gloo, in ranks forked from a process that has loaded torch.

    python bench/groups.py                          2, 8, 16, 32 and 64 ranks, 5 rounds of each
    python bench/groups.py --ranks 128 --rounds 1
    python bench/groups.py --json groups.json

`first`: from init_process_group to the end of the first all_reduce, of 8 bytes. `new_group`: the same for
dist.new_group of all ranks in a group that is there, the median of 5. Both count until the slowest rank is done; `cpu`
is what a rank takes for the first, on average. The backends take turns; the table has medians of the rounds.
"""

from __future__ import annotations

import argparse
import gc
import multiprocessing
import os
import statistics
import sys
import tempfile
import time
from datetime import timedelta
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import harness
import torch
import torch.distributed as dist
from rich.console import Console
from rich.table import Table

BACKENDS = ("ringreduce", "gloo")
NEW_GROUPS = 5
TIMEOUT = timedelta(minutes=10)
COLUMNS = ("first", "cpu", "new_group")

Times = dict[str, float]
"""Seconds, by the names of COLUMNS."""


def measure(ranks: int, backend: str) -> Times:
    """The times of one group of fresh processes."""
    context = multiprocessing.get_context("fork")
    pipes, processes = [], []
    hold, start = os.pipe()
    for rank in range(ranks):
        ours, theirs = context.Pipe()
        process = context.Process(target=_rank, args=(rank, ranks, backend, hold, start, theirs))
        process.start()
        theirs.close()
        pipes.append(ours)
        processes.append(process)
    store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)  # its threads must not be forked
    for pipe in pipes:  # one by one, since of many at once some are refused, and try again after 5 s
        pipe.send(store.port)
        pipe.recv()
    begin = time.monotonic()
    os.close(start)
    os.close(hold)
    found = [pipe.recv() for pipe in pipes]
    for process in processes:
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


def compare(ranks: int, backends: list[str], rounds: int) -> dict[str, Any]:
    """The medians of so many rounds, by backend, and the rounds."""
    found = [{backend: measure(ranks, backend) for backend in backends} for _ in range(rounds)]
    row: dict[str, Any] = {"ranks": ranks, "rounds": found}
    for backend in backends:
        row[backend] = {column: statistics.median(each[backend][column] for each in found) for column in COLUMNS}
    print(cells(row, backends), file=sys.stderr, flush=True)
    return row


def cells(row: dict[str, Any], backends: list[str]) -> list[str]:
    return [str(row["ranks"]), *(f"{1e3 * row[backend][column]:.3g}" for backend in backends for column in COLUMNS)]


def main() -> int:
    summary, details = (__doc__ or "").split("\n\n", 1)
    parser = argparse.ArgumentParser(description=summary, epilog=details, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--ranks", type=int, nargs="+", default=[2, 8, 16, 32, 64])
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--backends", nargs="+", default=list(BACKENDS), choices=BACKENDS)
    parser.add_argument("--json", type=Path, help="file for the report")
    args = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:  # so that no rank compiles Python, wherever this runs
        sys.pycache_prefix, sys.dont_write_bytecode = folder, False
        for ranks in (1, 2):
            measure(ranks, "ringreduce")  # after which the machine is probed, too
        gc.collect()
        gc.freeze()  # else a rank's first full collection, whenever it comes, writes to all that torch has made: 0.1 s
        rows = [compare(ranks, args.backends, args.rounds) for ranks in args.ranks]
    table = Table(title="making a group and its first all_reduce, ms")
    for column in ("ranks", *(f"{column}, {backend}" for backend in args.backends for column in COLUMNS)):
        table.add_column(column, justify="right")
    for row in rows:
        table.add_row(*cells(row, args.backends))
    Console(width=140).print(table)
    if args.json:
        harness.save(args.json, {"header": harness.origin("groups"), "rows": rows})
    return 0


if __name__ == "__main__":
    sys.exit(main())
