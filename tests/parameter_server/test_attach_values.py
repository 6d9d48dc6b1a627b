"""`attach`: which values a program sees and changes, in ways that an ordinary optimizer allows. As one process, or an
error, never other results in silence."""

from __future__ import annotations

import copy
import io
from collections.abc import Callable
from typing import Any

import pytest
import torch
from test_attach import Optional, attached, bits, ones
from torch import nn

import ringreduce.parameter_server as ps
from ringreduce.errors import InvalidArgument


class Tied(nn.Module):
    """Uses a weight before the module that owns it is called."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.tied = nn.Linear(3, 4), nn.Linear(4, 4, bias=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.tied(nn.functional.linear(self.first(x), self.tied.weight.t()))


def tied_loss(model: Any) -> torch.Tensor:
    return model(ones()).square().sum()


def penalised(model: Any) -> torch.Tensor:
    return model.first(ones()).square().sum() + sum(p.square().sum() for p in model.parameters())


def lacks_the_root(model: Any) -> torch.Tensor:
    x = model.first(ones())
    return nn.functional.linear(x, model.tied.weight).square().sum()


def steps(model: nn.Module, optimizer: Any, loss: Callable[[Any], torch.Tensor], count: int = 4) -> None:
    for _ in range(count):
        optimizer.zero_grad()
        loss(model).backward()
        optimizer.step()


@pytest.mark.parametrize("loss", [tied_loss, penalised, lacks_the_root])
def test_a_forward_pass_has_no_old_values(loss: Callable[[Any], torch.Tensor]) -> None:
    model = Tied()
    alone = copy.deepcopy(model)
    steps(alone, torch.optim.SGD(alone.parameters(), lr=0.1, foreach=False), loss)
    kv, optimizer = attached(model, lr=0.1)
    with kv:
        steps(model, optimizer, loss)
        optimizer.detach()
    assert bits(model) == bits(alone)


def test_whoever_reads_values_after_a_step_has_new_ones() -> None:
    model = Tied()
    alone = copy.deepcopy(model)
    by_itself = torch.optim.SGD(alone.parameters(), lr=0.1, foreach=False)
    kv, optimizer = attached(model, lr=0.1)
    with kv:
        pairs = [
            (each, its, torch.optim.swa_utils.AveragedModel(each))
            for each, its in ((alone, by_itself), (model, optimizer))
        ]
        for _ in range(4):
            for each, its, average in pairs:
                its.zero_grad()
                (tied_loss(each) + sum(p.abs().sum() for p in each.parameters())).backward()
                its.step()
                average.update_parameters(each)
            assert bits(model) == bits(alone)
        assert bits(pairs[0][2]) == bits(pairs[1][2])
        optimizer.detach()


def test_autograd_raises_if_an_old_value_was_saved() -> None:
    model = Tied()
    with ps.join(memory=1 << 20, window=8 << 20) as kv:
        given = torch.optim.SGD(model.parameters(), lr=0.1)
        optimizer = ps.attach(kv, model, given, overlap_forward=True)
        with pytest.raises(RuntimeError, match="modified by an inplace operation"):
            steps(model, optimizer, tied_loss)
        optimizer.pull()
        optimizer.zero_grad()
        optimizer.detach()
        optimizer = ps.attach(kv, model, given, prefix="again.")
        model(ones()).sum().backward()
        before = model(ones()).sum()
        optimizer.step()
        with pytest.raises(RuntimeError, match="modified by an inplace operation"):
            before.backward()
        optimizer.detach()


def test_layer_by_layer_has_the_bits_of_one_process() -> None:
    model = nn.Sequential(nn.Linear(3, 4), nn.Tanh(), nn.Linear(4, 2))
    alone = copy.deepcopy(model)
    steps(alone, torch.optim.Adam(alone.parameters(), lr=0.1, foreach=False), tied_loss)
    with ps.join(memory=1 << 20, window=8 << 20) as kv:
        optimizer = ps.attach(kv, model, torch.optim.Adam(model.parameters(), lr=0.1), overlap_forward=True)
        steps(model, optimizer, tied_loss, 3)
        model[0](ones())
        assert optimizer._trained[model[0].weight].pulling is None
        assert optimizer._trained[model[2].weight].pulling is not None
        steps(model, optimizer, tied_loss, 1)
        optimizer.detach()
    assert bits(model) == bits(alone)


# ---- scaled gradients ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("unscales", [True, False])
def test_a_grad_scaler_is_an_error(unscales: bool) -> None:
    model = nn.Linear(3, 1)
    kv, optimizer = attached(model, lr=0.1)
    with kv:
        scaler = torch.amp.GradScaler("cpu", init_scale=4.0)
        scaler.scale(model(ones()).sum()).backward()
        if unscales:
            scaler.unscale_(optimizer)
        with pytest.raises(InvalidArgument, match=r"torch.autocast in bfloat16, .* or GradScaler\(enabled=False\)"):
            scaler.step(optimizer)
        scaler = torch.amp.GradScaler("cpu", enabled=False)
        steps(model, optimizer, lambda model: scaler.scale(model(ones()).sum()), 1)
        optimizer.zero_grad()
        scaler.scale(model(ones()).sum()).backward()
        if unscales:
            scaler.unscale_(optimizer)
        scaler.step(optimizer)
        optimizer.detach()


@pytest.mark.parametrize("quietly", [True, False])
def test_gradients_are_unscaled_under_no_sync_only(quietly: bool) -> None:
    model = nn.Linear(3, 1)
    alone = copy.deepcopy(model)
    steps(alone, torch.optim.SGD(alone.parameters(), lr=0.1, foreach=False), lambda each: each(ones()).sum(), 3)
    kv, optimizer = attached(model, lr=0.1)
    with kv:
        for _ in range(3):
            optimizer.zero_grad()
            scaler = torch.amp.GradScaler("cpu", init_scale=4.0)
            loss = scaler.scale(model(ones()).sum())
            if quietly:
                with optimizer.no_sync():
                    loss.backward()
            else:
                loss.backward()
            scaler.unscale_(optimizer)
            if quietly:
                optimizer.step()
                continue
            with pytest.raises(
                InvalidArgument, match=r"gradient of 'bias' was changed|gradient of 'weight' was changed"
            ):
                optimizer.step()
            break
        optimizer.detach()
    assert not quietly or bits(model) == bits(alone)


# ---- changed parameters ----------------------------------------------------------------------------------------------


def clamps(model: nn.Linear) -> None:
    with torch.no_grad():
        model.weight.clamp_(-0.01, 0.01)


def clamps_data(model: nn.Linear) -> None:
    model.weight.data.clamp_(-0.01, 0.01)


def replaces_data(model: nn.Linear) -> None:
    model.weight.data = model.weight.data / 2


def loads(model: nn.Linear) -> None:
    model.load_state_dict({"weight": torch.zeros(1, 3), "bias": torch.zeros(1)})


@pytest.mark.parametrize("overlap_forward", [True, False])
@pytest.mark.parametrize("change", [clamps, clamps_data, replaces_data, loads])
def test_a_parameter_that_is_changed_is_an_error(change: Callable[[nn.Linear], None], overlap_forward: bool) -> None:
    model = nn.Linear(3, 1)
    kv, optimizer = attached(model, lr=0.1, overlap_forward=overlap_forward)
    with kv:
        steps(model, optimizer, lambda model: model(ones()).sum(), 2)
        change(model)
        with pytest.raises(
            InvalidArgument, match="'weight' was changed in place since the last step, or got other memory"
        ):
            steps(model, optimizer, lambda model: model(ones()).sum(), 1)
        optimizer.detach()


# ---- copies ----------------------------------------------------------------------------------------------------------


def stored(model: nn.Module) -> Any:
    file = io.BytesIO()
    torch.save(model, file)
    file.seek(0)
    return torch.load(file, weights_only=False)


@pytest.mark.parametrize("copied", [copy.deepcopy, stored, torch.optim.swa_utils.AveragedModel])
def test_a_copy_is_a_model_of_its_own(copied: Callable[[nn.Module], Any]) -> None:
    model = nn.Sequential(nn.Linear(3, 4), nn.Linear(4, 1))
    kv, optimizer = attached(model, lr=0.1, overlap_forward=True)
    with kv:
        steps(model, optimizer, lambda model: model(ones()).sum(), 2)
        with pytest.raises(InvalidArgument, match=r"copied or saved before .*: call pull\(\) of"):
            copied(model)
        optimizer.pull()
        other = copied(model)
        before = other(ones()).item()
        assert before == model(ones()).item()
        steps(model, optimizer, lambda model: model(ones()).sum(), 1)
        other.state_dict()
        other(ones()).sum().backward()  # waits for nothing, and pushes nothing
        assert any(each.pulling is not None for each in optimizer._trained.values())
        assert all(each.pushed is None for each in optimizer._trained.values())
        assert other(ones()).item() == before != model(ones()).item()
        optimizer.detach()


# ---- zeros -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("overlap_forward", [True, False])
@pytest.mark.parametrize("by_model", [True, False])
def test_gradients_may_be_zeroed_in_place(by_model: bool, overlap_forward: bool) -> None:
    model = Optional()
    alone = copy.deepcopy(model)
    kv, optimizer = attached(model, lr=0.1, momentum=0.9, overlap_forward=overlap_forward)
    with kv:
        by_itself = torch.optim.SGD(alone.parameters(), lr=0.1, momentum=0.9, foreach=False)
        for each, its in ((model, optimizer), (alone, by_itself)):
            for step in range(5):
                zeroed: Any = each if by_model else its
                zeroed.zero_grad(set_to_none=False)
                used = each.always(ones())
                (used + each.at_times(ones()) if step % 2 == 0 else used).sum().backward()
                its.step()
        optimizer.detach()
    assert bits(model) == bits(alone)
