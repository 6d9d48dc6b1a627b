"""A rank is killed at each stage of making a group: all others say so, with its name, and soon."""

from __future__ import annotations

import gc
import os
import resource
import signal
import time
from typing import Any

import pytest
import torch
import torch.distributed as dist
from distributed.harness import Rank, Ranks, run

import ringreduce
from ringreduce import backend
from ringreduce.errors import PeerLost, RingReduceError
from ringreduce.rendezvous import host, store

SIZE = 3
NOTICED = 2.0
"""Seconds in which all must know."""

MEMBER = ["who: told", "roster: known", "host: introduced", "host: joined", "group: met", "group: made"]
LEADER = [
    "who: told",
    "who: collected",
    "roster: known",
    "host: leads",
    "host: invited",
    "host: admitted",
    "host: admitted",
]
LEADER += ["host: handed out", "host: handed out", "group: met", "group: made"]
ALONE = ["who: told", "roster: answered", "roster: known", "host: leads", "host: invited", "doors: told"]
ALONE += ["doors: answered", "group: met"]
FIRST = ["who: told", "who: collected", "roster: published", "roster: known", "host: leads", "host: invited"]
FIRST += ["doors: told", "doors: collected", "doors: published", "group: met"]
STAGES = [("shared_memory", 0, LEADER), ("shared_memory", 2, MEMBER), ("tcp", 0, FIRST), ("tcp", 2, ALONE)]
"""By transport and rank: what it passes, up to its first call or, with links, to the first connection."""


def makes_a_group(me: Rank, transport: str, victim: int, stop: int) -> Any:
    """Kills itself at stage `stop` if this is `victim`. Returns the stages it came through, or its error and when."""
    stages: list[str] = []

    def passed(stage: str) -> None:
        stages.append(stage)
        if me.rank == victim and len(stages) == stop + 1:
            me.report(time.monotonic())
            os.kill(os.getpid(), signal.SIGKILL)

    for module in (store, host, backend):
        module.passed = passed  # type: ignore[attr-defined]
    try:
        with me.join(options=ringreduce.Options(transport=transport)):
            value = torch.ones(1)
            dist.all_reduce(value)
            assert value == me.size
            return stages
    except RingReduceError as error:
        return type(error), error.culprit, str(error), time.monotonic()


@pytest.mark.parametrize("transport", ["shared_memory", "tcp"])
def test_these_are_all_stages(transport: str) -> None:
    found = run(makes_a_group, SIZE, transport, -1, 0)
    for of, rank, stages in STAGES:
        if of == transport:
            assert found[rank][: len(stages)] == stages
            assert transport == "tcp" or len(found[rank]) == len(stages)
    assert sum(len(stages) for _, _, stages in STAGES) >= 30


@pytest.mark.parametrize(
    ("transport", "victim", "stop"),
    [
        pytest.param(transport, victim, number, id=f"{transport}-rank {victim}-{number}-{stage}")
        for transport, victim, stages in STAGES
        for number, stage in enumerate(stages)
    ],
)
def test_others_name_who_is_killed(transport: str, victim: int, stop: int) -> None:
    with Ranks(makes_a_group, SIZE, transport, victim, stop) as ranks:
        killed = ranks.reports(but=tuple(rank for rank in range(SIZE) if rank != victim))[0]
        for kind, culprit, text, when in ranks.results(but=(victim,)):
            assert (kind, culprit) == (PeerLost, victim), text
            assert f"rank {victim} (" in text
            assert when < killed + NOTICED, text


def makes_another_group(me: Rank, how: str) -> Any:
    """Of all ranks, when the last has died."""
    with me.join(timeout=300.0):
        if me.rank == SIZE - 1:
            os.kill(os.getpid(), signal.SIGKILL)
        with pytest.raises(PeerLost):
            dist.barrier()
        with pytest.raises(PeerLost, match=f"rank {SIZE - 1}") as raised:
            if how == "new_group":
                dist.new_group()
            else:
                dist.group.WORLD.split_group(list(range(SIZE)))  # type: ignore[union-attr]
        return raised.value.culprit


@pytest.mark.parametrize("how", ["new_group", "split_group"])
def test_a_group_with_a_rank_that_the_world_has_lost_is_not_waited_for(how: str) -> None:
    """The timeout is longer than a test may take."""
    with Ranks(makes_another_group, SIZE, how) as ranks:
        assert ranks.results(but=(SIZE - 1,)) == [SIZE - 1] * (SIZE - 1)


def runs_out_of_descriptors(me: Rank) -> list[int]:
    """Rank 0 has room for one more descriptor each time. Returns for each time how many more are open afterwards."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    with me.join("first"):  # what a process opens once
        pass
    left: list[int] = []
    made = False
    while not made:
        before = set(os.listdir("/proc/self/fd"))
        if me.rank == 0:
            resource.setrlimit(resource.RLIMIT_NOFILE, (max(map(int, before)) + 1 + len(left), hard))
        try:
            with me.join(f"with {len(left)}"):
                made = True
        except (RingReduceError, OSError, RuntimeError):
            pass
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))
        me.meet(f"after {len(left)}")
        gc.collect()
        left.append(len(os.listdir("/proc/self/fd")) - len(before))
    return left


def test_nothing_stays_open_where_descriptors_run_out() -> None:
    for left in run(runs_out_of_descriptors, 2):
        assert len(left) > 4
        assert left == [0] * len(left)
