#!/usr/bin/env bash
# A state of torchdata's stateful loader skips or repeats samples when it is loaded by another number of ranks.
#
# torchdata 0.11.0, torch 2.13.0 CPU build, x86-64 Linux, 2026-11-28. Two ranks share 12 samples, in batches of 2, without a
# shuffle. After one batch samples 0 to 3 have been read. The state counts what one rank has read, 2. With 3 ranks the loaders
# skip 2 samples each, so 4 and 5 are never read; with 1 rank 2 and 3 are read again. Nothing says so.
#
# Seen, what is read after loading:
#   2 ranks: 4 to 11, 3 ranks: 6 to 11, 1 rank: 2 to 11
#
# Why it matters: the state of ringreduce's Order is the number of the step, for any number of ranks. A job that resumes
# torchdata's state beside it on fewer hosts trains on other samples than it counts.
set -eu
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
cd "$folder"
python3 -m venv venv
venv/bin/python -m pip install -q torchdata==0.11.0 torch==2.13.0 numpy
cat > program.py <<'PROGRAM'
from torchdata.stateful_dataloader import StatefulDataLoader
from torchdata.stateful_dataloader.sampler import StatefulDistributedSampler


def loader(ranks, rank):
    samples = list(range(12))
    return StatefulDataLoader(
        samples, batch_size=2, sampler=StatefulDistributedSampler(samples, ranks, rank, shuffle=False)
    )


first = loader(2, 0)
next(iter(first))
state = first.state_dict()
parts = []
for ranks in (2, 3, 1):
    read = []
    for rank in range(ranks):
        resumed = loader(ranks, rank)
        resumed.load_state_dict(state)
        read += [int(sample) for batch in resumed for sample in batch]
    assert sorted(read) == list(range(min(read), 12))
    parts.append(f"{ranks} rank{'s' * (ranks > 1)}: {min(read)} to {max(read)}")
print(", ".join(parts))
PROGRAM
OMP_NUM_THREADS=1 venv/bin/python program.py 2>/dev/null | tee seen
[ "$(cat seen)" = "2 ranks: 4 to 11, 3 ranks: 6 to 11, 1 rank: 2 to 11" ]
