"""`update_arguments`: settings of an update change at the same round for all, on servers, backups and tables."""

from __future__ import annotations

import math
import time
from typing import Any

import bodies.parameter_server as one_host
import numpy as np
import pytest
import test_backups as backed_up
import torch
from bodies.parameter_server import COUNT, STEPS, gradient
from distributed.harness import Rank, Ranks, on_ranks, run

import ringreduce.parameter_server as ps
from ringreduce.errors import InvalidArgument

KINDS = [
    (torch.optim.SGD, {"lr": 0.1, "momentum": 0.9}),
    (torch.optim.Adam, {"lr": 0.1, "betas": (0.9, 0.99)}),
    (torch.optim.Adamax, {"lr": 0.1, "betas": (0.9, 0.99)}),
]


def settings(kind: Any, step: int) -> dict[str, Any]:
    lr = 0.1 / (1 + step)
    return {"lr": lr, "momentum": 0.9 - lr} if kind is torch.optim.SGD else {"lr": lr, "betas": (0.9 - lr, 0.99)}


def alone(kind: Any, arguments: dict[str, Any], workers: int) -> bytes:
    parameter = torch.nn.Parameter(torch.linspace(-1, 1, COUNT))
    optimizer = kind([parameter], **arguments, foreach=False)
    for step in range(STEPS):
        optimizer.param_groups[0] |= settings(kind, step)
        total = gradient(0, step, COUNT)
        for worker in range(1, workers):
            total = total + gradient(worker, step, COUNT)
        parameter.grad = total / workers
        optimizer.step()
    return parameter.detach().numpy().tobytes()


def train(kv: ps.KeyValue, worker: int, kind: Any, arguments: dict[str, Any], changes: bool) -> bytes:
    w = torch.linspace(-1, 1, COUNT)
    kv.init("w", w, update=ps.optimizer(kind, **arguments))
    for step in range(STEPS):
        if changes:
            kv.update_arguments("w", **settings(kind, step))
        if worker == 0:
            time.sleep(0.002)  # the others are ahead, and their changes are for a round that has not begun
        kv.push_pull("w", gradient(worker, step, COUNT), out=w).wait()
    return w.numpy().tobytes()


def by_all_or_one(me: Rank, kind: Any, arguments: dict[str, Any], by_all: bool) -> bytes:
    with one_host.join(me) as kv:
        return train(kv, me.rank, kind, arguments, by_all or me.rank == 1)


@pytest.mark.parametrize(("kind", "arguments"), KINDS)
@pytest.mark.parametrize("by_all", [True, False])
def test_they_hold_from_the_next_round_of_the_worker(kind: Any, arguments: dict[str, Any], by_all: bool) -> None:
    assert run(by_all_or_one, 3, kind, arguments, by_all) == [alone(kind, arguments, 3)] * 3


def with_backups(me: Rank, kind: Any, arguments: dict[str, Any], *dooms: Any) -> Any:
    if me.rank < backed_up.SERVERS:
        return backed_up.serve(me, *dooms)
    with backed_up.worker(me) as kv:
        return train(kv, kv.worker - backed_up.SERVERS, kind, arguments, True)


@pytest.mark.slow
@pytest.mark.parametrize("step", ["taken", "logged", "updated", "answered"])
@pytest.mark.parametrize(("kind", "arguments", "times"), [(*KINDS[0], 5), (*KINDS[1], 9)])
def test_a_backup_has_them(kind: Any, arguments: dict[str, Any], step: str, times: int) -> None:
    size = backed_up.SERVERS + backed_up.WORKERS
    with Ranks(with_backups, size, kind, arguments, (1, "server", step, times)) as ranks:
        found = ranks.results(but=(1,))
        assert backed_up.was_killed(ranks, 1)
    assert found[backed_up.SERVERS - 1 :] == [alone(kind, arguments, backed_up.WORKERS)] * backed_up.WORKERS


def contradicts(me: Rank) -> str:
    with one_host.join(me) as kv:
        kv.init("w", torch.zeros(3), update=ps.optimizer(torch.optim.SGD, lr=0.1))
        said = ""
        try:
            kv.update_arguments("w", lr=0.2 + me.rank)
        except InvalidArgument as error:
            said = str(error)
        kv.barrier()
        kv.push("w", torch.ones(3)).wait()
    return said


