#!/usr/bin/env bash
# torch.distributed.nn keeps the default group that it finds at its first import, also when that group is destroyed. DDP imports it.
#
# torch 2.13.0, CPU build, over Gloo, x86-64 Linux, 2026-11-30. `group=group.WORLD` in the signatures of torch.distributed.nn is
# evaluated once. Importing torch._dynamo imports that module, and the first DistributedDataParallel of a process does so, which
# is after init_process_group. Then destroy_process_group frees neither the group nor Gloo's threads, and after a second
# init_process_group torch.distributed.nn.all_reduce still calls the first group.
#
# Seen, threads of Gloo after destroy_process_group, and whether nn's default is the second group:
#   imported before the first group: 0 True; by DDP, after it: 2 False
#
# Why it matters: with ringreduce the group's resources go at destroy_process_group in any case, and torch.distributed.nn raises
# in the second group. Import torch.distributed.nn before init_process_group, which leaves its default open.
set -eu
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
cd "$folder"
python3 -m venv venv
venv/bin/python -m pip install -q torch==2.13.0 numpy
cat > program.py <<'PROGRAM'
import inspect
import os
import sys

import torch
import torch.distributed as dist

if sys.argv[1] == "before":
    import torch.distributed.nn


def begin():
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)


begin()
torch.nn.parallel.DistributedDataParallel(torch.nn.Linear(2, 2))
dist.destroy_process_group()
names = [open(f"/proc/self/task/{thread}/comm").read() for thread in os.listdir("/proc/self/task")]
begin()
default = inspect.signature(torch.distributed.nn.all_reduce).parameters["group"].default
print(sum(name.startswith("pt_gloo") for name in names), default in (None, dist.group.WORLD))
PROGRAM
echo "imported before the first group: $(venv/bin/python program.py before); by DDP, after it: $(venv/bin/python program.py after)" |
    tee seen
[ "$(cat seen)" = "imported before the first group: 0 True; by DDP, after it: 2 False" ]
