"""Distributed checkpoints: sharded state saved by some ranks, loaded by another number of them."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from distributed.harness import Rank, run
from frameworks.common import close, loss_of, network, same, whole_batch
from torch import nn
from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard

STEPS = 3


def adam(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.Adam(model.parameters(), lr=0.01)


def state_of(model: nn.Module, optimizer: torch.optim.Optimizer) -> dict[str, Any]:
    model_state, optimizer_state = get_state_dict(model, optimizer)
    return {"model": model_state, "optimizer": optimizer_state, "steps": STEPS}


def save(me: Rank, path: Path, asynchronous: bool) -> None:
    """After some steps on the batches of two ranks, whatever the number of ranks is here."""
    with me.join():
        model = fully_shard(network(), mesh=init_device_mesh("cpu", (me.size,)))
        optimizer = adam(model)
        for step in range(STEPS):
            optimizer.zero_grad()
            loss_of(model, *whole_batch(step, 2)).backward()
            optimizer.step()
        state = state_of(model, optimizer)
        if not asynchronous:
            dcp.save(state, checkpoint_id=path)
            return
        background = dist.new_group()  # the default group goes on with other calls meanwhile
        future = dcp.async_save(state, checkpoint_id=path, process_group=background)
        for call in range(100):
            total = torch.full((1000,), float(me.rank + call))
            dist.all_reduce(total)
            same(total, torch.full((1000,), float(sum(range(me.size)) + call * me.size)))
        future.result()


def load_and_go_on(me: Rank, path: Path) -> None:
    """Two steps more, which need Adam's moments, then the comparison with one process that did all."""
    with me.join():
        model = network()
        for parameter in model.parameters():
            parameter.data.zero_()
        fully_shard(model, mesh=init_device_mesh("cpu", (me.size,)))
        optimizer = adam(model)
        state = state_of(model, optimizer) | {"steps": 0}
        dcp.load(state, checkpoint_id=path)
        set_state_dict(model, optimizer, model_state_dict=state["model"], optim_state_dict=state["optimizer"])
        assert state["steps"] == STEPS

        reference = network()
        expected = adam(reference)
        for step in range(STEPS + 2):
            expected.zero_grad()
            loss_of(reference, *whole_batch(step, 2)).backward()
            expected.step()
            if step == STEPS - 1:
                close(model, reference)
        for step in range(STEPS, STEPS + 2):
            optimizer.zero_grad()
            loss_of(model, *whole_batch(step, 2)).backward()
            optimizer.step()
        close(model, reference)


@pytest.mark.slow
@pytest.mark.parametrize("savers, loaders", [(2, 3), (3, 2), (2, 1)])
def test_saved_and_loaded_by_other_numbers_of_ranks(savers: int, loaders: int, tmp_path: Path) -> None:
    run(save, savers, tmp_path, False)
    assert len(list(tmp_path.glob("*.distcp"))) == savers
    run(load_and_go_on, loaders, tmp_path)


def test_asynchronous_save(tmp_path: Path) -> None:
    run(save, 2, tmp_path, True)
    run(load_and_go_on, 2, tmp_path)
