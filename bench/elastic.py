"""From kill -9 to the first completed collective of the survivors, next to Gloo with a new group.

    python bench/elastic.py                      2, 4 and 8 ranks on this machine, 20 kills of each, in turns
    python bench/elastic.py --ranks 4 --kills 100 --json elastic.json

A rank is killed while all are inside all_reduces without end. `shrink`: the survivors call `ringreduce.agree` and
`dist.shrink_group`. `elastic`: they are members of a world of `ringreduce.elastic`. `gloo`: they destroy their group
and make one of those who are left, told which these are, by the store that the first was made with. `torchft` and
`torchft-gloo`, where torchft is installed: the process groups for its Manager, ours and its own, configured again in
the same way. All times are from the kill to the end of the first all_reduce of 4 KB on the slowest survivor.
"""

from __future__ import annotations

import argparse
import contextlib
import gc
import json
import multiprocessing
import os
import signal
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

import ringreduce
from ringreduce import elastic

WAYS = ("shrink", "elastic", "gloo")
OPTIONAL = ("torchft", "torchft-gloo")
TIMEOUT = timedelta(seconds=60)
ELEMENTS = 1000


def measure(ranks: int, way: str, victim: int) -> float:
    """Seconds from the kill of rank `victim` to the first collective of the slowest survivor."""
    context = multiprocessing.get_context("fork")
    pipes: list[Connection] = []
    processes = []
    for rank in range(ranks):
        ours, theirs = context.Pipe()
        process = context.Process(target=_rank, args=(rank, ranks, way, victim, theirs))
        process.start()
        theirs.close()
        pipes.append(ours)
        processes.append(process)
    store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)  # its threads must not be forked
    for pipe in pipes:
        pipe.send(store.port)
    for pipe in pipes:
        pipe.recv()
    time.sleep(0.05)
    began = time.monotonic()
    os.kill(processes[victim].pid or 0, signal.SIGKILL)
    ends = [pipe.recv() for rank, pipe in enumerate(pipes) if rank != victim]
    for process in processes:
        process.join()
    return max(ends) - began


def _rank(rank: int, ranks: int, way: str, victim: int, pipe: Connection) -> None:
    torch.set_num_threads(1)
    os.environ.setdefault("TORCH_FR_DUMP_TEMP_FILE", f"{tempfile.gettempdir()}/bench_elastic_")
    os.dup2(os.open(os.devnull, os.O_WRONLY), 2)  # the log of groups that break
    port = pipe.recv()
    if way in OPTIONAL:
        return _configured_again(rank, ranks, way, victim, port, pipe)
    store = dist.TCPStore("127.0.0.1", port, is_master=False)
    tensor = torch.ones(ELEMENTS)
    if way == "elastic":
        world = elastic.start(store=store, rank=rank, world_size=ranks, timeout=TIMEOUT)
        world.attempt(lambda: dist.all_reduce(tensor))
        pipe.send("ready")

        def one() -> None:
            nonlocal calls
            dist.all_reduce(tensor)
            if world.epoch > 0 and not calls:
                calls.append(time.monotonic())

        calls: list[float] = []
        while not calls:
            world.attempt(one)
        pipe.send(calls[0])
        dist.barrier()
        world.leave()
        return
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


def _configured_again(rank: int, ranks: int, way: str, victim: int, port: int, pipe: Connection) -> None:
    from torchft.process_group import ProcessGroupGloo

    from ringreduce.torchft import ProcessGroupRingReduce

    group = (ProcessGroupRingReduce if way == "torchft" else ProcessGroupGloo)(timeout=TIMEOUT)
    group.configure(f"127.0.0.1:{port}/first", "0", rank, ranks)
    tensor = torch.ones(ELEMENTS)
    group.allreduce([tensor], dist.AllreduceOptions()).wait()
    pipe.send("ready")
    with contextlib.suppress(RuntimeError):
        while True:
            group.allreduce([tensor], dist.AllreduceOptions()).wait()
    survivors = [each for each in range(ranks) if each != victim]
    group.configure(f"127.0.0.1:{port}/again", "0", survivors.index(rank), len(survivors))
    result = torch.ones(ELEMENTS)
    group.allreduce([result], dist.AllreduceOptions()).wait()
    pipe.send(time.monotonic())
    if result[0] != ranks - 1:
        raise ValueError(f"the sum is {result[0]}")
    group.barrier(dist.BarrierOptions()).wait()
    group.shutdown()


def main() -> int:
    summary, details = (__doc__ or "").split("\n\n", 1)
    parser = argparse.ArgumentParser(description=summary, epilog=details, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--ranks", type=int, nargs="+", default=[2, 4, 8])
    parser.add_argument("--kills", type=int, default=20)
    parser.add_argument("--ways", nargs="+", default=list(WAYS), choices=WAYS + OPTIONAL)
    parser.add_argument("--json", type=Path, help="file for the report")
    args = parser.parse_args()
    measure(2, "shrink", 1)  # after which the machine is probed, and all is compiled
    gc.collect()
    gc.freeze()
    rows: list[dict[str, Any]] = []
    table = Table(title="from a kill to the first collective of the survivors, ms")
    for column in ("ranks", "way", "median", "p90", "worst", "over gloo"):
        table.add_column(column, justify="right")
    for ranks in args.ranks:
        took: dict[str, list[float]] = {way: [] for way in args.ways}
        for kill in range(args.kills):
            for way in args.ways:
                took[way].append(measure(ranks, way, kill % ranks))
        for way, times in took.items():
            times.sort()
            row = {"ranks": ranks, "way": way, "seconds": times, "median": statistics.median(times)}
            rows.append(row)
            p90 = times[min(len(times) - 1, int(0.9 * len(times)))]
            ratio = statistics.median(took["gloo"]) / row["median"] if "gloo" in took else float("nan")
            cells = [f"{1e3 * each:.1f}" for each in (row["median"], p90, times[-1])]
            table.add_row(str(ranks), way, *cells, f"{ratio:.2f}x")
            print(ranks, way, cells, file=sys.stderr, flush=True)
    Console(width=100).print(table)
    if args.json:
        args.json.write_text(json.dumps({"header": harness.origin("elastic"), "rows": rows}, indent=1) + "\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
