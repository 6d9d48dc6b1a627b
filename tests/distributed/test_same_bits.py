"""One plan, as JSON, gives the same bits whoever runs it: the engine on the CPU, the one over Gloo's messages, and the
GPU's interpreter, here run on a CPU. tests/gpu has the same for CUDA tensors."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from bodies import interpreter as gpu
from bodies.collectives import name_of
from bodies.same_bits import FACTOR, PLANS, bits, cases, in_shared_memory
from distributed.harness import Rank, run

import ringreduce
from ringreduce.plan import Plan, verify

interpreter = gpu.interpreter  # a fixture


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
