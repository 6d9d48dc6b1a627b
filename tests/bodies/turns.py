"""The library that orders the batches of ranks that share a GPU, as tests call it."""

from __future__ import annotations

import ctypes
from collections.abc import Iterator
from typing import Any

import pytest
from stand_in import build

from ringreduce.plan import Plan, lower

OPERATIONS = ["all_reduce", "reduce_scatter", "all_gather", "broadcast", "reduce", "gather", "scatter", "all_to_all"]
UNLIMITED = 1 << 20  # slots
Place = tuple[int, int, int]  # rank, channel, step
Batches = dict[tuple[int, int], list[list[int]]]  # of each rank and channel: the steps of each batch


@pytest.fixture(scope="module")
def library() -> Any:
    return ctypes.CDLL(str(build.build(build.ROOT / "build/stand_in", build.TURNS) / "turns.so"))


def places(plan: Plan, root: int) -> Iterator[Place]:
    """Of each step, by the ranks of the group."""
    for rank in range(plan.size):
        for index, channel in enumerate(plan.channels):
            for number in range(len(channel.programs[(rank - root) % plan.size])):
                yield rank, index, number


def arguments(plan: Plan, depth: int, root: int) -> tuple[Any, ...]:
    lowered = lower(plan)
    words = (ctypes.c_int32 * len(lowered))(*lowered)
    return (
        *(OPERATIONS.index(plan.collective), words, ctypes.c_size_t(len(words))),
        *(plan.size, root, len(plan.channels), ctypes.c_uint32(depth)),
    )


def batches_of(library: Any, plan: Plan, depth: int, root: int = 0) -> Batches:
    steps = list(places(plan, root))
    numbers = (ctypes.c_uint32 * len(steps))()
    library.batches_of_steps(*arguments(plan, depth, root), numbers)
    batches: Batches = {(rank, index): [] for rank in range(plan.size) for index in range(len(plan.channels))}
    for (rank, channel, step), number in zip(steps, numbers, strict=True):
        of_channel = batches[rank, channel]
        of_channel += [[] for _ in range(len(of_channel), number + 1)]
        of_channel[number].append(step)
    return batches
