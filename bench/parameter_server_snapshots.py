"""What a snapshot costs those who go on: steps of push_pull with and without one under way.

    python bench/parameter_server_snapshots.py                              2 workers, 64 MB of parameters, AdamW
    python bench/parameter_server_snapshots.py --size 256M --folder /mnt/disk

Laps alternate. A step is as bench/parameter_server.py has it, in sync; a lap with a snapshot begins with it and has as
many steps as fit in the time that it takes, at least one. Exit code: 0.
"""

import argparse
import statistics
import sys
import tempfile
import time

import harness
import torch
import torch.distributed as dist
from parameter_server import bytes_of

import ringreduce.parameter_server as ps

STEPS = 5


def measure(size: int, folder: str, laps: int) -> tuple[list[float], list[float], list[float]]:
    torch.set_num_threads(1)
    store = dist.distributed_c10d._get_default_store()
    quiet: list[float] = []
    busy: list[float] = []
    written: list[float] = []
    with ps.join(store, rank=dist.get_rank(), size=dist.get_world_size(), window=4 * size + (64 << 20)) as kv:
        w = torch.zeros(size // 4)
        kv.init("w", w, update=ps.optimizer(torch.optim.AdamW, lr=1e-3))
        gradient = torch.ones(size // 4)
        step = lambda: kv.push_pull("w", gradient, out=w).wait()  # noqa: E731
        step()
        for lap in range(laps):
            begin = time.perf_counter()
            for _ in range(STEPS):
                step()
            quiet.append((time.perf_counter() - begin) / STEPS)
            saving = kv.snapshot(f"{folder}/{lap}") if dist.get_rank() == 0 else None
            asked = begin = time.perf_counter()
            steps, done = 0, torch.zeros(1)
            while not done:
                step()
                steps += 1
                busy.append(time.perf_counter() - begin)
                done[0] = saving is not None and saving.done()
                if done:
                    written.append(time.perf_counter() - asked)
                dist.broadcast(done, 0)
                begin = time.perf_counter()
        kv.barrier()
    return quiet, busy, written


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--workers", type=int, default=2)
    parser.add_argument("--size", default="64M")
    parser.add_argument("--laps", type=int, default=7)
    parser.add_argument("--folder", help="where the snapshots go (default: a temporary one)")
    args = parser.parse_args()
    with tempfile.TemporaryDirectory(dir=args.folder) as folder:
        found = harness.start_ranks(args.workers, measure, bytes_of(args.size), folder, args.laps)
    quiet, busy, written = (statistics.median(each) for each in found)
    mean, longest = statistics.fmean(found[1]), max(found[1])
    print(f"{args.workers} workers, {args.size} of parameters, AdamW; medians of {args.laps} laps")
    print(f"a step               {1e3 * quiet:8.1f} ms")
    print(f"beside a snapshot    {1e3 * busy:8.1f} ms, {busy / quiet:.2f} times as long", end="")
    print(f" (mean {mean / quiet:.2f}; the longest, which copies most, {longest / quiet:.1f})")
    print(f"a snapshot is there after {1e3 * written:.0f} ms")
    return 0


if __name__ == "__main__":
    sys.exit(main())
