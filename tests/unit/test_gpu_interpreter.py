"""The GPU's interpreter, run on a CPU: all ranks in this process, a thread for every block.

Every built-in plan must give what its collective promises; waits must end where a peer does not come or makes another
call.
"""

import ctypes
import itertools
import subprocess
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import ringreduce.plan.ring as ring
from ringreduce.plan import BUILDERS, Plan, build, layout, lower, slot_depth

ROOT = Path(__file__).resolve().parents[2]
SOURCES = ["csrc/stress/interpreter_on_cpu.cpp", "csrc/engine/gpu/flat_program.cpp", "csrc/engine/program.cpp"]
OPERATIONS = [
    *("all_reduce", "reduce_scatter", "all_gather", "broadcast", "reduce", "gather", "scatter", "all_to_all"),
]
MOST_RANKS = 64
SECOND = 10**9
ALGORITHMS = [(collective, algorithm) for collective in BUILDERS for algorithm in BUILDERS[collective]]
UNTOUCHED = -77
GAVE_UP = ["no", "timeout", "mismatch", "wrong_size", "aborted"]


class Tensors(ctypes.Structure):
    _fields_ = (("data", ctypes.c_void_p * MOST_RANKS), ("count", ctypes.c_uint64 * MOST_RANKS))


class Report(ctypes.Structure):
    _fields_ = (
        ("abort", ctypes.c_uint32),
        ("waiting_for", ctypes.c_uint32),
        ("looks", ctypes.c_uint64),
        *((name, ctypes.c_uint32) for name in ("gave_up", "peer", "channel", "round", "step")),
    )


class GroupCall(ctypes.Structure):
    _fields_ = (
        ("lowered", ctypes.POINTER(ctypes.c_int32)),
        ("words", ctypes.c_uint64),
        ("kernel", ctypes.c_char_p),
        *((name, ctypes.c_int32) for name in ("operation", "size", "root", "channels")),
        *((name, ctypes.c_uint32) for name in ("element", "parts", "lanes", "depth", "slot_bytes")),
        *((name, ctypes.c_uint32) for name in ("stepwise", "launches", "scaled")),
        *((name, ctypes.c_uint64) for name in ("slice", "largest", "timeout")),
        ("divisor", ctypes.c_double),
        ("factors", ctypes.POINTER(ctypes.c_double)),
        ("fingerprints", ctypes.POINTER(ctypes.c_uint64)),
        ("absent", ctypes.POINTER(ctypes.c_int32)),
        ("inputs", ctypes.POINTER(Tensors)),
        ("outputs", ctypes.POINTER(Tensors)),
        ("reports", ctypes.POINTER(Report)),
    )


@pytest.fixture(scope="module")
def interpreter(tmp_path_factory: pytest.TempPathFactory) -> Any:
    library = tmp_path_factory.mktemp("interpreter") / "interpreter.so"
    flags = ["-std=c++20", "-O1", "-Wall", "-Wextra", "-Werror", "-ffp-contract=off", "-pthread", "-Icsrc"]
    subprocess.run(["c++", *flags, "-shared", "-fPIC", *SOURCES, "-o", library], cwd=ROOT, check=True)
    return ctypes.CDLL(str(library))


