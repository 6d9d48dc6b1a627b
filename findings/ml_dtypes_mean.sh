#!/usr/bin/env bash
# The mean of a thousand bfloat16 ones in NumPy is 0.256, while their dot product is 1000.
#
# ml_dtypes 0.6.0, numpy 2, x86-64 Linux, 2026-11-28. `sum`, `mean` and `cumsum` of ml_dtypes' arrays add in the dtype itself,
# one after the other, and stop where 1 is below half of the last bit: at 256 in bfloat16, 16 in float8_e4m3fn. `dot` adds in
# float32. For float16 NumPy's own `mean` is right.
#
# Seen:
#   bfloat16: sum 256, mean 0.255859, dot 1000; float8_e5m2: sum 8, mean 0.0078125, dot 1024; float16: sum 1000, mean 1, dot 1000
#
# Why it matters: ringreduce reduces such arrays across ranks through float32. A loop that first takes the mean on each rank
# has lost the value before: convert with `astype(np.float32)` there.
set -eu
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
cd "$folder"
python3 -m venv venv
venv/bin/python -m pip install -q ml_dtypes==0.6.0 numpy
cat > program.py <<'PROGRAM'
import ml_dtypes
import numpy as np


def results(name):
    ones = np.ones(1000, getattr(ml_dtypes, name, name))
    return f"{name}: sum {float(ones.sum()):.6g}, mean {float(ones.mean()):.6g}, dot {float(np.dot(ones, ones)):.6g}"


print("; ".join(results(name) for name in ("bfloat16", "float8_e5m2", "float16")))
PROGRAM
venv/bin/python program.py 2>/dev/null | tee seen
wanted="bfloat16: sum 256, mean 0.255859, dot 1000; float8_e5m2: sum 8, mean 0.0078125, dot 1024; float16: sum 1000, mean 1, dot 1000"
[ "$(cat seen)" = "$wanted" ]
