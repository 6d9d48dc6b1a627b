#!/usr/bin/env bash
# Which collectives of torch.distributed tell autograd that they write a tensor depends on the call.
#
# torch 2.13.0, CPU build, backend gloo, 2 ranks, x86-64 Linux, 2026-11-28. Autograd notices a saved tensor that is
# overwritten by its version counter. all_reduce, broadcast, all_to_all_single and recv leave that as it is, so a backward
# pass uses what they wrote and the gradient is wrong without an error (16 below, where 8 is right). all_gather and
# reduce_scatter_tensor raise the counter by 1, all_gather_into_tensor by 2, so there the same mistake is an error.
#
# Seen, on both ranks:
#   all_reduce 0, broadcast 0, all_to_all_single 0, recv 0, all_gather 1, reduce_scatter_tensor 1, all_gather_into_tensor 2
#   gradient 16.0
set -eu
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
cd "$folder"
python3 -m venv venv
venv/bin/python -m pip install -q torch==2.13.0 numpy
cat > program.py <<'PROGRAM'
import torch
import torch.distributed as dist


def raised(call, written):
    before = written._version
    call()
    return written._version - before


dist.init_process_group("gloo")
rank, x, y, parts = dist.get_rank(), torch.ones(4), torch.zeros(8), [torch.zeros(4), torch.zeros(4)]
seen = {
    "all_reduce": raised(lambda: dist.all_reduce(x), x),
    "broadcast": raised(lambda: dist.broadcast(x, 0), x),
    "all_to_all_single": raised(lambda: dist.all_to_all_single(x, x.clone()), x),
    "recv": raised(lambda: dist.recv(x, 1) if rank == 0 else dist.send(x, 0), x),
    "all_gather": raised(lambda: dist.all_gather(parts, x), parts[0]),
    "reduce_scatter_tensor": raised(lambda: dist.reduce_scatter_tensor(x, y), x),
    "all_gather_into_tensor": raised(lambda: dist.all_gather_into_tensor(y, x), y),
}
weight = torch.ones(4, requires_grad=True)
saved = weight * 2  # 2, whose square has the gradient 2 * 2 * 2
loss = (saved * saved).sum()
dist.all_reduce(saved.detach())  # of the same memory: 4 from now on
loss.backward()
print(", ".join(f"{call} {by}" for call, by in seen.items()), f"gradient {weight.grad[0].item()}", sep="; ")
dist.destroy_process_group()
PROGRAM
export OMP_NUM_THREADS=1
venv/bin/torchrun --standalone --nproc-per-node 2 program.py 2>/dev/null | tee seen
wanted="all_reduce 0, broadcast 0, all_to_all_single 0, recv 0, all_gather 1, reduce_scatter_tensor 1, all_gather_into_tensor 2; gradient 16.0"
[ "$(sort -u seen)" = "$wanted" ] && [ "$(wc -l < seen)" = 2 ]
