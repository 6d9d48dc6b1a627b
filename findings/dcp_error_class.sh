#!/usr/bin/env bash
# `except Exception` does not catch a failed load of torch.distributed.checkpoint.
#
# torch 2.13.0, CPU build, one process, x86-64 Linux, 2026-11-28. A load of a name that the checkpoint lacks raises
# CheckpointException, whose base class is BaseException, as that of KeyboardInterrupt. A program that tries the newest
# checkpoint and falls back to an older one by `except Exception` ends instead.
#
# Seen:
#   except Exception: no, except BaseException: CheckpointException, bases BaseException
#
# Why it matters: elastic programs on ringreduce load checkpoints in such a `try`. Name CheckpointException there.
set -eu
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
cd "$folder"
python3 -m venv venv
venv/bin/python -m pip install -q torch==2.13.0 numpy
cat > program.py <<'PROGRAM'
import sys

import torch
import torch.distributed.checkpoint as dcp

dcp.save({"weight": torch.ones(1)}, checkpoint_id=sys.argv[1])
try:
    try:
        dcp.load({"bias": torch.ones(1)}, checkpoint_id=sys.argv[1])
    except Exception:
        print("except Exception: yes")
except BaseException as error:
    bases = ", ".join(base.__name__ for base in type(error).__bases__)
    print(f"except Exception: no, except BaseException: {type(error).__name__}, bases {bases}")
PROGRAM
OMP_NUM_THREADS=1 venv/bin/python program.py "$folder/checkpoint" 2>/dev/null | tee seen
[ "$(cat seen)" = "except Exception: no, except BaseException: CheckpointException, bases BaseException" ]
