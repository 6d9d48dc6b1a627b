#!/usr/bin/env bash
# torch has three ways to differentiate a sum over ranks, and their gradients differ by the number of ranks.
#
# torch 2.13.0, CPU build, backend gloo, 2 ranks, x86-64 Linux, 2026-11-28. Each rank squares its own weight 3, sums over 2
# ranks, and calls backward on the sum. `torch.distributed.nn.functional.all_reduce` and the functional collective sum the
# gradients of all ranks' losses: 12. `full_tensor()` of a DTensor takes the ranks' losses for one loss: 6.
#
# Seen, on both ranks:
#   nn.functional 12.0, functional collective 12.0, DTensor 6.0, DTensor with grad_placements 12.0
#
# Why it matters: all three run on ringreduce. A program that goes from one to another changes its learning rate by the number
# of ranks.
set -eu
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
cd "$folder"
python3 -m venv venv
venv/bin/python -m pip install -q torch==2.13.0 numpy
cat > program.py <<'PROGRAM'
import torch
import torch.distributed as dist
import torch.distributed.nn.functional as nn_functional
from torch.distributed import _functional_collectives as functional
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Partial, Replicate

dist.init_process_group("gloo")
mesh = init_device_mesh("cpu", (2,))


def gradient(summed):
    weight = torch.tensor([3.0], requires_grad=True)
    summed(weight * weight).sum().backward()
    return weight.grad.item()


def replicated(x):
    return DTensor.from_local(x, mesh, [Partial()]).redistribute(placements=[Replicate()])


mine = {
    "nn.functional": gradient(nn_functional.all_reduce),
    "functional collective": gradient(lambda x: functional.all_reduce(x, "sum", mesh)),
    "DTensor": gradient(lambda x: replicated(x).full_tensor()),
    "DTensor with grad_placements": gradient(lambda x: replicated(x).to_local(grad_placements=[Partial()])),
}
ranks = [{}, {}]
dist.all_gather_object(ranks, mine)
if dist.get_rank() == 0 and ranks[0] == ranks[1]:
    print(", ".join(f"{name} {value}" for name, value in mine.items()))
dist.destroy_process_group()
PROGRAM
export OMP_NUM_THREADS=1
venv/bin/torchrun --standalone --nproc-per-node 2 program.py 2>/dev/null | tee seen
[ "$(cat seen)" = "nn.functional 12.0, functional collective 12.0, DTensor 6.0, DTensor with grad_placements 12.0" ]
