"""What the tests of frameworks share: a small network, data that differ by rank and step, and exact comparison.

All in float64: what a framework computes on several ranks may differ from one process in the order of additions only.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

import torch
import torch.distributed as dist
from distributed.harness import Rank
from torch import Tensor, nn

SAMPLES = 6
FEATURES = 8
ROUNDING = 1e-12


def network() -> nn.Sequential:
    """The same weights in every process."""
    torch.manual_seed(0)
    layers = nn.Linear(FEATURES, 32), nn.Tanh(), nn.Linear(32, 32), nn.Tanh(), nn.Linear(32, 4)
    return nn.Sequential(*layers).double()


def batch(step: int, rank: int) -> tuple[Tensor, Tensor]:
    """Inputs and targets."""
    noise = torch.Generator().manual_seed(1000 * step + rank)
    x = torch.randn(SAMPLES, FEATURES, generator=noise, dtype=torch.float64)
    return x, torch.randn(SAMPLES, 4, generator=noise, dtype=torch.float64)


def whole_batch(step: int, size: int) -> tuple[Tensor, Tensor]:
    """What all ranks have in this step."""
    xs, ys = zip(*(batch(step, rank) for rank in range(size)), strict=True)
    return torch.cat(xs), torch.cat(ys)


def loss_of(model: nn.Module, x: Tensor, y: Tensor) -> Tensor:
    return nn.functional.mse_loss(model(x), y)


def sgd(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)


def trained_alone(size: int, steps: int, optimizer: Callable[..., torch.optim.Optimizer] = sgd) -> nn.Sequential:
    """The network after `steps` in one process, on the batches of all ranks."""
    model = network()
    optimize = optimizer(model)
    for step in range(steps):
        optimize.zero_grad()
        loss_of(model, *whole_batch(step, size)).backward()
        optimize.step()
    return model


def values(tensors: Iterable[Tensor]) -> Tensor:
    """Of a model's parameters, say: all in one vector, whole where they were sharded."""
    return torch.cat([getattr(t, "full_tensor", lambda t=t: t)().detach().flatten() for t in tensors])


def close(actual: nn.Module, expected: nn.Module) -> None:
    """Equal parameters, up to rounding; other than at the start, so that both have been trained."""
    start, ours, theirs = (values(m.parameters()) for m in (network(), actual, expected))
    assert (theirs - start).abs().max() > 1e-3
    torch.testing.assert_close(ours, theirs, rtol=0, atol=ROUNDING)


def same(actual: Tensor, expected: Tensor) -> None:
    torch.testing.assert_close(actual, expected, rtol=0, atol=0)


def on_gloo_and_ours(me: Rank, function: Callable[[Rank], Any]) -> tuple[Any, Any]:
    """What `function` returns in a group of either backend."""
    with me.join("gloo", backend="gloo"):
        group = dist.group.WORLD
        gloo = function(me)
    with me.join("ours"):
        ours = function(me)
    del group  # held until here, as a Gloo group whose last holder is a callback in a thread of its own aborts
    return gloo, ours


def sharded(me: Rank, dtype: torch.dtype | None = None) -> nn.Sequential:
    """Every layer a group of parameters of its own, gathered before its forward and again before its backward."""
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard

    mesh, model = init_device_mesh("cpu", (me.size,)), network()
    policy = MixedPrecisionPolicy(param_dtype=dtype, reduce_dtype=dtype)
    for layer in model:
        if isinstance(layer, nn.Linear):
            fully_shard(layer, mesh=mesh, mp_policy=policy, reshard_after_forward=True)
    fully_shard(model, mesh=mesh, mp_policy=policy)
    return model
