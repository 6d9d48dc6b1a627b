"""Collectives of ringreduce next to Gloo, Open MPI, MPICH, Intel MPI and oneCCL, and what plain copies cost.

    python bench/peers.py --setup-only                        install the MPI libraries beside this file, once
    python bench/peers.py --json peers.json                   everything: 2 to 16 ranks, 8 B to 256 MB; takes hours
    python bench/peers.py --ranks 2 --collectives all_reduce --sizes 64 32K 1M 64M --backends ringreduce-shared impi
    python bench/peers.py --ranks 4 --collectives all_reduce --sizes 64 1M --beside 2 --nice 10    on a machine in use
    python bench/peers.py --ranks 2 --collectives all_reduce --sizes 64 1M --work 20    in a program that computes

Every backend is a team of processes (peer_team.py) that lives through all rows of a rank count and sleeps on a socket
while another team measures. dist.* and direct calls on torch tensors, mpi4py on NumPy arrays, one CPU thread per rank;
all memory is NumPy's, so it has huge pages where the kernel gives them on request. all_reduce and broadcast work in
place. A batch: barrier, an untimed call, --batch-time seconds of timed calls back to back, 3 at least; its figure is
the median over the calls of the slowest rank's time. Teams take turns, batch by batch, row by row, round by round; a
row's figure is the median of --rounds. --beside: meanwhile, so many other processes compute all the time, at a priority
lower by --nice. Then a batch's mean counts, in which are the calls that waited for a core. --work: before each call a
rank computes for so many microseconds of its CPU time, which count neither for the figures nor for --batch-time.

    bytes    the largest buffer of a rank, as in nccl-tests: all_gather's output, reduce_scatter's input or the tensor
    NAME     of a backend: microseconds. ringreduce is the direct call, ringreduce-dist that of torch.distributed,
             ringreduce-shared the direct one on tensors of ringreduce.empty, and ringreduce-allocated on those of
             torch.empty after ringreduce.share_allocations()
    x best   the best peer's median over that of the first of ours. x gloo: the same of Gloo
    mean     of NAME, with --beside or --work: of the calls of a batch, on the rank where it is the longest. x best
             mean: as above
    limit    reading each input byte once and writing each output byte once, at the rate at which min(ranks, cores)
             processes copy private buffers of the row's size at the same time, in the same round, by the faster kind of
             copy; none below 32 KiB, where a copy takes less time than its call
    share    limit over the time of ours
    wrong    elements that differ from the exact result, on any rank, in the call that ends each batch, all rounds
    shared   rounds in which the cores shared a cache: a core read what another core had just written faster than
             memory. It can change while a machine runs, as its virtual cores are moved (`cache_probe`)

`--json` also has for each row `cases` (of `cache_probe`, per round), and for each backend `times_us` and `means_us`
(per round: median and mean of the calls), `wrong_in`, and `copy_gbs` (per round, for each kind of copy).
"""

import contextlib
import itertools
import mmap
import os
import socket
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any, Literal, get_args

import harness
import numpy as np
from numpy.typing import NDArray
from peer_team import COPIES, MPIS, install_all, start_of

from ringreduce.cli.bench import turns
from ringreduce.cli.bench.team import BackendFailed, Team
from ringreduce.cli.bench.turns import free_memory, take_turns
from ringreduce.cli.bench.worker import Layout, write_inputs

Block = NDArray[np.uint64]
BLOCKS = {"256 KiB": 1 << 18, "4 MiB": 1 << 22}
MEMORY = 1 << 30  # bytes; more than any cache of a machine met so far, the largest being 480 MiB
TURNS = 30
SHARED = "shared cache"

Collective = Literal["all_reduce", "reduce_scatter", "all_gather", "broadcast", "all_to_all"]
COLLECTIVES: tuple[Collective, ...] = get_args(Collective)
DIVIDED = ("reduce_scatter", "all_gather", "all_to_all")  # their largest buffer has a part for each rank


