"""DistributedDataParallel, against one process that has all the data; compressed gradients bit by bit against Gloo."""

from __future__ import annotations

import os
import signal
from collections.abc import Callable
from functools import partial

import pytest
import torch
import torch.distributed as dist
from distributed.harness import Rank, Ranks, on_ranks
from frameworks.common import (
    batch,
    close,
    loss_of,
    network,
    on_gloo_and_ours,
    same,
    sgd,
    trained_alone,
    values,
    whole_batch,
)
from torch import Tensor, nn
from torch.distributed.algorithms.ddp_comm_hooks import default_hooks, powerSGD_hook
from torch.distributed.algorithms.join import Join
from torch.nn.parallel import DistributedDataParallel
from torch.utils.checkpoint import checkpoint

import ringreduce
from ringreduce.errors import PeerLost
from ringreduce.groups.lookup import backend_of

STEPS = 4


def train(model: nn.Module, me: Rank, steps: int = STEPS) -> None:
    optimizer = sgd(model)
    for step in range(steps):
        optimizer.zero_grad()
        loss_of(model, *batch(step, me.rank)).backward()
        optimizer.step()


@on_ranks(2, 3)
def test_small_buckets(me: Rank) -> None:
    """From rank 0's weights, whatever the others have at first."""
    with me.join():
        net = network()
        for parameter in net.parameters():
            parameter.data += me.rank
        model = DistributedDataParallel(net, bucket_cap_mb=1024 / 2**20)
        train(model, me)
        sizes = [int(size) for size in model._get_ddp_logging_data()["rebuilt_bucket_sizes"].split(", ")]
        assert len(sizes) > 2 and sum(sizes) == 8 * sum(p.numel() for p in model.parameters())
        close(model, trained_alone(me.size, STEPS))


@on_ranks(2, 3)
def test_buckets_lie_in_shared_memory(me: Rank) -> None:
    with me.join(options=ringreduce.Options(algorithms="all_reduce:two_shot")):
        model = DistributedDataParallel(network())
        train(model, me)
        close(model, trained_alone(me.size, STEPS))
        statistics = ringreduce.stats()[dist.group.WORLD.group_name]["all_reduce"]  # type: ignore[union-attr]
        assert statistics.lent > 0


class Complex(nn.Module):
    """Complex and real parameters, so that there are buckets of both."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(3)
        self.complex = nn.Parameter(torch.randn(4, 4, dtype=torch.complex64))
        self.real = nn.Parameter(torch.randn(4, 4))

    def forward(self, x: Tensor) -> Tensor:
        return (x.to(torch.complex64) @ self.complex + x @ self.real).abs().square().sum()


@on_ranks(2)
def test_complex_parameters(me: Rank) -> None:
    with me.join():
        model, alone = DistributedDataParallel(Complex()), Complex()
        inputs = [torch.arange(8.0).reshape(2, 4) + 10 * rank for rank in range(me.size)]
        for _ in range(3):  # buckets are made anew after the first
            model.zero_grad()
            alone.zero_grad()
            model(inputs[me.rank]).backward()
            (sum(alone(x) for x in inputs) / me.size).backward()
            for (name, parameter), (_, expected) in zip(
                model.module.named_parameters(), alone.named_parameters(), strict=True
            ):
                assert parameter.grad is not None and expected.grad is not None
                assert parameter.grad.dtype == parameter.dtype, name
                torch.testing.assert_close(parameter.grad, expected.grad)
        assert backend_of(None).allocate_tensor(5, dtype=torch.complex64, device=torch.device("cpu")).is_complex()
        assert ringreduce.empty(2, 3, dtype=torch.complex128).shape == (2, 3)


@on_ranks(3)
def test_no_sync(me: Rank) -> None:
    """Two batches without communication, then one with."""
    with me.join():
        model, reference = DistributedDataParallel(network()), network()
        with model.no_sync():
            for step in (0, 1):
                loss_of(model, *batch(step, me.rank)).backward()
                loss_of(reference, *batch(step, me.rank)).backward()
        same(values(p.grad for p in model.parameters()), values(p.grad for p in reference.parameters()))
        loss_of(model, *batch(2, me.rank)).backward()

        reference.zero_grad()
        for step in range(3):
            loss_of(reference, *whole_batch(step, me.size)).backward()
        for model_ in (model, reference):
            sgd(model_).step()
        close(model, reference)


class Branches(nn.Module):
    """Of its two networks, uses the one it is told to."""

    def __init__(self) -> None:
        super().__init__()
        self.branches = nn.ModuleList([network(), network()])

    def forward(self, x: Tensor, branch: int) -> Tensor:
        return self.branches[branch](x)


@on_ranks(3)
def test_unused_parameters(me: Rank) -> None:
    """Each rank uses one branch, by turns; in the last step all use the first."""

    def branch_of(rank: int, step: int) -> int:
        return 0 if step == STEPS - 1 else (rank + step) % 2

    with me.join():
        model, reference = DistributedDataParallel(Branches(), find_unused_parameters=True), Branches()
        ours, theirs = sgd(model), sgd(reference)
        for step in range(STEPS):
            x, y = batch(step, me.rank)
            ours.zero_grad()
            nn.functional.mse_loss(model(x, branch_of(me.rank, step)), y).backward()
            ours.step()
            theirs.zero_grad()
            for rank in range(me.size):
                x, y = batch(step, rank)
                (nn.functional.mse_loss(reference(x, branch_of(rank, step)), y) / me.size).backward()
            theirs.step()
        for trained, expected in zip(model.module.branches, reference.branches, strict=True):
            close(trained, expected)


@on_ranks(3)
def test_uneven_inputs_with_join(me: Rank) -> None:
    """Rank r has 2 + r batches; those that have none left count as a gradient of zero."""
    with me.join():
        model, reference = DistributedDataParallel(network()), network()
        with Join([model]):
            train(model, me, steps=2 + me.rank)
        optimizer = sgd(reference)
        for step in range(2 + me.size - 1):
            optimizer.zero_grad()
            for rank in range(me.size):
                if step < 2 + rank:
                    (loss_of(reference, *batch(step, rank)) / me.size).backward()
            optimizer.step()
        close(model, reference)


class Twice(nn.Module):
    """Recomputes its network, by which a parameter's gradient comes twice: DDP can do that for a static graph only."""

    def __init__(self) -> None:
        super().__init__()
        self.net, self.mix = network(), nn.Linear(4, 8).double()

    def forward(self, x: Tensor) -> Tensor:
        once = checkpoint(self.net, x.requires_grad_(), use_reentrant=True)
        return checkpoint(self.net, self.mix(once), use_reentrant=True)


