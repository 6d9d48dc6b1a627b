"""Batches, and the order in which one stream takes those of several ranks: every step once, after what it takes and
after its slot was read, with as few slots as `verify` accepts; and no order where there is none, or for other batches.
"""

from __future__ import annotations

import collections
import ctypes
import itertools
from collections.abc import Sequence
from typing import Any

import bodies.turns
import pytest
from bodies.turns import UNLIMITED, Batches, arguments, batches_of, places
from hypothesis import given, settings
from hypothesis import strategies as st

from ringreduce.plan import BUILDERS, Channel, Plan, PlanError, Read, Step, build, ring, slot_depth, verify
from ringreduce.plan.symbolic import run_round

library = bodies.turns.library  # a fixture

ALGORITHMS = [(collective, algorithm) for collective in BUILDERS for algorithm in BUILDERS[collective]]
MOST_STEPS = 16  # of a batch: kMostSteps

Turn = tuple[int, int]  # rank, batch among the rank's of all channels


class NoOrder(Exception):
    pass


def order(library: Any, plan: Plan, depth: int, batches: Batches, root: int = 0) -> list[Turn]:
    number = {
        (rank, channel, step): number
        for (rank, channel), of_channel in batches.items()
        for number, batch in enumerate(of_channel)
        for step in batch
    }
    steps = list(places(plan, root))
    numbers = (ctypes.c_uint32 * len(steps))(*(number[place] for place in steps))
    most = sum(map(len, batches.values()))
    turns, message = (ctypes.c_uint32 * 2 * most)(), ctypes.create_string_buffer(256)
    count = library.order_of_batches(*arguments(plan, depth, root), numbers, turns, ctypes.c_size_t(most), message)
    if count < 0:
        raise NoOrder(message.value.decode())
    assert count == most  # no batch is left out, and none comes twice, if all differ
    return [tuple(turn) for turn in turns]


def found_order(library: Any, plan: Plan, depth: int, root: int = 0) -> list[Turn]:
    """That of the batches there are; both are checked."""
    batches = batches_of(library, plan, depth, root)
    check_data(plan, batches, root)
    turns = order(library, plan, depth, batches, root)
    check(plan, depth, batches, turns, root)
    return turns


def check_data(plan: Plan, batches: Batches, root: int = 0) -> None:
    """That every step is in one batch, and that those which need each other's data are in different ones, in order."""
    for (rank, index), of_channel in batches.items():
        program = plan.channels[index].programs[(rank - root) % plan.size]
        assert sorted(itertools.chain(*of_channel)) == list(range(len(program)))
        assert all(0 < len(batch) <= MOST_STEPS and batch == sorted(batch) for batch in of_channel)
        number = {step: number for number, batch in enumerate(of_channel) for step in batch}
        for first, second in itertools.combinations(range(len(program)), 2):
            a, b = program[first], program[second]
            if a.chunk == b.chunk and (a.write or b.write):
                assert number[first] < number[second]


def check(plan: Plan, depth: int, batches: Batches, turns: Sequence[Turn], root: int = 0) -> None:
    """That the batches may be taken in this order, where nothing but the order makes one wait for another."""
    assert len(set(turns)) == len(turns)
    rounds = [run_round(plan, index, UNLIMITED) for index in range(len(plan.channels))]
    done: collections.Counter[int] = collections.Counter()  # batches of a rank
    unread: dict[
        tuple[int, int, int], set[int]
    ] = {}  # of what a rank sent in a channel, those that have yet to read it
    in_order = {
        rank: [(index, batch) for index in range(len(plan.channels)) for batch in batches[rank, index]]
        for rank in range(plan.size)
    }
    for of_group, number in turns:
        rank = (of_group - root) % plan.size  # of the plan
        assert number == done[of_group], "a rank's batches are taken in their order"
        done[of_group] += 1
        index, batch = in_order[of_group][number]
        program = plan.channels[index].programs[rank]
        send_index = {step: i for i, step in enumerate(i for i, step in enumerate(program) if step.send)}
        for step in batch:
            for peer, send in rounds[index].outcomes[rank][step].taken:
                assert rank in unread.get((index, peer, send), ()), "what a step takes has been sent"
            if step in send_index:
                held = (index, rank, send_index[step] - depth)
                assert held[2] < 0 or unread.get(held) == set(), "what the slot held has been read"
        for step in batch:
            if step in send_index:
                unread[index, rank, send_index[step]] = set(program[step].send)
            for peer, send in rounds[index].outcomes[rank][step].taken:
                unread[index, peer, send].remove(rank)
    assert not any(unread.values()), "a round leaves nothing in a slot"


def least_depth(plan: Plan) -> int:
    for depth in itertools.count(1):
        try:
            verify(plan, depth=depth)
        except PlanError as error:
            assert "slots" in str(error)
        else:
            return depth
    raise AssertionError