PEERS = ("gloo", *MPIS)
LEAST_LIMIT = 32 << 10  # bytes; a smaller copy takes less time than calling it, so it limits nothing

DTYPE = "float32"
LEAST_ITERATIONS = 3  # calls in a batch
TIMEOUT = 120.0  # seconds; a team that takes longer is ended
CALLS = itertools.count(1)

Ours = Literal["ringreduce", "ringreduce-dist", "ringreduce-shared", "ringreduce-allocated"]
OURS: tuple[Ours, ...] = get_args(Ours)
Backend = Literal[Ours, "gloo", "openmpi", "mpich", "impi", "oneccl"]
DEFAULT: tuple[Backend, ...] = ("ringreduce", "ringreduce-dist", "gloo", "openmpi", "mpich", "impi")


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


def compute_beside(count: int, nice: int, stack: contextlib.ExitStack) -> None:
    """Start so many processes that compute until `stack`, or this process, ends."""
    program = f"import os; os.nice({nice})\nwhile os.getppid() == {os.getpid()}: sum(range(1_000_000))"
    for _ in range(count):
        stack.callback(stack.enter_context(subprocess.Popen([sys.executable, "-c", program])).kill)


def of_ours(us: Mapping[str, float]) -> float | None:
    """The first of ours."""
    return next((us[name] for name in OURS if name in us), None)


def best_peer(us: Mapping[str, float]) -> tuple[str, float] | None:
    """Its name, and how many times as long as ours it takes."""
    best, ours = min((name for name in PEERS if name in us), key=lambda name: us[name], default=None), of_ours(us)
    return (best, us[best] / ours) if best and ours else None


def make_row(tally: Tally, cases: Sequence[str], with_means: bool) -> dict[str, Any]:
    """The row of what its rounds found."""
    layout, size, us = tally.layout, tally.size, tally.median_us
    row: dict[str, Any] = {"collective": layout.collective, "ranks": layout.ranks, "bytes": size, **us}
    if cases:
        row["shared"] = f"{cases.count(SHARED)} of {len(cases)}"
    if found := best_peer(us):
        row |= {"best peer": found[0], "x best": found[1]}
    if with_means:
        means = {name: statistics.median(each) for name, each in tally.means_us.items()}
        row |= {f"mean {name}": mean for name, mean in means.items()}
        if found := best_peer(means):
            row["x best mean"] = found[1]
    if "gloo" in us and (ours := of_ours(us)):
        row["x gloo"] = us["gloo"] / ours
    rates = [statistics.median(rates) for rates in tally.copy_gbs.values()]
    if rates and size >= LEAST_LIMIT:
        row["limit"] = least_traffic(layout.collective, layout.ranks, size) / max(rates) / 1e3
        row |= {"share" + name.removeprefix("ringreduce"): row["limit"] / us[name] for name in OURS if name in us}
    row |= {"wrong": sum(tally.wrong.values()), "wrong_in": tally.wrong, "copy_gbs": tally.copy_gbs}
    return row | {"times_us": tally.times_us, "means_us": tally.means_us, "cases": list(cases)}


