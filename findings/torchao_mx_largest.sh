#!/usr/bin/env bash
# torchao's Microscaling formats lose up to an eighth of a block's largest number in float8, and a quarter in float4.
#
# torchao 0.18.0, torch 2.13.0 CPU build, x86-64 Linux, 2026-11-28. 32 numbers share a power of two. By default (FLOOR, the
# rule of the OCP formats) it is chosen by the exponent of the largest alone, so what lies above 1.75 of that power is cut off
# in float8_e4m3fn, and above 1.5 in float4: 500 comes back as 448, and 7.9 as 6. The other three modes give 512 and 8.
#
# Seen, float8_e4m3fn of 500 and of 300, float4 of 7.9:
#   FLOOR 448.0 288.0 6.0, RCEIL 512.0 288.0 8.0, CEIL 512.0 288.0 8.0, EVEN 512.0 288.0 8.0
#
# Why it matters: ringreduce's int8 on the wire is MXINT8, of the same family, whose errors are in docs/compression.md. A
# tensor that torchao has cast has lost the top of its largest numbers before it is sent.
set -eu
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
cd "$folder"
python3 -m venv venv
venv/bin/python -m pip install -q torchao==0.18.0 torch==2.13.0 numpy
cat > program.py <<'PROGRAM'
import torch
from torchao.prototype.mx_formats.config import ScaleCalculationMode
from torchao.prototype.mx_formats.mx_tensor import MXTensor


def trip(dtype, mode, *numbers):
    block = torch.zeros(1, 32)
    block[0, : len(numbers)] = torch.tensor(numbers)
    back = MXTensor.to_mx(block, dtype, 32, scaling_mode=mode).dequantize(torch.float32)
    return back[0, : len(numbers)].tolist()


eight, four = torch.float8_e4m3fn, torch.float4_e2m1fn_x2
assert MXTensor.to_mx(torch.full((1, 32), 500.0), eight, 32).dequantize(torch.float32)[0, 0] == 448  # by default
rows = ((mode.name, trip(eight, mode, 500, 300) + trip(four, mode, 7.9)) for mode in ScaleCalculationMode)
print(", ".join(f"{name} {' '.join(map(str, numbers))}" for name, numbers in rows))
PROGRAM
OMP_NUM_THREADS=1 venv/bin/python program.py 2>/dev/null | tee seen
[ "$(cat seen)" = "FLOOR 448.0 288.0 6.0, RCEIL 512.0 288.0 8.0, CEIL 512.0 288.0 8.0, EVEN 512.0 288.0 8.0" ]
