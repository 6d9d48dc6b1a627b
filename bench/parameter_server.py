"""A synchronous training step's exchange and update: through the parameter server, and by what one would use instead.

    python bench/parameter_server.py                       2 workers; 4 KB, 1 MB and 64 MB; SGD with momentum
    python bench/parameter_server.py --workers 4 --optimizer AdamW --sizes 64M --json results.json
    python bench/parameter_server.py --peers all --setup-only     other libraries, installed beside this file, once
    python bench/parameter_server.py --peers all --sizes 64M

Milliseconds per step on the slowest worker, each way in the same run and in turn; medians. In brackets: the time over
that of push_pull.

    push_pull    kv.push_pull(g, out=w).wait(): every worker is a server with its part of the blocks
    in place     the same with gradients in memory of kv.empty()
    gloo         dist.reduce to rank 0, the optimizer there, dist.broadcast, all by Gloo
    all_reduce   ringreduce.all_reduce, then the optimizer on every rank

`pull` is a pull alone, and `memcpy` a copy of as many bytes in one process. parameter_server_peers.py has the peers.
Each is started for its laps and ended after them, so that it takes no time of the others. Exit code: 0, or 1 if the
ways end with different values.
"""

import argparse
import functools
import math
import statistics
import sys
import time
from collections.abc import Callable
from pathlib import Path

import harness
import parameter_server_peers as others
import torch
import torch.distributed as dist
from parameter_server_peers import ARGUMENTS, PEERS
from rich.console import Console
from rich.table import Table

import ringreduce
import ringreduce.parameter_server as ps

WAYS = ("push_pull", "in place", "gloo", "all_reduce")
LAPS = 5


def bytes_of(text: str) -> int:
    return int(float(text.rstrip("KMG")) * {"K": 1 << 10, "M": 1 << 20, "G": 1 << 30}.get(text[-1], 1))


class Step:
    """One way to exchange and update; `w` is the result."""

    def __init__(self, way: str, kv: ps.KeyValue, ours: dist.ProcessGroup, optimizer: str, count: int) -> None:
        kind = getattr(torch.optim, optimizer)
        self.way, self.kv, self.ours, self.key = way, kv, ours, f"{way} {count}"
        self.gradient = (kv.empty(count) if way == "in place" else torch.empty(count)).fill_(dist.get_rank() + 1)
        self.w = torch.zeros(count)
        self.optimizer = kind([torch.nn.Parameter(self.w)], **ARGUMENTS[optimizer], foreach=False)
        self.sum = torch.empty(count)
        if way in ("push_pull", "in place"):
            kv.init(self.key, self.w, update=ps.optimizer(kind, **ARGUMENTS[optimizer]), mode=ps.sync(average=False))
            kv.barrier()

    def __call__(self) -> None:
        if self.way in ("push_pull", "in place"):
            self.kv.push_pull(self.key, self.gradient, out=self.w).wait()
            return
        self.sum.copy_(self.gradient)  # both collectives work in place
        if self.way == "gloo":
            dist.reduce(self.sum, 0)
        else:
            ringreduce.all_reduce(self.sum, group=self.ours)
        if self.way == "all_reduce" or dist.get_rank() == 0:
            parameter = self.optimizer.param_groups[0]["params"][0]
            parameter.grad = self.sum
            self.optimizer.step()
        if self.way == "gloo":
            dist.broadcast(self.w, 0)


def slowest(call: Callable[[], object], seconds: float) -> float:
    """Milliseconds per call on the slowest rank: the median of LAPS laps of equal numbers of calls."""
    times, found = 3, []
    for lap in range(-1, LAPS):
        dist.barrier()
        begin = time.perf_counter()
        for _ in range(times):
            call()
        worst = torch.tensor([(time.perf_counter() - begin) / times], dtype=torch.float64)
        dist.all_reduce(worst, dist.ReduceOp.MAX)
        if lap < 0:
            times = min(2000, max(2, int(seconds / float(worst))))
        else:
            found.append(1e3 * float(worst))
    return statistics.median(found)


