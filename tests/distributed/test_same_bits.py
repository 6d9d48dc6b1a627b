"""One plan, as JSON, gives the same bits whoever runs it: the engine on the CPU, the one over Gloo's messages, and the
GPU's interpreter, here run on a CPU. tests/gpu has the same for CUDA tensors."""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from typing import Any

import pytest
import torch
import torch.distributed as dist
from distributed.harness import Rank, run
from distributed.test_collectives import name_of, supported
from unit import test_gpu_interpreter as gpu

import ringreduce
from ringreduce.plan import Channel, Plan, Read, Step, build, verify
from ringreduce.topology.planner import plan_for
from ringreduce.topology.presets import preset

interpreter = gpu.interpreter  # a fixture

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
    return bits(me, "shared memory", ringreduce.Options(channels=8, channel_bytes=64 * 1024), text, "cpu")


def over_gloo(me: Rank, text: str) -> list[bytes]:
    options = ringreduce.Options(channels=8, transport="gloo", least_slice_bytes=64, slices=3)
    return bits(me, "gloo", options, text, "cpu")


def by_both(me: Rank, text: str) -> tuple[list[bytes], list[bytes]]:
    return in_shared_memory(me, text), over_gloo(me, text)


def interpreted(library: Any, text: str) -> list[list[bytes]]:
    """The same by the interpreter; per rank."""
    plan = Plan.from_json(text)
    results: list[list[bytes]] = [[] for _ in range(plan.size)]
    for number, (op, rows) in enumerate(cases(plan.size)):
        arrays = [[row.view(torch.int16) if row.dtype == torch.bfloat16 else row] for row in rows]
        inputs = [[array.numpy().copy() for array in of_rank] for of_rank in arrays]
        kernel = "uint32_sum" if rows[0].dtype == torch.int32 else f"{name_of(rows[0].dtype)}_sum"
        options: dict[str, Any] = {"lanes": 1 + number % 3, "slice_elements": 64 << number % 3}
        if op == "avg":
            options["divisor"] = float(plan.size)
        if op == "premul_sum":
            options["factors"] = [FACTOR] * plan.size
        reports = gpu.run(library, plan, inputs, inputs, kernel, stepwise=bool(number % 2), **options)
        assert {gpu.GAVE_UP[report.gave_up] for report in reports} == {"no"}
        for of_rank, (array,) in zip(results, inputs, strict=True):
            of_rank.append(array.tobytes())
    return results


@pytest.mark.parametrize("name", PLANS)
def test_a_plan_gives_the_same_bits_whoever_runs_it(interpreter: Any, name: str) -> None:
    verify(PLANS[name])
    text = PLANS[name].to_json()
    by_interpreter = interpreted(interpreter, text)
    for rank, (by_cpu, by_gloo) in enumerate(run(by_both, PLANS[name].size, text)):
        assert len(by_cpu) == 60
        assert by_gloo == by_cpu, f"rank {rank}: Gloo"
        assert by_interpreter[rank] == by_cpu, f"rank {rank}: the interpreter"
