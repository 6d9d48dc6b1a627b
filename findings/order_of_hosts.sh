#!/usr/bin/env bash
# Two packages that expand a list of Slurm's hosts name another host first.
#
# ClusterShell 1.10.1, python-hostlist 2.3.0, x86-64 Linux, 2026-11-28. ClusterShell's NodeSet is a set, which it sorts, by
# number where names end in one. `expand_hostlist` keeps the order of the text. A program that takes the first name as that of
# rank 0's host gets another one from each, if the list is not sorted.
#
# Seen, ClusterShell then python-hostlist:
#   b1,a1: a1 b1, b1 a1; n10,n9: n9 n10, n10 n9; n[9-11]: n9 n10 n11, n9 n10 n11
#
# Why it matters: MASTER_ADDR must be the host of rank 0. docs/hosts.md takes it from `scontrol show hostnames`; a host list
# that a person or an MPI wrote is not sorted, so ask the launcher, or let rank 0 say its own name.
set -eu
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
cd "$folder"
python3 -m venv venv
venv/bin/python -m pip install -q ClusterShell==1.10.1 python-hostlist==2.3.0
cat > program.py <<'PROGRAM'
import hostlist
from ClusterShell.NodeSet import NodeSet

lists = ("b1,a1", "n10,n9", "n[9-11]")
print("; ".join(f"{text}: {' '.join(NodeSet(text))}, {' '.join(hostlist.expand_hostlist(text))}" for text in lists))
PROGRAM
venv/bin/python program.py 2>/dev/null | tee seen
[ "$(cat seen)" = "b1,a1: a1 b1, b1 a1; n10,n9: n9 n10, n10 n9; n[9-11]: n9 n10 n11, n9 n10 n11" ]
