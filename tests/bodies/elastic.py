"""Ranks of elastic trainings, as several test files start them."""

from __future__ import annotations

from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from distributed import harness
from distributed.harness import Rank, Ranks
from torch import nn

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


def come(ranks: Ranks, *which: int) -> None:
    """Lets late ranks begin."""
    tell(ranks, *(f"come {rank}" for rank in which))


def tell(ranks: Ranks, *keys: str) -> None:
    store = dist.PrefixStore(ranks.prefix, dist.TCPStore("127.0.0.1", harness._store().port, is_master=False))
    for key in keys:
        store.set(key, "")
