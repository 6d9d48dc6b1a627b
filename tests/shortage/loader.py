"""Sweeps over a Loader: a request fails in the program, in its supervisor or in a server, whichever makes the k-th.

Each run is judged: the program is told what ran out, or gets its batches; what it could not do works when it is done
again, in the same process; batches are right; and when all Loaders are closed nothing is left of them.
"""

from __future__ import annotations

import contextlib
import dataclasses
import itertools
import os
import signal
import time
from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import torch
from bodies.data import servers_of, until
from distributed.harness import Rank

from ringreduce.data import Loader, Order, supervisor
from shortage import sweeps
from shortage.requests import ANY, KINDS
from shortage.sweeps import Run, left_over, said

PHASES = ("start", "get", "replace", "close")
LONGEST = 3.0
"""Seconds in which a phase has ended, one way or the other. The Loader's timeout is longer."""
FIXES = ("ulimit -n", "ulimit -u", "free memory", "ulimit -f", "allocate memory")


class Squares:
    def __getitem__(self, number: int) -> torch.Tensor:
        return torch.full((1000,), float(number * number))


@dataclasses.dataclass(frozen=True)
class Sweep(sweeps.Sweep):
    """`scenario`: how servers begin, "fork" or "spawn"."""

    transport: str = "Loader"
    victim: int = 0
    ranks: int = 1

    def run(self, me: Rank, library: Path, number: int, before: Counter[str] | None) -> Run:
        return one_run(library, self, number, before)

    def judge(self, runs: list[Run], noticed: float = LONGEST) -> Iterator[str]:
        (found,) = runs
        if not found.right:
            yield "wrong batches"
        if found.error and not any(fix in found.error for fix in FIXES):
            yield f"the program is not told what ran out: {found.error}"
        if found.afterwards:
            yield f"what failed fails again: {found.afterwards}, after {found.error}"
        if found.left:
            yield f"it keeps {found.left}"
        if found.when > max(noticed, LONGEST):
            yield f"it took {found.when:.1f} s: {found.error}"


def attempt(do: Callable[[], None]) -> str:
    try:
        do()
    except Exception as error:
        return said(error)
    return ""


def one_run(library: Path, sweep: Sweep, number: int, before: Counter[str] | None) -> Run:
    found, order, loader = Run(), Order(64, 4), None

    def start() -> None:
        nonlocal loader
        loader = Loader(Squares(), order, ahead=2, timeout=20.0, multiprocessing_context=sweep.scenario)

    def get(*steps: int) -> None:
        assert loader is not None
        for step in steps:
            got = loader.get(step, 0, 1)
            found.right &= bool((got[:, 0] == torch.tensor([float(i * i) for i in order.ids(step)])).all())

    def close() -> None:
        if loader is not None:
            loader.close()

    steps: dict[str, Callable[[], None]] = {
        "start": start,
        "get": lambda: get(0, 1, 5),
        "replace": lambda: get(9, 10),
        "close": close,
    }
    for phase, do in steps.items():
        armed = sweep.fails(library, number) if phase == sweep.phase else contextlib.nullcontext()
        if phase == "replace":
            os.kill(servers_of(supervisor.started[-1])[0], signal.SIGKILL)
        began = time.monotonic()
        with armed as asked:
            failed = attempt(do)
        if asked is not None:
            found.place, found.when, found.error = asked.place, time.monotonic() - began, failed
        found.afterwards += attempt(do) if failed else ""
    until(lambda: supervisor.reap() or not supervisor.started)
    if before is not None:
        found.left = left_over(before)
    return found


def all_sweeps() -> Iterator[list[Any]]:
    yield by_places()
    for kind, phase in itertools.product(KINDS, PHASES):
        if kind not in ("wait", "disk"):
            yield [Sweep("fork", kind, phase)]


def by_places() -> list[Any]:
    return [Sweep("fork", ANY, phase, anew=True) for phase in PHASES]
