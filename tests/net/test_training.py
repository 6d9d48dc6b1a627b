"""Training across hosts gives the parameters that it gives on one: DDP and FSDP2, 2 hosts x 2 ranks against 4 ranks.

Bit for bit if gradients are added up in the same order, by a plan that is named; else, as each placement has plans of
its own, up to rounding. All ranks have the same bits in any case.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from frameworks.common import ROUNDING, batch, loss_of, sgd, values
from frameworks.common import network as model
from frameworks.test_fsdp import sharded
from net.network import Network, unavailable
from net.ranks import Rank, run
from torch import nn
from torch.nn.parallel import DistributedDataParallel

import ringreduce

pytestmark = [pytest.mark.netns, pytest.mark.skipif(unavailable() is not None, reason=str(unavailable()))]

STEPS = 5
SAME_ORDER = ringreduce.Options(algorithms="all_reduce:one_shot;reduce_scatter:direct;all_gather:direct")


@pytest.fixture(scope="module")
def network() -> Iterator[Network]:
    with Network(hosts=2) as made:
        yield made


def ddp(me: Rank, **keywords: Any) -> nn.Module:
    return DistributedDataParallel(model(), bucket_cap_mb=0.001, **keywords)  # several buckets


WAYS: dict[str, Callable[[Rank], nn.Module]] = {
    "DDP": ddp,
    "DDP, gradients in buckets": lambda me: ddp(me, gradient_as_bucket_view=True),
    "FSDP2": sharded,
}


def trained(me: Rank, way: str, options: ringreduce.Options | None) -> list[float]:
    """All parameters after some steps on this rank's part of the data."""
    with me.join(options=options):
        wrapped = WAYS[way](me)
        optimizer = sgd(wrapped)
        for step in range(STEPS):
            optimizer.zero_grad()
            loss_of(wrapped, *batch(step, me.rank)).backward()
            optimizer.step()
        return values(wrapped.parameters()).tolist()


@pytest.mark.parametrize("order", ("same order", "own order"))
@pytest.mark.parametrize("way", WAYS)
def test_two_hosts_train_as_one_does(network: Network, way: str, order: str) -> None:
    options = SAME_ORDER if order == "same order" else None
    on_one = run(network, [0, 0, 0, 0], trained, way, options)
    on_two = run(network, [0, 0, 1, 1], trained, way, options)
    for parameters in (on_one, on_two):
        assert all(other == parameters[0] for other in parameters)
    start = values(model().parameters())
    one, two = torch.tensor(on_one[0], dtype=torch.float64), torch.tensor(on_two[0], dtype=torch.float64)
    assert (one - start).abs().max() > 1e-3  # they have been trained
    tolerance = 0 if order == "same order" else ROUNDING
    torch.testing.assert_close(two, one, rtol=0, atol=tolerance)
