"""Training with compressed gradients: DDP's hook and FSDP2's custom communication, between ranks of two hosts."""

from __future__ import annotations

import os
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed as dist
from distributed.harness import Rank, on_ranks, run
from frameworks.common import batch, loss_of, network, sgd, trained_alone, values
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

import ringreduce
from ringreduce import hooks
from ringreduce.errors import InvalidArgument
from ringreduce.groups.lookup import backend_of

RING = ringreduce.Options(algorithms="all_reduce:ring")


def apart(me: Rank, function: Callable[..., Any], *args: Any) -> Any:
    """Calls `function(me, *args)` where each rank has a host of its own."""
    os.environ["RINGREDUCE_TRANSPORT"] = "tcp"
    return function(me, *args)


def digits() -> tuple[Tensor, Tensor]:
    from sklearn.datasets import load_digits

    images, labels = load_digits(return_X_y=True)
    order = torch.randperm(len(images), generator=torch.Generator().manual_seed(0))
    return torch.from_numpy(images)[order].float() / 16, torch.from_numpy(labels)[order].long()


def two_layers() -> nn.Module:
    return nn.Sequential(nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, 10))


def with_a_loud_feature(x: Tensor) -> Tensor:
    """Of each 32 features one is noise, ten times as large as the others: its gradients are, too."""
    x = x.clone()
    x[:, ::32] = 10 * torch.randn(len(x), 2, generator=torch.Generator().manual_seed(1))
    return x


TASKS: dict[str, tuple[Callable[[], nn.Module], Callable[[Tensor], Tensor], float]] = {
    "digits": (two_layers, lambda x: x, 0.5),
    "loud feature": (lambda: nn.Linear(64, 10), with_a_loud_feature, 0.05),
}
"""Model, inputs and learning rate."""
TRAINED = 1400
SEEDS = range(3)
STEPS = 400


