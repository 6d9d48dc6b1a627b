"""What readers cost the workers they follow: steps of push_pull with readers that act and with the same readers idle.

    python bench/parameter_server_readers.py                          2 workers, 4 MB; 1 and 8 readers
    python bench/parameter_server_readers.py --readers 4 --rate 500

Every worker is a server too, and trains with AdamW in `sync`, as fast as it can. A reader has a model that follows the
workers (`at_most_behind=1`) and calls it `--rate` times a second, as an actor would; the call first copies the latest
round if the reader is more than one round behind. Laps with acting and with idle readers alternate; all figures are
medians of laps. A row says how long a step took in both, how often all readers together copied a round, how much of
one core they used for it, and by how many rounds at most a reader's model was behind when its forward pass began.

Readers take nothing of the servers' time, but with fewer cores than processes they take turns with the workers on the
cores, and push the workers' values out of the caches. In `sync` both workers wait for the one whose core a reader has.
Exit code: 0, or 1 if a reader saw parts of two rounds.
"""

import argparse
import os
import statistics
import sys
import time
from typing import NamedTuple

import harness
import torch
import torch.distributed as dist
from parameter_server import bytes_of
from rich.console import Console
from rich.table import Table
from torch import nn

import ringreduce.parameter_server as ps

WORKERS = 2


class Lap(NamedTuple):
    step: float = 0.0  # seconds
    copies: float = 0.0  # of rounds, a second
    cores: float = 0.0  # that readers used
    behind: int = 0  # rounds, at most


class Policy(nn.Module):
    """Its forward pass costs nothing, so what a reader takes is what following takes."""

    def __init__(self, count: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.zeros(count))

    def forward(self) -> torch.Tensor:
        return self.weight[:1]


def measure(size: int, rate: float, seconds: float, laps: int) -> tuple[list[Lap], list[Lap]]:
    """Laps with idle readers, and with acting ones."""
    torch.set_num_threads(1)
    store, rank, count = dist.distributed_c10d._get_default_store(), dist.get_rank(), size // 4
    idle: list[Lap] = []
    acting: list[Lap] = []
    if rank < WORKERS:
        kv = ps.join(store, rank=rank, size=WORKERS, window=4 * size + (64 << 20))
        kv.init("weight", torch.zeros(count), update=ps.optimizer(torch.optim.AdamW, lr=1e-3))
        gradient, w = torch.ones(count), torch.empty(count)
        step = lambda: kv.push_pull("weight", gradient, out=w).wait()  # noqa: E731
        step()
    dist.barrier()
    if rank >= WORKERS:
        kv = ps.join(store, role="reader")
        follower = kv.follow(policy := Policy(count), at_most_behind=1)
    done, steps = 1, 10
    for lap in range(-2, 2 * laps):  # the first two are thrown away
        dist.barrier()
        begin, mine = time.perf_counter(), Lap()
        if rank < WORKERS:
            for _ in range(steps):
                step()
            mine = Lap(step=(time.perf_counter() - begin) / steps)
        elif lap % 2:
            mine = act(follower, policy, done + steps, rate)
        done += steps
        alike = torch.tensor(mine, dtype=torch.float64)
        most = alike.clone()
        dist.all_reduce(alike)
        dist.all_reduce(most, dist.ReduceOp.MAX)
        found = Lap(float(most[0]), float(alike[1]), float(alike[2]), int(most[3]))
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
            some = policy.weight[::4096]
            if not (some == some[0]).all():
                raise ValueError(f"round {follower.version} is made of two")
        behind = max(behind, follower.behind()) if follower.version == before else behind
        due += 1 / rate
        time.sleep(max(0.0, due - time.perf_counter()))
    took = time.perf_counter() - begin
    return Lap(copies=copies / took, cores=(time.process_time() - used) / took, behind=behind)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--readers", type=int, nargs="+", default=[1, 8])
    parser.add_argument("--size", default="4M", help="of the parameters (default 4M)")
    parser.add_argument(
        "--rate", type=float, default=100.0, help="forward passes a second of each reader (default 100)"
    )
    parser.add_argument("--seconds", type=float, default=1.0, help="of a lap (default 1)")
    parser.add_argument("--laps", type=int, default=5)
    args = parser.parse_args()
    cores = len(os.sched_getaffinity(0))
    table = Table(title=f"{WORKERS} workers, {args.size}, {cores} cores; readers act {args.rate:g} times a second")
    for column in ("readers", "step, idle", "step", "times", "copies", "core", "behind"):
        table.add_column(column, justify="right")
    for readers in args.readers:
        laps = harness.start_ranks(WORKERS + readers, measure, bytes_of(args.size), args.rate, args.seconds, args.laps)
        idle, acting = (Lap(*map(statistics.median, zip(*each, strict=True))) for each in laps)
        table.add_row(
            str(readers),
            f"{1e3 * idle.step:.2f} ms",
            f"{1e3 * acting.step:.2f} ms",
            f"{acting.step / idle.step:.2f}",
            f"{acting.copies:.0f}/s",
            f"{acting.cores:.2f}",
            f"{max(each.behind for each in laps[1]):.0f}",
        )
    Console(width=110).print(table)
    return 0


if __name__ == "__main__":
    sys.exit(main())
