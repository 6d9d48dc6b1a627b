"""Sweeps over a world: two processes found it, a third joins, all take steps with one state, and leave.

One request of a process fails, wherever that is in its membership. Each run is judged: whoever is not let on gets an
error that says what ran out, or who has gone; it starts again in the same process; in the end all three are members
with the right state, soon; and when they have left nothing is left of the world.
"""

from __future__ import annotations

import dataclasses
import itertools
import os
from collections.abc import Iterator
from datetime import timedelta

import torch
import torch.distributed as dist
from distributed.harness import Rank

from ringreduce import elastic
from shortage.requests import ANY
from shortage.sweeps import KINDS_OF_CALLS, RAN_OUT, TIMEOUT, Run, Sweep, Turn

FOUNDERS, SIZE, STEPS = 2, 3, 3


@dataclasses.dataclass(frozen=True)
class WorldSweep(Sweep):
    """`scenario`: "one host" or "two hosts"."""

    transport: str = "elastic"
    ranks: int = SIZE
    longest: float = 4.0  # all three are members then; the timeout of their calls is longer

    ran_out = (*RAN_OUT, "Expelled")  # the others may have gone on without it before it can say so

    def live(self, turn: Turn) -> None:
        me, store = turn.me, dist.PrefixStore(str(turn), turn.me.store)
        os.environ["RINGREDUCE_HOST_ID"] = f"host {me.rank % 2 if self.scenario == 'two hosts' else 0}"

        def take_part() -> None:
            try:
                turn.found.right = takes_part(me, store)
            finally:
                if dist.is_initialized():
                    dist.destroy_process_group()

        turn.meet("begins")
        turn.armed("member", lambda: turn.attempt(take_part, again=3))
        turn.meet("is over")

    def must_be_told(self, runs: list[Run]) -> bool:
        return bool(runs[self.victim].error)  # else it has gone on, and another may have had to start again

    def wrong(self, runs: list[Run]) -> Iterator[str]:
        for rank, each in enumerate(runs):
            if each.afterwards:
                yield f"rank {rank} does not get in: {each.afterwards}"


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


def all_sweeps() -> Iterator[list[Sweep]]:
    for victim in range(SIZE):
        yield by_places(victim)
    for scenario, kind, victim in itertools.product(("one host", "two hosts"), KINDS_OF_CALLS, range(SIZE)):
        yield [WorldSweep(scenario, kind, "member", victim=victim)]


def by_places(victim: int) -> list[Sweep]:
    return [WorldSweep(scenario, ANY, "member", victim=victim, anew=True) for scenario in ("one host", "two hosts")]
