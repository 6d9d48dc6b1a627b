"""all_reduce of ringreduce by ring, two-way ring, tree, direct exchange and its own choice, next to Gloo (and NCCL).

    python bench/ring_vs_tree.py --plot ring_vs_tree.png             2 and 4 ranks on this machine
    torchrun --nproc-per-node=8 bench/ring_vs_tree.py --device cuda  the ranks torchrun started, on any number of hosts

Prints a header and one table per rank count in the columns of nccl-tests. Exit code: 0, 1 if any element was wrong or a
rank failed, 2 if the request makes no sense here.

`--json` writes {"header": ..., "rows": [...]}; plot.py draws it again. The header says what was run, on what, and how
to read the figures. A row is one size and variant: ranks, bytes, count, dtype, op, variant, speedup (median time of the
baseline over the variant's, in place; null without a baseline), and for each of out_of_place and in_place the fields of
harness.Result.
"""

import argparse
import dataclasses
import importlib.util
import itertools
import os
import sys
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import harness
import torch
import torch.distributed as dist
from harness import Call, Result

# Each ringreduce variant with its Options(algorithms=...), and the backends to compare with.
ALGORITHMS = {
    "ring": "all_reduce:ring",
    "bidirectional_ring": "all_reduce:bidirectional_ring",
    "tree": "all_reduce:tree",
    "direct": "all_reduce:direct",
    "auto": "",
}
PEERS = ("gloo", "nccl")
SHORT_NAMES = {"bidirectional_ring": "ring x2"}
PLACEMENTS = ("out_of_place", "in_place")

METHOD = (
    "The timed call is dist.all_reduce(tensor, op, group=group), from Python, one CPU thread per rank.",
    "out-of-place is output.copy_(input) and then all_reduce(output), both timed: c10d's all_reduce is in place.",
    "in-place repeats all_reduce(tensor) on zeros, which stay zeros; sums of sums would overflow.",
    "Calls follow back to back after a barrier and one untimed call; variants take turns batch by batch.",
    "The first size is measured twice and the first measurement dropped, to keep start-up out of the figures.",
    "time: batch duration on the slowest rank / calls. algbw = size / time, busbw = algbw x 2(n-1)/n, GB = 1e9 bytes.",
    "min, median, p99: single calls in place, each timed on the rank where it took longest.",
    "vs: median of the baseline over median of the variant, in place, same run.",
    "#wrong: elements that differ from the exact result on any rank, in a call before and a call after the timing.",
)


@dataclass(frozen=True)
class Row:
    """One size and variant; the keys are explained in the module's docstring."""

    ranks: int
    bytes: int
    count: int
    dtype: str
    op: str
    variant: str
    out_of_place: Result
    in_place: Result
    speedup: float | None


@dataclass
class Trial:
    """One variant at one size: its group, and buffers shared with the other variants."""

    group: dist.ProcessGroup
    op: dist.ReduceOp.RedOpType
    source: torch.Tensor  # input of the out-of-place call
    output: torch.Tensor
    buffer: torch.Tensor  # input and output of the in-place call

    def out_of_place(self) -> None:
        self.output.copy_(self.source)
        dist.all_reduce(self.output, self.op, group=self.group)

    def in_place(self) -> None:
        dist.all_reduce(self.buffer, self.op, group=self.group)

    def wrong(self, inputs: harness.ExactInputs, call: int) -> torch.Tensor:
        """Wrong elements on this rank, [out of place, in place], after a fresh call of each."""
        for tensor in (self.source, self.buffer):
            inputs.fill(tensor, dist.get_rank(), call)
        self.output.fill_(1)
        self.out_of_place()
        self.in_place()
        return torch.tensor([inputs.wrong(self.output, call), inputs.wrong(self.buffer, call)])


def measure(settings: argparse.Namespace) -> list[Row]:
    """One rank; every rank returns all rows."""
    device = torch.device(settings.device)
    if device.type == "cuda":
        device = torch.device("cuda", int(os.environ.get("LOCAL_RANK", dist.get_rank())))
        torch.cuda.set_device(device)
    groups = {variant: open_group(variant) for variant in settings.variants}
    numbers = itertools.count()
    title = f"{dist.get_world_size()} ranks"
    rows: list[Row] = []
    unchecked = argparse.Namespace(**{**vars(settings), "check": False})
    measure_size(unchecked, groups, settings.sizes[0], device, numbers)  # dropped: the ranks have only just started
    with harness.Progress(title, len(settings.sizes), shown=dist.get_rank() == 0) as progress:
        for size in settings.sizes:
            rows += measure_size(settings, groups, size, device, numbers)
            progress.advance(harness.format_bytes(size))
    return rows


def open_group(variant: str) -> dist.ProcessGroup:
    """A group of all ranks for this variant."""
    if variant in PEERS:
        backend, options = variant, None
    else:
        import ringreduce

        backend, options = "ringreduce", ringreduce.Options(algorithms=ALGORITHMS[variant])
    group: dist.ProcessGroup = dist.new_group(backend=backend, pg_options=options, timeout=harness.TIMEOUT)
    return group


