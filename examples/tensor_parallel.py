"""Cuts the matrices of a network over the ranks: the first by columns, the second by rows, one all_reduce after both.

torchrun --nproc-per-node=2 examples/tensor_parallel.py
"""

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

STEPS, WIDTH = 20, 64


def make_model() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(8, WIDTH), nn.GELU(), nn.Linear(WIDTH, 1)).double()


def train(model: nn.Module) -> None:
    """All ranks on the same samples, as each has a part of every layer only."""
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    data = torch.Generator().manual_seed(1)
    for _ in range(STEPS):
        x = torch.randn(32, 8, generator=data, dtype=torch.float64)
        optimizer.zero_grad()
        nn.functional.mse_loss(model(x), x.sin().sum(1, keepdim=True)).backward()
        optimizer.step()


dist.init_process_group("ringreduce")
rank, size = dist.get_rank(), dist.get_world_size()
assert WIDTH % size == 0, f"{size} ranks cannot cut {WIDTH} columns equally"

mesh = init_device_mesh("cpu", (size,))
model = parallelize_module(make_model(), mesh, {"0": ColwiseParallel(), "2": RowwiseParallel()})
train(model)
shapes = " and ".join(str(list(layer.weight.to_local().shape)) for layer in model[::2])
print(f"rank {rank} has weights of {shapes}\n", end="")

alone = make_model()
train(alone)
pairs = zip(model.parameters(), alone.parameters(), strict=True)
error = max((getattr(a, "full_tensor", lambda a=a: a)() - b).abs().max().item() for a, b in pairs)
if rank == 0:
    print(f"parameters differ from a single process's by {error:.1e}\n", end="")
dist.destroy_process_group()
assert error < 1e-10, error  # rounding
