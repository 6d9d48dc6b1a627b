#!/usr/bin/env bash
# MPICH's MAXLOC gives ranks of one Allreduce different results if a value is NaN.
#
# mpich 5.0.2, mpi4py 4.1.2, numpy, 2 and 3 ranks, x86-64 Linux, 2026-11-28. Every rank has a pair of a value and its rank;
# one value is NaN. An Allreduce should leave the same pair everywhere, whatever it does with NaN. MPICH does not: each of two
# ranks keeps its own pair. MPI.MAX with a NaN gives both ranks the same number.
#
# Seen, pairs on each rank:
#   NaN on rank 0 of 2: (nan, 0) (1.0, 1); NaN on rank 1 of 3: (nan, 1) (nan, 1) (1.0, 2)
#
# Why it matters: ringreduce's operators for the highest value return one result on all ranks. A program that takes the best
# of all ranks by MAXLOC has to replace NaN first, or its ranks follow different leaders.
set -eu
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
cd "$folder"
python3 -m venv venv
venv/bin/python -m pip install -q mpi4py==4.1.2 mpich==5.0.2 numpy
cat > program.py <<'PROGRAM'
import math
import sys

import numpy as np
from mpi4py import MPI

world = MPI.COMM_WORLD
pair = np.dtype([("value", "f8"), ("rank", "i4")], align=True)
mine, best = np.zeros(1, pair), np.zeros(1, pair)
mine["value"] = math.nan if world.rank == int(sys.argv[1]) else 1.0
mine["rank"] = world.rank
world.Allreduce([mine, MPI.DOUBLE_INT], [best, MPI.DOUBLE_INT], MPI.MAXLOC)
ranks = world.gather((float(best["value"][0]), int(best["rank"][0])))
if world.rank == 0:
    print(f"NaN on rank {sys.argv[1]} of {world.size}:", *ranks)
PROGRAM
{
    venv/bin/mpiexec -n 2 venv/bin/python program.py 0
    venv/bin/mpiexec -n 3 venv/bin/python program.py 1
} 2>/dev/null | tee seen
grep -qxF "NaN on rank 0 of 2: (nan, 0) (1.0, 1)" seen
grep -qxF "NaN on rank 1 of 3: (nan, 1) (nan, 1) (1.0, 2)" seen
