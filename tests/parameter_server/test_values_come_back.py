"""push_pull of more than is under way at once: new values come back while others are still being pushed."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from distributed.harness import Rank, run

import ringreduce.parameter_server as ps

COUNT = 1 << 21
"""Elements: 8 MB."""
SIZES: dict[str, Any] = {"window": 32 << 20, "memory": 64 << 20, "block_bytes": 1 << 18}


def counted(first: float) -> torch.Tensor:
    return torch.arange(COUNT, dtype=torch.float32) + first


def test_new_values_come_back_with_the_push() -> None:
    with ps.join(**SIZES) as kv:
        kv.init("w", torch.zeros(COUNT), update=ps.reduce("sum"))
        out = torch.zeros(COUNT)
        pending = kv.push_pull("w", counted(1), out=out)
        assert pending.wait() == [] and torch.equal(out, counted(1))
        assert pending.calls["w"].copied == [1] * (COUNT * 4 >> 18)


def test_nothing_comes_before_it_is_started() -> None:
    with ps.join(**SIZES) as kv:
        kv.init("w", torch.zeros(COUNT), update=ps.reduce("sum"))
        out = torch.zeros(COUNT)
        pending = kv.push_pull("w", counted(1), out=out, start=False)
        kv.pull("w", torch.empty(COUNT))  # which waits for the push
        assert not out.any()
        pending.start()
        assert pending.wait() == [] and torch.equal(out, counted(1))


@pytest.mark.parametrize("how", ["itself", "swapped", "one for two", "shifted", "strided"])
def test_new_values_may_go_to_what_is_pushed(how: str) -> None:
    memory = torch.arange(2 * COUNT + 1, dtype=torch.float32)
    a, b = memory[:COUNT], memory[COUNT : 2 * COUNT]
    values, out = {
        "itself": ({"a": a, "b": b}, {"a": a, "b": b}),
        "swapped": ({"a": a, "b": b}, {"a": b, "b": a}),
        "one for two": ({"a": a, "b": a}, {"a": a, "b": b}),
        "shifted": ({"a": a, "b": b}, {"a": memory[1 : COUNT + 1], "b": memory[COUNT + 1 :]}),
        "strided": ({"a": a, "b": b}, {"a": memory[: 2 * COUNT : 2], "b": torch.empty(COUNT)}),
    }[how]
    pushed = {key: value.clone() for key, value in values.items()}
    with ps.join(**SIZES) as kv:
        kv.init({"a": torch.zeros(COUNT), "b": torch.zeros(COUNT)}, mode=ps.asynchronous())
        kv.push_pull(values, out=out).wait()
        for key, value in pushed.items():
            assert torch.equal(out[key], value)
            kv.pull(key, value_there := torch.empty(COUNT))
            assert torch.equal(value_there, value)


def in_another_order(me: Rank) -> list[float]:
    with ps.join(me.store, rank=me.rank, size=me.size, **SIZES) as kv:
        keys = ["a", "b"]
        kv.init({key: torch.zeros(COUNT) for key in keys}, update=ps.reduce("sum"))
        kv.barrier()
        found = []
        for step in range(3):
            outs = {key: torch.empty(COUNT) for key in keys}
            order = keys if me.rank == 0 else keys[::-1]
            pending = [kv.push_pull(key, torch.ones(COUNT), out=outs[key]) for key in order]
            assert kv.wait(*pending) == []
            assert all(torch.equal(each, torch.full((COUNT,), 2.0 * (step + 1))) for each in outs.values())
            found.append(float(outs["a"][0]))
        return found


def test_workers_may_push_in_another_order() -> None:
    assert run(in_another_order, 2) == [[2.0, 4.0, 6.0]] * 2
