"""`attach`: a torch.nn model in its usual loop; examples/train_push_pull.py started as its first lines say."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import bodies.parameter_server as one_host
import pytest
import torch
from distributed.harness import Rank, on_ranks, run
from frameworks.launch import alone, ranks
from torch import nn
from torch.nn.utils import prune

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
            optimizer.step()
        state = model.state_dict()  # which has the values after the last step
        assert state["scale"].equal(kv_value(kv, "net.scale", state["scale"]))
        optimizer.detach()
        return begun, bits(model)


def kv_value(kv: ps.KeyValue, key: str, like: torch.Tensor) -> torch.Tensor:
    out = torch.empty_like(like)
    kv.pull(key, out)
    return out


@pytest.mark.slow
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


def attached(
    model: nn.Module, kind: Any = torch.optim.SGD, overlap_forward: bool = False, **arguments: Any
) -> tuple[ps.KeyValue, ps.Attached]:
    kv = ps.join(memory=1 << 20, window=8 << 20)
    return kv, ps.attach(kv, model, kind(model.parameters(), **arguments), overlap_forward=overlap_forward)


# ---- what a step pushes ----------------------------------------------------------------------------------------------


def ones(times: float = 1.0) -> torch.Tensor:
    return times * torch.ones(3)


class Optional(nn.Module):
    """Of which a part may be unused."""

    def __init__(self) -> None:
        super().__init__()
        self.always, self.at_times = nn.Linear(3, 1), nn.Linear(3, 1)

    def forward(self, x: torch.Tensor, all_of_it: bool) -> torch.Tensor:
        return self.always(x) + self.at_times(x) if all_of_it else self.always(x)


@on_ranks(2, returns=[pytest.approx(1 + 2 + 3 / 2 + 4 + 6, abs=1e-4)] * 2)
def test_a_parameter_that_a_worker_does_not_use_counts_as_zeros(me: Rank) -> float:
    """How far `at_times.weight` has moved, in learning rates: its gradient in step i is i + 1."""
    torch.manual_seed(0)
    model = Optional()
    before = model.at_times.weight[0, 0].item()
    with one_host.join(me) as kv:
        optimizer = ps.attach(kv, model, torch.optim.SGD(model.parameters(), lr=0.1))
        for step in range(6):
            optimizer.zero_grad()
            model(ones(step + 1), all_of_it=(me.rank, step) != (1, 2) and step != 4).sum().backward()
            optimizer.step()
        optimizer.pull()
        optimizer.detach()
    return (before - model.at_times.weight[0, 0].item()) / 0.1


def test_a_parameter_without_a_gradient_keeps_its_value_and_states() -> None:
    torch.manual_seed(0)
    model, alone = Optional(), Optional()
    alone.load_state_dict(model.state_dict())
    kv, optimizer = attached(model, torch.optim.AdamW, lr=0.1, weight_decay=0.1)
    with kv:
        for each, its in ((model, optimizer), (alone, torch.optim.AdamW(alone.parameters(), lr=0.1, weight_decay=0.1))):
            for all_of_it in (True, False, False, True):
                its.zero_grad()
                each(ones(), all_of_it).sum().backward()
                its.step()
        optimizer.detach()
    assert bits(model) == bits(alone)


def test_the_sum_of_several_backward_passes_is_pushed_once() -> None:
    model, alone = nn.Linear(3, 2), nn.Linear(3, 2)
    alone.load_state_dict(model.state_dict())
    kv, optimizer = attached(model, torch.optim.Adam, lr=0.1)
    with kv:
        for each, its in ((model, optimizer), (alone, torch.optim.Adam(alone.parameters(), lr=0.1))):
            for _ in range(3):
                its.zero_grad()
                for part in (1, 2):
                    each(ones(part)).sum().backward()
                its.step()
        optimizer.detach()
        assert bits(model) == bits(alone)
        assert kv.pull("weight", torch.empty(2, 3)) == {"weight": [3]}


def test_a_second_backward_pass_after_usual_steps_is_an_error_unless_the_first_is_under_no_sync() -> None:
    model = nn.Linear(3, 2)
    kv, optimizer = attached(model, lr=0.1)
    with kv:
        for _ in range(2):
            optimizer.zero_grad()
            with optimizer.no_sync():
                model(ones()).sum().backward()
            model(ones()).sum().backward()
            optimizer.step()
        assert kv.pull("weight", torch.empty(2, 3)) == {"weight": [2]}
        optimizer.zero_grad()
        model(ones()).sum().backward()
        assert all(each.pushed is not None for each in optimizer._trained.values()), "pushed in backward"
        model(ones()).sum().backward()
        with pytest.raises(InvalidArgument, match=r"'weight' was pushed once .* and 2 backward passes have computed"):
            optimizer.step()
        optimizer.detach()
        model(ones()).sum().backward()  # an ordinary model again
        assert model.weight.grad is not None


def train_gan(generator: nn.Module, critic: nn.Module, optimizers: list[Any], clear: Any) -> None:
    """As usual: the generator's backward pass leaves gradients in the critic, which are cleared before the critic's."""
    of_generator, of_critic = optimizers
    for step in range(STEPS):
        clear(of_generator, generator)
        critic(generator(ones(step + 1))).sum().backward()
        of_generator.step()
        clear(of_critic, critic)
        (critic(ones(step + 2)) - critic(generator(ones(step + 1)).detach())).sum().backward()
        of_critic.step()


@pytest.mark.parametrize("clear", [lambda optimizer, _: optimizer.zero_grad(), lambda _, model: model.zero_grad()])
def test_gradients_that_are_cleared_before_the_pass_of_the_step_are_not_pushed(clear: Any) -> None:
    models, alone = [nn.Linear(3, 3), nn.Linear(3, 1)], [nn.Linear(3, 3), nn.Linear(3, 1)]
    for mine, its in zip(models, alone, strict=True):
        its.load_state_dict(mine.state_dict())
    with ps.join(memory=1 << 20, window=8 << 20) as kv:
        optimizers = [
            ps.attach(kv, each, torch.optim.Adam(each.parameters(), lr=0.1), prefix=f"{n}.")
            for n, each in enumerate(models)
        ]
        train_gan(*models, optimizers, clear)
        train_gan(*alone, [torch.optim.Adam(each.parameters(), lr=0.1) for each in alone], clear)
        for optimizer in optimizers:
            optimizer.detach()
    assert [bits(each) for each in models] == [bits(each) for each in alone]


def test_gradients_that_are_cleared_after_they_were_pushed_are_an_error() -> None:
    model = nn.Linear(3, 2)
    kv, optimizer = attached(model, lr=0.1)
    with kv:
        for _ in range(2):
            optimizer.zero_grad()
            model(ones()).sum().backward()
            optimizer.step()
        for _ in range(2):  # as if the first loss had been infinite
            optimizer.zero_grad()
            model(ones()).sum().backward()
        with pytest.raises(InvalidArgument, match=r"'weight' was pushed once .* zero_grad\(\) then cleared"):
            optimizer.step()
        optimizer.detach()


@pytest.mark.parametrize(
    ("kind", "arguments"), [(torch.optim.SGD, {"momentum": 0.9}), (torch.optim.Adagrad, {}), (torch.optim.AdamW, {})]
)
def test_states_of_an_optimizer_are_not_lost_in_silence(kind: Any, arguments: dict[str, float]) -> None:
    model = nn.Linear(3, 2)
    optimizer = kind(model.parameters(), lr=0.1, **arguments)
    model(ones()).sum().backward()
    optimizer.step()
    with ps.join(memory=1 << 20, window=8 << 20) as kv:
        with pytest.raises(InvalidArgument, match=f"optimizer, {kind.__name__}, has states, .*state.clear"):
            ps.attach(kv, model, optimizer)
        optimizer.state.clear()
        attached_now = ps.attach(kv, model, optimizer)
        with pytest.raises(InvalidArgument, match="give the optimizer all parameters before"):
            attached_now.add_param_group({"params": [nn.Parameter(torch.zeros(2))]})
        attached_now.detach()


def train(model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
    for step in range(STEPS):
        optimizer.zero_grad()
        model(torch.eye(3) * (step + 1)).sum().backward()
        optimizer.step()


def test_a_gradient_that_was_pushed_and_not_stepped_is_an_error_at_the_end() -> None:
    model = nn.Linear(3, 2)
    kv, optimizer = attached(model, lr=0.1)
    with kv:
        train(model, optimizer)
        optimizer.zero_grad()
        model(ones()).sum().backward()  # to log its norm, perhaps
        with pytest.raises(InvalidArgument, match=r"was pushed once by a backward pass that no step\(\) followed"):
            optimizer.detach()


def with_a_head() -> nn.Sequential:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(3, 3), nn.BatchNorm1d(3), nn.Linear(3, 2))
    model.register_buffer("codes", torch.arange(3).to(torch.uint16))
    return model


def test_a_model_that_was_detached_goes_on_and_another_training_needs_a_prefix() -> None:
    model, alone = with_a_head(), with_a_head()
    head, head_alone = (torch.optim.SGD(each[2].parameters(), lr=0.1, momentum=0.9) for each in (model, alone))
    with ps.join(memory=1 << 20, window=8 << 20) as kv:
        for lr in (0.1, 0.05):
            for of in (head, head_alone):
                of.param_groups[0]["lr"] = lr
            optimizer = ps.attach(kv, model, head)
            train(model, optimizer)
            optimizer.detach()
            train(alone, head_alone)
        assert bits(model) == bits(alone)
        assert all(torch.equal(a, b) for a, b in zip(model.buffers(), alone.buffers(), strict=True))

        everything = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
        other = with_a_head()
        for which, its, why in (
            (model, everything, "but was not trained"),
            (model, torch.optim.SGD(model[2].parameters(), lr=0.1, momentum=0.9), "by another optimizer"),
            (other, torch.optim.SGD(other[2].parameters(), lr=0.1, momentum=0.9), "and has other values now"),
        ):
            with pytest.raises(InvalidArgument, match=rf"a model that was attached before, {why}.*another prefix="):
                ps.attach(kv, which, its)
        optimizer = ps.attach(kv, model, everything, prefix="all.")
        train(model, optimizer)
        optimizer.detach()
        train(alone, torch.optim.SGD(alone.parameters(), lr=0.1, momentum=0.9))
    assert bits(model) == bits(alone)


def test_other_hooks_find_new_values_and_those_of_the_optimizer_are_called() -> None:
    model, alone = nn.Linear(3, 2), nn.Linear(3, 2)
    alone.load_state_dict(model.state_dict())
    steps: list[int] = []
    trained: list[tuple[nn.Module, torch.optim.Optimizer]] = []
    with ps.join(memory=1 << 20, window=8 << 20) as kv:
        for each in (model, alone):
            prune.l1_unstructured(each, "weight", amount=2)  # a hook computes the weight before each forward pass
            optimizer: torch.optim.Optimizer = torch.optim.SGD(each.parameters(), lr=0.1)
            optimizer.register_step_post_hook(lambda *_: steps.append(1))
            if each is model:
                optimizer = ps.attach(kv, each, optimizer, overlap_forward=True)
            train(each, optimizer)
            trained.append((each, optimizer))
        trained[0][1].detach()  # type: ignore[attr-defined]
    assert bits(model) == bits(alone)
    assert len(steps) == 2 * STEPS


def test_tensors_that_cannot_be_shared_are_named() -> None:
    model = nn.Sequential(nn.Linear(3, 3), nn.Linear(3, 3))
    model[1].weight.data = model[0].weight.data
    with ps.join(memory=1 << 20, window=8 << 20) as kv:
        with pytest.raises(InvalidArgument, match=r"'1.weight' and '0.weight' are two parameters with the same memory"):
            ps.attach(kv, model, torch.optim.SGD(model.parameters(), lr=0.1))
        model = nn.Sequential(nn.Linear(3, 3))
        model.register_buffer("edges", torch.eye(3).to_sparse())
        with pytest.raises(InvalidArgument, match=r"'edges' has the layout torch.sparse_coo"):
            ps.attach(kv, model, torch.optim.SGD(model.parameters(), lr=0.1))


def test_gradients_that_are_set_by_hand_are_pushed() -> None:
    model = nn.Linear(3, 1, bias=False)
    before = model.weight.detach().clone()
    kv, optimizer = attached(model, lr=1.0)
    with kv:
        for _ in range(3):
            (model.weight.grad,) = torch.autograd.grad(model(ones()).sum(), [model.weight])
            optimizer.step()
        optimizer.detach()
    assert torch.allclose(before - model.weight, torch.full((1, 3), 3.0))


def test_gradients_that_are_changed_after_backward_are_an_error() -> None:
    model = nn.Linear(3, 1, bias=False)
    kv, optimizer = attached(model, lr=1.0)
    with kv:
        for step in range(3):  # the first step pushes in step(), later ones in backward
            model(ones(100)).sum().backward()
            if step == 1:
                optimizer.step()
                continue
            nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            with pytest.raises(InvalidArgument, match="the gradient of 'weight' was changed after backward"):
                optimizer.step()
            optimizer.zero_grad()
        optimizer.detach()


def test_a_closure_is_called_once() -> None:
    model, alone = nn.Linear(3, 1), nn.Linear(3, 1)
    alone.load_state_dict(model.state_dict())
    kv, optimizer = attached(model, lr=0.1)

    def losses(net: nn.Module, optimizer: torch.optim.Optimizer) -> list[float]:
        def closure() -> torch.Tensor:
            optimizer.zero_grad()
            loss = net(ones()).square().sum()
            loss.backward()
            return loss

        with torch.no_grad():
            return [optimizer.step(closure).item() for _ in range(4)]

    with kv:
        assert losses(model, optimizer) == losses(alone, torch.optim.SGD(alone.parameters(), lr=0.1))
        optimizer.detach()
    assert bits(model) == bits(alone)


@on_ranks(2)
def test_a_model_in_ddp_is_told_so(me: Rank) -> None:
    """Attaches a model that is wrapped: DDP averages gradients after they were pushed."""
    model = nn.Linear(3, 1)
    with me.join(), one_host.join(me) as kv:
        optimizer = ps.attach(kv, model, torch.optim.SGD(model.parameters(), lr=0.1))
        wrapped = nn.parallel.DistributedDataParallel(model)
        with pytest.raises(InvalidArgument) as raised:
            for _ in range(3):
                optimizer.zero_grad()
                wrapped(ones(me.rank + 1)).sum().backward()
                optimizer.step()
        optimizer.detach()
        text = str(raised.value)
        assert "The model is wrapped in DistributedDataParallel" in text


def test_a_gradient_of_an_old_value_is_an_error() -> None:
    model = nn.Linear(3, 1, bias=False)
    kv, optimizer = attached(model, lr=1.0, overlap_forward=True)
    with kv:
        model(ones()).sum().backward()
        optimizer.step()
        nn.functional.linear(ones(), model.weight).sum().backward()  # nothing knows that the weight is needed
        with pytest.raises(InvalidArgument, match="its gradient was computed before its new value had come"):
            optimizer.step()
        optimizer.detach()


def clips_or_not(me: Rank) -> str:
    model = nn.Linear(3, 1)
    with one_host.join(me) as kv:
        try:
            ps.attach(kv, model, torch.optim.SGD(model.parameters(), lr=0.1), max_norm=1.0 if me.rank else None)
        except InvalidArgument as error:
            return str(error)
    return ""


def test_all_workers_clip_alike() -> None:
    errors = sorted(run(clips_or_not, 2))
    assert errors[0] == ""
    assert "max_norm is" in errors[1]
    assert "give all workers the same" in errors[1]


def test_forward_passes_before_step_have_the_old_values() -> None:
    model = nn.Linear(3, 1, bias=False)
    kv, optimizer = attached(model, lr=1.0)
    with kv:
        for _ in range(2):
            before = model(ones())
            before.sum().backward()
            assert model(ones()).equal(before)
            optimizer.step()
        assert not model(ones()).equal(before)
        optimizer.detach()


# ---- what is shared --------------------------------------------------------------------------------------------------


class Body(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.body, self.norm, self.head = nn.Linear(3, 3), nn.BatchNorm1d(3), nn.Linear(3, 1)
        self.body.requires_grad_(False)
        self.register_buffer("places", torch.randint(100, (1, 4)).expand(2, 4))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.head(self.norm(self.body(x)))


def shares(me: Rank, all_of_it: bool) -> list[list[float]]:
    torch.manual_seed(me.rank)
    model = Body()
    with one_host.join(me) as kv:
        trained = model.parameters() if all_of_it else model.head.parameters()
        optimizer = ps.attach(kv, model, torch.optim.SGD(trained, lr=0.1))
        begun = [each.flatten().tolist() for each in model.state_dict().values()]
        for step in range(3):
            if step == 1:
                model.body.requires_grad_(True)
            optimizer.zero_grad()
            model(torch.arange(12.0).view(4, 3)).sum().backward()
            optimizer.step()
        optimizer.pull()
        moved = model.body.weight.flatten().tolist() != begun[list(model.state_dict()).index("body.weight")]
        assert moved is all_of_it
        optimizer.detach()
    return begun


@pytest.mark.parametrize("all_of_it", [True, False])
def test_all_begin_alike_and_a_parameter_may_be_trained_later(all_of_it: bool) -> None:
    first, second = run(shares, 2, all_of_it)
    assert first == second


def test_two_models_need_a_prefix() -> None:
    actor, critic = nn.Linear(3, 3), nn.Linear(3, 3)
    kv, optimizer = attached(actor, lr=0.1)
    with kv:
        with pytest.raises(InvalidArgument, match=r"'bias' belongs to another model .* a prefix= of its own"):
            ps.attach(kv, critic, torch.optim.SGD(critic.parameters(), lr=0.1))
        ps.attach(kv, critic, torch.optim.SGD(critic.parameters(), lr=0.1), prefix="critic.").detach()
        both = nn.Sequential(actor, critic)
        with pytest.raises(
            InvalidArgument, match=r"'both.0.weight' is trained by another attached optimizer, as 'weight'"
        ):
            ps.attach(kv, both, torch.optim.SGD(both.parameters(), lr=0.1), prefix="both.")
        optimizer.detach()
        ps.attach(kv, actor, optimizer._optimizer).detach()


# ---- settings --------------------------------------------------------------------------------------------------------


def cycle(optimizer: torch.optim.Optimizer) -> Any:
    return torch.optim.lr_scheduler.OneCycleLR(optimizer, max_lr=0.1, total_steps=6)


@pytest.mark.parametrize("kind", [torch.optim.SGD, torch.optim.AdamW, torch.optim.NAdam])
@pytest.mark.parametrize("of_attached", [True, False])
@pytest.mark.filterwarnings("ignore:Detected call of `lr_scheduler.step")
def test_a_schedule_has_the_bits_of_one_process(kind: Any, of_attached: bool) -> None:
    arguments = {"lr": 0.1, "momentum": 0.9} if kind is torch.optim.SGD else {"lr": 0.1}
    model, alone = nn.Linear(3, 2), nn.Linear(3, 2)
    alone.load_state_dict(model.state_dict())
    given = kind(model.parameters(), **arguments)
    with ps.join(memory=1 << 20, window=8 << 20) as kv:
        optimizer = ps.attach(kv, model, given)
        by_itself = kind(alone.parameters(), **arguments, foreach=False)
        for each, its, scheduled in (
            (model, optimizer, cycle(optimizer if of_attached else given)),
            (alone, by_itself, cycle(by_itself)),
        ):
            for step in range(5):
                its.zero_grad()
                each(ones(step)).square().sum().backward()
                its.step()
                scheduled.step()
        optimizer.detach()
    assert bits(model) == bits(alone)


def test_settings_that_change_between_backward_and_step_hold_or_are_an_error() -> None:
    model = nn.Linear(3, 1, bias=False)
    kv, optimizer = attached(model, lr=1.0)
    before = model.weight.detach().clone()
    with kv:
        for step in range(2):
            optimizer.zero_grad()
            model(ones()).sum().backward()
            optimizer.param_groups[0]["lr"] = 2.0 + step
            optimizer.step()
        optimizer.pull()
        assert torch.allclose(before - model.weight, torch.full((1, 3), 5.0))
        optimizer.detach()
        optimizer = ps.attach(kv, model, torch.optim.SGD(model.parameters(), lr=1.0), prefix="again.")
        for step in range(2):
            optimizer.zero_grad()
            model(ones()).sum().backward()
            if step == 1:
                optimizer.param_groups[0]["lr"] = 2.0
                with pytest.raises(InvalidArgument, match=r"have changed after 'again.weight' was pushed once"):
                    optimizer.step()
            else:
                optimizer.step()
        optimizer.detach()


def test_a_parameter_may_not_move_to_another_group() -> None:
    model = nn.Linear(3, 1)
    groups = [{"params": [model.weight, model.bias], "lr": 0.1}, {"params": [], "lr": 0.001}]
    with ps.join() as kv:
        optimizer = ps.attach(kv, model, torch.optim.SGD(groups))
        first, second = (group["params"] for group in optimizer.param_groups)
        first.reverse()
        model(ones()).sum().backward()
        optimizer.step()
        second.append(first.pop())
        model(ones()).sum().backward()
        with pytest.raises(InvalidArgument, match="the parameters of param_groups have changed since attach"):
            optimizer.step()
        first.append(second.pop())
        optimizer.detach()


def test_a_setting_may_change_inside_a_list() -> None:
    model, alone = nn.Linear(3, 1), nn.Linear(3, 1)
    alone.load_state_dict(model.state_dict())
    by_itself = torch.optim.Adam(alone.parameters(), lr=0.1, foreach=False)
    kv, optimizer = attached(model, torch.optim.Adam, lr=0.1)
    with kv:
        for step in range(4):
            for net, each in ((model, optimizer), (alone, by_itself)):
                if step == 1:
                    each.param_groups[0]["betas"] = [0.5, 0.9]
                elif step == 2:
                    each.param_groups[0]["betas"][0] = 0.95
                each.zero_grad()
                net(ones(step)).sum().backward()
                each.step()
        optimizer.detach()
    assert bits(model) == bits(alone)


def test_load_state_dict_takes_settings_and_no_states() -> None:
    model = nn.Linear(3, 2)
    kv, optimizer = attached(model, torch.optim.Adam, lr=0.1)
    with kv:
        saved = optimizer.state_dict()
        saved["param_groups"][0]["lr"] = 0.01
        optimizer.load_state_dict(saved)
        model(ones()).sum().backward()
        optimizer.step()
        optimizer.pull()
        with pytest.raises(InvalidArgument, match=r"kv.snapshot\(\)"):
            optimizer.load_state_dict(saved | {"state": {0: {"step": torch.tensor(1.0)}}})
        optimizer._optimizer.load_state_dict(saved)
        with pytest.raises(InvalidArgument, match="have been replaced, by load_state_dict"):
            optimizer.step()
        optimizer.detach()


def resumes(me: Rank, path: str, lr: float) -> list[bytes]:
    model = nn.Linear(3, 2)
    with one_host.join(me) as kv:
        assert "weight" in kv.restore(path)  # every worker may call it
        optimizer = ps.attach(kv, model, torch.optim.Adam(model.parameters(), lr=lr))
        model(ones()).sum().backward()
        optimizer.step()
        optimizer.detach()
    return bits(model)


@pytest.mark.parametrize("lr", [0.05, 0.01])
def test_a_snapshot_goes_on_with_the_same_or_another_learning_rate(lr: float, tmp_path: Path) -> None:
    model, alone = nn.Linear(3, 2), nn.Linear(3, 2)
    alone.load_state_dict(model.state_dict())
    kv, optimizer = attached(model, torch.optim.Adam, lr=0.1)
    by_itself = torch.optim.Adam(alone.parameters(), lr=0.1, foreach=False)
    for each, its in ((model, optimizer), (alone, by_itself)):
        for _ in range(2):
            its.zero_grad()
            each(ones()).sum().backward()
            its.step()
            its.param_groups[0]["lr"] = 0.05
    with kv:
        optimizer.pull()
        kv.update_arguments(["weight", "bias"], lr=0.05)  # not in a round yet, and in the snapshot all the same
        kv.snapshot(tmp_path / "saved").wait()
        optimizer.detach()
    by_itself.param_groups[0]["lr"] = lr
    by_itself.zero_grad()
    alone(ones()).sum().backward()
    by_itself.step()
    assert run(resumes, 2, str(tmp_path / "saved"), lr) == [bits(alone)] * 2


def clips(me: Rank) -> tuple[list[bytes], float]:
    torch.manual_seed(3)
    model = nn.Linear(3, 2).double()
    with one_host.join(me) as kv:
        optimizer = ps.attach(kv, model, torch.optim.SGD(model.parameters(), lr=0.1), max_norm=0.5)
        for step in range(3):
            optimizer.zero_grad()
            model(ones(step + 10.0 * me.rank).double()).square().sum().backward()
            optimizer.step()
        optimizer.detach()
        assert optimizer.total_norm is not None
        return [p.detach().tolist() for p in model.parameters()], optimizer.total_norm.item()


def test_the_average_of_all_workers_is_clipped() -> None:
    torch.manual_seed(3)
    model = nn.Linear(3, 2).double()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for step in range(3):
        optimizer.zero_grad()
        for rank in range(2):
            (model(ones(step + 10.0 * rank).double()).square().sum() / 2).backward()
        norm = nn.utils.clip_grad_norm_(model.parameters(), 0.5)
        optimizer.step()
    for values, total in run(clips, 2):
        assert total == pytest.approx(norm.item(), rel=1e-12)
        for mine, p in zip(values, model.parameters(), strict=True):
            torch.testing.assert_close(torch.tensor(mine, dtype=torch.float64), p.detach(), rtol=1e-12, atol=1e-12)


def test_values_are_on_the_cpu_whatever_the_default_device() -> None:
    model, ids = nn.BatchNorm1d(3), torch.tensor([5, 6])
    with torch.device("meta"), ps.join(memory=8 << 20, window=8 << 20) as kv:
        optimizer = ps.attach(kv, model, torch.optim.NAdam(model.parameters()), max_norm=1.0)  # which runs in torch
        optimizer.step()
        model(torch.ones(2, 3, device="cpu")).sum().backward()
        optimizer.step()
        assert kv.follow(model).version == 2
        table = ps.Embedding(kv, "t", 2, update=ps.reduce("sum"))
        begun = table.pull([5, 6])
        table.push([5, 6], [[1.0, 2.0], [3.0, 4.0]]).wait()
        table(ids).sum().backward()
        table.flush()
        ended = table.pull(ids)
    assert (ended - begun).round().tolist() == [[2, 3], [4, 5]]


def test_unsuitable_optimizers_and_foreign_parameters_are_refused() -> None:
    model = nn.Linear(3, 2)
    with ps.join(memory=1 << 20, window=8 << 20) as kv:
        with pytest.raises(InvalidArgument, match=r"torch.optim.LBFGS cannot update blocks of a tensor"):
            ps.attach(kv, model, torch.optim.LBFGS(model.parameters()))
        with pytest.raises(InvalidArgument, match=r"the optimizer has a parameter \(2, 2\) that model has not"):
            ps.attach(kv, model, torch.optim.SGD([nn.Parameter(torch.zeros(2, 2))], lr=0.1))


def test_the_example_by_itself() -> None:
    assert "worker 0: the bits of one process" in alone("examples/train_push_pull.py", "--epochs", "3")


@pytest.mark.parametrize("mode", ("sync", "asynchronous", "ssp"))
def test_the_example_on_two_ranks(mode: str) -> None:
    output = ranks("examples/train_push_pull.py", "--mode", mode, "--epochs", "5")
    assert output.count("the bits of one process") == (2 if mode == "sync" else 0)
    assert output.count("worker") >= 2
