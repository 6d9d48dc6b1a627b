"""The parameter server over real networks: slow ones, ones that lose frames, and cables that are pulled."""

from __future__ import annotations

import time
from typing import Any

import pytest
import torch
from net.network import Network
from net.ranks import Rank, Ranks, run

import ringreduce.parameter_server as ps
from ringreduce.errors import CollectiveTimeout, ServerLost

SMALL: dict[str, Any] = {"window": 4 << 20, "memory": 64 << 20, "block_bytes": 4096, "timeout": 30.0}


def join(me: Rank, **options: Any) -> ps.KeyValue:
    return ps.join(me.store, rank=me.rank, size=me.size, **(SMALL | options))


def gradient(worker: int, step: int, count: int) -> torch.Tensor:
    return torch.randn(count, generator=torch.Generator().manual_seed(1000 * worker + step))


def train(me: Rank, count: int, steps: int) -> list[float]:
    with join(me) as kv:
        w = torch.linspace(-1, 1, count)
        kv.init("w", w, update=ps.optimizer(torch.optim.AdamW, lr=0.01), mode=ps.sync(average=False))
        for step in range(steps):
            assert kv.push_pull("w", gradient(me.rank, step, count), out=w).wait() == []
        return w.tolist()


def alone(workers: int, count: int, steps: int) -> list[float]:
    parameter = torch.nn.Parameter(torch.linspace(-1, 1, count))
    optimizer = torch.optim.AdamW([parameter], lr=0.01, foreach=False)
    for step in range(steps):
        total = gradient(0, step, count)
        for worker in range(1, workers):
            total = total + gradient(worker, step, count)
        parameter.grad = total
        optimizer.step()
    return parameter.tolist()


@pytest.mark.parametrize(
    ("network", "placement"),
    [
        ({"hosts": 2}, 2),
        ({"hosts": 3, "interfaces": 2}, [0, 1, 1, 2]),
        ({"hosts": 2, "delay": 2e-3, "loss": 0.02}, [0, 1]),
    ],
    ids=["two hosts", "two interfaces", "losses"],
)
def test_the_bits_are_those_of_one_process(network: dict[str, Any], placement: Any) -> None:
    with Network(**network) as made:
        values = run(made, placement, train, 20_000, 4)
    assert values == [alone(len(values), 20_000, 4)] * len(values)


def pushes_two(me: Rank) -> tuple[int, int]:
    """12 MB, and then 4 KB that are urgent, at 12.5 MB/s."""
    if me.rank == 1:
        with ps.join(me.store, role="worker", timeout=30.0) as kv:
            me.store.set("joined", "")
            me.store.get("made")
            first = kv.push("large", torch.ones(3 << 20))
            second = kv.push("small", torch.ones(1024), priority=1)
            second.wait()
            done = len(first.calls["large"].answers)
            first.wait()
            return done, len(first.calls["large"].answers)
    with ps.join(me.store, rank=0, size=1, listen=True, **(SMALL | {"window": 64 << 20, "block_bytes": 1 << 20})) as kv:
        kv.init({"large": torch.zeros(3 << 20), "small": torch.zeros(1024)}, mode=ps.asynchronous())
        me.store.set("made", "")
        me.store.get("joined")  # else it may be over before the other comes
    return 0, 0


def test_what_is_urgent_overtakes_what_waits() -> None:
    with Network(hosts=2, rate="100mbit") as network:
        done, all_of_them = run(network, [0, 1], pushes_two)[1]
    assert done < all_of_them == 12


def outlives_cable(me: Rank) -> tuple[str, float]:
    kv = join(me)
    w = torch.zeros(5000)
    kv.init("w", w, update=ps.reduce("sum"))
    kv.push("w", torch.ones(5000)).wait()
    me.report("ready")
    me.hear()
    lost = f"server {1 - me.rank}"
    with pytest.raises((ServerLost, CollectiveTimeout)) as raised:
        for _ in range(100):  # the other is waited for until its connection is given up
            kv.push_pull("w", torch.ones(5000), out=w).wait(20)
    assert isinstance(raised.value, ServerLost) and str(raised.value).startswith(f"{lost} ("), raised.value
    kv.calls.close()
    return str(raised.value), time.monotonic()


def test_a_server_behind_a_cable_that_is_pulled_is_lost_by_name() -> None:
    with (
        Network(hosts=2) as network,
        Ranks(network, [0, 1], outlives_cable, env={"RINGREDUCE_DEAD_AFTER": "2"}) as ranks,
    ):
        ranks.reports()
        network.set_link(1, up=False)
        pulled = time.monotonic()
        ranks.tell("pulled")
        for said, ended in ranks.results():
            assert " is lost to this worker: " in said and "MTU" not in said and ended - pulled < 10


def outlives_flaps(me: Rank) -> list[float]:
    with join(me) as kv:
        w = torch.zeros(20_000)
        kv.init("w", w, update=ps.reduce("sum"))
        kv.barrier()
        me.report("ready")
        for _ in range(200):
            kv.push_pull("w", torch.ones(20_000), out=w).wait()
        return [float(w.min()), float(w.max())]


def test_a_network_that_comes_back_loses_nothing() -> None:
    with Network(hosts=2, rate="100mbit") as network, Ranks(network, [0, 1], outlives_flaps) as ranks:
        ranks.reports()
        for host in (0, 1):
            network.flap(host, 0.5)
        assert ranks.results() == [[400.0, 400.0]] * 2