def layouts(collective: str, ranks: int, sizes: Sequence[int]) -> list[Layout]:
    """The rows of a table: `sizes` in whole elements, and where a buffer is divided, rounded up to equal parts."""
    unit = ranks if collective in DIVIDED else 1
    counts = dict.fromkeys(-(-size // 4 // unit) * unit for size in sizes)
    return [Layout(collective, ranks, count) for count in counts]


def open_teams(
    backends: Sequence[str], ranks: int, folder: Path, stack: contextlib.ExitStack, notes: list[str]
) -> list[Team]:
    """The backends' teams and those that copy, without the ones that failed."""
    teams: list[Team] = []
    for name in (*backends, *COPIES):
        size = min(ranks, len(os.sched_getaffinity(0))) if name in COPIES else ranks
        try:
            teams.append(Team(name, size, folder, TIMEOUT, *start_of(name, size)))
            stack.callback(teams[-1].close)
        except BackendFailed as error:
            notes.append(str(error))
    return teams


def measure(
    collective: str,
    ranks: int,
    teams: list[Team],
    inputs: Path,
    sizes: Sequence[int],
    rounds: int,
    batch_time: float,
    work: float,
    with_means: bool,
    notes: list[str],
) -> Iterator[dict[str, Any]]:
    """All rows of a collective and rank count. Teams that fail leave `teams`, and `notes` says so.

    A round before the first is not counted: it finds out how many calls fill a batch.
    """
    tallies, cases = [], []
    for layout in layouts(collective, ranks, sizes):
        size = layout.count * 4
        needed = ranks * (layout.inputs + (0 if layout.in_place else layout.outputs)) * 4
        if needed < free_memory():
            tallies.append(Tally(layout=layout, size=size))
        else:
            notes.append(f"{collective} of {size} B with {ranks} ranks: needs {needed / 1e9:.1f} GB")

    def order(tally: Tally, team: Team) -> dict[str, Any]:
        return {
            "collective": "copy" if team.name in COPIES else collective,
            "dtype": DTYPE,
            "bytes": tally.size,
            "call": next(CALLS),
            "inputs": str(inputs),
            "work_us": work,
        }

    played = take_turns(
        tallies,
        teams,
        order,
        lambda error: notes.append(str(error)),
        rounds=rounds,
        batch_time=batch_time,
        least=LEAST_ITERATIONS,
    )
    for turn in played:
        print(f"{collective}, {ranks} ranks: round {turn} of {rounds} done", file=sys.stderr, flush=True)
        if turn < rounds and (found := probe()):
            cases.append(found["case"])
    yield from (make_row(tally, cases, with_means) for tally in tallies)


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
    case = SHARED if min(other.values()) > memory else "no shared cache"
    pipe.send({"cores": [reader, writer], "memory": memory, "own_cache": own, "other_core": other, "case": case})


def peers(
    setup_only: bool = False,
    ranks: tuple[int, ...] = (2, 4, 8, 16),
    collectives: tuple[Collective, ...] = COLLECTIVES,
    sizes: tuple[harness.Bytes, ...] = (*(8 << 3 * step for step in range(9)), 256 << 20),
    backends: tuple[Backend, ...] = DEFAULT,
    rounds: int = 5,
    batch_time: float = 0.1,
    beside: int = 0,
    nice: int = 0,
    work: float = 0.0,
) -> Iterator[dict[str, Any]]:
    if min(ranks) < 2 or rounds < 1 or batch_time <= 0 or min(sizes) < 4 or min(beside, nice, work) < 0:
        raise harness.CannotRun(
            "need 2 --ranks, 1 of --rounds and --sizes of 4 B, or more, --batch-time above 0, and no negative number"
        )
    names = [name for name in (*OURS, *PEERS) if name in backends]
    failed = install_all([name for name in names if name in MPIS])
    yield from ({"note": reason} for reason in failed.values())
    if setup_only:
        return
    names = [name for name in names if name not in failed]
    yield {"header": {"probe": probe()}}
    for count in ranks:
        with tempfile.TemporaryDirectory() as name, contextlib.ExitStack() as stack:
            folder, notes = Path(name), list[str]()
            teams = open_teams(names, count, folder, stack, notes)
            yield {"header": {f"{team.name} is": team.version for team in teams if team.name in MPIS}}
            inputs = write_inputs(folder, DTYPE, count)
            compute_beside(beside, nice, stack)
            means = beside + work > 0
            for collective in collectives:
                yield from measure(collective, count, teams, inputs, sizes, rounds, batch_time, work, means, notes)
            yield from ({"note": note} for note in notes)


if __name__ == "__main__":
    sys.exit(harness.main(peers))
