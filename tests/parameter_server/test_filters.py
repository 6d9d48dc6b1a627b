"""`push_wire` and `pull_wire`: what is rounded on its way to other hosts, what is not, and that training gets there."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from bodies.parameter_server import APART, join, placed
from distributed.harness import Rank, on_ranks, run

import ringreduce.parameter_server as ps
from ringreduce import _C
from ringreduce.errors import CollectiveTimeout, InvalidArgument
from ringreduce.parameter_server.placement import cut, place

COUNT = 5000  # five blocks of which the last is smaller, and no multiple of what is packed together
WIRES = ("bfloat16", "int8")


def rounded(wire: str, values: torch.Tensor) -> torch.Tensor:
    """As they arrive."""
    out = values.clone()
    _C.round(wire, out.data_ptr(), out.numel())
    return out


def pushes(worker: int, step: int) -> torch.Tensor:
    return torch.randn(COUNT, generator=torch.Generator().manual_seed(100 * worker + step))


def blocks(key: str) -> list[tuple[int, slice]]:
    """Of one of two keys that were made in this order: the server of each block, which holds these elements."""
    parts, loads = cut(COUNT, 1024), [0, 0]
    for made in ("w", "exact"):
        servers = place([4 * count for _, count in parts], loads)
        if made == key:
            break
        for server, (_, count) in zip(servers, parts, strict=True):
            loads[server] += 4 * count
    return [(server, slice(begin, begin + count)) for server, (begin, count) in zip(servers, parts, strict=True)]


def sends(me: Rank, push_wire: str, pull_wire: str, lent: bool) -> tuple[Any, Any]:
    """Returns the sum as it was pulled, and as it is."""
    with join(me) as kv:
        for key, pull in (("w", pull_wire), ("exact", "float32")):
            kv.init(key, torch.zeros(COUNT), update=ps.reduce("sum"), push_wire=push_wire, pull_wire=pull)
        found, exact = torch.empty(COUNT), torch.empty(COUNT)
        given = kv.empty(COUNT) if lent else torch.empty(COUNT)
        for step in range(4):
            given.copy_(pushes(me.rank, step))
            kv.push("exact", given).wait()
            kv.push_pull("w", given, out=found).wait()
            assert torch.equal(given, pushes(me.rank, step))
        kv.pull("exact", exact)
        return found.numpy().copy(), exact.numpy().copy()


def expected(wire: str, key: str, here: bool = False) -> torch.Tensor:
    """The sum of two workers on hosts of their own, or `here`, on one. One's own server takes what was pushed."""
    total, residuals = torch.zeros(COUNT), torch.zeros(2, COUNT)
    for step in range(4):
        for worker in range(2):
            given = pushes(worker, step)
            for server, block in blocks(key):
                if here or server == worker:
                    total[block] += given[block]
                    continue
                wanted = residuals[worker, block] + given[block]
                arrived = rounded(wire, wanted)
                residuals[worker, block] = wanted - arrived
                total[block] += arrived
    return total


@pytest.mark.parametrize("lent", (False, True), ids=("copied", "in the window"))
@pytest.mark.parametrize("wire", WIRES)
def test_other_hosts_get_what_is_rounded_and_the_rest_with_the_next_push(wire: str, lent: bool) -> None:
    results = run(placed, 2, APART, sends, wire, "float32", lent)
    for found, exact in results:
        assert torch.equal(torch.from_numpy(found), expected(wire, "w"))
        assert torch.equal(torch.from_numpy(exact), expected(wire, "exact"))
    # What is rounded off at last is all that is missing, however many pushes there were.
    error = (expected(wire, "w") - expected(wire, "w", here=True)).abs().max()
    assert 0 < error <= 5 / (127 if wire == "int8" else 256)


@pytest.mark.parametrize("wire", WIRES)
def test_what_is_pulled_from_other_hosts_is_rounded_once(wire: str) -> None:
    for rank, (found, exact) in enumerate(run(placed, 2, APART, sends, "float32", wire, False)):
        for server, block in blocks("w"):
            value = torch.from_numpy(exact[block])
            assert torch.equal(torch.from_numpy(found[block]), value if server == rank else rounded(wire, value))


