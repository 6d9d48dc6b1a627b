#!/usr/bin/env bash
# JAX adds bfloat16 and float8 across devices in more bits, but not float16, which overflows on the way.
#
# jax 0.10.2, 8 CPU devices in one process, x86-64 Linux, 2026-11-28. psum of 60000, 60000, -60000, -60000 and zeros in
# float16 is inf, where 0 is right. The same with 448 in float8_e4m3fn, which has far less room, is right. pmean of eight
# times 60000 in float16 is inf: it sums first. psum of booleans counts in int32, where torch keeps bool.
#
# Seen:
#   float16 inf, float8_e4m3fn 0.0, bfloat16 of 256 and seven ones 264.0, pmean float16 inf, bool 8 int32
#
# Why it matters: ringreduce's AVG of float16 does not overflow, and its sums run in float32 within a step. A float16 model
# that trains there needs a scaled loss, or bfloat16, under JAX.
set -eu
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
cd "$folder"
python3 -m venv venv
venv/bin/python -m pip install -q jax==0.10.2 numpy
cat > program.py <<'PROGRAM'
import functools

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh, PartitionSpec

mesh = Mesh(np.array(jax.devices()), ("ranks",))


def reduced(call, *numbers):
    x = jnp.array(numbers[:-1] + (numbers[-2],) * (9 - len(numbers)), numbers[-1])
    across = functools.partial(call, axis_name="ranks")
    one = PartitionSpec("ranks")
    return jax.jit(jax.shard_map(across, mesh=mesh, in_specs=one, out_specs=one, check_vma=False))(x)


def first(x):
    return x.astype(jnp.float32)[0].item()


psum, pmean = jax.lax.psum, jax.lax.pmean
count = reduced(psum, True, jnp.bool_)
print(
    f"float16 {first(reduced(psum, 60000, 60000, -60000, -60000, 0, jnp.float16))},",
    f"float8_e4m3fn {first(reduced(psum, 448, 448, -448, -448, 0, jnp.float8_e4m3fn))},",
    f"bfloat16 of 256 and seven ones {first(reduced(psum, 256, 1, jnp.bfloat16))},",
    f"pmean float16 {first(reduced(pmean, 60000, jnp.float16))}, bool {count[0]} {count.dtype}",
)
PROGRAM
export XLA_FLAGS=--xla_force_host_platform_device_count=8 JAX_PLATFORMS=cpu
venv/bin/python program.py 2>/dev/null | tee seen
wanted="float16 inf, float8_e4m3fn 0.0, bfloat16 of 256 and seven ones 264.0, pmean float16 inf, bool 8 int32"
[ "$(cat seen)" = "$wanted" ]
