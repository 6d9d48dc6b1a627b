#!/usr/bin/env bash
# torchao's float8 weights turn a row of zeros into NaN.
#
# torchao 0.18.0, torch 2.13.0 CPU build, x86-64 Linux, 2026-11-28. Float8WeightOnlyConfig gives each row of a Linear layer a
# factor. That of a pruned or never trained row is 0, and 0 / 0 makes the row's output NaN, without an error or a warning.
# int8 weights of the same library keep the row at 0.
#
# Seen, outputs of a row of ones and of a row of zeros:
#   float8 64 nan, int8 64 0
#
# Why it matters: a model that was trained with ringreduce may be quantized for serving. ringreduce checks no values, so the
# NaN of one rank goes to all in the next all_reduce.
set -eu
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
cd "$folder"
python3 -m venv venv
venv/bin/python -m pip install -q torchao==0.18.0 torch==2.13.0 numpy
cat > program.py <<'PROGRAM'
import torch
from torchao.quantization import Float8WeightOnlyConfig, Int8WeightOnlyConfig, quantize_


def outputs(config):
    layer = torch.nn.Linear(64, 2, bias=False)
    with torch.no_grad():
        layer.weight[0], layer.weight[1] = 1.0, 0.0
        quantize_(layer, config)
        return " ".join(f"{number:.0f}" for number in layer(torch.ones(1, 64))[0].tolist())


print(f"float8 {outputs(Float8WeightOnlyConfig())}, int8 {outputs(Int8WeightOnlyConfig())}")
PROGRAM
OMP_NUM_THREADS=1 venv/bin/python program.py 2>/dev/null | tee seen
[ "$(cat seen)" = "float8 64 nan, int8 64 0" ]
