"""DTensor's tensor and sequence parallelism, by itself and with FSDP2 on a 2-D mesh, against one process."""

from __future__ import annotations

import torch
from distributed.harness import Rank, on_ranks
from frameworks.common import batch, close, loss_of, network, sgd, trained_alone, values
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_tensor
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    PrepareModuleInput,
    RowwiseParallel,
    SequenceParallel,
    parallelize_module,
)

STEPS = 4
PLAN = {"0": ColwiseParallel(), "2": RowwiseParallel(), "4": ColwiseParallel(output_layouts=Replicate())}


def train(model: nn.Module, data: int) -> nn.Module:
    """On the batches of rank `data`."""
    optimizer = sgd(model)
    for step in range(STEPS):
        optimizer.zero_grad()
        loss_of(model, *batch(step, data)).backward()
        optimizer.step()
    return model


@on_ranks(2)
def test_columns_and_rows(me: Rank) -> None:
    with me.join():
        mesh = init_device_mesh("cpu", (me.size,))
        model = parallelize_module(network(), mesh, PLAN)
        assert model[0].weight.to_local().shape == (32 // me.size, 8)
        assert model[2].weight.to_local().shape == (32, 32 // me.size)
        close(train(model, data=0), train(network(), data=0))


@on_ranks(4)
def test_with_fsdp_on_a_mesh_of_2_by_2(me: Rank) -> None:
    """Ranks 0 and 1 share a model and its data, 2 and 3 the same model with other data."""
    with me.join():
        mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("data", "tensor"))
        model = parallelize_module(network(), mesh["tensor"], PLAN)
        for layer in (model[0], model[2], model[4], model):
            fully_shard(layer, mesh=mesh["data"])
        train(model, data=mesh.get_local_rank("data"))
        assert model[2].weight.to_local().shape == (16, 16)
        close(model, trained_alone(2, STEPS))


class Block(nn.Module):
    """A norm whose input is cut along the sequence, then a network with its features cut."""

    def __init__(self) -> None:
        super().__init__()
        self.norm, self.net = nn.LayerNorm(8).double(), network()[:3]

    def forward(self, x: Tensor) -> Tensor:
        return self.net(self.norm(x))


@on_ranks(2)
def test_sequence_parallel(me: Rank) -> None:
    with me.join():
        mesh, x, reference = init_device_mesh("cpu", (me.size,)), batch(0, 0)[0].view(1, 6, 8), Block()
        plan = {
            "norm": SequenceParallel(),
            "net": PrepareModuleInput(input_layouts=Shard(1), desired_input_layouts=Replicate()),
            "net.0": ColwiseParallel(),
            "net.2": RowwiseParallel(output_layouts=Shard(1)),
        }
        model = parallelize_module(Block(), mesh, plan)
        mine = x.chunk(me.size, 1)[me.rank]
        output = DTensor.from_local(model(mine), mesh, [Shard(1)])
        expected = reference(x)
        assert output.to_local().shape == (1, 6 // me.size, 32)
        torch.testing.assert_close(output.full_tensor(), expected, rtol=0, atol=1e-12)
        output.square().mean().backward()
        expected.square().mean().backward()
        ours, theirs = (values(p.grad for p in m.parameters()) for m in (model, reference))
        torch.testing.assert_close(ours, theirs, rtol=0, atol=1e-12)


def layouts(me: Rank, mesh: DeviceMesh) -> None:
    x = torch.arange(35.0).view(5, 7)
    for before in (Shard(0), Shard(1), Replicate()):
        for after in (Shard(0), Shard(1), Replicate()):
            tensor = distribute_tensor(x if me.rank == 0 else torch.zeros(5, 7), mesh, [before])
            assert torch.equal(tensor.redistribute(placements=[after]).full_tensor(), x), (before, after)


@on_ranks(3)
def test_redistribution_from_rank_0_between_all_uneven_layouts(me: Rank) -> None:
    with me.join():
        layouts(me, init_device_mesh("cpu", (me.size,)))
