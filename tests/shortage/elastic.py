"""Sweeps over a world: two processes found it, a third joins, all take steps with one state, and leave.

One request of a process fails, wherever that is in its membership. Each run is judged: whoever is not let on gets an
error that says what ran out, or who has gone; it starts again in the same process; in the end all three are members
with the right state, soon; and when they have left nothing is left of the world.
"""

from __future__ import annotations

import contextlib
import dataclasses
import itertools
import os
import time
from collections import Counter
from collections.abc import Iterator
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from distributed.harness import Rank

from ringreduce import elastic
from shortage import sweeps
from shortage.requests import ANY, KINDS
from shortage.sweeps import TIMEOUT, Run, left_over, said

FOUNDERS, SIZE, STEPS = 2, 3, 3
LONGEST = 4.0
"""Seconds in which all three are members, one failure or not. The timeout of their calls is longer."""
STARTS = 4
RAN_OUT = ("SystemFailure", "MemoryError", "allocate memory", "Expelled")
"""What the process hears whose request failed. The others may have gone on without it before it can say so."""


@dataclasses.dataclass(frozen=True)
class Sweep(sweeps.Sweep):
    """`scenario`: "one host" or "two hosts"."""

    transport: str = "elastic"
    ranks: int = SIZE

    def run(self, me: Rank, library: Path, number: int, before: Counter[str] | None) -> Run:
        os.environ["RINGREDUCE_HOST_ID"] = f"host {me.rank % 2 if self.scenario == 'two hosts' else 0}"
        return one_run(me, library, self, number, before)

    def judge(self, runs: list[Run], noticed: float = LONGEST) -> Iterator[str]:
        victim = runs[self.victim]
        for rank, each in enumerate(runs):
            if not each.right:
                yield f"rank {rank} has a wrong state"
            if each.left:
                yield f"rank {rank} keeps {each.left}"
            if each.afterwards:
                yield f"rank {rank} does not get in: {each.afterwards}"
            if each.when > max(noticed, LONGEST):
                yield f"rank {rank} took {each.when:.1f} s: {each.error}"
        if victim.error and not any(name in victim.error for name in RAN_OUT):
            yield f"rank {self.victim} is not told what ran out: {victim.error}"


def one_run(me: Rank, library: Path, sweep: Sweep, number: int, before: Counter[str] | None) -> Run:
    found, run = Run(), f"{sweep}/{number}"
    me.meet(run)
    began = time.monotonic()
    with sweep.fails(library, number) if me.rank == sweep.victim else contextlib.nullcontext() as asked:
        for _ in range(STARTS):
            try:
                found.right = takes_part(me, dist.PrefixStore(run, me.store))
                found.afterwards = ""
                break
            except Exception as error:
                found.error, found.afterwards = found.error or said(error), said(error)
                if dist.is_initialized():
                    dist.destroy_process_group()
    found.when = time.monotonic() - began
    me.meet(f"{run}: over")
    if asked is not None:
        found.place = asked.place
    if before is not None:
        found.left = left_over(before)
    return found


def takes_part(me: Rank, store: dist.Store) -> bool:
    """Returns whether the state is right, once all have been members for STEPS steps."""
    if me.rank >= FOUNDERS:
        store.wait(["founded"], timedelta(seconds=TIMEOUT))
    world = elastic.start(
        store=store,
        rank=me.rank % FOUNDERS,
        world_size=FOUNDERS,
        timeout=timedelta(seconds=TIMEOUT),
        patience=TIMEOUT,
    )
    try:
        state = world.state(step=0, sum=torch.zeros(1000), together=0)
        store.set("founded", "")

        def step() -> torch.Tensor:
            one = torch.full((1000,), 1.0 / world.size)
            dist.all_reduce(one)
            return one

        while state.together < STEPS:
            state.sum += world.attempt(step).round()
            state.step += 1
            state.together += int(world.size == SIZE)
        return bool((state.sum == state.step).all())
    finally:
        world.leave()


def all_sweeps() -> Iterator[list[Any]]:
    for victim in range(SIZE):
        yield by_places(victim)
    for scenario, kind, victim in itertools.product(("one host", "two hosts"), KINDS, range(SIZE)):
        if kind not in ("wait", "disk", "process"):
            yield [Sweep(scenario, kind, "member", victim=victim)]


def by_places(victim: int) -> list[Any]:
    return [Sweep(scenario, ANY, "member", victim=victim, anew=True) for scenario in ("one host", "two hosts")]
