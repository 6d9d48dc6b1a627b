#!/usr/bin/env bash
# Under torch.func, a functional all_reduce returns its input, or a derivative of zero, without an error.
#
# torch 2.13.0, CPU build, backend gloo, 2 ranks, x86-64 Linux, 2026-11-28. Under `vmap` the functional all_reduce of ones
# over 2 ranks gives ones, where 2 is right. Under `jvp` its value is right, and its derivative is 0 where 4 is right. The
# reverse derivative (`backward`) is right, and so is a loop in place of `vmap`.
#
# Seen, on both ranks:
#   vmap [1.0, 1.0, 1.0], loop [2.0, 2.0, 2.0], jvp value 2.0 derivative 0.0, backward 4.0
#
# Why it matters: these functions take any group, so a program on ringreduce gets the same. Call collectives outside of vmap
# and jvp.
set -eu
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
cd "$folder"
python3 -m venv venv
venv/bin/python -m pip install -q torch==2.13.0 numpy
cat > program.py <<'PROGRAM'
import torch
import torch.distributed as dist
from torch.distributed import _functional_collectives as functional

dist.init_process_group("gloo")


def summed(x):
    return functional.wait_tensor(functional.all_reduce(x, "sum", dist.group.WORLD))


ones = torch.ones(3)
value, derivative = torch.func.jvp(lambda x: summed(x * x), (torch.ones(1),), (torch.ones(1),))
weight = torch.ones(1, requires_grad=True)
summed(weight * weight).sum().backward()
mine = (
    f"vmap {torch.vmap(summed)(ones).tolist()}, loop {torch.stack([summed(x) for x in ones]).tolist()}, "
    f"jvp value {value.item()} derivative {derivative.item()}, backward {weight.grad.item()}"
)
ranks = ["", ""]
dist.all_gather_object(ranks, mine)
if dist.get_rank() == 0 and ranks[0] == ranks[1]:
    print(mine)
dist.destroy_process_group()
PROGRAM
export OMP_NUM_THREADS=1
venv/bin/torchrun --standalone --nproc-per-node 2 program.py 2>/dev/null | tee seen
[ "$(cat seen)" = "vmap [1.0, 1.0, 1.0], loop [2.0, 2.0, 2.0], jvp value 2.0 derivative 0.0, backward 4.0" ]
