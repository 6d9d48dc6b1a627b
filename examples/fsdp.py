"""Trains a network whose parameters, gradients and optimizer state are sharded over the ranks (FSDP2).

torchrun --nproc-per-node=2 examples/fsdp.py
"""

import argparse

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard

STEPS, BATCH, WIDTH = 20, 32, 64


def make_model() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(
        nn.Linear(8, WIDTH), nn.Tanh(), nn.Linear(WIDTH, WIDTH), nn.Tanh(), nn.Linear(WIDTH, 1)
    ).double()


def train(model: nn.Module, rank: int, size: int) -> None:
    """On the `rank`-th of `size` equal parts of every batch."""
    optimizer = torch.optim.Adam(model.parameters(), lr=0.01)
    data = torch.Generator().manual_seed(1)
    for _ in range(STEPS):
        x = torch.randn(BATCH, 8, generator=data, dtype=torch.float64).chunk(size)[rank]
        optimizer.zero_grad()
        nn.functional.mse_loss(model(x), x.prod(1, keepdim=True)).backward()
        optimizer.step()


parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
parser.add_argument("--save", metavar="FILE", help="write the trained parameters there, whole, by torch.save")
args = parser.parse_args()

dist.init_process_group("ringreduce")
rank, size = dist.get_rank(), dist.get_world_size()
assert BATCH % size == 0, f"{size} ranks cannot share {BATCH} samples equally"

mesh = init_device_mesh("cpu", (size,))
model = make_model()
for layer in (*model[::2], model):
    fully_shard(layer, mesh=mesh)
train(model, rank, size)

whole = [p.full_tensor() for p in model.parameters()]  # a collective; up to here no rank had all of a parameter
held, total = sum(p.to_local().numel() for p in model.parameters()), sum(p.numel() for p in whole)
print(f"rank {rank} holds {held} of {total} parameters\n", end="")

alone = make_model()
train(alone, 0, 1)
error = max((a - b).abs().max().item() for a, b in zip(whole, alone.parameters(), strict=True))
if rank == 0:
    print(f"parameters differ from a single process's by {error:.1e}\n", end="")
    if args.save:
        torch.save({name: p.detach() for (name, _), p in zip(alone.named_parameters(), whole, strict=True)}, args.save)
dist.destroy_process_group()
assert error < 1e-10, error  # rounding
