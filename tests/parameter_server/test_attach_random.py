"""Random training programs with `attach`, right and wrong ones: as one process in float64, or an error.

A program has models of linear layers, some of them frozen, tied or unused, and steps in which each worker calls
`backward` as it likes: several times, under `no_sync()`, for a loss whose gradients it then clears, or not at all, with
gradients that it sets or changes by hand.
It may use a weight before its module, or call modules without the model, and change parameters after a step.
One process replays it: each worker's gradients on a copy of the model, their average, and torch's optimizer.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import bodies.parameter_server as one_host
import pytest
import torch
from distributed.harness import Rank, run
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from torch import nn

import ringreduce.parameter_server as ps
from ringreduce.errors import InvalidArgument

WIDTH, LAYERS, STEPS = 3, 3, 4
KINDS: list[tuple[Any, dict[str, Any]]] = [
    (torch.optim.SGD, {"lr": 0.1}),
    (torch.optim.SGD, {"lr": 0.1, "momentum": 0.9, "weight_decay": 0.01}),
    (torch.optim.Adam, {"lr": 0.01}),
    (torch.optim.AdamW, {"lr": 0.01}),
    (torch.optim.Adagrad, {"lr": 0.05}),
    (torch.optim.RMSprop, {"lr": 0.01}),
    (torch.optim.NAdam, {"lr": 0.01}),
]


@dataclass
class Program:
    workers: int = 1
    kind: int = 0
    mode: str = "sync"
    models: int = 1
    own_prefixes: bool = True
    tied: bool = False
    early: bool = False
    """A weight is used before the module that owns it is called."""
    overlap_forward: bool = False
    frozen: list[int] = field(default_factory=list)
    max_norm: float | None = None
    schedule: str = "none"
    """When the learning rate changes: "none", "after step", or "before step"."""
    scheduled: str = "attached"
    """Which optimizer the scheduler has: "attached" or "given"."""
    steps: list[list[Step]] = field(default_factory=list)
    """By step and worker."""


@dataclass
class Step:
    passes: list[list[int]] = field(default_factory=list)
    """The layers that each backward pass uses."""
    quiet: int = 0
    """So many of the first passes are under no_sync()."""
    by_hand: bool = False
    """The gradients are set from torch.autograd.grad."""
    changes: str = ""
    """What happens to the gradients after backward: "", "clip" or "half"."""
    zeroes: bool = True
    zeroes_in_place: bool = False
    stray: str = ""
    """When a backward pass runs whose gradients are cleared: "", "before" zero_grad, or "after" it, before another."""
    unfreezes: bool = False
    penalty: str = ""
    """When the squares of all parameters are added to the loss: "", "after" the model's forward pass, or "before"."""
    direct: bool = False
    """The modules are called, and the model is not."""
    scales: str = ""
    """What a GradScaler does: "", "unscale" (and the optimizer's own step), or "step"."""
    alters: str = ""
    """What happens to the parameters after the step: "", "clamp", "data" (a change through .data), or "load"."""


class Net(nn.Module):
    def __init__(self, program: Program) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(WIDTH, WIDTH, dtype=torch.float64) for _ in range(LAYERS))
        if program.tied:
            self.layers[-1].weight = self.layers[0].weight  # type: ignore[union-attr]
        self.early = program.early
        self.register_buffer("scale", torch.rand(WIDTH, dtype=torch.float64) + 0.5)
        for each in program.frozen:
            self.layers[each].requires_grad_(False)

    def forward(self, x: torch.Tensor, used: list[int]) -> torch.Tensor:
        if self.early:
            # Autograd saves the weight here, as it does in most uses; what it does not save goes unnoticed.
            x = x @ self.layers[1].weight.square()  # type: ignore[operator, union-attr]
        for each in used:
            x = torch.tanh(self.layers[each](x)) * self.scale
        return x.square().mean()


def make(program: Program, seed: int) -> tuple[list[Net], list[torch.optim.Optimizer]]:
    torch.manual_seed(seed)
    models = [Net(program) for _ in range(program.models)]
    kind, arguments = KINDS[program.kind]
    return models, [kind(model.parameters(), **arguments, foreach=False) for model in models]


def squares(model: Net) -> torch.Tensor:
    return torch.stack([p.square().sum() for p in model.parameters()]).sum() / 100


def alter(model: Net, how: str) -> None:
    if how == "load":
        model.load_state_dict({name: value / 2 for name, value in model.state_dict().items()})
    for p in model.parameters() if how in ("clamp", "data") else ():
        (p.data if how == "data" else p.detach()).clamp_(-0.1, 0.1)


