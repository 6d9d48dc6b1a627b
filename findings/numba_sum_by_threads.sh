#!/usr/bin/env bash
# Numba's mean of 33 million float32 ones is 0.5 on one thread, and 1 on two threads.
#
# numba 0.68.1, numpy 2, x86-64 Linux, 2026-11-28. NumPy adds pairwise; in a compiled function `sum` and `mean` add one after
# the other in float32, and stop at 2**24. With parallel=True each thread has a partial sum, so the result depends on the
# number of threads.
#
# Seen:
#   numpy 1.0, compiled 0.5, parallel on 1 thread 0.5, on 2 threads 1.0
#
# Why it matters: Op.numba compiles a user's operator by Numba. A result that is reduced inside it by `sum()` is less exact
# than NumPy's, and in a parallel function two ranks with different numbers of cores differ.
set -eu
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
cd "$folder"
python3 -m venv venv
venv/bin/python -m pip install -q numba==0.68.1 numpy
cat > program.py <<'PROGRAM'
import numba
import numpy as np

ones = np.ones(2**25, np.float32)


def mean(x):
    return x.sum() / np.float32(x.size)


parallel = numba.njit(parallel=True)(mean)
parts = [f"numpy {mean(ones)}", f"compiled {numba.njit(mean)(ones)}"]
for threads in (1, 2):
    numba.set_num_threads(threads)
    parts.append(f"{'parallel ' if threads == 1 else ''}on {threads} thread{'s' * (threads > 1)} {parallel(ones)}")
print(", ".join(parts))
PROGRAM
NUMBA_NUM_THREADS=2 venv/bin/python program.py 2>/dev/null | tee seen
[ "$(cat seen)" = "numpy 1.0, compiled 0.5, parallel on 1 thread 0.5, on 2 threads 1.0" ]
