"""Collectives between ranks on GPUs: ringreduce next to NCCL, Gloo and the way through the host's memory.

    python -m bench.gpu.collectives --ranks 2 4 8 --json collectives.json

Where there are fewer GPUs than ranks, all ranks share the first; else each has its own, and NCCL takes part.

`--json`: see reports.py. A row is one collective and size: ranks, shared (whether the ranks share a GPU), bytes (of
the larger buffer of a rank), algorithm (ringreduce's), bound_us, median_us and wrong_in by variant, and share, bound_us
over ringreduce's median (null where there is no bound).
"""

import itertools
import statistics
import sys
import time
from argparse import Namespace
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist

from bench import harness
from bench.gpu import device, reports

COLLECTIVES = ("all_reduce", "all_gather", "reduce_scatter", "broadcast")
VARIANTS = ("ringreduce", "graph", "host", "gloo", "nccl")
PEERS = ("gloo", "nccl")
REPLAYED = 1 << 20  # bytes; larger calls are not measured as graphs: there the launch is nothing
SLOWEST = 0.5  # seconds of a call; a variant that is slower is left out at larger sizes

METHOD = (
    "The timed call is dist.all_reduce(tensor, group=group) etc.: float32, sum, from Python, on the current stream.",
    "Times are of CUDA events between back-to-back calls, after a barrier and an untimed call; median of single calls, "
    "each timed on the rank where it took longest. Variants take turns batch by batch.",
    "ringreduce: its own choice of algorithm. graph: the same call replayed as a CUDA graph, up to 1 MiB. host: "
    "gpu_transport='host', through the host's memory. gloo, nccl: those backends on the same tensors.",
    "bound_us: for ranks that share a GPU. The bytes that the steps of the plan read and write on all ranks, slots "
    "included, over what the device copies in a second (bytes read and written, measured in the same run). Calls whose "
    "data stays in the L2 cache can be faster.",
    "bytes: of the larger buffer of a rank: all ranks' parts in all_gather and reduce_scatter.",
)


@dataclass
class Trial:
    """One variant of one call: its group and its buffers, which other variants share."""

    collective: str
    group: dist.ProcessGroup
    input: torch.Tensor
    output: torch.Tensor
    graph: "torch.cuda.CUDAGraph | None" = None

    def call(self) -> None:
        match self.collective:
            case "all_reduce":
                dist.all_reduce(self.output, group=self.group)
            case "broadcast":
                dist.broadcast(self.output, 0, group=self.group)
            case "all_gather":
                dist.all_gather_into_tensor(self.output, self.input, group=self.group)
            case "reduce_scatter":
                dist.reduce_scatter_tensor(self.output, self.input, group=self.group)

    def capture(self) -> None:
        self.call()  # loads the kernels
        torch.cuda.synchronize()
        self.graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(self.graph):
            self.call()

    def run(self) -> None:
        if self.graph is None:
            self.call()
        else:
            self.graph.replay()  # type: ignore[no-untyped-call]

    def wrong(self) -> int:
        """Elements that differ from the exact result after a fresh call. Values differ by rank and element."""
        rank, ranks = dist.get_rank(), dist.get_world_size()
        here = _values(self.input.numel(), rank)
        self.input.copy_(here)
        if self.collective in ("all_reduce", "broadcast"):
            self.output.copy_(here)
        else:
            self.output.fill_(-1)
        self.run()
        count = self.input.numel()
        match self.collective:
            case "all_reduce":
                expected = _sum(count, ranks)
            case "broadcast":
                expected = _values(count, 0)
            case "all_gather":
                expected = torch.cat([_values(count, r) for r in range(ranks)])
            case _:
                part = count // ranks
                expected = _sum(count, ranks)[rank * part : (rank + 1) * part]
        return int((self.output != expected).sum())


def _values(count: int, rank: int) -> torch.Tensor:
    """What `rank` contributes: integers up to 65521 + rank, a prime, whose sums float32 has."""
    return torch.arange(count, dtype=torch.int32, device="cuda").add_(7 * rank).remainder_(65521).add_(rank).float()


