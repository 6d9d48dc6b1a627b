"""Which algorithms GPUs run by themselves, and who may say otherwise."""

from __future__ import annotations

import functools
import os
import subprocess
import sys
from typing import Any

import bodies.turns
import pytest
from bodies.turns import UNLIMITED, Batches, batches_of
from stand_in import build

from ringreduce import plan
from ringreduce.config import Options
from ringreduce.gpu import rules as of_gpus
from ringreduce.groups import choices
from ringreduce.plan import Plan, Read, slot_depth
from ringreduce.plan.choose import BUILDERS, Rule
from ringreduce.plan.symbolic import run_round
from ringreduce.topology.group_plans import GroupTopology, Served

KB = 1024

library = bodies.turns.library  # a fixture


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


@pytest.mark.parametrize(
    ("size", "end"), [(2, 8192 * KB), (3, 4096 * KB), (4, 2048 * KB), (8, 1024 * KB), (64, 1024 * KB)]
)
def test_a_shared_gpu(size: int, end: int | None) -> None:
    assert end_of_one_shot(size, steps=True) == end


@pytest.mark.parametrize("steps", [False, True])
def test_tables_are_complete_and_in_order(steps: bool) -> None:
    for size in range(2, 65):
        rules = of_gpus.rules(size, steps=steps)
        again = plan.parse_algorithms(";".join(map(str, rules)))  # which refuses ranges that overlap
        assert again == rules
        table = plan.table(size, (), rules)
        for collective, ranges in table.items():
            assert ranges[-1].end is None, (size, collective)
            assert {entry.algorithm for entry in ranges} <= {*BUILDERS[collective], "direct"}, size
        for collective in ("broadcast", "reduce"):
            large = plan.lookup(table[collective], 64 * KB * KB).algorithm
            assert large == ("direct" if steps or size == 2 else "ring"), size  # which spares the root's link


def phases(made: Plan, batches: Batches) -> int:
    """The longest chain of messages, where a batch sends nothing before all that it waits for has come."""
    outcomes = run_round(made, 0, UNLIMITED).outcomes
    sends = [[step for step, of in enumerate(program) if of.send] for program in made.channels[0].programs]

    @functools.cache
    def until(rank: int, batch: int) -> int:
        before = until(rank, batch - 1) if batch else 0
        sources = [
            (peer, sends[peer][send]) for step in batches[rank, 0][batch] for peer, send in outcomes[rank][step].taken
        ]
        return max([before, *(1 + until(peer, of_step(peer, step)) for peer, step in sources)])

    def of_step(rank: int, step: int) -> int:
        return next(number for number, batch in enumerate(batches[rank, 0]) if step in batch)

    return max(until(rank, len(of_rank) - 1) for (rank, _), of_rank in batches.items())


def link_reads(made: Plan) -> float:
    """Through the busiest link in one direction, in units of the tensor."""
    received = [[peer for step in program for peer in step.recv] for program in made.channels[0].programs]
    sent = [sum(peers.count(rank) for peers in received) for rank in range(made.size)]
    return max(*map(len, received), *sent) / made.channels[0].chunks


def touched(made: Plan) -> float:
    """What the busiest rank reads and writes, in units of the tensor."""
    (channel,) = made.channels
    return (
        max(
            sum(len(step.recv) + (step.read is not Read.NONE) + bool(step.send) + step.write for step in program)
            for program in channel.programs
        )
        / channel.chunks
    )


def in_one_kernel(library: Any, made: Plan, bytes: int) -> float:
    """Seconds, by the costs in the module's first lines, of the plans and batches there are."""
    batches = batches_of(library, made, slot_depth(made.size))
    return phases(made, batches) * of_gpus.PHASE + link_reads(made) * bytes / of_gpus.LINK


def in_steps(library: Any, made: Plan, bytes: int) -> float:
    """The same for a rank's turns on a shared GPU."""
    batches = batches_of(library, made, slot_depth(made.size))
    return max(map(len, batches.values())) * of_gpus.BATCH + touched(made) * bytes / of_gpus.MEMORY


@pytest.mark.slow
@pytest.mark.parametrize("algorithm", ["one_shot", "two_shot"])
def test_the_model_counts_the_batches_of_the_engine(library: Any, algorithm: str) -> None:
    for size in range(2, 65):
        made = plan.build("all_reduce", algorithm, size)
        of_engine = batches_of(library, made, slot_depth(size))
        assert {len(of_rank) for of_rank in of_engine.values()} == {of_gpus.batches(algorithm, size)}


@pytest.mark.parametrize("steps", [False, True])
@pytest.mark.parametrize("size", [4, 8, 16])
def test_the_switch_is_where_the_model_has_both_equal(library: Any, size: int, steps: bool) -> None:
    seconds = in_steps if steps else in_one_kernel
    end = end_of_one_shot(size, steps=steps)
    assert end is not None
    for bytes, one_shot_wins in ((end, True), (2 * end + 2, False)):
        one, two = (seconds(library, plan.build("all_reduce", name, size), bytes) for name in ("one_shot", "two_shot"))
        assert (one < two) is one_shot_wins


@pytest.mark.parametrize("collective", ["broadcast", "reduce"])
@pytest.mark.parametrize("size", [4, 8, 16])
def test_a_ring_begins_where_the_model_has_it_equal_to_the_direct_way(
    library: Any,
    size: int,
    collective: str,
) -> None:
    (begin,) = (rule.begin for rule in of_gpus.rules(size, steps=False) if rule.collective == collective)
    for bytes, direct_wins in ((begin, True), (2 * begin + 2, False)):
        direct, ring = (
            in_one_kernel(library, plan.build(collective, name, size), bytes) for name in ("direct", "ring")
        )
        assert (direct < ring) is direct_wins


class Engine:
    """What `backend` gives plans to."""

    def __init__(self) -> None:
        self.plans: dict[tuple[str, int], int] = {}  # digests, by collective and most bytes

    def add_plan(self, collective: str, lowered: list[int], digest: int, most_bytes: int, slice_bytes: int) -> None:
        self.plans[collective, most_bytes] = digest


def digest_of(collective: str, algorithm: str, size: int) -> int:
    return plan.digest(plan.build(collective, algorithm, size))


def test_the_user_comes_first_then_a_topology_then_these() -> None:
    built_in = of_gpus.rules(4, steps=False)
    tree = plan.build("reduce", "tree", 4)
    topology = GroupTopology("NVML", "machine", (), (Served(KB, None, tree, 1, 1, ""),))
    engine = Engine()
    options = Options(algorithms="all_reduce:ring:4K-64K")
    choices.add_plans(4, options, topology, built_in, engine)  # type: ignore[arg-type]
    of_all_reduce = {most: digest for (collective, most), digest in engine.plans.items() if collective == "all_reduce"}
    one_shot, two_shot, ring = (digest_of("all_reduce", name, 4) for name in ("one_shot", "two_shot", "ring"))
    assert of_all_reduce == {
        4 * KB - 1: one_shot,
        64 * KB - 1: ring,
        512 * KB - 1: one_shot,
        choices.ANY_SIZE: two_shot,
    }
    assert engine.plans["reduce", KB - 1] == digest_of("reduce", "direct", 4)
    assert engine.plans["reduce", choices.ANY_SIZE] == plan.digest(tree)  # although a ring is built in
    assert engine.plans["broadcast", choices.ANY_SIZE] == digest_of("broadcast", "ring", 4)
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