def measure_size(
    settings: argparse.Namespace,
    groups: dict[str, dist.ProcessGroup],
    size: int,
    device: torch.device,
    numbers: Iterator[int],
) -> list[Row]:
    """Check, time and check again every variant at one size; `numbers` numbers the checked calls."""
    dtype = harness.DTYPES[settings.dtype]
    ranks = dist.get_world_size()
    count = size // dtype.itemsize
    inputs = harness.ExactInputs(dtype, settings.op, ranks)
    op, _ = harness.OPS[settings.op]
    buffers = [torch.zeros(count, dtype=dtype, device=device) for _ in range(3)]
    trials = {variant: Trial(group, op, *buffers) for variant, group in groups.items()}
    wrong = {variant: torch.zeros(2, dtype=torch.int64) for variant in trials}

    def check() -> None:
        for variant, trial in trials.items():
            if settings.check:
                here = trial.wrong(inputs, next(numbers))
                dist.all_reduce(here)
                wrong[variant] += here

    check()
    buffers[-1].zero_()
    calls: dict[tuple[str, str], Call] = {
        (variant, placement): getattr(trial, placement) for variant, trial in trials.items() for placement in PLACEMENTS
    }
    timings = harness.time_alternating(calls, settings.schedule, device)
    check()

    baseline = timings.get((settings.baseline, "in_place"))

    def result(variant: str, placement: str) -> Result:
        errors = int(wrong[variant][PLACEMENTS.index(placement)]) if settings.check else None
        return Result.of(timings[variant, placement], size, 2 * (ranks - 1) / ranks, errors)

    return [
        Row(
            ranks,
            size,
            count,
            settings.dtype,
            settings.op,
            variant,
            result(variant, "out_of_place"),
            result(variant, "in_place"),
            baseline.median / timings[variant, "in_place"].median if baseline else None,
        )
        for variant in trials
    ]


def make_header(settings: argparse.Namespace) -> dict[str, Any]:
    """What was run, on what machine, and how to read the figures."""
    return {
        **harness.origin("all_reduce: ring, tree and direct exchange of ringreduce, and peers"),
        "hosts": int(os.environ.get("GROUP_WORLD_SIZE", "1")),
        "ranks": list(settings.ranks),
        "device": settings.device,
        "variants": {
            v: ALGORITHMS.get(v) or ("backend " + v if v in PEERS else "its own choice") for v in settings.variants
        },
        "baseline": settings.baseline,
        "schedule": dataclasses.asdict(settings.schedule),
        "method": list(METHOD),
    }


def format_header(header: dict[str, Any]) -> str:
    """The header as lines that start with "#"."""
    schedule = header["schedule"]
    hosts = "" if header["hosts"] == 1 else f", one of {header['hosts']} hosts"
    batches = (
        f"{schedule['warmup']} warm-up calls, then {schedule['rounds']} batches, {schedule['min_time']:g} s together"
    )
    lines = [
        "\n".join(harness.format_origin(header)) + hosts,
        *(f"# gpu       {gpu}" for gpu in header["machine"].get("gpus", []) if header["device"] == "cuda"),
        "# versions  " + ", ".join(f"{name} {version}" for name, version in header["versions"].items()),
        *(f"# variant   {SHORT_NAMES.get(name, name):<8} {how}" for name, how in header["variants"].items()),
        f"# schedule  per size, variant and placement: {batches}",
        *(f"# {line}" for line in header["method"]),
    ]
    return "\n".join(lines)


def format_table(rows: Sequence[Row], baseline: str) -> str:
    """The rows of one rank count in the columns of nccl-tests."""
    cell = f"{'time':>10} {'algbw':>7} {'busbw':>7} {'#wrong':>6}"
    units = f"{'(us)':>10} {'(GB/s)':>7} {'(GB/s)':>7} {'':>6}"
    lines = [
        f"# {rows[0].ranks} ranks",
        f"#{'':46} {'out-of-place':^33} {'in-place':^33} {'slowest rank, in-place (us)':>29}",
        f"#{'size':>10} {'count':>10} {'type':>8} {'redop':>7} {'variant':<8}{cell} {cell} "
        f"{'min':>9} {'median':>9} {'p99':>9} {'vs':>7}",
        f"#{'(B)':>10} {'(elements)':>10} {'':>25}{units} {units} {'':>29} {baseline:>7}",
    ]
    for size, group in itertools.groupby(rows, key=lambda row: row.bytes):
        for row in group:
            name, slow = SHORT_NAMES.get(row.variant, row.variant), row.in_place
            spread = f"{slow.min_us:>9.2f} {slow.median_us:>9.2f} {slow.p99_us:>9.2f}"
            ratio = "-" if row.speedup is None else f"{row.speedup:.2f}x"
            lines.append(
                f" {size:>10} {row.count:>10} {row.dtype:>8} {row.op:>7} {name:<8}{format_result(row.out_of_place)} "
                f"{format_result(row.in_place)} {spread} {ratio:>7}"
            )
        lines.append("")
    return "\n".join(lines)


