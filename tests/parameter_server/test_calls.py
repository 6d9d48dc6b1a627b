"""What calls of one process do: order by priority, abort, waiting for a first value."""

from __future__ import annotations

import threading
import time
from typing import Any

import pytest
import torch

import ringreduce.parameter_server as ps
from ringreduce.errors import Aborted, CollectiveTimeout, InvalidArgument

SMALL: dict[str, Any] = {"window": 4 << 20, "memory": 16 << 20, "block_bytes": 4096}


def test_of_updates_that_are_ready_at_once_the_most_urgent_goes_first() -> None:
    order: list[str] = []
    begun, go_on = threading.Event(), threading.Event()

    def slow(value: torch.Tensor, push: torch.Tensor, state: dict[str, Any], info: ps.Info) -> None:
        order.append(info.key)
        if info.key == "first":
            begun.set()
            assert go_on.wait(30)

    with ps.join(functions={"slow": slow}, **SMALL) as kv:
        for key in ("first", "last", "middle", "urgent"):
            kv.init(key, torch.zeros(3), update=ps.function("slow"), mode=ps.asynchronous())
        pending = [kv.push("first", torch.zeros(3))]
        assert begun.wait(30)  # the server is busy, and the others become ready meanwhile
        pending += [kv.push("last", torch.zeros(3), priority=-1), kv.push("middle", torch.zeros(3))]
        pending += [kv.push("urgent", torch.zeros(3), priority=7)]
        go_on.set()
        kv.wait(*pending)
    assert order == ["first", "urgent", "middle", "last"]


def test_abort_ends_a_wait_of_another_thread() -> None:
    go_on = threading.Event()

    def stuck(value: torch.Tensor, push: torch.Tensor, state: dict[str, Any], info: ps.Info) -> None:
        assert go_on.wait(30)

    kv = ps.join(functions={"stuck": stuck}, **SMALL)
    kv.init("w", torch.zeros(3), update=ps.function("stuck"))
    pending = kv.push("w", torch.zeros(3))
    timer = threading.Timer(0.2, kv.abort)
    timer.start()
    with pytest.raises(Aborted, match=r"abort\(\) was called"):
        pending.wait()
    go_on.set()
    timer.join()
    with pytest.raises(Aborted):
        kv.barrier()
    kv._close()


def test_a_slow_update_is_no_fault_of_a_worker() -> None:
    go_on = threading.Event()

    def slow(value: torch.Tensor, push: torch.Tensor, state: dict[str, Any], info: ps.Info) -> None:
        value += 1
        assert go_on.wait(30)

    with ps.join(functions={"slow": slow}, **SMALL) as kv:
        w = torch.zeros(3)
        kv.init("w", w, update=ps.function("slow"))
        pending = kv.push("w", torch.zeros(3))
        begin = time.monotonic()
        with pytest.raises(CollectiveTimeout, match=r"'w' on server 0 .* was not ready in time"):
            pending.wait(timeout=0.1)
        with pytest.raises(CollectiveTimeout):
            kv.pull("w", w, timeout=0.1)
        assert w.tolist() == [0, 0, 0]
        go_on.set()
        pending.wait()
        kv.pull("w", w)
        assert w.tolist() == [1, 1, 1]
        assert time.monotonic() > begin


def test_dictionaries_and_outputs_must_match() -> None:
    with ps.join(**SMALL) as kv:
        kv.init({"a": torch.zeros(2), "b": torch.zeros(3)})
        with pytest.raises(InvalidArgument, match="give a dictionary of outputs"):
            kv.push_pull({"a": torch.zeros(2)}, out=torch.zeros(2))
        with pytest.raises(InvalidArgument, match="a dictionary and a tensor were given"):
            kv.push({"a": torch.zeros(2)}, torch.zeros(2))
        with pytest.raises(InvalidArgument, match="no tensor was given for key 'a'"):
            kv.push("a")
        with pytest.raises(InvalidArgument, match=r"it must be a torch\.Tensor or a NumPy array"):
            kv.push("a", [1.0, 2.0])  # type: ignore[arg-type]
        out = {"a": torch.empty(2), "b": torch.empty(3)}
        kv.push_pull({"a": torch.ones(2), "b": torch.ones(3)}, out=out).wait()
        assert out["a"].tolist() == [1, 1] and out["b"].tolist() == [1, 1, 1]


def odd_tensors() -> dict[str, torch.Tensor]:
    """Of 6 float32 in shape (2, 3), none of them a plain tensor."""
    return {
        "transposed": torch.zeros(3, 2).t(),
        "every other element": torch.zeros(2, 6)[:, ::2],
        "leaf of a graph": torch.zeros(2, 3, requires_grad=True),
        "parameter": torch.nn.Parameter(torch.zeros(2, 3)),
        "part of a storage": torch.zeros(100)[50:56].view(2, 3),
    }


@pytest.mark.parametrize("kind", odd_tensors())
def test_tensors_that_are_not_plain_are_pushed_and_pulled_as_plain_ones_are(kind: str) -> None:
    value, out = torch.arange(6.0).view(2, 3), odd_tensors()[kind]
    with ps.join(**SMALL) as kv:
        kv.init("x", torch.zeros(2, 3), update=ps.assign(), mode=ps.asynchronous())
        source = odd_tensors()[kind]
        with torch.no_grad():
            source.copy_(value)
        kv.push("x", source).wait()
        assert kv.pull("x", out) == {"x": [1]}
        assert torch.equal(out, value)


@pytest.mark.parametrize("left", [0, 20])
def test_a_tensor_whose_memory_was_freed_is_refused(left: int) -> None:
    freed = torch.zeros(2, 3)
    freed.untyped_storage().resize_(left)
    with ps.join(**SMALL) as kv:
        kv.init("x", torch.ones(2, 3))
        for call in (kv.init, kv.push, kv.pull):
            with pytest.raises(InvalidArgument, match=f"'x' has {left} bytes of memory left and needs 24"):
                call("x", freed)
