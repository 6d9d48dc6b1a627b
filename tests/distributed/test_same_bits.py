"""One plan, as JSON, gives the same bits whoever runs it: the engine on the CPU, the one over Gloo's messages, and the
GPU's interpreter, here run on a CPU. tests/gpu has the same for CUDA tensors."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.distributed as dist
from bodies import interpreter as gpu
from bodies.collectives import name_of
from bodies.same_bits import FACTOR, PLANS, bits, cases, in_shared_memory
from distributed.harness import Rank, run

import ringreduce
from ringreduce.plan import Plan, verify

interpreter = gpu.interpreter  # a fixture


def over_gloo(me: Rank, text: str) -> list[bytes]:
    options = ringreduce.Options(transport="gloo", engine="channels=8,least_slice_bytes=64,slices=3")
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
            options["weighs"] = rows[0].element_size() == 2
        if op == "premul_sum":
            options["factors"] = [FACTOR] * plan.size
        reports = gpu.run(library, plan, inputs, inputs, kernel, stepwise=bool(number % 2), **options)
        assert {gpu.GAVE_UP[report.gave_up] for report in reports} == {"no"}
        for of_rank, (array,) in zip(results, inputs, strict=True):
            of_rank.append(array.tobytes())
    return results


@pytest.mark.slow
@pytest.mark.parametrize("name", PLANS)
def test_a_plan_gives_the_same_bits_whoever_runs_it(interpreter: Any, name: str) -> None:
    verify(PLANS[name])
    text = PLANS[name].to_json()
    by_interpreter = interpreted(interpreter, text)
    for rank, (by_cpu, by_gloo) in enumerate(run(by_both, PLANS[name].size, text)):
        assert len(by_cpu) == 60
        assert by_gloo == by_cpu, f"rank {rank}: Gloo"
        assert by_interpreter[rank] == by_cpu, f"rank {rank}: the interpreter"


def reduced_to_each_root(me: Rank, transport: str, count: int) -> list[list[bytes]]:
    """By dtype and root, what the root gets."""
    found: list[list[bytes]] = []
    with me.join(
        options=ringreduce.Options(transport=transport, algorithms="reduce:direct", engine="least_slice_bytes=64")
    ):
        for dtype in (torch.float32, torch.bfloat16):
            found.append([])
            for root in range(me.size):
                x = rounded_differently(me.rank, count, dtype)
                dist.reduce(x, root)
                found[-1].append(x.view(torch.uint8).numpy().tobytes() if me.rank == root else b"")
    return found


def rounded_differently(rank: int, count: int, dtype: torch.dtype) -> torch.Tensor:
    """Sums depend on the order: 1e8 + 1 - 1e8 is 0 in float32, and 1e8 - 1e8 + 1 is 1."""
    signs = torch.tensor([1e8, 1.0, -1e8, 3.0, 1e-3])
    return (signs[(torch.arange(count) + rank) % 5] * (1 + torch.arange(count) % 7)).to(dtype)


@pytest.mark.parametrize("transport", ["auto", "gloo", "tcp"])
@pytest.mark.parametrize("size", [3, 4, 5])
def test_direct_reduces_in_rank_order_whatever_the_root_is(size: int, transport: str) -> None:
    count = 1003
    found = run(reduced_to_each_root, size, transport, count)
    for number, dtype in enumerate((torch.float32, torch.bfloat16)):
        total = rounded_differently(0, count, dtype).float()
        for rank in range(1, size):  # 16-bit floats are added as float32 and rounded once
            total += rounded_differently(rank, count, dtype).float()
        expected = total.to(dtype).view(torch.uint8).numpy().tobytes()
        for root in range(size):
            assert found[root][number][root] == expected, f"{dtype} to rank {root}"
