"""`attach`: a torch.nn model in its usual loop; examples/train_push_pull.py started as its first lines say."""

from __future__ import annotations

import os
from typing import Any

import pytest
import test_workers_and_servers as one_host
import torch
from distributed.harness import Rank, run
from frameworks.launch import python, torchrun
from torch import nn

import ringreduce.parameter_server as ps
from ringreduce.errors import InvalidArgument

WORKERS, STEPS = 3, 4


class Uneven(nn.Module):
    """With layers that are used twice, used without being called, and not trained."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(7)
        self.first, self.shared, self.last = nn.Linear(5, 8), nn.Linear(8, 8), nn.Linear(8, 3)
        self.frozen = nn.Linear(8, 8).requires_grad_(False)
        self.uncalled = nn.Linear(8, 8, bias=False)
        self.scale = nn.Parameter(torch.ones(8))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.shared(torch.tanh(self.shared(self.first(x)))) * self.scale
        return self.last(self.frozen(nn.functional.linear(x, self.uncalled.weight)))


def make_optimizer(model: nn.Module) -> torch.optim.Optimizer:
    """Two groups with settings of their own."""
    first = list(model.first.parameters())  # type: ignore[union-attr]
    rest = [p for p in model.parameters() if p.requires_grad and all(p is not other for other in first)]
    return torch.optim.AdamW([{"params": first, "lr": 0.02}, {"params": rest}], lr=0.01, foreach=False)


def loss(model: nn.Module, worker: int, step: int) -> torch.Tensor:
    generator = torch.Generator().manual_seed(100 * worker + step)
    x, y = torch.randn(6, 5, generator=generator), torch.randint(3, (6,), generator=generator)
    return nn.functional.cross_entropy(model(x), y)


def bits(model: nn.Module) -> list[bytes]:
    return [parameter.detach().numpy().tobytes() for parameter in model.parameters()]


def trained(me: Rank, apart: bool) -> tuple[list[bytes], list[bytes]]:
    if apart:
        os.environ |= {"RINGREDUCE_HOST_ID": f"host {me.rank}", "RINGREDUCE_SOCKET_IFNAME": "=lo"}
    model = Uneven()
    with torch.no_grad():
        model.first.weight += me.rank  # the first worker's counts, whoever that is
    with one_host.join(me) as kv:
        optimizer = ps.attach(kv, model, make_optimizer(model), prefix="net.")
        begun = bits(model)
        for step in range(STEPS):
            optimizer.zero_grad()
            loss(model, me.rank, step).backward()
            assert all(p.grad is None for p in model.parameters())
            optimizer.step()
        state = model.state_dict()  # which has the values after the last step
        assert state["scale"].equal(kv_value(kv, "net.scale", state["scale"]))
        optimizer.detach()
        return begun, bits(model)


def kv_value(kv: ps.KeyValue, key: str, like: torch.Tensor) -> torch.Tensor:
    out = torch.empty_like(like)
    kv.pull(key, out)
    return out


@pytest.mark.parametrize("apart", [False, True], ids=["one host", "several hosts"])
def test_sync_has_the_bits_of_one_process(apart: bool) -> None:
    found = run(trained, WORKERS, apart)
    model = Uneven()
    with torch.no_grad():
        for parameter, begun in zip(model.parameters(), found[0][0], strict=True):
            parameter.copy_(torch.frombuffer(bytearray(begun), dtype=torch.float32).view(parameter.shape))
    optimizer = make_optimizer(model)
    train = [p for p in model.parameters() if p.requires_grad]
    for step in range(STEPS):
        each = [torch.autograd.grad(loss(model, worker, step), train) for worker in range(WORKERS)]
        for parameter, gradients in zip(train, zip(*each, strict=True), strict=True):
            total = gradients[0]
            for gradient in gradients[1:]:
                total = total + gradient
            parameter.grad = total / WORKERS
        optimizer.step()
    assert [begun for begun, _ in found] == [found[0][0]] * WORKERS
    assert [ended for _, ended in found] == [bits(model)] * WORKERS


def attached(model: nn.Module, kind: Any = torch.optim.SGD, **arguments: Any) -> tuple[ps.KeyValue, ps.Attached]:
    kv = ps.join(memory=1 << 20, window=8 << 20)
    return kv, ps.attach(kv, model, kind(model.parameters(), **arguments))


def test_a_schedule_is_refused() -> None:
    model = nn.Linear(3, 2)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with ps.join(memory=1 << 20, window=8 << 20) as kv:
        attached = ps.attach(kv, model, optimizer)
        model(torch.ones(3)).sum().backward()
        optimizer.param_groups[0]["lr"] = 0.05
        with pytest.raises(InvalidArgument, match="the optimizer's arguments have changed, by a scheduler perhaps"):
            attached.step()
        attached.detach()


def test_two_backward_passes_a_step_are_refused() -> None:
    model = nn.Linear(3, 2)
    kv, optimizer = attached(model, lr=0.1)
    y = model(torch.ones(3))
    y.sum().backward(retain_graph=True)
    with pytest.raises(InvalidArgument, match="call backward once a step"):
        y.sum().backward()
    optimizer.detach()
    model(torch.ones(3)).sum().backward()  # an ordinary model again
    assert model.weight.grad is not None
    kv.leave()


def test_unsuitable_optimizers_and_foreign_parameters_are_refused() -> None:
    model = nn.Linear(3, 2)
    with ps.join(memory=1 << 20, window=8 << 20) as kv:
        with pytest.raises(InvalidArgument, match=r"torch.optim.LBFGS cannot update blocks of a tensor"):
            ps.attach(kv, model, torch.optim.LBFGS(model.parameters()))
        with pytest.raises(InvalidArgument, match=r"the optimizer has a parameter \(2, 2\) that model has not"):
            ps.attach(kv, model, torch.optim.SGD([nn.Parameter(torch.zeros(2, 2))], lr=0.1))


def test_the_example_by_itself() -> None:
    assert "worker 0: the bits of one process" in python("examples/train_push_pull.py", "--epochs", "3")


@pytest.mark.slow
@pytest.mark.parametrize("mode", ("sync", "asynchronous", "ssp"))
def test_the_example_under_torchrun(mode: str) -> None:
    output = torchrun("examples/train_push_pull.py", "--mode", mode, "--epochs", "5")
    assert output.count("the bits of one process") == (2 if mode == "sync" else 0)
    assert output.count("worker") >= 2