@pytest.mark.slow
@pytest.mark.parametrize(("collective", "algorithm"), ALGORITHMS)
def test_built_in_plans_have_an_order_with_as_few_slots_as_they_need(
    library: Any, collective: str, algorithm: str
) -> None:
    for size in range(1, 10):
        plan = build(collective, algorithm, size)
        least = least_depth(plan)
        for depth in {least, slot_depth(size), UNLIMITED}:
            found_order(library, plan, depth)
        if least > 1:
            with pytest.raises(NoOrder, match=f"with {least - 1} slots, step .* can never be taken"):
                order(library, plan, least - 1, batches_of(library, plan, least - 1))


@pytest.mark.parametrize("collective", ["broadcast", "reduce", "gather", "scatter"])
def test_any_rank_may_be_the_root(library: Any, collective: str) -> None:
    for algorithm in BUILDERS[collective]:
        plan = build(collective, algorithm, 5)
        for root in range(5):
            found_order(library, plan, slot_depth(5), root)


@settings(max_examples=40)
@given(data=st.data())
def test_rings_in_any_order_have_one(library: Any, data: st.DataObject) -> None:
    size = data.draw(st.integers(2, 8))
    one = st.tuples(st.permutations(range(size)), st.integers(1, 7))
    rings = data.draw(st.lists(one, min_size=1, max_size=3))
    builders = [ring.all_reduce, ring.reduce_scatter, ring.all_gather, ring.broadcast, ring.reduce]
    plan = data.draw(st.sampled_from(builders))(rings)
    for depth in (least_depth(plan), slot_depth(size)):
        found_order(library, plan, depth)


@pytest.mark.parametrize(
    ("collective", "algorithm", "most"),
    [
        ("all_reduce", "one_shot", 2),
        ("all_reduce", "two_shot", 3),  # contributions, combination, collection
        ("reduce_scatter", "direct", 2),
        ("all_gather", "direct", 2),
        ("all_to_all", "direct", 2),  # though its sends and receives alternate
        ("scatter", "direct", 2),
        ("gather", "direct", 2),
        ("reduce", "direct", 2),
    ],
)
def test_direct_plans_have_few_batches(library: Any, collective: str, algorithm: str, most: int) -> None:
    for size in range(2, 10):
        batches = batches_of(library, build(collective, algorithm, size), slot_depth(size))
        assert max(map(len, batches.values())) == most


def test_more_steps_than_a_batch_may_have(library: Any) -> None:
    plan = build("all_reduce", "two_shot", 40)
    found_order(library, plan, slot_depth(40))
    assert {len(of_rank) for of_rank in batches_of(library, plan, slot_depth(40)).values()} == {3 + 1 + 3}


def joined(batches: Batches, first: int, second: int) -> Batches:
    """With two batches of every rank in one."""
    return {
        key: [*of_rank[:first], sorted(of_rank[first] + of_rank[second]), *of_rank[second + 1 :]]
        for key, of_rank in batches.items()
    }


@pytest.mark.parametrize(
    ("collective", "algorithm", "first"),
    [
        ("all_reduce", "one_shot", 0),
        ("all_reduce", "two_shot", 0),
        ("all_reduce", "two_shot", 1),
        ("all_to_all", "direct", 0),
    ],
)
def test_a_batch_that_holds_back_what_it_waits_for_is_found_out(
    library: Any, collective: str, algorithm: str, first: int
) -> None:
    plan = build(collective, algorithm, 4)
    batches = batches_of(library, plan, slot_depth(4))
    with pytest.raises(NoOrder, match="can never be taken"):
        order(library, plan, slot_depth(4), joined(batches, first, first + 1))


def test_a_batch_that_uses_a_slot_twice_is_found_out(library: Any) -> None:
    plan = build("all_reduce", "two_shot", 4)  # 4 sends a round
    batches = batches_of(library, plan, 4)
    order(library, plan, 4, batches)
    with pytest.raises(NoOrder, match="with 2 slots"):
        order(library, plan, 2, batches)


@settings(max_examples=60)
@given(data=st.data())
def test_any_order_of_messages_has_one_in_batches(library: Any, data: st.DataObject) -> None:
    size = data.draw(st.integers(2, 6))
    programs = [[Step(rank * size + rank, Read.INPUT, write=True)] for rank in range(size)]
    pairs = [pair for pair in itertools.product(range(size), repeat=2) if pair[0] != pair[1]]
    sent = set()
    for source, target in data.draw(st.permutations(pairs * 2)):  # of each pair, first it sends, then it receives
        chunk = source * size + target
        if (source, target) in sent:
            programs[target].append(Step(chunk, recv=(source,), write=True))
        else:
            sent.add((source, target))
            programs[source].append(Step(chunk, Read.INPUT, send=(target,)))
    plan = Plan("messages", "all_to_all", size, (Channel(1, 1, tuple(map(tuple, programs))),))
    for depth in {least_depth(plan), slot_depth(size)}:
        found_order(library, plan, depth)
