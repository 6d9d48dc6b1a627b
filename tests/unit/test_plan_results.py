"""Lowered plans, executed on numbers by a small engine of their own: slots are really reused, data is really moved.

The interpreter below knows the array that `lower` makes and nothing of the symbolic proof.  Ranks take turns at
random, run apart over rounds as far as their slots allow, and read the slot that the array says.
"""

import pytest
from bodies.plan_results import check_results, decode
from hypothesis import given, settings
from hypothesis import strategies as st

import ringreduce.plan.ring as ring
from ringreduce.plan import BUILDERS, Plan, build, digest, lower

ALGORITHMS = [(collective, algorithm) for collective in BUILDERS for algorithm in BUILDERS[collective]]


@pytest.mark.parametrize("in_place", [False, True], ids=["out_of_place", "in_place"])
@pytest.mark.parametrize(("collective", "algorithm"), ALGORITHMS)
def test_plans_compute_what_the_collective_is(collective: str, algorithm: str, in_place: bool) -> None:
    for size in (1, 2, 3, 4, 5, 8):
        plan = build(collective, algorithm, size)
        for count, width in ((0, 4), (1, 4), (size - 1, 1), (size + 1, 1), (37, 2)):
            if not (in_place and collective == "all_to_all"):
                check_results(plan, count, width, in_place, seed=size)


@settings(max_examples=30)
@given(data=st.data(), seed=st.integers(0, 2**32))
def test_rings_with_weights_share_the_data(data: st.DataObject, seed: int) -> None:
    size = data.draw(st.integers(2, 6))
    one = st.tuples(st.permutations(range(size)), st.integers(1, 5))
    rings = data.draw(st.lists(one, min_size=1, max_size=3))
    builder = data.draw(
        st.sampled_from([ring.all_reduce, ring.reduce_scatter, ring.all_gather, ring.broadcast, ring.reduce])
    )
    check_results(builder(rings), data.draw(st.integers(0, 60)), data.draw(st.integers(1, 5)), True, seed)


def test_the_array_of_a_small_plan_word_by_word() -> None:
    assert lower(build("all_reduce", "one_shot", 2)) == [
        *(2, 1),  # size, channels
        *(0, 1, 1, 1),  # share begin, end, total; chunks
        *(2, 1),  # rank 0: steps, sends per round
        *(0, 1, 0, 1, 0, 0, 0, 0, 1, 1),  # chunk 0, read input, 1 input, phase 0, local first, no receive, send to 1
        *(0, 1, 1, 2, 0, 1, 0, 1, 1, 0, 0),  # write, 2 inputs, phase 1, local operand before 1's send 0
        *(2, 1),  # rank 1
        *(0, 1, 0, 1, 0, 0, 0, 0, 1, 0),
        *(0, 1, 1, 2, 0, 1, 1, 1, 0, 0, 0),  # local operand after the receive from 0 of its send 0
    ]


def test_shares_are_cumulative() -> None:
    rings = [(range(3), 2), (range(3)[::-1], 1), ((1, 0, 2), 4)]
    shares = [channel.share for channel in decode(lower(ring.all_gather(rings)))]
    assert shares == [(0, 2, 7), (2, 3, 7), (3, 7, 7)]


def test_operands_stand_in_rank_order() -> None:
    for rank, program in enumerate(decode(lower(build("all_reduce", "two_shot", 5)))[0].programs):
        (combine,) = (step for step in program if step.read and step.recv)
        peers = [peer for peer, _ in combine.recv]
        peers.insert(combine.local_position, rank)
        assert peers == [0, 1, 2, 3, 4]


@pytest.mark.parametrize("size", [2, 3, 8])
def test_what_two_shot_hands_out_is_returned_and_nothing_else(size: int) -> None:
    for rank, program in enumerate(decode(lower(build("all_reduce", "two_shot", size)))[0].programs):
        assert [step.returned for step in program] == [int(step.chunk != rank) for step in program]
    (channel,) = decode(lower(build("all_reduce", "one_shot", size)))
    assert not any(step.returned for program in channel.programs for step in program)


def test_a_digest_tells_plans_apart_and_stays() -> None:
    plans = [build(*key, size) for key in ALGORITHMS for size in (2, 3)]
    digests = {digest(plan) for plan in plans}
    same = {(plan.collective, tuple(lower(plan))) for plan in plans}
    assert len(digests) == len(same)
    assert all(0 <= number < 2**63 for number in digests)
    assert digest(Plan.from_json(plans[0].to_json())) == digest(plans[0])