def losses_after_training(me: Rank, task: str, hook: dict[str, Any] | None) -> list[float]:
    """Of each seed, after training with SGD."""
    make, change, rate = TASKS[task]
    x, y = digits()
    x = change(x)
    losses = []
    with me.join(options=RING):
        for seed in SEEDS:
            torch.manual_seed(seed)
            model = DistributedDataParallel(make())
            if hook is not None:
                hooks.compress_ddp(model, **hook)
            optimizer = torch.optim.SGD(model.parameters(), lr=rate)
            samples = torch.Generator().manual_seed(seed + 1000 * me.rank)
            for _ in range(STEPS):
                mine = torch.randint(TRAINED // 2, (32,), generator=samples) * 2 + me.rank
                optimizer.zero_grad()
                nn.functional.cross_entropy(model(x[mine]), y[mine]).backward()
                optimizer.step()
            with torch.no_grad():
                losses.append(nn.functional.cross_entropy(model.module(x[TRAINED:]), y[TRAINED:]).item())
    return losses


@pytest.mark.slow
@pytest.mark.parametrize(("task", "kind"), (("digits", "topk"), ("loud feature", "int4")))
def test_feedback_decides(task: str, kind: str) -> None:
    """With it the mean loss lies among those that float32 has by seed; without it, above them all."""
    whole = run(apart, 2, losses_after_training, task, None)[0]
    fed = run(apart, 2, losses_after_training, task, {"kind": kind})[0]
    cut = run(apart, 2, losses_after_training, task, {"kind": kind, "feedback": False})[0]
    assert min(whole) <= np.mean(fed) <= max(whole), (whole, fed)
    assert np.mean(cut) > max(whole) + (max(whole) - min(whole)), (whole, cut)


def trained_with_hook(me: Rank, kind: str, dtype: torch.dtype) -> np.ndarray:
    with me.join(options=RING):
        model = DistributedDataParallel(network().to(dtype))
        hooks.compress_ddp(model, kind, share=0.1)
        optimizer = sgd(model)
        for step in range(20):
            optimizer.zero_grad()
            loss_of(model, *(t.to(dtype) for t in batch(step, me.rank))).backward()
            optimizer.step()
        return values(model.parameters()).float().numpy()


@pytest.mark.parametrize("dtype", (torch.float32, torch.bfloat16))
@pytest.mark.parametrize("kind", (*hooks.WIRE_DTYPES, "topk"))
def test_all_ranks_get_the_same_model(kind: str, dtype: torch.dtype) -> None:
    first, second, third = run(apart, 3, trained_with_hook, kind, dtype)
    assert np.array_equal(first, second) and np.array_equal(first, third)
    error = np.abs(first - values(trained_alone(3, 20).parameters()).numpy()).max()
    assert 1e-6 < error < 0.5


@on_ranks(2, through=(apart,))
def test_fewer_bytes(me: Rank) -> None:
    found = {}
    with me.join():
        for kind in ("float32", "int8", "int4", "topk"):
            model = DistributedDataParallel(nn.Linear(1000, 500))
            if kind != "float32":
                hooks.compress_ddp(model, kind)
            model(torch.ones(1, 1000)).sum().backward()
            before = sum(link.bytes_out for link in backend_of(None).links())
            model(torch.ones(1, 1000)).sum().backward()
            found[kind] = sum(link.bytes_out for link in backend_of(None).links()) - before
    assert found["int8"] / found["float32"] < 0.27
    assert found["int4"] / found["float32"] < 0.14
    assert found["topk"] / found["float32"] < 0.03  # two words of 1%, to one other rank


@on_ranks(4)
def test_a_model_is_averaged_over_its_own_group(me: Rank) -> None:
    """Ranks 0 and 1 train one model, ranks 2 and 3 another; the gradients of rank r are r."""
    with me.join():
        group = [dist.new_group(ranks) for ranks in ([0, 1], [2, 3])][me.rank // 2]

        def model() -> DistributedDataParallel:
            return DistributedDataParallel(nn.Linear(8, 8, bias=False), process_group=group)

        def gradients(model: DistributedDataParallel) -> Tensor:
            model(torch.full((1, 8), float(me.rank))).sum().backward()
            return values(p.grad for p in model.parameters())

        for kind in (*hooks.WIRE_DTYPES, "topk"):
            hooked = model()
            hooks.compress_ddp(hooked, kind, share=1)
            assert gradients(hooked).tolist() == [0.5 if me.rank < 2 else 2.5] * 64
        of_the_world = model()
        of_the_world.register_comm_hook(None, hooks.compressed())
        with pytest.raises(InvalidArgument, match=r"is None; it must be the model's group: model\.register"):
            gradients(of_the_world)


@on_ranks(2, through=(apart,))
def test_buckets_that_ddp_rebuilds(me: Rank) -> None:
    """DDP makes its buckets anew after the first step, when it has seen the order of gradients."""
    with me.join(options=RING):
        model = DistributedDataParallel(nn.Sequential(*(nn.Linear(64, 64) for _ in range(4))), bucket_cap_mb=0.02)
        seen: list[tuple[int, ...]] = []
        inner = hooks.compressed("int4")

        def hook(group, bucket):  # type: ignore[no-untyped-def]
            seen.append((bucket.index(), bucket.buffer().numel()))
            return inner(group, bucket)

        model.register_comm_hook(model.process_group, hook)
        for _ in range(3):
            model(torch.ones(2, 64)).sum().backward()
            assert all(p.grad.isfinite().all() for p in model.parameters())
        gradients = values(p.grad for p in model.parameters())
        everybody = torch.empty(2, len(gradients))
        dist.all_gather_single(everybody, gradients)
        assert torch.equal(everybody[0], everybody[1])
        steps = len(seen) // 3
        assert seen[:steps] != seen[steps : 2 * steps]  # they were rebuilt


def fsdp(me: Rank, wire_dtype: str, gather: bool, feedback: bool) -> np.ndarray:
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import fully_shard

    with me.join():
        mesh, model = init_device_mesh("cpu", (me.size,)), network().float()
        for layer in model:
            if isinstance(layer, nn.Linear):
                fully_shard(layer, mesh=mesh)
        fully_shard(model, mesh=mesh)
        hooks.compress_fsdp(model, wire_dtype, gather=gather)
        optimizer = sgd(model)
        for step in range(8):
            optimizer.zero_grad()
            loss_of(model, *(t.float() for t in batch(step, me.rank))).backward()
            optimizer.step()
        return values(model.parameters()).numpy()


@pytest.mark.slow
@pytest.mark.parametrize("gather", (False, True), ids=("gradients", "parameters too"))
@pytest.mark.parametrize("wire_dtype", hooks.WIRE_DTYPES)
def test_fsdp(wire_dtype: str, gather: bool) -> None:
    first, second = run(apart, 2, fsdp, wire_dtype, gather, True)
    assert np.array_equal(first, second)
    error = np.abs(first - values(trained_alone(2, 8).parameters()).numpy()).max()
    assert 1e-6 < error < (0.5 if wire_dtype == "int4" else 0.05)


def sharded_steps(me: Rank, feedback: bool, reset: bool = False) -> np.ndarray:
    """What 200 steps have added to the weights of a sharded layer, of those whose gradients are small beside others."""
    from torch.distributed.fsdp import fully_shard

    with me.join():
        layer = nn.Linear(1000, 2, bias=False)
        nn.init.zeros_(layer.weight)
        hook = hooks.compress_fsdp(fully_shard(layer), "int8", feedback=feedback)
        torch.set_default_dtype(torch.float64)  # of other tensors than these
        x = torch.full((1, 1000), 0.003, dtype=torch.float32)
        x[:, ::32] = 1
        optimizer = torch.optim.SGD(layer.parameters(), lr=1)
        for _ in range(200):
            optimizer.zero_grad()
            layer(x).sum().backward()
            if reset:
                hook.reset()
            optimizer.step()
        return layer.weight.to_local()[0, 1:32].neg().detach().numpy()


def test_small_gradients_arrive_in_fsdp_too() -> None:
    for found in run(apart, 2, sharded_steps, True):
        assert np.abs(found - 0.6).max() <= 1 / 64
    for found in run(apart, 2, sharded_steps, False):
        assert (found == 0).all()
    for found in run(apart, 2, sharded_steps, True, True):
        assert (found == 0).all()


def gathered(me: Rank) -> np.ndarray:
    with me.join():
        own = torch.randn(1000, generator=torch.Generator().manual_seed(me.rank))
        everything = torch.empty(2000)
        work = hooks.AllGather("int8")(everything, own, dist.group.WORLD, async_op=True)
        assert work is not None
        work.wait()
        assert not torch.equal(everything[1000 * me.rank :][:1000], own)  # its own copy is rounded as well
        return everything.numpy()


def test_all_ranks_gather_the_same() -> None:
    first, second = run(apart, 2, gathered)
    assert np.array_equal(first, second)


@on_ranks(2)
def test_splits_that_are_refused(me: Rank) -> None:
    with me.join():
        with pytest.raises(InvalidArgument, match=r"input has shape \[3, 2\] and output_split_sizes is None"):
            hooks.all_to_all(torch.ones(3, 2))
        with pytest.raises(InvalidArgument, match=r"input_split_sizes is \[1\]; it must have 2 sizes"):
            hooks.all_to_all(torch.ones(4, 2), [2, 2], [1])
        with pytest.raises(
            InvalidArgument, match=r"input_split_sizes has the sum 3; it must be that of input's rows, 4"
        ):
            hooks.all_to_all(torch.ones(4, 2), [2, 2], [1, 2])
        with pytest.raises(InvalidArgument, match=r"a tensor of torch\.int32 on cpu cannot be compressed"):
            hooks.all_to_all(torch.ones(4, 2, dtype=torch.int32))
        assert hooks.all_to_all(torch.ones(0, 2)).shape == (0, 2)
        assert hooks.all_to_all(torch.arange(8.0)[::2]).equal(torch.tensor([[0.0, 2.0] * 2, [4.0, 6.0] * 2][me.rank]))


@pytest.mark.parametrize("even", (True, False), ids=("even", "uneven"))
@pytest.mark.parametrize(
    ("wire_dtype", "dtype"), (("int8", torch.float32), ("int4", torch.bfloat16), ("bfloat16", torch.float32))
)
@on_ranks(3, returns=[None] * 3)
def test_tokens_to_experts_and_back(me: Rank, wire_dtype: str, dtype: torch.dtype, even: bool) -> None:
    """Tokens go to experts and back, and their gradients the other way."""
    most = {"bfloat16": 2**-8, "int8": 1 / 127, "int4": 1 / 7}[wire_dtype]
    with me.join():
        sent = [4] * me.size if even else [(me.rank + to) % 3 * 5 for to in range(me.size)]
        received = [4] * me.size if even else [(of + me.rank) % 3 * 5 for of in range(me.size)]
        tokens = [
            torch.randn(sum(sent), 33, generator=torch.Generator().manual_seed(each)).to(dtype)
            for each in range(me.size)
        ]
        splits = (None, None) if even else (received, sent)
        mine = tokens[me.rank].clone().requires_grad_()
        found = hooks.all_to_all(mine, *splits, wire_dtype=wire_dtype)
        assert found.dtype == dtype and found.shape == (sum(received), 33)
        if even:
            wanted = torch.cat([each.split(4)[me.rank] for each in tokens])
            assert (found - wanted).abs().max() <= most * wanted.abs().max() + 2**-7 * (dtype != torch.float32)
        back = hooks.all_to_all(found.detach(), *splits[::-1], wire_dtype=wire_dtype)
        assert (back - mine).abs().max() <= 2.5 * most * mine.abs().max() + 2**-6 * (dtype != torch.float32)
        (found * 2).sum().backward()
        assert mine.grad is not None and (mine.grad - 2).abs().max() <= 2 * most


@on_ranks(2, through=(apart,))
def test_a_step_that_is_skipped_leaves_nothing_after_reset(me: Rank) -> None:
    """A step of huge gradients, which a GradScaler would skip, and then one of ordinary ones."""
    with me.join(options=RING):
        layer = nn.Linear(1000, 64, bias=False)
        model = DistributedDataParallel(layer)
        hook = hooks.compress_ddp(model)
        for scale in (1e30, 1.0):
            layer.zero_grad()
            (scale * model(torch.rand(2, 1000))).sum().backward()
            if scale > 1:
                hook.reset()
        assert layer.weight.grad is not None and layer.weight.grad.abs().max() < 10


@on_ranks(2, through=(apart,))
def test_gradients_of_another_dtype(me: Rank) -> None:
    with me.join():
        model = DistributedDataParallel(nn.Linear(4, 4).double())
        hooks.compress_ddp(model)
        with pytest.raises(InvalidArgument, match=r"tensor has dtype (double|Double|float64)"):
            model(torch.ones(1, 4).double()).sum().backward()


def test_bad_arguments() -> None:
    with pytest.raises(InvalidArgument, match="kind is 'int3'; it must be one of 'bfloat16', 'int8', 'int4' or 'topk'"):
        hooks.compressed("int3")
    with pytest.raises(InvalidArgument, match="share is 0; it must be a number above 0"):
        hooks.compressed("topk", share=0)
    for make in (hooks.compressed, hooks.ReduceScatter):
        with pytest.raises(InvalidArgument, match="feedback is 'no'; it must be True or False"):
            make("int8", feedback="no")  # type: ignore[operator]
    with pytest.raises(InvalidArgument, match=r"model is a Linear; it must be a torch\.nn\.parallel\.Distributed"):
        hooks.compress_ddp(nn.Linear(2, 2))  # type: ignore[arg-type]
    with pytest.raises(InvalidArgument, match="wire_dtype is 'float32'; it must be one of"):
        hooks.ReduceScatter("float32")
    with pytest.raises(InvalidArgument, match=r"no module that fully_shard\(\) was called on"):
        hooks.compress_fsdp(nn.Linear(2, 2))
