#!/usr/bin/env bash
# The mean of three equal gradients by DDP is not that gradient: about 3 elements in 10 differ in the last bits.
#
# torch 2.13.0, CPU build, backend gloo, 2 and 3 ranks, x86-64 Linux, 2026-11-28. All ranks have the same batch, so the mean
# of their gradients should be the gradient of one. DDP multiplies each by the rounded number 1/3 and then sums. FSDP2 and
# ReduceOp.AVG sum first and divide once, which is exact more often. With 2, 4 or 8 ranks all are exact.
#
# Seen, share of elements that differ from the gradient of one process:
#   2 ranks: DDP 0.00, AVG 0.00; 3 ranks: DDP 0.30, AVG 0.15
#
# Why it matters: DDP divides before it calls the backend, so it is the same on ringreduce. A test that compares DDP with one
# process bit by bit fails at 3 ranks with any backend; compare with a tolerance, or use a power of two.
set -eu
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
cd "$folder"
python3 -m venv venv
venv/bin/python -m pip install -q torch==2.13.0 numpy
cat > program.py <<'PROGRAM'
import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel

dist.init_process_group("gloo")
torch.manual_seed(0)
layer = torch.nn.Linear(1000, 100, bias=False)
batch = torch.randn(4, 1000)
layer(batch).square().sum().backward()
alone = layer.weight.grad.clone()
layer.weight.grad = None
model = DistributedDataParallel(layer)
model(batch).square().sum().backward()
mean = alone.clone()
dist.all_reduce(mean, dist.ReduceOp.AVG)


def differs(gradient):
    return f"{(gradient != alone).float().mean().item():.2f}"


if dist.get_rank() == 0:
    print(f"{dist.get_world_size()} ranks: DDP {differs(layer.weight.grad)}, AVG {differs(mean)}")
dist.destroy_process_group()
PROGRAM
export OMP_NUM_THREADS=1
for ranks in 2 3; do
    venv/bin/torchrun --standalone --nproc-per-node "$ranks" program.py 2>/dev/null
done | tee seen
grep -qx "2 ranks: DDP 0.00, AVG 0.00" seen
grep -qx "3 ranks: DDP 0.[23][0-9], AVG 0.1[0-9]" seen
