#!/usr/bin/env bash
# `item()` and `bool()` of a DTensor read this rank's part when its sum has not been reduced yet.
#
# torch 2.13.0, CPU build, backend gloo, 2 ranks, x86-64 Linux, 2026-11-28. The numbers 1 to 5 lie sharded over 2 ranks.
# `mean()` reduces at once, so `mean().item()` is right. `sum()`, `norm()`, `max()` and `any()` give a DTensor whose placement
# is Partial, and their `item()` or `bool()` is this rank's part, without an error. `full_tensor()` before it gives the right
# value.
#
# Seen, rank 0 then rank 1:
#   mean [3.0, 3.0], sum [6.0, 9.0], max [3.0, 5.0], any above 4 [False, True], sum of full_tensor [15.0, 15.0]
#
# Why it matters: FSDP2 on ringreduce gives DTensors. A loop that ends at `(norm < limit)`, or an `if` on `any()`, takes
# another branch on each rank, and the next collective then meets a different one: ringreduce raises CollectiveMismatch there.
set -eu
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
cd "$folder"
python3 -m venv venv
venv/bin/python -m pip install -q torch==2.13.0 numpy
cat > program.py <<'PROGRAM'
import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Shard, distribute_tensor

dist.init_process_group("gloo")
mesh = init_device_mesh("cpu", (2,))
x = distribute_tensor(torch.arange(1.0, 6), mesh, [Shard(0)])
mine = {
    "mean": x.mean().item(),
    "sum": x.sum().item(),
    "max": x.max().item(),
    "any above 4": bool((x > 4).any()),
    "sum of full_tensor": x.sum().full_tensor().item(),
}
ranks = [{}, {}]
dist.all_gather_object(ranks, mine)
if dist.get_rank() == 0:
    print(", ".join(f"{name} {[of[name] for of in ranks]}" for name in mine))
dist.destroy_process_group()
PROGRAM
export OMP_NUM_THREADS=1
venv/bin/torchrun --standalone --nproc-per-node 2 program.py 2>/dev/null | tee seen
wanted="mean [3.0, 3.0], sum [6.0, 9.0], max [3.0, 5.0], any above 4 [False, True], sum of full_tensor [15.0, 15.0]"
[ "$(cat seen)" = "$wanted" ]
