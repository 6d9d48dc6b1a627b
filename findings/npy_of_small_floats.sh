#!/usr/bin/env bash
# np.save writes arrays of ml_dtypes, and np.load gives back raw bytes, or an error for float8_e5m2 alone.
#
# ml_dtypes 0.6.0, numpy 2, x86-64 Linux, 2026-11-28. The file keeps no name of the dtype. bfloat16 comes back as void of 2
# bytes, the other formats as void of 1 byte, so that 4-bit integers and float8_e4m3fn cannot be told apart. float8_e5m2 is
# written as a float of 1 byte, which NumPy does not know: load raises ValueError. It is also the only one that NumPy promotes
# with float16.
#
# Seen:
#   bfloat16 |V2, float8_e4m3fn |V1, int4 |V1, float8_e5m2 ValueError
#   with float16: bfloat16 DTypePromotionError, float8_e5m2 float32
#
# Why it matters: ringreduce reduces such arrays in place. Save `array.view(np.uint8)` and the dtype's name beside it.
set -eu
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
cd "$folder"
python3 -m venv venv
venv/bin/python -m pip install -q ml_dtypes==0.6.0 numpy
cat > program.py <<'PROGRAM'
import io

import ml_dtypes
import numpy as np


def loaded(name):
    file = io.BytesIO()
    np.save(file, np.ones(4, getattr(ml_dtypes, name)))
    file.seek(0)
    try:
        return np.load(file).dtype
    except ValueError:
        return "ValueError"


def promoted(name):
    try:
        return np.result_type(getattr(ml_dtypes, name), np.float16)
    except np.exceptions.DTypePromotionError:
        return "DTypePromotionError"


print(", ".join(f"{name} {loaded(name)}" for name in ("bfloat16", "float8_e4m3fn", "int4", "float8_e5m2")))
print("with float16:", ", ".join(f"{name} {promoted(name)}" for name in ("bfloat16", "float8_e5m2")))
PROGRAM
venv/bin/python program.py 2>/dev/null | tee seen
grep -qxF "bfloat16 |V2, float8_e4m3fn |V1, int4 |V1, float8_e5m2 ValueError" seen
grep -qxF "with float16: bfloat16 DTypePromotionError, float8_e5m2 float32" seen
