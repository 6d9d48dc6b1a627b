"""Operators of the user's own: ringreduce.Op next to the built-in sum, and next to mpi4py's Op.Create over Open MPI.

    python bench/operators.py                     2 ranks, 8 B, 1 MB and 16 MB, 5 rounds
    python bench/operators.py --rounds 3 --sizes 8 1M

Each round runs all cases of ringreduce in new processes, then all of mpi4py in others, which are installed beside this
file. A case's time is the median of its calls on the slowest rank, then the median of the
rounds. A ratio is the median over the rounds of the quotient of two times of one round. Results are checked.
"""

from __future__ import annotations

import json
import math
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import numpy as np

RATIOS = (
    ("Op(logaddexp)", "mpi4py Op(logaddexp)"),
    ("Op(add)", "mpi4py Op(add)"),
    ("Op(function)", "mpi4py Op(add)"),
    ("Op.argmax of a tuple", "MPI.MAXLOC of pairs"),
    ("Op.argmax of records", "MPI.MAXLOC of pairs"),
    ("Op(argmax of a tuple)", "MPI.MAXLOC of pairs"),
    ("Op.numba(argmax)", "MPI.MAXLOC of pairs"),
    ("Op.numba(a + b)", "mpi4py Op(add)"),
    ("Op.numba(a + b)", "built-in sum"),
    ("Op(add)", "built-in sum"),
    ("Op(function)", "built-in sum"),
)
Case = tuple[Callable[[], object], Callable[[], object], Callable[[], bool]]
"""Before each call, the call, and whether its result is right."""


def medians(cases: dict[str, Case], size: int, barrier: Callable[[], object], slowest: Callable[[Any], Any]) -> Any:
    """Microseconds of each case."""
    found = {}
    calls = 300 if size < 1024 else 20 if size < 1 << 22 else 8
    for name, (prepare, call, right) in cases.items():
        times = []
        for _ in range(calls + 2):
            prepare()
            barrier()
            begin = time.perf_counter()
            call()
            times.append(time.perf_counter() - begin)
        if not right():
            raise SystemExit(f"{name} of {size} bytes is wrong")
        found[name] = float(np.median(slowest(np.array(times[2:])))) * 1e6
    return found


def values_of(rank: int, count: int) -> Any:
    """The highest are on different ranks."""
    return ((np.arange(count) * 7 + rank * 5) % 11).astype(np.float64)


def close(values: Any, expected: float) -> bool:
    return bool(np.allclose(values, expected))


def is_best(values: Any, indices: Any, ranks: int) -> bool:
    """Whether each value is the highest of all ranks, with the first rank that has it."""
    every = np.stack([values_of(rank, len(values)) for rank in range(ranks)])
    return bool((values == every.max(0)).all() and (indices == every.argmax(0)).all())


