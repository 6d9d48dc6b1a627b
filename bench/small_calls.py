"""What a small all_reduce costs from Python, and what of it is torch's: us per call of a loop, on the slowest rank.

    python bench/small_calls.py                                   2, 4, 8 and 16 ranks, 64 B
    python bench/small_calls.py --ranks 16 --runs 10              is one run of ten slower than the others?
    python bench/small_calls.py --ranks 16 --yields switch-nothing

`direct` is ringreduce.all_reduce, `dist` torch's dist.all_reduce with backend ringreduce, and `torch` dist.all_reduce
with torch's own backend "fake", which returns at once: no backend's dist.all_reduce can take less. Each run is a new
group of processes, in which the three take turns; the table has the median of the runs and the slowest one.

`--yields switch-nothing` replaces sched_yield() by a system call that leaves the core with the rank that makes it, as
some schedulers do. Needs a C compiler. Exit code: 0, or 1 if a result is wrong.
"""

import argparse
import os
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import harness
import torch
import torch.distributed as dist
from rich.console import Console
from rich.table import Table

import ringreduce

NO_SWITCH = "#include <unistd.h>\n#include <sys/syscall.h>\nint sched_yield(void) { syscall(SYS_getppid); return 0; }\n"
WAYS = ("direct", "dist", "torch")
BATCHES = 5


def measure(size: int, seconds: float) -> dict[str, float]:
    """Microseconds per call of each way: the median of the batches, in each of which the slowest rank counts."""
    from torch.testing._internal.distributed import fake_pg  # registers the backend "fake"

    del fake_pg
    gloo, set_default_group = dist.group.WORLD, torch.distributed.distributed_c10d._update_default_pg
    ours, none = dist.new_group(backend="ringreduce"), dist.new_group(backend="fake")
    tensor = torch.zeros(max(size // 4, 1))
    calls = {"direct": ringreduce.all_reduce, "dist": dist.all_reduce, "torch": dist.all_reduce}
    found: dict[str, list[float]] = {way: [] for way in calls}
    times = dict.fromkeys(calls, 20)
    for batch in range(-2, BATCHES):  # the first two find out how many calls a batch takes
        for way, call in calls.items():
            set_default_group(none if way == "torch" else ours)
            tensor.fill_(1)
            call(tensor)
            wanted = dist.get_world_size() if way != "torch" else 1
            if not torch.equal(tensor, torch.full_like(tensor, wanted)):
                raise ValueError(f"{way}: {tensor[:4].tolist()}..., expected {wanted}")
            tensor.fill_(0)
            dist.barrier(gloo)
            begin = time.perf_counter()
            for _ in range(times[way]):
                call(tensor)
            slowest = torch.tensor([(time.perf_counter() - begin) / times[way]])
            dist.all_reduce(slowest, dist.ReduceOp.MAX, gloo)
            times[way] = max(20, int(seconds / float(slowest)))
            if batch >= 0:
                found[way].append(1e6 * float(slowest))
    set_default_group(gloo)
    return {way: statistics.median(each) for way, each in found.items()}


def main() -> int:
    summary, details = (__doc__ or "").split("\n\n", 1)
    parser = argparse.ArgumentParser(description=summary, epilog=details, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--ranks", type=int, nargs="+", default=[2, 4, 8, 16])
    parser.add_argument("--bytes", type=int, default=64)
    parser.add_argument("--runs", type=int, default=5)
    parser.add_argument("--seconds", type=float, default=0.1, help="of a batch (default 0.1)")
    parser.add_argument("--yields", choices=["switch", "switch-nothing"], default="switch")
    args = parser.parse_args()
    table = Table(title=f"all_reduce of {args.bytes} B, float32, us per call; sched_yield: {args.yields}")
    for column in ("ranks", *(f"{way}{what}" for way in WAYS for what in ("", ", slowest run")), "dist / direct"):
        table.add_column(column, justify="right")
    with tempfile.TemporaryDirectory() as folder:
        if args.yields == "switch-nothing":
            library = Path(folder) / "no_switch.so"
            command = ["cc", "-O1", "-shared", "-fPIC", "-x", "c", "-", "-o", str(library)]
            subprocess.run(command, input=NO_SWITCH, text=True, check=True)
            os.environ["LD_PRELOAD"] = str(library)
        for ranks in args.ranks:
            runs = [harness.start_ranks(ranks, measure, args.bytes, args.seconds) for _ in range(args.runs)]
            middle = {way: statistics.median(run[way] for run in runs) for way in WAYS}
            cells = [f"{value:.3g}" for way in WAYS for value in (middle[way], max(run[way] for run in runs))]
            table.add_row(str(ranks), *cells, f"{middle['dist'] / middle['direct']:.2f}")
    Console(width=140).print(table)
    return 0


if __name__ == "__main__":
    sys.exit(main())
