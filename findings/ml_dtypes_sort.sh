#!/usr/bin/env bash
# np.sort of an array of ml_dtypes leaves numbers unsorted if one is NaN, and np.unique repeats them.
#
# ml_dtypes 0.6.0, numpy 2.4.6, x86-64 Linux, 2026-11-29. NumPy sorts its own floats with NaN last. ml_dtypes gives NumPy a
# comparison in which NaN is neither less nor greater than a number, as IEEE 754 has it, so numbers do not get past a NaN.
# np.argsort gives the same order, and np.unique is made of a sort.
#
# Seen, of 3, NaN, 1, 2, then of NaN, 1, NaN, 1:
#   float16: sorted 1 2 3 nan, unique 1 nan
#   bfloat16: sorted 3 nan 1 2, unique nan 1 nan 1
#   float8_e4m3fn: sorted 3 nan 1 2, unique nan 1 nan 1
#
# Why it matters: ringreduce takes such arrays. A program that sorts gradients to send the largest ones sends others once there
# is a NaN.
set -eu
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
cd "$folder"
python3 -m venv venv
venv/bin/python -m pip install -q ml_dtypes==0.6.0 numpy==2.4.6
cat > program.py <<'PROGRAM'
import ml_dtypes
import numpy as np

nan = float("nan")
for dtype in (np.float16, ml_dtypes.bfloat16, ml_dtypes.float8_e4m3fn):
    ordered = np.sort(np.array([3, nan, 1, 2], dtype))
    once = np.unique(np.array([nan, 1, nan, 1], dtype))
    words = [" ".join(f"{float(each):g}" for each in some) for some in (ordered, once)]
    print(f"{dtype.__name__}: sorted {words[0]}, unique {words[1]}")
PROGRAM
venv/bin/python program.py | tee seen
grep -qxF "float16: sorted 1 2 3 nan, unique 1 nan" seen
grep -qxF "bfloat16: sorted 3 nan 1 2, unique nan 1 nan 1" seen
grep -qxF "float8_e4m3fn: sorted 3 nan 1 2, unique nan 1 nan 1" seen
