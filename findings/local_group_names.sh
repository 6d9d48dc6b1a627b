#!/usr/bin/env bash
# A group of new_group(use_local_synchronization=True) has different names on its ranks, which then never meet, if one of them
# is in more groups.
#
# torch 2.13.0, CPU build, over Gloo, x86-64 Linux, 2026-11-29. Ranks 0 and 1 make the group [0, 1], and then 1 and 2 make
# [1, 2]. torch's page asks only for "the same global creation order", and this is one. But the name of such a group is a hash
# of its ranks and of how many groups this process has. Rank 1 has one more than rank 2, and both look under other keys in
# the store until the timeout. If rank 2 first makes a group of itself alone, it works. torch's issue 173608 reports it as well.
#
# Seen, names and sums on ranks 1 and 2:
#   rank 2 alone first: one name, 2.0 2.0; only the two groups: other names, RuntimeError RuntimeError
#
# Why it matters: the names come from torch, so ringreduce's ranks miss each other as well. Leave out use_local_synchronization,
# or have the members of each group be in equally many.
set -eu
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
cd "$folder"
python3 -m venv venv
venv/bin/python -m pip install -q torch==2.13.0 numpy
cat > program.py <<'PROGRAM'
import sys
from datetime import timedelta

import torch
import torch.distributed as dist
from torch.distributed.distributed_c10d import _hash_ranks_to_str

case, rank = sys.argv[1], int(sys.argv[2])
wait = timedelta(seconds=10)
dist.init_process_group("gloo", store=dist.FileStore("store " + case, 3), rank=rank, world_size=3, timeout=wait)
if rank < 2:
    dist.new_group([0, 1], wait, use_local_synchronization=True)
elif case == "alone":
    dist.new_group([2], wait, use_local_synchronization=True)
if rank > 0:
    name = _hash_ranks_to_str([1, 2])
    value = torch.ones(1)
    try:
        dist.all_reduce(value, group=dist.new_group([1, 2], wait, use_local_synchronization=True))
        print(name, value.item())
    except Exception as error:
        print(name, type(error).__name__)
PROGRAM
run() {
    for rank in 0 1 2; do
        venv/bin/python program.py "$1" "$rank" > "$rank" 2>/dev/null &
    done
    wait
    read -r first left < 1
    read -r second right < 2
    [ "$first" = "$second" ] && names="one name" || names="other names"
    echo "$names, $left $right"
}
export OMP_NUM_THREADS=1 GLOO_SOCKET_IFNAME=lo
echo "rank 2 alone first: $(run alone); only the two groups: $(run only)" | tee seen
[ "$(cat seen)" = "rank 2 alone first: one name, 2.0 2.0; only the two groups: other names, RuntimeError RuntimeError" ]