def _sum(count: int, ranks: int) -> torch.Tensor:
    total = _values(count, 0)
    for rank in range(1, ranks):
        total += _values(count, rank)
    return total


def traffic(collective: str, algorithm: str, ranks: int, block_bytes: int) -> float:
    """Bytes that the steps of the plan read and write, of all ranks together.

    A step reads its local chunk, if it does, and what each peer sent; it writes its output, if it does, and its slot
    once, however many peers read it there.
    """
    from ringreduce import plan

    built = plan.build(collective, algorithm, ranks)
    shares = sum(channel.share for channel in built.channels)
    total = 0.0
    for channel in built.channels:
        chunk = block_bytes * channel.share / shares / channel.chunks
        for step in itertools.chain(*channel.programs):
            reads = (step.read is not plan.Read.NONE) + len(step.recv)
            total += chunk * (reads + step.write + bool(step.send))
    return total


def algorithm_for(collective: str, ranks: int, block_bytes: int) -> str:
    """What ranks that share a GPU run by default, if RINGREDUCE_ALGORITHMS says nothing else."""
    from ringreduce import plan
    from ringreduce.config import resolve
    from ringreduce.gpu.rules import rules

    user = plan.parse_algorithms(resolve(None)[0].algorithms or "")
    return plan.lookup(plan.table(ranks, user, rules(ranks, steps=True))[collective], block_bytes).algorithm


def measure(settings: Namespace) -> None:
    """One rank; the first one reports. `settings` are the command line's, and when sizes may still begin."""
    device.use(settings.stand_in)
    rank, ranks = dist.get_rank(), dist.get_world_size()
    report = reports.Report.again(settings.json) if rank == 0 else reports.Report(None, {"rows": [], "notes": []})
    shared = torch.cuda.device_count() < ranks
    torch.cuda.set_device(0 if shared else rank)
    torch.ones(1, device="cuda")
    groups, notes = open_groups(settings, ranks, shared)
    slow: set[tuple[str, str]] = set()  # (collective, variant)
    for collective, size in itertools.product(settings.collectives, settings.sizes):
        if _late(settings.deadline):
            notes.append(f"{ranks} ranks, {collective} of {harness.format_bytes(size)}: no time left")
            continue
        variants = [name for name in groups if (collective, name) not in slow]
        row = measure_cell(settings, {name: groups[name] for name in variants}, collective, size, shared, notes)
        if rank == 0:
            report.row(**row)
        for name, median in row["median_us"].items():
            if median > SLOWEST * 1e6 and name != "ringreduce":
                slow.add((collective, name))
                notes.append(f"{ranks} ranks, {collective} by {name} above {harness.format_bytes(size)}: too slow")
        torch.cuda.empty_cache()
    for note in dict.fromkeys(notes if rank == 0 else ()):
        report.note(note)


def _late(deadline: float) -> bool:
    """Whether the first rank's clock says so, so that all agree."""
    late = torch.tensor([time.time() > deadline])
    dist.broadcast(late, 0)
    return bool(late)


def open_groups(settings: Namespace, ranks: int, shared: bool) -> tuple[dict[str, dist.ProcessGroup], list[str]]:
    """A group for each variant that can be, and why the others cannot."""
    import ringreduce

    groups: dict[str, dist.ProcessGroup] = {}
    notes = []
    for name in VARIANTS:
        if name == "nccl" and (shared or settings.stand_in or not dist.is_nccl_available()):
            reason = "NCCL takes no two ranks on a GPU" if shared else "torch has no NCCL"
            notes.append(f"{ranks} ranks, nccl: {reason}")
            continue
        if name == "gloo" and settings.stand_in:
            notes.append(f"{ranks} ranks, gloo: torch without CUDA has no Gloo for CUDA tensors")
            continue
        backend = name if name in PEERS else "ringreduce"
        options = None
        if backend == "ringreduce":
            options = ringreduce.Options(gpu_transport="host" if name == "host" else "peer")
        group = dist.new_group(backend=backend, pg_options=options, timeout=harness.TIMEOUT)
        assert isinstance(group, dist.ProcessGroup)
        groups[name] = group
    return groups, notes


