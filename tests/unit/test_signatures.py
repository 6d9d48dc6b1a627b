"""Direct calls take what torch's namesakes take: the same names, in the same order, with the same defaults.

Every difference is in DIFFERENCES with its reason, and no other is allowed.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable
from typing import Any

import pytest
import torch.distributed as dist

import ringreduce

DIFFERENCES = {
    "all_reduce": {
        "out": "ours alone, after torch's: the result in another tensor",
        "wire_dtype": "ours alone, after torch's: fewer bytes between hosts",
        "feedback": "ours alone, after torch's: what rounding cuts off is added later",
    },
    "reduce": {"out": "ours alone, after torch's: the result in another tensor"},
}
"""Parameters of ours that torch does not have, by function."""

NOT_IN_TORCH = {
    "Agreement": "what agree() returns",
    "Feedback": "what rounding cuts off",
    "Op": "operators of the user's own",
    "Options": "the knobs of a group",
    "Plan": "algorithms are data",
    "Step": "algorithms are data",
    "agree": "torch's shrink_group needs to be told who is lost",
    "arena_stats": "memory that other ranks read",
    "as_gloo": "whom torch's name of a backend means",
    "dump_flight_record": "torch's recorder is for NCCL alone",
    "empty": "memory that other ranks read",
    "empty_like": "memory that other ranks read",
    "exscan": "MPI has it",
    "register_plan": "algorithms are data",
    "scan": "MPI has it",
    "share": "memory that other ranks read",
    "share_allocations": "memory that other ranks read",
    "stats": "counters",
    "topology": "the machine's links",
    "topology_of": "the machine's links",
    "use_nccl": "communicators of others",
    "verify": "algorithms are data",
    "zeros": "memory that other ranks read",
}

OLD_NAMES = {"all_gather_single": "all_gather_into_tensor", "reduce_scatter_single": "reduce_scatter_tensor"}
"""torch has the first of each from 2.13 on, and the second will go."""


def parameters(function: Callable[..., Any]) -> list[tuple[str, Any]]:
    return [(each.name, each.default) for each in inspect.signature(inspect.unwrap(function)).parameters.values()]


def namesake(name: str) -> Callable[..., Any] | None:
    found = getattr(dist, name, None) or getattr(dist, OLD_NAMES.get(name, name), None)
    return found if callable(found) else None


def test_each_name_is_of_torch_or_listed() -> None:
    others = {name for name in ringreduce.__all__ if namesake(name) is None}
    assert others == set(NOT_IN_TORCH)
    assert {*OLD_NAMES, *OLD_NAMES.values()} <= set(ringreduce.__all__)


@pytest.mark.parametrize("name", sorted(set(ringreduce.__all__) - set(NOT_IN_TORCH) - {"P2POp"}))
def test_takes_what_torch_takes(name: str) -> None:
    torchs = namesake(name)
    assert torchs is not None
    allowed = DIFFERENCES.get(name, {})
    ours = [*inspect.signature(getattr(ringreduce, name)).parameters.values()]
    assert {each.name for each in ours[len(ours) - len(allowed) :]} == set(allowed), "they come after torch's"
    same = [(each.name, each.default) for each in ours if each.name not in allowed]
    assert same == parameters(torchs)[: len(same)], "the names, their order or their defaults differ"
    later = {each for each, _ in parameters(torchs)[len(same) :]}
    assert not later, f"torch's {name} has also {later}"


def test_all_differences_are_there() -> None:
    for name, extra in DIFFERENCES.items():
        assert extra.keys() <= {each for each, _ in parameters(getattr(ringreduce, name))}
        torchs = namesake(name)
        assert torchs is not None and not extra.keys() & {each for each, _ in parameters(torchs)}