def test_two_values_for_a_round_are_an_error() -> None:
    first, second = sorted(run(contradicts, 2))
    assert first == "" and second.startswith("update_arguments() of 'w': another worker has given another value")


def test_what_cannot_change_is_named() -> None:
    with ps.join(memory=1 << 20, window=8 << 20) as kv:
        kv.init("sgd", torch.zeros(3), update=ps.optimizer(torch.optim.SGD, lr=0.1))
        kv.init("mean", torch.zeros(3))
        for arguments, said in (
            ({"nesterov": True}, "nesterov of 'sgd' cannot be changed; of this rule, dampening, lr, momentum"),
            ({"momentum": 0.9}, "momentum of 'sgd' cannot become 0.9"),
            ({"lr": -1.0}, "Invalid learning rate: -1.0"),
            ({"lr": math.nan}, "lr of 'sgd' is nan"),
            ({"lr": "fast"}, "lr of 'sgd' is 'fast'"),
            ({"lr": True}, "lr of 'sgd' is True"),
            ({}, "no arguments to change are given for 'sgd'"),
        ):
            with pytest.raises(InvalidArgument, match=said):
                kv.update_arguments("sgd", **arguments)
        with pytest.raises(InvalidArgument, match="none of its arguments can"):
            kv.update_arguments("mean", lr=0.1)
        with pytest.raises(InvalidArgument, match="key is empty"):
            kv.update_arguments([], lr=0.1)
        kv.init("adam", torch.zeros(3), update=ps.optimizer(torch.optim.Adam, lr=0.1))
        for betas in (0.9, (0.9,), (0.9, True), "ab"):
            with pytest.raises(InvalidArgument, match=r"betas of 'adam' is .*; it must be a pair of numbers"):
                kv.update_arguments("adam", betas=betas)


def test_numbers_of_numpy_are_numbers() -> None:
    with ps.join(memory=1 << 20, window=8 << 20) as kv:
        kv.init("w", torch.zeros(3), update=ps.optimizer(torch.optim.SGD, lr=np.float32(0.5)))
        kv.push("w", torch.ones(3)).wait()
        kv.update_arguments("w", lr=np.float64(0.25))
        assert kv.push_pull("w", torch.ones(3), out=(w := torch.zeros(3))).wait() == []
        assert w.tolist() == [-0.75] * 3


def initialises_differently(me: Rank) -> str:
    with one_host.join(me) as kv:
        try:
            kv.init("w", torch.zeros(3), update=ps.optimizer(torch.optim.SGD, lr=0.1 * (1 + me.rank)))
        except InvalidArgument as error:
            return str(error)
    return ""


def test_different_arguments_are_named() -> None:
    first, second = sorted(run(initialises_differently, 2))
    assert first == ""
    assert second.startswith("update of 'w' differs: its lr is 0.")


@pytest.mark.parametrize("mode", [ps.sync(), ps.asynchronous()])
def test_a_table_takes_another_learning_rate(mode: ps.Mode) -> None:
    with ps.join(memory=8 << 20, window=8 << 20) as kv:
        table = ps.Embedding(kv, "t", 2, update=ps.optimizer(torch.optim.SGD, lr=1.0), mode=mode)
        before = table.pull([7]).clone()
        table.push([7], torch.ones(1, 2)).wait()
        table.update_arguments(lr=0.5)
        table.push([7], torch.ones(1, 2)).wait()
        assert torch.allclose(before - table.pull([7]), torch.full((1, 2), 1.5))
        with pytest.raises(InvalidArgument, match=r"^momentum of 't' cannot become 0.9"):
            table.update_arguments(momentum=0.9)


@on_ranks(2, returns=[([], 1.5)] * 2)
def test_an_infinite_grace_waits_for_all(me: Rank) -> tuple[list[str], float]:
    with one_host.join(me) as kv:
        w = torch.zeros(3)
        kv.init("w", w, mode=ps.sync(quorum=1, grace=math.inf))
        kv.barrier()
        if me.rank == 1:
            time.sleep(0.3)
        return kv.push_pull("w", torch.full((3,), 1.0 + me.rank), out=w).wait(), w[0].item()
