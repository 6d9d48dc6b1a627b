#!/usr/bin/env bash
# torch rounds float64 to float16 twice; NumPy rounds once.
#
# torch 2.13.0 CPU build, ml_dtypes 0.6.0, numpy 2, x86-64 Linux, 2026-11-28. 1 + 2**-11 + 2**-40 lies above the middle
# between 1 and the next float16. NumPy gives the next one. torch converts to float32 first, which lands on the middle, and
# then rounds to even: 1. For bfloat16 torch and ml_dtypes both round twice, and both give 1 where 1.0078125 is nearest.
#
# Seen:
#   float16: torch 1.0, numpy 1.0009765625; bfloat16: torch 1.0, ml_dtypes 1.0
#
# Why it matters: a reference in float64 that torch casts to float16 is not the correctly rounded result. In a test of a
# collective's last bit, cast by NumPy, or compare in float64.
set -eu
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
cd "$folder"
python3 -m venv venv
venv/bin/python -m pip install -q torch==2.13.0 ml_dtypes==0.6.0 numpy
cat > program.py <<'PROGRAM'
import ml_dtypes
import numpy as np
import torch

half, brain = np.array([1 + 2**-11 + 2**-40]), np.array([1 + 2**-8 + 2**-40])
print(
    f"float16: torch {torch.from_numpy(half).to(torch.float16).item()}, numpy {half.astype(np.float16).item()};",
    f"bfloat16: torch {torch.from_numpy(brain).to(torch.bfloat16).item()},",
    f"ml_dtypes {float(brain.astype(ml_dtypes.bfloat16)[0])}",
)
PROGRAM
venv/bin/python program.py 2>/dev/null | tee seen
[ "$(cat seen)" = "float16: torch 1.0, numpy 1.0009765625; bfloat16: torch 1.0, ml_dtypes 1.0" ]
