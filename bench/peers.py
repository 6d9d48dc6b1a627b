"""Collectives of ringreduce next to Gloo, Open MPI, MPICH, Intel MPI and oneCCL, and what plain copies cost.

    python bench/peers.py --setup-only                        install the MPI libraries beside this file, once
    python bench/peers.py --json peers.json                   everything: 2 to 16 ranks, 8 B to 256 MB; takes hours
    python bench/peers.py --ranks 2 --collectives all_reduce --sizes 64 32K 1M 64M --zero-copy

Every backend is a team of processes (peer_team.py) that lives through all rows of a rank count and sleeps on a socket
while another team measures. Prints a header and one table per rank count and collective. Exit code: 0, 1 if any element
was wrong or a backend failed, 2 if the request makes no sense here.

`--json` writes {"header", "rows", "notes"}. A row has collective, ranks, bytes, count, dtype;
`cases`, whether the cores shared a cache, per round; for each backend `times_us` and `means_us` (per round: median and
mean of the calls), `median_us` (of the rounds' `times_us`) and `wrong` (elements); `copy_gbs` (per round, for each kind
of copy), `limit_us`, `limit_share` of each of ours; and best_peer, vs_best_peer, vs_gloo (their median over ours). What
could not be measured is missing or null, and `notes` says why.
`header.probes` are what `cache_probe` found, one at the start and one per round.
"""

import argparse
import contextlib
import itertools
import mmap
import os
import signal
import socket
import statistics
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass, field
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import harness
import numpy as np
from numpy.typing import NDArray
from peer_team import COPIES, MPIS, install_all, start_of
from rich.console import Console
from rich.table import Table

from ringreduce.cli.bench import turns
from ringreduce.cli.bench.team import BackendFailed, Team
from ringreduce.cli.bench.turns import free_memory, take_turns
from ringreduce.cli.bench.worker import BITS, Layout, write_inputs

Block = NDArray[np.uint64]
BLOCKS = {"256 KiB": 1 << 18, "4 MiB": 1 << 22}
MEMORY = 1 << 30  # bytes; more than any cache of a machine met so far, the largest being 480 MiB
TURNS = 30

COLLECTIVES = ("all_reduce", "reduce_scatter", "all_gather", "broadcast", "all_to_all")
DIVIDED = ("reduce_scatter", "all_gather", "all_to_all")  # their largest buffer has a part for each rank


OURS = {
    "ringreduce": "ringreduce.all_reduce(tensor) etc., the direct call",
    "ringreduce-dist": "dist.all_reduce(tensor) etc. with backend ringreduce",
    "ringreduce-shared": "the direct call on tensors of ringreduce.empty",
    "ringreduce-allocated": "the direct call on tensors of torch.empty, after ringreduce.share_allocations()",
}
PEERS = ("gloo", *MPIS)
NOT_BY_DEFAULT = ("ringreduce-shared", "ringreduce-allocated", "oneccl")  # the last needs a compiler to be set up
LEAST_LIMIT = 32 << 10  # bytes; a smaller copy takes less time than calling it, so it limits nothing

LEAST_ITERATIONS = 3  # calls in a batch

METHOD = (
    "bytes is the largest buffer of a rank, as in nccl-tests: all_gather's output, reduce_scatter's input, else the",
    "tensor. all_reduce and broadcast work in place. dist.* and direct calls on torch tensors, mpi4py on NumPy arrays,",
    "one CPU thread per rank; all memory is NumPy's, so it has huge pages where the kernel gives them on request.",
    "A batch: barrier, one untimed call, timed calls back to back; its figure is the median over the calls of the",
    "slowest rank's time. Teams take turns, batch by batch, row by row, round by round; a row's is the rounds' median.",
    "x best: the best peer's median over that of 'ringreduce'. x gloo: the same of Gloo.",
    "limit: reading each input byte once and writing each output byte once, at the rate at which min(ranks, cores)",
    "processes copy private buffers of the row's size at the same time, in the same round, by the faster kind of copy.",
    "share: limit over our time. No limit below 32 KiB, where a copy takes less time than its call.",
    "#wrong: elements that differ from the exact result, on any rank, in the call that ends each batch, all rounds.",
    "shared cache: a core reads what another core has just written faster than memory. It can change while a machine",
    "runs, as its virtual cores are moved; so each round begins with such a probe (`cache_probe`).",
)


