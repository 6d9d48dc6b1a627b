"""A training with DDP on 2 ranks, from an installed wheel. It prints one line, or fails."""

import shutil
import sys
from pathlib import Path

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

STEPS = 20

dist.init_process_group("ringreduce")
import ringreduce  # noqa: E402
from ringreduce import ops  # noqa: E402
from ringreduce.common import compiled  # noqa: E402

assert Path(ringreduce.__file__).is_relative_to(sys.prefix), f"{ringreduce.__file__} is not the installed wheel"
assert Path(ringreduce._C.__file__) == compiled.PACKAGE / compiled.name_for(torch.__version__)
assert not any(map(shutil.which, ("c++", "g++", "cc", "gcc", "clang", "clang++"))), "a compiler was found"

rank, size = dist.get_rank(), dist.get_world_size()
torch.manual_seed(7)
model = nn.Sequential(nn.Linear(8, 16), nn.Tanh(), nn.Linear(16, 1)).double()
alone = nn.Sequential(nn.Linear(8, 16), nn.Tanh(), nn.Linear(16, 1)).double()
alone.load_state_dict(model.state_dict())
shared = DistributedDataParallel(model)
optimizers = [torch.optim.SGD(each.parameters(), lr=0.1) for each in (shared, alone)]
for _ in range(STEPS):
    x = torch.randn(8 * size, 8, dtype=torch.float64)
    mine = slice(8 * rank, 8 * (rank + 1))
    for each, part, optimizer in zip((shared, alone), (mine, slice(None)), optimizers, strict=True):
        optimizer.zero_grad()
        (each(x[part]) - x[part].sum(1, keepdim=True)).square().mean().backward()
        optimizer.step()
for ours, theirs in zip(model.parameters(), alone.parameters(), strict=True):
    torch.testing.assert_close(ours, theirs, rtol=0, atol=1e-12)
total = torch.full((1000,), rank + 1.0)
ringreduce.all_reduce(total)
assert total.eq(size * (size + 1) / 2).all()
ops.all_reduce_(total, dist.group.WORLD.group_name)
assert total.eq(size * size * (size + 1) / 2).all()
if rank == 0:
    print(f"{STEPS} steps of DDP on {size} ranks are those of one process", flush=True)
dist.destroy_process_group()
