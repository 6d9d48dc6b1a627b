#!/usr/bin/env bash
# hivemind cuts what float16 cannot hold to 65504, and its 8-bit codecs do not work with the NumPy that it installs.
#
# hivemind 1.1.12, torch 2.13.0 CPU build, NumPy 2.4, x86-64 Linux, 2026-11-28. A codec sits between peers that average their
# parameters. FLOAT16 clamps 70000 to 65504, where torch's cast, and the usual hook of DDP, give inf. UNIFORM_8BIT and
# QUANTILE_8BIT raise TypeError for every tensor. bfloat16 tensors are refused by the float16 codecs.
#
# Seen:
#   FLOAT16 of 70000: 65504.0, MEANSTD_16BIT of bfloat16: ValueError, UNIFORM_8BIT: TypeError, QUANTILE_8BIT: TypeError
#
# Why it matters: ringreduce keeps an infinity that a rank sends, so a loss scaler can skip the step; a clamp hides it. Who
# comes from hivemind to ringreduce's elastic training compares the two: its 8-bit codecs run with numpy 2.3.5.
set -eu
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
cd "$folder"
python3 -m venv venv
venv/bin/python -m pip install -q hivemind==1.1.12 torch==2.13.0 numpy==2.4.6
cat > program.py <<'PROGRAM'
import torch
from hivemind.compression import deserialize_torch_tensor, serialize_torch_tensor
from hivemind.proto.runtime_pb2 import CompressionType


def trip(kind, *numbers, dtype=torch.float32):
    try:
        sent = serialize_torch_tensor(torch.tensor(numbers, dtype=dtype), CompressionType.Value(kind))
        return deserialize_torch_tensor(sent)[0].item()
    except (TypeError, ValueError) as error:
        return type(error).__name__


print(
    f"FLOAT16 of 70000: {trip('FLOAT16', 70000.0, 1.0)},",
    f"MEANSTD_16BIT of bfloat16: {trip('MEANSTD_16BIT', 1.0, 2.0, dtype=torch.bfloat16)},",
    f"UNIFORM_8BIT: {trip('UNIFORM_8BIT', 1.0, 2.0)}, QUANTILE_8BIT: {trip('QUANTILE_8BIT', 1.0, 2.0)}",
)
PROGRAM
OMP_NUM_THREADS=1 venv/bin/python program.py 2>/dev/null | tee seen
wanted="FLOAT16 of 70000: 65504.0, MEANSTD_16BIT of bfloat16: ValueError, UNIFORM_8BIT: TypeError, QUANTILE_8BIT: TypeError"
[ "$(cat seen)" = "$wanted" ]
