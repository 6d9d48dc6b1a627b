"""What Gloo, three MPI libraries, oneCCL and ringreduce do with the same call: the table of docs/differences.md.

    python bench/differences.py                        install the others beside this file, once, and print the table
    python bench/differences.py --write                and put it into docs/differences.md
    python bench/differences.py --peers gloo ringreduce --ranks 4

With each number of --ranks every library makes the calls on this host (differences_rank.py); in the last one a rank is
killed. A cell says what came on all ranks; where that depends on the number of elements or ranks, the most frequent
answer comes first. "refused": all ranks had an error; "not offered": the library has no such name; --json has the
texts.
"""

import contextlib
import itertools
import json
import math
import os
import re
import signal
import subprocess
import sys
import tempfile
import textwrap
import time
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from pathlib import Path
from typing import Any, Literal, NamedTuple

import harness
import numpy as np
import torch
from differences_rank import Values, compose
from peer_team import FOLDER, MPIS, install_all, launch

from ringreduce.cli.bench.team import ONE_THREAD

Peer = Literal["gloo", "openmpi", "mpich", "impi", "oneccl", "ringreduce"]
PEERS: dict[Peer, str] = {
    "gloo": "Gloo", "openmpi": "Open MPI", "mpich": "MPICH", "impi": "Intel MPI", "oneccl": "oneCCL",
    "ringreduce": "ringreduce",
}  # fmt: skip
PAGE = harness.ROOT / "docs/differences.md"
MARKS = "<!-- python bench/differences.py --write -->\n", "<!-- end -->"
UNITS = "", " elements", " ranks"
PATIENCE = 30.0  # seconds
Found = Sequence[Values]


class Probe(NamedTuple):
    """A row: what is asked, calls by name, what ranks are given, what a result is called, the test that holds ours."""

    what: str
    calls: dict[str, tuple[Any, ...]]
    given: Callable[[int, int], Values]
    """Of the number of ranks and that of elements, a row a rank."""
    judge: Callable[[Values, Found], str]
    test: str
    counts: tuple[int, ...] = (1, 16, 1003, 300_000)


# what ranks are given


def random(ranks: int, count: int) -> Values:
    """Sums depend on the order."""
    return np.random.default_rng(ranks).standard_normal((ranks, count)).astype(np.float32)


def zeros(ranks: int, count: int) -> Values:
    return np.copysign(0.0, np.add.outer(np.arange(ranks), np.arange(count)) % 2 - 0.5).astype(np.float32)


def payloads(ranks: int, count: int) -> Values:
    return np.repeat(0x7FC00001 + np.arange(ranks, dtype=np.uint32)[:, None], count, 1).view(np.float32)


def one_nan(ranks: int, count: int) -> Values:
    """Element i is NaN on rank i % ranks."""
    values = random(ranks, count)
    values[np.arange(count) % ranks, np.arange(count)] = math.nan
    return values


def exact(dtype: str, ranks: int, count: int) -> Values:
    """Numbers whose sums are exact in float32, as bits."""
    unit = torch.finfo(getattr(torch, dtype)).eps / 2
    whole = np.random.default_rng(ranks).integers(-1 / unit, 1 / unit + 1, (ranks, count))
    return bits(torch.from_numpy(whole * unit), dtype)


def bits(tensor: torch.Tensor, dtype: str) -> Values:
    rounded = tensor.float().to(getattr(torch, dtype))
    return rounded.view(torch.uint8 if rounded.itemsize == 1 else torch.uint16).numpy()


def ties(ranks: int, count: int) -> Values:
    """Equal values; the last rank has the lowest index."""
    pairs = np.zeros((ranks, count), np.dtype([("value", "f8"), ("index", "i4")], align=True))
    pairs["index"] = np.arange(ranks)[::-1, None]
    return pairs


def maps(ranks: int, count: int) -> Values:
    return np.random.default_rng(ranks).integers(0, 1 << 62, (ranks, count))


def numbers(ranks: int, count: int) -> Values:
    return np.repeat(np.arange(1, ranks + 1, dtype=np.float32)[:, None], count, 1)


# what a result is called


def same(given: Values, found: Found) -> bool:
    return all(each.tobytes() == found[0].tobytes() for each in found)


def equal(given: Values, found: Found) -> str:
    return "equal" if same(given, found) else "**differ**"


def in_order(given: Values, found: Found) -> str:
    left_fold = list(itertools.accumulate(given, compose if given.dtype == np.int64 else np.add))[-1]
    if not same(given, found):
        return "**differs between ranks**"
    return "in rank order" if (found[0] == left_fold).all() else "in other orders"


