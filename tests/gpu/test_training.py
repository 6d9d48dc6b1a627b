"""Training on CUDA tensors: DDP and a sharded optimizer give what they give on the CPU with this backend."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from distributed.cuda_ranks import on_ranks, options
from distributed.harness import Rank
from torch import nn
from torch.distributed.algorithms.ddp_comm_hooks.default_hooks import allreduce_hook, fp16_compress_hook
from torch.distributed.optim import ZeroRedundancyOptimizer
from torch.nn.parallel import DistributedDataParallel

STEPS = 4


def data_parallel(model: nn.Module, **keywords: Any) -> nn.Module:
    return DistributedDataParallel(model, bucket_cap_mb=0.001, **keywords)  # several buckets


def hooked(model: nn.Module, hook: Callable[..., Any]) -> nn.Module:
    wrapped = DistributedDataParallel(model)
    wrapped.register_comm_hook(None, hook)
    return wrapped


WAYS: dict[str, Callable[[nn.Module], nn.Module]] = {
    "DDP": data_parallel,
    "DDP, gradients in buckets": lambda model: data_parallel(model, gradient_as_bucket_view=True),
    "DDP, a hook": lambda model: hooked(model, allreduce_hook),
    "DDP, a hook that compresses": lambda model: hooked(model, fp16_compress_hook),
    "ZeRO": data_parallel,
}


def trained(me: Rank, device: str, way: str) -> list[torch.Tensor]:
    """The parameters after some steps on this rank's part of the data."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(6, 31), nn.ReLU(), nn.Linear(31, 17), nn.ReLU(), nn.Linear(17, 3)).double()
    batches = torch.randn(STEPS, me.size, 8, 6, dtype=torch.float64)
    model = WAYS[way](model.to(device))
    if way == "ZeRO":
        optimizer: Any = ZeroRedundancyOptimizer(model.parameters(), torch.optim.SGD, lr=0.05, momentum=0.9)
    else:
        optimizer = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)
    for batch in batches[:, me.rank].to(device):
        optimizer.zero_grad()
        (model(batch) - 1).square().mean().backward()
        optimizer.step()
    assert all(p.device.type == device for p in model.parameters())
    return [p.detach().cpu() for p in model.parameters()]


@on_ranks(2)
def test_training(me: Rank, mode: str) -> None:
    with me.join(options=options(mode)):
        for way in WAYS:
            # GPUs add up matrix products in other orders; what is rounded to float16 may then fall on either side.
            tolerance = 1e-2 if "compresses" in way else 1e-9
            for on_gpu, on_cpu in zip(trained(me, "cuda", way), trained(me, "cpu", way), strict=True):
                torch.testing.assert_close(
                    on_gpu, on_cpu, rtol=tolerance, atol=tolerance, msg=lambda m, w=way: f"{w}: {m}"
                )