def ours(size: int, ranks: int) -> Any:
    """On each rank, in a group of ringreduce. As in `theirs`, the library's own barrier comes before each call."""
    import torch
    import torch.distributed as dist

    import ringreduce

    group = dist.new_group(backend="ringreduce")
    rank, x = dist.get_rank(), torch.empty(size // 4)
    count = max(1, size // 16)
    value, index = torch.empty(count, dtype=torch.float64), torch.empty(count, dtype=torch.int64)
    add, log = ringreduce.Op.torch(torch.add), ringreduce.Op.torch(torch.logaddexp)
    function = ringreduce.Op.torch(lambda a, b: a + b, name="a + b")
    argmax = ringreduce.Op.argmax()
    pairs = np.empty(count, [("value", "f8"), ("index", "i8")])

    def later(a: Any, b: Any) -> Any:
        wins = b[0] > a[0]
        return torch.where(wins, b[0], a[0]), torch.where(wins, b[1], a[1])

    pair = ringreduce.Op.torch(later, tensors=2)
    given = values_of(rank, count)

    def fill_pairs() -> None:
        value.copy_(torch.from_numpy(given))
        index.fill_(rank)

    def fill_records() -> None:
        pairs["value"], pairs["index"] = given, rank

    def slowest(seconds: Any) -> Any:
        ringreduce.all_reduce(seconds, dist.ReduceOp.MAX, group)
        return seconds

    def pairs_are_right() -> bool:
        return is_best(value.numpy(), index.numpy(), ranks)

    def records_are_right() -> bool:
        return is_best(pairs["value"], pairs["index"], ranks)

    def case(prepare: Callable[[], object], what: Any, right: Callable[[], bool], *op: Any) -> Case:
        return prepare, lambda: ringreduce.all_reduce(what, *op, group=group), right

    ones, sums, tuples = lambda: x.fill_(1.0), lambda: close(x, ranks), (value, index)
    cases: dict[str, Case] = {
        "built-in sum": case(ones, x, sums),
        "Op(add)": case(ones, x, sums, add),
        "Op(logaddexp)": case(ones, x, lambda: close(x, 1 + math.log(ranks)), log),
        "Op(function)": case(ones, x, sums, function),
        "Op(argmax of a tuple)": case(fill_pairs, tuples, pairs_are_right, pair),
        "Op.argmax of a tuple": case(fill_pairs, tuples, pairs_are_right, argmax),
        "Op.argmax of records": case(fill_records, pairs, records_are_right, argmax),
    }
    if find_spec("numba"):

        def larger(a: Any, b: Any, out: Any) -> None:
            best = b if b.value > a.value else a
            out.value, out.index = best.value, best.index

        plus, record = ringreduce.Op.numba(lambda a, b: a + b, "f4"), ringreduce.Op.numba(larger, pairs.dtype)
        cases["Op.numba(a + b)"] = case(ones, x, sums, plus)
        cases["Op.numba(argmax)"] = case(fill_records, pairs, records_are_right, record)
    return medians(cases, size, lambda: ringreduce.barrier(group), slowest)


def theirs(size: int) -> None:
    """On each rank of Open MPI: prints the times as JSON. There is no torch in its environment."""
    from mpi4py import MPI

    world = MPI.COMM_WORLD
    ranks, x, out = world.size, np.empty(size // 4, np.float32), np.empty(size // 4, np.float32)
    count = max(1, size // 16)
    kind = np.dtype([("value", "f8"), ("index", "i4")], align=True)
    pairs, best = np.zeros(count, kind), np.zeros(count, kind)
    pairs["value"], pairs["index"] = values_of(world.rank, count), world.rank

    def of(ufunc: Any) -> Any:
        def combine(a: Any, b: Any, _: Any) -> None:
            left, right = np.frombuffer(a, np.float32), np.frombuffer(b, np.float32)
            ufunc(left, right, out=right)

        return MPI.Op.Create(combine, commute=False)

    ones = lambda: x.fill(1.0)  # noqa: E731
    add, log = of(np.add), of(np.logaddexp)
    cases: dict[str, Case] = {
        "mpi4py Op(add)": (ones, lambda: world.Allreduce(x, out, add), lambda: close(out, ranks)),
        "mpi4py Op(logaddexp)": (
            ones,
            lambda: world.Allreduce(x, out, log),
            lambda: close(out, 1 + math.log(ranks)),
        ),
        "MPI.MAXLOC of pairs": (
            lambda: None,
            lambda: world.Allreduce([pairs, MPI.DOUBLE_INT], [best, MPI.DOUBLE_INT], MPI.MAXLOC),
            lambda: is_best(best["value"], best["index"], ranks),
        ),
    }

    def slowest(seconds: Any) -> Any:
        world.Allreduce(MPI.IN_PLACE, seconds, MPI.MAX)
        return seconds

    found = medians(cases, size, world.Barrier, slowest)
    if world.rank == 0:
        print(json.dumps(found))


def run_mpi(ranks: int, size: int) -> dict[str, float]:
    from peer_team import launch

    command = [*launch("openmpi", ranks)[0], Path(__file__), "--mpi", str(size)]
    done = subprocess.run(command, check=True, capture_output=True, text=True, timeout=600)
    found: dict[str, float] = json.loads(done.stdout.splitlines()[-1])
    return found


def operators(
    ranks: int = 2, rounds: int = 5, sizes: tuple[harness.Bytes, ...] = (8, 1 << 20, 16 << 20)
) -> Iterator[dict[str, Any]]:
    from peer_team import install_all

    missing = install_all(["openmpi"])
    yield from ({"note": reason} for reason in missing.values())
    for size in sizes:
        name, found = harness.format_bytes(size), []
        for _ in range(rounds):
            each: dict[str, float] = harness.start_ranks(ranks, ours, size, ranks)
            found.append(each if missing else each | run_mpi(ranks, size))
        for case in found[0]:
            yield {"size": name, "case": case, "us": statistics.median(each[case] for each in found)}
        for case, other in RATIOS:
            if {case, other} <= found[0].keys():
                ratio = statistics.median(each[case] / each[other] for each in found)
                yield {"size": name, "case": case, "ratio": ratio, "to": other}


if __name__ == "__main__":
    if sys.argv[1:2] == ["--mpi"]:  # a rank of Open MPI, which has no torch
        theirs(int(sys.argv[2]))
    else:
        import harness

        sys.exit(harness.main(operators))
