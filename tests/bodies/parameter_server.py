"""What tests of the parameter server share: joining with small sizes, training, and processes told to be on hosts."""

from __future__ import annotations

import functools
import os
from collections.abc import Callable
from typing import Any

import pytest
import torch
from distributed.harness import Rank

import ringreduce.parameter_server as ps

SMALL = {"window": 4 << 20, "memory": 16 << 20, "block_bytes": 4096, "timeout": 30.0}

NEAR, APART = (0, 0, 0, 0), (0, 1, 2, 3)
"""The hosts of ranks: all on one, or each on one of its own."""
on_any_hosts = pytest.mark.parametrize("hosts", [NEAR, APART], ids=["one host", "several hosts"])

COUNT, STEPS = 5000, 5  # five blocks, the last of another size


def join(me: Rank, **options: Any) -> ps.KeyValue:
    return ps.join(me.store, rank=me.rank, size=me.size, **(SMALL | options))


def gradient(worker: int, step: int, count: int) -> torch.Tensor:
    generator = torch.Generator().manual_seed(1000 * worker + step)
    return torch.randn(count, generator=generator)


def placed(me: Rank, hosts: tuple[int, ...], function: Callable[..., Any], *args: Any) -> Any:
    os.environ["RINGREDUCE_HOST_ID"] = f"host {hosts[me.rank]}"
    os.environ["RINGREDUCE_SOCKET_IFNAME"] = "=lo"
    return function(me, *args)


def train(me: Rank, kind: Any, arguments: dict[str, Any], average: bool) -> list[Any]:
    kept = []
    with join(me) as kv:
        w = torch.linspace(-1, 1, COUNT)
        kv.init("w", w, update=ps.optimizer(kind, **arguments), mode=ps.sync(average=average))
        for step in range(STEPS):
            assert kv.push_pull("w", gradient(me.rank, step, COUNT), out=w).wait() == []
            kept.append(w.numpy().copy())
    return kept


def alone(kind: Any, arguments: dict[str, Any], workers: int, average: bool = True, steps: int = STEPS) -> list[Any]:
    parameter = torch.nn.Parameter(torch.linspace(-1, 1, COUNT))
    optimizer = kind([parameter], **arguments)
    kept = []
    for step in range(steps):
        total = functools.reduce(torch.add, [gradient(worker, step, COUNT) for worker in range(workers)])
        parameter.grad = total / workers if average else total
        optimizer.step()
        kept.append(parameter.detach().numpy().copy())
    return kept
