#!/usr/bin/env bash
# all_reduce over Gloo adds tensors in the order of memory, also where strides differ or leave gaps, without an error.
#
# torch 2.13.0, CPU build, over Gloo, 2 ranks, x86-64 Linux, 2026-11-29. Both ranks have a matrix of the numbers 0 to 3; that of
# rank 1 is transposed, a view. Elements of other places are added, and the ranks end with different matrices; the sum is
# [[0, 3], [3, 6]]. Of x = [0, 1, 2, 3] every second element, x[::2], is to be added: instead the first two are. dist.send and
# recv refuse such tensors.
#
# Seen, on each rank:
#   transposed on rank 1: [[0, 2], [4, 6]] [[0, 4], [2, 6]]
#   x after all_reduce of x[::2]: [0, 2, 2, 3] [0, 2, 2, 3]
#
# Why it matters: ringreduce adds elements of the same place, and leaves those between them. A program that runs with both has
# wrong sums with Gloo only.
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


def show(what, x):
    ranks = [None, None]
    dist.all_gather_object(ranks, x.tolist())
    if dist.get_rank() == 0:
        print(f"{what}:", *ranks)


matrix = torch.arange(4).view(2, 2)
matrix = matrix.t() if dist.get_rank() == 1 else matrix
dist.all_reduce(matrix)
show("transposed on rank 1", matrix)
x = torch.arange(4)
dist.all_reduce(x[::2])
show("x after all_reduce of x[::2]", x)
dist.destroy_process_group()
PROGRAM
export OMP_NUM_THREADS=1
venv/bin/torchrun --standalone --nproc-per-node 2 program.py 2>/dev/null | tee seen
grep -qxF "transposed on rank 1: [[0, 2], [4, 6]] [[0, 4], [2, 6]]" seen
grep -qxF "x after all_reduce of x[::2]: [0, 2, 2, 3] [0, 2, 2, 3]" seen
