#!/usr/bin/env bash
# A pipeline schedule that is stepped twice before the optimizer divides the first step's gradient twice.
#
# torch 2.13.0, CPU build, backend gloo, 2 ranks, x86-64 Linux, 2026-11-28. A schedule divides gradients by its number of
# microbatches (`scale_grads=True`, the default), so that they are those of the mean. It divides what is in `grad` after each
# step. So with gradient accumulation, two equal steps of 4 microbatches give 1.25 times the gradient of one step where 2 is
# right: the first step counts a quarter.
#
# Seen, the second gradient by the first, on both stages:
#   ScheduleGPipe 1.25, Schedule1F1B 1.25, ScheduleGPipe with scale_grads=False 2.0
#
# Why it matters: pipelines run on ringreduce as on Gloo. To accumulate over steps, pass `scale_grads=False` and divide the
# loss.
set -eu
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
cd "$folder"
python3 -m venv venv
venv/bin/python -m pip install -q torch==2.13.0 numpy
cat > program.py <<'PROGRAM'
import torch
import torch.distributed as dist
from torch.distributed.pipelining import PipelineStage, Schedule1F1B, ScheduleGPipe

dist.init_process_group("gloo")
rank = dist.get_rank()


def ratio(kind, **options):
    torch.manual_seed(0)
    layer = torch.nn.Linear(4, 4)
    stage = PipelineStage(layer, rank, 2, torch.device("cpu"))
    schedule = kind(stage, 4, loss_fn=torch.nn.MSELoss(), **options)
    norms = []
    for _ in range(2):  # without zero_grad between them
        schedule.step(torch.ones(8, 4)) if rank == 0 else schedule.step(target=torch.zeros(8, 4))
        norms.append(layer.weight.grad.norm().item())
    return round(norms[1] / norms[0], 4)


mine = [ratio(ScheduleGPipe), ratio(Schedule1F1B), ratio(ScheduleGPipe, scale_grads=False)]
ranks = [[], []]
dist.all_gather_object(ranks, mine)
if rank == 0 and ranks[0] == ranks[1]:
    print("ScheduleGPipe {}, Schedule1F1B {}, ScheduleGPipe with scale_grads=False {}".format(*mine))
dist.destroy_process_group()
PROGRAM
export OMP_NUM_THREADS=1
venv/bin/torchrun --standalone --nproc-per-node 2 program.py 2>/dev/null | tee seen
[ "$(cat seen)" = "ScheduleGPipe 1.25, Schedule1F1B 1.25, ScheduleGPipe with scale_grads=False 2.0" ]
