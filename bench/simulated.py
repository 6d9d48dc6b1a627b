"""all_reduce as foretold, by the cost model and by the simulator, next to what it takes on this machine.

    python bench/simulated.py --json build/simulated.json

The ranks are started here and share tensors through copies (fetch=0), which is what the cost model describes. It gets
its figures from the probe, and so does the simulator: each core is a link that all messages from and to its ranks
cross, as fast as it copies (in memory, or to and from slots if the tensors fit its cache); a hop is the latency, and
steps cost what the cost model says. That leaves out the operands that no message brings, and how long a core takes from
one rank to the next: an alpha-beta picture of shared memory, for large tensors. For small ones, see the cost model.

Exit code: 0, 1 if a rank failed, 2 if the request makes no sense here.
"""

import argparse
import dataclasses
import functools
import json
import math
import os
import statistics
import sys
from pathlib import Path
from typing import NamedTuple

import harness
import torch
import torch.distributed as dist

from ringreduce.config import Options, resolve, slicing_for, slot_bytes_for
from ringreduce.plan import build
from ringreduce.plan.cost import CALL, PEER, STEP, Cost, Machine
from ringreduce.plan.network import Network, Route
from ringreduce.plan.simulate import simulate
from ringreduce.tuning.machine import probe

ALGORITHMS = ("two_shot", "ring", "tree", "halving_doubling")
SIZES = (4 * 2**10, 64 * 2**10, 2**20, 16 * 2**20, 64 * 2**20)
SCHEDULE = harness.Schedule(warmup=3, rounds=6, min_time=0.3)


class Row(NamedTuple):
    """Microseconds of one all_reduce; `measured` is the median of the slowest rank's."""

    ranks: int
    bytes: int
    algorithm: str
    measured: float
    cost: float
    simulated: float


def measure(sizes: tuple[int, ...]) -> dict[tuple[str, int], float]:
    """One rank: the median seconds of each algorithm and size."""
    groups = {}
    for name in ALGORITHMS:
        options = Options(algorithms=f"all_reduce:{name}", tuning="off", fetch=0)
        groups[name] = dist.new_group(backend="ringreduce", pg_options=options, timeout=harness.TIMEOUT)
    found = {}
    with harness.Progress(f"{dist.get_world_size()} ranks", len(sizes), shown=dist.get_rank() == 0) as progress:
        for size in sizes:
            tensor = torch.zeros(size // 4)
            calls = {name: functools.partial(dist.all_reduce, tensor, group=group) for name, group in groups.items()}
            for name, timing in harness.time_alternating(calls, SCHEDULE, torch.device("cpu")).items():
                found[name, size] = timing.median / 1e6
            progress.advance(harness.format_bytes(size))
    return found


def foretell(machine: Machine, ranks: int, algorithm: str, size: int) -> tuple[float, float]:
    """Seconds by the cost model, and by the simulator."""
    plan = build("all_reduce", algorithm, ranks)
    options, _ = resolve(Options(tuning="off", fetch=0))
    cost = Cost(plan, machine, slicing_for(options, slot_bytes_for(ranks, options), fetch=False))
    in_memory = cost.in_memory(size)
    put, take = (machine.copy_memory_all,) * 2 if in_memory else (machine.put[0], machine.take[0])
    slower = max(put, take)  # seconds per byte
    cores = Network(
        tuple(f"core {core}" for core in range(cost.cores)),
        (1 / slower,) * cost.cores,
        lambda source, target: Route(
            ((source % cost.cores, put / slower), (target % cost.cores, take / slower)), machine.hop
        ),
    )
    slice_bytes = cost.slicing.slice_bytes(size / plan.channels[0].chunks)
    found = simulate(plan, cores, size, step_seconds=STEP + 2 * PEER, slice_bytes=slice_bytes)
    return cost.seconds(size), CALL * math.ceil(ranks / cost.cores) + found.seconds


def format_rows(rows: list[Row]) -> str:
    lines = [
        f"#{'ranks':>6} {'size':>8} {'algorithm':<17} {'measured':>10} {'cost model':>17} {'simulated':>17}",
        f"#{'':>6} {'':>8} {'':<17} {'(us)':>10} {'(us)':>10} {'ratio':>6} {'(us)':>10} {'ratio':>6}",
    ]
    for row in rows:
        foretold = (f"{each:>10.1f} {each / row.measured:>6.2f}" for each in (row.cost, row.simulated))
        size = harness.format_bytes(row.bytes)
        lines.append(f" {row.ranks:>6} {size:>8} {row.algorithm:<17} {row.measured:>10.1f} {' '.join(foretold)}")
    return "\n".join(lines)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    option = parser.add_argument
    option("--ranks", type=int, nargs="+", default=[2, 4], help="rank counts, one by one (default 2 4)")
    option("--max-bytes", type=harness.parse_bytes, default="64M", help="the largest size (default 64M)")
    option("--json", type=Path, metavar="FILE", help="write header and rows")
    args = parser.parse_args()
    sizes = tuple(size for size in SIZES if size <= args.max_bytes)
    if not sizes or min(args.ranks) < 2:
        parser.error(f"need --ranks of 2 or more and --max-bytes of {SIZES[0]} or more")
    header = {**harness.origin("all_reduce: foretold and measured"), "schedule": dataclasses.asdict(SCHEDULE)}
    print("\n".join(harness.format_origin(header)), flush=True)
    machine = probe(os.sched_getaffinity(0))
    rows = []
    for ranks in args.ranks:
        for (name, size), seconds in harness.start_ranks(ranks, measure, sizes).items():
            cost, simulated = foretell(machine, ranks, name, size)
            rows.append(Row(ranks, size, name, 1e6 * seconds, 1e6 * cost, 1e6 * simulated))
    print(format_rows(rows))
    for name in ("cost", "simulated"):
        ratios = [getattr(row, name) / row.measured for row in rows]
        print(f"# {name}: ratio {min(ratios):.2f} to {max(ratios):.2f}, median {statistics.median(ratios):.2f}")
    if args.json:
        args.json.parent.mkdir(parents=True, exist_ok=True)
        report = {"header": header, "machine": dataclasses.asdict(machine), "rows": [row._asdict() for row in rows]}
        args.json.write_text(json.dumps(report, indent=1) + "\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
