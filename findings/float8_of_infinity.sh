#!/usr/bin/env bash
# torch casts infinity to 448 in float8_e4m3fn, and negative numbers to positive ones in float8_e8m0fnu; ml_dtypes makes both
# NaN.
#
# torch 2.13.0 CPU build, ml_dtypes 0.6.0, x86-64 Linux, 2026-11-28. Both libraries name the same formats. In e4m3fn, which
# has no infinity, torch saturates everything beyond 464, infinity too, so an overflow upstream leaves no trace. In e8m0fnu,
# which has powers of two only, torch drops the sign and turns 0 into 2**-127. Finite numbers in range get the same bits.
#
# Seen, torch then ml_dtypes:
#   e4m3fn of 464: 448.0 448.0, of 500: 448.0 nan, of inf: 448.0 nan
#   e8m0fnu of 3: 4.0 4.0, of -1: 1.0 nan, of 0: 5.877471754111438e-39 nan
#
# Why it matters: ringreduce takes float8 tensors of torch and arrays of ml_dtypes, and saturates sums at 448. A check for NaN
# after a cast finds an overflow in arrays, but not in tensors.
set -eu
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
cd "$folder"
python3 -m venv venv
venv/bin/python -m pip install -q torch==2.13.0 ml_dtypes==0.6.0 numpy
cat > program.py <<'PROGRAM'
import math

import ml_dtypes
import numpy as np
import torch

for name, values in (("e4m3fn", (464, 500, math.inf)), ("e8m0fnu", (3, -1, 0))):
    parts = []
    for value in values:
        by_torch = torch.tensor(float(value)).to(getattr(torch, f"float8_{name}")).float().item()
        by_ml_dtypes = float(np.float32(value).astype(getattr(ml_dtypes, f"float8_{name}")))
        parts.append(f"of {value}: {by_torch} {by_ml_dtypes}")
    print(name, ", ".join(parts))
PROGRAM
venv/bin/python program.py 2>/dev/null | tee seen
grep -qxF "e4m3fn of 464: 448.0 448.0, of 500: 448.0 nan, of inf: 448.0 nan" seen
grep -qxF "e8m0fnu of 3: 4.0 4.0, of -1: 1.0 nan, of 0: 5.877471754111438e-39 nan" seen
