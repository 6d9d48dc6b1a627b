"""Pipelines: a layer and its activation a stage; losses and gradients against one process."""

from __future__ import annotations

import pytest
import torch
from distributed.harness import Rank, run
from frameworks.common import loss_of, network, values, whole_batch
from torch import nn
from torch.distributed.pipelining import PipelineStage, Schedule1F1B, ScheduleGPipe, ScheduleInterleaved1F1B

MICROBATCHES = 6
DATA = 2
SCHEDULES = {"GPipe": ScheduleGPipe, "1F1B": Schedule1F1B}


def stage(model: nn.Sequential, index: int, count: int) -> nn.Sequential:
    """The `index`-th of `count` parts of the network's three layers and two activations."""
    cuts = {1: [0, 5], 2: [0, 2, 5], 3: [0, 2, 4, 5], 4: [0, 1, 2, 4, 5]}[count]
    return model[cuts[index] : cuts[index + 1]]


def pipeline(me: Rank, schedule: str, stages: int) -> None:
    with me.join():
        model, reference = network(), network()
        mine = range(me.rank, stages, me.size)
        parts = [stage(model, index, stages) for index in mine]
        run_parts = [PipelineStage(p, i, stages, torch.device("cpu")) for p, i in zip(parts, mine, strict=True)]
        x, y = whole_batch(0, DATA)
        if schedule == "interleaved":
            runner = ScheduleInterleaved1F1B(run_parts, MICROBATCHES, nn.functional.mse_loss)
        else:
            runner = SCHEDULES[schedule](run_parts[0], MICROBATCHES, nn.functional.mse_loss)

        for step in range(2):  # shapes are agreed on in the first only
            model.zero_grad()
            reference.zero_grad()
            losses: list[torch.Tensor] = []
            x, y = whole_batch(step, DATA)
            last = stages - 1 in mine
            inputs, keywords = ((x,) if 0 in mine else ()), ({"target": y, "losses": losses} if last else {})
            output = runner.step(*inputs, **keywords)
            loss = loss_of(reference, x, y)
            loss.backward()
            if last:
                torch.testing.assert_close(output, reference(x), rtol=0, atol=1e-12)
                torch.testing.assert_close(torch.stack(losses).mean(), loss, rtol=0, atol=1e-12)
            for part, index in zip(parts, mine, strict=True):
                ours = list(part.parameters())
                theirs = list(stage(reference, index, stages).parameters())
                if ours:
                    ours, theirs = (values(p.grad for p in ps) for ps in (ours, theirs))
                    assert theirs.abs().max() > 1e-3
                    torch.testing.assert_close(ours, theirs, rtol=0, atol=1e-12)


@pytest.mark.parametrize("ranks", (2, 3))
@pytest.mark.parametrize("schedule", SCHEDULES)
def test_one_stage_a_rank(schedule: str, ranks: int) -> None:
    run(pipeline, ranks, schedule, ranks)


def test_two_stages_a_rank() -> None:
    run(pipeline, 2, "interleaved", 4)
