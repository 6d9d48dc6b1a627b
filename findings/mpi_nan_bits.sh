#!/usr/bin/env bash
# After a sum of NaN with different bits the ranks of MPI hold different bits, which depends on the number of elements.
#
# mpich 5.0.2, impi-rt 2021.18.1, mpi4py 4.1.2, numpy, 2 and 4 ranks on one host, x86-64 Linux, 2026-11-29. The lowest bits of
# each NaN are its rank. The MPI standard requires that all ranks of an Allreduce receive identical results. But x86 keeps the
# bits of the first of two NaN, and where two ranks exchange values and add them, each puts its own first.
#
# Seen, how many different results the ranks hold:
#   mpich: 2 of 1 element and 1 of 16 on 2 ranks, 4 and 1 on 4 ranks
#   impi-rt: 1 of 1 element and 2 of 16 on 2 ranks, 1 and 1 on 4 ranks
#
# Why it matters: a check by hashes that replicas are equal can fail on MPI for a NaN that all replicas have. ringreduce gives
# all ranks the same bits.
set -eu
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
cd "$folder"
cat > program.py <<'PROGRAM'
import sys

import numpy as np
from mpi4py import MPI

world = MPI.COMM_WORLD
values = np.full(int(sys.argv[1]), 0x7FC00001 + world.rank, np.uint32).view(np.float32)
world.Allreduce(MPI.IN_PLACE, values)
ranks = world.gather(values.tobytes())
if world.rank == 0:
    print(len(set(ranks)))
PROGRAM
for package in mpich==5.0.2 impi-rt==2021.18.1; do
    python3 -m venv "$package"
    "$package/bin/python" -m pip install -q mpi4py==4.1.2 "$package" numpy
done
run() {
    I_MPI_FABRICS=shm "$1/bin/mpiexec.hydra" -n "$2" "$1/bin/python" program.py "$3" 2>/dev/null
}
for package in mpich==5.0.2 impi-rt==2021.18.1; do
    echo "${package%%=*}: $(run $package 2 1) of 1 element and $(run $package 2 16) of 16 on 2 ranks," \
        "$(run $package 4 1) and $(run $package 4 16) on 4 ranks"
done | tee seen
grep -qxF "mpich: 2 of 1 element and 1 of 16 on 2 ranks, 4 and 1 on 4 ranks" seen
grep -qxF "impi-rt: 1 of 1 element and 2 of 16 on 2 ranks, 1 and 1 on 4 ranks" seen