def run(
    interpreter: Any,
    plan: Plan,
    inputs: list[list[np.ndarray]],
    outputs: list[list[np.ndarray]],
    kernel: str = "uint64_sum",
    *,
    lanes: int = 1,
    slice_elements: int = 64,
    stepwise: bool = False,
    launches: int = 1,
    root: int = 0,
    divisor: float = 1.0,
    factors: list[float] | None = None,
    fingerprints: list[int] | None = None,
    absent: int = -1,
    aborted: bool = False,
    timeout: int = 60 * SECOND,
) -> list[Report]:
    """Makes the call of `plan` on all ranks: inputs[rank] and outputs[rank] are that rank's tensors, by position."""
    size, lowered = plan.size, lower(plan)
    element = inputs[0][0].itemsize if inputs[0] else outputs[0][0].itemsize

    def tensors(of_ranks: list[list[np.ndarray]]) -> Any:
        made = (Tensors * size)()
        for rank, arrays in enumerate(of_ranks):
            for position, array in enumerate(arrays):
                made[rank].data[position] = array.ctypes.data
                made[rank].count[position] = array.size
        return made

    reports = (Report * size)()
    for report in reports:
        report.abort = aborted
    call = GroupCall(
        lowered=(ctypes.c_int32 * len(lowered))(*lowered),
        words=len(lowered),
        kernel=kernel.encode(),
        operation=OPERATIONS.index(plan.collective),
        size=size,
        root=root,
        channels=len(plan.channels),
        element=element,
        parts=1,
        lanes=lanes,
        depth=slot_depth(size),
        slot_bytes=-(-slice_elements * element // 128) * 128,
        stepwise=stepwise,
        launches=launches,
        scaled=factors is not None,
        slice=slice_elements,
        largest=max(array.size for arrays in inputs + outputs for array in arrays),
        timeout=timeout,
        divisor=divisor,
        factors=(ctypes.c_double * size)(*(factors or [1.0] * size)),
        fingerprints=(ctypes.c_uint64 * size)(*(fingerprints or [7] * size)),
        absent=(ctypes.c_int32 * size)(*(rank == absent for rank in range(size))),
        inputs=tensors(inputs),
        outputs=tensors(outputs),
        reports=reports,
    )
    assert interpreter.run_plan(ctypes.byref(call)) == 0
    return list(reports)


def blocks(collective: str, size: int, counts: list[int]) -> Iterator[tuple[list[list[np.ndarray]], ...]]:
    """Inputs, outputs and the outputs wanted; block b has counts[b % len(counts)] elements."""
    shape = layout(collective, size)
    rng = np.random.default_rng([size, *counts])
    count = [counts[block % len(counts)] for block in range(shape.blocks)]
    data = [[rng.integers(-(2**40), 2**40, count[b]) for b in range(shape.blocks)] for _ in range(size)]
    total = [sum(data[r][b] for r in range(size) if r in ranks_of(shape, b)) for b in range(shape.blocks)]
    inputs = [[data[r][b] for b in range(shape.blocks) if shape.has_input(r, b)] for r in range(size)]
    wanted = [[total[b] for b in range(shape.blocks) if shape.needs_output(r, b)] for r in range(size)]
    outputs = [[np.full(array.size, UNTOUCHED) for array in arrays] for arrays in wanted]
    return inputs, outputs, wanted


def ranks_of(shape: Any, block: int) -> list[int]:
    mask = shape.contributors(block)
    return [rank for rank in range(mask.bit_length()) if mask >> rank & 1]


def check(reports: list[Report], outputs: list[list[np.ndarray]], wanted: list[list[np.ndarray]]) -> None:
    assert [GAVE_UP[report.gave_up] for report in reports] == ["no"] * len(reports)
    for rank, (arrays, right) in enumerate(zip(outputs, wanted, strict=True)):
        for position, (array, values) in enumerate(zip(arrays, right, strict=True)):
            wrong = (array != values).nonzero()[0]
            assert wrong.size == 0, f"rank {rank}, tensor {position}: {wrong.size} wrong, the first at {wrong[0]}"


@pytest.mark.parametrize("stepwise", [False, True])
@pytest.mark.parametrize(("collective", "algorithm"), ALGORITHMS)
def test_every_plan(interpreter: Any, collective: str, algorithm: str, stepwise: bool) -> None:
    for size, counts in itertools.product((1, 2, 3, 4), ([0], [1], [1000], [997, 3, 64, 0])):
        if len(counts) > 1 and layout(collective, size).blocks == 1:
            continue
        plan = build(collective, algorithm, size)
        inputs, outputs, wanted = blocks(collective, size, counts)
        check(run(interpreter, plan, inputs, outputs, stepwise=stepwise, lanes=2), outputs, wanted)


@pytest.mark.parametrize("lanes", [1, 3, 8])
@pytest.mark.parametrize("slice_elements", [8, 24, 4096])
def test_lanes_and_slices(interpreter: Any, lanes: int, slice_elements: int) -> None:
    for plan in (build("all_reduce", "two_shot", 3), ring.all_reduce([((0, 2, 1), 2), ((1, 2, 0), 1)])):
        for count in (5, 63, 64, 65, 1001):
            inputs, outputs, wanted = blocks("all_reduce", 3, [count])
            check(run(interpreter, plan, inputs, outputs, lanes=lanes, slice_elements=slice_elements), outputs, wanted)


@pytest.mark.parametrize("size", [5, 8])
def test_more_ranks(interpreter: Any, size: int) -> None:
    for algorithm in BUILDERS["all_reduce"]:
        inputs, outputs, wanted = blocks("all_reduce", size, [700])
        check(run(interpreter, build("all_reduce", algorithm, size), inputs, outputs, lanes=2), outputs, wanted)


@pytest.mark.parametrize("stepwise", [False, True])
def test_a_replayed_launch_needs_nothing_new(interpreter: Any, stepwise: bool) -> None:
    inputs, outputs, wanted = blocks("all_reduce", 3, [517])
    plan = build("all_reduce", "ring", 3)
    check(run(interpreter, plan, inputs, outputs, launches=5, stepwise=stepwise), outputs, wanted)


@pytest.mark.parametrize("stepwise", [False, True])
@pytest.mark.parametrize("algorithm", ["ring", "one_shot", "two_shot", "tree"])
def test_in_place(interpreter: Any, algorithm: str, stepwise: bool) -> None:
    inputs, _, wanted = blocks("all_reduce", 4, [333])
    check(
        run(interpreter, build("all_reduce", algorithm, 4), inputs, inputs, stepwise=stepwise, lanes=2), inputs, wanted
    )


def test_roots(interpreter: Any) -> None:
    for root in range(3):
        values = [np.arange(100) * (rank + 1) for rank in range(3)]
        run(interpreter, build("broadcast", "ring", 3), [[v] for v in values], [[v] for v in values], root=root)
        assert all(np.array_equal(v, np.arange(100) * (root + 1)) for v in values)


def test_average_and_factors(interpreter: Any) -> None:
    rng = np.random.default_rng(3)
    inputs = [[rng.standard_normal(201).astype(np.float32)] for _ in range(3)]
    plan = build("all_reduce", "two_shot", 3)
    total = (inputs[0][0] + inputs[1][0]) + inputs[2][0]
    outputs = [[np.zeros(201, np.float32)] for _ in range(3)]
    reports = run(interpreter, plan, inputs, outputs, "float32_sum", divisor=3.0)
    check(reports, outputs, [[total / np.float32(3)]] * 3)
    reports = run(interpreter, plan, inputs, outputs, "float32_sum", factors=[0.5, 3.0, 0.1])
    a, b, c = (array * np.float32(f) for (array,), f in zip(inputs, (0.5, 3.0, 0.1), strict=True))
    check(reports, outputs, [[a + b + c]] * 3)


@pytest.mark.parametrize("stepwise", [False, True])
def test_a_peer_that_does_not_come(interpreter: Any, stepwise: bool) -> None:
    inputs, outputs, _ = blocks("all_reduce", 3, [100])
    plan = build("all_reduce", "one_shot", 3)
    reports = run(interpreter, plan, inputs, outputs, absent=1, timeout=SECOND // 5, stepwise=stepwise)
    for rank in (0, 2):
        assert (GAVE_UP[reports[rank].gave_up], reports[rank].peer, reports[rank].step) == ("timeout", 1, 1)


def test_abort(interpreter: Any) -> None:
    inputs, outputs, _ = blocks("all_reduce", 3, [100])
    reports = run(interpreter, build("all_reduce", "ring", 3), inputs, outputs, absent=0, aborted=True, lanes=3)
    assert [GAVE_UP[reports[rank].gave_up] for rank in (1, 2)] == ["aborted"] * 2


@pytest.mark.parametrize("stepwise", [False, True])
def test_another_call_on_a_peer(interpreter: Any, stepwise: bool) -> None:
    inputs, outputs, _ = blocks("all_reduce", 2, [100])
    reports = run(
        interpreter, build("all_reduce", "two_shot", 2), inputs, outputs, fingerprints=[1, 2], timeout=SECOND // 5,
        stepwise=stepwise,
    )  # fmt: skip
    found = {GAVE_UP[report.gave_up] for report in reports}
    assert "mismatch" in found and found <= {"mismatch", "timeout"}


def test_another_size_on_a_peer(interpreter: Any) -> None:
    inputs = [[np.ones(100, np.int64)], [np.ones(101, np.int64)]]
    outputs = [[np.zeros(array.size, np.int64) for array in arrays] for arrays in inputs]
    reports = run(interpreter, build("all_reduce", "one_shot", 2), inputs, outputs, timeout=SECOND // 5)
    assert "wrong_size" in {GAVE_UP[report.gave_up] for report in reports}
