"""How long training takes in each mode of the parameter server."""

from __future__ import annotations

import statistics
import time
from collections.abc import Iterator
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

import ringreduce.parameter_server as ps
from bench import harness

WORKERS, SEEDS = 4, 5
LOSS, LIMIT = 0.25, 60.0
"""Training ends at this loss, or after so many seconds."""
LR, BATCH = 0.1, 24
USUAL, SLOW = 0.01, 0.05
"""Seconds for which a worker sleeps in a step, and for which the last one does."""
MODES = {
    "sync": ps.sync(average=False),
    "quorum 3": ps.sync(quorum=3, average=False),
    "ssp 0": ps.ssp(0),
    "ssp 2": ps.ssp(2),
    "ssp 8": ps.ssp(8),
    "asynchronous": ps.asynchronous(),
}


def train(name: str, seed: int) -> tuple[float, int]:
    """Seconds and steps of worker 0 until the loss is reached; the limit if it is not."""
    from train_ddp import Digits, make_model

    digits, model = Digits(), make_model()
    store = dist.PrefixStore(f"{name} {seed}", dist.distributed_c10d._get_default_store())
    generator = torch.Generator().manual_seed(1000 * seed + dist.get_rank())
    with ps.join(store, rank=dist.get_rank(), size=WORKERS, memory=8 << 20, window=8 << 20, block_bytes=8192) as kv:
        optimizer = ps.attach(kv, model, torch.optim.SGD(model.parameters(), lr=LR), mode=MODES[name])
        kv.init("done", torch.zeros(1), mode=ps.asynchronous())
        done = torch.zeros(1)
        kv.barrier()
        begin, steps = time.perf_counter(), 0
        while not done:
            optimizer.zero_grad()
            some = torch.randint(len(digits.x), (BATCH,), generator=generator)
            nn.functional.cross_entropy(model(digits.x[some]), digits.y[some]).backward()
            optimizer.step()
            steps += 1
            time.sleep(SLOW if kv.worker == WORKERS - 1 else USUAL)
            if kv.worker == 0 and steps % 5 == 0:
                optimizer.pull()
                with torch.no_grad():
                    loss = float(nn.functional.cross_entropy(model(digits.x), digits.y))
                seconds = time.perf_counter() - begin
                if loss <= LOSS or seconds > LIMIT:
                    kv.push("done", torch.ones(1)).wait()
            kv.pull("done", done)
        return (seconds if kv.worker == 0 else 0.0), steps


def measure() -> dict[str, list[tuple[float, int]]]:
    found: dict[str, list[tuple[float, int]]] = {name: [] for name in MODES}
    for seed in range(SEEDS):
        for name in MODES:
            found[name].append(train(name, seed))
            dist.barrier()
    return found


def modes() -> Iterator[dict[str, Any]]:
    """One worker of four is five times slower: how long training takes to a fixed loss in each mode.

    Real data: scikit-learn's digits, and examples/train_ddp.py's network of 4810 parameters. A step's computing is
    short, so workers sleep. Every worker draws batches of its own. Worker 0 looks at the loss of all training data
    after every fifth of its steps, without stopping the others. Seconds and steps of worker 0, the median of the seeds
    and their range. Every push counts alike: rounds add up the gradients (`average=False`), so a mode that leaves none
    out moves as far with as many.
    """
    for mode, runs in harness.start_ranks(WORKERS, measure).items():
        seconds = [each for each, _ in runs]
        steps = statistics.median(each for _, each in runs)
        yield {
            "mode": mode,
            "seconds": statistics.median(seconds),
            "least": min(seconds),
            "most": max(seconds),
            "steps": steps,
            "wrong": int(min(seconds) >= LIMIT),
        }
