#!/usr/bin/env bash
# safetensors writes some tensors that it cannot read again.
#
# safetensors 0.8.0, numpy, ml_dtypes 0.6.0, torch 2.13.0 CPU build, x86-64 Linux, 2026-11-28. `safetensors.numpy.save`
# accepts bfloat16 and float8 arrays of ml_dtypes and writes a right header; `safetensors.numpy.load` raises KeyError on that
# file, also if torch has written it. `safetensors.torch.save` does the same with torch's packed float4.
#
# Seen, the header's dtype, then what load does:
#   numpy bfloat16 BF16 KeyError, numpy float8_e4m3fn F8_E4M3 KeyError, numpy float16 F16 read, torch bfloat16 BF16 read,
#   torch float4_e2m1fn_x2 F4 KeyError
#
# Why it matters: snapshots of ringreduce's parameter server are safetensors files, and the page on data reads such files by
# NumPy. Take `safetensors.torch`, or framework="pt", for those that hold bfloat16 or float8.
set -eu
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
cd "$folder"
python3 -m venv venv
venv/bin/python -m pip install -q safetensors==0.8.0 ml_dtypes==0.6.0 torch==2.13.0 numpy
cat > program.py <<'PROGRAM'
import json

import ml_dtypes
import numpy as np
import safetensors.numpy
import safetensors.torch
import torch


def trip(library, array):
    data = library.save({"x": array})
    header = json.loads(data[8 : 8 + int.from_bytes(data[:8], "little")])
    try:
        library.load(data)
        return f"{header['x']['dtype']} read"
    except KeyError:
        return f"{header['x']['dtype']} KeyError"


for name in ("bfloat16", "float8_e4m3fn"):
    print("numpy", name, trip(safetensors.numpy, np.ones(4, getattr(ml_dtypes, name))))
print("numpy float16", trip(safetensors.numpy, np.ones(4, np.float16)))
print("torch bfloat16", trip(safetensors.torch, torch.ones(4, dtype=torch.bfloat16)))
four_bits = torch.zeros(4, dtype=torch.uint8).view(torch.float4_e2m1fn_x2)
print("torch float4_e2m1fn_x2", trip(safetensors.torch, four_bits))
PROGRAM
venv/bin/python program.py 2>/dev/null | tee seen
wanted="numpy bfloat16 BF16 KeyError
numpy float8_e4m3fn F8_E4M3 KeyError
numpy float16 F16 read
torch bfloat16 BF16 read
torch float4_e2m1fn_x2 F4 KeyError"
[ "$(cat seen)" = "$wanted" ]
