"""`ringreduce bench`: does ringreduce pay on this machine?  Gloo, ringreduce and MPI in turns, and a verdict."""

from __future__ import annotations

import argparse
import json
import signal
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ringreduce.cli.arguments import seconds
from ringreduce.cli.info import group_size
from ringreduce.cli.terminal import console, progress, progress_console, put, say, table
from ringreduce.common import compiled
from ringreduce.common.cores import own_cores
from ringreduce.common.launcher import check_alone
from ringreduce.common.units import bytes_text, time_text

if TYPE_CHECKING:
    from rich.console import Console

    from ringreduce.cli.bench.compare import Case, Reduced, Stepped

NOT_WELL = 1
"""The exit code where a library failed, or results differ."""

SECONDS = 120.0
SIZES = (64, 32 << 10, 1 << 20, 64 << 20)
MOST_FOLDER = 40
"""Characters of the folder for temporary files. The name of a socket in it may have 107."""

ALL_REDUCE = 0.2
"""The share of the time that all_reduce takes; steps have the rest."""


def add(command: Any) -> None:
    parser = command(
        description="Does ringreduce pay here? Runs Gloo, ringreduce, and MPI if mpi4py is installed, in turns: "
        "all_reduce, then training steps of a convolutional net and a transformer, and tensor-parallel decoding. "
        "Prints how fast each was, and whether a step is faster by more than noise. Results are checked. Exits with 1 "
        "if a library failed or its results were wrong.",
        epilog="examples:\n  ringreduce bench\n  ringreduce bench --ranks 2 4 --seconds 300",
    )
    parser.add_argument("--ranks", type=group_size, nargs="+",
                        help="group sizes (default: 2, and up to 8 on as many cores)")  # fmt: skip
    parser.add_argument("--seconds", type=seconds, default=SECONDS,
                        help="about how long to take, but for the start of ranks and the first 3 rounds "
                             f"(default: {SECONDS:g})")  # fmt: skip
    parser.add_argument("--json", action="store_true", help="print what was measured as JSON")


def cases() -> list[Case]:
    from ringreduce.cli.bench.compare import Case

    return [
        Case("convolutional", "DDP", batch=8, length=64),
        Case("transformer", "DDP", batch=1, length=128, width=768, layers=12),
        Case("decoder", "tensor parallel", batch=1, length=16, width=1024, layers=4),
    ]


def run(arguments: argparse.Namespace) -> int:
    compiled.require("no ranks can be run here")
    check_alone("ringreduce bench", "run it without a launcher, since it starts ranks itself")
    from ringreduce.cli.bench import compare
    from ringreduce.tuning.machine import identify

    sizes = sorted(set(arguments.ranks or (2, compare.most_ranks(len(own_cores())))))
    began = time.monotonic()
    ends = {each: signal.signal(each, lambda *_: sys.exit(143)) for each in (signal.SIGTERM, signal.SIGHUP)}
    try:
        with progress(progress_console()) as bars:
            bar = bars.add_task("", total=arguments.seconds)

            def tick(what: str) -> None:
                bars.update(bar, completed=time.monotonic() - began, description=what)

            reduced, stepped, notes, failures = _measure(sizes, arguments.seconds, tick)
    finally:
        for each, before in ends.items():
            signal.signal(each, before)
    if arguments.json:
        found = {
            "machine": asdict(identify(own_cores())),
            "all_reduce": [asdict(row) for row in reduced],
            "steps": [asdict(row) | {"verdict": row.verdict} for row in stepped],
            "verdict": compare.verdict(stepped),
            "notes": notes + failures,
        }
        put(json.dumps(found, indent=1))
    else:
        show(console(), reduced, stepped, notes + failures)
    return NOT_WELL if failures else 0


def _measure(
    sizes: Sequence[int], seconds: float, tick: Callable[[str], None]
) -> tuple[list[Reduced], list[Stepped], list[str], list[str]]:
    from ringreduce.cli.bench.compare import GLOO, OURS, Comparison

    reduced: list[Reduced] = []
    stepped: list[Stepped] = []
    notes: dict[str, None] = {}  # in order, each once
    failures: list[str] = []
    base = "/tmp" if len(tempfile.gettempdir()) > MOST_FOLDER else None
    for ranks in sizes:
        with (
            tempfile.TemporaryDirectory(prefix="ringreduce-bench-", dir=base) as folder,
            Comparison(ranks, Path(folder), tick) as teams,
        ):
            teams.start(GLOO, OURS)
            teams.start_mpi()
            until = time.monotonic() + seconds / len(sizes)
            reduced += teams.all_reduces(SIZES, ALL_REDUCE * seconds / len(sizes))
            left = cases()
            for number, case in enumerate(left):
                stepped += teams.steps(case, (until - time.monotonic()) / (len(left) - number))
        notes |= dict.fromkeys(teams.notes)
        failures += teams.failures
    return reduced, stepped, list(notes), failures


def show(to: Console, reduced: Sequence[Reduced], stepped: Sequence[Stepped], notes: Sequence[str]) -> None:
    """The tables, the verdict, and what was left out or went wrong."""
    from ringreduce.cli.bench.compare import GLOO, MPI, OURS, verdict

    columns = ("Gloo", "ringreduce", "MPI", "next to Gloo", "next to MPI")
    calls = table("ranks", "size", *columns, right=("ranks", "size", *columns),
                  title="dist.all_reduce, and MPI's by mpi4py: median time of a call")  # fmt: skip
    for row in reduced:
        times = [time_text(row.us[name] * 1e-6) if name in row.us else "" for name in (GLOO, OURS, MPI)]
        ratios = [f"{row.us[name] / row.us[OURS]:.2f}x" if {name, OURS} <= set(row.us) else "" for name in (GLOO, MPI)]
        calls.add_row(str(row.ranks), bytes_text(row.bytes, 1024), *times, *ratios)
    to.print(calls)
    numbers = ("ranks", "Gloo", "ringreduce", "next to Gloo", "communication with Gloo", "with ringreduce")
    steps = table("step", "a second", *numbers, right=numbers, title="steps")
    for step in stepped:
        rates = [f"{step.rate(name):.3g}" for name in (GLOO, OURS)]
        shares = [f"{step.communication(name):.0%}" for name in (GLOO, OURS)]
        steps.add_row(step.name, step.case.unit, str(step.ranks), *rates, f"{step.speedup(OURS):.2f}x", *shares)
    if stepped:
        to.print(steps)
    for line in (*verdict(stepped), *notes):
        say(to, line)