@pytest.mark.parametrize("wire", WIRES)
def test_on_one_host_nothing_is_rounded(wire: str) -> None:
    for found, exact in run(sends, 2, wire, wire, False):
        assert torch.equal(torch.from_numpy(found), expected(wire, "w", here=True))
        assert torch.equal(torch.from_numpy(exact), expected(wire, "exact", here=True))


def pushes_infinity(me: Rank, wire: str) -> list[float]:
    if me.rank == 1:
        with join(me):
            return []
    with join(me) as kv:
        found = torch.empty(2048)
        kv.init("w", torch.zeros(2048), mode=ps.asynchronous(), push_wire=wire)
        bad = torch.ones(2048)
        bad[1024:] = torch.inf
        kv.push("w", bad).wait()
        kv.push_pull("w", torch.ones(2048), out=found).wait()
        return [float(found.min()), float(found.max())]


@pytest.mark.parametrize("wire", WIRES)
def test_an_infinity_does_not_come_back(wire: str) -> None:
    assert run(placed, 2, APART, pushes_infinity, wire)[0] == [1, 1]


@on_ranks(2, through=(placed, APART))
def test_pulls_that_are_given_up_harm_nothing(me: Rank) -> None:
    """Pulls whose time is over, while packed values are under way."""
    with join(me) as kv:
        value = torch.full((64 * 1024,), 3.0)
        kv.init("w", value, mode=ps.asynchronous(), pull_wire="bfloat16")
        kv.barrier()
        for _ in range(30):
            out = torch.empty_like(value)
            try:
                kv.pull("w", out, timeout=1e-4)
            except CollectiveTimeout:
                continue
        out = torch.empty_like(value)
        kv.pull("w", out)
        assert torch.equal(out, value)
        kv.barrier()


def test_what_cannot_be_rounded_is_refused() -> None:
    with ps.join() as kv:
        with pytest.raises(InvalidArgument, match=r"push_wire of 'a' is 'int8', which rounds float32.*int64"):
            kv.init("a", torch.zeros(3, dtype=torch.int64), mode=ps.sync(average=False), push_wire="int8")
        with pytest.raises(InvalidArgument, match=r"pull_wire of 'b' is 'bfloat16', which rounds float32.*float64"):
            kv.init("b", torch.zeros(3, dtype=torch.float64), pull_wire="bfloat16")
        with pytest.raises(InvalidArgument, match="push_wire of 'c' is 'fp4'; it must be one of float32, bf"):
            kv.init("c", torch.zeros(3), push_wire="fp4")
        kv.init("d", torch.zeros(3), push_wire="int8")
        with pytest.raises(InvalidArgument, match="give all workers the same"):
            kv.init("d", torch.zeros(3))


def learns(me: Rank, wires: tuple[str, str]) -> float:
    """Trains the network of examples/train_ddp.py on the digits; returns its test accuracy."""
    sys.path.insert(0, str(Path(__file__).parents[2] / "examples"))
    from train_ddp import Digits, make_model

    digits, model = Digits(), make_model().float()
    digits.x, digits.test_x = digits.x.float(), digits.test_x.float()
    with join(me, window=8 << 20, memory=32 << 20) as kv:
        sgd = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
        optimizer = ps.attach(kv, model, sgd, push_wire=wires[0], pull_wire=wires[1])
        for epoch in range(6):
            for x, y in digits.shards(epoch, 96, me.rank, 2):
                loss = torch.nn.functional.cross_entropy(model(x), y)
                optimizer.zero_grad()
                loss.backward()
                optimizer.step()
        optimizer.detach()
        kv.barrier()
        return float(digits.accuracy(model))


@pytest.mark.slow
def test_training_gets_as_far_with_filters() -> None:
    reached = {
        wires: min(run(placed, 2, APART, learns, wires))
        for wires in (("float32", "float32"), ("bfloat16", "bfloat16"), ("int8", "int8"))
    }
    exact = reached.pop(("float32", "float32"))
    assert exact > 0.9 and all(accuracy > exact - 0.02 for accuracy in reached.values()), (exact, reached)
