#!/usr/bin/env bash
# A checkpoint of torch.distributed.checkpoint mixes the tensors of several ranks where they should be equal but are not.
#
# torch 2.13.0, CPU build, backend gloo, 2 ranks, x86-64 Linux, 2026-11-28. Each rank saves ordinary tensors under the same
# names. One might expect rank 0's values. The writers divide the names among them to save time, so a checkpoint has some
# tensors of rank 0 and some of rank 1. For BatchNorm that means the running mean of one rank with the running variance of
# another. Plain numbers are divided in the same way.
#
# Seen, the rank whose value was loaded:
#   running_mean 0, running_var 1, num_batches_tracked 0, step 1, lr 1
#
# Why it matters: DDP with `broadcast_buffers=False`, or parameters that drifted apart, run on ringreduce without an error.
# Their checkpoint is then the state of no rank. Broadcast buffers before a save.
set -eu
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
cd "$folder"
python3 -m venv venv
venv/bin/python -m pip install -q torch==2.13.0 numpy
cat > program.py <<'PROGRAM'
import sys

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp

dist.init_process_group("gloo")
rank = dist.get_rank()
buffers = torch.nn.BatchNorm1d(4).state_dict()
mine = {name: torch.full_like(buffers[name], rank) for name in ("running_mean", "running_var", "num_batches_tracked")}
dcp.save({**mine, "step": rank, "lr": float(rank)}, checkpoint_id=sys.argv[1])
loaded = {**{name: torch.full_like(tensor, 9) for name, tensor in mine.items()}, "step": 9, "lr": 9.0}
dcp.load(loaded, checkpoint_id=sys.argv[1])
if rank == 0:
    print(", ".join(f"{name} {int(value.max() if torch.is_tensor(value) else value)}" for name, value in loaded.items()))
dist.destroy_process_group()
PROGRAM
export OMP_NUM_THREADS=1
venv/bin/torchrun --standalone --nproc-per-node 2 program.py "$folder/checkpoint" 2>/dev/null | tee seen
[ "$(cat seen)" = "running_mean 0, running_var 1, num_batches_tracked 0, step 1, lr 1" ]