def measure_peer(name: str, optimizer: str, count: int, seconds: float) -> float:
    """As `slowest`. Raises `ValueError` if the first three steps from zeros do not end where Gloo's do."""
    gradient, w = torch.full((count,), float(dist.get_rank() + 1)), torch.zeros(count)
    with PEERS[name](count, optimizer) as step:
        for _ in range(3):
            step(gradient, w)
        ended = float(w[0])
        expected = others.Part(1, optimizer)
        for _ in range(3):
            expected.step([torch.full((1,), float(rank + 1)) for rank in range(dist.get_world_size())])
        if not math.isclose(ended, float(expected.w), rel_tol=1e-3):
            raise ValueError(f"{name}: {ended}, torch: {float(expected.w)}")
        return slowest(functools.partial(step, gradient, w), seconds)


def measure(sizes: list[int], optimizer: str, seconds: float, peers: list[str]) -> list[dict[str, float]]:
    torch.set_num_threads(1)
    ours = dist.new_group(backend="ringreduce")
    store = dist.distributed_c10d._get_default_store()
    rows = []
    window = 4 * max(sizes) + (64 << 20)
    with ps.join(store, rank=dist.get_rank(), size=dist.get_world_size(), window=window) as kv:
        for size in sizes:
            steps = {way: Step(way, kv, ours, optimizer, size // 4) for way in WAYS}
            row: dict[str, float] = {"bytes": size}
            laps: dict[str, list[float]] = {way: [] for way in (*WAYS, *peers)}
            for _ in range(3):
                for way, step in steps.items():
                    laps[way].append(slowest(step, seconds))
                for peer in peers:
                    laps[peer].append(measure_peer(peer, optimizer, size // 4, seconds))
            row |= {way: statistics.median(each) for way, each in laps.items()}
            key, out, other = steps["push_pull"].key, steps["push_pull"].w, torch.empty(size // 4)
            row["pull"] = slowest(functools.partial(kv.pull, key, out), seconds)
            row["memcpy"] = slowest(functools.partial(other.copy_, out), seconds)
            rows.append(row)
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


def main() -> int:
    summary, details = (__doc__ or "").split("\n\n", 1)
    parser = argparse.ArgumentParser(description=summary, epilog=details, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--workers", type=int, default=2)
    parser.add_argument("--sizes", nargs="+", default=["4K", "1M", "64M"])
    parser.add_argument("--optimizer", choices=list(ARGUMENTS), default="SGD")
    parser.add_argument("--seconds", type=float, default=0.3, help="of a lap (default 0.3)")
    parser.add_argument("--peers", nargs="+", choices=["all", *PEERS], default=[])
    parser.add_argument("--setup-only", action="store_true", help="install the peers and end")
    parser.add_argument("--json", type=Path)
    args = parser.parse_args()
    sizes = [bytes_of(size) for size in args.sizes]
    peers = list(PEERS) if "all" in args.peers else args.peers
    for peer in peers:
        others.install(peer)
    if args.setup_only:
        return 0
    rows = harness.start_ranks(args.workers, measure, sizes, args.optimizer, args.seconds, peers)
    table = Table(title=f"{args.workers} workers, {args.optimizer}: ms per step (times the time of push_pull)")
    table.add_column("way")
    for size in args.sizes:
        table.add_column(size, justify="right")
    for way in (*WAYS, *peers, "pull", "memcpy"):
        table.add_row(way, *(f"{row[way]:.4g} ({row[way] / row['push_pull']:.2f})" for row in rows))
    Console(width=140).print(table)
    if args.json:
        harness.save(args.json, {"workers": args.workers, "optimizer": args.optimizer, "rows": rows})
    return 0


if __name__ == "__main__":
    sys.exit(main())
