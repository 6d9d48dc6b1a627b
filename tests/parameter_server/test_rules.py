"""The native update rules have the bits of torch.optim; what a server cannot do with a block is refused by name."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from unit.elements import COMBINE

import ringreduce.parameter_server as ps
from ringreduce import _C
from ringreduce.errors import InvalidArgument, UpdateFailed
from ringreduce.parameter_server.placement import cut, elements_per_block, place
from ringreduce.parameter_server.server.updates import rule_for
from ringreduce.parameter_server.updates import ELEMENT_WISE, UNSUITABLE

NATIVE: list[tuple[Any, dict[str, Any]]] = [
    (torch.optim.SGD, {"lr": 0.1}),
    (torch.optim.SGD, {"lr": 0.01, "weight_decay": 0.3, "maximize": True}),
    (torch.optim.SGD, {"lr": 0.01, "momentum": 0.9}),
    (torch.optim.SGD, {"lr": 0.01, "momentum": 0.9, "dampening": 0.2, "weight_decay": 1e-3}),
    (torch.optim.SGD, {"lr": 0.01, "momentum": 0.8, "nesterov": True, "weight_decay": 1e-3}),
    (torch.optim.Adam, {"lr": 1e-3}),
    (torch.optim.Adam, {"lr": 1e-2, "betas": (0.4, 0.99), "weight_decay": 0.1, "maximize": True}),
    (torch.optim.AdamW, {"lr": 1e-3}),
    (torch.optim.AdamW, {"lr": 1e-2, "weight_decay": 0.2, "eps": 1e-3}),
    (torch.optim.Adagrad, {"lr": 0.05}),
    (torch.optim.Adagrad, {"lr": 0.05, "lr_decay": 0.1, "weight_decay": 0.1, "initial_accumulator_value": 0.3}),
    (torch.optim.RMSprop, {"lr": 0.01}),
    (torch.optim.RMSprop, {"lr": 0.01, "centered": True, "alpha": 0.3, "weight_decay": 0.1}),
    (torch.optim.RMSprop, {"lr": 0.01, "momentum": 0.9, "centered": True, "maximize": True}),
]


def same_bits(left: torch.Tensor, right: torch.Tensor) -> bool:
    words = torch.int32 if left.dtype == torch.float32 else torch.int64
    return torch.equal(left.view(words), right.view(words))


@pytest.mark.parametrize("dtype", (torch.float32, torch.float64))
@pytest.mark.parametrize(("kind", "arguments"), NATIVE)
@pytest.mark.parametrize("count", (1, 63, 1003, 40000))
def test_native_rules_have_torchs_bits(kind: Any, arguments: dict[str, Any], count: int, dtype: torch.dtype) -> None:
    name = str(dtype).removeprefix("torch.")
    rule = rule_for(ps.optimizer(kind, **arguments).as_json(), name, False)
    if rule["kind"] == "python":
        pytest.skip("there is no native rule for this processor: servers call torch")
    torch.manual_seed(count)
    value = torch.randn(count, dtype=dtype)
    parameter = torch.nn.Parameter(value.clone())
    optimizer = kind([parameter], **arguments)
    start = arguments.get("initial_accumulator_value", 0.0)
    state = [torch.full((count,), start, dtype=dtype), *(torch.zeros(count, dtype=dtype) for _ in range(2))]
    for step in range(1, 6):
        gradient = torch.randn(count, dtype=dtype) * 10.0 ** (step - 3)
        parameter.grad = gradient.clone()
        optimizer.step()
        out = torch.empty_like(value)
        addresses = [t.data_ptr() for t in (value, gradient, out)]
        _C.parameter_update(rule, name, step, count, *addresses, [s.data_ptr() for s in state])
        value = out
        assert same_bits(value, parameter.detach()), f"step {step}"


@pytest.mark.parametrize("name", sorted(UNSUITABLE))
def test_unsuitable_optimizers_are_refused_by_name(name: str) -> None:
    with pytest.raises(InvalidArgument, match=f"torch.optim.{name} cannot update blocks"):
        ps.optimizer(getattr(torch.optim, name), lr=0.1)


def test_an_optimizer_of_the_users_own_is_refused() -> None:
    class SGD(torch.optim.SGD): ...

    with pytest.raises(InvalidArgument, match=r"kind is SGD; it must be one of torch\.optim"):
        ps.optimizer(SGD, lr=0.1)
    with pytest.raises(InvalidArgument, match=r"does not take these arguments"):
        ps.optimizer(torch.optim.SGD, learning_rate=0.1)
    with pytest.raises(InvalidArgument, match=r"lr is 'x'; an optimizer's arguments must be Python numbers"):
        ps.optimizer(torch.optim.SGD, lr="x")


@pytest.mark.parametrize("name", ELEMENT_WISE)
@pytest.mark.parametrize("dtype", (torch.float32, torch.bfloat16))
def test_every_element_wise_optimizer_runs_on_a_server_with_the_bits_of_one_process(
    name: str, dtype: torch.dtype
) -> None:
    """In several blocks; bfloat16 goes through Python for all of them."""
    kind = getattr(torch.optim, name)
    torch.manual_seed(1)
    w = torch.randn(20, 111).to(dtype)
    parameter = torch.nn.Parameter(w.clone())
    optimizer = kind([parameter], lr=0.01)
    with ps.join(block_bytes=1024, window=1 << 20, memory=1 << 20) as kv:
        kv.init("w", w, update=ps.optimizer(kind, lr=0.01))
        for _ in range(4):
            gradient = torch.randn(20, 111).to(dtype)
            parameter.grad = gradient.clone()
            optimizer.step()
            assert kv.push_pull("w", gradient, out=w).wait() == []
            assert torch.equal(w, parameter.detach())


@pytest.mark.parametrize("op", ["sum", "product", "min", "max", "band", "bor", "bxor"])
def test_reductions(op: str) -> None:
    value, push = np.arange(1000) % 7 + 1, np.arange(1000) % 5 + 1
    with ps.join(window=8 << 20, memory=1 << 20) as kv:
        kv.init("x", value, update=ps.reduce(op), mode=ps.asynchronous())
        kv.push("x", push).wait()
        out = np.empty_like(value)
        assert kv.pull("x", out) == {"x": [1]}
        np.testing.assert_array_equal(out, COMBINE[op](value, push))
        with pytest.raises(InvalidArgument, match=r"there is no reduction 'bxor' of float32"):
            kv.init("f", torch.zeros(3), update=ps.reduce("bxor"))


def test_logaddexp() -> None:
    value, push = (torch.linspace(-9, 9, 1000) ** power for power in (1, 2))
    with ps.join(window=8 << 20, memory=1 << 20) as kv:
        kv.init("x", value, update=ps.reduce("logaddexp"), mode=ps.asynchronous())
        kv.push("x", push).wait()
        out = torch.empty(1000)
        kv.pull("x", out)
        torch.testing.assert_close(out, torch.logaddexp(value, push), rtol=1e-6, atol=1e-6)


@pytest.mark.parametrize("op", ["sum", "max"])
def test_a_weight_multiplies_what_is_reduced(op: str) -> None:
    value, push = (torch.linspace(-1, 1, 1000) ** power for power in (1, 2))
    with ps.join(window=8 << 20, memory=1 << 20) as kv:
        kv.init("x", value, update=ps.reduce(op), mode=ps.asynchronous())
        kv.push("x", push, weight=2.5).wait()
        out = torch.empty(1000)
        kv.pull("x", out)
        assert torch.equal(out, value + 2.5 * push if op == "sum" else torch.maximum(value, 2.5 * push))


def test_a_tensor_that_outgrows_the_caches_comes_back_whole() -> None:
    count = (48 << 20) // 4 + 5  # of which both copies go past the caches
    value, out = torch.arange(count, dtype=torch.int32), torch.empty(count, dtype=torch.int32)
    with ps.join(memory=128 << 20) as kv:
        kv.init("x", torch.zeros_like(value), update=ps.reduce("sum"), mode=ps.asynchronous())
        kv.push("x", value).wait()
        kv.pull("x", out)
        assert torch.equal(out, value)


def test_what_does_not_fit_is_refused() -> None:
    with ps.join(window=8 << 20, memory=1 << 20) as kv:
        with pytest.raises(InvalidArgument, match=r"bytes for two buffers .* join with a larger memory="):
            kv.init("large", torch.zeros(200000))
        with pytest.raises(InvalidArgument, match=r"sync\(\) takes no average"):
            kv.init("i", torch.zeros(3, dtype=torch.int32))
        with pytest.raises(InvalidArgument, match=r"there is no key 'none'"):
            kv.push("none", torch.zeros(3))
        kv.init("w", torch.zeros(3))
        with pytest.raises(
            InvalidArgument, match=r"'w' is torch\.float32 of shape \(3,\); the tensor is torch\.float64"
        ):
            kv.push("w", torch.zeros(3, dtype=torch.float64))
        with pytest.raises(InvalidArgument, match=r"weight is -1; it must be a positive number"):
            kv.push("w", torch.zeros(3), weight=-1)
        with pytest.raises(InvalidArgument, match=r"shape of 'w' is \[4\] here, and \[3\]"):
            kv.init("w", torch.zeros(4))
        read_only = np.zeros(3, dtype=np.float32)
        read_only.flags.writeable = False
        with pytest.raises(InvalidArgument, match=r"read-only"):
            kv.pull("w", read_only)
    with pytest.raises(InvalidArgument, match=r"grace is 1\.0 without a quorum"):
        ps.sync(grace=1.0)


def test_user_functions_and_their_errors() -> None:
    seen: list[ps.Info] = []

    def damped(value: torch.Tensor, push: torch.Tensor, state: dict[str, Any], info: ps.Info, lam: float) -> None:
        state["sum"] = state.get("sum", 0) + push
        value.add_(state["sum"], alpha=lam)
        seen.append(info)
        if math.isnan(push[0].item()):
            value.zero_()
            raise ValueError("not a number")

    with ps.join(functions={"damped": damped}, window=8 << 20, memory=1 << 20) as kv:
        w = torch.zeros(5)
        kv.init("w", w, update=ps.function("damped", lam=0.5), mode=ps.asynchronous())
        kv.push("w", torch.ones(5)).wait()
        kv.clock()
        kv.pull("w", w)
        kv.push("w", torch.ones(5)).wait()
        with pytest.raises(UpdateFailed, match=r"the update of 'w' on server 0 .*not a number"):
            kv.push("w", torch.full((5,), math.nan)).wait()
        kv.pull("w", w)
        assert w.tolist() == [1.5] * 5
        assert [(i.worker, i.clock, i.pulled, i.version) for i in seen[:2]] == [(0, 0, 0, 1), (0, 1, 1, 2)]
        with pytest.raises(InvalidArgument, match=r"no function 'other' is known"):
            kv.init("v", w, update=ps.function("other"))


@given(st.integers(1, 10**6), st.integers(1, 8), st.integers(1, 8), st.integers(1, 8))
@settings(max_examples=200)
def test_blocks_cover_a_tensor_and_are_balanced(count: int, itemsize: int, servers: int, tensors: int) -> None:
    per_block = elements_per_block(itemsize, 64 * 1024)
    blocks = cut(count, per_block)
    assert [begin for begin, _ in blocks] == [i * per_block for i in range(len(blocks))]
    assert sum(n for _, n in blocks) == count and per_block % 64 == 0
    loads = [0] * servers
    for _ in range(tensors):
        for size, server in zip(
            [n * itemsize for _, n in blocks], place([n * itemsize for _, n in blocks], loads), strict=True
        ):
            loads[server] += size
    assert max(loads) - min(loads) <= per_block * itemsize
