"""Steps of real programs: training by DDP or FSDP2, and tensor-parallel decoding, each as one rank does it.

An order {step, alone, iterations} is for these; `step` has the fields of a Case. The answer's `checksum` depends on
what every rank had after two steps from the same start, so it is alike for all libraries. If `alone`, a rank does the
same work without communication; of tensor-parallel layers it does its share.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor.parallel import ColwiseParallel, ParallelStyle, RowwiseParallel, parallelize_module
from torch.nn import functional
from torch.nn.parallel import DistributedDataParallel

from ringreduce.cli.bench import worker
from ringreduce.cli.bench.compare import Case
from ringreduce.common.cores import own_cores

CPU = torch.device("cpu")
VOCABULARY = 20_000
HEAD = 64  # features of an attention head
CONTEXT = 512  # tokens that a decoder's cache holds


class Block(nn.Module):
    """A residual block of ResNet-18."""

    def __init__(self, before: int, after: int, stride: int) -> None:
        super().__init__()
        convolution = functools.partial(nn.Conv2d, padding=1, bias=False)
        self.main = nn.Sequential(
            convolution(before, after, 3, stride),
            nn.BatchNorm2d(after),
            nn.ReLU(True),
            convolution(after, after, 3),
            nn.BatchNorm2d(after),
        )
        shortcut = nn.Sequential(nn.Conv2d(before, after, 1, stride, bias=False), nn.BatchNorm2d(after))
        self.side = nn.Identity() if before == after else shortcut

    def forward(self, x: Tensor) -> Tensor:
        return functional.relu(self.main(x) + self.side(x))


def convolutional(case: Case) -> nn.Module:
    """ResNet-18, if `case` has its sizes."""
    width = case.width
    layers: list[nn.Module] = [
        nn.Conv2d(3, width, 7, 2, 3, bias=False),
        nn.BatchNorm2d(width),
        nn.ReLU(True),
        nn.MaxPool2d(3, 2, 1),
    ]
    for stage in range(4):
        after = case.width << stage
        for layer in range(case.layers):
            layers.append(Block(width, after, 2 if stage and not layer else 1))
            width = after
    return nn.Sequential(*layers, nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(width, 1000))


class Transformer(nn.Module):
    """A causal language model without positions; the embedding is the output layer too."""

    def __init__(self, case: Case) -> None:
        super().__init__()
        width = case.width
        self.embedding = nn.Embedding(VOCABULARY, width)
        self.layers = nn.ModuleList(
            nn.TransformerEncoderLayer(width, width // HEAD, 4 * width, dropout=0, batch_first=True, norm_first=True)
            for _ in range(case.layers)
        )

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.embedding(tokens)
        mask = nn.Transformer.generate_square_subsequent_mask(tokens.shape[1])
        for layer in self.layers:
            x = layer(x, src_mask=mask, is_causal=True)
        return functional.linear(x, self.embedding.weight).transpose(1, 2)


class Attention(nn.Module):
    """Of one token over a cache of keys and values: the heads of one of `ranks` ranks."""

    keys: Tensor
    values: Tensor

    def __init__(self, hidden: int, ranks: int) -> None:
        super().__init__()
        self.q, self.k, self.v, self.o = (nn.Linear(hidden, hidden, bias=False) for _ in range(4))
        for name in ("keys", "values"):
            self.register_buffer(name, torch.zeros(1, hidden // HEAD // ranks, CONTEXT, HEAD, device=CPU))

    def forward(self, x: Tensor, position: Tensor) -> Tensor:
        q, k, v = (layer(x).view(1, 1, -1, HEAD).transpose(1, 2) for layer in (self.q, self.k, self.v))
        self.keys.index_copy_(2, position, k)
        self.values.index_copy_(2, position, v)
        seen = (torch.arange(CONTEXT, device=CPU) <= position).view(1, 1, 1, -1)
        attended = functional.scaled_dot_product_attention(q, self.keys, self.values, seen)
        out: Tensor = self.o(attended.transpose(1, 2).reshape(1, 1, -1))
        return out


class FeedForward(nn.Module):
    def __init__(self, hidden: int) -> None:
        super().__init__()
        inner = hidden * 11 // 4
        self.gate, self.up = (nn.Linear(hidden, inner, bias=False) for _ in range(2))
        self.down = nn.Linear(inner, hidden, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.down(functional.silu(self.gate(x)) * self.up(x))
        return out


class DecoderLayer(nn.Module):
    """As in Llama."""

    def __init__(self, hidden: int, ranks: int) -> None:
        super().__init__()
        self.norm1, self.norm2 = nn.RMSNorm(hidden), nn.RMSNorm(hidden)
        self.attention, self.feed_forward = Attention(hidden, ranks), FeedForward(hidden)

    def forward(self, x: Tensor, position: Tensor) -> Tensor:
        x = x + self.attention(self.norm1(x), position)
        out: Tensor = x + self.feed_forward(self.norm2(x))
        return out


BY_COLUMNS = ("attention.q", "attention.k", "attention.v", "feed_forward.gate", "feed_forward.up")
BY_ROWS = ("attention.o", "feed_forward.down")

NETS: dict[str, Callable[[Case], nn.Module]] = {"convolutional": convolutional, "transformer": Transformer}

Step = Callable[[], Tensor]
"""Makes a step, and returns a number that depends on what all ranks did."""


def parameters(case: Case) -> int:
    """Of its net."""
    with torch.device("meta"):
        net = decoder(case, 1) if case.net == "decoder" else NETS[case.net](case)
    return sum(parameter.numel() for parameter in net.parameters())


def training(case: Case) -> Ready:
    """Forward, backward and SGD, on data of this rank."""
    rank, ranks = dist.get_rank(), dist.get_world_size()
    noise = torch.Generator().manual_seed(rank)
    if case.net == "convolutional":
        x = torch.randn(case.batch, 3, case.length, case.length, generator=noise, device=CPU)
        target = torch.randint(1000, (case.batch,), generator=noise, device=CPU)
    else:
        x = torch.randint(VOCABULARY, (case.batch, case.length), generator=noise, device=CPU)
        target = x.roll(-1, 1)

    def steps(net: nn.Module, model: nn.Module) -> Step:
        optimizer = torch.optim.SGD(net.parameters(), lr=1e-3)

        def step() -> Tensor:
            optimizer.zero_grad()
            torch.autograd.backward(functional.cross_entropy(model(x), target))
            optimizer.step()
            gradient = next(net.parameters()).grad
            assert gradient is not None
            local: Tensor = getattr(gradient, "to_local", lambda: gradient)()
            return local.square().sum()

        return step

    net = NETS[case.net](case)
    if case.by == "DDP":  # which leaves the gradients alone where its own forward was not called
        wrapped = DistributedDataParallel(net, gradient_as_bucket_view=True)
        return Ready(steps(net, wrapped), lambda: steps(net, net))
    mesh = init_device_mesh("cpu", (ranks,))
    for layer in getattr(net, "layers", ()):
        fully_shard(layer, mesh=mesh)
    fully_shard(net, mesh=mesh)

    def alone() -> Step:
        other = NETS[case.net](case)
        return steps(other, other)

    return Ready(steps(net, net), alone)


def decoder(case: Case, ranks: int) -> nn.ModuleList:
    """Layers whose attention has the cache of one of `ranks` ranks."""
    return nn.ModuleList(DecoderLayer(case.width, ranks) for _ in range(case.layers)).bfloat16()


def decoding(case: Case) -> Ready:
    """`case.length` tokens of one sequence, bfloat16, in the second half of the cache."""
    rank, ranks = dist.get_rank(), dist.get_world_size()
    x = torch.randn(1, 1, case.width, generator=torch.Generator().manual_seed(0), device=CPU).bfloat16()
    weights = torch.linspace(1, 2, case.width, device=CPU)
    positions = [torch.tensor([CONTEXT // 2 + token], device=CPU) for token in range(case.length)]

    def steps(layers: nn.ModuleList) -> Step:
        @torch.no_grad()
        def step() -> Tensor:
            y = x
            for position in positions:
                for layer in layers:
                    y = layer(y, position)
                y = functional.rms_norm(y, (case.width,))
            return (y.float() * weights).square().sum()

        return step

    def alone() -> Step:
        share = decoder(case, ranks)
        for layer in share:
            for name in (*BY_COLUMNS, *BY_ROWS):
                linear = layer.get_submodule(name)
                assert isinstance(linear, nn.Linear)
                part = linear.weight.detach().chunk(ranks, 0 if name in BY_COLUMNS else 1)[rank]
                linear.weight = nn.Parameter(part.contiguous())
        return steps(share)

    mesh = init_device_mesh("cpu", (ranks,))
    styles: dict[str, ParallelStyle] = {name: ColwiseParallel() for name in BY_COLUMNS}
    styles |= {name: RowwiseParallel() for name in BY_ROWS}
    layers = decoder(case, ranks)
    for layer in layers:
        parallelize_module(layer, mesh, styles)
    return Ready(steps(layers), alone)


@dataclass
class Ready:
    """A case, after two of its steps."""

    step: Step
    make_alone: Callable[[], Step]
    checksum: float = 0  # of all ranks

    @functools.cached_property
    def alone(self) -> Step:
        return self.make_alone()


def prepare(case: Case) -> Ready:
    torch.set_num_threads(max(1, len(own_cores()) // dist.get_world_size()))
    torch.manual_seed(0)
    ready = decoding(case) if case.net == "decoder" else training(case)
    ready.step()
    checksum = ready.step().detach().double()
    dist.all_reduce(checksum)
    ready.checksum = float(checksum)
    return ready


_ready: dict[Case, Ready] = {}
"""The case that was ordered last."""


def obey(backend: worker.Backend, order: dict[str, Any]) -> dict[str, Any]:
    case = Case(**order["step"])
    if case not in _ready:
        _ready.clear()  # before the next net takes memory
        _ready[case] = prepare(case)
    ready = _ready[case]
    call = ready.alone if order["alone"] else ready.step
    times = worker.times_ns(backend, call, order["iterations"])
    return {"times_ns": times, "wrong": 0, "checksum": ready.checksum}
