#!/usr/bin/env bash
# The bfloat16 gradient of a token that occurs 1000 times counts it 256 times; a Linear layer counts 1000.
#
# torch 2.13.0, CPU build, x86-64 Linux, 2026-11-28. The backward of Embedding, dense or sparse, of indexing and of
# `index_select` adds in bfloat16, one occurrence after the other, and stops where one is below half of the last bit.
# `gather`, `expand` and Linear add the same 1000 ones in float32. So the gradient of a frequent token depends on how the row
# is looked up.
#
# Seen:
#   Embedding 256, sparse Embedding 256, index_select 256, gather 1000, expand 1000, Linear's bias 1000
#
# Why it matters: this is lost on each rank before all_reduce. ringreduce adds the ranks' bfloat16 gradients in float32, which
# cannot bring it back. Keep embeddings in float32, or use `gather`.
set -eu
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
cd "$folder"
python3 -m venv venv
venv/bin/python -m pip install -q torch==2.13.0 numpy
cat > program.py <<'PROGRAM'
import torch

COUNT = 1000
zeros = torch.zeros(COUNT, dtype=torch.long)


def weight_gradient(use):
    weight = torch.ones(2, dtype=torch.bfloat16, requires_grad=True)
    use(weight).sum().backward()
    return int(weight.grad[0])


def embedding_gradient(sparse):
    layer = torch.nn.Embedding(2, 1, sparse=sparse).to(torch.bfloat16)
    layer(zeros).sum().backward()
    return int(layer.weight.grad.to_dense()[0, 0])


linear = torch.nn.Linear(1, 1).to(torch.bfloat16)
linear(torch.ones(COUNT, 1, dtype=torch.bfloat16)).sum().backward()
seen = {
    "Embedding": embedding_gradient(sparse=False),
    "sparse Embedding": embedding_gradient(sparse=True),
    "index_select": weight_gradient(lambda weight: weight.index_select(0, zeros)),
    "gather": weight_gradient(lambda weight: weight.gather(0, zeros)),
    "expand": weight_gradient(lambda weight: weight.expand(COUNT, 2)),
    "Linear's bias": int(linear.bias.grad[0]),
}
print(", ".join(f"{name} {value}" for name, value in seen.items()))
PROGRAM
OMP_NUM_THREADS=1 venv/bin/python program.py 2>/dev/null | tee seen
[ "$(cat seen)" = "Embedding 256, sparse Embedding 256, index_select 256, gather 1000, expand 1000, Linear's bias 1000" ]