def nan_is(given: Values, found: Found) -> str:
    kept = np.isnan(np.stack(found))
    if (kept != kept[0]).any():
        return "**differs between ranks**"
    return "kept" if kept.all() else "lost" if not kept.any() else "lost from some ranks"


def roundings(dtype: str, given: Values, found: Found) -> str:
    total = torch.from_numpy(given).view(getattr(torch, dtype)).float().sum(0)
    text = "rounded once" if (found[0] == bits(total, dtype)).all() else "rounded several times"
    return text if same(given, found) else text + ", **differ**"


def values(dtype: str, given: Values, found: Found) -> str:
    return ", ".join(sorted({f"{each:g}" for row in found for each in row.view(dtype)}))


def winner(given: Values, found: Found) -> str:
    indices = {int(each) for row in found for each in row["index"]}
    known = {0: "lowest index", len(given) - 1: "lowest rank"}
    return known[indices.pop()] if len(indices) == 1 else "**differs between ranks**"


def lengths(given: Values, found: Found) -> str:
    fewest, most = min(map(len, found)), max(map(len, found))
    calls = f"{most}" if fewest == most else f"{fewest or 'none'} on some ranks, {most} on others"
    return f"{calls}, of up to {np.concatenate(found).max()} elements"


def every_second(all_reduce: bool, given: Values, found: Found) -> str:
    right, first = given.copy(), given.copy()
    right[:, ::2] = first[:, : given.shape[1] // 2] = given[:, 0].sum() if all_reduce else given[0, 0]
    answers = {"works": right, "**the first half instead**": first}
    return next((text for text, each in answers.items() if (np.stack(found) == each).all()), "**wrong**")


SAME = "distributed/test_collectives.py::test_results_are_the_same_bits_on_all_ranks_and_every_time"
ORDER = "unit/test_plan_order.py::test_which_built_in_plans_are_in_order"
ROUNDED = "distributed/test_rounding.py::test_by_every_plan_on_one_host"
GRID = "distributed/test_grid.py::test_every_dtype_operation_and_layout"
KILLED = "a rank is killed: the others"
SUM = {"": ("all_reduce", "float32", "SUM")}
EXTREMES = {op: ("all_reduce", "float32", op) for op in ("MIN", "MAX")}
PROBES = (
    Probe("float32 sums: bits on all ranks", SUM, random, equal, SAME),
    Probe("float32 sums: added", SUM, random, in_order, ORDER),
    Probe("sums of different NaN: bits on all ranks", SUM, payloads, equal, SAME),
    Probe("`MIN`, `MAX` of 0 and -0: bits on all ranks", EXTREMES, zeros, equal, SAME),
    Probe("`MIN`, `MAX` of NaN and numbers: NaN is", EXTREMES, one_nan, nan_is,
          "unit/test_kernels.py::test_min_and_max_keep_nan"),
    *(
        Probe(f"sums of {kind}", {"": ("all_reduce", kind, "SUM")}, partial(exact, kind), partial(roundings, kind),
              ROUNDED, counts=(1003, 300_000))
        for kind in ("float16", "bfloat16", "float8_e4m3fn", "float8_e5m2")
    ),
    Probe("`AVG` of int32", {"": ("all_reduce", "int32", "AVG")}, lambda *shape: np.full(shape, 3, np.int32),
          partial(values, "i4"), "frameworks/test_pages.py::test_dtypes_that_the_table_has"),
    Probe("`AVG` of float16: 60000 on all ranks", {"": ("all_reduce", "float16", "AVG")},
          lambda *shape: np.full(shape, 60000, np.float16), partial(values, "f2"), ROUNDED),
    Probe("argmax of equal values", {"": ("argmax",)}, ties, winner,
          "distributed/test_library_operators.py::test_the_highest_and_the_lowest"),
    Probe("a function that does not commute", {"": ("combine",)}, maps, in_order,
          "distributed/test_operators.py::test_every_call_combines_in_rank_order"),
    Probe("how often a rank calls a function for 300000 elements", {"": ("pieces",)}, maps, lengths,
          "distributed/test_operators.py::test_the_engine_calls_functions_in_python", counts=(300_000,)),
    Probe("all_reduce of no elements", SUM, numbers, lambda *_: "works", GRID, counts=(0,)),
    *(
        Probe(f"{call} of every second element", {"": ("strided", call)}, numbers,
              partial(every_second, call == "all_reduce"), GRID, counts=(4, 1002))
        for call in ("all_reduce", "broadcast")
    ),
    Probe(KILLED, {"": ("killed",)}, numbers, equal,
          "distributed/test_faults.py::test_survivors_of_a_kill_name_the_dead_rank_at_once", counts=(1003,)),
)  # fmt: skip


class Run:
    """A library's ranks, which make all calls of the probes and end on leaving."""

    def __init__(self, peer: Peer, ranks: int, **more: str) -> None:
        self.ranks, self.folder = ranks, tempfile.TemporaryDirectory(ignore_cleanup_errors=True)
        self.path = Path(self.folder.name)
        self.calls = [(probe, name, count) for probe in PROBES for name in probe.calls for count in probe.counts]
        self.given = [probe.given(ranks, count) for probe, _, count in self.calls]
        (self.path / "orders.json").write_text(json.dumps([probe.calls[name] for probe, name, _ in self.calls]))
        for number, given in enumerate(self.given):
            np.save(self.path / f"{number}.npy", given)
        program: list[str | Path] = [FOLDER / "differences_rank.py", peer, self.path]
        commands, variables = [[sys.executable, *program, str(rank), str(ranks)] for rank in range(ranks)], {}
        if peer in MPIS:
            launcher, variables = launch(peer, ranks)
            commands = [[*launcher, *program]]
        environment = os.environ | ONE_THREAD | {"PYTHONPATH": str(harness.ROOT)} | variables | more
        with (self.path / "log").open("w") as log:
            start = partial(subprocess.Popen, stdin=subprocess.DEVNULL, stdout=log, stderr=log, start_new_session=True)
            self.processes = [start(command, env=environment) for command in commands]

    def __enter__(self) -> "Run":
        """All results are there, or the processes ended, or patience did."""
        deadline = time.monotonic() + PATIENCE
        while time.monotonic() < deadline and any(each.poll() is None for each in self.processes):
            if all(each is not None for each in self.found(len(self.calls) - 1)[:-1]):
                break
            time.sleep(0.002)
        self.ended = time.monotonic()
        return self

    def __exit__(self, *_: object) -> None:
        for process in self.processes:  # a launcher ends its ranks, which are in process groups of their own
            for number in (signal.SIGTERM, signal.SIGKILL):
                with contextlib.suppress(ProcessLookupError, subprocess.TimeoutExpired):
                    os.killpg(process.pid, number)
                    process.wait(5)
        self.folder.cleanup()

    def found(self, call: int) -> list[Any]:
        """What a call has left on each rank; None: nothing (yet)."""
        results: list[Any] = [None] * self.ranks
        for rank in range(self.ranks):
            with contextlib.suppress(OSError, ValueError, EOFError):
                results[rank] = np.load(self.path / f"{call}.{rank}.npy")
        return results

    def answers(self) -> Iterator[tuple[str, tuple[str, ...], str, str]]:
        """Of each call its question, its case, the answer, and the text of an error."""
        for number, (probe, name, count) in enumerate(self.calls):
            found = self.found(number)
            errors = [str(each[0]) for each in found if each is not None and each.dtype.kind == "U"]
            if probe.what == KILLED and (self.path / "death").exists():
                answer, errors = self.fate(found[:-1], float(np.fromfile(self.path / "death")[0])), []
            elif any(each is None for each in found) or 0 < len(errors) < self.ranks:
                answer = "**no result on some ranks**"
                errors.append((self.path / "log").read_text(errors="replace")[-1000:])
            else:
                absent = any(text.startswith(("NotOffered", "AttributeError")) for text in errors)
                refused = "not offered" if absent else "refused"
                answer = refused if errors else probe.judge(self.given[number], found)
            yield probe.what, (name, str(count), str(self.ranks)), answer, "\n".join(dict.fromkeys(errors))

    def fate(self, others: list[Any], death: float) -> str:
        """What the death of the last rank did to the others."""
        raised = [each for each in others if each is not None]
        took = max([float(each[1]) for each in raised] + [self.ended] * (len(raised) < len(others))) - death
        soon = f"within {10.0 ** math.ceil(math.log10(max(0.1, took))):g} s"
        if not raised and took < PATIENCE / 2:
            return f"are ended by mpiexec {soon}"
        kinds = ", ".join(sorted({f"`{each[0].partition(':')[0]}`" for each in raised}))
        if len(raised) < len(others):
            return f"{len(raised)} of {len(others)} raise {kinds}, **the rest wait** for over {took // 10 * 10:g} s"
        named = all(re.search(rf"\brank {len(others)}\b", each[0]) for each in raised)
        return f"raise {kinds} {soon}" + (", which names it" if named else "")


def cell(answers: dict[tuple[str, ...], str]) -> str:
    """The most frequent answer, then each other one with the cases in which it came."""
    every = [dict.fromkeys(each) for each in zip(*answers, strict=True)]
    parts = []
    for text, _ in Counter(answers.values()).most_common():
        cases = [key for key, each in answers.items() if each == text]
        found = [dict.fromkeys(each) for each in zip(*cases, strict=True)]
        kinds = [found]  # all combinations of these
        if len(cases) < math.prod(map(len, found)):
            kinds = [[{label: None} for label in key] for key in cases]
        where = [
            " on ".join(
                f"{', '.join(some)}{unit}" for some, of, unit in zip(kind, every, UNITS, strict=True) if some != of
            )
            for kind in kinds
        ]
        parts.append(text + f" ({'; '.join(where)})" * bool(parts))
    return "; ".join(parts).replace("(1 elements", "(1 element")


def ask(peer: Peer, ranks: Sequence[int], row_of: dict[str, dict[str, Any]], **more: str) -> str:
    """Fills the cells of a library; returns its version."""
    answers: dict[str, dict[tuple[str, ...], str]] = {what: {} for what in row_of}
    for count in ranks:
        with Run(peer, count, **more) as run:
            for what, case, answer, error in run.answers():
                answers[what][case] = answer
                if error:
                    row_of[what].setdefault("errors", {})[f"{peer} on {count} ranks"] = error
            if not (run.path / "version").exists():
                raise harness.CannotRun(f"{PEERS[peer]} did not start: {(run.path / 'log').read_text()[-1000:]}")
            version = (run.path / "version").read_text()
    killed = answers[KILLED]
    soon = re.findall(r"within [\d.]+ s", " ".join(killed.values()))
    slowest = max(soon, key=lambda text: float(text.split()[1]), default="")
    killed |= {case: re.sub(r"within [\d.]+ s", slowest, text) for case, text in killed.items()}
    for what, row in row_of.items():
        found = cell(answers[what])
        if not more:
            row[PEERS[peer]] = found
        elif row[PEERS[peer]] in ("not offered", "refused") and found not in ("not offered", "refused"):
            row[PEERS[peer]] = f"with {' '.join(f'`{key}={value}`' for key, value in more.items())}: {found}"
    return version


def differences(
    peers: tuple[Peer, ...] = tuple(PEERS), ranks: tuple[int, ...] = (3, 4), write: bool = False
) -> Iterator[dict[str, Any]]:
    if write and set(peers) != set(PEERS):
        raise harness.CannotRun("--write: the page has all libraries; leave out --peers")
    failed = install_all([peer for peer in peers if peer in MPIS])
    yield from ({"note": reason} for reason in failed.values())
    row_of: dict[str, dict[str, Any]] = {probe.what: {"what": probe.what} for probe in PROBES}
    versions = {peer: ask(peer, ranks, row_of) for peer in peers if peer not in failed}
    if "oneccl" in versions:
        ask("oneccl", ranks, row_of, CCL_ATL_TRANSPORT="ofi")  # which has functions of one's own
    yield {"header": versions}
    yield from row_of.values()
    if write and not failed:
        put_into_page(row_of, versions)


def put_into_page(row_of: dict[str, dict[str, Any]], versions: dict[Peer, str]) -> None:
    lines = [["call", *PEERS.values(), "our test"], ["---"] * (len(PEERS) + 2)]
    for probe in PROBES:
        path, _, name = probe.test.partition("::")
        link = f'[{Path(path).stem}](../tests/{path} "{name}")'
        lines.append([probe.what, *(row_of[probe.what][peer] for peer in PEERS.values()), link])
    facts = harness.machine()
    used = [f"{PEERS[peer]} {text}" if peer in ("gloo", "ringreduce") else text for peer, text in versions.items()]
    place = f"{facts['cores']} cores of an {facts['cpu']}, {str(facts['kernel']).partition('-')[0]}"
    origin = textwrap.fill(f"Made on {harness.now()} on {place}, with {'; '.join(used)}.", 128, break_on_hyphens=False)
    table = "".join(f"| {' | '.join(line)} |\n" for line in lines)
    before, start, rest = PAGE.read_text().partition(MARKS[0])
    PAGE.write_text(f"{before}{start}{origin}\n\n{table}{MARKS[1]}{rest.partition(MARKS[1])[2]}")


if __name__ == "__main__":
    sys.exit(harness.main(differences))