def format_result(result: Result) -> str:
    wrong = "N/A" if result.wrong is None else result.wrong
    return f"{result.time_us:>10.2f} {result.algbw:>7.2f} {result.busbw:>7.2f} {wrong:>6}"


def read_command_line() -> argparse.Namespace:
    """The command line, checked."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    option, names = parser.add_argument, (*ALGORITHMS, *PEERS)
    option(
        "--ranks", type=int, nargs="+", help="rank counts to start here, one by one (default 2 4; not with torchrun)"
    )
    option(
        "--min-bytes", type=harness.parse_bytes, default="8", help="first size; K, M, G are powers of 1024 (default 8)"
    )
    option("--max-bytes", type=harness.parse_bytes, default="64M", help="last size, always measured (default 64M)")
    option("--factor", type=int, default=8, help="each size over the one before (default 8)")
    option("--dtype", choices=harness.DTYPES, default="float32")
    option("--op", choices=harness.OPS, default="sum")
    option("--device", choices=("cpu", "cuda"), default="cpu", help="cuda: rank's GPU is LOCAL_RANK")
    option("--variants", nargs="+", choices=names, metavar="NAME", help=f"any of {', '.join(names)} (default all)")
    option("--baseline", choices=names, metavar="NAME", help='of column "vs" (default nccl if it runs, else gloo)')
    option("--warmup", type=int, default=3, help="calls before timing (default 3)")
    option("--rounds", type=int, default=4, help="turns that each variant takes at a size (default 4)")
    option("--min-time", type=float, default=0.2, help="seconds of calls per size, variant and placement (default 0.2)")
    option("--check", action=argparse.BooleanOptionalAction, default=True, help="count wrong elements (default yes)")
    option("--json", type=Path, metavar="FILE", help="write header and rows")
    option("--table", type=Path, metavar="FILE", help="write what is printed")
    option("--plot", type=Path, metavar="FILE.png", help="draw bandwidth and speed-up over size")
    args = parser.parse_args()

    itemsize = harness.DTYPES[args.dtype].itemsize
    if args.min_bytes < itemsize or args.max_bytes < args.min_bytes or args.factor < 2:
        parser.error(f"need {itemsize} <= --min-bytes <= --max-bytes and --factor >= 2")
    if args.warmup < 1 or args.rounds < 1 or args.min_time <= 0:
        parser.error("--warmup and --rounds must be at least 1, --min-time above 0")
    if args.device == "cuda" and not torch.cuda.is_available():
        parser.error("--device cuda: torch finds no GPU here")
    if args.plot and importlib.util.find_spec("matplotlib") is None:
        parser.error("--plot needs matplotlib: pip install matplotlib")
    world = os.environ.get("WORLD_SIZE")
    if world and args.ranks:
        parser.error(f"--ranks is for runs without torchrun, which has started {world} ranks already")
    nccl = args.device == "cuda" and dist.is_nccl_available()
    args.variants = args.variants or [*ALGORITHMS, "gloo", *(["nccl"] if nccl else [])]
    if set(args.variants) & set(ALGORITHMS) and importlib.util.find_spec("ringreduce") is None:
        parser.error("ringreduce is not installed: pip install -e . (or --variants gloo)")
    args.ranks = [int(world)] if world else args.ranks or [2, 4]
    args.sizes = list(harness.sizes(args.min_bytes, args.max_bytes, args.factor, itemsize))
    args.baseline = args.baseline or ("nccl" if "nccl" in args.variants else "gloo")
    args.schedule = harness.Schedule(args.warmup, args.rounds, args.min_time)
    return args


def main() -> int:
    args = read_command_line()
    header = make_header(args)
    under_torchrun = "WORLD_SIZE" in os.environ
    speaker = int(os.environ.get("RANK", "0")) == 0
    rows: list[Row] = []
    texts: list[str] = []

    def say(text: str) -> None:
        if speaker:
            texts.append(text)
            print(text, flush=True)

    say(format_header(header) + "\n")
    for ranks in args.ranks:
        measured = harness.become_rank(measure, args) if under_torchrun else harness.start_ranks(ranks, measure, args)
        rows += measured
        say(format_table(measured, args.baseline))

    wrong = sum(result.wrong or 0 for row in rows for result in (row.out_of_place, row.in_place))
    say(f"# {wrong} wrong elements" if args.check else "# results not checked")
    if speaker:
        write(header, rows, texts, args)
    return 1 if wrong else 0


def write(header: dict[str, Any], rows: list[Row], texts: list[str], args: argparse.Namespace) -> None:
    """The files asked for, each announced."""
    report = {"header": header, "rows": [dataclasses.asdict(row) for row in rows]}
    for path in filter(None, (args.table, args.plot)):
        path.parent.mkdir(parents=True, exist_ok=True)
    if args.json:
        harness.save(args.json, report)
    if args.table:
        args.table.write_text("\n".join(texts) + "\n")
    if args.plot:
        import plot

        plot.draw(report, args.plot)
    for kind, path in (("table", args.table), ("JSON", args.json), ("picture", args.plot)):
        if path:
            print(f"# {kind} in {path}")


if __name__ == "__main__":
    sys.exit(main())
