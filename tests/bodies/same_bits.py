"""One plan on every engine, and its bits."""

from __future__ import annotations

import itertools
from collections.abc import Iterator

import torch
import torch.distributed as dist
from bodies.collectives import supported
from distributed.harness import Rank

import ringreduce
from ringreduce.plan import Channel, Plan, Read, Step, build
from ringreduce.topology.planner import plan_for
from ringreduce.topology.presets import preset

CHAIN = Plan(
    "chain",
    "all_reduce",
    3,
    (
        Channel(
            share=1,
            chunks=1,
            programs=(
                (Step(0, Read.INPUT, recv=(1,), send=(1,), write=True),),
                (Step(0, Read.INPUT, recv=(2,), send=(0,)), Step(0, recv=(0,), send=(2,), write=True)),
                (Step(0, Read.INPUT, send=(1,)), Step(0, recv=(1,), write=True)),
            ),
        ),
    ),
)
PLANS = {
    "ring": build("all_reduce", "ring", 3),
    "one_shot": build("all_reduce", "one_shot", 4),
    "two_shot": build("all_reduce", "two_shot", 4),
    "tree": build("all_reduce", "tree", 4),
    "halving_doubling": build("all_reduce", "halving_doubling", 4),
    "by hand": CHAIN,
    "rings over the links of a DGX-1": plan_for(preset("dgx1-v100")).plan,
}
DTYPES = (torch.float32, torch.bfloat16, torch.float64, torch.int32)
FACTOR = 0.3
OPS = {
    "sum": dist.ReduceOp.SUM,
    "avg": dist.ReduceOp.AVG,
    "premul_sum": dist._make_nccl_premul_sum(FACTOR),
}
COUNTS = (1, 1_001, 5_003)


def cases(size: int) -> Iterator[tuple[str, list[torch.Tensor]]]:
    """Operations, and what each rank gives: whole numbers with exact sums, and numbers whose sums are rounded."""
    generator = torch.Generator().manual_seed(size)
    for dtype, op, count in itertools.product(DTYPES, OPS, COUNTS):
        if supported(dtype, op):
            yield op, [torch.randint(-3, 4, (count,), generator=generator).to(dtype) for _ in range(size)]
            yield op, [(torch.randn(count, generator=generator) * 5).to(dtype) for _ in range(size)]


def raw(tensor: torch.Tensor) -> bytes:
    return bytes(tensor.cpu().view(torch.uint8).numpy())


def bits(me: Rank, name: str, options: ringreduce.Options, text: str, device: str) -> list[bytes]:
    """What the plan makes of every case, on this rank."""
    results = []
    with me.join(name, options=options):
        ringreduce.register_plan(Plan.from_json(text))
        for op, rows in cases(me.size):
            tensor = rows[me.rank].to(device)
            ringreduce.all_reduce(tensor, OPS[op])
            results.append(raw(tensor))
    return results


def in_shared_memory(me: Rank, text: str) -> list[bytes]:
    return bits(me, "shared memory", ringreduce.Options(engine="channels=8,channel_bytes=64K"), text, "cpu")
