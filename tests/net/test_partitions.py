"""Worlds on several hosts whose network is cut. Members that reach the directory go on, the others raise an error.

The views that all members have seen must form one chain.
"""

from __future__ import annotations

import threading
from datetime import timedelta
from typing import Any

import pytest
import torch
import torch.distributed as dist
from bodies.failpoints import check
from net.network import Network
from net.ranks import Rank, Ranks

import ringreduce
from ringreduce import elastic
from ringreduce.errors import RingReduceError

pytestmark = pytest.mark.slow

Log = list[tuple[int, tuple[str, ...], int]]


def trains(me: Rank) -> tuple[str, Log]:
    """Trains until the test says that it is over. Returns how it ended, and (epoch, members, step) for each step."""
    told = threading.Event()
    threading.Thread(target=lambda: (me.hear(), told.set()), daemon=True).start()
    world = elastic.start(
        timeout=timedelta(seconds=6), expel_after=3, patience=3, options=ringreduce.Options(dead_after=2)
    )
    state = world.state(step=0, sum=torch.zeros(1, dtype=torch.int64))
    seen: Log = []

    def body() -> tuple[torch.Tensor, bool]:
        nonlocal view
        view = world.view
        share = torch.arange(world.rank, 12, world.size).sum().reshape(1)  # of 0 + 1 + ... + 11
        over = torch.tensor([int(told.is_set())])
        dist.all_to_all_single(torch.empty(world.size), torch.ones(world.size))  # so that every link is used
        dist.all_reduce(share)
        dist.all_reduce(over, dist.ReduceOp.MIN)
        return share, bool(over)

    over, size, view = False, 0, world.view
    try:
        while not over:
            share, over = world.attempt(body)
            state.sum += share
            state.step += 1
            seen.append((view.epoch, view.names, state.step))
            if size != world.size:
                me.report(size := world.size)
        assert int(state.sum) == 66 * state.step
        return "trained", seen
    except RingReduceError as error:
        me.report(0)
        assert told.wait(60)
        return type(error).__name__, seen


def ends(ranks: Ranks) -> list[str]:
    ranks.tell("over")
    results = ranks.results()
    check(results)
    return [how for how, _ in results]


def split(network: Network, one: tuple[int, ...], other: tuple[int, ...], cut: bool = True) -> None:
    for a in one:
        for b in other:
            network.cut(a, b, cut)
            network.cut(b, a, cut)


@pytest.mark.parametrize(
    ("one", "other"),
    [
        pytest.param((0, 1), (2,), id="the store and one, one"),
        pytest.param((0,), (1, 2), id="the store, two"),
        pytest.param((0, 1), (2, 3), id="two and two"),
    ],
)
def test_a_partition(network: Network, one: tuple[int, ...], other: tuple[int, ...]) -> None:
    """Members that reach the store go on. The others raise SystemFailure."""
    size = len(one) + len(other)
    with Ranks(network, list(range(size)), trains) as ranks:
        assert ranks.reports() == [size] * size
        split(network, one, other)
        assert ranks.reports() == [len(one)] * len(one) + [0] * len(other)
        split(network, one, other, cut=False)
        assert ends(ranks) == ["trained"] * len(one) + ["SystemFailure"] * len(other)


def test_one_way(network: Network) -> None:
    """Packets from host 2 to host 1 are lost, and all hosts reach the directory. One of the two is expelled."""
    with Ranks(network, [0, 1, 2], trains) as ranks:
        assert ranks.reports() == [3] * 3
        network.cut(2, 1)
        assert sorted(ranks.reports()) == [0, 2, 2]
        network.cut(2, 1, cut=False)
        assert sorted(ends(ranks)) == ["Expelled", "trained", "trained"]


def test_a_short_break_loses_nobody(network: Network) -> None:
    with Ranks(network, [0, 1, 2], trains) as ranks:
        assert ranks.reports() == [3] * 3
        network.cut(2, 1)
        network.cut(1, 2)
        threading.Event().wait(0.5)
        network.cut(2, 1, cut=False)
        network.cut(1, 2, cut=False)
        assert ends(ranks) == ["trained"] * 3


def test_a_host_that_comes_back_is_expelled(network: Network) -> None:
    """The network is healed while the cut-off member still waits for the directory."""
    with Ranks(network, [0, 1, 2], patient) as ranks:
        assert ranks.reports() == [3] * 3
        split(network, (0, 1), (2,))
        assert ranks.reports(but=(2,)) == [2, 2]
        split(network, (0, 1), (2,), cut=False)
        assert ranks.reports(but=(0, 1)) == [0]
        assert ends(ranks) == ["trained", "trained", "Expelled"]


def patient(me: Rank) -> tuple[str, Log]:
    inner = elastic.start

    def start(**named: Any) -> elastic.World:
        return inner(**named | {"patience": 60})

    elastic.start = start  # type: ignore[assignment]
    return trains(me)
