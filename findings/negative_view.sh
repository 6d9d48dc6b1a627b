#!/usr/bin/env bash
# dist.all_reduce and broadcast of z.conj().imag change nothing, without an error; those of z.conj() raise one.
#
# torch 2.13.0, CPU build, over Gloo, 2 ranks, x86-64 Linux, 2026-11-29. z is 1+2j on rank 0 and twice that on rank 1. The
# imaginary part of z.conj() is a view of z with a bit that says "negate me". A fallback of torch's dispatcher makes a real
# tensor of such a view before the call, and does not write back what the backend put there. is_neg() tells such tensors.
#
# Seen, on each rank:
#   all_reduce: [-2.0] [-4.0], with resolve_neg(): [-6.0] [-6.0], broadcast: [-2.0] [-4.0], of z.conj(): RuntimeError
#
# Why it matters: it happens before a backend is called, so with ringreduce as well. ringreduce.all_reduce, the direct call,
# does not go this way. Call resolve_neg() first.
set -eu
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
cd "$folder"
python3 -m venv venv
venv/bin/python -m pip install -q torch==2.13.0 numpy
cat > program.py <<'PROGRAM'
import torch
import torch.distributed as dist

dist.init_process_group("gloo")
z = torch.tensor([1 + 2j]) * (dist.get_rank() + 1)


def after(call, x):
    try:
        call(x)
    except RuntimeError:
        return "RuntimeError"
    ranks = [None, None]
    dist.all_gather_object(ranks, x.tolist())
    return " ".join(map(str, ranks))


def broadcast(x):
    dist.broadcast(x, 0)


seen = f"all_reduce: {after(dist.all_reduce, z.clone().conj().imag)}, "
seen += f"with resolve_neg(): {after(dist.all_reduce, z.clone().conj().imag.resolve_neg())}, "
seen += f"broadcast: {after(broadcast, z.clone().conj().imag)}, of z.conj(): {after(dist.all_reduce, z.conj())}"
if dist.get_rank() == 0:
    print(seen)
dist.destroy_process_group()
PROGRAM
export OMP_NUM_THREADS=1
venv/bin/torchrun --standalone --nproc-per-node 2 program.py 2>/dev/null | tee seen
wanted="all_reduce: [-2.0] [-4.0], with resolve_neg(): [-6.0] [-6.0], broadcast: [-2.0] [-4.0], of z.conj(): RuntimeError"
[ "$(cat seen)" = "$wanted" ]
