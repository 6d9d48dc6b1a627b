"""Measures what a changing group costs while nothing fails, next to a plain group.

    python bench/elastic_cost.py                        2, 4 and 8 ranks on this machine
    python bench/elastic_cost.py --ranks 2 --rounds 51

Each row compares two calls, which take turns in the same processes. `commit` is `world.commit()` next to an
all_reduce of 8 bytes. `attempt` is a `world.attempt` of that all_reduce, which includes a commit. The other rows are
an all_reduce in the group of a world, next to the same in a plain group of these ranks. The ratio is the first time
divided by the second, the median over the rounds.
"""

from __future__ import annotations

import argparse
import multiprocessing
import os
import statistics
import sys
import time
from collections.abc import Callable
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import harness
import torch
import torch.distributed as dist
from rich.console import Console
from rich.table import Table

from ringreduce import elastic
from ringreduce.common.units import bytes_text

SIZES = (8, 64 << 10, 1 << 20, 16 << 20, 64 << 20)
SECONDS = 0.02
"""About how long one of the two calls is repeated in a round."""


def _rank(rank: int, ranks: int, rounds: int, pipe: Connection) -> None:
    torch.set_num_threads(1)
    os.dup2(os.open(os.devnull, os.O_WRONLY), 2)  # warnings of stragglers, which a busy machine has
    store = dist.TCPStore("127.0.0.1", pipe.recv(), is_master=False)
    world = elastic.start(store=store, rank=rank, world_size=ranks)
    plain = dist.new_group()
    small = torch.zeros(1, dtype=torch.int64)
    found: list[tuple[str, list[float], list[float]]] = []

    def compare(name: str, one: Callable[[], Any], other: Callable[[], Any]) -> None:
        """Measures both calls in turns, and adds their seconds per call, round by round, to `found`."""
        for each in (one, other):
            each()
        calls = torch.tensor([max(1, int(SECONDS / _timed(one, 3)))])
        dist.broadcast(calls, 0)
        times: tuple[list[float], list[float]] = ([], [])
        for turn in range(rounds):
            for which in (0, 1) if turn % 2 else (1, 0):
                dist.barrier()
                times[which].append(_timed((one, other)[which], int(calls)))
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


def _timed(function: Callable[[], Any], calls: int) -> float:
    began = time.perf_counter()
    for _ in range(calls):
        function()
    return (time.perf_counter() - began) / calls


def measure(ranks: int, rounds: int) -> list[tuple[str, list[float], list[float]]]:
    context = multiprocessing.get_context("fork")
    pipes, processes = [], []
    for rank in range(ranks):
        ours, theirs = context.Pipe()
        process = context.Process(target=_rank, args=(rank, ranks, rounds, theirs))
        process.start()
        pipes.append(ours)
        processes.append(process)
    store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)  # its threads must not be forked
    for pipe in pipes:
        pipe.send(store.port)
    found: list[tuple[str, list[float], list[float]]] = pipes[0].recv()
    for process in processes:
        process.join()
    return found


def main() -> int:
    summary, details = (__doc__ or "").split("\n\n", 1)
    parser = argparse.ArgumentParser(description=summary, epilog=details, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--ranks", type=int, nargs="+", default=[2, 4, 8], help="sizes of the world")
    parser.add_argument("--rounds", type=int, default=21, help="how often each pair of calls is measured")
    parser.add_argument("--json", type=Path, help="the file to write the report to")
    args = parser.parse_args()
    rows: list[dict[str, Any]] = []
    table = Table(title="us a call, medians")
    for column in ("ranks", "what", "first", "second", "ratio"):
        table.add_column(column, justify="right")
    for ranks in args.ranks:
        for name, one, other in measure(ranks, args.rounds):
            ratio = statistics.median(a / b for a, b in zip(one, other, strict=True))
            rows.append({"ranks": ranks, "what": name, "seconds": [one, other], "ratio": ratio})
            cells = [f"{1e6 * statistics.median(each):.1f}" for each in (one, other)]
            table.add_row(str(ranks), name, *cells, f"{ratio:.2f}")
    Console(width=110).print(table)
    if args.json:
        harness.save(args.json, {"header": harness.origin("elastic_cost"), "rows": rows})
    return 0


if __name__ == "__main__":
    sys.exit(main())