@dataclass(frozen=True)
class Row:
    """One collective, rank count and size; the keys are explained in the module's docstring."""

    collective: str
    ranks: int
    bytes: int
    count: int
    dtype: str
    cases: list[str]
    times_us: dict[str, list[float]]
    means_us: dict[str, list[float]]
    median_us: dict[str, float]
    wrong: dict[str, int]
    copy_gbs: dict[str, list[float]]
    limit_us: float | None
    limit_share: dict[str, float]
    best_peer: str | None
    vs_best_peer: float | None
    vs_gloo: float | None


@dataclass
class Tally(turns.Tally):
    """Of one row; for the copies, the rate at which they ran."""

    layout: Layout = field(kw_only=True)
    size: int = field(kw_only=True)  # bytes
    copy_gbs: dict[str, list[float]] = field(default_factory=dict)

    def add(self, name: str, answers: Sequence[dict[str, Any]], counted: bool) -> None:
        super().add(name, answers, counted)
        if counted and name in COPIES:
            self.copy_gbs.setdefault(name, []).append(copy_rate(answers, self.size))
            del self.times_us[name], self.means_us[name]


def least_traffic(collective: str, ranks: int, size: int) -> int:
    """Bytes that all ranks together must read and write if they read each input and write each output once.

    `size` is the row's: a rank's largest buffer.
    """
    part = size / ranks
    read, written = {
        "all_reduce": (ranks * size, ranks * size),
        "reduce_scatter": (ranks * size, ranks * part),
        "all_gather": (ranks * part, ranks * size),
        "broadcast": (size, (ranks - 1) * size),
        "all_to_all": (ranks * size, ranks * size),
    }[collective]
    return round(read + written)


def copy_rate(answers: Sequence[dict[str, Any]], size: int) -> float:
    """GB/s read and written by all the processes that copied `size` bytes at the same time."""
    return sum(2 * size / float(statistics.median(answer["times_ns"])) for answer in answers)


def make_row(tally: Tally, dtype: str, cases: Sequence[str]) -> Row:
    """The row of what its rounds found."""
    layout, size = tally.layout, tally.size
    median_us = tally.median_us
    rates = [statistics.median(rates) for rates in tally.copy_gbs.values()]
    limit = None
    if rates and size >= LEAST_LIMIT:
        limit = least_traffic(layout.collective, layout.ranks, size) / max(rates) / 1e3
    ours = median_us.get(next((name for name in OURS if name in median_us), ""))
    best = min((name for name in PEERS if name in median_us), key=lambda name: median_us[name], default=None)
    return Row(
        collective=layout.collective,
        ranks=layout.ranks,
        bytes=size,
        count=layout.count,
        dtype=dtype,
        cases=list(cases),
        times_us=tally.times_us,
        means_us=tally.means_us,
        median_us=median_us,
        wrong=tally.wrong,
        copy_gbs=tally.copy_gbs,
        limit_us=limit,
        limit_share={name: limit / median_us[name] for name in OURS if limit and name in median_us},
        best_peer=best,
        vs_best_peer=median_us[best] / ours if best and ours else None,
        vs_gloo=median_us["gloo"] / ours if "gloo" in median_us and ours else None,
    )


