"""Every rank brings a vector, and every rank gets the sum.

torchrun --nproc-per-node=4 examples/all_reduce.py
"""

import torch
import torch.distributed as dist

dist.init_process_group("ringreduce")
rank = dist.get_rank()

x = torch.full((3,), float(rank))
dist.all_reduce(x)
print(f"rank {rank}: {x.tolist()}\n", end="")  # in one piece, so that the lines of the ranks do not mix

dist.destroy_process_group()
