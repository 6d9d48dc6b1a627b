"""One worker of four is five times slower: how long training takes to a fixed loss in each mode.

    python bench/parameter_server_convergence.py
    python bench/parameter_server_convergence.py --modes sync "ssp 2" --seeds 10 --slow 0.1

Real data: scikit-learn's digits, and examples/train_ddp.py's network of 4810 parameters. A step's computing is short,
so workers sleep: `--usual` seconds a step, the last one `--slow`. Every worker draws batches of its own. Worker 0 looks
at the loss of all training data after every fifth of its steps, without stopping the others; training ends when it is
at most `--loss`, or after `--limit` seconds. Seconds and steps of worker 0, the median of the seeds and their range.
Every push counts alike: rounds add up the gradients (`average=False`), so a mode that leaves none out moves as far with
as many. Exit code: 0, or 1 if no mode got there.
"""

from __future__ import annotations

import argparse
import statistics
import sys
import time
from pathlib import Path

import harness
import torch
import torch.distributed as dist
from rich.console import Console
from rich.table import Table
from torch import nn

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "examples"))

from train_ddp import Digits, make_model

import ringreduce.parameter_server as ps

WORKERS = 4
MODES = {
    "sync": ps.sync(average=False),
    "quorum 3": ps.sync(quorum=3, average=False),
    "ssp 0": ps.ssp(0),
    "ssp 2": ps.ssp(2),
    "ssp 8": ps.ssp(8),
    "asynchronous": ps.asynchronous(),
}


def train(name: str, seed: int, args: argparse.Namespace) -> tuple[float, int]:
    """Seconds and steps of worker 0 until the loss is reached; the limit if it is not."""
    digits, model = Digits(), make_model()
    store = dist.PrefixStore(f"{name} {seed}", dist.distributed_c10d._get_default_store())
    generator = torch.Generator().manual_seed(1000 * seed + dist.get_rank())
    with ps.join(store, rank=dist.get_rank(), size=WORKERS, memory=8 << 20, window=8 << 20, block_bytes=8192) as kv:
        optimizer = ps.attach(kv, model, torch.optim.SGD(model.parameters(), lr=args.lr), mode=MODES[name])
        kv.init("done", torch.zeros(1), mode=ps.asynchronous())
        done = torch.zeros(1)
        kv.barrier()
        begin, steps = time.perf_counter(), 0
        while not done:
            some = torch.randint(len(digits.x), (args.batch,), generator=generator)
            nn.functional.cross_entropy(model(digits.x[some]), digits.y[some]).backward()
            optimizer.step()
            steps += 1
            time.sleep(args.slow if kv.worker == WORKERS - 1 else args.usual)
            if kv.worker == 0 and steps % 5 == 0:
                optimizer.pull()
                with torch.no_grad():
                    loss = float(nn.functional.cross_entropy(model(digits.x), digits.y))
                seconds = time.perf_counter() - begin
                if loss <= args.loss or seconds > args.limit:
                    kv.push("done", torch.ones(1)).wait()
            kv.pull("done", done)
        return (seconds if kv.worker == 0 else 0.0), steps


def measure(args: argparse.Namespace) -> dict[str, list[tuple[float, int]]]:
    found: dict[str, list[tuple[float, int]]] = {name: [] for name in args.modes}
    for seed in range(args.seeds):
        for name in args.modes:
            found[name].append(train(name, seed, args))
            dist.barrier()
    return found


def main() -> int:
    summary, details = (__doc__ or "").split("\n\n", 1)
    parser = argparse.ArgumentParser(description=summary, epilog=details, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--modes", nargs="+", choices=list(MODES), default=list(MODES))
    parser.add_argument("--seeds", type=int, default=5)
    parser.add_argument("--loss", type=float, default=0.25)
    parser.add_argument("--lr", type=float, default=0.1)
    parser.add_argument("--batch", type=int, default=24)
    parser.add_argument("--usual", type=float, default=0.01)
    parser.add_argument("--slow", type=float, default=0.05)
    parser.add_argument("--limit", type=float, default=60.0)
    args = parser.parse_args()
    found = harness.start_ranks(WORKERS, measure, args)
    table = Table(title=f"{WORKERS} workers, one {args.slow / args.usual:g}x slower, to a loss of {args.loss:g}")
    for column in ("mode", "seconds", "range", "steps of worker 0"):
        table.add_column(column, justify="right")
    for name, runs in found.items():
        seconds = [each for each, _ in runs]
        middle, steps = statistics.median(seconds), statistics.median(each for _, each in runs)
        table.add_row(name, f"{middle:.1f}", f"{min(seconds):.1f} to {max(seconds):.1f}", f"{steps:.0f}")
    Console(width=100).print(table)
    return 0 if min(seconds for runs in found.values() for seconds, _ in runs) < args.limit else 1


if __name__ == "__main__":
    sys.exit(main())
