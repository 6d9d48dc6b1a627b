"""Kills a rank in the middle of a training. torchrun starts all ranks again, and they go on from the last checkpoint.

torchrun --nproc-per-node=2 --max-restarts=1 examples/elastic.py
"""

import os
import signal
import tempfile
from pathlib import Path

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

STEPS, SAVE_EVERY, KILLED_AT = 20, 4, 10
attempt = int(os.environ["TORCHELASTIC_RESTART_COUNT"])
restarts = (
    os.environ["TORCHELASTIC_MAX_RESTARTS"] != "0"
)  # else torchrun would end the job with the rank that is killed
checkpoint = Path(tempfile.gettempdir()) / f"ringreduce_elastic_{os.environ['TORCHELASTIC_RUN_ID']}.pt"


def samples(step: int, rank: int) -> torch.Tensor:
    return torch.randn(16, 8, generator=torch.Generator().manual_seed(1000 * step + rank), dtype=torch.float64)


def learn(model: nn.Module, optimizer: torch.optim.Optimizer, x: torch.Tensor) -> None:
    optimizer.zero_grad()
    nn.functional.mse_loss(model(x), x.sin().sum(1, keepdim=True)).backward()
    optimizer.step()


dist.init_process_group("ringreduce")
rank, size = dist.get_rank(), dist.get_world_size()
torch.manual_seed(0)
alone = nn.Linear(8, 1).double()
model = DistributedDataParallel(nn.Linear(8, 1).double())
model.module.load_state_dict(alone.state_dict())
optimizer = torch.optim.Adam(model.parameters(), lr=0.1)

first = 0
if attempt > 0:
    state = torch.load(checkpoint)
    model.load_state_dict(state["model"])
    optimizer.load_state_dict(state["optimizer"])
    first = state["step"]
    print(f"rank {rank}, attempt {attempt}: goes on at step {first}\n", end="")

for step in range(first, STEPS):
    if step % SAVE_EVERY == 0 and rank == 0:
        state = {"step": step, "model": model.state_dict(), "optimizer": optimizer.state_dict()}
        torch.save(state, checkpoint.with_suffix(".new"))
        checkpoint.with_suffix(".new").rename(checkpoint)  # whole or not at all
    if step == KILLED_AT and attempt == 0 and rank == size - 1 and restarts:
        os.kill(os.getpid(), signal.SIGKILL)
    learn(model, optimizer, samples(step, rank))  # PeerLost here ends the ranks that were not killed

adam = torch.optim.Adam(alone.parameters(), lr=0.1)
for step in range(STEPS):
    learn(alone, adam, torch.cat([samples(step, r) for r in range(size)]))
error = max((a - b).abs().max().item() for a, b in zip(model.parameters(), alone.parameters(), strict=True))
print(f"rank {rank}, attempt {attempt}: parameters differ from a single process's by {error:.1e}\n", end="")
if not restarts and rank == 0:
    print("no rank was killed, since torchrun was told to restart none: add --max-restarts=1")
dist.barrier()
dist.destroy_process_group()
checkpoint.unlink(missing_ok=True)
assert error < 1e-10, error  # rounding
