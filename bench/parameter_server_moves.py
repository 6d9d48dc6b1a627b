"""Servers that come and go while workers train, between hosts: how the time of a step follows. Needs root.

    python bench/parameter_server_moves.py                        4 workers, 4 servers on 2, 3, 4, 3, 2 hosts

Every process is alone on a host (a network namespace) with a line of --rate in each direction. Two processes begin with
two servers each, and with each other's backups. Two more join, one after the other, and leave again by `give_away`.
The workers push and pull without a pause; every push adds 1, so the value tells whether a push was lost or applied
twice. A row is one phase: on how many hosts servers are, the median time of a step then, what the busiest line needs
for that (a server's host takes the pushes for its servers, and the journals of the backups that it has), and the
longest step between this phase and the next one. Exit code: 0, or 1 if a push failed, was lost or applied twice.
"""

from __future__ import annotations

import argparse
import statistics
import sys
import threading
import time
from pathlib import Path
from typing import Any

import torch
from rich.console import Console
from rich.table import Table

ROOT = Path(__file__).parent.parent
sys.path[:0] = [str(ROOT), str(ROOT / "tests")]

from net.network import Network, unavailable  # noqa: E402
from net.ranks import Rank, Ranks  # noqa: E402
from parameter_server_hosts import HEADERS, rate_of  # noqa: E402

import ringreduce.parameter_server as ps  # noqa: E402
from ringreduce.common.units import parse_bytes  # noqa: E402

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


def main() -> int:
    summary, details = (__doc__ or "").split("\n\n", 1)
    parser = argparse.ArgumentParser(description=summary, epilog=details, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--workers", type=int, default=4)
    parser.add_argument("--rate", default="100mbit")
    parser.add_argument("--size", type=parse_bytes, default=4 << 20)
    parser.add_argument("--seconds", type=float, default=10.0, help="of a phase (default 10)")
    args = parser.parse_args()
    if why := unavailable():
        parser.error(why)
    total = PROCESSES + args.workers
    moments, served = [time.monotonic()], []
    with (
        Network(total, rate=args.rate) as network,
        Ranks(network, list(range(total)), take_part, args.workers, args.size, timeout=120) as ranks,
    ):
        ranks.reports(but=range(PROCESSES))
        comes = list(range(FOUNDERS, PROCESSES))
        for rank in (*comes, *reversed(comes)):
            time.sleep(args.seconds)
            moments.append(time.monotonic())
            ranks._pipes[rank].send("come, or go")
            served += ranks.reports(but=[other for other in range(total) if other != rank])
            moments.append(time.monotonic())
        time.sleep(args.seconds)
        moments.append(time.monotonic())
        for pipe in ranks._pipes[PROCESSES:]:
            pipe.send("end")
        results = ranks.results()[PROCESSES:]
    print(f"the two that joined served {served[0]} and {served[1]} of the {SERVERS} servers")
    table = Table(title=f"{args.workers} workers, {args.size} bytes, lines of {args.rate}; a step, ms")
    for column in ("hosts", "median", "line", "then the longest"):
        table.add_column(column, justify="right")
    every = [step for steps, _ in results for step in steps]
    for phase, hosts in enumerate((2, 3, 4, 3, 2)):
        begin, end = moments[2 * phase], moments[2 * phase + 1]
        inside = [after - before for before, after in every if begin < before and after < end]
        until = moments[2 * phase + 2] if phase < 4 else end
        beside = [after - before for before, after in every if before < until and after > end]
        most = -(-SERVERS // hosts) / SERVERS
        line = 2 * most * args.workers * args.size * HEADERS / rate_of(args.rate)
        longest = f"{1e3 * max(beside):.0f}" if phase < 4 and beside else ""
        table.add_row(str(hosts), f"{1e3 * statistics.median(inside):.0f}", f"{1e3 * line:.0f}", longest)
    Console(width=80).print(table)
    pushed = args.workers * len(results[0][0])
    if any(found != (pushed, pushed) for _, found in results):
        print(f"WRONG: {pushed} pushes of 1, and the values are {[found for _, found in results]}")
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
