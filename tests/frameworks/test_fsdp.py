"""FSDP2, `fully_shard`, on a DeviceMesh of CPUs: against one process; reduced precision bit by bit against Gloo."""

from __future__ import annotations

import torch
from distributed.harness import Rank, on_ranks
from frameworks.common import (
    batch,
    close,
    loss_of,
    network,
    on_gloo_and_ours,
    same,
    sgd,
    sharded,
    trained_alone,
    values,
)
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

STEPS = 4


def train(model: nn.Module, rank: int) -> None:
    optimizer = sgd(model)
    for step in range(STEPS):
        optimizer.zero_grad()
        loss_of(model, *batch(step, rank)).backward()
        optimizer.step()


@on_ranks(2, 3)
def test_fully_shard(me: Rank) -> None:
    with me.join():
        model = sharded(me)
        train(model, me.rank)
        parameters = list(model.parameters())
        assert all(isinstance(p, DTensor) for p in parameters)
        held = sum(p.to_local().numel() for p in parameters)
        assert held < sum(p.numel() for p in parameters)
        close(model, trained_alone(me.size, STEPS))


@on_ranks(2)
def test_accumulation_and_clipping(me: Rank) -> None:
    """Two batches before gradients are reduced."""
    with me.join():
        model, reference = sharded(me), network()
        for last in (False, True):
            model.set_requires_gradient_sync(last)
            loss_of(model, *batch(last, me.rank)).backward()
            assert all((p.grad is not None) == last for p in model.parameters())
            for rank in range(me.size):
                (loss_of(reference, *batch(last, rank)) / me.size).backward()
        for model_ in (model, reference):
            nn.utils.clip_grad_norm_(model_.parameters(), 0.5)  # the norm of sharded gradients is a collective too
            sgd(model_).step()
        close(model, reference)


def half_precision(me: Rank) -> Tensor:
    model = sharded(me, torch.bfloat16)
    train(model, me.rank)
    return values(model.parameters())


@on_ranks(2)
def test_mixed_precision(me: Rank) -> None:
    gloo, ours = on_gloo_and_ours(me, half_precision)
    same(ours, gloo)
    error = (ours - values(trained_alone(me.size, STEPS).parameters())).abs().max()
    assert 1e-5 < error < 1e-1  # rounded, but trained
