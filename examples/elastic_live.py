"""A training in which a rank is killed, the others go on at once, and a fresh process takes its place.

The others go on in the same processes. The keeper of the killed rank starts it again, and it joins them. All ranks end
with the parameters that a single process gets.

torchrun --nproc-per-node=3 --no-python ringreduce keep --errors python examples/elastic_live.py
"""

import os
import signal
import time

import torch
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from ringreduce import elastic

STEPS, TOGETHER, BATCH, KILLED_AT = 40, 20, 24, 10
kept = "RINGREDUCE_LIFE" in os.environ  # else torchrun would end the others with the rank that is killed
life = int(os.environ.get("RINGREDUCE_LIFE", "0"))  # how often the keeper has started this rank before


def loss_of(model: nn.Module, step: int, rank: int, size: int) -> torch.Tensor:
    """The loss of a rank's share of the step's batch. The batch is the same, however many ranks share it."""
    x = torch.randn(BATCH, 8, generator=torch.Generator().manual_seed(step), dtype=torch.float64)[rank::size]
    # DDP averages over the ranks, so each share is scaled by their number.
    return nn.functional.mse_loss(model(x), x.sin().sum(1, keepdim=True), reduction="sum") * size / BATCH


torch.manual_seed(0)
alone, net = nn.Linear(8, 1).double(), nn.Linear(8, 1).double()
net.load_state_dict(alone.state_dict())

world = elastic.start()
model = DistributedDataParallel(net, init_sync=False)
optimizer = torch.optim.Adam(model.parameters(), lr=0.1)
state = world.state(model=model, optimizer=optimizer, step=0, together=0)
started = state.step


def backward() -> None:
    optimizer.zero_grad()
    loss_of(model, state.step, world.rank, world.size).backward()
    if state.step == KILLED_AT and os.environ["RANK"] == "1" and life == 0 and kept:
        os.kill(os.getpid(), signal.SIGKILL)


# All members must stop at the same step, so the condition depends only on `state`, which joiners get. They wait for the
# joiner, since a fresh process takes seconds to import torch.
while state.step < STEPS or state.together < TOGETHER:
    world.attempt(backward)
    optimizer.step()
    state.step += 1
    everybody = world.size == int(os.environ["WORLD_SIZE"])
    state.together = state.together + 1 if everybody and state.step > KILLED_AT else 0
    if not everybody:
        time.sleep(0.01)

adam = torch.optim.Adam(alone.parameters(), lr=0.1)
for step in range(state.step):
    adam.zero_grad()
    loss_of(alone, step, 0, 1).backward()
    adam.step()
error = max((a - b).abs().max().item() for a, b in zip(net.parameters(), alone.parameters(), strict=True))
print(
    f"rank {world.rank} of {world.size}, life {life}, epoch {world.epoch}: from step {started} on; "
    f"parameters differ from a single process's by {error:.1e}\n",
    end="",
)
if not kept and world.rank == 0:
    print("no rank was killed, since no keeper would start it again: see the command at the top of this file")
world.leave()
assert error < 1e-10, error  # rounding
