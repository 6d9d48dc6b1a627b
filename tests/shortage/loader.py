"""Sweeps over a Loader: a request fails in the program, in its supervisor or in a server, whichever makes the k-th.

Each run is judged: the program is told what ran out, or gets its batches; what it could not do works when it is done
again, in the same process; batches are right; and when all Loaders are closed nothing is left of them.
"""

from __future__ import annotations

import dataclasses
import functools
import itertools
import os
import signal
from collections.abc import Callable, Iterator

import torch
from bodies.data import servers_of
from processes import until

from ringreduce.data import Loader, Order, supervisor
from shortage.requests import ANY
from shortage.sweeps import KINDS_OF_CALLS, Run, Sweep, Turn, are_right

STARTS = {"fork": 3.0, "spawn": 12.0}
"""Seconds in which a phase ends, one way or the other. Servers that are spawned import torch; the timeout is longer."""
PHASES = ("start", "get", "replace", "close")


class Squares:
    def __getitem__(self, number: int) -> torch.Tensor:
        return torch.full((1000,), float(number * number))


@dataclasses.dataclass(frozen=True)
class LoaderSweep(Sweep):
    """`scenario`: how servers begin, of STARTS."""

    transport: str = "Loader"
    victim: int = 0
    ranks: int = 1

    ran_out = ("ulimit -n", "ulimit -u", "free memory", "ulimit -f", "allocate memory")

    def live(self, turn: Turn) -> None:
        order, loaders = Order(64, 4), []

        def start() -> None:
            loaders.append(Loader(Squares(), order, ahead=2, timeout=20.0, multiprocessing_context=self.scenario))

        def get(*steps: int) -> None:
            for step in steps:
                wanted = torch.tensor([float(i * i) for i in order.ids(step)])
                turn.found.right &= are_right([(loaders[0].get(step, 0, 1)[:, 0], wanted)])

        def close() -> None:
            for loader in loaders:
                loader.close()

        actions: list[Callable[[], None]] = [start, lambda: get(0, 1, 5), lambda: get(9, 10), close]
        for phase, do in zip(PHASES, actions, strict=True):
            if phase == "replace":
                os.kill(servers_of(supervisor.started[-1])[0], signal.SIGKILL)
            turn.armed(phase, functools.partial(turn.attempt, do, again=1))
        until(lambda: supervisor.reap() or not supervisor.started)

    def wrong(self, runs: list[Run]) -> Iterator[str]:
        if runs[0].afterwards:
            yield f"what failed fails again: {runs[0].afterwards}, after {runs[0].error}"


def all_sweeps() -> Iterator[list[Sweep]]:
    for method, longest in STARTS.items():
        yield by_places(method)
        for kind, phase in itertools.product((*KINDS_OF_CALLS, "process"), PHASES):
            yield [LoaderSweep(method, kind, phase, longest=longest)]


def by_places(method: str = "fork") -> list[Sweep]:
    return [LoaderSweep(method, ANY, phase, anew=True, longest=STARTS[method]) for phase in PHASES]