def layouts(collective: str, ranks: int, sizes: Sequence[int], dtype: str) -> list[Layout]:
    """The rows of a table: `sizes` in whole elements, and where a buffer is divided, rounded up to equal parts."""
    unit = ranks if collective in DIVIDED else 1
    counts = dict.fromkeys(-(-size // BITS[dtype].itemsize // unit) * unit for size in sizes)
    return [Layout(collective, ranks, count) for count in counts]


def open_teams(
    settings: argparse.Namespace, ranks: int, folder: Path, stack: contextlib.ExitStack, notes: list[str]
) -> list[Team]:
    """The backends' teams and those that copy, without the ones that failed."""
    teams: list[Team] = []
    names = [*settings.backends, *COPIES]
    with harness.Progress(f"{ranks} ranks", len(names), shown=True) as progress:
        for name in names:
            size = min(ranks, len(os.sched_getaffinity(0))) if name in COPIES else ranks
            try:
                teams.append(Team(name, size, folder, settings.timeout, *start_of(name, size)))
                stack.callback(teams[-1].close)
            except BackendFailed as error:
                give_up(notes, error)
            progress.advance(f"start of {name}")
    return teams


def give_up(notes: list[str], error: BackendFailed) -> None:
    print(f"left out: {error}", file=sys.stderr, flush=True)
    notes.append(str(error))


def measure(
    settings: argparse.Namespace, collective: str, ranks: int, teams: list[Team], inputs: Path, calls: Iterator[int]
) -> tuple[list[Row], list[dict[str, Any]], list[str]]:
    """All rows of a table, the cache probe of each round, and what was left out. Teams that fail leave `teams`.

    A round before the first is not counted: it finds out how many calls fill a batch.
    """
    tallies, probes, notes = [], [], []
    itemsize = BITS[settings.dtype].itemsize
    for layout in layouts(collective, ranks, settings.sizes, settings.dtype):
        size = layout.count * itemsize
        needed = ranks * (layout.inputs + (0 if layout.in_place else layout.outputs)) * itemsize
        if needed < free_memory():
            tallies.append(Tally(layout=layout, size=size))
        else:
            notes.append(f"{collective} of {size} B with {ranks} ranks: needs {needed / 1e9:.1f} GB")

    def order(tally: Tally, team: Team) -> dict[str, Any]:
        return {
            "collective": "copy" if team.name in COPIES else collective,
            "dtype": settings.dtype,
            "bytes": tally.size,
            "call": next(calls),
            "inputs": str(inputs),
        }

    rounds = take_turns(
        tallies,
        teams,
        order,
        lambda error: give_up(notes, error),
        rounds=settings.rounds,
        batch_time=settings.batch_time,
        least=LEAST_ITERATIONS,
    )
    with harness.Progress(f"{collective}, {ranks} ranks", settings.rounds + 1, shown=True) as progress:
        for turn in rounds:
            progress.advance(f"round {turn}" if turn else "warm-up")
            if turn < settings.rounds and (found := probe()):
                probes.append(found)
    cases = [found["case"] for found in probes]
    return [make_row(tally, settings.dtype, cases) for tally in tallies], probes, notes


def probe() -> dict[str, Any] | None:
    """What `cache_probe` finds in a process of its own; None with one core."""
    if len(os.sched_getaffinity(0)) < 2:
        return None
    process, pipe = harness.forked(cache_probe)
    found: dict[str, Any] = pipe.recv()
    process.join()
    return found


def read_gbs(block: Block) -> float:
    """Read every byte once; GB/s. max() keeps nothing but a register, so nothing but reading is timed."""
    start = time.perf_counter()
    block.max()
    return block.nbytes / (time.perf_counter() - start) / 1e9


def from_other_core(block: Block, cores: tuple[int, int]) -> float:
    """The median over TURNS of reading `block`, which lies in shared memory, after another process wrote it."""
    mine, theirs = socket.socketpair()
    child = os.fork()
    if child == 0:
        mine.close()
        os.sched_setaffinity(0, {cores[1]})
        while order := theirs.recv(1):
            block.fill(order[0])
            theirs.send(order)
        os._exit(0)
    theirs.close()
    os.sched_setaffinity(0, {cores[0]})
    speeds = []
    for turn in range(1, TURNS + 1):
        mine.send(bytes([turn]))
        mine.recv(1)
        speeds.append(read_gbs(block))
        if block[-1] != turn:
            raise RuntimeError(f"read {block[-1]} where the other process wrote {turn}")
    mine.close()
    os.waitpid(child, 0)
    return statistics.median(speeds)


def cache_probe(pipe: Connection) -> None:
    """{"cores": [reader, writer], "memory": GB/s, "own_cache": {block: GB/s}, "other_core": {...}, "case": ...}.

    How fast a core reads what another core has just written, next to memory and to its own cache. Two processes, each
    bound to a core, take turns on a block of shared memory: one writes it, the other reads it once, timed. `memory` is
    a private block that no cache holds. The cores share a cache, as far as a collective notices, if reading the
    other's block beats reading memory at every size.
    """
    reader, writer, *_ = sorted(os.sched_getaffinity(0))
    os.sched_setaffinity(0, {reader})
    private = np.ones(MEMORY // 8, np.uint64)
    memory = statistics.median(read_gbs(private) for _ in range(3))
    own, other = {}, {}
    for name, size in BLOCKS.items():
        block = np.frombuffer(mmap.mmap(-1, size), np.uint64)
        block.fill(1)
        own[name] = statistics.median(read_gbs(block) for _ in range(TURNS))
        other[name] = from_other_core(block, (reader, writer))
    case = "shared cache" if min(other.values()) > memory else "no shared cache"
    pipe.send({"cores": [reader, writer], "memory": memory, "own_cache": own, "other_core": other, "case": case})


def caches() -> list[str]:
    """What the kernel says of the first core's caches, as "L3 Unified 480M, cores 0-1"; empty if it says nothing."""
    found = []
    for folder in sorted(Path("/sys/devices/system/cpu/cpu0/cache").glob("index*")):
        level, kind, size, cores = (
            (folder / name).read_text().strip() for name in ("level", "type", "size", "shared_cpu_list")
        )
        found.append(f"L{level} {kind} {size}, cores {cores}")
    return found


def make_header(settings: argparse.Namespace) -> dict[str, Any]:
    """What is run, on what machine, and how to read the figures."""
    origin = harness.origin("peers: collectives of ringreduce next to Gloo and MPI, and the cost of plain copies")
    origin["machine"]["caches"] = caches()
    return {
        **origin,
        "settings": {key: value for key, value in vars(settings).items() if key != "json"},
        "backends": {name: describe(name) for name in settings.backends},
        "method": list(METHOD),
        "probes": [],
    }


def describe(name: str) -> str:
    """How a backend is called and what was set for it."""
    if name not in MPIS:
        return OURS.get(name, "dist.all_reduce(tensor) etc. with backend gloo")
    mpi = MPIS[name]
    return " ".join((*(f"{key}={value}" for key, value in mpi.environment.items()), *mpi.launcher))


def format_header(header: dict[str, Any]) -> str:
    """The header as lines that start with "#"."""
    settings = header["settings"]
    return "\n".join(
        (
            *harness.format_origin(header),
            "# caches    " + "; ".join(header["machine"]["caches"]),
            *(f"# cores     {format_probe(found)}" for found in header["probes"][:1]),
            "# versions  " + ", ".join(f"{name} {version}" for name, version in header["versions"].items()),
            *(f"# backend   {name:<17} {how}" for name, how in header["backends"].items()),
            f"# schedule  {settings['rounds']} rounds of batches of {settings['batch_time']:g} s",
            *(f"# {line}" for line in header["method"]),
        )
    )


def format_probe(found: dict[str, Any]) -> str:
    """A probe as a line: what a core reads per second, from where."""
    own, other = found["own_cache"], found["other_core"]
    blocks = (f"{size} of its own {own[size]:.0f}, of another core's {other[size]:.0f}" for size in own)
    return f"{found['case']}; a core reads, in GB/s: {'; '.join(blocks)}; memory {found['memory']:.0f}"


def make_table(rows: Sequence[Row], backends: Sequence[str]) -> Table:
    """The rows of one collective and rank count, to be printed."""
    first = rows[0]
    seen = [f"{case} in {first.cases.count(case)} of {len(first.cases)} rounds" for case in dict.fromkeys(first.cases)]
    title = f"{first.collective}, {first.ranks} ranks, {first.dtype}, median us"
    table = Table(title="\n".join((title, *seen)))
    ours = [name for name in backends if name in OURS]
    for name in ("bytes", *backends, "best peer", "x best", "x gloo", "limit", *share_names(ours), "#wrong"):
        table.add_column(name, justify="right")
    for row in rows:
        table.add_row(
            harness.format_bytes(row.bytes),
            *(number(row.median_us.get(name)) for name in backends),
            row.best_peer or "-",
            ratio(row.vs_best_peer),
            ratio(row.vs_gloo),
            number(row.limit_us),
            *(f"{row.limit_share[name]:.0%}" if name in row.limit_share else "-" for name in ours),
            str(sum(row.wrong.values())),
        )
    return table


def share_names(ours: Sequence[str]) -> list[str]:
    return ["share" + name.removeprefix("ringreduce") for name in ours]


def number(value: float | None) -> str:
    """Microseconds with the digits that mean something."""
    if value is None:
        return "-"
    return f"{value:.{2 if value < 10 else 1 if value < 1000 else 0}f}"


def ratio(value: float | None) -> str:
    return "-" if value is None else f"{value:.2f}x"


def read_command_line() -> argparse.Namespace:
    """The command line, checked."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    option = parser.add_argument
    names = [*OURS, *PEERS]
    default = [name for name in names if name not in NOT_BY_DEFAULT]
    option("--setup-only", action="store_true", help="install the MPI libraries in bench/.peers, and end")
    option("--ranks", type=int, nargs="+", default=[2, 4, 8, 16], help="(default 2 4 8 16)")
    option("--collectives", nargs="+", choices=COLLECTIVES, default=COLLECTIVES, help="(default all)", metavar="NAME")
    option(
        "--min-bytes", type=harness.parse_bytes, default="8", help="first size; K, M, G are powers of 1024 (default 8)"
    )
    option("--max-bytes", type=harness.parse_bytes, default="256M", help="last size, always measured (default 256M)")
    option("--factor", type=int, default=8, help="each size over the one before (default 8)")
    option("--sizes", type=harness.parse_bytes, nargs="+", help="these sizes instead", metavar="SIZE")
    option(
        "--backends", nargs="+", choices=names, default=default, metavar="NAME", help=f"(default {' '.join(default)})"
    )
    option("--zero-copy", action="store_true", help="add ringreduce-shared: tensors of ringreduce.empty")
    option("--dtype", choices=BITS, default="float32", help="(default float32; MPI has no bfloat16)")
    option("--rounds", type=int, default=5, help="turns that each backend takes in a row (default 5)")
    option("--batch-time", type=float, default=0.1, help="seconds of calls in a turn, at least 3 calls (default 0.1)")
    option("--timeout", type=float, default=120, help="seconds that a batch, or a start, may take (default 120)")
    option("--json", type=Path, metavar="FILE", help="write header and rows")
    args = parser.parse_args()

    itemsize = int(BITS[args.dtype].itemsize)
    if min(args.ranks) < 2:
        parser.error("--ranks must be at least 2")
    if args.rounds < 1 or args.batch_time <= 0 or args.timeout <= 0:
        parser.error("--rounds must be at least 1, --batch-time and --timeout above 0")
    if args.max_bytes < args.min_bytes or args.factor < 2 or min(args.sizes or [args.min_bytes]) < itemsize:
        parser.error(f"need sizes of at least {itemsize}, --min-bytes <= --max-bytes and --factor >= 2")
    if args.dtype != "float32" and set(args.backends) & set(MPIS) and args.backends is not default:
        parser.error(f"--backends: MPI has no {args.dtype}; name only {' '.join([*OURS, 'gloo'])}")
    backends = [*args.backends, *(["ringreduce-shared"] if args.zero_copy else [])]
    args.backends = [n for n in names if n in backends and (args.dtype == "float32" or n not in MPIS)]
    args.sizes = args.sizes or list(harness.sizes(args.min_bytes, args.max_bytes, args.factor, itemsize))
    return args


def main() -> int:
    args = read_command_line()
    console = Console(width=None if sys.stdout.isatty() else 200, highlight=False)
    failed = install_all([name for name in args.backends if name in MPIS])
    for reason in failed.values():
        print(f"error: {reason}", file=sys.stderr)
    if args.setup_only:
        return 1 if failed else 0

    args.backends = [name for name in args.backends if name not in failed]
    header = make_header(args)
    if found := probe():
        header["probes"].append(found)
    console.out(format_header(header) + "\n")
    rows: list[Row] = []
    left_out = list(failed.values())
    calls = itertools.count(1)
    for ranks in args.ranks:
        notes = list(failed.values())
        with tempfile.TemporaryDirectory() as name, contextlib.ExitStack() as stack:
            folder = Path(name)
            teams = open_teams(args, ranks, folder, stack, notes)
            libraries = {team.name: team.version for team in teams if team.name in MPIS}
            header["versions"] |= libraries
            console.out("".join(f"# {name:<9} {version}\n" for name, version in libraries.items()))
            inputs = write_inputs(folder, args.dtype, ranks)
            for collective in args.collectives:
                measured, probes, failures = measure(args, collective, ranks, teams, inputs, calls)
                header["probes"] += probes
                notes += failures
                rows += measured
                if measured:
                    console.print(make_table(measured, args.backends))
                for note in notes:
                    console.out(f"# left out: {note}")
                left_out += [note for note in notes if note not in left_out]
                if args.json:  # a run takes hours; what is done is kept
                    harness.save(
                        args.json, {"header": header, "rows": [asdict(row) for row in rows], "notes": left_out}
                    )
    wrong = {name: sum(row.wrong.get(name, 0) for row in rows) for name in (*args.backends, *COPIES)}
    console.out(f"# {sum(wrong.values())} wrong elements" + "".join(f"; {n}: {c}" for n, c in wrong.items() if c))
    if args.json:
        console.out(f"# JSON in {args.json}")
    return 1 if any(wrong.values()) or left_out else 0


if __name__ == "__main__":
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))  # as with Ctrl-C, no process stays behind
    try:
        sys.exit(main())
    except KeyboardInterrupt:
        sys.exit(130)