def compute(model: Net, step: Step, seed: int, quietly: Callable[[], Any], zero_grad: Callable[[bool], None]) -> None:
    """What a worker does to its gradients in a step. `quietly` is no_sync()."""
    generator = torch.Generator().manual_seed(seed)
    if step.unfreezes:
        model.requires_grad_(True)
    if step.stray == "after":
        zero_grad(not step.zeroes_in_place)
    if step.stray and (value := model(torch.ones(4, WIDTH, dtype=torch.float64), list(range(LAYERS)))).requires_grad:
        value.backward()
    if step.zeroes or step.stray:
        zero_grad(not step.zeroes_in_place)
    scaler = torch.amp.GradScaler("cpu", init_scale=4.0, enabled=step.scales != "")
    scaler.scale(torch.zeros(()))
    for number, used in enumerate(step.passes):
        value = torch.zeros((), dtype=torch.float64)
        if step.penalty == "before":
            value = value + squares(model)
        call = model.forward if step.direct else model
        value = value + call(torch.randn(4, WIDTH, generator=generator, dtype=torch.float64), used)
        if step.penalty == "after":
            value = value + squares(model)
        value = scaler.scale(value)
        if not value.requires_grad:
            continue
        if step.by_hand:
            trained = [p for p in model.parameters() if p.requires_grad]
            for p, gradient in zip(trained, torch.autograd.grad(value, trained, allow_unused=True), strict=True):
                p.grad = p.grad if gradient is None else gradient
            continue
        with quietly() if number < step.quiet else contextlib.nullcontext():
            value.backward()
    if step.scales:
        scaler.unscale_(torch.optim.SGD(model.parameters(), lr=1.0))
    if step.changes == "clip":
        nn.utils.clip_grad_norm_(model.parameters(), 1e-3)
    elif step.changes == "half":
        for p in model.parameters():
            p.grad = None if p.grad is None else p.grad / 2


def seed_of(worker: int, step: int, model: int) -> int:
    return 100 * worker + 10 * step + model


def values(models: list[Net]) -> list[torch.Tensor]:
    return [each.detach().clone() for model in models for each in (*model.parameters(), *model.buffers())]


def sent(tensors: list[torch.Tensor]) -> list[Any]:
    return [each.numpy() for each in tensors]


def scheduler(program: Program, optimizer: torch.optim.Optimizer) -> Any:
    return torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 1 / (1 + step))


def trained(me: Rank, program: Program) -> tuple[str, list[Any], list[Any]]:
    """Returns the error, the values at the beginning, and those at the end."""
    models, given_ones = make(program, me.rank)
    kv = one_host.join(me)
    mode = {"sync": ps.sync(), "asynchronous": ps.asynchronous(), "ssp": ps.ssp(0)}[program.mode]
    begun: list[Any] = []
    try:
        optimizers = [
            ps.attach(
                kv,
                model,
                given_one,
                mode=mode,
                prefix=f"{n if program.own_prefixes else ''}.",
                max_norm=program.max_norm,
                overlap_forward=program.overlap_forward,
            )
            for n, (model, given_one) in enumerate(zip(models, given_ones, strict=True))
        ]
        begun = sent(values(models))
        schedules = []
        if program.schedule != "none":
            schedules = [
                scheduler(program, each) for each in (optimizers if program.scheduled == "attached" else given_ones)
            ]
        for number, steps in enumerate(program.steps):
            for n, (model, optimizer) in enumerate(zip(models, optimizers, strict=True)):
                seed = seed_of(me.rank, number, n)
                compute(model, steps[me.rank], seed, optimizer.no_sync, optimizer.zero_grad)
                if program.schedule == "before step":
                    schedules[n].step()
                if steps[me.rank].scales == "step":
                    scaler = torch.amp.GradScaler("cpu")
                    scaler.scale(torch.zeros(()))
                    scaler.step(optimizer)
                else:
                    optimizer.step()
                if program.schedule == "after step":
                    schedules[n].step()
                alter(model, steps[0].alters)
        for each in optimizers:
            each.pull()
            each.detach()
    except InvalidArgument as error:
        kv.calls.close()  # the others go on without this worker
        return str(error), begun, []
    except Exception as error:  # of a worker whose neighbour has gone
        kv.calls.close()
        by_autograd = "modified by an inplace operation" in str(error)
        return f"{'' if by_autograd else 'later: '}{error}", begun, []
    kv.leave()
    return "", begun, sent(values(models))


def alone(program: Program, begun: list[torch.Tensor]) -> list[torch.Tensor]:
    """The same in one process: a copy of the models for each worker, which has its gradients."""
    models, optimizers = make(program, 0)
    workers = [make(program, 0)[0] for _ in range(program.workers)]

    def take(to: list[Net], new: list[torch.Tensor]) -> None:
        with torch.no_grad():
            for old, value in zip((e for m in to for e in (*m.parameters(), *m.buffers())), new, strict=True):
                old.copy_(value)

    take(models, begun)
    schedules = [scheduler(program, each) for each in optimizers] if program.schedule != "none" else []
    for number, steps in enumerate(program.steps):
        for worker, copies in enumerate(workers):
            take(copies, values(models))
            for n, copy in enumerate(copies):
                compute(copy, steps[worker], seed_of(worker, number, n), contextlib.nullcontext, copy.zero_grad)
        for n, (model, optimizer) in enumerate(zip(models, optimizers, strict=True)):
            for place, p in enumerate(model.parameters()):
                found = [list(copies[n].parameters())[place].grad for copies in workers]
                there = [each for each in found if each is not None]
                p.grad = torch.stack(there).sum(0) / len(workers) if there else None
                p.requires_grad_(True)
            if program.max_norm is not None:
                nn.utils.clip_grad_norm_(model.parameters(), program.max_norm)
                for copies in workers:
                    for p, mine in zip(model.parameters(), copies[n].parameters(), strict=True):
                        mine.grad = None if p.grad is None else p.grad.clone()
            if program.schedule == "before step":
                schedules[n].step()
            optimizer.step()
            if program.schedule == "after step":
                schedules[n].step()
            alter(model, steps[0].alters)
    return values(models)


