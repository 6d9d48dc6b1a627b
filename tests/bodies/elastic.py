"""Ranks of elastic trainings, as several test files start them."""

from __future__ import annotations

import time
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from distributed import harness
from distributed.harness import Rank, Ranks
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from ringreduce import elastic

STEPS, BATCH = 60, 12


def start(me: Rank, first: int, **other: Any) -> elastic.World:
    """Starts a world with `first` founders. A later process takes the rank of a founder."""
    other = {"timeout": timedelta(seconds=30), **other}
    return elastic.start(store=me.store, rank=me.rank % first, world_size=first, **other)


def loss_of(model: nn.Module, step: int, rank: int, size: int) -> torch.Tensor:
    """The loss of a rank's share of the step's batch."""
    x = torch.randn(BATCH, 8, generator=torch.Generator().manual_seed(step), dtype=torch.float64)[rank::size]
    return nn.functional.mse_loss(model(x), x.sin().sum(1, keepdim=True), reduction="sum") * size / BATCH


def wait_for(me: Rank, key: str) -> None:
    """Returns when `key` is in the launcher's store: `tell` and `come` put it there, or another rank."""
    while not me.store.check([key]):
        time.sleep(0.005)


def come(ranks: Ranks, *which: int) -> None:
    """Lets late ranks begin."""
    tell(ranks, *(f"come {rank}" for rank in which))


def tell(ranks: Ranks, *keys: str) -> None:
    store = dist.PrefixStore(ranks.prefix, dist.TCPStore("127.0.0.1", harness._store().port, is_master=False))
    for key in keys:
        store.set(key, "")


def alone(steps: int) -> nn.Module:
    """The model that a single process has after `steps` steps."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(8, 16), nn.Tanh(), nn.Linear(16, 1)).double()
    optimizer = torch.optim.Adam(model.parameters(), lr=0.01)
    for step in range(steps):
        optimizer.zero_grad()
        loss_of(model, step, 0, 1).backward()
        optimizer.step()
    return model


def train(me: Rank, first: int, end: dict[str, int], **other: Any) -> dict[str, Any]:
    """Trains for STEPS steps and checks the parameters. A rank from `first` on begins when the test tells it to.

    If `end` is not empty, the training goes on until there have been `size` members for 5 steps after step `step`, and,
    with `told`, after the test has said that it is over.
    """
    if me.rank >= first:
        wait_for(me, f"come {me.rank}")
    world = start(me, first, **other)
    torch.manual_seed(me.rank)  # the state is the first rank's
    net = alone(0) if me.rank == 0 else nn.Sequential(nn.Linear(8, 16), nn.Tanh(), nn.Linear(16, 1)).double()
    model = DistributedDataParallel(net, init_sync=False)
    optimizer = torch.optim.Adam(model.parameters(), lr=0.01)
    state = world.state(model=model, optimizer=optimizer, step=0, together=0)
    changes: list[int] = []
    world.on_change(lambda world: (changes.append(world.size), me.report("changed")))
    began = state.step
    attempts = 0

    def backward() -> bool:
        nonlocal attempts
        attempts += 1
        optimizer.zero_grad()
        loss_of(model, state.step, world.rank, world.size).backward()
        over = torch.tensor([int(not end.get("told") or me.store.check(["over"]))])
        dist.all_reduce(over, dist.ReduceOp.MAX)  # in which the dead have no part
        return bool(over) and world.size == end.get("size", world.size)

    me.report("begins")
    while state.step < STEPS or state.together < 5 * bool(end):
        right = world.attempt(backward)
        optimizer.step()
        state.step += 1
        right = right and state.step > end.get("step", 0)
        state.together = state.together + 1 if right else 0
        if not right:
            time.sleep(0.002)
    expected = alone(state.step)
    for mine, single in zip(net.parameters(), expected.parameters(), strict=True):
        assert torch.allclose(mine, single, rtol=0, atol=1e-10)
    dist.barrier()
    result = {"size": world.size, "rank": world.rank, "began": began, "changes": changes, "epoch": world.epoch}
    world.leave()
    return result | {"steps": state.step, "redone": attempts - (state.step - began)}
