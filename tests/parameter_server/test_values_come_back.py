"""push_pull of more than is under way at once: new values come back while others are still being pushed."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from distributed.harness import Rank, on_ranks

import ringreduce.parameter_server as ps
from ringreduce.errors import InvalidArgument

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
        assert pending.calls["w"].versions == [1] * (COUNT * 4 >> 18)


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


@on_ranks(2, returns=[[2.0, 4.0, 6.0]] * 2)
def test_workers_may_push_in_another_order(me: Rank) -> list[float]:
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


def test_an_output_with_other_memory_is_an_error_once() -> None:
    with ps.join(**SIZES) as kv:
        kv.init("w", torch.zeros(COUNT), update=ps.reduce("sum"))
        out = torch.zeros(COUNT)
        pending = kv.push_pull("w", counted(1), out=out)
        out.data = torch.zeros(COUNT)
        with pytest.raises(InvalidArgument, match="'w' got other memory while it was pulled"):
            pending.wait()
        assert pending.wait() == [] and not out.any()  # the push is in, and nothing is written
        kv.pull("w", out)
        assert torch.equal(out, counted(1))


def test_new_values_count_as_a_change_when_they_come() -> None:
    with ps.join(**SIZES) as kv:
        w = torch.ones(10, requires_grad=True)
        kv.init("w", w.detach())
        pending = kv.push_pull("w", torch.full((10,), 2.0), out=w.data)
        loss = (w * w).sum()  # autograd keeps w, which changes after this
        pending.wait()
        with torch.inference_mode():
            kv.push_pull("w", torch.full((10,), 3.0), out=torch.empty(10)).wait()
        versions = w._version
        kv.push_pull("w", torch.full((10,), 3.0), out=w).wait()
        assert w._version > versions
        with pytest.raises(RuntimeError, match="modified by an inplace operation"):
            loss.backward()


@on_ranks(2)
def test_new_values_are_of_one_round(me: Rank) -> None:
    """Another push to the same key before the first one's values have been waited for."""
    found = []
    with ps.join(me.store, rank=me.rank, size=me.size, **SIZES) as kv:
        kv.init("w", torch.zeros(COUNT), update=ps.reduce("sum"))
        kv.barrier()
        for _ in range(8):
            first, second = torch.empty(COUNT), torch.empty(COUNT)
            pending = kv.push_pull("w", torch.ones(COUNT), out=first)
            again = kv.push_pull("w", torch.ones(COUNT), out=second)
            kv.wait(pending, again)
            found += [first.unique().tolist(), second.unique().tolist()]
        kv.barrier()
    assert all(len(values) == 1 for values in found), found
    assert [values for values in found[1::2]] == [[4.0 * (i + 1)] for i in range(8)]
