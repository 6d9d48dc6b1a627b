"""Servers with backups: what a worker sees when one of them is killed, at any step of it."""

from __future__ import annotations

import functools
import os
import random
import signal
import time
from typing import Any

import pytest
import torch
from distributed.harness import Rank, Ranks, run
from test_workers_and_servers import SMALL, gradient

import ringreduce.parameter_server as ps
from ringreduce.errors import InvalidArgument, ServerLost

SERVERS, WORKERS = 3, 2
PUSHES = 40


def serve(me: Rank, step: str = "never", times: int = 0, doomed: int = -1, of: str = "server") -> None:
    """Ranks 0 to SERVERS - 1: a server and a backup of another, which ends when it is told. Server `doomed` kills
    itself when it, or its backup of its neighbour, comes to `step` for the so-many-th time."""
    options = {name: value for name, value in SMALL.items() if name != "window"}
    with ps.serve(me.store, rank=me.rank, size=SERVERS, backups=1, window=SMALL["window"], **options) as serving:
        if me.rank == doomed:
            shard = serving._host._shard if of == "server" else serving._host._backups[(me.rank - 1) % SERVERS]
            shard.server.die_at(step, times)
        me.meet("servers")
        serving.wait()


def worker(me: Rank, **options: Any) -> ps.KeyValue:
    me.meet("servers")
    return ps.join(me.store, role="worker", workers=me.size - SERVERS, timeout=30.0, **options)


# ---- bits ------------------------------------------------------------------------------------------------------------

COUNT, STEPS = 5000, 8


def train(me: Rank, kind: Any, arguments: dict[str, Any], *fate: Any) -> list[Any]:
    if me.rank < SERVERS:
        serve(me, *fate)
        return []
    kept = []
    with worker(me) as kv:
        w = torch.linspace(-1, 1, COUNT)
        kv.init("w", w, update=ps.optimizer(kind, **arguments))
        for step in range(STEPS):
            assert kv.push_pull("w", gradient(me.rank - SERVERS, step, COUNT), out=w).wait() == []
            kept.append(w.numpy().copy())
            if step == STEPS // 2:
                me.report("half")
    return kept


def alone(kind: Any, arguments: dict[str, Any]) -> list[Any]:
    parameter = torch.nn.Parameter(torch.linspace(-1, 1, COUNT))
    optimizer = kind([parameter], **arguments)
    kept = []
    for step in range(STEPS):
        gradients = [gradient(worker, step, COUNT) for worker in range(WORKERS)]
        parameter.grad = functools.reduce(torch.add, gradients) / WORKERS
        optimizer.step()
        kept.append(parameter.detach().numpy().copy())
    return kept


@pytest.mark.parametrize(
    ("kind", "arguments"),
    [
        (torch.optim.SGD, {"lr": 0.1, "momentum": 0.9}),
        (torch.optim.AdamW, {"lr": 0.01}),
    ],
)
@pytest.mark.parametrize("step", ("taken", "journalled", "carried out", "answered"))
def test_training_has_the_same_bits_when_a_server_is_killed(kind: Any, arguments: dict[str, Any], step: str) -> None:
    wanted = alone(kind, arguments)
    with Ranks(train, SERVERS + WORKERS, kind, arguments, step, 15, 1) as ranks:
        results = ranks.results(but=(1,))
    for kept in results[SERVERS - 1 :]:
        for i, (value, expected) in enumerate(zip(kept, wanted, strict=True)):
            assert value.tobytes() == expected.tobytes(), f"step {i}"
