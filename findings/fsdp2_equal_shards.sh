#!/usr/bin/env bash
# FSDP2 on CPUs: layers that are initialized after `fully_shard` get the same random values in each rank's shard.
#
# torch 2.13.0, CPU build, backend gloo, 2 ranks, x86-64 Linux, 2026-11-28. The usual way to make a large model is on the meta
# device, then `fully_shard`, `to_empty` and `reset_parameters`. If all ranks have the same seed, as they should for one
# model, the rows of rank 1's shard equal those of rank 0's: half of the neurons are copies of the other half. Dropout of a
# sharded DTensor repeats its mask in the same way. No error or warning comes.
#
# Seen:
#   as without shards: False, second half equals first half: True, dropout's halves equal: True
#
# Why it matters: on ringreduce FSDP2 runs on CPUs too. Initialize before `fully_shard`, or use another seed on each rank.
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
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import Shard, distribute_tensor

dist.init_process_group("gloo")
mesh = init_device_mesh("cpu", (2,))
torch.manual_seed(0)
alone = torch.nn.Linear(64, 64).weight
with torch.device("meta"):
    layer = torch.nn.Linear(64, 64)
fully_shard(layer, mesh=mesh)
layer.to_empty(device="cpu")
torch.manual_seed(0)
layer.reset_parameters()
weight = layer.weight.full_tensor()
dropped = torch.nn.functional.dropout(distribute_tensor(torch.ones(64), mesh, [Shard(0)])).full_tensor()
if dist.get_rank() == 0:
    print(
        f"as without shards: {torch.equal(weight, alone)},",
        f"second half equals first half: {torch.equal(weight[:32], weight[32:])},",
        f"dropout's halves equal: {torch.equal(dropped[:32], dropped[32:])}",
    )
dist.destroy_process_group()
PROGRAM
export OMP_NUM_THREADS=1
venv/bin/torchrun --standalone --nproc-per-node 2 program.py 2>/dev/null | tee seen
[ "$(cat seen)" = "as without shards: False, second half equals first half: True, dropout's halves equal: True" ]
