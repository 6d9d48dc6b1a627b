#!/usr/bin/env bash
# A rank whose first init_process_group failed, and which calls it again, never meets the others: both wait for the timeout.
#
# torch 2.13.0, CPU build, over Gloo, x86-64 Linux, 2026-11-29. torch numbers the default group when it begins to make it, and
# counts from 0 again only in destroy_process_group, which a rank that has no group does not call. The number is part of the
# keys in the store. So the rank that tries again looks under "1", and the others under "0". It is not a matter of what the
# store still holds: nothing of the first attempt reached the other rank.
#
# Seen:
#   no failure before: 2.0 2.0; rank 1 failed before: RuntimeError RuntimeError
#
# Why it matters: with ringreduce too, a program that catches the error of init_process_group on one rank must end and be
# started again, or have all ranks call it as often.
set -eu
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
cd "$folder"
python3 -m venv venv
venv/bin/python -m pip install -q torch==2.13.0 numpy
cat > program.py <<'PROGRAM'
import os
import sys
from datetime import timedelta

import torch
import torch.distributed as dist

rank, failure = int(sys.argv[1]), sys.argv[2]
store = dist.FileStore("store" + failure, 2)


def total(interface):
    os.environ["GLOO_SOCKET_IFNAME"] = interface
    dist.init_process_group("gloo", store=store, rank=rank, world_size=2, timeout=timedelta(seconds=10))
    value = torch.ones(1)
    dist.all_reduce(value)
    return value.item()


if failure == "before" and rank == 1:
    try:
        total("missing0")
    except RuntimeError:
        pass
try:
    print(total("lo"))
except Exception as error:
    print(type(error).__name__)
PROGRAM
run() {
  venv/bin/python program.py 0 "$1" > first 2>/dev/null &
  venv/bin/python program.py 1 "$1" > second 2>/dev/null
  wait
  echo "$(cat first) $(cat second)"
}
echo "no failure before: $(run none); rank 1 failed before: $(run before)" | tee seen
[ "$(cat seen)" = "no failure before: 2.0 2.0; rank 1 failed before: RuntimeError RuntimeError" ]
