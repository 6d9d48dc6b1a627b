#!/usr/bin/env bash
# torchao's 8-bit optimizers keep 32-bit states for parameters whose size is no multiple of 256.
#
# torchao 0.18.0, torch 2.13.0 CPU build, x86-64 Linux, 2026-11-28. AdamW8bit, AdamW4bit and AdamWFp8 compress the state of a
# parameter only if it has 4096 or more elements and fills whole blocks. A vocabulary of 50257 rows of 1001 numbers has no
# such size, so the largest states stay as they were, without a word.
#
# Seen, by elements:
#   4096 OptimState8bit, 5000 Tensor, 8448 OptimState8bit, 1000000 Tensor, 1000192 OptimState8bit
#
# Why it matters: ringreduce's elastic training sends optimizer states, these too, to a process that joins. Count 8 bytes a
# parameter for the sizes that stay as they were. Pad a layer to a multiple of 256 to get the small ones.
set -eu
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
cd "$folder"
python3 -m venv venv
venv/bin/python -m pip install -q torchao==0.18.0 torch==2.13.0 numpy
cat > program.py <<'PROGRAM'
import contextlib

import torch
from torchao.optim import AdamW8bit


def state(elements):
    parameter = torch.nn.Parameter(torch.zeros(elements))
    optimizer = AdamW8bit([parameter])
    parameter.grad = torch.ones(elements)
    with contextlib.suppress(RuntimeError):  # the update itself needs a compiler; the states are made before it
        optimizer.step()
    return type(optimizer.state[parameter]["exp_avg"]).__name__


print(", ".join(f"{elements} {state(elements)}" for elements in (4096, 5000, 8448, 1000000, 1000192)))
PROGRAM
TORCH_COMPILE_DISABLE=1 OMP_NUM_THREADS=1 venv/bin/python program.py 2>/dev/null | tee seen
[ "$(cat seen)" = "4096 OptimState8bit, 5000 Tensor, 8448 OptimState8bit, 1000000 Tensor, 1000192 OptimState8bit" ]
