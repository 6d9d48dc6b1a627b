"""Gives each rank a layer of a network, through which the parts of a batch go like work along an assembly line.

torchrun --nproc-per-node=2 examples/pipeline.py
"""

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.pipelining import PipelineStage, Schedule1F1B

STEPS, BATCH, WIDTH = 20, 32, 16


def make_layers(count: int) -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(*(nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Tanh()) for _ in range(count))).double()


dist.init_process_group("ringreduce")
rank, size = dist.get_rank(), dist.get_world_size()
assert 2 <= size <= 8, "2 to 8 ranks: a layer each, and no more layers than parts of a batch"

mine, alone = make_layers(size)[rank], make_layers(size)
schedule = Schedule1F1B(
    PipelineStage(mine, rank, size, torch.device("cpu")), n_microbatches=8, loss_fn=nn.functional.mse_loss
)
optimizers = [torch.optim.SGD(m.parameters(), lr=0.5, momentum=0.9) for m in (mine, alone)]
data = torch.Generator().manual_seed(1)
for _ in range(STEPS):
    x = torch.randn(BATCH, WIDTH, generator=data, dtype=torch.float64)
    y = x.sin().roll(1, 1)
    for optimizer in optimizers:
        optimizer.zero_grad()

    # The pipeline: the first rank has the input, the last one the target.
    inputs, target = (x,) if rank == 0 else (), {"target": y} if rank == size - 1 else {}
    schedule.step(*inputs, **target)

    nn.functional.mse_loss(alone(x), y).backward()  # the same in this process alone
    for optimizer in optimizers:
        optimizer.step()

pairs = zip(mine.parameters(), alone[rank].parameters(), strict=True)
error = max((a - b).abs().max().item() for a, b in pairs)
print(f"rank {rank}: layer {rank} differs from a single process's by {error:.1e}\n", end="")
dist.destroy_process_group()
assert error < 1e-10, error  # rounding
