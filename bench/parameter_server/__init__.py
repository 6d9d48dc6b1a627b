"""The parameter server measured, a scenario at a time: `python -m bench.parameter_server SCENARIO`."""

import sys
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist

import ringreduce.parameter_server as ps
from bench import harness

for folder in ("tests", "examples"):  # the network of namespaces, and a model
    sys.path.insert(0, str(harness.ROOT / folder))


def join(size: int, **options: Any) -> ps.KeyValue:
    """Every rank of the default group is a worker and a server."""
    torch.set_num_threads(1)
    store = dist.distributed_c10d._get_default_store()
    return ps.join(store, rank=dist.get_rank(), size=dist.get_world_size(), window=4 * size + (64 << 20), **options)


def step_of(kv: ps.KeyValue, size: int) -> Callable[[], object]:
    """A synchronous step of `size` bytes of parameters with AdamW."""
    w, gradient = torch.zeros(size // 4), torch.ones(size // 4)
    kv.init("w", w, update=ps.optimizer(torch.optim.AdamW, lr=1e-3))
    return lambda: kv.push_pull("w", gradient, out=w).wait()
