"""The order in which one stream takes the steps of several ranks: every step once, after what it takes and after its
slot was read, with as few slots as `verify` accepts; and no order where there is none.
"""

from __future__ import annotations

import collections
import ctypes
import itertools
import subprocess
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from stand_in.build import WARNINGS

from ringreduce.plan import BUILDERS, Plan, PlanError, build, lower, ring, slot_depth, verify

ROOT = Path(__file__).resolve().parents[2]
SOURCES = ["tests/unit/turns.cpp", "csrc/engine/gpu/turns.cpp", "csrc/engine/program.cpp"]
OPERATIONS = ["all_reduce", "reduce_scatter", "all_gather", "broadcast", "reduce", "gather", "scatter", "all_to_all"]
ALGORITHMS = [(collective, algorithm) for collective in BUILDERS for algorithm in BUILDERS[collective]]
UNLIMITED = 1 << 20  # slots

Turn = tuple[int, int, int]  # rank, channel, step


class NoOrder(Exception):
    pass


@pytest.fixture(scope="module")
def library(tmp_path_factory: pytest.TempPathFactory) -> Any:
    path = tmp_path_factory.mktemp("turns") / "turns.so"
    flags = ["-std=c++20", "-O1", *WARNINGS, "-Icsrc", "-shared", "-fPIC"]
    subprocess.run(["c++", *flags, *SOURCES, "-o", path], cwd=ROOT, check=True)
    return ctypes.CDLL(str(path))


def order(library: Any, plan: Plan, depth: int, root: int = 0) -> list[Turn]:
    lowered = lower(plan)
    words = (ctypes.c_int32 * len(lowered))(*lowered)
    most = sum(len(program) for channel in plan.channels for program in channel.programs)
    turns, message = (ctypes.c_uint32 * 3 * most)(), ctypes.create_string_buffer(256)
    count = library.order_of_steps(
        *(OPERATIONS.index(plan.collective), words, ctypes.c_size_t(len(words))),
        *(plan.size, root, len(plan.channels), ctypes.c_uint32(depth), turns, ctypes.c_size_t(most), message),
    )
    if count < 0:
        raise NoOrder(message.value.decode())
    assert count == most  # no step is left out, and none comes twice, if all differ
    return [tuple(turn) for turn in turns]


def check(plan: Plan, depth: int, turns: Sequence[Turn], root: int = 0) -> None:
    """That the steps may be taken in this order, where nothing but the order makes one wait for another."""
    assert len(set(turns)) == len(turns)
    done: collections.Counter[tuple[int, int]] = collections.Counter()  # steps of a rank in a channel
    sends: collections.Counter[tuple[int, int]] = collections.Counter()  # and slots that it has filled
    on_the_way: dict[tuple[int, int, int], collections.deque[int]] = collections.defaultdict(collections.deque)
    readers: dict[tuple[int, int, int], set[int]] = {}  # of what a rank sent, those that have yet to read it
    for of_group, channel, number in turns:
        rank = (of_group - root) % plan.size  # of the plan
        step = plan.channels[channel].programs[rank][number]
        assert number == done[rank, channel], "a rank's steps are taken in their order"
        done[rank, channel] += 1
        for peer in step.recv:
            assert on_the_way[channel, peer, rank], "what a step takes has been sent"
        if step.send:
            send = sends[rank, channel]
            sends[rank, channel] += 1
            assert not readers.get((rank, channel, send - depth)), "what the slot held has been read"
            readers[rank, channel, send] = set(step.send)
            for peer in step.send:
                on_the_way[channel, rank, peer].append(send)
        for peer in step.recv:
            readers[peer, channel, on_the_way[channel, peer, rank].popleft()].remove(rank)
    assert not any(readers.values()), "a round leaves nothing in a slot"


def least_depth(plan: Plan) -> int:
    for depth in itertools.count(1):
        try:
            verify(plan, depth=depth)
        except PlanError as error:
            assert "slots" in str(error)
        else:
            return depth
    raise AssertionError


@pytest.mark.parametrize(("collective", "algorithm"), ALGORITHMS)
def test_built_in_plans_have_an_order_with_as_few_slots_as_they_need(
    library: Any, collective: str, algorithm: str
) -> None:
    for size in range(1, 9):
        plan = build(collective, algorithm, size)
        least = least_depth(plan)
        for depth in {least, slot_depth(size), UNLIMITED}:
            check(plan, depth, order(library, plan, depth))
        if least > 1:
            with pytest.raises(NoOrder, match=f"with {least - 1} slots, step .* can never be taken"):
                order(library, plan, least - 1)


@pytest.mark.parametrize("collective", ["broadcast", "reduce", "gather", "scatter"])
def test_any_rank_may_be_the_root(library: Any, collective: str) -> None:
    for algorithm in BUILDERS[collective]:
        plan = build(collective, algorithm, 5)
        for root in range(5):
            check(plan, slot_depth(5), order(library, plan, slot_depth(5), root), root)


@settings(max_examples=40)
@given(data=st.data())
def test_rings_in_any_order_have_one(library: Any, data: st.DataObject) -> None:
    size = data.draw(st.integers(2, 8))
    one = st.tuples(st.permutations(range(size)), st.integers(1, 7))
    rings = data.draw(st.lists(one, min_size=1, max_size=3))
    builders = [ring.all_reduce, ring.reduce_scatter, ring.all_gather, ring.broadcast, ring.reduce]
    plan = data.draw(st.sampled_from(builders))(rings)
    depth = least_depth(plan)
    check(plan, depth, order(library, plan, depth))
