"""Which algorithms GPUs run by themselves, and who may say otherwise."""

from __future__ import annotations

import os
import subprocess
import sys

import pytest
from stand_in import build

from ringreduce import backend, plan
from ringreduce.config import Options
from ringreduce.gpu import rules as of_gpus
from ringreduce.plan.choose import BUILDERS, Rule
from ringreduce.topology.group import GroupTopology, Served

KB = 1024


def end_of_one_shot(size: int, *, steps: bool) -> int | None:
    first, *others = plan.table(size, (), of_gpus.rules(size, steps=steps))["all_reduce"]
    assert first.algorithm == "one_shot"
    assert [entry.algorithm for entry in others] == ([] if first.end is None else ["two_shot"])
    return first.end


@pytest.mark.parametrize(
    ("size", "end"), [(2, None), (3, 2048 * KB), (4, 512 * KB), (6, 256 * KB), (8, 256 * KB), (16, 64 * KB)]
)
def test_a_gpu_for_each_rank(size: int, end: int | None) -> None:
    assert end_of_one_shot(size, steps=False) == end


@pytest.mark.parametrize(("size", "end"), [(2, None), (3, None), (4, 32768 * KB), (8, 16384 * KB), (64, 16384 * KB)])
def test_a_shared_gpu(size: int, end: int | None) -> None:
    assert end_of_one_shot(size, steps=True) == end


@pytest.mark.parametrize("steps", [False, True])
@pytest.mark.parametrize("size", range(2, 65))
def test_tables_are_complete_and_in_order(size: int, steps: bool) -> None:
    rules = of_gpus.rules(size, steps=steps)
    again = plan.parse_algorithms(";".join(map(str, rules)))  # which refuses ranges that overlap
    assert again == rules
    table = plan.table(size, (), rules)
    for collective, ranges in table.items():
        assert ranges[-1].end is None
        assert {entry.algorithm for entry in ranges} <= {*BUILDERS[collective], "direct"}
    large = plan.lookup(table["broadcast"], 64 * KB * KB).algorithm
    assert large == ("direct" if steps or size == 2 else "ring")  # of the root's link, or of the fewest steps


@pytest.mark.parametrize("size", [4, 8, 16])
def test_the_switch_is_where_the_model_has_both_equal(size: int) -> None:
    """By the costs in the module's first lines, written down once more."""

    def in_one_kernel(phases: int, reads: float) -> float:
        return phases * of_gpus.PHASE + reads / of_gpus.LINK

    def in_steps(steps: int, touched: float) -> float:
        return size * (steps * of_gpus.STEP + touched / of_gpus.MEMORY)

    for steps in (False, True):
        end = end_of_one_shot(size, steps=steps)
        assert end is not None
        for bytes, one_shot_wins in ((end, True), (2 * end + 2, False)):
            if steps:
                one, two = in_steps(2, (size + 3) * bytes), in_steps(2 * size - 1, 6 * bytes)
            else:
                one, two = in_one_kernel(1, (size - 1) * bytes), in_one_kernel(2, 2 * (size - 1) / size * bytes)
            assert (one < two) is one_shot_wins


class Engine:
    """What `backend` gives plans to."""

    def __init__(self) -> None:
        self.plans: dict[tuple[str, int], int] = {}  # digests, by collective and most bytes

    def add_plan(self, collective: str, lowered: list[int], digest: int, most_bytes: int, slice_bytes: int) -> None:
        self.plans[collective, most_bytes] = digest


def digest_of(collective: str, algorithm: str, size: int) -> int:
    return backend.lowered_plan(collective, algorithm, size)[1]


def test_the_user_comes_first_then_a_topology_then_these() -> None:
    built_in = of_gpus.rules(4, steps=False)
    tree = plan.build("reduce", "tree", 4)
    topology = GroupTopology("NVML", "machine", (), (Served(KB, None, tree, 1, 1, ""),))
    engine = Engine()
    options = Options(algorithms="all_reduce:ring:4K-64K")
    backend._add_plans(4, options, topology, built_in, engine)  # type: ignore[arg-type]
    of_all_reduce = {most: digest for (collective, most), digest in engine.plans.items() if collective == "all_reduce"}
    one_shot, two_shot, ring = (digest_of("all_reduce", name, 4) for name in ("one_shot", "two_shot", "ring"))
    assert of_all_reduce == {
        4 * KB - 1: one_shot,
        64 * KB - 1: ring,
        512 * KB - 1: one_shot,
        backend.ANY_SIZE: two_shot,
    }
    assert engine.plans["reduce", KB - 1] == digest_of("reduce", "direct", 4)
    assert engine.plans["reduce", backend.ANY_SIZE] == plan.digest(tree)  # although a ring is built in
    assert engine.plans["broadcast", backend.ANY_SIZE] == digest_of("broadcast", "ring", 4)
    assert Rule("broadcast", "ring", 1024 * KB) in built_in


def test_info_says_who_chose() -> None:
    folder = build.build(build.ROOT / "build/stand_in")
    environment = {
        **os.environ,
        "RINGREDUCE_LIBCUDA": str(folder / "libcuda.so.1"),
        "RINGREDUCE_ALGORITHMS": "all_reduce:ring:1M-",
        "RINGREDUCE_TUNING": "off",
        "PYTHONPATH": str(build.ROOT),
        "COLUMNS": "160",
    }
    command = [sys.executable, "-m", "ringreduce", "info", "--ranks", "8"]
    said = subprocess.run(command, env=environment, check=True, capture_output=True, text=True, timeout=100).stdout
    table = said[said.index("unless NVML tells of links") :].splitlines()
    rows = [line.translate(str.maketrans("│┃|", "   ")).split() for line in table]
    one_each = [row for row in rows if row[:3] == ["8", "one", "each"] and row[3] == "all_reduce"]
    assert [" ".join(row[4:]) for row in one_each] == [
        "0 B - 256 KB one_shot built in, not measured",
        "256 KB - 1 MB two_shot built in, not measured",
        "1 MB - ring algorithms",
    ]
    shared = [row for row in rows if row[:2] == ["8", "shared"] and row[2] == "all_reduce"]
    assert [row[-1] for row in shared] == ["measured", "algorithms"]