def is_always_right(program: Program) -> bool:
    """Whether no error is allowed: what a worker does is as in its first step, or pushes at step()."""
    if program.models > 1 and not program.own_prefixes:
        return False
    every = [each for by_worker in program.steps for each in by_worker]
    if any(each.alters or each.scales or each.stray == "after" for each in every):
        return False
    if program.overlap_forward and (program.early or any(each.penalty for each in every)):
        return False
    for worker in range(program.workers):
        steps = [by_worker[worker] for by_worker in program.steps]
        if any(each.changes and len(each.passes) > each.quiet and not each.by_hand for each in steps):
            return False
        loud = [len(each.passes) - each.quiet for each in steps if not each.by_hand]
        if len(steps) > 1 and any(count > 1 for count in loud):
            return False
        if program.schedule == "before step" or any(each.by_hand for each in steps):
            return False
    return True


def check(program: Program) -> bool:
    """Runs a program. Returns whether it ran without an error."""
    found = run(trained, program.workers, program)
    errors = [error for error, _, _ in found if error]
    if errors:
        assert not is_always_right(program), (errors, program)
        assert any(not error.startswith("later: ") for error in errors), errors
        return False
    begun = found[0][1]
    for _, mine, _ in found:
        assert all((a == b).all() for a, b in zip(mine, begun, strict=True)), "workers do not begin alike"
    wanted = alone(program, [torch.from_numpy(each) for each in begun])
    for _, _, ended in found:
        for a, b in zip(ended, wanted, strict=True):
            torch.testing.assert_close(torch.from_numpy(a), b, rtol=1e-12, atol=1e-12)
    return True


layers = st.lists(st.integers(0, LAYERS - 1), max_size=LAYERS)
layers_of_one_pass = layers.map(lambda used: [used])
usual = st.builds(
    Step,
    passes=layers_of_one_pass,
    zeroes_in_place=st.booleans(),
    stray=st.sampled_from(["", "", "before"]),
    penalty=st.sampled_from(["", "", "after"]),
    direct=st.booleans(),
)
altered = st.builds(
    Step,
    passes=layers_of_one_pass,
    penalty=st.sampled_from(["", "", "before"]),
    direct=st.booleans(),
    alters=st.sampled_from(["", "clamp", "data", "load"]),
)
any_step = st.builds(
    Step,
    passes=st.lists(layers, max_size=3),
    quiet=st.integers(0, 3),
    by_hand=st.booleans(),
    changes=st.sampled_from(["", "", "", "clip", "half"]),
    zeroes=st.booleans(),
    zeroes_in_place=st.booleans(),
    stray=st.sampled_from(["", "", "", "before", "after"]),
    unfreezes=st.booleans(),
    penalty=st.sampled_from(["", "", "after", "before"]),
    direct=st.booleans(),
    scales=st.sampled_from(["", "", "", "unscale", "step"]),
)


@st.composite
def programs(draw: st.DrawFn) -> Program:
    workers = draw(st.integers(1, 4))
    step = draw(st.sampled_from([usual, usual | any_step, usual | altered]))
    return Program(
        workers=workers,
        kind=draw(st.integers(0, len(KINDS) - 1)),
        mode=draw(st.sampled_from(["sync", "asynchronous", "ssp"])) if workers == 1 else "sync",
        models=draw(st.integers(1, 2)),
        own_prefixes=draw(st.sampled_from([True, True, True, False])),
        tied=draw(st.booleans()),
        early=draw(st.booleans()),
        overlap_forward=draw(st.booleans()),
        frozen=draw(st.lists(st.integers(0, LAYERS - 1), max_size=2, unique=True)),
        max_norm=draw(st.sampled_from([None, None, 0.01])),
        schedule=draw(st.sampled_from(["none", "after step", "before step"])),
        scheduled=draw(st.sampled_from(["attached", "given"])),
        steps=[[draw(step) for _ in range(workers)] for _ in range(STEPS)],
    )


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore:Detected call of `lr_scheduler.step")
@settings(max_examples=100, deadline=None, suppress_health_check=list(HealthCheck))
@given(programs())
def test_as_one_process_or_an_error(program: Program) -> None:
    check(program)