@on_ranks(2)
def test_static_graph(me: Rank) -> None:
    with me.join():
        torch.manual_seed(1)
        reference, model = Twice(), Twice()
        model.load_state_dict(reference.state_dict())
        train(DistributedDataParallel(model, static_graph=True), me)
        optimizer = sgd(reference)
        for step in range(STEPS):
            optimizer.zero_grad()
            loss_of(reference, *whole_batch(step, me.size)).backward()
            optimizer.step()
        close(model.net, reference.net)


def power_sgd(model: DistributedDataParallel) -> None:
    state = powerSGD_hook.PowerSGDState(
        None, matrix_approximation_rank=1, start_powerSGD_iter=2, min_compression_rate=1.5
    )
    model.register_comm_hook(state, powerSGD_hook.powerSGD_hook)


def bf16(state, bucket):  # type: ignore[no-untyped-def]
    """Under a name of its own, since DDP refuses torch's without CUDA."""
    return default_hooks.bf16_compress_hook(state, bucket)


HOOKS: dict[str, Callable[[DistributedDataParallel], None]] = {
    "fp16": lambda model: model.register_comm_hook(None, default_hooks.fp16_compress_hook),
    "bf16": lambda model: model.register_comm_hook(None, bf16),
    "PowerSGD": power_sgd,
}


def hooked(me: Rank, hook: str) -> Tensor:
    model = DistributedDataParallel(network().float())
    HOOKS[hook](model)
    optimizer = sgd(model)
    for step in range(STEPS):
        optimizer.zero_grad()
        loss_of(model, *(t.float() for t in batch(step, me.rank))).backward()
        optimizer.step()
    return values(model.parameters())


@pytest.mark.parametrize("hook", HOOKS)
@on_ranks(2)
def test_comm_hooks(me: Rank, hook: str) -> None:
    gloo, ours = on_gloo_and_ours(me, partial(hooked, hook=hook))
    same(ours, gloo)
    error = (ours - values(trained_alone(me.size, STEPS).parameters())).abs().max()
    assert 1e-5 < error < 1e-1  # compressed, but trained


def peer_dies(me: Rank) -> tuple[type[BaseException], str]:
    with me.join():
        model = DistributedDataParallel(network())
        train(model, me, steps=1)
        loss = loss_of(model, *batch(1, me.rank))
        me.store.set(f"forward of {me.rank}", "")
        if me.rank == 1:  # others may still be in a collective of their forward pass
            me.store.wait(["forward of 0", "forward of 2"])
            os.kill(os.getpid(), signal.SIGKILL)
        with pytest.raises(RuntimeError) as caught:
            loss.backward()
    return caught.type, str(caught.value)


def test_backward_raises_what_the_other_calls_raise() -> None:
    with Ranks(peer_dies, 3) as ranks:
        for kind, message in ranks.results(but=(1,)):
            assert kind is PeerLost and "rank 1 (" in message
