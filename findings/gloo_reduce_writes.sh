#!/usr/bin/env bash
# dist.reduce over Gloo writes partial sums into the tensors of ranks that are not its destination.
#
# torch 2.13.0, CPU build, backend gloo, 2 and 3 ranks, x86-64 Linux, 2026-11-28. Rank r has four times r + 1, and rank 0 is
# to get the sums. On the other ranks a part of the tensor holds partial or full sums afterwards, and which part depends on
# the rank.
#
# Seen:
#   2 ranks: [3, 3, 3, 3] [2, 2, 3, 3]
#   3 ranks: [6, 6, 6, 6] [5, 5, 6, 6] [3, 3, 4, 4]
#
# Why it matters: ringreduce leaves the tensors of other ranks as they were. A program that goes on with its tensor after a
# reduce, or that adds several reduces, has other values on Gloo.
set -eu
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
cd "$folder"
python3 -m venv venv
venv/bin/python -m pip install -q torch==2.13.0 numpy
cat > program.py <<'PROGRAM'
import torch
import torch.distributed as dist

dist.init_process_group("gloo")
rank, size = dist.get_rank(), dist.get_world_size()
x = torch.full((4,), rank + 1)
dist.reduce(x, 0)
ranks = [[]] * size
dist.all_gather_object(ranks, x.tolist())
if rank == 0:
    print(f"{size} ranks:", *ranks)
dist.destroy_process_group()
PROGRAM
export OMP_NUM_THREADS=1
for ranks in 2 3; do
    venv/bin/torchrun --standalone --nproc-per-node "$ranks" program.py 2>/dev/null
done | tee seen
grep -qxF "2 ranks: [3, 3, 3, 3] [2, 2, 3, 3]" seen
grep -qxF "3 ranks: [6, 6, 6, 6] [5, 5, 6, 6] [3, 3, 4, 4]" seen
