#!/usr/bin/env bash
# bitsandbytes' 8-bit format does not return zeros as zeros on CPUs, and returns the lowest number too small.
#
# bitsandbytes 0.50.2, torch 2.13.0 CPU build, x86-64 Linux, 2026-11-28. `quantize_blockwise` scales a block by its largest
# magnitude and takes the nearest of 256 numbers. The table has a 0, but a zero beside a 1 comes back as 0.00002125. The table
# has 1 and no -1, so of 1 and -1 the latter comes back as -0.993.
#
# Seen:
#   table has 0: True, [1.0, -1.0, 0.0] comes back as [1.0, -0.992969, 2.125e-05]
#
# Why it matters: ringreduce's int8 and int4 send zeros as zeros, so sparse gradients and frozen or pruned weights stay so.
# States in this format do not: the weights that are zero begin to move.
set -eu
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
cd "$folder"
python3 -m venv venv
venv/bin/python -m pip install -q torch==2.13.0 numpy packaging
venv/bin/python -m pip install -q --no-deps bitsandbytes==0.50.2
cat > program.py <<'PROGRAM'
import bitsandbytes.functional as functional
import torch

table = functional.create_dynamic_map()
numbers = torch.tensor([1.0, -1.0, 0.0])
back = functional.dequantize_blockwise(*functional.quantize_blockwise(numbers))
print(
    f"table has 0: {bool((table == 0).any())},",
    f"{numbers.tolist()} comes back as {[float(f'{number:.6g}') for number in back.tolist()]}",
)
PROGRAM
OMP_NUM_THREADS=1 venv/bin/python program.py 2>/dev/null | tee seen
[ "$(cat seen)" = "table has 0: True, [1.0, -1.0, 0.0] comes back as [1.0, -0.992969, 2.125e-05]" ]