def measure_cell(
    settings: Namespace,
    groups: dict[str, dist.ProcessGroup],
    collective: str,
    size: int,
    shared: bool,
    notes: list[str],
) -> dict[str, Any]:
    """Check and time all variants of a call: a row."""
    ranks = dist.get_world_size()
    divided = collective in ("all_gather", "reduce_scatter")
    count = max(size // 4, ranks) // ranks * ranks if divided else size // 4
    part = count // ranks if divided else count
    source = torch.zeros(part if collective == "all_gather" else count, device="cuda")
    result = torch.zeros(part if collective == "reduce_scatter" else count, device="cuda")
    trials: dict[str, Trial] = {}
    wrong = {}
    for name, group in groups.items():
        if name == "graph" and size > REPLAYED:
            continue
        trial = Trial(collective, group, source, result)
        try:
            if name == "graph":
                trial.capture()
            here = torch.tensor([trial.wrong()])
        except (RuntimeError, ValueError) as error:  # on all ranks alike: the backend has no such call
            if name not in PEERS:
                raise
            notes.append(f"{ranks} ranks, {collective} by {name}: {next(iter(str(error).splitlines()), error)}")
            continue
        dist.all_reduce(here)
        wrong[name] = int(here)
        trials[name] = trial
    result.zero_()  # an all_reduce in place keeps zeros; sums of sums would overflow
    source.zero_()
    timings = harness.time_alternating(
        {name: trial.run for name, trial in trials.items()},
        harness.Schedule(1, settings.rounds, settings.min_time),
        torch.device("cuda"),
    )
    median = {name: timing.median for name, timing in timings.items()}
    algorithm = algorithm_for(collective, ranks, part * 4)
    bound = traffic(collective, algorithm, ranks, part * 4) / settings.copy_gbps / 1e3 if shared else None
    row = {"collective": collective, "ranks": ranks, "shared": shared, "bytes": count * 4, "algorithm": algorithm}
    row |= {"bound_us": bound, "median_us": median, "share": bound / median["ringreduce"] if bound else None}
    return row | {"wrong_in": wrong, "wrong": sum(wrong.values())}


def main() -> int:
    parser = reports.parser(__doc__)
    option = parser.add_argument
    option("--ranks", type=int, nargs="+", default=[2, 4, 8], help="(default 2 4 8)")
    option("--collectives", nargs="+", choices=COLLECTIVES, default=COLLECTIVES, metavar="NAME")
    option(
        "--sizes",
        type=harness.parse_bytes,
        nargs="+",
        default=[4 << 10, 64 << 10, 1 << 20, 16 << 20, 64 << 20, 256 << 20],
        metavar="SIZE",
    )
    option("--rounds", type=int, default=3, help="turns that each variant takes at a size (default 3)")
    option("--min-time", type=float, default=0.1, help="seconds of calls per size and variant (default 0.1)")
    option(
        "--copy-bytes", type=harness.parse_bytes, default="256M", help="of the copy that bounds are of (default 256M)"
    )
    option("--limit", type=float, default=240, help="seconds; what is not begun by then is left out (default 240)")
    args = parser.parse_args()
    if min(args.ranks) < 2 or min(args.sizes) < 4:
        parser.error("--ranks must be at least 2, --sizes at least 4")
    deadline = time.time() + args.limit
    args.json = args.json or device.ROOT / "build/gpu_collectives.json"  # the ranks report there
    report = reports.begin(args, "collectives of ringreduce between ranks on GPUs, and peers", method=list(METHOD))
    args.copy_gbps = statistics.median(device.copy_gbps(args.copy_bytes, 10, 4) for _ in range(3))
    torch.cuda.empty_cache()
    report.row(copy_gbps=args.copy_gbps)
    for number, ranks in enumerate(args.ranks):
        now = time.time()
        args.deadline = now + max(0, deadline - now) / (len(args.ranks) - number)
        harness.start_ranks(ranks, measure, args)
    return reports.Report.again(args.json).end()


if __name__ == "__main__":
    sys.exit(main())
