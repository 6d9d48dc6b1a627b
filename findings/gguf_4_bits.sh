#!/usr/bin/env bash
# GGUF's 4-bit blocks keep the largest number exactly and its negative one eighth too small.
#
# gguf 0.19.0, numpy, x86-64 Linux, 2026-11-28. Q4_0 divides a block of 32 by its largest magnitude over -8, and stores -8 to
# 7. So of 1 and -1 the one that comes first is exact, and the other comes back as 0.875 of it. Q5_0 does the same with
# 0.9375. Q8_0 keeps its factor in float16: a block of 1e-6 comes back as zeros, and one of 1e7 as infinities.
#
# Seen:
#   Q4_0 of 1, -1: [1.0, -0.875], of -1, 1: [-1.0, 0.875]; Q5_0: [1.0, -0.9375]; Q8_0 of 1e-6: 0.0, of 1e7: inf
#
# Why it matters: ringreduce's int8 and int4 on the wire are formats of their own; docs/compression.md has their errors. Do
# not take GGUF's for them, although both have 32 values to a block.
set -eu
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
cd "$folder"
python3 -m venv venv
venv/bin/python -m pip install -q gguf==0.19.0 numpy
cat > program.py <<'PROGRAM'
import gguf
import numpy as np


def trip(kind, *values):
    block = np.zeros((1, 32), np.float32)
    block[0, : len(values)] = values
    kind = gguf.GGMLQuantizationType[kind]
    return gguf.quants.dequantize(gguf.quants.quantize(block, kind), kind)[0, : len(values)].tolist()


print(
    f"Q4_0 of 1, -1: {trip('Q4_0', 1, -1)}, of -1, 1: {trip('Q4_0', -1, 1)}; Q5_0: {trip('Q5_0', 1, -1)};",
    f"Q8_0 of 1e-6: {trip('Q8_0', *[1e-6] * 32)[0]}, of 1e7: {trip('Q8_0', *[1e7] * 32)[0]}",
)
PROGRAM
venv/bin/python program.py 2>/dev/null | tee seen
wanted="Q4_0 of 1, -1: [1.0, -0.875], of -1, 1: [-1.0, 0.875]; Q5_0: [1.0, -0.9375]; Q8_0 of 1e-6: 0.0, of 1e7: inf"
[ "$(cat seen)" = "$wanted" ]
